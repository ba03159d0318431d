"""Folders of a user whose home nobody knows, and numbers of the environment that are none."""

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from isobit.errors import IsobitError
from isobit.kernels.cache import CacheUnusable, cache_directory, keep_kernels_of_triton
from isobit.kernels.native import build
from isobit.run import surroundings
from isobit.run.surroundings import folder_of_user, number_in


def test_without_a_home_folders_are_under_the_temporary_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a container whose user its system does not know, or whose root cannot be written:
    nothing is put into a folder `~` of the present directory. The controls: the variable, a home,
    and a file that an older start has left in a home which can only be read."""
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delenv("ISOBIT_CACHE", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "a file").touch()
    own = tmp_path / "tmp" / f"isobit-{os.getuid()}" / ".cache" / "isobit"

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for home in (unknown, lambda: Path("relative"), lambda: tmp_path / "a file"):
        monkeypatch.setattr(Path, "home", home)
        assert folder_of_user("ISOBIT_CACHE", ".cache", "isobit") == own
        assert cache_directory("native") == own / "native"
        assert own.parents[1].stat().st_mode & 0o777 == 0o700
    assert not list(here.iterdir())
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert folder_of_user("ISOBIT_CACHE", "a", "b") == tmp_path / "a" / "b"
    monkeypatch.setenv("ISOBIT_CACHE", str(tmp_path / "c"))
    assert folder_of_user("ISOBIT_CACHE", "a") == tmp_path / "c"
    monkeypatch.delenv("ISOBIT_CACHE")
    (old := tmp_path / ".cache" / "isobit" / "native").mkdir(parents=True)
    monkeypatch.setattr(surroundings, "writable", lambda folder: False)
    assert cache_directory("native", "library.so") == own / "native"
    (old / "library.so").touch()
    assert cache_directory("native", "library.so") == old


def test_where_nothing_can_be_written_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no cache: what is remembered there is asked again."""

    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.delenv("ISOBIT_CACHE", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    monkeypatch.setattr(surroundings, "writable", lambda folder: False)
    with pytest.raises(IsobitError, match="set HOME, TMPDIR, or ISOBIT_CACHE to a folder"):
        folder_of_user("ISOBIT_CACHE", ".cache")
    with pytest.raises(CacheUnusable, match="set HOME, TMPDIR, or ISOBIT_CACHE"):
        cache_directory("native")
    lib = SimpleNamespace(_name="library.so")
    for faults in (0, 3, 0):
        assert build.differing(lib, "test", lambda faults=faults: faults) == faults


def test_triton_keeps_its_kernels_where_it_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The controls: a home, and a folder that the user named."""
    monkeypatch.setenv("ISOBIT_CACHE", str(tmp_path / "cache"))
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    keep_kernels_of_triton()
    assert "TRITON_CACHE_DIR" not in os.environ
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "a file")
    (tmp_path / "a file").touch()
    monkeypatch.setenv("TRITON_HOME", "/elsewhere")
    keep_kernels_of_triton()
    assert "TRITON_CACHE_DIR" not in os.environ
    monkeypatch.delenv("TRITON_HOME")
    monkeypatch.setenv("TRITON_CACHE_DIR", "put back at the end")
    del os.environ["TRITON_CACHE_DIR"]
    keep_kernels_of_triton()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "cache" / "triton")


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
