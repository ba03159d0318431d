"""Attention on an NVIDIA GPU."""
