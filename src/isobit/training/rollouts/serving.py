"""The policy over HTTP while it trains (`serve.port`): when requests of clients are computed.

Requests have a separate engine over the same weights, so that the pages, batches and counts of the
rollout's engine do not change. That engine is stepped in the run's thread, where the working
weights are those of the step: between steps of the rollout's engine, and while the run waits for
rewards. Before the weights change, open requests are finished as far as the time allows, or begun
again with the next weights. Requests take at most `serve.share` of the time; of the time that they
leave over in one step, the next step adds no more than one step brings. Their cost in other threads
(HTTP, JSON and tokens) is part of the share: it is charged, up to half of the share, and no step
waits for it. Left out: evaluations, learning and checkpoints, during which requests wait; several
ranks; fleets.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from isobit.config import Config
from isobit.engine.engine import Engine
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.serve import INSTALLED_BY
from isobit.serve.desk import SWITCH_SECONDS
from isobit.serve.pumped import PumpedDevice
from isobit.training.loop import Rollout, Rollouts
from isobit.training.measuring.meter import added
from isobit.training.saving.snapshot import State

if TYPE_CHECKING:
    from isobit.serve.app import Background  # needs the extra isobit[serve]
    from isobit.serve.gateway import Gateway
    from isobit.serve.listening import Listener

_GRACE_S = 1.0
_BURST_S = 0.1  # other threads may begin this much before it is paid for


class Allowance:
    """The seconds that requests may take: `share` of all time, as it passes. Unused seconds are
    kept up to the number that one step has brought. Seconds that other threads have taken are paid
    back with at most half of the seconds that are earned; `open` and `charge` are for these
    threads."""

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._rate, self._clock = share / (1 - share), clock
        self._since = self._began = clock()
        self._given = 0.0  # seconds taken in this step
        self._most = 0.0
        self.left = 0.0
        self.used = 0.0
        self._charges = deque[float]()
        self._debt = 0.0  # seconds of other threads, not paid back yet

    def charge(self, seconds: float) -> None:
        """Charge `seconds` that another thread has worked."""
        self._charges.append(seconds)

    def open(self) -> bool:
        """Return whether another thread may work now."""
        owed = self._debt + sum(list(self._charges))
        return owed <= _BURST_S + self._rate / 2 * (self._clock() - self._since)

    def step(self) -> None:
        """Begin a step: keep at most as many unused seconds as the last step has brought."""
        self.earn()
        now = self._clock()
        self._most = self._rate * max(now - self._began - self._given, 0.0)
        self._began, self._given = now, 0.0
        self.left = min(self.left, self._most)

    def earn(self) -> None:
        """Add the seconds that are earned by the time since the last call, in which the run did its
        own work, and pay back seconds of other threads."""
        while self._charges:
            seconds = self._charges.popleft()
            self.used += seconds
            self._debt += seconds
        now = self._clock()
        earned = self._rate * (now - self._since)
        paid = min(self._debt, earned / 2)
        self._debt -= paid
        self.left += earned - paid
        self._since = now

    def spend(self, work: Callable[[], None], free: bool = False) -> None:
        """Call `work` and subtract its time from the seconds left. With `free`, for time in which
        the run would only wait, the time counts as used and is not subtracted."""
        self.earn()
        work()
        now = self._clock()
        took, self._since = now - self._since, now
        self.used += took
        self._given += took
        self.left -= 0.0 if free else took


class Serving:
    """A server whose requests are computed when the run calls it; a context manager. `lines`: the
    lines to print when it begins."""

    def __init__(
        self, gateway: "Gateway", server: "Background", share: float, lines: tuple[str, ...]
    ) -> None:
        assert isinstance(gateway.device, PumpedDevice)
        self.device, self._gateway, self._server = gateway.device, gateway, server
        self._allowance = gateway.desk.account = Allowance(share)
        self._http_seconds, self._switch = 0.0, sys.getswitchinterval()
        self._counted: Mapping[str, float] = {}
        self.lines = lines

    def __enter__(self) -> "Serving":
        self._switch = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch, SWITCH_SECONDS))
        self._server.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._gateway.draining = True
        self.device.end()
        self.close()
        sys.setswitchinterval(self._switch)

    def close(self) -> None:
        """End the server, and let others have its port; it may not have begun."""
        self._server.stop()

    @property
    def engine(self) -> Engine:
        return self.device.engine

    def begin_step(self, version: int) -> None:
        """Begin a step with weights of a new `version`, which stay until `settle`: charge the time
        of the HTTP thread since the last step, and compute requests as long as the time allows."""
        self.device.version = version
        earlier, self._http_seconds = self._http_seconds, self._server.seconds()
        self._allowance.charge(max(self._http_seconds - earlier, 0.0))
        self._allowance.step()
        self.between()

    def between(self) -> None:
        """Compute requests as long as the time of the step allows."""
        self._allowance.earn()
        while self._allowance.left > 0 and self.device.busy:
            self._allowance.spend(self.device.pump)

    def meanwhile(self) -> None:
        """Step the engine of requests once, if it has any, while the run waits for something
        else."""
        if self.device.busy:
            self._allowance.spend(self.device.pump, free=True)

    def settle(self) -> None:
        """Finish open requests as far as the time allows, before the weights change; the others
        begin again with the next weights."""
        self._allowance.earn()
        while self._allowance.left > 0 and self.device.num_open:
            self._allowance.spend(lambda: self.device.pump(admit=False))
        self.device.begin_again()

    def metrics(self) -> dict[str, float]:
        """Return the metrics `serve/requests`, `serve/tokens` and `time/serve` (seconds) of the
        time since the last call."""
        answered = self.device.answered
        now = {f"serve/{name}": float(answered[name]) for name in ("requests", "tokens")}
        now["time/serve"] = self._allowance.used
        earlier, self._counted = self._counted, now
        return {name: value - earlier.get(name, 0.0) for name, value in now.items()}


@dataclass(frozen=True, eq=False)
class ServedRollouts:
    """The batches of a source; while they are rolled out, requests of clients are computed. The
    version of the weights is the number of steps that they have learned, as in a checkpoint's
    name."""

    source: Rollouts
    serving: Serving
    state: State

    def next(self) -> Rollout:
        self.serving.begin_step(self.state.step)
        rollout = self.source.next()
        self.serving.settle()
        return replace(rollout, metrics=added(rollout.metrics, self.serving.metrics()))


@dataclass(frozen=True, eq=False)
class Place:
    """The socket on which a run will serve and the tokens that it accepts, read from `file`;
    `made`: whether the file was written just now."""

    listener: "Listener"
    tokens: tuple[str, ...]
    file: Path
    made: bool


def take_place(config: Config) -> Place | None:
    """Take the port of a run that serves, before its model is read, and read or make its tokens;
    return None for a run that does not serve. Raises IsobitError for packages that are not
    installed, a file of tokens that cannot be used, and a port that cannot be taken."""
    serve = config.serve
    if serve.port is None:
        return None
    try:
        import isobit.serve.app  # noqa: F401  # which needs the extra
        from isobit.serve import keys
        from isobit.serve.listening import listen
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("isobit"):
            raise
        raise IsobitError(f"serve.port needs {error.name}: {INSTALLED_BY}") from None
    file = keys.default_file() if serve.token is None else Path(serve.token)
    tokens, made = keys.read_or_make(file, "serve.token")
    return Place(listen("127.0.0.1", serve.port, "serve.port"), tokens, file, made)


def open_serving(
    config: Config, model: Model, reserved: int, address: Place | None
) -> Serving | None:
    """Return the server of a run at its `address`, or None without one. The server answers once it is
    entered as a context manager. `reserved`: bytes of the GPU that the first update will take.
    Raises IsobitError for a precision under which the answer to a request depends on more than the
    weights."""
    if address is None:
        return None
    from isobit.model.text.tool_formats.table import format_of
    from isobit.serve.app import Background, ServerOptions
    from isobit.serve.gateway import Gateway
    from isobit.serve.requests import Limits

    serve = config.serve
    _check_precision(model)
    size = replace(config.engine, max_sequences=serve.max_sequences, kv_pages=None)
    longest = model.config.max_positions
    engine = Engine.sized_for(model, [[0]], serve.max_sequences, longest, size, reserved)
    name = Path(config.run.dir).name
    tools = format_of("auto", model.tokenizer.chat_template)
    gateway = Gateway(engine, name, tools, Limits(), device=PumpedDevice)
    gateway.name_by(config.run.dir)
    server = Background(gateway, address.tokens, ServerOptions(grace=_GRACE_S), address.listener)
    lines = (
        f"serving {name} on http://127.0.0.1:{server.port}/v1 while it trains",
        f"token: {'(a new one)' if address.made else '(the one)'} in {address.file}",
    )
    return Serving(gateway, server, serve.share, lines)


def _check_precision(model: Model) -> None:
    precision = model.precision
    reason = precision.varies_with_batch()
    if reason is None and precision.calibrated:
        reason = "the KV cache is calibrated on data of the run"
    if reason is not None:
        raise IsobitError(
            f"serve.port: precision {precision.name}: {reason}, so an answer would depend on more "
            "than the weights; take another precision, such as fp8"
        )
