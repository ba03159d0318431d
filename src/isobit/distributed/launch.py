"""How several processes become the ranks of a run: started here or by torchrun, joined, and found to be alike.

`start` uses PyTorch's own launcher (torch.distributed.elastic) for the ranks of this machine; for several machines
torchrun is called on each. A rank that was started joins by its environment. Left out: what the ranks say to each other
(`ranks.py`, `transport.py`).
"""

import ctypes
import logging
import os
import platform
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from isobit.distributed.ranks import ALONE, Ranks
from isobit.errors import IsobitError, RankLost, RunFailed

_PR_SET_PDEATHSIG = 1
_LOOK_EVERY_S = 0.02


def launched() -> bool:
    """Whether this process is one of several, or a single one, that a launcher has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def restarted() -> bool:
    """Whether the launcher starts the ranks again, because one has died (`torchrun --max-restarts`)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


@contextmanager
def joined(timeout_s: float) -> Iterator[Ranks]:
    """The ranks of this run, as long as they are together; a process that nobody launched is alone. What ends this rank
    is told to the others. Raises RankLost where they do not come together within `timeout_s`, and IsobitError where
    the port at which they would is in use."""
    if not launched():
        yield ALONE
        return
    from torch.distributed.rendezvous import rendezvous

    from isobit.distributed.transport import TorchRanks

    _end_with_launcher()
    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        store = _of_this_life(store, rank, size, timeout_s)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        if "EADDRINUSE" in str(error):
            raise IsobitError(
                f"the ranks cannot meet at {where}: another program uses that port; set MASTER_PORT to a free one, the "
                "same for all ranks"
            ) from None
        raise RankLost(f"the ranks do not come together at {where}: {' '.join(str(error).split())[:200]}") from None
    ranks = TorchRanks(store, rank, size, _device(), timeout_s)
    try:
        yield ranks
    except BaseException as error:
        ranks.fail(str(error) or type(error).__name__)
        raise
    finally:
        ranks.close()


def _of_this_life(store: dist.Store, rank: int, size: int, timeout_s: float) -> dist.Store:
    """A part of the store that no rank has written to before. torchrun keeps one store through all restarts, and what
    ranks that have died left there would be taken for what those of today say, their addresses first. So the first rank
    answers whoever says hello with a fresh name, until all ranks of today have seen it."""
    if rank > 0:
        token = secrets.token_hex(8)
        store.set(f"isobit/hello/{rank}", token)
        name = store.get(f"isobit/answer/{token}").decode()  # waits for it
        store.set(f"isobit/seen/{name}/{rank}", "")
        return dist.PrefixStore(name, store)
    name, until = secrets.token_hex(8), time.monotonic() + timeout_s
    while late := [r for r in range(1, size) if not store.check([f"isobit/seen/{name}/{r}"])]:
        if time.monotonic() > until:
            raise RankLost(f"start: waited {timeout_s:g} s for " + ", ".join(f"rank {r}" for r in late))
        for hello in (f"isobit/hello/{r}" for r in late):
            if store.check([hello]):  # it may be that of one that has died, who will not see the answer
                store.set(f"isobit/answer/{store.get(hello).decode()}", name)
        time.sleep(_LOOK_EVERY_S)
    return dist.PrefixStore(name, store)


def check_alike(ranks: Ranks, facts: Mapping[str, object]) -> None:
    """Raise IsobitError, on every rank, unless all have the same `facts`: versions, hardware, settings."""
    plain = {key: str(value) for key, value in facts.items()}
    said = ranks.gather([platform.node(), plain])
    for rank, (host, other) in enumerate(said[1:], 1):
        for key in sorted(plain.keys() | other.keys()):
            mine, theirs = said[0][1].get(key, "missing"), other.get(key, "missing")
            if mine != theirs:
                raise IsobitError(
                    f"the ranks differ: {key} is {mine} on rank 0 (host {said[0][0]}) and {theirs} on rank {rank} "
                    f"(host {host}); they must be alike to compute the same bits"
                )


def start(ranks: int, arguments: Sequence[str], again: str) -> int:
    """Run `isobit ARGUMENTS` as so many ranks on this machine, and return their exit code. Raises RunFailed for a rank
    that was killed; `again` says how to go on."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):  # the ranks say what there is to say
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")  # a step, and a checkpoint after it
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=secrets.token_hex(8),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "isobit", *arguments)
    except SignalException as error:
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        killed = {rank: failure for rank, failure in error.failures.items() if failure.exitcode < 0}
        for rank, failure in sorted(killed.items(), key=lambda item: item[1].timestamp):
            name = signal.Signals(-failure.exitcode).name
            raise RunFailed(f"rank {rank} on {platform.node()} was ended by {name}; {again}") from None
        return next(failure.exitcode for _, failure in sorted(error.failures.items()))
    return 0


def _device() -> torch.device:
    """The GPU of this rank, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if local >= count:
        raise IsobitError(
            f"rank {os.environ['RANK']} has no GPU of its own: this machine has {count}; start {count} ranks"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _end_with_launcher() -> None:
    """On Linux a rank is told to end when the process that started it has died, so that none stays behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
