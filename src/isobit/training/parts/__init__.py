"""What a run is put together from, of each kind, opened before its directory is written."""
