"""The ranks of one machine: started, told of signals, waited for, ended together, with one line for
what went wrong.

They meet in a folder that no other user may enter (`isobit.run.private`): only gloo listens, on
loopback, and checks who connects (`transport.py`). Left out: how a rank joins (`launch.py`);
ranks on several machines, which torchrun starts.
"""

import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from isobit.errors import IsobitError, RunFailed
from isobit.run.private import LastWords, PrivateFolder, said

_LOOK_EVERY_S = 0.05
_ENDS_S = 30.0
"""In which the others end after one has failed: by then they have met it in vain."""
_AT_ONCE = 3
"""As many signals end ranks that did not obey the first two."""


def start(ranks: int, arguments: Sequence[str], again: str) -> int:
    """Run `isobit ARGUMENTS` as `ranks` ranks on this machine, and return their exit code. Raises
    what ended them, as one error: RunFailed for a rank that was killed; `again` says how to go
    on."""
    with tempfile.TemporaryDirectory(prefix="isobit-ranks-") as name, _received() as signals:
        folder = PrivateFolder(Path(name))
        processes = list[subprocess.Popen[bytes]]()
        try:
            for rank in range(ranks):
                command = [sys.executable, "-m", "isobit", *arguments]
                environment = {**os.environ, **_environment(rank, ranks), **folder.environment}
                processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
            _wait(processes, signals)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        codes = {rank: process.returncode for rank, process in enumerate(processes)}
        return _outcome(codes, signals, folder, again)


def _environment(rank: int, ranks: int) -> dict[str, str]:
    """Return the environment of a rank, as torchrun's, without an address."""
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
    }


@contextmanager
def _received() -> Iterator[list[signal.Signals]]:
    """Yield the list of signals that this process is sent from now on. A terminal sends none to the
    ranks, which have their own sessions."""
    received = list[signal.Signals]()
    numbers = [
        n
        for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(n) != signal.SIG_IGN
    ]
    handlers = {
        n: signal.signal(n, lambda number, _: received.append(signal.Signals(number)))
        for n in numbers
    }
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait(
    processes: Sequence["subprocess.Popen[bytes]"], signals: Sequence[signal.Signals]
) -> None:
    """Wait until all processes have ended. Signals go on to every rank: the first one lets them
    save, the second ends them."""
    passed, until = 0, float("inf")
    while any(process.poll() is None for process in processes):
        while passed < len(signals):
            for process in processes:
                process.send_signal(signals[passed] if passed + 1 < _AT_ONCE else signal.SIGKILL)
            passed += 1
        ended = {0, None} | {code for number in signals for code in (128 + number, -number)}
        if until == float("inf") and any(process.returncode not in ended for process in processes):
            until = time.monotonic() + _ENDS_S
        if time.monotonic() > until:
            return
        time.sleep(_LOOK_EVERY_S)


def _outcome(
    codes: Mapping[int, int], signals: Sequence[signal.Signals], folder: PrivateFolder, again: str
) -> int:
    """Return the common exit code of all ranks, 0 where all succeeded; raise where one failed.

    Raises the most telling error: first a rank's own failure, then that a rank was killed, then
    what ranks noticed of another's failure, the earliest of these first.
    """
    reports = said(folder, len(codes))
    causes = [report for report in reports if not report.of_another]
    noticed = sorted(
        (report for report in reports if report.of_another),
        key=lambda report: (report.told, report.at),
    )
    sent = {-number for number in signals} | (
        {-signal.SIGKILL} if len(signals) >= _AT_ONCE else set()
    )
    killed = [
        r
        for r, code in codes.items()
        if code < 0 and code not in sent and folder.get(f"ended-{r}") is None
    ]
    if causes:
        raise _error(causes[0])
    if killed:
        name = signal.Signals(-codes[killed[0]]).name
        raise RunFailed(f"rank {killed[0]} on {platform.node()} was ended by {name}; {again}")
    if noticed:
        raise _error(noticed[0])
    failed = [code for code in codes.values() if code]
    if failed and signals:
        return 128 + signals[0]
    return failed[0] if failed else 0


def _error(words: LastWords) -> IsobitError:
    kind = RunFailed if words.code == RunFailed.exit_code else IsobitError
    return kind(
        words.text
        if words.shared or words.of_another or not words.rank
        else f"rank {words.rank}: {words.text}"
    )
