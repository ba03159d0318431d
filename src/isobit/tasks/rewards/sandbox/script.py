"""Runs the program of `program.py` inside the cage as `python program.py` does: as `__main__`, with
`exit` and `quit`.

Python runs there without `site` (`-S`), which is where these two come from and also what would add
installed packages.
"""

import site
import sys
import types


def main() -> None:
    """Run program.py in this process as its `__main__`."""
    path = sys.argv[0] = sys.path[0].rstrip("/") + "/program.py"
    with open(path, "rb") as file:
        source = file.read()
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = path
    site.setquit()
    run = exec
    run(compile(source, path, "exec", dont_inherit=True), vars(module))


if __name__ == "__main__":
    main()
