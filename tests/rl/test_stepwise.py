"""A learner that is called step by step: its gradients add up, its log-probabilities are those of
sampling, its steps are AdamW's, and what fails has changed nothing."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.errors import IsobitError, NonFiniteError
from isobit.model import Model
from isobit.rl.learner.forward import forward
from isobit.rl.optim.schedule import OptimizerSettings
from isobit.rl.optim.sharded import ShardedOptimizer
from isobit.rl.stepwise import Adam, Datum, StepwiseLearner
from isobit.rl.stepwise.data import pack
from isobit.rl.stepwise.losses import LOSSES

from .helpers import distance
from .stepwise_helpers import (
    NEW,
    STEP,
    as_data,
    data,
    digest,
    frozen,
    gradients,
    learner,
    masters,
    sampled,
    saved_base,
    state_of,
    train,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_base(tmp_path_factory.mktemp("stepwise") / "base")


@pytest.fixture(scope="module")
def base(folder: Path) -> Model:
    return frozen(folder)


@pytest.mark.parametrize("name", LOSSES)
def test_several_calls_have_the_bits_of_one(base: Model, name: str) -> None:
    """Where micro-batches end at the same data. The control ends them elsewhere: other sums."""
    found = {}
    for cuts in ([6], [2, 4], [2, 2, 2], [1, 5]):
        ours, start, total = learner(base), 0, 0.0
        for count in cuts:
            outputs = ours.forward_backward(data()[start : start + count], name, {})
            start, total = start + count, total + outputs.metrics["loss:sum"]
        found[len(cuts), cuts[0]] = gradients(ours)
        assert total == pytest.approx(found.setdefault("loss", total), rel=1e-6)  # type: ignore[call-overload]
    whole = found[1, 6]
    assert all(bool(gradient.any()) for key, gradient in whole.items() if key.endswith("lora_B"))
    for parts in (found[2, 2], found[3, 2]):
        assert digest(parts) == digest(whole)
    assert digest(found[2, 1]) != digest(whole)
    assert distance(found[2, 1], whole) < 1e-5


@pytest.mark.parametrize("recompute", [True, "mlp"])
def test_recomputed_activations_leave_the_same_bits(base: Model, recompute: Any) -> None:
    whole, less = (
        learner(base),
        StepwiseLearner(base.adapted(NEW), micro_batch_tokens=16, recompute=recompute),
    )
    assert train(whole, range(1)) == train(less, range(1))


def test_the_same_calls_leave_the_same_bits(base: Model) -> None:
    assert train(learner(base), range(2)) == train(learner(base), range(2))
    assert train(learner(base), range(2)) != train(learner(base), range(1, 3))


@pytest.mark.parametrize("precision", ["fp8", "nvfp4", "bf16"])
def test_log_probabilities_are_those_of_sampling(folder: Path, precision: str) -> None:
    """After several steps, by a snapshot of the adapter. The control: by factors a step old."""
    base = frozen(folder, precision)
    serving, ours = base.serving({}), learner(base, tokens=40)
    for step in range(3):
        serving.add_adapter(f"now@{step}", ours.adapter())
        drawn = sampled(serving, f"now@{step}", step)
        given = as_data(drawn)
        for outputs in (
            ours.forward(given, "importance_sampling", {}),
            ours.forward_backward(given, "importance_sampling", {}),
        ):
            for row, one in zip(outputs.logprobs, drawn):
                assert row[-len(one.token_ids) :].tolist() == one.logprobs
        ours.optim_step(STEP)
        after = ours.forward(given, "importance_sampling", {}).logprobs
        assert [row[-len(one.token_ids) :].tolist() for row, one in zip(after, drawn)] != [
            one.logprobs for one in drawn
        ]


@pytest.mark.parametrize("precision", ["fp8", "float32"])
def test_several_targets_are_each_as_if_alone(folder: Path, precision: str) -> None:
    """Log-probabilities bit for bit; the gradient up to the rounding of sums, where a backward is
    linear."""
    base = frozen(folder, precision)
    wide, ours = data(several=3), learner(base)
    outputs = ours.forward_backward(wide, "cross_entropy", {})
    apart = learner(base)
    for column in range(3):
        one = [
            replace(d, inputs={n: d.inputs[n][:, column] for n in ("target_tokens", "weights")})
            for d in wide
        ]
        found = apart.forward_backward(one, "cross_entropy", {}).logprobs
        assert all(torch.equal(a, b[:, column]) for a, b in zip(found, outputs.logprobs))
    if precision == "float32":
        assert distance(gradients(ours), gradients(apart)) < 1e-5


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.factor])
def test_targets_that_teach_nothing_have_no_part_in_the_backward(
    base: Model, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same log-probabilities and gradients, bit for bit, as with all in it. The control leaves
    out targets that do teach."""
    random, factor = torch.Generator().manual_seed(1), LOSSES[name].factor
    assert factor is not None
    given = []
    for datum in data():
        kept = (torch.rand(8, generator=random) > 0.5).float()
        given.append(_with(**{factor: datum.inputs[factor] * kept})(datum))
    seen: list[int] = []
    head_backward = type(base.ops).head_backward

    def counted(self: Any, dlogprobs: torch.Tensor, *rest: Any) -> Any:
        seen.append(len(dlogprobs))
        return head_backward(self, dlogprobs, *rest)

    monkeypatch.setattr(type(base.ops), "head_backward", counted)
    ours, whole = learner(base), learner(base)
    outputs = ours.forward_backward(given, name, {})
    assert sum(seen) == sum(int(datum.inputs[factor].count_nonzero()) for datum in given) < 48
    monkeypatch.setitem(LOSSES, name, replace(LOSSES[name], factor=None))
    everything = whole.forward_backward(given, name, {})
    assert digest(outputs.logprobs) == digest(everything.logprobs)
    assert outputs.metrics == everything.metrics
    assert all(torch.equal(g, gradients(whole)[n]) for n, g in gradients(ours).items())
    monkeypatch.setitem(LOSSES, name, replace(LOSSES[name], factor="sequence_ratio_mask"))
    if name == "gspo":
        wrong = learner(base)
        wrong.forward_backward(given, name, {})
        assert digest(gradients(wrong)) != digest(gradients(whole))


def test_data_that_teach_nothing_have_a_gradient_of_zeros(base: Model) -> None:
    """So that AdamW's moments go on, as after any other call."""
    ours = learner(base)
    train(ours, range(1))
    before = digest(masters(ours))
    given = [_with(weights=torch.zeros(8))(datum) for datum in data()]
    assert ours.forward_backward(given, "cross_entropy", {}).metrics == {"loss:sum": 0.0}
    assert gradients(ours)
    assert not any(bool(gradient.any()) for gradient in gradients(ours).values())
    ours.optim_step(STEP)
    assert digest(masters(ours)) != before


def test_a_custom_loss_of_the_client_has_its_gradient(base: Model) -> None:
    """`forward`, then `cross_entropy` with -dL/d log p: the bits of autograd through the model. L
    is of pairs of sequences, as a preference's. The control has the weights' sign wrong."""

    def custom(rows: Sequence[torch.Tensor]) -> torch.Tensor:
        sums = [row.sum() for row in rows]
        better = torch.stack([a - b for a, b in zip(sums[::2], sums[1::2])])
        return -torch.nn.functional.logsigmoid(0.1 * better).sum() + (rows[0] ** 2).mean()

    def weighted(sign: float) -> dict[str, torch.Tensor]:
        ours = learner(base, tokens=1000)
        given = data()
        rows = [row.requires_grad_() for row in ours.forward(given, "cross_entropy", {}).logprobs]
        custom(rows).backward()
        surrogate = [
            Datum(d.tokens, {"target_tokens": d.targets, "weights": sign * row.grad})
            for d, row in zip(given, rows)
            if row.grad is not None
        ]
        ours.forward_backward(surrogate, "cross_entropy", {})
        return gradients(ours)

    direct = learner(base)
    packed = pack(data())
    logprobs, _ = forward(direct.model, packed, 1.0)
    custom(logprobs.split([8] * 6)).backward()
    assert digest(weighted(-1.0)) == digest(gradients(direct))
    assert digest(weighted(1.0)) != digest(gradients(direct))


STEPS = [
    Adam(1e-2),
    Adam(3e-3, 0.8, 0.99, 1e-8, 0.1, 0.5),
    Adam(0.0),
    Adam(1e-2, 0.0, 0.9, 1e-6, 0.0, 1e3),
]


def test_each_step_is_adamw_by_its_own_numbers(base: Model) -> None:
    """PyTorch's, bit for bit. The control: by the numbers of the first."""
    ours, theirs = learner(base), masters(learner(base))
    held = {name: torch.nn.Parameter(values) for name, values in theirs.items()}
    optimizer = torch.optim.AdamW(held.values(), fused=True)
    for number, adam in enumerate(STEPS):
        ours.forward_backward(data(seed=number), "cross_entropy", {})
        found = gradients(ours)
        norm = ours._optimizer.gradient_norm()
        squares = sum(float(gradient.double().square().sum()) for gradient in found.values())
        assert norm == pytest.approx(math.sqrt(squares), rel=1e-9)
        clip = adam.grad_clip_norm
        for name, parameter in held.items():
            parameter.grad = found[name] * (clip / norm) if 0 < clip < norm else found[name]
        optimizer.param_groups[0].update(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
        optimizer.step()
        assert ours.optim_step(adam) == {"grad_norm": norm}
        assert not gradients(ours)
    assert digest(masters(ours)) == digest(held)
    constant = learner(base)
    for number in range(len(STEPS)):
        constant.forward_backward(data(seed=number), "cross_entropy", {})
        constant.optim_step(STEPS[0])
    assert digest(masters(constant)) != digest(held)


def test_a_step_without_gradients_changes_nothing(base: Model) -> None:
    ours = learner(base)
    train(ours, range(1))
    before = state_of(ours)
    assert ours.optim_step(STEP) == {"grad_norm": 0.0}
    assert state_of(ours) == before
    ours.forward(data(), "ppo", {})
    assert state_of(ours) == before


def _with(**inputs: Any) -> Callable[[Datum], Datum]:
    return lambda datum: replace(datum, inputs={**datum.inputs, **inputs})


def _without(name: str) -> Callable[[Datum], Datum]:
    return lambda d: replace(d, inputs={n: v for n, v in d.inputs.items() if n != name})


def _tokens(tokens: Sequence[Any]) -> Callable[[Datum], Datum]:
    return lambda datum: replace(datum, tokens=tuple(tokens))


NAN = torch.tensor([0.0] * 7 + [math.nan])
LONG = _tokens([1] * 65)
POISON: list[tuple[Callable[[Datum], Datum], str]] = [
    (_with(advantages=NAN), "datum 5: advantages has NaN or infinity in it"),
    (_with(logprobs=torch.tensor([0.0] * 7 + [math.inf])), "logprobs has NaN or infinity"),
    (_with(advantages=torch.zeros(7)), r"advantages has shape \[7\], and target_tokens \[8\]"),
    (_with(advantages=torch.zeros(8, 1)), r"advantages has shape \[8, 1\]"),
    (_with(advantages=torch.zeros(8, dtype=torch.int64)), "dtype torch.int64; expected float32"),
    (_with(target_tokens=torch.zeros(8)), "target_tokens has dtype torch.float32; expected int64"),
    (_with(target_tokens=torch.full((8,), 99)), "token 99 is not in the vocabulary of"),
    (_with(target_tokens=torch.full((8,), -1)), "token -1 is not in the vocabulary of"),
    (_with(target_tokens=torch.zeros(8, 2, dtype=torch.int64)), r"\[8, 2\]; expected \[8\]"),
    (_with(target_tokens=torch.zeros(0, dtype=torch.int64)), r"shape \[0\]; expected \[8\]"),
    (_with(mask=torch.ones(8)), "'mask' is no input of a loss; there are advantages"),
    (_without("advantages"), "datum 5: advantages is missing"),
    (_without("target_tokens"), "datum 5: target_tokens is missing"),
    (_tokens([]), "datum 5: it has no tokens"),
    (_tokens([1, 2, 3, 4, 5, 6, 7, 2**70]), "is not in the vocabulary"),
    (_tokens([1, 2, 3, 4, 5, 6, 7, 1.5]), "token 1.5 is not in the vocabulary"),
    (LONG, "it has 65 tokens, more than the model's context of 64"),
    (_with(logprobs=torch.full((8,), -1e4)), "the loss is not finite"),  # in the last micro-batch
    (_with(advantages=torch.full((8,), 1e30)), "the gradient's norm is"),
]


@pytest.mark.parametrize(("poison", "told"), POISON, ids=[told for _, told in POISON])
def test_a_poisonous_datum_changes_nothing(
    base: Model, poison: Callable[[Datum], Datum], told: str
) -> None:
    """It is the last of three micro-batches, after a call whose gradients wait for a step."""
    ours = learner(base)
    train(ours, range(1))
    ours.forward_backward(data(seed=9), "importance_sampling", {})
    before = state_of(ours)
    given = data(seed=10)
    given[5] = poison(given[5])
    with pytest.raises(IsobitError, match=told) as error:
        ours.forward_backward(given, "importance_sampling", {})
    assert "\n" not in str(error.value)
    assert state_of(ours) == before
    assert len(ours.forward(data(seed=11), "importance_sampling", {}).logprobs) == 6


def test_gradients_are_copied_only_where_they_cannot_be_computed_again(
    base: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for calls that succeed; after the first that fails in a step, for all others of it, and
    where data have more bytes than the gradients. The bits are those of a learner that copies
    always, which is the control, and of one that no call has failed."""
    poisoned = data(seed=10)
    poisoned[5] = _with(logprobs=torch.full((8,), -1e4))(poisoned[5])
    copies = StepwiseLearner._copies

    def stepped(always: bool, fails: Sequence[int], least: int = 1 << 60) -> tuple[str, list[bool]]:
        ours, copied = learner(base), list[bool]()

        def counted(self: StepwiseLearner) -> Any:
            self._calls = None if always else self._calls
            found = copies(self)
            copied.append(found is not None)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(StepwiseLearner, "_copies", counted)
            patch.setattr(ShardedOptimizer, "gradient_bytes", least)
            for call in range(4):
                if call in fails:
                    with pytest.raises(NonFiniteError):
                        ours.forward_backward(poisoned, "importance_sampling", {})
                ours.forward_backward(data(seed=call), "importance_sampling", {})
            ours.optim_step(STEP)
            ours.forward_backward(data(seed=9), "importance_sampling", {})
        return state_of(ours), copied

    expected, copied = stepped(always=True, fails=[])
    assert all(copied)
    assert stepped(always=False, fails=[]) == (expected, [False] * 5)
    assert stepped(always=False, fails=[2]) == (expected, [False] * 3 + [True] * 2 + [False])
    found, copied = stepped(always=False, fails=[0, 1, 3])
    assert (found, copied[:3], copied[-1]) == (expected, [False] * 3, False)
    assert stepped(always=False, fails=[3], least=1) == (expected, [False] + [True] * 4 + [False])


def test_what_is_kept_of_gradients_is_needed(base: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without it the micro-batches before the poisonous one stay in the gradient."""
    monkeypatch.setattr(StepwiseLearner, "_undo", lambda *_: None)
    ours = learner(base)
    ours.forward_backward(data(seed=9), "importance_sampling", {})
    before, given = state_of(ours), data(seed=10)
    given[5] = _with(logprobs=torch.full((8,), -1e4))(given[5])
    with pytest.raises(NonFiniteError):
        ours.forward_backward(given, "importance_sampling", {})
    assert state_of(ours) != before


@pytest.mark.parametrize(
    ("given", "loss", "options"),
    [
        (data(), "gpso", {}),
        (data(), "ppo", {"clip": 0.2}),
        (data(), "dro", {"beta": math.nan}),
        ([], "ppo", {}),
    ],
)
def test_a_wrong_call_changes_nothing(
    base: Model, given: list[Datum], loss: str, options: Mapping[str, float]
) -> None:
    ours = learner(base)
    ours.forward_backward(data(seed=9), "ppo", {})
    before = state_of(ours)
    for call in (ours.forward, ours.forward_backward):
        with pytest.raises(IsobitError):
            call(given, loss, options)
    assert state_of(ours) == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rate": math.nan},
        {"learning_rate": -1e-4},
        {"learning_rate": "1e-4"},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"eps": 0.0},
        {"weight_decay": math.inf},
        {"grad_clip_norm": -1.0},
        {"grad_clip_norm": True},
    ],
)
def test_numbers_of_a_step_are_checked(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(IsobitError, match=f"{name}: expected a number from"):
        Adam(**wrong)


def test_defaults_are_those_of_tinkers_client() -> None:
    tinker = pytest.importorskip("tinker", reason="tinker is not installed")
    assert tinker.AdamParams().model_dump() == vars(Adam())


def test_a_whole_model_is_trained_and_synced(folder: Path) -> None:
    """The bits of sampling after a step; the control is the model before it."""
    model = Model.load(folder, "fp8", "native")
    ours = StepwiseLearner(model, micro_batch_tokens=40)
    with pytest.raises(IsobitError, match="trained whole"):
        ours.adapter()
    before = [one.logprobs for one in sampled(model, None, 0)]
    for step in range(2):
        drawn = sampled(model, None, step)
        outputs = ours.forward_backward(as_data(drawn), "importance_sampling", {})
        for row, one in zip(outputs.logprobs, drawn):
            assert row[-len(one.token_ids) :].tolist() == one.logprobs
        ours.optim_step(Adam(1e-2))
    assert model.weights_version == 2
    assert [one.logprobs for one in sampled(model, None, 0)] != before


def test_gradients_of_a_whole_model_add_up_too(folder: Path) -> None:
    found = []
    for cuts in ([6], [2, 4]):
        ours, start = StepwiseLearner(Model.load(folder, "fp8", "native"), micro_batch_tokens=16), 0
        for count in cuts:
            ours.forward_backward(data()[start : start + count], "cross_entropy", {})
            start += count
        found.append(digest(gradients(ours)))
        poisoned = data()
        poisoned[5] = _with(weights=torch.full((8,), 1e30))(poisoned[5])
        with pytest.raises(NonFiniteError):
            ours.forward_backward(poisoned, "cross_entropy", {})
        assert digest(gradients(ours)) == found[-1]
    assert found[0] == found[1]


def test_a_frozen_model_has_nothing_to_train(base: Model) -> None:
    for model in (base, base.serving({})):
        with pytest.raises(IsobitError, match="this model is frozen; train an adapter over it"):
            StepwiseLearner(model)


def test_another_optimizer_is_not_slipped_in(folder: Path) -> None:
    """Settings of a step may not change who updates what: its state would be another's."""
    optimizer = ShardedOptimizer.of(Model.load(folder, "fp8", "native"), OptimizerSettings())
    with pytest.raises(AssertionError, match="another state"):
        optimizer.set(OptimizerSettings(name="muon"))
