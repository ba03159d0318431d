"""Runs programs in a cage: `python -I -S jail.py`, a job as JSON on stdin, one line of JSON for each run on stdout.

Under isolation `namespaces` the cage is of Linux namespaces of its own, which need no root: user, mount, PID, network,
IPC and host name. The file system is an empty one that holds the system's and Python's directories, read-only, and a
small writable directory in memory; there is no /proc, no home, no network device. The first process of the PID
namespace runs the programs; when it ends, or anyone above it is killed, the kernel kills all that is left inside.
A program has a session of its own, no capabilities, cannot gain privileges, is held to the system calls that the
job's filter lets through (`seccomp.py`), and has limits on time, memory, files, file size and processes. Under `none`
the limits but for that on processes are all there is. Two cages of one job have nothing in common but two pipes.

This file is run as a script, imports nothing of isobit, and is the trusted side; the programs are not trusted. For
each cage {"started": true} is reported when its first program runs. What cannot be set up is reported as
{"error": ...}, and nothing is run; what fails later is the fault of a program and leaves outcomes out.
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

Job = dict[str, Any]

NEW_NS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NOSUID, NODEV, BIND, RECURSIVE, PRIVATE, DETACH = 2, 4, 4096, 16384, 1 << 18, 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000  # the number is the same on all architectures
SET_DEATH_SIGNAL, SET_DUMPABLE, SET_SECCOMP, SET_NO_NEW_PRIVS = 1, 4, 22, 38
FILTER = 2  # the mode of seccomp that takes one
INSIDE = 1000  # the user and group of the programs, as they see themselves
NOBODY = 65534  # what they are outside where this process is root: limits on processes do not bind root
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
WORK = "/isobit-work"


class CannotIsolate(Exception):
    """What could not be set up, and why."""


def main() -> None:
    """Do the job on stdin."""
    job = json.load(sys.stdin.buffer)
    report = os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    if job["isolation"] == "none":
        os.mkdir(job["directory"] + WORK)
    if len(job["cages"]) == 1:
        _cage(job | job["cages"][0], report)
    else:
        _pair(job, report)


def _pair(job: Job, report: int) -> None:
    """Two cages whose programs can write to each other. The outcomes are those of the first, which ends both."""
    read, write_there = os.pipe()
    read_there, write = os.pipe()
    stop, hold = os.pipe()
    first, second = job["cages"]
    own, companion = os.getpid(), os.fork()
    if companion == 0:
        for descriptor in (read, write, hold):
            os.close(descriptor)
        job |= second | {"channel": [read_there, write_there], "stop": stop}
        _guarded(report, lambda: _cage(job, report, own))
    for descriptor in (read_there, write_there, stop):
        os.close(descriptor)
    _cage(job | first | {"channel": [read, write]}, report)
    os.close(hold)
    os.waitpid(companion, 0)


def _cage(job: Job, report: int, parent: int | None = None) -> None:
    """One cage, from its making to its end."""
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
    """Fork the process that makes the namespaces; this one, outside of them, says who its users are."""
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
            _say(report, {"error": f"users cannot be mapped into a new namespace ({error.strerror})"})
    os.close(say_mapped)
    os.waitpid(builder, 0)


def _build(job: Job, report: int, made: int, mapped: int, parent: int) -> None:
    """In the new namespaces: the file system, then the first process of the PID namespace, which runs the programs."""
    _die_with(parent)
    with contextlib.suppress(OSError):  # where memory runs out, the kernel is to begin with what is inside
        _write("/proc/self/oom_score_adj", "1000")
    if _libc.unshare(NEW_USER | NEW_NS | NEW_PID | NEW_NET | NEW_IPC | NEW_UTS) != 0:
        raise CannotIsolate(f"namespaces cannot be made ({_errno()})")
    os.write(made, b"+")
    if not os.read(mapped, 1):
        return
    _make_root(job)
    with contextlib.suppress(OSError):  # where there is but one user inside, this process is it already
        os.setgroups([])
    os.setresgid(INSIDE, INSIDE, INSIDE)
    os.setresuid(INSIDE, INSIDE, INSIDE)
    _die_with(parent)  # the change of user has cleared it
    _no_new_privileges()
    _check_filter(job)
    read, write = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(write)
        _check(_libc.prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0), "prctl")
        if select.select([read], [], [], 0)[0]:  # the parent was gone before that
            os._exit(1)
        _check(_libc.prctl(SET_DUMPABLE, 0, 0, 0, 0), "prctl")  # so that no program can trace this process
        _guarded(report, lambda: _run_all(job, report, "", caged=True))
    os.waitpid(first, 0)


def _guarded(report: int, call: Callable[[], None]) -> NoReturn:
    """Run it and end this process."""
    code = 1
    try:
        call()
        code = 0
    except CannotIsolate as error:
        _say(report, {"error": str(error)})
    except OSError as error:
        _say(report, {"error": f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)})
    finally:
        os._exit(code)


def _map_users(process: int) -> None:
    """One user inside; where this process may, also root, who builds, and the programs are then a user of no rights."""
    with contextlib.suppress(OSError):
        _write(f"/proc/{process}/setgroups", "deny")
    for name, own in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
        path = f"/proc/{process}/{name}"
        if own == 0:
            with contextlib.suppress(OSError):
                _write(path, f"0 0 1\n{INSIDE} {NOBODY} 1")
                continue
        _write(path, f"{INSIDE} {own} 1")


def _make_root(job: Job) -> None:
    """A file system of its own for this process and what it forks."""
    root, owner = job["directory"], os.geteuid()
    os.umask(0o022)
    _mount(None, "/", None, RECURSIVE | PRIVATE)
    _mount("tmpfs", root, "tmpfs", NOSUID | NODEV, f"size=4m,mode=755,uid={owner},gid={owner}")
    for path in (*SYSTEM, *job["paths"]):
        _show(root, path)
    for path in DEVICES:
        _show(root, path, device=True)
    os.mkdir(root + WORK)
    if not os.path.lexists(root + "/tmp"):  # there is one where a Python or its packages are in it
        os.symlink(WORK, root + "/tmp")
    for name, text in job["files"].items():
        _write(f"{root}/{name}", text)
    _read_only(root, recursive=False)
    options = f"size={job['disk_bytes']},mode=700,uid={INSIDE},gid={INSIDE}"
    _mount("tmpfs", root + WORK, "tmpfs", NOSUID | NODEV, options)
    os.chdir(root)
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", DETACH), "umount")
    os.chdir("/")


def _show(root: str, path: str, device: bool = False) -> None:
    """The file or directory, read-only, at its place under the new root; a link as a link."""
    target = root + path
    if not os.path.lexists(path) or os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(path, target, None, BIND | RECURSIVE)
    if not device:
        _read_only(target, recursive=True)


def _run_all(job: Job, report: int, root: str, caged: bool) -> None:
    """The runs one after another until the time is out; nothing of one is alive in the next."""
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
    """Fork the program; its process, and where its output can be read."""
    given = _given(stdin, root)
    read, write = os.pipe()
    own, program = os.getpid(), os.fork()
    if program == 0:
        if not caged and sys.platform == "linux":
            _die_with(own)
        _become(job, root, given, write, caged)
    for descriptor in (given, write, *job.get("channel", ())):
        os.close(descriptor)
    return program, read


def _watch(job: Job, program: int, read: int, woken: int, end: float, caged: bool) -> dict[str, Any]:
    """Read what the program prints until it has ended, the time is out, it has printed too much, or it is to stop."""
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
            part = os.read(read, 65536)
            output += part
            if not part:  # it has closed its output, and may go on
                sources.remove(read)
        ended, code = os.waitpid(program, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
    late = status is None and len(output) <= limit
    _kill_all(program, caged)
    os.set_blocking(read, False)
    with contextlib.suppress(BlockingIOError):
        while len(output) <= limit and (part := os.read(read, 65536)):
            output += part
    os.close(read)
    text = output[:limit].decode("utf-8", "replace")
    return {"status": status, "late": late, "long": len(output) > limit, "output": text}


def _given(text: str, root: str) -> int:
    """A file that holds the text, open at its beginning."""
    linux = sys.platform == "linux"
    given = os.memfd_create("stdin") if linux else os.open(root + "/stdin", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    view = memoryview(text.encode("utf-8", "surrogatepass"))
    while view:
        view = view[os.write(given, view) :]
    os.lseek(given, 0, os.SEEK_SET)
    return given


def _become(job: Job, root: str, stdin: int, stdout: int, caged: bool) -> NoReturn:
    """In the fork: the program, under its limits."""
    try:
        os.setsid()  # or its signals to its process group would reach this one and all above it
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.chdir(root + WORK)
        limits = {"CORE": 0, "CPU": int(job["timeout_s"]) + 1, "NOFILE": job["open_files"]}
        limits |= {"FSIZE": job["disk_bytes"], "AS": job["memory_bytes"]}
        if caged:
            limits["NPROC"] = job["processes"] + 2  # the two processes above it count too
        os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
        for name, value in limits.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        environment = {"PATH": "/usr/bin:/bin", "HOME": root + WORK, "TMPDIR": root + WORK, "LANG": "C.UTF-8"}
        environment |= {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(job["packages"]), "OMP_NUM_THREADS": "1"}
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
    """Kill and reap the program and what it has started: all but this process, or its group where nothing holds it."""
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
    _check(_libc.prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() != parent:
        os._exit(1)


def _no_new_privileges() -> None:
    if sys.platform == "linux":
        _check(_libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def _check_filter(job: Job) -> None:
    if job["filter"] is None:
        raise CannotIsolate("system calls are filtered only on x86_64 and aarch64")
    _libc.prctl(SET_SECCOMP, FILTER, None, 0, 0)  # with no filter: it fails, in a way that tells
    if ctypes.get_errno() != errno.EFAULT:
        raise CannotIsolate(f"system calls cannot be filtered ({_errno()})")


def _filter_calls(code: bytes) -> None:
    """From here on this process, and what it starts, makes only the system calls that the filter lets through."""
    instructions = ctypes.create_string_buffer(code, len(code))
    program = (ctypes.c_uint64 * 2)(len(code) // 8, ctypes.addressof(instructions))  # as `struct sock_fprog`
    _check(_libc.prctl(SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0), "seccomp")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    source_, target_, kind_, data_ = arguments
    _check(_libc.mount(source_, target_, kind_, ctypes.c_ulong(flags), data_), f"mount of {source or target}")


def _read_only(path: str, recursive: bool) -> None:
    attributes = (ctypes.c_uint64 * 4)(ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    done = _libc.syscall(MOUNT_SETATTR, AT_FDCWD, os.fsencode(path), flags, ctypes.byref(attributes), size)
    _check(done, "mount_setattr (Linux 5.12)")


def _check(result: int, what: str) -> None:
    if result != 0:
        raise CannotIsolate(f"{what}: {_errno()}")


def _errno() -> str:
    return os.strerror(ctypes.get_errno())


def _say(report: int, message: dict[str, Any]) -> None:
    view = memoryview(json.dumps(message).encode() + b"\n")
    while view:
        view = view[os.write(report, view) :]


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)


_libc = ctypes.CDLL(None, use_errno=True)

if __name__ == "__main__":
    main()
