"""What a run takes of memory: planned before it starts, and counted while it runs."""
