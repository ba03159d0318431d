"""Ranks over torch.distributed leave nothing behind."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from isobit.distributed.transport import TorchRanks


def _threads() -> int:
    """Threads of gloo in this process."""
    names = (path.read_text() for path in Path("/proc/self/task").glob("*/comm"))
    return sum("gloo" in name for name in names)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are read from /proc")
def test_ranks_that_were_closed_have_no_threads_while_they_are_referred_to() -> None:
    """A thread of gloo that frees a tensor while Python ends aborts the process, after its work is
    done."""
    before = _threads()
    ranks = TorchRanks(dist.HashStore(), 0, 1, torch.device("cpu"), 30)
    ranks.all_to_all(torch.ones(3), [3], [3], range(1))()
    assert _threads() > before  # the control: as long as the group is there
    ranks.close()
    assert _threads() == before
    assert ranks.size == 1  # it is still referred to
