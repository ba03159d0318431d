"""A training run: the loop (`loop.py`, open it first), the open session and its parts, supervised
training."""
