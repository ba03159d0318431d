"""The thread that reads the replies of environments' processes, whatever stands in the pipe."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from isobit.data.turns import Reply
from isobit.tasks.environments import pool as environment_pool
from isobit.tasks.environments.pool import EnvironmentPool
from isobit.tasks.environments.replies import reply_of
from isobit.tasks.environments.settings import EnvironmentConfig
from isobit.tasks.workers.dispatch import Worker
from tests.environments.helpers import begun, call, calling, contents, replies, turned, written

TOOL = '''
import os, stat

def write(text: str) -> str:
    """Write into every pipe.

    Args:
        text: What.
    """
    for descriptor in sorted(map(int, os.listdir("/proc/self/fd")))[3:]:
        try:
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.write(descriptor, text.encode())
        except OSError:
            pass
    return "written"
'''
REPLY = '{"key": 0, "lost": false, "step": %s, "uses": %s, "problem": null, "mistake": false, '
REPLY += '"prompt": null, "rewards": {}}\n'


@pytest.mark.parametrize(
    "text",
    [
        "no JSON\n",
        "\n",
        "{}\n",
        "5\n",
        "null\n",
        "[1]\n",
        '"a"\n',
        "[" * 9000 + "\n",
        '{"key": 0}\n',
        '{"key": 0, "lost": false}\n',
        '{"key": [1], "lost": false}\n',
        '{"loaded": {}}\n',
        '{"error": "forged"}\n',
        REPLY % ("5", "[]"),
        REPLY % ("[[5], 0.0, false]", "[]"),
        REPLY % ("[[], 0.0, 1]", "[]"),
        REPLY % ("[[], 0.0, false]", "[[1, 2, 3]]"),
    ],
)
def test_what_is_not_a_reply_costs_its_process_and_is_told(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, "tool.py", TOOL)
    with EnvironmentPool(EnvironmentConfig(tools=(f"{path}:write",))) as pool:
        begun(pool, 0)
        pool.turn(0, calling(0, call("write", {"text": text})))
        reply = replies(pool, 1)[0]
        wrote = "its process wrote what is not a reply into the pipe of its replies, and was killed"
        assert reply.problem == wrote
        assert reply.step.done
        pool.end(0)
        begun(pool, 1)  # another has taken its place
        assert contents(turned(pool, 1, 0, call("nobody"))) == [
            "{'error': 'Tool nobody not found.'}"
        ]


def test_what_else_ends_the_thread_is_raised_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "tool.py", TOOL)

    def broken(message: Mapping[str, Any]) -> Reply:
        if message["uses"]:
            raise ZeroDivisionError("of isobit's own")
        return reply_of(message)

    monkeypatch.setattr(environment_pool, "reply_of", broken)
    with EnvironmentPool(EnvironmentConfig(tools=(f"{path}:write",))) as pool:
        begun(pool, 0)
        pool.turn(0, calling(0, call("write", {"text": ""})))
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="of isobit's own"):
                replies(pool, 1)


class _Pieces(Worker):
    """A worker that says these pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces, self._received = pieces, _Counted()

    def receive(self) -> bytes:
        return self.pieces.pop(0)


class _Counted(bytearray):
    """Bytes that know how many of them were copied out to be split."""

    copied = 0

    def __bytes__(self) -> bytes:
        _Counted.copied += len(self)
        return bytes(memoryview(self))


def test_a_long_line_is_split_once() -> None:
    """Of 64 pieces: splitting what there is anew at each of them copies 32 times the bytes."""
    line = b" " * (1 << 10)
    pieces = [line] * 63 + [b"{}\nrest", b" of it\n"]
    worker = _Pieces(list(pieces))
    lines = [worker.lines() for _ in pieces]
    assert lines == [[]] * 63 + [[line * 63 + b"{}"], [b"rest of it"]]
    assert not worker._received
    assert _Counted.copied == 63 * len(line) + len(pieces[63])
