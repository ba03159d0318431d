"""What it costs to decode linear attention by its recurrence and to learn it in chunks, as engines
and trainers do.

A model samples completions with isobit's rollout, token by token. Its log-probabilities of them are
computed twice more: by isobit's learner, whose delta rule is the same recurrence, and by one that
differs in this operator alone: transformers' `torch_chunk_gated_delta_rule`, in chunks of 64 tokens
in float32, as common trainers have it (Yang et al. 2024, arXiv 2412.06464, section 3.3). All else
is the same in every bit, so what differs is the order of the recurrence's sums, and what a flow's
roundings make of it afterwards.

The last of the `FLOWS` has two engines, whose mismatch is there without chunks: the measure of what
the others show.

`python -m benchmarks.experiments.recurrence MODEL --prompt TEXT --out FILE` prints a table;
docs/experiments/recurrence.md shows what came out. Left out: kernels of other chunk sizes, or in
BF16.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.experiments.command import command, of_a_model, write
from isobit import Engine, Model, Sampling
from isobit.kernels import DeltaHeads, Layout, Ops, StateStore
from isobit.kernels.watching import Watching

FLOWS = ("float32", "bf16", "fp8", "bf16[engines=separate]")
_CHUNK = 64


class InChunks(Watching):
    """Operators whose delta rule is transformers' form in chunks."""

    def __init__(self, ops: Ops) -> None:
        from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

        super().__init__(ops)
        self._rule = torch_chunk_gated_delta_rule

    def delta_rule(
        self,
        qkv: Tensor,
        gates: Tensor,
        heads: DeltaHeads,
        store: StateStore | None,
        layout: Layout,
    ) -> Tensor:
        assert store is None, "whole sequences"
        bounds = layout.row_start.tolist()
        return torch.cat([self._of_one(qkv[a:b], gates[a:b], heads) for a, b in pairwise(bounds)])

    def _of_one(self, qkv: Tensor, gates: Tensor, heads: DeltaHeads) -> Tensor:
        width, each = heads.key_heads * heads.key_dim, heads.value_heads // heads.key_heads
        q, k, v = qkv.split((width, width, qkv.shape[1] - 2 * width), dim=1)
        q, k = (
            x.unflatten(1, (heads.key_heads, heads.key_dim)).repeat_interleave(each, 1)
            for x in (q, k)
        )
        b, a = gates.chunk(2, dim=1)
        g = -heads.decay.exp() * functional.softplus(a + heads.step_bias)
        rows = (
            x.unsqueeze(0) for x in (q, k, v.unflatten(1, (heads.value_heads, heads.value_dim)))
        )
        beta = torch.sigmoid(b).unsqueeze(0)
        found = self._rule(
            *rows, g=g.unsqueeze(0), beta=beta, chunk_size=_CHUNK, use_qk_l2norm_in_kernel=True
        )
        return found[0][0].to(qkv.dtype)


def compared(rollout: Sequence[Tensor], learner: Sequence[Tensor]) -> dict[str, float]:
    """Of the log-probabilities of sampled tokens in both: how many differ in a bit, the largest and
    the mean distance, and the mean of exp(d) - 1 - d, d = learner - rollout, which estimates the
    divergence (Schulman 2020)."""
    a, b = torch.cat(list(rollout)), torch.cat(list(learner))
    d = b.double() - a.double()
    return {
        "tokens": len(d),
        "differing": int((a.view(torch.int32) != b.view(torch.int32)).sum()),
        "largest": float(d.abs().max()),
        "mean": float(d.abs().mean()),
        "kl_k3": float((d.exp() - 1 - d).mean()),
    }


def measure(
    path: Path, flow: str, prompts: Sequence[str], new_tokens: int, seed: int = 0
) -> dict[str, Any]:
    """One flow: the learner as it is, and in chunks."""
    model = Model.load(path, flow)
    sampling = Sampling(max_new_tokens=new_tokens, seed=seed)
    engine = Engine.sized_for(model, prompts, len(prompts), new_tokens)
    completions = [group[0] for group in engine.generate(prompts, sampling) if group[0].token_ids]
    rollout = [torch.tensor(c.logprobs) for c in completions]
    whole = [[*c.prompt_token_ids, *c.token_ids] for c in completions]

    def learned() -> list[Tensor]:
        return [row[-len(c.token_ids) :] for row, c in zip(model.logprobs(whole), completions)]

    same = compared(rollout, learned())
    with model.transformer.watched(lambda ops, layer: InChunks(ops), "learner"):
        chunks = compared(rollout, learned())
    return {"flow": flow, "recurrence": same, "chunks": chunks}


def table(found: Sequence[dict[str, Any]]) -> str:
    """A line for each flow and learner, in Markdown."""
    lines = [
        "| flow | learner | differing tokens | of | largest difference | mean | kl_k3 |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        for how in ("recurrence", "chunks"):
            own = one[how]
            numbers = " | ".join(
                f"{own[key]:.1e}" if own[key] else "0" for key in ("largest", "mean", "kl_k3")
            )
            lines.append(
                f"| `{one['flow']}` | {how} | {own['differing']:,} | {own['tokens']:,} | "
                f"{numbers} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = command(__file__, __doc__)
    of_a_model(parser)
    parser.add_argument("--count", type=int, default=64, help="completions")
    parser.add_argument("--new-tokens", type=int, default=300, help="at most, of each")
    arguments = parser.parse_args()
    prompts = [arguments.prompt[i % len(arguments.prompt)] for i in range(arguments.count)]
    found = [measure(arguments.model, flow, prompts, arguments.new_tokens) for flow in FLOWS]
    write(arguments.out, found)
    print(table(found))


if __name__ == "__main__":
    main()
