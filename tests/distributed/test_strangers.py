"""What another user of the machine, or the network, can reach of ranks that run here: nothing that
answers."""

import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from isobit.distributed import launch, transport
from isobit.distributed.board import StoreBoard
from isobit.errors import RankLost
from tests import warm
from tests.distributed.sessions import SMALL, bits, trained, written
from tests.sockets import MARK, beyond_loopback, listening, marked

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="sockets and processes are read from /proc"
)


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """As it was: a rank changes what gloo and NCCL read."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def ranks_of(config: Path, directory: Path, mark: str, temporary: Path) -> "subprocess.Popen[str]":
    """`isobit train` on two ranks, whose processes have a mark."""
    command = ["train", str(config), *SMALL, f"run.dir={directory}", "ranks=2"]
    return subprocess.Popen(
        [sys.executable, "-m", "isobit", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", MARK: mark, "TMPDIR": str(temporary)},
    )


class Stranger(threading.Thread):
    """Looks for what the processes of a mark listen on, and speaks to it: bytes without a meaning,
    and the protocol of torch's store. `seen` and `answered`: where it found a socket, and where a
    store answered it."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark, self.over = mark, threading.Event()
        self.seen, self.answered = set[tuple[str, int]](), set[int]()

    def run(self) -> None:
        with ThreadPoolExecutor() as pool:  # who listens may keep a stranger waiting
            while not self.over.wait(0.02):
                for place in set(listening(marked(self.mark))) - self.seen:
                    self.seen.add(place)
                    pool.submit(self.speak, place[1])

    def speak(self, port: int) -> None:
        try:
            with socket.create_connection(("127.0.0.1", port), 1) as connection:
                connection.sendall(b"\xff" * 64)
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1))
            store.set("key", "of a stranger")
            if store.get("key") == b"of a stranger":
                self.answered.add(port)
        except (OSError, RuntimeError):
            return


@pytest.mark.slow
def test_ranks_listen_on_loopback_and_obey_no_stranger(tmp_path: Path) -> None:
    """The controls: a socket for all is one that the check finds, and a store that is open
    answers."""
    mark = f"ranks-{os.getpid()}"
    config, temporary = written(tmp_path, steps=4), tmp_path / "temporary"
    temporary.mkdir()
    alone = trained(config, tmp_path / "alone", 0)
    stranger, modes = Stranger(mark), set[int]()
    process = ranks_of(config, tmp_path / "run", mark, temporary)
    stranger.start()
    while process.poll() is None:
        modes |= {
            stat.S_IMODE(folder.stat().st_mode)
            for folder in temporary.glob("isobit-ranks-*")
            if folder.exists()
        }
        time.sleep(0.05)
    stranger.over.set()
    stranger.join()
    printed = process.communicate()[0]
    assert process.returncode == 0, printed
    assert len(stranger.seen) >= 2  # one of gloo's for each rank
    assert beyond_loopback(stranger.seen) == []
    assert stranger.answered == set()
    assert modes == {0o700}
    assert list(temporary.iterdir()) == []
    assert bits(tmp_path / "run") == alone


@pytest.mark.parametrize(
    ("family", "host", "open_to_all"),
    [("4", "0.0.0.0", True), ("6", "::", True), ("4", "127.0.0.1", False)],
)
def test_control_a_socket_for_all_is_seen(family: str, host: str, open_to_all: bool) -> None:
    with socket.socket(socket.AF_INET if family == "4" else socket.AF_INET6) as opened:
        opened.bind((host, 0))
        opened.listen()
        place = (host, opened.getsockname()[1])
        assert place in listening([os.getpid()])
        assert (place in beyond_loopback(listening([os.getpid()]))) == open_to_all


def test_control_an_open_store_answers_a_stranger() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stranger = Stranger("none")
    stranger.speak(store.port)
    assert stranger.answered == {store.port}


MEETING = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from isobit.distributed.transport import TorchRanks
from isobit.errors import RunFailed
from isobit.run.private import PrivateFolder
folder, rank, secret = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
class Store(dist.PrefixStore):
    def get(self, key):
        return secret if secret and key.endswith("secret") else super().get(key)
store = Store("", dist.FileStore(folder + "/store"))
try:
    ranks = TorchRanks(store, rank, 2, torch.device("cpu"), 30, PrivateFolder(Path(folder)))
    print(ranks.all_gather_json(rank), ranks.claim("a") + ranks.claim("a") >= 1)
    ranks.close()
except RunFailed as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("knows", [True, False])
def test_who_connects_as_another_rank_must_know_the_secret(tmp_path: Path, knows: bool) -> None:
    """Gloo takes whoever comes first to a port."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    secrets = ["", "" if knows else "guessed"]
    script = tmp_path / "meeting.py"
    script.write_text(MEETING)
    ranks = [
        warm.start(["python", str(script), str(folder), str(rank), secret], tmp_path)
        for rank, secret in enumerate(secrets)
    ]
    said = [rank.wait().stdout.strip() for rank in ranks]
    if knows:
        assert said == ["[0, 1] True"] * 2
    else:
        assert said[0] == "a stranger connected to the port of rank 0 as rank 1; start again"


LAUNCHER = """
import os, subprocess, sys, time
def child(rank, run, code="import time; print(flush=True); time.sleep(600)"):
    environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": "3", "ISOBIT_RANKS_FOLDER": run}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
late, alike, other, stranger = child(1, "a"), child(2, "a"), child(1, "b"), int(sys.argv[1])
for each in (late, alike, other):
    each.stdout.readline()
if sys.argv[2] == "stop":
    os.kill(late.pid, 19)
code = '''
from isobit.distributed.siblings import end_siblings
class Board(dict):
    set = dict.__setitem__
board = Board()
end_siblings(%s, board)
print(sorted(board))
''' % ([] if sys.argv[2] == "stop" else [1])
print(child(0, "a", code).communicate()[0].decode().strip(), late.wait(30), alike.poll(), other.poll())
for each in (alike, other):
    each.kill()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["late", "stop"])
def test_only_ranks_that_the_same_launcher_has_started_are_ended(how: str) -> None:
    """Those that are late, or stopped: not one that is alike, not another run's of that number, and
    not whatever process a store may name."""
    bystander = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env=os.environ | {"RANK": "1"}
    )
    try:
        command = [sys.executable, "-c", LAUNCHER, str(bystander.pid), how]
        printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert printed.stdout == "['ended-1'] -9 None None\n", printed.stderr
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_what_a_stranger_writes_into_torchruns_store_is_a_line_and_no_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()
    ranks = transport.TorchRanks(store, 0, 1, torch.device("cpu"), 30)
    try:
        store.set("isobit/at-0", b"9" * 5000 + b" \x1b[2J")
        store.set("isobit/pid/0", f"{os.getpid()} {os.uname().nodename}")
        assert ranks._missing() == "" or "\x1b" not in ranks._missing()
        store.set("isobit/failed", b"\xff\x1b[2Jrm -rf\nisobit: all is well")
        said = str(RankLost(ranks._why("gather", late=True)))
        assert "\n" not in said
        assert "\x1b" not in said
    finally:
        ranks.close()
    assert StoreBoard(store).get("none") is None


@pytest.mark.parametrize(
    ("local", "world", "bound"),
    [("2", "2", True), ("2", "4", False), (None, "2", False)],
    ids=["here", "two", "unknown"],
)
def test_gloo_and_nccl_listen_on_loopback_unless_several_machines_are_named(
    monkeypatch: pytest.MonkeyPatch, local: Any, world: str, bound: bool
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", world)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    launch._stay_on_this_machine()
    assert (os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")) == (
        ("lo", "=lo") if bound else (None, None)
    )
