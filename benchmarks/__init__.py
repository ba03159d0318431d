"""The benchmarks; `isobit` comes before torch, whose threads it tells how to wait."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

if (
    find_spec("isobit") is None
):  # not installed, as on a machine without a network: the tree's own, also for children
    _SOURCE = str(Path(__file__).resolve().parents[1] / "src")
    sys.path.insert(0, _SOURCE)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [_SOURCE, os.environ.get("PYTHONPATH")])
    )

import isobit  # noqa: F401
