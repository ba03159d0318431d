"""Commands as a user without a home directory, as containers start them: another user id, HOME
unset or `/`, and nothing writable but the temporary directory and the folder of a run."""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

USER = 31235
_AS_OTHER = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--inh-caps=-all")
_OPENED = """
set -e; python=$1; closed=$2; there=$3; shift 3
mount --bind "$python" "$there"; mount -t tmpfs -o mode=755 opened "$closed"
mkdir -p "$python"; mount --move "$there" "$python"; exec "$@"
"""
"""Where Python is in a folder that root alone may enter: another one in its place, with Python in
it, in a mount namespace of the command's own."""
COMMANDS = """
import sys, traceback
from isobit.cli import main
import json
for words in json.loads(sys.argv[1]):
    sys.argv = ["isobit", *words]
    try:
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
        code = "traceback"
    print(f"{words[0]}: exit {code}", flush=True)
"""


@cache
def prefix() -> tuple[str, ...]:
    """The command that makes another user of this one. Skips the test where there is none."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root may become another user, by setpriv")
    python = Path(sys.base_prefix).resolve()
    closed = [path for path in (python, *python.parents) if not path.stat().st_mode & 0o001]
    words = list(_AS_OTHER)
    if closed:
        there = tempfile.mkdtemp(prefix="isobit-python-")
        atexit.register(os.rmdir, there)
        own = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _OPENED, "sh"]
        words = [*own, str(python), str(closed[-1]), there, *words]
    asked = [*words, sys.executable, "-c", "import ctypes"]
    if subprocess.run(asked, capture_output=True, check=False).returncode != 0:
        pytest.skip("another user cannot read this Python")
    return tuple(words)


@contextmanager
def folder_of_their_own() -> Iterator[Path]:
    """A folder with `tmp` in it, which is theirs; nothing around it is."""
    folder = Path(tempfile.mkdtemp(prefix="isobit-test-", dir="/tmp"))
    try:
        (folder / "tmp").mkdir(mode=0o700)
        give_away(folder)
        yield folder
    finally:
        shutil.rmtree(folder)


def give_away(folder: Path) -> None:
    """Make everything in a folder theirs."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER, USER, follow_symlinks=False)


def run_as(
    words: Sequence[str], folder: Path, packages: Path, home: str | None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words in their folder, where `packages` come first."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    kept |= {"TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(packages), **variables}
    kept |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*prefix(), sys.executable, *words],
        cwd=folder,
        env=kept if home is None else {**kept, "HOME": home},
        capture_output=True,
        text=True,
        check=False,
    )
