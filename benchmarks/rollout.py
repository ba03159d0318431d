"""Tokens per second of the rollout engine beside `transformers.generate`, same weights, sampling at temperature 1.

Batch 32, prompts of 32 tokens, 128 new tokens, hidden 512, 8 layers, vocabulary 4096. No end of sequence: all sample
to the limit.
"""

import tempfile
from pathlib import Path

import torch

from benchmarks.common import Claim, Contestants, Result, race
from benchmarks.models import save_model
from isobit import Engine, Model, Sampling
from isobit.engine.types import EngineSize

BATCH, PROMPT, NEW = 32, 32, 128
FLOWS = (("bf16", "fast"), ("bf16", "bitwise"), ("fp8", "bitwise"), ("fp8", "exact"), ("fp8", "fast"))


def run(rounds: int) -> Result:
    result = Result("rollout")
    prompts = torch.randint(10, 60, (BATCH, PROMPT)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder) / "model", 512, 8, 4096)
        contestants = {**_peers(path, prompts), **{f"isobit {p} {c}": _own(path, prompts, p, c) for p, c in FLOWS}}
        result.rows = race("32 x (32 + 128) tokens", contestants, rounds, amount=BATCH * NEW, unit="tokens")
    float32, bfloat16 = result.median("transformers float32"), result.median("transformers bfloat16")
    for name, peer, target in (
        ("isobit bf16 fast", bfloat16, 2.0),
        ("isobit bf16 bitwise", bfloat16, 1.3),
        ("isobit fp8 bitwise", bfloat16, 1.3),
        ("isobit fp8 exact", float32, 1.5),
    ):
        peer_name = "bfloat16" if peer is bfloat16 else "float32"
        result.claims.append(Claim(f"{name} over transformers {peer_name}", peer / result.median(name), ">=", target))
    return result


def _own(path: Path, prompts: list[list[int]], precision: str, consistency: str):  # type: ignore[no-untyped-def]
    model = Model.load(path, precision, consistency=consistency)
    # the same prompts in every round: with a prefix cache all but the first would find their pages
    engine = Engine.sized_for(model, prompts, BATCH, NEW, EngineSize(prefix_cache=False))
    return lambda: engine.generate(prompts, Sampling(1, NEW, seed=0, ignore_eos=True))


def _peers(path: Path, prompts: list[list[int]]) -> Contestants:
    from transformers import AutoModelForCausalLM, GenerationConfig

    ids = torch.tensor(prompts)
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0, eos_token_id=1
    )

    def peer(dtype: torch.dtype):  # type: ignore[no-untyped-def]
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)

    return {"transformers float32": peer(torch.float32), "transformers bfloat16": peer(torch.bfloat16)}
