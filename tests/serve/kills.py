"""A server that trains is killed at any moment, again and again, while the official client trains
and samples: it ends with the same adapter and the same samples, as bytes, as without kills.

    python -m tests.serve.kills --times 30 [--full]
"""

import argparse
import hashlib
import io
import os
import random
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import tinker

from benchmarks.common import Claim, Result, Row
from tests.ports import free_port

from .helpers import KEY, LONG, base_model
from .training import PROMPT, data

STEPS, RATE = 8, 3e-2


@dataclass
class Server:
    """The command, which is begun again on the same port and state after each kill."""

    base: Path
    folder: Path
    every: int = 3
    full: bool = False
    port: int = field(default_factory=free_port)
    process: "subprocess.Popen[bytes] | None" = None
    kills: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "token").write_text(KEY + "\n")
        (self.folder / "token").chmod(0o600)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """What all of them have said."""
        return (self.folder / "log").read_text()

    def start(self) -> None:
        """Begin, and do not wait."""
        words: list[object] = ["--name", "tiny", "--kv-pages", 200, "--train"]
        words += ["full"] * self.full
        words += [
            "--state",
            self.folder / "state",
            "--state-every",
            self.every,
            "--port",
            self.port,
            "--token",
            self.folder / "token",
        ]
        command = [sys.executable, "-m", "isobit", "serve", self.base, *words]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(list(map(str, command)), stderr=log)

    def wait(self, ended: threading.Event) -> None:
        """Until it answers."""
        end = time.monotonic() + LONG
        while not ended.is_set():
            assert self.process is not None
            assert self.process.poll() is None, self.log[-2000:]
            assert time.monotonic() < end
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.05)

    def stop(self, sig: signal.Signals = signal.SIGKILL) -> None:
        """End it by a signal."""
        assert self.process is not None
        self.process.send_signal(sig)
        self.process.wait(LONG)


@contextmanager
def killed(server: Server, times: int, rng: random.Random) -> Iterator[None]:
    """Meanwhile the server is killed so many times, most often while it works, at times while it
    begins."""
    ended, wrong = threading.Event(), list[BaseException]()

    def kill() -> None:
        try:
            for _ in range(times):
                if rng.random() < 0.75:
                    server.wait(ended)
                    pause = rng.random() ** 2 * 2.5
                else:
                    pause = rng.random() * 8
                if ended.wait(pause):
                    return
                server.stop()
                server.kills.append(pause)
                server.start()
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(2 * LONG)
    assert not wrong, wrong


def begun(url: str, rank: int = 4) -> tuple[Any, Any]:
    """A session, and a run in it. The official client tries a minute long to begin a session, and a
    busy machine may take longer to begin a server."""
    end = time.monotonic() + LONG
    while True:
        try:
            service = tinker.ServiceClient(base_url=url, api_key=KEY)
            made = service.create_lora_training_client(base_model="tiny", rank=rank, seed=7)
            return service, made.result()
        except tinker.APIConnectionError:
            assert time.monotonic() < end


def work(url: str, seed: int = 0, steps: int = STEPS, full: bool = False) -> tuple[str, list[Any]]:
    """(SHA-256 of the weights, samples on the way) of a client that trains, an adapter or all
    weights, and samples."""
    service, client = begun(url, 0 if full else 4)
    samples = list[Any]()
    for step in range(steps):
        asked: list[Any] = [
            client.forward_backward(data(100 * seed + 2 * step), "cross_entropy"),
            client.forward_backward(data(100 * seed + 2 * step + 1), "cross_entropy"),
            client.optim_step(tinker.AdamParams(learning_rate=RATE, grad_clip_norm=1.0)),
        ]
        losses = [future.result() for future in asked]
        samples.append(losses[0].metrics)
        if step % 3 == 1:
            sampler = client.save_weights_and_get_sampling_client().result()
            samples.append(sample(sampler, step))
        if step % 4 == 2:
            client.save_state(f"step-{step}").result()
            client.load_state_with_optimizer(
                f"tinker://{client.model_id}/weights/step-{step}"
            ).result()
    if full:  # of which there are no older ones
        sampler = client.save_weights_and_get_sampling_client().result()
    samples.append(sample(sampler, 99))  # of weights that are some steps old
    path = client.save_weights_for_sampler("final").result().path
    found = digest(url, path)
    service.close("success").result()
    return found, samples


def sample(client: Any, seed: int) -> Any:
    params = tinker.SamplingParams(max_tokens=6, seed=seed, stop=[])
    prompt = tinker.ModelInput.from_ints(PROMPT)
    found = client.sample(prompt=prompt, num_samples=2, sampling_params=params).result()
    return [(list(each.tokens), [float(x) for x in each.logprobs]) for each in found.sequences]


def digest(url: str, path: str) -> str:
    """Of a saved adapter, as its archive has it."""
    run, _, name = path.removeprefix("tinker://").partition("/")
    address = f"{url}/api/v1/training_runs/{run}/checkpoints/{name}/archive"
    end = time.monotonic() + LONG
    while True:
        try:
            answer = httpx.get(address, headers={"X-Api-Key": KEY}, timeout=LONG)
            assert answer.status_code == 200, answer.text
            break
        except httpx.TransportError:
            assert time.monotonic() < end
            time.sleep(0.2)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        (name,) = (name for name in archive.getnames() if name.endswith("model.safetensors"))
        file = archive.extractfile(name)
        assert file is not None
        return hashlib.sha256(file.read()).hexdigest()


@dataclass(frozen=True)
class Round:
    """A client's whole work, with kills of its server in it: how long it took, how many results it
    had, and whether these and its adapter are those without kills."""

    kills: int
    seconds: float
    results: int
    same: bool


def rounds(
    base: Path, folder: Path, times: int, seed: int, a_round: int = 6, full: bool = False
) -> Iterator[Round]:
    """Rounds of work until there were so many kills; `full`: all weights are trained. Raises
    AssertionError for what the servers should not have said."""
    server, rng = Server(base, folder, full=full), random.Random(seed)
    server.start()
    try:
        server.wait(threading.Event())
        expected, control = (work(server.url, seed, full=full) for seed in (0, 1))
        assert control[0] != expected[0]  # the control: other data
        while len(server.kills) < times:
            before, began = len(server.kills), time.monotonic()
            with killed(server, min(a_round, times - before), rng):
                found = work(server.url, full=full)
            took = time.monotonic() - began
            yield Round(len(server.kills) - before, took, len(found[1]), found == expected)
        assert "other bits" not in server.log, server.log[-2000:]
        assert "Traceback" not in server.log, server.log[-3000:]
        server.stop(signal.SIGTERM)
    finally:
        if server.process is not None:
            server.process.kill()
            server.process.wait(LONG)


def result(found: Sequence[Round]) -> Result:
    """The figures, which `benchmarks/results/serve_kills.json` has."""
    kills = sum(each.kills for each in found)
    case = f"{kills} kills in {len(found)} rounds"
    seconds = [each.seconds for each in found]
    made = Result("serve_kills")
    made.rows = [Row(case, "a round", statistics.median(seconds), min(seconds))]
    made.claims = [
        Claim("kills", kills, ">=", 1),
        Claim("rounds that end otherwise than without kills", others(found), "<=", 0),
        Claim("results compared", sum(each.results for each in found), ">=", 1),
    ]
    return made


def others(found: Sequence[Round]) -> int:
    """Rounds that did not end as without kills."""
    return sum(not each.same for each in found)


def main() -> None:
    """Kill so many times, and keep the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--full", action="store_true", help="all weights are trained")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write serve_kills.json")
    given = parser.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    found = list[Round]()
    with tempfile.TemporaryDirectory() as folder:
        base = base_model(Path(folder) / "base")
        for each in rounds(base, Path(folder), given.times, given.seed, full=given.full):
            print(each, flush=True)
            found.append(each)
    figures = result(found)
    figures.print()
    if given.out is not None:
        figures.write(given.out)
    assert all(claim.holds for claim in figures.claims)


if __name__ == "__main__":
    main()
