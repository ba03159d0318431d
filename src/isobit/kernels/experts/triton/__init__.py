"""A mixture of experts on an NVIDIA GPU."""
