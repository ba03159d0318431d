"""Folders of a user whose home nobody knows, and numbers of the environment that are none."""

from pathlib import Path

import pytest

from isobit.errors import IsobitError
from isobit.kernels.cache import CacheUnusable, cache_directory
from isobit.run.surroundings import folder_of_user, number_in


def test_a_home_that_is_not_known_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a container whose user its system does not know: nothing is put into a folder `~` of
    the present directory. The control: the variable, or a home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ISOBIT_CACHE", raising=False)

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for home in (unknown, lambda: Path("relative")):
        monkeypatch.setattr(Path, "home", home)
        with pytest.raises(
            IsobitError, match=r"is not known: set HOME, or ISOBIT_CACHE to a folder"
        ):
            folder_of_user("ISOBIT_CACHE", ".cache")
        with pytest.raises(CacheUnusable, match="set HOME, or ISOBIT_CACHE"):
            cache_directory("native")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert folder_of_user("ISOBIT_CACHE", "a", "b") == tmp_path / "a" / "b"
    monkeypatch.setenv("ISOBIT_CACHE", str(tmp_path / "c"))
    assert folder_of_user("ISOBIT_CACHE", "a") == tmp_path / "c"


@pytest.mark.parametrize(("given", "found"), [(None, 0), ("", 0), ("0", 0), ("12", 12)])
def test_a_number_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, given: str | None, found: int
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if given is not None:
        monkeypatch.setenv("LOCAL_RANK", given)
    assert number_in("LOCAL_RANK") == found


@pytest.mark.parametrize("given", ["x", "-1", "1.5", " 1", "\u0661"])
def test_what_is_no_number_is_one_line(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("LOCAL_RANK", given)
    with pytest.raises(IsobitError, match=r"LOCAL_RANK=.* in the environment: expected a"):
        number_in("LOCAL_RANK")
