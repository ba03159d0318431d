"""Processes of our own that run a module, without the code that lies in the directory they are
started in.

`python -m` looks there first: a file `difflib.py` next to a downloaded model would be run in the
place of Python's own. `-P` prevents that from Python 3.11 on; this does on every version. Left out:
PYTHONPATH, which its user answers for.
"""

import sys

_RUN = (
    "import sys; sys.path[:] = filter(None, sys.path); import runpy; runpy.run_module({!r}, "
    "None, '__main__', True)"
)


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command `python -m module arguments` by which the present directory is not
    searched."""
    return [sys.executable, "-c", _RUN.format(module), *arguments]
