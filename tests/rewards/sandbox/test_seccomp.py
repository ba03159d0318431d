"""The filter on system calls: what the kernel answers inside, and the table against the kernel's
headers."""

import errno
import json
import platform
import re
from pathlib import Path

import pytest

from isobit.errors import IsobitError
from isobit.tasks.rewards.sandbox import launch, seccomp
from isobit.tasks.rewards.sandbox.launch import Limits, check_cage, run_caged

pytestmark = pytest.mark.usefixtures("cage")

MACHINE = platform.machine()
LIMITS = Limits(timeout_s=20, memory_mib=512, disk_mib=4, processes=16)
CALLS = """
import ctypes, json, sys
libc = ctypes.CDLL(None, use_errno=True)
def answer(number, first):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), ctypes.c_long(first), *[ctypes.c_long(0)] * 5)
    return 0 if result >= 0 else ctypes.get_errno()
print(json.dumps([answer(*call) for call in json.load(sys.stdin)]))
"""


def answers(calls: list[tuple[int, int]], isolation: str = "namespaces") -> list[int]:
    """What the kernel says to each call of a number and a first argument: an errno, 0 if it did
    it."""
    (outcome,) = run_caged(
        {"program.py": CALLS}, "program.py", [json.dumps(calls)], LIMITS, isolation
    )
    return json.loads(outcome.output)


def test_every_denied_call_is_denied() -> None:
    denied = seccomp.denied(MACHINE)
    given = answers([(number, 0) for number in denied.values()])
    assert {name: answer for name, answer in zip(denied, given) if answer != errno.EPERM} == {}
    assert answers([(435, 0), (457, 0), (1 << 30, 0), ((1 << 30) + 39, 0)]) == [errno.ENOSYS] * 4


def test_calls_are_told_apart_by_their_first_argument() -> None:
    clone = seccomp._CLONE[MACHINE]
    prlimit = seccomp._PRLIMIT[MACHINE]
    socket = seccomp._SOCKET[MACHINE]
    families = [(socket, family) for family in (16, 17, 38, 40)]
    spaces = [(clone, 1 << bit) for bit in (17, 25, 26, 27, 28, 29, 30)]
    assert answers([*families, *spaces, (prlimit, 1)]) == [errno.EPERM] * 12
    assert errno.EPERM not in answers([(socket, 1), (socket, 2), (socket, 10), (prlimit, 0)])


def test_the_answers_are_the_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the filter the same calls answer something else, inside the same
    namespaces."""
    numbers = seccomp.denied(MACHINE)
    names = [
        "unshare",
        "memfd_create",
        "shmget",
        "msgget",
        "semget",
        "keyctl",
        "userfaultfd",
        "io_uring_setup",
    ]
    calls = [(numbers[name], 0) for name in names]
    assert answers(calls) == [errno.EPERM] * len(calls)
    allowing = bytes.fromhex("060000000000ff7f")
    monkeypatch.setattr(launch, "filter_for", lambda machine: allowing)
    assert answers(calls)[:5] != [errno.EPERM] * 5
    assert answers(calls).count(errno.EPERM) < len(calls) / 2


def test_a_machine_without_a_filter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(
        IsobitError,
        match=r"system calls are filtered only on x86_64 and aarch64; .*isolation: none",
    ):
        check_cage("namespaces", False)
    check_cage("none", False)


HEADERS = {
    "x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
    "aarch64": "/usr/include/asm-generic/unistd.h",
}


@pytest.mark.parametrize("machine", HEADERS)
def test_the_table_is_the_kernels(machine: str) -> None:
    header = Path(HEADERS[machine])
    if not header.exists():
        pytest.skip("no kernel headers here")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    known = {name: int(number) for name, number in found}
    table = {**seccomp.denied(machine), "clone3": seccomp._CLONE3, "clone": seccomp._CLONE[machine]}
    table |= {"prlimit64": seccomp._PRLIMIT[machine], "socket": seccomp._SOCKET[machine]}
    assert {
        name: number for name, number in table.items() if known.get(name, number) != number
    } == {}
    assert len(table.keys() & known.keys()) > 60
