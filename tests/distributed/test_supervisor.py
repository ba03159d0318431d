"""What ends ranks that were started here: one line of all that they say, and their exit code."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from isobit.distributed import supervisor
from isobit.errors import IsobitError, RankLost, RunFailed
from isobit.run.private import PrivateFolder, say

GONE = RankLost("gather: another rank is gone: rank 1 (last seen in: learn) did not come")
WAITED = RankLost("gather: waited 5 s for rank 1 (last seen in: learn)")
TOLD = RankLost("rank 0: gather: waited 5 s for rank 1 (last seen in: learn)")
FULL = RunFailed("cannot write x: no space left")
WRONG = IsobitError("the ranks differ")


def outcome(
    folder: PrivateFolder,
    codes: list[int],
    words: dict[int, IsobitError],
    ended: int | None,
    *signals: signal.Signals,
) -> int | str:
    """The exit code, or the error as code and text."""
    for rank, error in words.items():
        say(folder, rank, error, isinstance(error, RankLost))
    if ended is not None:
        folder.set(f"ended-{ended}", "")
    try:
        return supervisor._outcome(dict(enumerate(codes)), signals, folder, "go on")
    except IsobitError as error:
        return f"{error.exit_code} {error}"


@pytest.mark.parametrize(
    ("codes", "words", "ended", "expected"),
    [
        ([0, 0], {}, None, 0),
        ([1, -9], {0: GONE}, None, "1 rank 1 on .* was ended by SIGKILL; go on"),
        ([1, -9], {0: WAITED}, 1, "1 gather: waited 5 s for rank 1 .*"),
        ([1, -9, 1], {2: WAITED, 0: TOLD}, 1, "1 gather: waited 5 s for rank 1 .*"),
        ([1, 1], {0: GONE, 1: FULL}, None, "1 rank 1: cannot write x: no space left"),
        ([1, 1], {0: FULL, 1: FULL}, None, "1 cannot write x: no space left"),
        ([2, 2], {0: WRONG, 1: WRONG}, None, "2 the ranks differ"),
        ([0, 7], {}, None, 7),
    ],
)
def test_the_line_that_says_most(
    tmp_path: Path,
    codes: list[int],
    words: dict[int, IsobitError],
    ended: int | None,
    expected: int | str,
) -> None:
    found = outcome(PrivateFolder(tmp_path), codes, words, ended)
    if isinstance(expected, int):
        assert found == expected
    else:
        assert re.fullmatch(expected, str(found)), found


@pytest.mark.parametrize(("codes", "expected"), [([143, 143], 143), ([0, 0], 0), ([-15, 143], 143)])
def test_a_signal_is_no_error(tmp_path: Path, codes: list[int], expected: int) -> None:
    assert outcome(PrivateFolder(tmp_path), codes, {}, None, signal.SIGTERM) == expected


STUBBORN = """
import os, signal, time
got = []
for number in (signal.SIGTERM, signal.SIGINT):  # by os.write: a second signal may come while the first still prints
    signal.signal(number, lambda *_: got.append(1) or os.write(1, f"{len(got)}\\n".encode()))
print("ready", flush=True)
time.sleep(600)
"""


def test_every_signal_goes_on_to_the_ranks_and_the_third_ends_them() -> None:
    """Ctrl-C twice is twice for them: the second one ends a rank at once, whose first lets it
    finish its step."""
    processes = [
        subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) for _ in range(2)
    ]
    # a shell's background job ignores it, and what is ignored is not passed on
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with supervisor._received() as signals:
        waiting = threading.Thread(target=supervisor._wait, args=(processes, signals))
        try:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
            waiting.start()
            for count, number in enumerate((signal.SIGINT, signal.SIGTERM), 1):
                os.kill(os.getpid(), number)
                assert [
                    int(process.stdout.readline()) for process in processes if process.stdout
                ] == [count] * 2
            os.kill(os.getpid(), signal.SIGTERM)
            waiting.join(60)
            assert [process.wait(60) for process in processes] == [-signal.SIGKILL] * 2
        finally:
            signal.signal(signal.SIGINT, before)
            for process in processes:
                process.kill()


def test_texts_and_counts_of_a_private_folder(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path)
    assert folder.get("a") is None
    folder.set("a", "text")
    assert folder.get("a") == "text"
    assert [folder.add("x"), folder.add("y"), folder.add("x"), folder.add("x")] == [0, 0, 1, 2]
    for number in range(200):
        assert folder.add(f"name {number}") == 0
    assert folder.add("name 199") == 1
    assert (tmp_path / "counts").stat().st_size < 4096  # however long a run is


def test_no_number_is_given_twice(tmp_path: Path) -> None:
    """Each `add` of several processes at once has its own."""
    code = (
        "import sys, pathlib; from isobit.run.private import PrivateFolder\n"
        "print(*(PrivateFolder(pathlib.Path(sys.argv[1])).add('x') for _ in range(300)))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = [int(word) for process in running for word in process.communicate()[0].split()]
    assert sorted(found) == list(range(900))
