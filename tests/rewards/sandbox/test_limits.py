"""What the limits of a cage count, and what docs/how-to/rewards.md says that they do not."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from isobit.tasks.rewards.sandbox.launch import Limits, Outcome, run_caged
from tests.until import until

pytestmark = pytest.mark.usefixtures("cage")


def run(
    source: str, processes: int = 8, name: str = "program.py", timeout_s: float = 10
) -> Outcome:
    (outcome,) = run_caged(
        {name: source}, name, [""], Limits(timeout_s, 256, 4, processes), "namespaces"
    )
    return outcome


def holders(count: int, mib: int, processes: int = 8) -> int:
    """How many of so many processes hold so much memory at the same time."""
    source = f"""
import os, signal
read, write = os.pipe()
forked = 0
for _ in range({count}):
    try:
        child = os.fork()
    except OSError:
        break
    if child == 0:
        try:
            held = bytearray({mib} << 20)
        except MemoryError:
            os.write(write, b"-")
            os._exit(1)
        os.write(write, b"+")
        signal.pause()
    forked += 1
said = b""
while len(said) < forked:
    said += os.read(read, 100)
print(said.count(b"+"))
"""
    return int(run(source, processes).output)


def test_memory_is_limited_for_each_process_and_not_for_all_together() -> None:
    assert holders(4, 150) == 4  # 600 MiB of 256
    assert holders(1, 300) == 0


def test_processes_are_limited() -> None:
    for processes in (4, 8):
        assert holders(40, 1, processes) == processes - 1  # the program is one of them


LINKS = """
import os
made = 0
try:
    while made < 100_000:
        {make}
        made += 1
except OSError:
    pass
print(made)
"""


@pytest.mark.parametrize(
    "make",
    [
        "os.symlink('a', str(made))",
        "os.mkdir(str(made))",
        "os.mkfifo(str(made))",
        "open(str(made), 'w').close()",
    ],
)
def test_files_are_counted_too(make: str) -> None:
    """Of 4 MiB: an empty file is of no size, and takes the kernel's memory all the same."""
    assert int(run(LINKS.format(make=make)).output) == 4 * 256 - 1  # the directory itself is one
    assert (
        int(
            run(
                LINKS.format(make="os.symlink('a', str(made)); os.unlink(str(made))"), timeout_s=60
            ).output
        )
        == 100_000
    )


def test_supplementary_groups_are_left_outside() -> None:
    """Where the kernel allows it, which is for root; an ordinary user's stay, and rewards.md says
    so."""
    if os.geteuid() != 0:
        pytest.skip("only root may leave its groups")
    program = (
        "import os\nfrom isobit.tasks.rewards.sandbox.launch import Limits, run_caged\nassert "
        "os.getgroups() == [4321]\n"
        "for isolation in ('namespaces', 'none'):\n"
        "    files, limits = {'p.py': 'import os; print(os.getgroups())'}, Limits(9, 256, 4, 8)\n"
        "    print(run_caged(files, 'p.py', [''], limits, isolation)[0])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, extra_groups=[4321])
    assert done.stdout.count("status=0") == 2
    assert done.stdout.count("output='[]\\n'") == 2, done.stdout


def _called(name: str) -> Iterator[int]:
    """The processes that run a file of this name."""
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                if f"/{name}" in place.joinpath("cmdline").read_text().split("\0"):
                    yield int(place.name)
            except OSError:  # it has ended meanwhile
                continue


def test_where_memory_runs_out_the_kernel_begins_with_the_cage() -> None:
    name = f"victim-{os.getpid()}.py"
    found: list[Outcome] = []
    thread = threading.Thread(
        target=lambda: found.append(run("import time\ntime.sleep(60)", name=name, timeout_s=30))
    )
    thread.start()
    until(lambda: not thread.is_alive() or next(_called(name), None))
    victim = next(_called(name), None)
    assert victim is not None, found
    score = Path(f"/proc/{victim}/oom_score_adj").read_text()
    os.kill(victim, signal.SIGKILL)
    thread.join()
    assert int(score) == 1000
    assert int(Path("/proc/self/oom_score_adj").read_text()) < 1000
    assert found[0].status == -signal.SIGKILL
