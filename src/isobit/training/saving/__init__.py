"""The state that a run goes on from, and when it is saved."""
