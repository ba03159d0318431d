"""isobit: reinforcement-learning post-training in FP8, where rollouts and learner compute the same
bits.

The public names are loaded on first use, so that `isobit --help` and the reward workers never
import torch. Type checkers read the imports below instead, and so know every name as what it is
(tests/test_typing.py).
"""

from isobit.run import early_interrupt

early_interrupt.watch()  # before the imports below, which take a while

from isobit.moved import keep_old_names  # noqa: E402

keep_old_names()

import os  # noqa: E402
import sys  # noqa: E402
from importlib import import_module  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from isobit.config import load_config as load_config
    from isobit.data.turns import Step as Step
    from isobit.engine.engine import Engine as Engine
    from isobit.engine.types import Completion as Completion
    from isobit.engine.types import Sampling as Sampling
    from isobit.errors import IsobitError as IsobitError
    from isobit.errors import RunFailed as RunFailed
    from isobit.model import Model as Model
    from isobit.precision import Precision as Precision
    from isobit.training.train import resume as resume
    from isobit.training.train import train as train

# GNU's OpenMP, PyTorch's pool of threads, reads this when it is loaded. By default its threads spin
# for milliseconds at the end of every operator, on cores that our own threads and other processes
# want (docs/log.md); with this for microseconds, then they sleep. Where PyTorch is there already,
# `kernels/native/openmp.py` has the same done.
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# PyTorch reads this at its first allocation: tensors of 2 MiB and more then ask for huge pages.
# Every step's gradients are fresh memory, and a page of 4 KiB at a time takes longer than the
# product that writes them (docs/log.md).
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

_HOMES = {
    "Completion": "isobit.engine.types",
    "Engine": "isobit.engine.engine",
    "IsobitError": "isobit.errors",
    "Model": "isobit.model",
    "Precision": "isobit.precision",
    "RunFailed": "isobit.errors",
    "Sampling": "isobit.engine.types",
    "Step": "isobit.data.turns",
    "load_config": "isobit.config",
    "resume": "isobit.training.train",
    "train": "isobit.training.train",
}

__all__ = [
    "Completion",
    "Engine",
    "IsobitError",
    "Model",
    "Precision",
    "RunFailed",
    "Sampling",
    "Step",
    "load_config",
    "resume",
    "train",
]
__version__ = "0.1.0"

if not TYPE_CHECKING:  # a checker that saw it would take any name, also one that is misspelled

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'isobit' has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
