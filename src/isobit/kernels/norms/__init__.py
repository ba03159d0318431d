"""Norms, and the gates of MLPs."""
