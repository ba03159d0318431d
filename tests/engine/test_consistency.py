"""Rollout log-probabilities are the learner's, bit for bit, under every unified preset; and the
controls differ."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.kernels import KVStore
from isobit.model import Model
from isobit.options.consistency import TDP32, VDP32
from tests.models import slow_where

from .helpers import differing, fresh, learner_logprobs, tiny
from .test_invariance import PROMPT_IDS, PROMPTS

MakeEngine = Callable[..., Engine]
EXCEPTED = {"preset": "fp8", "bf16_first_layers": 1, "bf16_last_layers": 1}
E4M3 = "fp8[kv_cache=e4m3]"
UNIFIED = [
    "float32",
    "bf16",
    "fp8-unified",
    "fp8",
    EXCEPTED,
    "fp8[bf16_layers=[o, down]]",
    "mxfp8",
    "nvfp4",
    E4M3,
]
FLOWS = [(preset, backend) for backend in ("reference", "native") for preset in UNIFIED]
BY_REFERENCE = ("bf16", "fp8", "nvfp4")
"""What `make test` has of the reference operators, which take ten times as long."""
HARD = {
    "kv_pages": 24,
    "page_size": 4,
    "max_batch_tokens": 23,
    "max_sequences": 9,
}  # preemption, chunks, sharing


@pytest.mark.parametrize(
    ("preset", "backend", "temperature"),
    [
        *slow_where(
            [(*flow, 1.0) for flow in FLOWS],
            lambda preset, backend, _: backend == "reference" and preset not in BY_REFERENCE,
        ),
        ("fp8", "native", 0.7),
        ("bf16[kv_cache=int8, kv_scale=ue8m0]", "native", 1.0),
    ],
)
def test_zero_bits_differ(
    preset: object, backend: str, temperature: float, make_engine: MakeEngine
) -> None:
    model = tiny(preset, backend)
    engine = make_engine(model, **HARD)
    sampling = Sampling(n=4, max_new_tokens=20, temperature=temperature, seed=3)
    groups = engine.generate(PROMPTS, sampling, PROMPT_IDS)
    assert engine.stats.preemptions > 0
    assert engine.stats.shared_pages > 0
    count, total = differing(model, groups, temperature)
    assert total > 400
    assert count == 0


@pytest.mark.parametrize("preset", ["float32", "bf16", "fp8-unified", "fp8", E4M3])
def test_zero_bits_differ_on_a_real_model(
    preset: str, stories: Path, make_engine: MakeEngine
) -> None:
    model = Model.load(stories, preset)
    engine = make_engine(model, kv_pages=24, page_size=8, max_batch_tokens=31)
    prompts = ["Once upon a time", "Lily and Tom went to the park.", "The dog"]
    groups = engine.generate(prompts, Sampling(n=4, max_new_tokens=40, seed=1))
    assert engine.stats.preemptions > 0
    count, total = differing(model, groups)
    assert (count, total) == (0, sum(len(c.token_ids) for group in groups for c in group))


@pytest.mark.parametrize("preset", ["bf16", "fp8-unified", "fp8"])
def test_zero_bits_differ_in_either_order_of_sums(preset: str, make_engine: MakeEngine) -> None:
    """The control: a learner in the other order."""
    models = [tiny(preset, "native", f"bitwise-{order}") for order in (TDP32, VDP32)]
    for model, other in (models, models[::-1]):
        groups = make_engine(model, **HARD).generate(
            PROMPTS, Sampling(n=4, max_new_tokens=20, seed=3), PROMPT_IDS
        )
        count, total = differing(model, groups)
        assert total > 400
        assert count == 0
        assert differing(other, groups)[0] > total // 20


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize(("scale", "least"), [("fp32", 0.5), ("ue8m0", 0.05)])
def test_negative_control_an_activation_scale_per_tensor(
    scale: str, least: float, backend: str, make_engine: MakeEngine
) -> None:
    """A power-of-two scale hides much of the batch: it changes codes only where they underflow."""
    model = tiny(
        {"preset": "fp8", "activation_granularity": "tensor", "activation_scale": scale}, backend
    )
    groups = make_engine(model).generate(
        PROMPTS, Sampling(n=2, max_new_tokens=20, seed=3), PROMPT_IDS
    )
    count, total = differing(model, groups)
    assert count > least * total


@pytest.mark.parametrize(
    ("backend", "consistency"),
    slow_where(
        [("native", "bitwise"), ("native", "exact"), ("reference", "exact")],
        lambda backend, _: backend == "reference",
    ),
)
def test_zero_bits_differ_with_probabilities_in_e4m3(
    backend: str, consistency: str, make_engine: MakeEngine
) -> None:
    """The control: on one side alone."""
    for precision, expected in (
        ("fp8[probabilities=e4m3]", False),
        ("fp8[rollout={probabilities: e4m3}]", True),
    ):
        model = tiny(precision, backend, consistency)
        groups = make_engine(model, **HARD).generate(
            PROMPTS, Sampling(n=4, max_new_tokens=20, seed=3), PROMPT_IDS
        )
        count, total = differing(model, groups)
        assert total > 400
        assert (count > total // 4) if expected else count == 0


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_negative_control_a_bf16_learner_under_fp8_rollouts(
    backend: str, make_engine: MakeEngine
) -> None:
    model = tiny("fp8-rollout", backend)
    groups = make_engine(model).generate(
        PROMPTS, Sampling(n=2, max_new_tokens=20, seed=3), PROMPT_IDS
    )
    count, total = differing(model, groups)
    assert count > total // 2


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_negative_control_another_rounding_of_int8(
    backend: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner whose cache has a step of amax / 128 in place of amax / 127, is noticed."""
    model = tiny("fp8", backend)
    groups = make_engine(model).generate(
        PROMPTS, Sampling(n=2, max_new_tokens=20, seed=3), PROMPT_IDS
    )
    assert differing(model, groups)[0] == 0
    attention = model.ops.attention

    def other(q: torch.Tensor, store: KVStore, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
        assert store.k_scale is not None
        step = store.k_scale * 127 / 128
        keys = (store.gather(torch.arange(len(store.k)))[0] / step.unsqueeze(-1)).round()
        store = replace(store, k=keys.clamp(-127, 127).to(torch.int8), k_scale=step)
        return attention(q, store, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(model.ops, "attention", other)
    count, total = differing(model, groups)
    assert count > total // 2


@pytest.mark.slow
def test_negative_control_weights_of_another_version(make_engine: MakeEngine) -> None:
    model = fresh("fp8")
    engine = make_engine(model)
    sampling = Sampling(n=2, max_new_tokens=20, seed=3)
    old = engine.generate(PROMPTS, sampling)
    with torch.no_grad():
        for parameter in model.named_parameters().values():
            parameter.mul_(1.01)
    assert differing(model, old)[0] == 0, "masters changed, but nothing was synchronized"
    model.sync()
    assert {c.weights_version for group in old for c in group} == {model.weights_version - 1}
    count, total = differing(model, old)
    assert count > total // 2
    new = engine.generate(PROMPTS, sampling)
    assert {c.weights_version for group in new for c in group} == {model.weights_version}
    assert differing(model, new)[0] == 0


def test_negative_control_another_temperature(make_engine: MakeEngine) -> None:
    model = tiny("fp8")
    groups = make_engine(model).generate(
        PROMPTS, Sampling(n=2, max_new_tokens=20, temperature=0.7, seed=3)
    )
    count, total = differing(model, groups, 0.71)
    assert count > total // 2


def test_greedy_completions_carry_the_learners_logprobs_at_temperature_one(
    make_engine: MakeEngine,
) -> None:
    model = tiny("fp8")
    groups = make_engine(model, **HARD).generate(
        PROMPTS, Sampling(max_new_tokens=20, temperature=0)
    )
    assert differing(model, groups)[0] == 0


def test_truncated_sampling_reports_the_renormalized_distribution(make_engine: MakeEngine) -> None:
    """At top_k 2 a token's log-probability is log p / (p + q), of the learner's p and the other
    kept token's q."""
    model = tiny("float32")
    groups = make_engine(model).generate(
        [[5, 6, 7]], Sampling(n=6, max_new_tokens=1, top_k=2, seed=2)
    )
    prefix = [5, 6, 7]
    everything = torch.tensor(
        [
            float(model.logprobs([[*prefix, token]])[0][-1])
            for token in range(model.config.vocab_size)
        ]
    )
    best = everything.topk(2).values
    for completion in groups[0]:
        expected = everything[completion.token_ids[0]] - torch.logsumexp(best, 0)
        assert completion.logprobs[0] == pytest.approx(float(expected), abs=1e-5)


def test_consistency_fast_keeps_the_tokens_of_the_unpreempted_run_close(
    make_engine: MakeEngine,
) -> None:
    """`fast` promises no bits, only closeness: the same forward with PyTorch's own BF16
    products."""
    model = tiny("bf16", "reference", "fast")
    groups = make_engine(model, **HARD).generate(PROMPTS, Sampling(n=2, max_new_tokens=10, seed=3))
    completions = [completion for group in groups for completion in group]
    learner = torch.cat(learner_logprobs(model, completions, 1.0))
    rolled = torch.tensor([value for completion in completions for value in completion.logprobs])
    assert (learner - rolled).abs().mean() < 0.02
