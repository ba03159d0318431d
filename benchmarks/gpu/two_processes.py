"""Whether a backward repeats in another process: digests of its products, and of a model's whole
gradient.

Products of a backward are cuBLAS's. PyTorch's manual says that cuBLAS may choose otherwise when
several streams share a workspace, unless CUBLAS_WORKSPACE_CONFIG fixes it. So every setting is run
in two processes at once, each on two streams, and their digests are compared; between settings they
are only recorded.

`python -m benchmarks.gpu.two_processes` is one such process: it prints its digests as JSON.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.gpu.common import Bench, Case, random_model
from benchmarks.gpu.shapes import SHAPES
from isobit.kernels import Layout, get_ops
from isobit.precision import E4M3, QuantSpec

SETTINGS = (None, ":4096:8", ":16:8")
VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_ROW, _BLOCK = QuantSpec(E4M3, "1x128"), QuantSpec(E4M3, "128x128")
_LIMIT_S = 60  # less than the silence after which the stage's own process is ended


def run(bench: Bench) -> None:
    """A case for every setting of the variable."""
    for setting in SETTINGS[:1] if bench.rehearsal else SETTINGS:
        name = f"two processes' backward, {VARIABLE} {setting or 'not set'}"
        if bench.wants(name):
            with bench.case(name) as case:
                _compare(case, setting, bench)


def _compare(case: Case, setting: str | None, bench: Bench) -> None:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment |= {} if setting is None else {VARIABLE: setting}
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.two_processes",
        *(["--rehearse"] if bench.rehearsal else []),
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=environment, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    found = []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=500 if bench.rehearsal else _LIMIT_S)
            if process.returncode:
                raise RuntimeError(f"exit status {process.returncode}: {errors[-1200:]}")
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for name, digests in found[0].items():
        repeated = len(set(digests)) == 1
        equal = digests == found[1][name]
        case.row(
            name, compared=len(digests),
            differing=sum(a != b for a, b in zip(digests, found[1][name])),
            digest=digests[0], repeated=repeated, holds=repeated and equal,
        )  # fmt: skip
    control = found[0]["another seed"] != found[0]["bf16 for the input"]
    case.row("control: another seed", expected="different", holds=control)


def digests(rehearsal: bool) -> dict[str, list[str]]:
    """Of every product: twice on this stream, and once on another while this one is busy."""
    device = torch.device("cpu" if rehearsal else "cuda")
    found: dict[str, list[str]] = {}
    for name, call in _products(rehearsal, device):
        results = [call(), call()]
        if not rehearsal:
            torch.cuda.synchronize()
            side = torch.cuda.Stream()
            busy = torch.randn(4096, 4096, device=device)
            for _ in range(4):
                busy @ busy
            with torch.cuda.stream(side):
                results.append(call())
            torch.cuda.synchronize()
        found[name] = [_digest([result]) for result in results]
    for preset in ("fp8", "bf16"):
        found[f"gradient of a model, {preset}"] = [
            _digest(_gradient(preset, rehearsal)) for _ in range(2)
        ]
    return found


def _products(rehearsal: bool, device: torch.device) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The products of a linear layer's backward, as the model calls them."""
    ops = get_ops("triton")
    tokens, outputs, inputs = (8, 48, 32) if rehearsal else (8192, 4096, 4096)

    def normal(seed: int, *shape: int) -> Tensor:
        return torch.randn(
            *shape, generator=torch.Generator(device).manual_seed(seed), device=device
        ).bfloat16()

    dy, x, w = normal(0, tokens, outputs), normal(1, tokens, inputs), normal(2, outputs, inputs)
    yield "bf16 for the input", lambda: ops.gradient_product(dy, w.t(), torch.bfloat16)
    yield "bf16 for the weight", lambda: ops.gradient_product(dy.t(), x.t(), torch.float32)
    other = normal(3, tokens, outputs)
    yield "another seed", lambda: ops.gradient_product(other, w.t(), torch.bfloat16)
    weight, low = ops.quantize(w, _BLOCK), ops.quantize(dy, _ROW)
    yield "fp8 for the input", lambda: ops.gradient_product(low, weight.transpose(), torch.bfloat16)
    along = [ops.quantize_along_tokens(t, _ROW, "x") for t in (dy, x)]
    yield "fp8 for the weight", lambda: ops.gradient_product(along[0], along[1], torch.float32)


def _gradient(preset: str, rehearsal: bool) -> list[Tensor]:
    config = replace(SHAPES["Qwen3-0.6B"], num_layers=2)
    lengths = [700, 1200, 33]
    if rehearsal:
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 16,
        }
        config, lengths = replace(config, vocab_size=64, num_layers=1, **sizes), [3, 2]
    model = random_model(config, preset)
    layout = Layout.packed(lengths).to(model.ops.device)
    tokens = torch.arange(sum(lengths), device=model.ops.device) % config.vocab_size
    hidden = model.transformer.hidden(tokens, layout)
    model.transformer.head_logprobs(hidden, tokens.roll(-1))[0].sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def _digest(tensors: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    rehearsal = "--rehearse" in sys.argv[1:]
    print(json.dumps(digests(rehearsal)))


if __name__ == "__main__":
    main()
