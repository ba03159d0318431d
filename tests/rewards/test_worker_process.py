"""Lives and deaths of worker processes: nothing that a function started outlives its worker, its
pool or its parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from isobit.tasks.rewards.pool import RewardPool
from isobit.tasks.rewards.spec import RewardSpec
from isobit.tasks.workers.dispatch import Dispatcher
from isobit.tasks.workers.process import MAX_LOG_BYTES
from tests.rewards.conftest import HANG
from tests.until import until

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="finds processes through /proc"
)

FUNCTIONS = (
    """
import os, re, subprocess, sys, threading, time

def sleeper(completions, path, **k):
    child = subprocess.Popen(["sleep", "300"])
    open(path[0], "w").write(f"{os.getpid()} {child.pid}")
    if completions[0] == "hang":
        hang()
    if completions[0] == "die":
        os._exit(1)
    return [1.0] * len(completions)

def forking(completions, path, **k):
    pid = os.fork()
    if pid == 0:
        if completions[0] == "stay":
            time.sleep(300)
        return [7.0] * len(completions)  # a fork that comes back must not answer
    open(path[0], "w").write(f"{os.getpid()} {pid}")
    if completions[0] == "stay":
        os._exit(2)
    return [1.0] * len(completions)

def stuck(completions, path, **k):
    open(path[0], "w").write(str(os.getpid()))
    re.match(r"(a+)+$", "a" * 60 + "b")

def chatty(completions, **k):
    print("x" * 1_000_000)
    return [1.0] * len(completions)

def ok(completions, **k):
    return [float(os.getpid())] * len(completions)
"""
    + HANG
)


def running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children() -> list[int]:
    """Children of this process, zombies included."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == os.getpid():
            found.append(int(path.parent.name))
    return found


@pytest.mark.usefixtures("only_hanging_takes_time")
@pytest.mark.parametrize(
    ("name", "completion", "total"),
    [
        ("sleeper", "hang", None),
        ("sleeper", "die", None),
        ("sleeper", "ok", 1.0),
        ("forking", "stay", None),
        ("forking", "ok", 1.0),
    ],
)
def test_descendants_are_killed_and_no_zombie_is_left(
    file: str, tmp_path: Path, name: str, completion: str, total: float | None
) -> None:
    before = children()
    path = tmp_path / "pids"
    with RewardPool([RewardSpec(f"{file}:{name}")], deadline_s=0.5, on_error="skip") as pool:
        assert pool.score(["p"], [completion], [{"path": str(path)}])[0].total == total
        pids = [int(pid) for pid in path.read_text().split()]
        assert len(pids) == 2
        if total is None:
            until(lambda: not any(running(pid) for pid in pids))
        else:
            assert running(pids[0])
    until(lambda: not any(running(pid) for pid in pids))
    assert children() == before


@pytest.mark.parametrize("name", ["sleeper", "stuck"])
def test_workers_die_with_their_parent(file: str, tmp_path: Path, name: str) -> None:
    if name == "stuck" and sys.platform != "linux":
        pytest.skip("only the Linux kernel kills a worker that holds its interpreter")
    path = tmp_path / "pids"
    program = f"""
from isobit.tasks.rewards.spec import RewardSpec
from isobit.tasks.rewards.pool import RewardPool
pool = RewardPool([RewardSpec({file + ":" + name!r})], deadline_s=300)
pool.score(["p"], ["hang"], [{{"path": {str(path)!r}}}])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", program], env=environment)
    try:
        until(
            lambda: (
                path.exists() and len(path.read_text().split()) == (2 if name == "sleeper" else 1)
            )
        )
        pids = [int(pid) for pid in path.read_text().split()]
        assert all(running(pid) for pid in pids)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    until(lambda: not any(running(pid) for pid in pids))


def test_an_idle_worker_ends_with_its_pipe(file: str) -> None:
    with RewardPool([RewardSpec(f"{file}:ok")]) as pool:
        pool.start()
        (worker,) = pool.workers
        process = worker._process
        assert process is not None
        os.close(worker._pipes[0])
        assert process.wait(10) == -signal.SIGKILL  # it kills its own group
        worker._pipes = worker._pipes[1:]


def test_a_worker_that_died_between_two_requests_is_replaced(file: str) -> None:
    before = children()
    with RewardPool([RewardSpec(f"{file}:ok")]) as pool:
        first = pool.score(["p"], ["c"], [{}])[0].total
        assert first is not None
        assert pool.score(["p"], ["c"], [{}])[0].total == first
        os.kill(int(first), signal.SIGKILL)
        until(lambda: not running(int(first)))
        second = pool.score(["p"], ["c"], [{}])[0].total
        assert second not in (None, first)
    assert children() == before


def test_an_interrupt_leaves_no_worker_with_an_unread_reply(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    row = {"path": str(tmp_path / "pids")}
    with RewardPool([RewardSpec(f"{file}:sleeper")]) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(Dispatcher, "next", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pool.score(["p"], ["hang"], [row])
        assert not pool.workers[0].owed
        assert pool.score(["p"], ["c"], [row])[0].total == 1.0


@pytest.mark.slow
def test_the_workers_own_file_of_output_stays_small(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with RewardPool([RewardSpec(f"{file}:chatty")]) as pool:
        sizes = []
        for _ in range(12):
            assert pool.score(["p"], ["c"], [{}])[0].total == 1.0
            sizes.append(os.fstat(pool.workers[0]._log.fileno()).st_size)
    assert max(sizes) <= MAX_LOG_BYTES + 2_000_000
    assert sizes[-1] < sum(1_000_001 for _ in sizes) / 2


def test_workers_import_neither_torch_nor_numpy(tmp_path: Path) -> None:
    path = tmp_path / "modules.py"
    path.write_text(
        "import sys\n"
        "def heavy(completions, **k):\n"
        "    return [float('torch' in sys.modules or 'numpy' in sys.modules)]\n"
    )
    specs = [
        RewardSpec(f"{path}:heavy"),
        *(RewardSpec(f"isobit.tasks.builtin.{t}:reward", name=t) for t in ("gsm8k", "countdown")),
    ]
    with RewardPool(specs) as pool:
        (result,) = pool.score(["p"], ["1"], [{"answer": "1", "numbers": [1], "target": 1}])
    assert result.by_function == {"heavy": 0.0, "gsm8k": 1.0, "countdown": 1.0}
