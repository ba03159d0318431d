"""The effect of a precision flow on a model, without training it; the command is
`training/commands/inspect.py`."""
