"""A run's directory: its files, checkpoints and metrics, as they are written and read. Imports no
torch."""
