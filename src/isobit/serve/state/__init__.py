"""What a server keeps over its end, in a folder of its own: sessions, training runs, their
requests, and checkpoints. Knows no torch."""
