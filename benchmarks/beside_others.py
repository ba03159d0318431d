"""Tokens per second of a rollout on its own and beside processes that are always busy, in a script
that imports isobit first and in one that imports torch first.

Beside `n` busy processes a run of `t` threads on `c` cores has a fair share of t / (t + n) of them.
Each script is a process, which loads the model and samples once for a line that it reads; they take
turns with `transformers`, vLLM and llama.cpp (`rollout.py` says how these are named), and while one
samples the others wait. Run as a script, this file is such a process.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path

HIDDEN, LAYERS, VOCABULARY, BATCH, NEW = 512, 8, 4096, 32, 64
FIRST = ("isobit", "torch")
BUSY = (0, 1, 2)
AIM = 0.5
"""Of the fair share, at least."""


class Sampling:
    """A process that has loaded the model; a call samples, and returns when all tokens are there."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._wait()

    def __call__(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._wait()

    def _wait(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "done\n":
            raise RuntimeError("a sampling process ended; its messages are above")


@contextmanager
def sampling(model: Path, first: str, threads: int) -> Iterator[Sampling]:
    """A process that imports `first` before the other."""
    given = json.dumps({"model": str(model), "first": first, "threads": threads})
    own = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    command = [sys.executable, str(Path(__file__).resolve()), given]
    root = str(Path(__file__).resolve().parents[1])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root,
        env=own | {"PYTHONPATH": root},
    ) as process:  # fmt: skip
        try:
            yield Sampling(process)
        finally:
            process.kill()


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    spin = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(spin) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(rounds: int):  # type: ignore[no-untyped-def]
    import torch

    from benchmarks.common import Claim, Result, race
    from benchmarks.models import save_model
    from benchmarks.peer import LLAMACPP, VLLM, peers
    from benchmarks.rollout import drawn_prompts, transformers

    result, prompts = Result("beside_others"), drawn_prompts(BATCH)
    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = save_model(Path(folder) / "model", HIDDEN, LAYERS, VOCABULARY)
        own = {
            f"{first} imported first": stack.enter_context(sampling(model, first, threads))
            for first in FIRST
        }
        others = {
            **transformers(model, prompts, NEW),
            **stack.enter_context(peers(model, prompts, NEW, (VLLM, LLAMACPP[0]))),
        }
        for count in BUSY:
            with busy(count):
                result.rows += race(
                    f"beside {count} busy processes", {**others, **own}, rounds,
                    amount=BATCH * NEW, unit="tokens",
                )  # fmt: skip
    for name in own:
        alone = result.median(name, f"beside {BUSY[0]} busy processes")
        for count in BUSY[1:]:
            fair = min(1.0, cores / (threads + count))
            speed = alone / result.median(name, f"beside {count} busy processes")
            what = f"{name}: speed beside {count} busy processes over the fair share"
            result.claims.append(Claim(what, speed / fair, ">=", AIM))
    for count in BUSY:
        case, name = f"beside {count} busy processes", f"{FIRST[0]} imported first"
        for peer in others:
            speed = result.median(peer, case) / result.median(name, case)
            result.claims.append(Claim(f"{case}: isobit over {peer}", speed, ">=", 1.0))
    return result


def _serve(given: dict[str, object]) -> None:
    import_module(str(given["first"]))
    import torch

    from benchmarks import rollout

    torch.set_num_threads(int(str(given["threads"])))
    prompts = rollout.drawn_prompts(BATCH)
    sample = rollout._own(Path(str(given["model"])), prompts, "fp8", "bitwise", NEW)
    print("done", flush=True)
    for _ in sys.stdin:
        sample()
        print("done", flush=True)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
