"""The command line: `isobit train | sft | compare | plan | generate | eval | inspect | export |
serve | watch | report | track | verify | doctor`.

Declares arguments, calls one function each, and turns `IsobitError` into one line on stderr and an
exit code: 2 for a user's mistake, 1 for a run that failed, 130 or 143 for one that was interrupted
and saved. Heavy modules are imported inside the commands, so that `--help` answers at once.
"""

import errno
import os
import sys
from typing import NoReturn

from isobit.cli import training, planning, evaluation, models, serving, pages, machine  # isort: skip (the order of the commands in --help)
from isobit.cli.app import app
from isobit.errors import IsobitError, RankLost, RunFailed, brief, failed_allocation
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


_OF_A_PLACE = (
    errno.ENAMETOOLONG,
    errno.EACCES,
    errno.EPERM,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EROFS,
)
"""What is wrong with a place of the user's, wherever it was met."""
_LESS_MEMORY = (
    "less is taken with smaller optimizer.micro_batch_tokens, engine.kv_pages or adapter.rank, and "
    "with optimizer.activation_checkpointing (isobit plan counts it); a run goes on from its last "
    "checkpoint with --resume"
)


def main() -> None:
    """Entry point of the `isobit` command."""
    try:
        app(prog_name="isobit")
    except IsobitError as error:
        _end(error)
    except OSError as error:
        if error.errno not in _OF_A_PLACE or error.filename is None:
            raise
        _end(IsobitError(f"{brief(error.filename, 300)}: {error.strerror}"))
    except (MemoryError, RuntimeError) as error:
        asked = failed_allocation(error)
        if asked is None:
            raise
        _end(RunFailed(f"out of memory: {asked}; {_LESS_MEMORY}"))


def _end(error: IsobitError) -> NoReturn:
    rank, folder = os.environ.get("RANK", "0"), PrivateFolder.given()
    if folder is not None:  # whoever has started the ranks speaks for all
        say(folder, int(rank), error, isinstance(error, RankLost))
    elif rank == "0" or not sys.stderr.isatty():  # the first rank speaks for all at a terminal
        print(f"isobit: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
