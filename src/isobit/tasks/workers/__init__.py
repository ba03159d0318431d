"""Processes that run what a user wrote: started, fed, killed with everything they started. Imports
no torch."""
