"""Reward functions and how they are run: in worker processes, with a deadline. Imports no torch."""
