"""What learning takes of memory: the forward and the backward of a micro-batch, counted while they
run.

In a mixture of experts the tokens are shared out, so that each expert has some. The planner runs a
model on the `meta` device (`meta.py`); tests compare that with models that compute.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from isobit.kernels import Copies, Layout
from isobit.kernels.sampling.filtering import Context, Filtering
from isobit.model import ModelConfig
from isobit.model.forward.accumulate_grad import adding_in_place
from isobit.model.forward.gather_rows import copied
from isobit.model.forward.head import head_rows, most_kept
from isobit.model.forward.moe import RouteTape
from isobit.model.forward.recompute import Recompute
from isobit.model.transformer import Transformer
from isobit.training.plan.live_bytes import LiveTrace


@dataclass(frozen=True)
class Backward:
    """The way in which gradients are computed, as far as it takes memory.

    `gradients`: those of earlier micro-batches are `added` to; there are none, and they are `kept`;
    or they leave for their owners, and are not counted. `entropy`: the loss has the entropies.
    `filtering`: that of the sampled distribution. `twice`: the head has two gradients.
    """

    recompute: Recompute = False
    gradients: Literal["added", "kept", "sent"] = "added"
    entropy: bool = False
    filtering: Filtering | None = None
    twice: bool = False


def measure(
    transformer: Transformer, tokens: int, how: Backward = Backward(), *, host: bool = True
) -> list[list[int]]:
    """Return the live bytes at the moments of the three phases of a micro-batch of one sequence:
    the forward, the output head, and the layers' backward. `host`: on a CPU, where few logits are
    at once, and may be kept."""
    config, ops, moments = transformer.config, transformer.ops["learner"], list[list[int]]()
    ids, layout = torch.arange(tokens) % config.vocab_size, Layout.packed([tokens])
    transformer.rope_tables(layout)  # which are there in a run
    held = most_kept(tokens, config.hidden_size) if host else 0
    # the most rows of logits at once: those that are kept, if any are
    rows = torch.arange(held or tokens)
    context, targets = _AnyContext(ids, ids, ids), ids[rows].to(ops.device)

    def take() -> None:
        moments.append(meter.moments)
        meter.take()

    with _gradients(transformer, ids, how, host), torch.enable_grad(), LiveTrace() as meter:
        tape = RouteTape(_shared_out(config, tokens))
        hidden = transformer.hidden(ids, layout, use="learner", tape=tape, recompute=how.recompute)
        take()
        hidden.register_hook(lambda _: take())
        chosen = copied(hidden, Copies.of(rows, tokens).to(ops.device), ops)
        logprobs, entropies = transformer.head_logprobs(
            chosen,
            targets,
            chunk=head_rows(config.vocab_size, host),
            filtering=how.filtering,
            context=context,
            keep=held > 0,
        )
        loss = logprobs.sum() + entropies.sum() if how.entropy else logprobs.sum()
        loss.backward()
        take()
    return moments


@torch.no_grad()
def measure_forward(transformer: Transformer, tokens: int) -> int:
    """Return the most live bytes of a forward without gradients, as of a rollout, without its
    logits."""
    ids, layout = torch.arange(tokens) % transformer.config.vocab_size, Layout.packed([tokens])
    transformer.rope_tables(layout)
    tape = RouteTape(_shared_out(transformer.config, tokens))
    with LiveTrace() as meter:
        transformer.hidden(ids, layout, use="learner", tape=tape)
        return max(meter.moments)


def beyond(fewer: list[int], more: list[int], times: float) -> int:
    """Return the most bytes of a phase of a model with `times` as many more layers than the second
    of two models has more than the first, from the moments of both. They grow with the layers in
    straight lines: one of what is saved at the beginning of a backward, one of what is left at its
    end."""
    halves = zip(_halves(fewer), _halves(more))
    return max(max(b) + round((max(b) - max(a)) * times) for a, b in halves)


def _halves(moments: list[int]) -> tuple[list[int], list[int]]:
    middle = (len(moments) + 1) // 2
    return moments[:middle], moments[-middle:]


class _AnyContext(Context):
    """The context of a distribution with a repetition penalty, on a device without numbers."""

    def seen(self, rows: slice, vocabulary: int) -> Tensor:
        count = len(self.first[rows])
        return torch.zeros(count, vocabulary, dtype=torch.bool, device=self.tokens.device)


@contextmanager
def _gradients(
    transformer: Transformer, tokens: Tensor, how: Backward, host: bool
) -> Iterator[None]:
    """Treat the gradients of masters as a learner does, inside; afterwards there are none."""
    leaves, tied = transformer.masters.leaves, None
    if transformer.config.tie_embeddings:
        tied = leaves.get("embed")
    twice = how.twice or (tied is not None and not host)
    sent, apart = how.gradients == "sent", ("embed", "head") if twice else ()
    added = [] if sent else [leaf for name, leaf in leaves.items() if name not in apart]
    for leaf in leaves.values():
        leaf.grad = torch.empty_like(leaf) if how.gradients == "added" else None
    hooks = [leaf.register_post_accumulate_grad_hook(_drop) for leaf in leaves.values() if sent]
    try:
        with adding_in_place(added, None if twice else tied, tokens):
            yield
    finally:
        for leaf in leaves.values():
            leaf.grad = None
        for hook in hooks:
            hook.remove()


def _shared_out(config: ModelConfig, tokens: int) -> Tensor | None:
    """Return experts for each token and layer in turn: [T, layers, k]."""
    if config.routed is None:
        return None
    count, slots = config.routed.count, config.routed.per_token
    turns = torch.arange(tokens * slots).view(tokens, 1, slots) % count
    return turns.expand(tokens, config.num_layers, slots)


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None
