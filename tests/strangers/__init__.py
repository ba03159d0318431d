"""Run directories of strangers: whatever is in one, each command succeeds or says one line, and
does not hang."""
