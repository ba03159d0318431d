"""Environments that are wrong, each in its own way: `python -m tests.environments.wrong [NAME ...]`
runs each by the command and prints a table of name and line."""
