"""Old names of modules are imported, with a warning that says the new one."""

import sys
from importlib import import_module

import pytest

from isobit.moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_module_under_its_new_one(old: str) -> None:
    for name in MOVED:
        sys.modules.pop(name, None)
    new = import_module(MOVED[old])
    with pytest.warns(FutureWarning, match=f"{old} is called {MOVED[old]} now"):
        assert import_module(old) is new
    assert new.__spec__ is not None
    assert new.__spec__.name == MOVED[old]
    assert import_module(MOVED[old]) is new


def test_other_names_are_still_unknown() -> None:
    """The control."""
    for name in ("isobit.environments.nothing", "isobit.tasks.nothing", "isobit.nothing"):
        with pytest.raises(ModuleNotFoundError):
            import_module(name)
