"""Ray: started here or joined, checked for room before anything waits for it, and left as it was
found.

A Ray that is started here has no dashboard and sends no statistics; it listens on loopback, answers
clients that have this process's token, and has its sockets in a folder that no other user may
enter. It ends with this process, however that ends: the kernel ends Ray's processes with their
parent. Signal handlers stay the run's. Left out: what runs on it (`fleet.py`).
"""

import asyncio
import logging
import os
import re
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import torch

from isobit.engine.fleet.settings import FleetSettings
from isobit.errors import IsobitError, listed

_ANSWERS_S = 10.0
_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""Of the Ray that this process starts; those that it starts inherit it."""
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def import_ray() -> Any:
    """Return the module `ray`. Raises IsobitError where it is not installed."""
    os.environ.update({name: os.environ.get(name, value) for name, value in _QUIET.items()})
    try:
        import ray
    except ImportError:
        raise IsobitError(
            "fleet.engines needs Ray, which is not installed: pip install ray"
        ) from None
    return ray


class Cluster:
    """A connection to Ray. `ray` is the module; `close` ends what was begun here, and nothing
    else."""

    def __init__(self, settings: FleetSettings, device: torch.device) -> None:
        self.ray = import_ray()
        self._ours = (
            not self.ray.is_initialized()
        )  # a program that embeds isobit may have joined a cluster already
        self._folder: str | None = None
        if settings.gpus_per_engine is not None:
            self.gpus = settings.gpus_per_engine
        else:
            self.gpus = 1.0 if device.type == "cuda" else 0.0
        self.cpus = settings.cpus_per_engine
        if self._ours:
            self._folder = _connect(
                self.ray, settings, device if self.gpus else torch.device("cpu")
            )
        try:
            self._check_room(settings)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._ours and self.ray.is_initialized():
            with _own_signals():
                self.ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _check_room(self, settings: FleetSettings) -> None:
        """Raise IsobitError if the whole cluster, were it idle, has no room for the engines."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        room = sum(self._fit(node) for node in nodes)
        if room >= settings.engines:
            return
        have = ", ".join(
            f"{sum(node.get(kind, 0) for node in nodes):g} {kind}s" for kind in ("CPU", "GPU")
        )
        raise IsobitError(
            f"fleet.engines: {settings.engines} engines need {self._wanted(settings.engines)}, "
            f"each its own on one machine, and the cluster has {have} on {len(nodes)} machines: "
            f"room for {room}; lower fleet.engines, fleet.cpus_per_engine or fleet.gpus_per_engine"
        )

    def _fit(self, node: Mapping[str, float]) -> int:
        """Return the number of engines that a machine has room for."""
        wanted = {"CPU": self.cpus, "GPU": self.gpus}
        return min(
            int(node.get(kind, 0.0) / needed + 1e-9) for kind, needed in wanted.items() if needed
        )

    def _wanted(self, engines: int) -> str:
        cpus = f"{engines * self.cpus:g} CPUs"
        return f"{cpus} and {engines * self.gpus:g} GPUs" if self.gpus else cpus


def _connect(ray: Any, settings: FleetSettings, device: torch.device) -> str | None:
    """Start Ray, or join it; return the folder of a Ray that was started, or None."""
    common: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "configure_logging": False,
    }
    logging.getLogger("ray").setLevel(logging.ERROR)
    if settings.cluster is None:
        with _own_signals(), _other_gpus(device):
            return start_ray(ray, **common)
    _require_listener(settings.cluster)
    try:
        with _own_signals():
            ray.init(address=settings.cluster, **common)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise _absent(settings.cluster, " ".join(str(error).split())[:200]) from None
    return None


def start_ray(ray: Any, **options: Any) -> str:
    """Start Ray on this machine, for this process alone; return the folder of its sockets and logs,
    which the caller removes when Ray ends. Raises IsobitError for a Ray that would listen to
    others."""
    parent, folder = (
        os.environ.get("RAY_TMPDIR", "/tmp"),
        "",
    )  # not TMPDIR: the names of sockets must be short
    try:
        folder = tempfile.mkdtemp(prefix="isobit-", dir=parent)
        with _closed_to_others():
            ray.init(address="local", include_dashboard=False, _temp_dir=f"{folder}/ray", **options)
            addresses = {node["NodeManagerAddress"] for node in ray.nodes()}
        if not addresses <= {"127.0.0.1", "::1"}:
            raise IsobitError(
                f"fleet: Ray {ray.__version__} listens at {listed(sorted(addresses))}, not on "
                "loopback"
            )
    except BaseException as error:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise IsobitError(
                f"fleet: Ray does not start in {parent} (RAY_TMPDIR): {error}"
            ) from None
        raise
    return folder


@contextmanager
def _closed_to_others() -> Iterator[None]:
    """Make a Ray that is started here take this process's token, and the loopback for its
    address."""
    ray_constants: Any = import_module("ray._private.ray_constants")
    raylet: Any = import_module("ray._raylet")
    saved = {name: os.environ.get(name) for name in _TOKEN}
    cluster = ray_constants.ENABLE_RAY_CLUSTER
    try:
        os.environ |= _TOKEN
        ray_constants.ENABLE_RAY_CLUSTER = False
        raylet.Config.initialize(
            ""
        )  # a program that has imported Ray before has read the environment of then
        raylet.AuthenticationTokenLoader.instance().reset_cache()
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = cluster
        for name, value in saved.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}


def _absent(cluster: str, why: str) -> IsobitError:
    return IsobitError(
        f"fleet.cluster: no Ray cluster at {cluster!r}: {why}; start one with `ray start --head`, "
        "set RAY_AUTH_MODE=token where it asks for Ray's token, or leave fleet.cluster out to "
        "start Ray here"
    )


def _require_listener(cluster: str) -> None:
    """Raise IsobitError if nothing answers at an address: Ray itself would try for minutes."""
    match = re.fullmatch(r"\[?([^\[\]/]+?)\]?:(\d+)", cluster)
    if match is None:
        if cluster != "auto":
            raise IsobitError(
                f"fleet.cluster: expected auto or HOST:PORT, got {cluster!r}; Ray's client "
                "(ray://) has no groups of "
                "concurrent calls, which engines need: run on a machine of the cluster"
            )
        return

    async def reach() -> None:
        _, writer = await asyncio.wait_for(
            asyncio.open_connection(match[1], int(match[2])), _ANSWERS_S
        )
        writer.close()

    try:
        asyncio.run(reach())
    except (TimeoutError, OSError, OverflowError) as error:
        raise _absent(cluster, str(error) or f"no answer in {_ANSWERS_S:g} s") from None


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the run's own signal handlers: Ray sets one of SIGTERM."""
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            with suppress(ValueError):  # not in the main thread, where Ray sets none either
                signal.signal(number, handler)


@contextmanager
def _other_gpus(device: torch.device) -> Iterator[None]:
    """Hide the GPUs of the learner from a Ray that is started here, so that it shares out all
    others to engines that have their own; this rank is the learner's first."""
    name = "CUDA_VISIBLE_DEVICES"
    if device.type != "cuda":
        yield
        return
    visible = os.environ.get(name)
    seen = (
        visible.split(",")
        if visible is not None
        else [str(i) for i in range(torch.cuda.device_count())]
    )
    first = torch.cuda.current_device()
    learner = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    os.environ[name] = ",".join(gpu for index, gpu in enumerate(seen) if index not in learner)
    try:
        yield
    finally:
        if visible is None:
            del os.environ[name]
        else:
            os.environ[name] = visible
