"""How the C++ operators share work among threads (`native/threads.h`), by a program of its own."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from isobit.kernels.native.recipe import FLAGS, HERE, WARNINGS, BuildFailed, compiler

PROGRAM = Path(__file__).with_name("shares.cpp")
POOL = HERE / "native" / "threads.cpp"


def said(folder: Path, changed: tuple[str, str] | None = None) -> dict[str, bool]:
    """What the program finds held, by name; with one text of the pool replaced by another."""
    try:
        program = compiler()
    except BuildFailed as error:
        pytest.skip(str(error))
    pool = POOL.read_text()
    if changed is not None:
        assert pool.count(changed[0]) == 1
        pool = pool.replace(*changed)
    (folder / "threads.cpp").write_text(pool)
    command = [program, *FLAGS, "-O1", *WARNINGS, f"-I{HERE}"]
    sources = [str(folder / "threads.cpp"), str(PROGRAM)]
    subprocess.run([*command, *sources, "-o", str(folder / "shares")], check=True, timeout=300)
    done = subprocess.run([str(folder / "shares")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return {name: all(how == "held" for one, how in lines if one == name) for name, _ in lines}


@pytest.mark.slow
def test_every_item_is_computed_once_whoever_comes_late_and_wherever_it_is_called(
    tmp_path: Path,
) -> None:
    """By 1 to 9 threads; beside a helper that is held up; in a child of a fork; by eight threads
    that call at once; within itself."""
    assert said(tmp_path) == dict.fromkeys(("covers", "late", "fork", "callers", "within"), True)


@pytest.mark.slow
def test_the_program_finds_items_that_are_computed_twice_and_helpers_that_a_child_lacks(
    tmp_path: Path,
) -> None:
    """The control: ranges that overlap, and a child that waits for its parent's helpers."""
    overlapping = ("std::min(first + step, part.end)", "std::min(first + step + 1, part.end)")
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    assert not said(tmp_path / "a", overlapping)["covers"]
    assert not said(tmp_path / "b", ("team->forked != forks", "team->forked > forks"))["fork"]


_SPUN = """
import time
import torch
{first}
torch.set_num_threads(2)
x = torch.ones(1 << 18)
x + x
before = time.process_time()
for _ in range(20):
    x + x
    time.sleep(0.01)
print(time.process_time() - before)
"""


def spun(first: str, **variables: str) -> float:
    """CPU seconds of 20 small operators of PyTorch, each with a rest of 10 ms after it, in a script
    that imports torch first."""
    if not hasattr(ctypes.CDLL(None), "GOMP_parallel") or (os.cpu_count() or 1) < 2:
        pytest.skip("PyTorch has no GNU OpenMP here, or one core")
    kept = {n: v for n, v in os.environ.items() if n not in ("GOMP_SPINCOUNT", "OMP_NUM_THREADS")}
    command = [sys.executable, "-c", _SPUN.format(first=first)]
    done = subprocess.run(
        command, env=kept | variables, capture_output=True, text=True, check=True, timeout=120
    )
    return float(done.stdout)


@pytest.mark.slow
def test_pytorchs_threads_do_not_spin_where_torch_was_imported_first() -> None:
    """They sleep through the rests. The controls: without isobit they spin through them, and as
    long as a user says."""
    opened = "from isobit.kernels.native.build import library; library()"
    calm, spinning = spun(opened), spun("")
    assert calm < spinning / 4
    assert spun(opened, GOMP_SPINCOUNT="300000") > 2 * calm
