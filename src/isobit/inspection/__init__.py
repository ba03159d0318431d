"""`isobit inspect`: what a precision flow does to a model, without training it."""

from isobit.inspection.command import inspect_command

__all__ = ["inspect_command"]
