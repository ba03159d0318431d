"""Ranks over torch.distributed leave nothing behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from isobit.distributed.transport import TorchRanks

GATHERED = """
import hashlib, json, sys
import torch
import torch.distributed as dist
from isobit.distributed.transport import TorchRanks

rank, size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
ranks = TorchRanks(dist.FileStore(path, size), rank, size, torch.device("cpu"), 60)
broadcast, gather, received = dist.broadcast, dist.all_gather, [0]

def counted(part, source, **more):
    received[0] += part.numel() * (source != rank)
    return broadcast(part, source, **more)

def all_counted(parts, mine, **more):
    received[0] += sum(part.numel() for part in parts) * (mine.dtype == torch.uint8)
    return gather(parts, mine, **more)

dist.broadcast, dist.all_gather = counted, all_counted
found = []
for lengths in json.loads(sys.argv[4]):
    received[0] = 0
    said = ranks.all_gather_bytes(bytes([65 + rank]) * lengths[rank])
    assert said == [bytes([65 + other]) * lengths[other] for other in range(size)]
    found.append(received[0])
ranks.close()
print(json.dumps(found))
"""


def test_no_rank_receives_more_than_what_is_said(tmp_path: Path) -> None:
    """Of what one rank says to all, once its length, and of uneven messages the sum; the control:
    short ones are padded to the longest, for one exchange."""
    mib, size = 1 << 20, 3
    cases = [[3 * mib, 4, 4], [0, 5 * mib, 0], [mib, 2 * mib, 3 * mib], [7, 5, 0], [0, 0, 0]]
    started = [
        subprocess.Popen(
            [
                *(sys.executable, "-c", GATHERED, str(rank), str(size)),
                *(str(tmp_path / "store"), json.dumps(cases)),
            ],
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]
    ends = [process.communicate(timeout=120)[0] for process in started]
    for rank, said in enumerate(ends):
        received = json.loads(said)
        others = [sum(lengths) - lengths[rank] for lengths in cases]
        assert received[:3] == others[:3]
        assert received[3:] == [3 * 7, 0]


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
