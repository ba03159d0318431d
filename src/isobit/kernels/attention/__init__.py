"""Attention over stored keys and values, forward and backward."""
