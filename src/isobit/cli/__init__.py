"""The command line: `isobit quickstart | train | sft | compare | plan | generate | eval | inspect | export |
serve | watch | report | track | verify | doctor`.

Declares arguments, calls one function each, and turns `IsobitError` into one line on stderr and an
exit code: 2 for a user's mistake, 1 for a run that failed, 130 or 143 for one that was interrupted
and saved. What typer refuses is one line too. Heavy modules are imported inside the commands, so
that `--help` answers at once.
"""

import codecs
import errno
import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, NoReturn

import typer

from isobit.cli import training, planning, evaluation, models, serving, pages, machine  # isort: skip (the order of the commands in --help)
from isobit.cli.app import app
from isobit.errors import IsobitError, RankLost, RunFailed, brief, failed_allocation
from isobit.run import early_interrupt
from isobit.run.outlived import outlived_stderr
from isobit.run.private import PrivateFolder, say

__all__ = [
    "app",
    "evaluation",
    "machine",
    "main",
    "models",
    "pages",
    "planning",
    "serving",
    "training",
]


_OF_PLACES = (
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EROFS,
)
"""What is wrong with a place of the user's, wherever it was met."""
_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What is wrong with where something is written, which has no name where it is stdout."""
_LOOP = "Symlink loop from "
"""As pathlib says it of a path that it resolves, until Python 3.13."""
_Usage: Any = typer.BadParameter.__base__
"""What typer raises for a command line that it refuses; the class is click's, or typer's copy of
it."""
_OF_CONFIGS = ("train", "sft", "compare", "plan", "track", "eval", "generate", "serve")
"""Commands that take keys of a config as `key=value`."""
_LESS_MEMORY = (
    "less is taken with smaller optimizer.micro_batch_tokens, engine.kv_pages or adapter.rank, and "
    "with optimizer.activation_checkpointing (isobit plan counts it); a run goes on from its last "
    "checkpoint with --resume"
)


def main() -> None:
    """Entry point of the `isobit` command."""
    # Standard streams that whoever started this has closed lead nowhere: else the next file
    # that is opened, one of a run, would have the number of stderr, and a library's words in
    # it.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # which gets the lowest free number
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    with outlived_stderr(), _interruption_is_said():
        _main()


@contextmanager
def _interruption_is_said() -> Iterator[None]:
    """Report in one line that a signal ends the command, unless it has its own handlers: a second
    one ends it at once. Not SIGTERM and SIGHUP in a rank, which its launcher ends."""
    wanted: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler}
    if PrivateFolder.given() is None and "RANK" not in os.environ:
        wanted |= dict.fromkeys((signal.SIGTERM, signal.SIGHUP), signal.SIG_DFL)
    mine: dict[signal.Signals, Any] = {}
    came: list[int] = []
    process = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        for handled in mine:
            signal.signal(handled, mine[handled])
        if os.getpid() != process:  # a copy of this process: not the command
            os.kill(os.getpid(), number)
        came.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    if current_thread() is main_thread():
        if signal.getsignal(signal.SIGINT) is early_interrupt.at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        mine = {n: previous for n, previous in wanted.items() if signal.getsignal(n) == previous}
        for number in mine:
            signal.signal(number, interrupt)
    try:
        try:
            yield
        except KeyboardInterrupt:  # outside what typer sees
            raise SystemExit(128 + signal.SIGINT) from None
    except SystemExit as end:
        if came and end.code == 128 + came[0]:
            name = signal.Signals(came[0]).name
            reason = "interrupted" if came[0] == signal.SIGINT else f"ended by {name}"
            print(f"isobit: {reason}", file=sys.stderr)
        raise
    finally:
        for number, previous in mine.items():
            signal.signal(number, previous)


def _main() -> None:
    # Where the locale's encoding lacks a character, stdout has it as JSON escapes it.
    codecs.register_error("json", _escaped)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="json")
    try:
        code = app(prog_name="isobit", standalone_mode=False)
        # Write what is left for stdout while a failure can still be told.
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError:  # whoever read it has seen enough
            _drop_output()
            sys.exit(1)
    except _Usage as error:
        _end(_one_line(error))
    except typer.Abort:  # the end of stdin, where something is asked
        sys.exit(128 + signal.SIGINT)
    except IsobitError as error:
        _end(error)
    except OSError as error:
        if (line := _of_surroundings(error)) is not None:
            _end(IsobitError(line))
        if error.errno in _OF_PLACES and error.filename is not None:
            _end(IsobitError(f"{brief(error.filename, 300)}: {error.strerror}"))
        if error.errno not in _OF_OUTPUT:
            raise
        _drop_output()
        _end(RunFailed(f"cannot write {brief(error.filename or 'stdout', 300)}: {error.strerror}"))
    except (MemoryError, RuntimeError) as error:
        if str(error).startswith(_LOOP):
            name = str(error).removeprefix(_LOOP)
            _end(IsobitError(f"{brief(name, 300)}: {os.strerror(errno.ELOOP)}"))
        allocation = failed_allocation(error)
        if allocation is None:
            raise
        _end(RunFailed(f"out of memory: {allocation}; {_LESS_MEMORY}"))
    sys.exit(code)


def _of_surroundings(error: OSError) -> str | None:
    """Return what is wrong with where the command runs, whatever it was about to do."""
    if error.errno != errno.ENOENT or error.filename is not None:
        return None
    if "temporary directory" in str(error):
        return "no folder for temporary files can be written: set TMPDIR to one that can"
    try:
        os.getcwd()
    except OSError:
        return "the current directory is not there any more: change to another"
    return None


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def _drop_output() -> None:
    """Let Python, which flushes stdout as it ends, do so into nothing."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(error: Any) -> IsobitError:
    """Return what typer says of a command line, in one line that ends with where to read more."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(error.exit_code)
    command = "isobit" if error.ctx is None else error.ctx.command_path
    text = " ".join(error.format_message().split()).rstrip(".")
    if text.startswith("No such option") and command.rpartition(" ")[2] in _OF_CONFIGS:
        text += "; a key of the config is given without dashes, such as steps=5"
    return IsobitError(f"{text}; {command} --help says what there is")


def _end(error: IsobitError) -> NoReturn:
    rank, folder = os.environ.get("RANK", "0"), PrivateFolder.given()
    if folder is not None:  # whoever has started the ranks speaks for all
        say(folder, int(rank), error, isinstance(error, RankLost))
    elif (  # the first rank speaks for all at a terminal
        rank == "0" or "WORLD_SIZE" not in os.environ or not sys.stderr.isatty()
    ):
        print(f"isobit: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
