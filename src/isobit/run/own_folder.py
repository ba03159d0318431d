"""Whether only this user may replace a folder or a step of its path: in a folder that other users
may write to, they may put another folder in its place.

A path is followed as the system does, link by link. Root and the owner of `/` are trusted. Left
out: groups, whose members are taken to trust each other, as `ssh` does, and access lists.
"""

import errno
import os
import stat
from collections import deque
from pathlib import Path

_MOST_LINKS = 40  # as Linux follows


def replaceable(path: Path) -> Path | None:
    """Return the first step on the way to `path` that another user may replace, links followed;
    None if every step is safe. The last step may be missing. Raises OSError if another step is
    missing, and for links in a circle."""
    trusted = {0, os.getuid(), os.stat("/").st_uid}
    at, links = Path("/"), 0
    steps = deque(path.absolute().parts[1:])
    while steps:
        folder, name = at.stat(), steps.popleft()
        if name == "..":
            at = at.parent
            continue
        step = at / name
        try:
            status = step.lstat()
        except FileNotFoundError:
            if steps:
                raise
            status = folder
        shared = folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX
        if shared or folder.st_uid not in trusted or status.st_uid not in trusted:
            return step
        if not stat.S_ISLNK(status.st_mode):
            at = step
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = Path(os.readlink(step))
        steps.extendleft(reversed(target.parts[target.is_absolute() :]))
        at = Path("/") if target.is_absolute() else at
    return None
