"""Ray that `isobit train` starts ends with it, and what cannot work is refused in one line, before
the run begins."""

import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isobit.config import load_config
from isobit.engine.fleet import cluster
from isobit.engine.fleet.cluster import Cluster
from isobit.engine.fleet.settings import FleetSettings
from isobit.errors import IsobitError
from isobit.run.directory import read_jsonl
from isobit.training.train import train
from tests import sockets
from tests.documents import ROOT
from tests.runs import wait_for_lines, write_config
from tests.until import until

MARK = "ISOBIT_TEST_FLEET"
CPU = torch.device("cpu")


def marked(value: str) -> list[str]:
    """The processes, zombies aside, that inherited a mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={value}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().decode().replace("\0", " "))
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_process_is_left(
    tmp_path: Path, base_model: Path, number: signal.Signals, code: int
) -> None:
    """After SIGKILL two idle agents of Ray's take a minute to notice, which nothing here waits
    for."""
    pytest.importorskip("ray", reason="the fleet's tests need Ray: pip install 'isobit[ray]'")
    config = write_config(tmp_path, base_model, steps=10000, rollouts_ahead=1, fleet={"engines": 1})
    value = f"{os.getpid()}-{code}"
    environment = os.environ | {MARK: value, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "isobit", "train", str(config), "--quiet"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        wait_for_lines(tmp_path / "run" / "metrics.jsonl", 2)
        assert any("raylet" in line for line in marked(value))  # the control: they would be found
        process.send_signal(number)
        errors = process.communicate(timeout=120)[1]
    assert process.returncode == code
    late = ("Agent",) if number == signal.SIGKILL else ()
    until(lambda: all(any(name in line for name in late) for line in marked(value)))
    if number == signal.SIGTERM:
        first, second = errors.splitlines()
        assert first == "isobit: finishing this step, then saving; once more to end at once"
        assert second.startswith("stopped after step ")
        *_, last = read_jsonl(tmp_path / "run" / "metrics.jsonl")
        assert (tmp_path / "run" / "checkpoints" / f"step-{int(last['step']):06d}").is_dir()


@pytest.mark.slow
def test_ray_that_is_started_here_listens_on_loopback_and_leaves_no_file(
    tmp_path: Path, base_model: Path
) -> None:
    """The control: raylet and engine were seen. tests/distributed/test_strangers.py shows what the
    check finds."""
    pytest.importorskip("ray", reason="the fleet's tests need Ray: pip install 'isobit[ray]'")
    mark, folder = (
        f"ray-{os.getpid()}",
        Path(tempfile.mkdtemp(dir="/tmp")),
    )  # short: sockets' names are
    config = write_config(tmp_path, base_model, steps=6, rollouts_ahead=1, fleet={"engines": 1})
    python = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    environment = os.environ | {sockets.MARK: mark, "RAY_TMPDIR": str(folder), "PYTHONPATH": python}
    environment["RAY_AUTH_MODE"] = (
        "disabled"  # of a cluster that is elsewhere; here it opens nothing
    )
    command = [sys.executable, "-m", "isobit", "train", str(config), "--quiet"]
    seen, modes, names = set[tuple[str, int]](), set[int](), set[str]()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        while process.poll() is None:
            found = sockets.listening(sockets.marked(mark))
            seen |= set(found)
            names |= {name for each in set(found.values()) for name in _name(each)}
            modes |= {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()}
            time.sleep(0.1)
        assert process.returncode == 0, process.communicate()[1]
    assert {"gcs_server", "raylet", "ray::Worker"} <= {name[:11] for name in names}
    assert sockets.beyond_loopback(seen) == []
    assert modes == {0o700}
    assert list(folder.iterdir()) == []
    folder.rmdir()


def _name(process: int) -> list[str]:
    try:
        return [Path(f"/proc/{process}/comm").read_text().strip()]
    except OSError:
        return []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "why"), [("missing", "No such file"), ("d" * 90, "path length cannot exceed")]
)
def test_a_folder_that_ray_cannot_use(tmp_path: Path, place: str, why: str) -> None:
    pytest.importorskip("ray", reason="the fleet's tests need Ray: pip install 'isobit[ray]'")
    (tmp_path / ("d" * 90)).mkdir()
    code = "from isobit.engine.fleet.cluster import import_ray, start_ray; start_ray(import_ray())"
    environment = os.environ | {"RAY_TMPDIR": str(tmp_path / place)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(
        rf"IsobitError: fleet: Ray does not start in .*{place} \(RAY_TMPDIR\): .*{why}", last
    ), done.stderr
    assert list((tmp_path / ("d" * 90)).iterdir()) == []


STRANGER = """
import os, sys, ray
from ray._raylet import GcsClient
try:
    client = GcsClient(address=sys.argv[1])
    put = client.internal_kv_put(b"key", b"of a stranger", True, None)
    print(put, client.internal_kv_get(b"key", None, timeout=10))
except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("token", [None, "0" * 64, "the run's"])
def test_ray_that_is_started_here_answers_who_has_the_token(ray: Any, token: str | None) -> None:
    """What a stranger could do without it: write to Ray's store of classes, which engines
    unpickle."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")
    }
    if token is not None:
        own = cluster._TOKEN["RAY_AUTH_TOKEN"] if token == "the run's" else token
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": own}
    command = [sys.executable, "-c", STRANGER, ray.get_runtime_context().gcs_address]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    if token == "the run's":
        assert done.stdout == "1 b'of a stranger'\n", done.stderr
    else:
        assert done.stdout == "AuthenticationError\n", done.stderr
    assert "RAY_AUTH_TOKEN" not in os.environ  # what else this process starts does not have it


def test_without_ray(tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    config = load_config(write_config(tmp_path, base_model), ["fleet.engines=1"])
    with pytest.raises(IsobitError, match=r"fleet.engines needs Ray, .*: pip install ray$"):
        train(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "127.0.0.1:1",
            "no Ray cluster at '127.0.0.1:1': .*failed.*; start one with `ray start --head`, "
            "set RAY_AUTH_MODE",
        ),
        (
            "ray://127.0.0.1:1",
            "expected auto or HOST:PORT, got 'ray://127.0.0.1:1'; Ray's client .*: run on a "
            "machine of",
        ),
        ("127.0.0.1:99999999", "no Ray cluster at"),
        ("somewhere", "expected auto or HOST:PORT, got 'somewhere'"),
        ("auto", "no Ray cluster at 'auto': no address"),
    ],
)
def test_no_cluster_at_the_address(
    monkeypatch: pytest.MonkeyPatch, address: str, message: str
) -> None:
    def init(**given: Any) -> None:
        raise ConnectionError("no address")

    stand_in = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setattr(cluster, "import_ray", lambda: stand_in)
    with pytest.raises(IsobitError, match=message):
        Cluster(FleetSettings(engines=1, cluster=address), CPU)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            FleetSettings(engines=5),
            "5 engines need 5 CPUs, .* has 4 CPUs, 0 GPUs on 1 machines: room for 4; lower",
        ),
        (FleetSettings(engines=2, cpus_per_engine=2.5), "2 engines need 5 CPUs, .*: room for 1"),
        (
            FleetSettings(engines=1, gpus_per_engine=1),
            "1 engines need 1 CPUs and 1 GPUs, .* 0 GPUs .*: room for 0",
        ),
    ],
)
def test_no_room(ray: Any, settings: FleetSettings, message: str) -> None:
    with pytest.raises(IsobitError, match=message):
        Cluster(settings, CPU)
    Cluster(FleetSettings(engines=4), CPU).close()
    assert ray.is_initialized()  # what was there before stays


def test_ranks_with_a_fleet_charge_no_kl_to_the_reward(tmp_path: Path, base_model: Path) -> None:
    overrides = ["fleet.engines=1", "algorithm.kl_coefficient=0.1", "algorithm.kl_in_reward=true"]
    config = write_config(tmp_path, base_model)
    with pytest.raises(IsobitError, match=r"kl_in_reward is computed by all ranks"):
        load_config(config, [*overrides, "ranks=2"])
    load_config(config, overrides)
