"""Old names of modules that users name, for one release: each imports the module where it is now.

Left out: names inside the package that no page has told (docs/api.md).
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "isobit.environments": "isobit.tasks.environments",
    "isobit.environments.base": "isobit.data.turns",
    "isobit.tasks.calculator": "isobit.tasks.builtin.calculator",
    "isobit.tasks.guess": "isobit.tasks.builtin.guess",
    "isobit.tasks.lookup": "isobit.tasks.builtin.lookup",
}


class _Alias:
    """A finder and loader of one old name, called where no other finder knows the name."""

    def __init__(self, new: str) -> None:
        self._new = new
        self._spec: ModuleSpec | None = None

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how an old name is imported, with a warning; None for other names."""
        if name not in MOVED:
            return None
        new = MOVED[name]
        warnings.warn(f"{name} is called {new} now", FutureWarning, stacklevel=2)
        return ModuleSpec(name, cls(new), is_package=name == "isobit.environments")  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import and return the module under its new name."""
        module = import_module(self._new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import system has replaced."""
        module.__spec__ = self._spec


def keep_old_names() -> None:
    """Let the old names be imported."""
    sys.meta_path.append(_Alias)
