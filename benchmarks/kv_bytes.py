"""Bytes of the KV cache per token under `fp8` beside `bf16`, counted from what is allocated, scales included."""

import tempfile
from pathlib import Path

from benchmarks.common import Claim, Result
from benchmarks.models import save_model
from isobit import Engine, Model
from isobit.kernels import KVStore
from isobit.precision import BF16, PRESETS


def run(rounds: int) -> Result:
    result = Result("kv_bytes")
    for dim in (64, 128):
        quantized = KVStore.allocate(4096, 8, dim, PRESETS["fp8"].rollout.kv, BF16).nbytes
        plain = KVStore.allocate(4096, 8, dim, None, BF16).nbytes
        result.claims.append(Claim(f"one layer, head dimension {dim}: fp8 over bf16", quantized / plain, "<=", 0.55))
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder) / "model", 512, 8, 4096)
        per_token = {p: Engine(Model.load(path, p), 256).kv_bytes_per_token for p in ("fp8", "bf16")}
    ratio = per_token["fp8"] / per_token["bf16"]
    what = f"whole engine: {per_token['fp8']:.0f} over {per_token['bf16']:.0f} bytes per token"
    result.claims.append(Claim(what, ratio, "<=", 0.55))
    return result
