"""Environments: what answers a model between its turns, such as tools, and how it is run: in worker
processes, with a deadline a turn. Imports no torch."""
