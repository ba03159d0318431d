"""Norms and gates on an NVIDIA GPU."""
