"""What LiveCodeBench runs before each program: imports that a solution may leave out.

Source: Jain et al. 2024, `import_string` of its tests.
"""

import re

_TYPES = ("builtins", "typing")
_ALL = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json"),
)
_IMPORTS = "".join(
    [f"from {name} import *\n" for name in (*_ALL, *_TYPES)]
    + [f"import {name}\n" for name in _ALL]
    + ["sys.setrecursionlimit(50000)\n"]
)
_FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)


def with_imports(program: str) -> str:
    """Return a program behind these imports, and its own of `__future__` in front of them, where
    Python wants them."""
    future = "".join(line.rstrip() + "\n" for line in _FUTURE.findall(program))
    return future + _IMPORTS + _FUTURE.sub("", program)
