"""Queries, keys and values on an NVIDIA GPU."""
