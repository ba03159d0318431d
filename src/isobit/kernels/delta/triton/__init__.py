"""Linear attention on an NVIDIA GPU."""
