"""Rollout: continuous batching over a paged cache of keys and values, counter-based sampling.
`types.py`, what goes in and comes out, imports no torch."""
