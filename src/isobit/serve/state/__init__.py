"""The state that a server keeps over its end, in one folder: sessions, training runs, their
requests, and checkpoints. Knows no torch."""
