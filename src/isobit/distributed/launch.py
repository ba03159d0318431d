"""How several processes become the ranks of a run: they join by their environment, then check that
they are alike.

Ranks of `ranks: N` meet in a private folder, those that torchrun starts at its store, which every
process that reaches it may read and change: SECURITY.md says where that may be. Left out: starting
them (`supervisor.py`, torchrun), and their messages (`ranks.py`, `transport.py`).
"""

import ctypes
import os
import platform
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from isobit.distributed.ranks import ALONE, Ranks
from isobit.errors import IsobitError, RankLost
from isobit.run.private import PrivateFolder
from isobit.run.surroundings import number_in

_PR_SET_PDEATHSIG = 1
_LOOK_EVERY_S = 0.02


def launched() -> bool:
    """Return whether this process is one of several, or a single one, that a launcher has started.
    Raises IsobitError where its variables are not numbers, or contradict each other."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return False
    rank, size = number_in("RANK"), number_in("WORLD_SIZE")
    if rank >= size:
        raise IsobitError(
            f"RANK={rank} and WORLD_SIZE={size} in the environment: ranks count from 0; a launcher "
            "sets both: unset them where there is none"
        )
    return True


def restarted() -> bool:
    """Return whether the launcher starts the ranks again, because one has died (`torchrun
    --max-restarts`)."""
    return number_in("TORCHELASTIC_RESTART_COUNT") > 0


@contextmanager
def joined(timeout_s: float) -> Iterator[Ranks]:
    """Join the ranks of this run while they are together; a process without a launcher is alone. An
    error that ends this rank is sent to the others. Raises RankLost where they do not come together
    within `timeout_s`, and IsobitError where their port is in use."""
    if not launched():
        yield ALONE
        return
    from isobit.distributed.transport import TorchRanks

    _end_with_launcher()
    _stay_on_this_machine()
    rank, size = number_in("RANK"), number_in("WORLD_SIZE")
    folder = PrivateFolder.given()
    store = (
        _torchruns_store(rank, size, timeout_s)
        if folder is None
        else dist.FileStore(str(folder.path / "store"))
    )
    ranks = TorchRanks(store, rank, size, _device(), timeout_s, folder)
    try:
        yield ranks
    except BaseException as error:
        ranks.fail(str(error) or type(error).__name__)
        raise
    finally:
        ranks.close()


def _stay_on_this_machine() -> None:
    """Let gloo and NCCL listen for this machine's processes alone, where all ranks are on it."""
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        return
    loopback = "lo" if sys.platform == "linux" else "lo0"
    os.environ |= {
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": f"={loopback}",
        "NCCL_RAS_ENABLE": "0",
    }


def _torchruns_store(rank: int, size: int, timeout_s: float) -> dist.Store:
    """Return the store at MASTER_ADDR and MASTER_PORT, or the part of it that is of today's
    ranks."""
    from torch.distributed.rendezvous import rendezvous

    if not os.environ.get("MASTER_ADDR") or not number_in("MASTER_PORT"):
        raise IsobitError(
            "RANK and WORLD_SIZE are set in the environment, and not where the ranks meet: set "
            "MASTER_ADDR and MASTER_PORT, as torchrun does, or unset the former"
        )
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        return _of_this_life(store, rank, size, timeout_s)
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error):
            raise IsobitError(
                f"the ranks cannot meet at {where}: another program uses that port; set "
                "MASTER_PORT to a free one, the same for all ranks"
            ) from None
        raise RankLost(
            f"the ranks do not come together at {where} (MASTER_ADDR, MASTER_PORT) in "
            f"{timeout_s:g} s: is it the machine of rank 0, and does that rank run?"
        ) from None


def _of_this_life(store: dist.Store, rank: int, size: int, timeout_s: float) -> dist.Store:
    """Return a namespace of the store that no rank has written to before.

    torchrun keeps one store through all restarts, and values that dead ranks left there, their
    addresses first, would be read as those of today's. So the first rank answers each rank's
    greeting with a fresh name, until all ranks of today have seen it.
    """
    if rank > 0:
        token = secrets.token_hex(8)
        store.set(f"isobit/hello/{rank}", token)
        name = store.get(f"isobit/answer/{token}").decode()  # waits for it
        store.set(f"isobit/seen/{name}/{rank}", "")
        return dist.PrefixStore(name, store)
    name, until = secrets.token_hex(8), time.monotonic() + timeout_s
    while late := [r for r in range(1, size) if not store.check([f"isobit/seen/{name}/{r}"])]:
        if time.monotonic() > until:
            raise RankLost(
                f"start: waited {timeout_s:g} s for " + ", ".join(f"rank {r}" for r in late)
            )
        for hello in (f"isobit/hello/{r}" for r in late):
            if store.check(
                [hello]
            ):  # it may be that of one that has died, who will not see the answer
                store.set(f"isobit/answer/{store.get(hello).decode()}", name)
        time.sleep(_LOOK_EVERY_S)
    return dist.PrefixStore(name, store)


def check_alike(ranks: Ranks, facts: Mapping[str, object]) -> None:
    """Raise IsobitError, on every rank, unless all have the same `facts`: versions, hardware,
    settings."""
    plain = {key: str(value) for key, value in facts.items()}
    reports = ranks.all_gather_json([platform.node(), plain])
    for rank, (host, facts_of_rank) in enumerate(reports[1:], 1):
        for key in sorted(plain.keys() | facts_of_rank.keys()):
            mine, theirs = reports[0][1].get(key, "missing"), facts_of_rank.get(key, "missing")
            if mine != theirs:
                raise IsobitError(
                    f"the ranks differ: {key} is {mine} on rank 0 (host {reports[0][0]}) and {theirs} "
                    f"on rank {rank} (host {host}); they must be alike to compute the same bits"
                )


def _device() -> torch.device:
    """Return the GPU of this rank, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = number_in("LOCAL_RANK")
    count = torch.cuda.device_count()
    if local >= count:
        raise IsobitError(
            f"rank {os.environ['RANK']} has no GPU of its own: this machine has {count}; start "
            f"{count} ranks"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _end_with_launcher() -> None:
    """End a rank on Linux when the process that started it has died, so that none stays behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
