"""Engines of others as contestants: each a script that an interpreter of its own runs."""
