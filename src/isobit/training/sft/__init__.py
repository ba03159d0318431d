"""Supervised training on right answers: the run, and which tokens of a row are learned."""
