"""Completions of one prompt share its rows: the same log-probabilities bit for bit, the gradient up
to rounding."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isobit.kernels import Copies, get_ops
from isobit.model import Model
from isobit.rl import Objective, Sample
from isobit.rl.learner.forward import forward
from isobit.rl.learner.packing import pack
from isobit.rl.learner.schedule import micro_batches
from tests.models import require, tiny_model
from tests.rl.helpers import alternating, first_only, make_learner, roll_out, seen_by_rows

FAMILIES = [
    "llama",
    "qwen3",
    "qwen3_moe",
    "olmo3",
    "gemma3_text",
    "gemma4_text",
    "gemma4_text-experts",
    "gemma4_text-small",
    "gpt_oss",
    "deepseek_v3",
    "minimax_m2",
]  # windows, mixtures, sinks
FLOWS = ["fp8", "fp8-unified", "bf16", "fp8-e2e", "mxfp8"]


def sample(prompt: tuple[int, ...], completion: tuple[int, ...]) -> Sample:
    return Sample(0, 0, prompt, completion, (-1.0,) * len(completion), "", False, 0)


def gradients(model: Model, samples: Sequence[Sample], share: bool) -> dict[str, torch.Tensor]:
    """Of a weighted sum of log-probabilities."""
    for parameter in model.parameters():
        parameter.grad = None
    logprobs = forward(model, pack(samples, share), 1.0)[0]
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters().items() if p.grad is not None}


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest over parameters of ‖found - wanted‖ / ‖wanted‖."""
    assert found.keys() == wanted.keys()
    return max(
        float((found[n] - wanted[n]).norm() / wanted[n].norm()) for n in wanted if wanted[n].any()
    )


def test_rows_by_hand() -> None:
    samples = [
        sample((1, 2), (3, 4)),
        sample((1, 2), (5, 6, 7)),
        sample((9,), (8, 8)),
        sample((1, 2), (4,)),
    ]
    packed = pack(samples, share_prompts=True)
    assert packed.tokens.tolist() == [1, 2, 3, 5, 6, 9, 8]
    assert packed.layout.row_start.tolist() == [0, 3, 5, 7]
    assert packed.layout.context.tolist() == [0, 2, 0]
    assert packed.layout.positions.tolist() == [0, 1, 2, 2, 3, 0, 1]
    assert packed.layout.page_table.tolist() == [[0, 1, 2, 0], [0, 1, 3, 4], [5, 6, 0, 0]]
    assert packed.layout.slots.tolist() == list(range(7))
    assert packed.layout.keys is not None
    assert packed.layout.keys.start.tolist() == [0, 3, 7, 9]
    assert packed.layout.keys.copies.index.tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 6]
    assert packed.rows.tolist() == [1, 2, 1, 3, 4, 5, 6, 1]
    assert packed.targets.tolist() == [3, 4, 5, 6, 7, 8, 8, 4]
    assert packed.whole.tolist() == [0, 1, 2, 5, 6, 7, 8]
    assert packed.rows_shared == 4


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=16), st.integers(1, 40))
def test_every_row_sees_the_tokens_of_its_own_sequence(
    drawn: list[tuple[int, int]], budget: int
) -> None:
    prompts = [(1,), (2, 3), (2, 3, 4), (5, 6, 7, 8)]
    samples = [
        sample(prompts[p], tuple(range(10 * i, 10 * i + n))) for i, (p, n) in enumerate(drawn)
    ]
    parts = list(micro_batches(samples, budget, share_prompts=True))
    assert [i for part in parts for i in part] == list(range(len(samples)))
    for part in parts:
        chosen = [samples[i] for i in part]
        packed = pack(chosen, share_prompts=True)
        assert len(packed.tokens) <= budget or len(part) == 1
        seen = seen_by_rows(packed)
        for row, target, index in zip(
            packed.rows.tolist(), packed.targets.tolist(), packed.sequence.tolist()
        ):
            whole = (*chosen[index].prompt_ids, *chosen[index].completion_ids)
            assert seen[row] == list(whole[: len(seen[row])])
            assert whole[len(seen[row])] == target
        for place, row in enumerate(packed.whole.tolist()):
            assert int(packed.context.tokens[row]) == int(packed.tokens[place])


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_have_the_bits_of_whole_sequences(family: str, backend: str) -> None:
    """And those of the rollout, which is where they have to be from."""
    require(backend)
    model = tiny_model("fp8", family, backend=backend, scale=4)
    samples = roll_out(model, length=7)
    whole, shared = pack(samples), pack(samples, share_prompts=True)
    assert len(shared.tokens) < 0.7 * len(whole.tokens)
    with torch.no_grad():
        wanted, found = forward(model, whole, 1.0), forward(model, shared, 1.0)
    rollout = torch.tensor([value for s in samples for value in s.rollout_logprobs])
    assert torch.equal(found[0], rollout)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("precision", FLOWS)
def test_every_flow_has_those_bits(precision: str) -> None:
    model = tiny_model(precision, scale=4)
    samples = roll_out(model)
    with torch.no_grad():
        wanted, found = (
            forward(model, pack(samples, share), 0.7, (9, 0.9, 0.0, 1.3)) for share in (False, True)
        )
    assert torch.equal(found[0], wanted[0])


def test_another_prompt_has_other_bits() -> None:
    """The control: rows after a prompt that is not theirs."""
    model = tiny_model("fp8", scale=4)
    samples = [s for s in roll_out(model) if s.prompt_index < 2]
    strange = [replace(s, prompt_ids=samples[0].prompt_ids) for s in samples]
    with torch.no_grad():
        wanted, found = (forward(model, pack(given, True), 1.0)[0] for given in (samples, strange))
    same = [s.prompt_ids == samples[0].prompt_ids for s in samples for _ in s.completion_ids]
    assert torch.equal(found[same], wanted[same])
    assert not torch.isclose(found, wanted, rtol=1e-3)[[not known for known in same]].all()


@pytest.mark.parametrize("recompute", [False, "mlp", True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_whole_sequences(
    family: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, up to its rounding; without the gradients of the other copies it is another
    one."""
    model = tiny_model("float32", family, scale=4)
    samples = roll_out(model, length=7)
    wanted, found = (gradients(model, samples, share) for share in (False, True))
    assert distance(found, wanted) < 1e-5

    monkeypatch.setattr(Copies, "added", first_only)
    assert distance(gradients(model, samples, True), wanted) > 1e-2


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_backends_agree_on_the_gradient(backend: str) -> None:
    """Under FP8 it is near that of whole sequences, whose blocks of 128 tokens have other scales;
    and it repeats."""
    require(backend)
    model = tiny_model("fp8", "qwen3", backend=backend, scale=4)
    samples = roll_out(model, length=7)
    wanted, found, again = (gradients(model, samples, share) for share in (False, True, True))
    assert distance(found, wanted) < 0.1
    assert all(torch.equal(found[name], again[name]) for name in found)


def test_the_learner_shares_and_says_how_much() -> None:
    model = tiny_model("fp8", scale=4)
    samples = roll_out(model)
    learner = make_learner(model, Objective(updates_per_batch=2), on_mismatch="stop")
    metrics = learner.learn(samples, alternating(samples), 0).metrics
    assert metrics["mismatch/differing_tokens"] == 0
    assert 0.2 < metrics["learn/shared_share"] < 0.8


def test_copies_are_added_in_their_order_and_rounded_once() -> None:
    index = torch.tensor([2, 0, 2, 4, 2, 0])
    copies = Copies.of(index, 6)
    values = torch.tensor([2.0**8, 1.0, 1.0, 3.0, 1.0, 2.0], dtype=torch.bfloat16).unsqueeze(1)
    found = copies.added(values, get_ops("reference"))
    assert found.dtype == torch.bfloat16
    # 256 + 1 + 1 is 258 in float32 and in bfloat16; added in bfloat16 it would stay 256
    assert found.flatten().tolist() == [3.0, 0.0, 258.0, 0.0, 3.0, 0.0]
