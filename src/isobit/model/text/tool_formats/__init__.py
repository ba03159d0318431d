"""How models write calls of tools, each format in a file; `table.py` has them by name."""
