"""The exceptions that isobit raises for its users.

A message is one line that says what is wrong, where, and what would be right. The command line prints it on
stderr, without a traceback, and exits with `exit_code`. Broken internal invariants are `assert`s instead.
"""


class IsobitError(Exception):
    """A user's mistake: a wrong key, a missing file, a malformed row, a bad checkpoint."""

    exit_code = 2


class RunFailed(IsobitError):
    """A run that started well and had to stop: a reward function failed, or too many steps in a row were bad."""

    exit_code = 1


class NonFiniteError(IsobitError):
    """NaN or infinity where a number is needed. The learner skips a step in which this happens, and counts it."""
