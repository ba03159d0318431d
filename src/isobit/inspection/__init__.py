"""`isobit inspect`: the effect of a precision flow on a model, without training it."""

from isobit.inspection.command import inspect_command

__all__ = ["inspect_command"]
