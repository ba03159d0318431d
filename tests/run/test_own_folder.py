"""Folders that others may replace, by the folders around them, links and owners."""

import os
from pathlib import Path

import pytest

from isobit.errors import IsobitError
from isobit.kernels.cache import CacheUnusable, cache_directory
from isobit.run.durable import make_directory
from isobit.run.own_folder import replaceable
from isobit.serve.keys import read_or_make
from isobit.serve.state.database import make_private

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
STRANGER = 31234


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder to which everybody may write, in one of the user's own."""
    (folder := tmp_path / "shared").mkdir()
    folder.chmod(0o777)
    return folder


def test_what_stands_in_a_folder_of_everybody_is_refused_at_any_depth(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of operators and of base models, a server's state and its tokens. The control: the
    same folders where the one around them is sticky, as /tmp is, or the user's alone."""

    def refusals() -> list[str]:
        found = list[str]()
        monkeypatch.setenv("ISOBIT_CACHE", str(shared / "x" / "cache"))
        for make in (
            lambda: cache_directory("native"),
            lambda: cache_directory("sft"),
            lambda: make_private(shared / "x" / "y" / "state"),
            lambda: read_or_make(shared / "x" / "token"),
        ):
            try:
                make()
            except IsobitError as error:
                found.append(str(error))
        return found

    refused = refusals()
    assert len(refused) == 4
    assert all(f"at {shared / 'x'}" in line and "only you may write" in line for line in refused)
    shared.chmod(0o1777)
    assert refusals() == []
    shared.chmod(0o755)
    assert refusals() == []
    assert replaceable(shared) is None
    assert (shared / "x" / "cache").stat().st_mode & 0o777 == 0o700


def test_links_are_followed_as_the_system_does(shared: Path, tmp_path: Path) -> None:
    """A link that others may turn is as bad as a folder that they may replace. The control: one of
    the user's own, absolute, relative and through `..`."""
    (own := tmp_path / "own" / "deep").mkdir(parents=True)
    (shared / "link").symlink_to(own)
    assert replaceable(shared / "link") == shared / "link"
    (tmp_path / "through").symlink_to("shared/link")
    assert replaceable(tmp_path / "through") == shared / "link"
    assert replaceable(shared / ".." / "own" / "deep") is None
    (tmp_path / "absolute").symlink_to(own)
    (tmp_path / "relative").symlink_to("own/../own/deep")
    assert replaceable(tmp_path / "absolute") is None
    assert replaceable(tmp_path / "relative" / "new") is None
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OSError, match="symbolic links"):
        replaceable(tmp_path / "circle" / "x")
    with pytest.raises(FileNotFoundError):
        replaceable(tmp_path / "nothing" / "x")


@ROOT
def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the way, as the last step, and as a sticky folder, whose owner may rename what is in it.
    The control: the same folder of one's own."""
    (home := tmp_path / "home" / "cache").mkdir(parents=True)
    monkeypatch.setenv("ISOBIT_CACHE", str(home))
    for changed in (home.parent, home, cache_directory("sft")):
        os.chown(changed, STRANGER, STRANGER)
        with pytest.raises(CacheUnusable, match="can be replaced by others"):
            cache_directory("sft")
        changed.chmod(0o1777)
        assert replaceable(home / "sft") is not None
        changed.chmod(0o700)
        os.chown(changed, 0, 0)
        assert cache_directory("sft") == home / "sft"


def test_the_owner_may_not_let_others_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a group. The control: others may read."""
    monkeypatch.setenv("ISOBIT_CACHE", str(tmp_path))
    for mode, refused in ((0o777, True), (0o770, True), (0o755, False), (0o700, False)):
        for name in ("native", "sft", "gpu", "triton"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name).chmod(mode)
            if refused:
                with pytest.raises(CacheUnusable, match="can be written by others"):
                    cache_directory(name)
            else:
                assert cache_directory(name) == tmp_path / name


def test_folders_are_made_for_the_user_alone(tmp_path: Path) -> None:
    """Whatever the umask says, and their parents too."""
    before = os.umask(0)
    try:
        make_directory(tmp_path / "a" / "b", 0o700)
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700] * 2
    make_directory(tmp_path / "a" / "b", 0o700)
