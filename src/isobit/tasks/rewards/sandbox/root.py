"""The file system of a cage: an empty one that holds the system's and Python's directories,
read-only, a small writable directory in memory, and what programs are given on stdin.

As `jail.py`, which uses it from within the cage's mount namespace, it is on the trusted side and
imports the standard library alone. Left out: /proc, and devices but a few.
"""

import ctypes
import os
from typing import Any

Job = dict[str, Any]

NOSUID, NODEV, BIND, RECURSIVE, PRIVATE, DETACH = 2, 4, 4096, 16384, 1 << 18, 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = (
    442,
    -100,
    0x8000,
)  # the number is the same on all architectures
INSIDE = 1000  # the user and group of the programs, as they see themselves
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
WORK = "/isobit-work"

libc = ctypes.CDLL(None, use_errno=True)


class CannotIsolate(Exception):
    """Raised where a step of the cage's isolation cannot be set up; the message says which, and
    why."""


def make_root(job: Job) -> int:
    """Give this process, and what it forks, a new file system. Return the descriptor of
    `_make_streams`."""
    root, owner = job["directory"], os.geteuid()
    os.umask(0o022)
    _mount(None, "/", None, RECURSIVE | PRIVATE)
    _mount(
        "tmpfs",
        root,
        "tmpfs",
        NOSUID | NODEV,
        f"size=4m,nr_inodes=4k,mode=755,uid={owner},gid={owner}",
    )
    for path in (*SYSTEM, *job["paths"]):
        _show(root, path)
    for path in DEVICES:
        _show(root, path, device=True)
    os.mkdir(root + WORK)
    if not os.path.lexists(root + "/tmp"):  # there is one where a Python or its packages are in it
        os.symlink(WORK, root + "/tmp")
    stdin = _make_streams(root)
    for name, text in job["files"].items():
        write_text(f"{root}/{name}", text)
    _read_only(root, recursive=False)
    inodes = max(
        256, job["disk_bytes"] // 4096
    )  # what they take of the kernel's memory is in no size
    options = f"size={job['disk_bytes']},nr_inodes={inodes},mode=700,uid={INSIDE},gid={INSIDE}"
    _mount("tmpfs", root + WORK, "tmpfs", NOSUID | NODEV, options)
    os.chdir(root)
    check(libc.pivot_root(b".", b"."), "pivot_root")
    check(libc.umount2(b".", DETACH), "umount")
    os.chdir("/")
    return stdin


def _make_streams(root: str) -> int:
    """Make /dev/stdin, /dev/stdout and /dev/stderr of programs. Return a descriptor that writes the
    first, which programs cannot."""
    made = root + WORK
    _mount("tmpfs", made, "tmpfs", NOSUID | NODEV, "nr_inodes=4")
    stdin = os.open(made + "/stdin", os.O_RDWR | os.O_CREAT, 0o644)
    os.mkfifo(made + "/stdout")
    os.chmod(made + "/stdout", 0o666)
    for name in ("stdin", "stdout"):
        _show_at(f"{made}/{name}", f"{root}/dev/{name}")
    os.symlink("null", root + "/dev/stderr")
    os.mkdir(root + "/dev/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"../{name}", f"{root}/dev/fd/{number}")
    check(libc.umount2(os.fsencode(made), DETACH), "umount")
    return stdin


def _show(root: str, path: str, device: bool = False) -> None:
    """Bind a file or directory read-only at the same path under the new root; a link becomes a
    link."""
    target = root + path
    if not os.path.lexists(path) or os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    _show_at(path, target, device)


def _show_at(path: str, target: str, device: bool = False) -> None:
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        write_text(target, "")
    _mount(path, target, None, BIND | RECURSIVE)
    if not device:
        _read_only(target, recursive=True)


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    arguments = [
        None if text is None else os.fsencode(text) for text in (source, target, kind, data)
    ]
    source_, target_, kind_, data_ = arguments
    check(
        libc.mount(source_, target_, kind_, ctypes.c_ulong(flags), data_),
        f"mount of {source or target}",
    )


def _read_only(path: str, recursive: bool) -> None:
    attributes = (ctypes.c_uint64 * 4)(ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    done = libc.syscall(
        MOUNT_SETATTR, AT_FDCWD, os.fsencode(path), flags, ctypes.byref(attributes), size
    )
    check(done, "mount_setattr (Linux 5.12)")


def check(result: int, call: str) -> None:
    """Raise CannotIsolate if a call of the C library has failed."""
    if result != 0:
        raise CannotIsolate(f"{call}: {last_error()}")


def last_error() -> str:
    """Return the message of the C library's last error."""
    return os.strerror(ctypes.get_errno())


def write_text(path: str, text: str) -> None:
    """Create a file that holds a text."""
    with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)
