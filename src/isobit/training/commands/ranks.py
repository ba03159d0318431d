"""The processes of a run of several ranks, as the command line starts them."""

import sys
from pathlib import Path

from isobit.distributed.launch import launched as is_rank
from isobit.distributed.supervisor import start


def launched(ranks: int, run: Path) -> int | None:
    """Start `ranks` ranks and return their exit code; None for one, or where this is one of
    them."""
    if ranks == 1 or is_rank():
        return None
    return start(ranks, sys.argv[1:], f"go on with: isobit train --resume {run}")
