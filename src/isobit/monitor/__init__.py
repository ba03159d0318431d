"""Looking at runs: the live screen, the report, and copies of metrics in trackers. None of it
imports torch."""
