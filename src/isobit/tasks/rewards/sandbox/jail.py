"""Runs programs in a cage: a separate process, a job as JSON on stdin, one line of JSON for each
run on stdout.

Under isolation `namespaces` the cage is a set of new Linux namespaces, which need no root: user,
mount, PID, network, IPC and host name. The file system is an empty one with little in it
(`root.py`), without /proc, home and network device. The first process of the PID namespace
runs the programs; when it ends, or anyone above it is killed, the kernel kills all that is left
inside. A program has its own session, no capabilities, cannot gain privileges, is held to the
system calls that the job's filter lets through (`seccomp.py`), and has limits on time, memory,
files, file size and processes. Under `none` the limits but for that on processes are all there is.
Two cages of one job have nothing in common but two pipes. Supplementary groups are dropped where
this process is root; the kernel lets no other process do that.

This is the trusted side, which imports the standard library alone; the programs are not trusted.
For each cage {"started": true} is reported when its first program runs. What cannot be set up is
reported as {"error": ...}, and nothing is run; what fails later is the fault of a program and
leaves outcomes out.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from isobit.tasks.rewards.sandbox.root import (
    INSIDE,
    WORK,
    CannotIsolate,
    Job,
    check,
    last_error,
    libc,
    make_root,
    write_text,
)

NEW_NS = 0x20000
NEW_UTS = 0x4000000
NEW_IPC = 0x8000000
NEW_USER = 0x10000000
NEW_PID = 0x20000000
NEW_NET = 0x40000000
SET_DEATH_SIGNAL, SET_DUMPABLE, SET_SECCOMP, SET_NO_NEW_PRIVS = 1, 4, 22, 38
FILTER = 2  # the mode of seccomp that takes one
NOBODY = (
    65534  # what they are outside where this process is root: limits on processes do not bind root
)


def main() -> None:
    """Run the programs of the job on stdin, in one cage or in two that can write to each other."""
    job = json.load(sys.stdin.buffer)
    report = os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    with contextlib.suppress(OSError):  # who is not root may not, in a namespace of its own neither
        os.setgroups([])
    if job["isolation"] == "none":
        os.mkdir(job["directory"] + WORK)
    if len(job["cages"]) == 1:
        _cage(job | job["cages"][0], report)
    else:
        _pair(job, report)


def _pair(job: Job, report: int) -> None:
    """Run two cages whose programs can write to each other. The outcomes are those of the first
    cage, whose end is the end of both."""
    read, write_there = os.pipe()
    read_there, write = os.pipe()
    stop, hold = os.pipe()
    first, second = job["cages"]
    this_process, companion = os.getpid(), os.fork()
    if companion == 0:
        for descriptor in (read, write, hold):
            os.close(descriptor)
        job |= second | {"channel": [read_there, write_there], "stop": stop}
        _guarded(report, lambda: _cage(job, report, this_process))
    for descriptor in (read_there, write_there, stop):
        os.close(descriptor)
    _cage(job | first | {"channel": [read, write]}, report)
    os.close(hold)
    os.waitpid(companion, 0)


def _cage(job: Job, report: int, parent: int | None = None) -> None:
    """Make a cage, run the job's programs in it, and report what cannot be set up."""
    try:
        if parent is not None and sys.platform == "linux":
            _die_with(parent)
        if job["isolation"] == "none":
            _no_new_privileges()
            _run_all(job, report, job["directory"], caged=False)
        else:
            _isolated(job, report)
    except CannotIsolate as error:
        _say(report, {"error": str(error)})


def _isolated(job: Job, report: int) -> None:
    """Fork the process that makes the namespaces; this one, outside of them, says who its users
    are."""
    made, say_made = os.pipe()
    mapped, say_mapped = os.pipe()
    parent = os.getpid()
    builder = os.fork()
    if builder == 0:
        os.close(made)
        os.close(say_mapped)
        _guarded(report, lambda: _build(job, report, say_made, mapped, parent))
    os.close(say_made)
    os.close(mapped)
    if os.read(made, 1):
        try:
            _map_users(builder)
            os.write(say_mapped, b"+")
        except OSError as error:
            _say(
                report, {"error": f"users cannot be mapped into a new namespace ({error.strerror})"}
            )
    os.close(say_mapped)
    os.waitpid(builder, 0)


def _build(job: Job, report: int, made: int, mapped: int, parent: int) -> None:
    """Build the file system in the new namespaces, then fork the first process of the PID
    namespace, which runs the programs."""
    _die_with(parent)
    with contextlib.suppress(
        OSError
    ):  # where memory runs out, the kernel is to begin with what is inside
        write_text("/proc/self/oom_score_adj", "1000")
    if libc.unshare(NEW_USER | NEW_NS | NEW_PID | NEW_NET | NEW_IPC | NEW_UTS) != 0:
        raise CannotIsolate(f"namespaces cannot be made ({last_error()})")
    os.write(made, b"+")
    if not os.read(mapped, 1):
        return
    job["streams"] = make_root(job)
    os.setresgid(INSIDE, INSIDE, INSIDE)
    os.setresuid(INSIDE, INSIDE, INSIDE)
    _die_with(parent)  # the change of user has cleared it
    _no_new_privileges()
    _check_filter(job)
    read, write = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(write)
        check(libc.prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0), "prctl")
        if select.select([read], [], [], 0)[0]:  # the parent was gone before that
            os._exit(1)
        check(
            libc.prctl(SET_DUMPABLE, 0, 0, 0, 0), "prctl"
        )  # so that no program can trace this process
        _guarded(report, lambda: _run_all(job, report, "", caged=True))
    os.waitpid(first, 0)


def _guarded(report: int, call: Callable[[], None]) -> NoReturn:
    """Make a call, report what cannot be isolated, and end this process: exit code 0 if the call
    returned."""
    code = 1
    try:
        call()
        code = 0
    except CannotIsolate as error:
        _say(report, {"error": str(error)})
    except OSError as error:
        _say(
            report,
            {
                "error": f"{error.strerror}: {error.filename}"
                if error.filename
                else str(error.strerror)
            },
        )
    finally:
        os._exit(code)


def _map_users(process: int) -> None:
    """Map one user into the namespace; where this process may, also root, as which the cage is
    built before programs run as that user without rights."""
    with contextlib.suppress(OSError):
        write_text(f"/proc/{process}/setgroups", "deny")
    for name, id_here in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
        path = f"/proc/{process}/{name}"
        if id_here == 0:
            with contextlib.suppress(OSError):
                write_text(path, f"0 0 1\n{INSIDE} {NOBODY} 1")
                continue
        write_text(path, f"{INSIDE} {id_here} 1")


def _run_all(job: Job, report: int, root: str, caged: bool) -> None:
    """Run the programs one after another until the time is out; no process of one is alive in the
    next."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    if caged:  # only signals that it handles reach the first process of a PID namespace from inside
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wake)
    end = time.monotonic() + job["timeout_s"]
    for number, stdin in enumerate(job["inputs"]):
        program, read = _start(job, stdin, root, caged)
        if number == 0:
            _say(report, {"started": True})
        outcome = _watch(job, program, read, woken, end, caged)
        if "stop" not in job:
            _say(report, outcome)
        if time.monotonic() >= end:
            return


def _start(job: Job, stdin: str, root: str, caged: bool) -> tuple[int, int]:
    """Fork the program. Return its process number, and the descriptor from which its output can be
    read."""
    stdin_file = _given(job, stdin, root)
    if caged:
        read = os.open("/dev/stdout", os.O_RDONLY | os.O_NONBLOCK)
        write = os.open("/dev/stdout", os.O_WRONLY)
    else:
        read, write = os.pipe()
    this_process, program = os.getpid(), os.fork()
    if program == 0:
        if not caged and sys.platform == "linux":
            _die_with(this_process)
        _become(job, root, stdin_file, write, caged)
    for descriptor in (stdin_file, write, *job.get("channel", ())):
        os.close(descriptor)
    return program, read


def _watch(
    job: Job, program: int, read: int, woken: int, end: float, caged: bool
) -> dict[str, Any]:
    """Read what the program prints until it has ended, the time is out, it has printed too much, or
    it is to stop."""
    output, status, limit = bytearray(), None, job["output_bytes"]
    stop = job.get("stop")
    sources = [read, woken] if stop is None else [read, woken, stop]
    while status is None and len(output) <= limit and (left := end - time.monotonic()) > 0:
        ready = select.select(sources, [], [], left)[0]
        if stop in ready:
            break
        if woken in ready:
            os.read(woken, 4096)
        if read in ready:
            chunk = os.read(read, 65536)
            output += chunk
            if not chunk:  # it has closed its output, and may go on
                sources.remove(read)
        ended, code = os.waitpid(program, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
    late = status is None and len(output) <= limit
    _kill_all(program, caged)
    os.set_blocking(read, False)
    with contextlib.suppress(BlockingIOError):
        while len(output) <= limit and (chunk := os.read(read, 65536)):
            output += chunk
    os.close(read)
    text = output[:limit].decode("utf-8", "surrogateescape")  # no two outputs become one text
    return {"status": status, "late": late, "long": len(output) > limit, "output": text}


def _given(job: Job, text: str, root: str) -> int:
    """Open a file that holds the text, at its beginning, and return its descriptor."""
    if "streams" in job:
        descriptor = job["streams"]
        os.ftruncate(descriptor, 0)
    else:
        linux = sys.platform == "linux"
        descriptor = (
            os.memfd_create("stdin")
            if linux
            else os.open(root + "/stdin", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        )
    os.lseek(descriptor, 0, os.SEEK_SET)
    view = memoryview(text.encode("utf-8", "surrogatepass"))
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.open("/dev/stdin", os.O_RDONLY) if "streams" in job else descriptor


def _become(job: Job, root: str, stdin: int, stdout: int, caged: bool) -> NoReturn:
    """Turn the forked process into the program, under its limits."""
    try:
        os.setsid()  # or its signals to its process group would reach this one and all above it
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.chdir(root + WORK)
        os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
        for name, value in job["limits"].items():
            if caged or name != "NPROC":
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        environment = job["environment"] | {"HOME": root + WORK, "TMPDIR": root + WORK}
        python = [job["python"], "-S", "-s", "-B", "-X", "utf8", f"{root}/{job['main']}"]
        for descriptor in job.get("channel", ()):
            os.set_inheritable(descriptor, True)
            python.append(str(descriptor))
        if caged:
            _filter_calls(bytes.fromhex(job["filter"]))
        os.execve(job["python"], python, environment)
    finally:
        os._exit(126)


def _kill_all(program: int, caged: bool) -> None:
    """Kill and reap the program and what it has started: all but this process, or its group where
    nothing holds it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if caged:
            os.kill(-1, signal.SIGKILL)
        else:
            os.killpg(program, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1 if caged else program, 0)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone."""
    check(libc.prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() != parent:
        os._exit(1)


def _no_new_privileges() -> None:
    if sys.platform == "linux":
        check(libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def _check_filter(job: Job) -> None:
    if job["filter"] is None:
        raise CannotIsolate("system calls are filtered only on x86_64 and aarch64")
    libc.prctl(SET_SECCOMP, FILTER, None, 0, 0)  # with no filter: it fails, in a way that tells
    if ctypes.get_errno() != errno.EFAULT:
        raise CannotIsolate(f"system calls cannot be filtered ({last_error()})")


def _filter_calls(code: bytes) -> None:
    """Restrict this process, and what it starts, to the system calls that the filter lets
    through."""
    instructions = ctypes.create_string_buffer(code, len(code))
    program = (ctypes.c_uint64 * 2)(
        len(code) // 8, ctypes.addressof(instructions)
    )  # as `struct sock_fprog`
    check(libc.prctl(SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0), "seccomp")


def _say(report: int, message: dict[str, Any]) -> None:
    view = memoryview(json.dumps(message).encode() + b"\n")
    while view:
        view = view[os.write(report, view) :]
