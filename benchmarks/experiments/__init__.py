"""Experiments: what a choice costs, measured on small models, with raw numbers beside each page of
docs/experiments."""
