"""What notices a bit that flips in memory, and what does not: docs/contract.md says so, row by
row."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isobit.config import load_config
from isobit.errors import Corruption, NonFiniteError, RunFailed
from isobit.evaluation.periodic import PeriodicEvaluation
from isobit.kernels import KVStore, Layout
from isobit.model import Model, RewardModel
from isobit.precision.quantize import QTensor
from isobit.rl.learner.agreement import Disagreement
from isobit.rl.learner.schedule import Cutting
from isobit.run import checkpoints
from isobit.training.parts.sampled import SampledParts
from isobit.training.policy import Policy
from isobit.training.run import Run
from isobit.training.saving.saver import Saver
from isobit.training.train import TrainResult, resume, train
from tests.models import slow_where, tiny_model
from tests.rl.helpers import alternating, make_learner, roll_out
from tests.runs import fingerprint, write_config
from tests.training.test_scoring import reward_model

Flip = Callable[[SampledParts], None]
SIGN = 0x80  # of an E4M3 code


def flip_a_working_weight(model: Model | RewardModel) -> None:
    """In a third of the codes of a matrix, so that it is seen on few tokens too."""
    weights = (tensor for _, tensor, _ in model.transformer._working["learner"].tensors())
    codes = next(weight.data for weight in weights if isinstance(weight, QTensor))
    codes.view(torch.uint8).view(-1)[::3] ^= SIGN


@pytest.fixture
def model() -> Model:
    return tiny_model("fp8", backend="reference")


def test_between_rollout_and_learner_the_learner_notices(model: Model) -> None:
    samples = roll_out(model)
    flip_a_working_weight(model)
    with pytest.raises(Disagreement):
        make_learner(model, on_mismatch="stop").learn(samples, alternating(samples), 0)


def test_in_keys_and_values_the_learner_notices(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    operators = type(model.ops)
    write: Callable[..., None] = operators.kv_write  # static, in every table of operators

    def flipping(store: KVStore, k: Tensor, v: Tensor, layout: Layout) -> None:
        write(store, k, v, layout)
        assert store.k.dtype == torch.int8
        store.k.view(torch.uint8)[1::4] ^= SIGN

    monkeypatch.setattr(operators, "kv_write", staticmethod(flipping))
    samples = roll_out(model)
    monkeypatch.undo()
    with pytest.raises(Disagreement):
        make_learner(model, on_mismatch="stop").learn(samples, alternating(samples), 0)


def test_before_both_nobody_notices_without_checksums_and_the_next_sync_heals(model: Model) -> None:
    whole = roll_out(model)
    flip_a_working_weight(model)
    flipped = roll_out(model)
    assert [s.rollout_logprobs for s in flipped] != [s.rollout_logprobs for s in whole]
    found = make_learner(model, rate=1e-30, on_mismatch="stop").learn(
        flipped, alternating(flipped), 0
    )
    assert found.metrics["mismatch/differing_tokens"] == 0
    model.sync()
    assert [s.rollout_logprobs for s in roll_out(model)] == [s.rollout_logprobs for s in whole]


def test_in_a_master_nobody_notices_without_checksums_unless_it_is_no_number(model: Model) -> None:
    bits = next(
        p for name, p in model.named_parameters().items() if "layers.0" in name and p.ndim == 2
    )
    bits = bits.detach().view(torch.int32).view(-1)
    bits[0] ^= 1 << 20
    model.sync()
    samples = roll_out(model)
    found = make_learner(model, on_mismatch="stop").learn(samples, alternating(samples), 0)
    assert found.metrics["mismatch/differing_tokens"] == 0
    bits[0] |= 0x7F800000
    with pytest.raises(NonFiniteError):
        model.sync()


def a_working_weight(parts: SampledParts) -> None:
    flip_a_working_weight(parts.model)


def a_master(parts: SampledParts) -> None:
    parts.optimizer.parameters["layers.0.o"].detach().view(torch.int32)[0, 0] ^= 1 << 20


def a_master_so_that_it_is_infinite(parts: SampledParts) -> None:
    parts.optimizer.parameters["layers.0.o"].detach().view(torch.int32)[0, 0] = 0x7F800000


def a_moment(parts: SampledParts) -> None:
    (adamw,) = parts.optimizer._optimizers.values()
    adamw.tensors()["layers.0.o"]["exp_avg"].view(torch.int32)[0, 0] ^= 1 << 30


def the_copy_of_a_second_engine(parts: SampledParts) -> None:
    attention = parts.model.transformer._working["rollout"].layers[0].attention
    assert attention is not None
    weight = attention.o.working
    assert isinstance(weight, QTensor)
    weight.data.view(torch.uint8).view(-1)[::3] ^= SIGN


def the_reference(parts: SampledParts) -> None:
    assert parts.reference is not None
    flip_a_working_weight(parts.reference)


def the_reward_model(parts: SampledParts) -> None:
    flip_a_working_weight(parts.scorer.models[0].model)


TWO_ENGINES = "precision=fp8-rollout"
REFERENCE = "algorithm.kl_coefficient=0.5"
JUDGED = "rewards.models=[{path: JUDGE}]"
# what flips, at which call of which method, what the run is, what the message names, its last
# checkpoint
FLIPS = [
    (a_working_weight, (Policy, "sync", 2), "precision=fp8", "working weight layers.0.qkv", 1),
    (
        a_working_weight,
        (PeriodicEvaluation, "evaluate", 2),
        "evaluation.every=1",
        "working weight layers.0.qkv",
        0,
    ),
    (a_master, (Policy, "sync", 2), "precision=fp8", "master layers.0.o", 1),
    (a_master, (Model, "save", 3), "precision=fp8", "master layers.0.o", 1),
    (a_master_so_that_it_is_infinite, (Saver, "keep", 5), "precision=fp8", "master layers.0.o", 1),
    (a_moment, (Policy, "sync", 2), "precision=fp8", "exp_avg of layers.0.o", 1),
    (
        the_copy_of_a_second_engine,
        (Policy, "sync", 2),
        TWO_ENGINES,
        "the rollout's working weight layers.0.o",
        1,
    ),
    (the_reference, (Policy, "sync", 2), REFERENCE, "working weight layers.0.qkv", 1),
    (the_reward_model, (Policy, "sync", 2), JUDGED, "working weight layers.0.qkv", 1),
]


Train = Callable[..., TrainResult]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Train:
    """A short run with a checkpoint after each step, under these settings."""
    judge = reward_model(tmp_path_factory.mktemp("judges") / "judge")

    def trained(*overrides: str) -> TrainResult:
        folder = tmp_path_factory.mktemp("flipped")
        changes = [
            "steps=2",
            "run.checkpoint_every=1",
            "backend=reference",
            "consistency=exact",
            f"run.dir={folder / 'run'}",
        ]
        changes += [override.replace("JUDGE", str(judge)) for override in overrides]
        return train(load_config(write_config(folder, base_model), changes))

    return trained


@pytest.fixture(scope="module")
def undisturbed(run: Train) -> Callable[[str], dict[str, object]]:
    """What a run leaves in which nothing flips."""
    return cache(lambda override: fingerprint(run(override).run_dir))


@pytest.mark.parametrize(
    ("flip", "when", "override", "named", "last"),
    slow_where(FLIPS, lambda flip, when, *_: when[1] == "evaluate" or when[2] > 2),
)
def test_a_run_ends_before_it_is_saved_and_goes_on_as_if_nothing_had_happened(
    flip: Flip,
    when: tuple[type, str, int],
    override: str,
    named: str,
    last: int,
    run: Train,
    undisturbed: Callable[[str], dict[str, object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control keeps no checksums: what flips is learned with, or saved."""
    with monkeypatch.context() as patch:
        flip_at(when, flip, patch)
        with pytest.raises(RunFailed) as caught:
            run(override, f"run.dir={tmp_path / 'run'}")
    message = str(caught.value)
    for part in (
        f"{named} changed in memory",
        f"step-{last:06d}; go on with: isobit train --resume {tmp_path / 'run'}",
    ):
        assert part in message, message
    assert (
        checkpoints.all_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == f"step-{last:06d}"
    )
    assert fingerprint(resume(tmp_path / "run").run_dir) == undisturbed(override)
    flip_at(when, flip, monkeypatch)
    if flip is a_master_so_that_it_is_infinite:
        with pytest.raises(RunFailed, match=r"layers\.0\.o is not finite"):
            run(override, "run.check_memory=false")
        return
    unchecked = run(override, "run.check_memory=false")
    if override != TWO_ENGINES:
        assert not any(row.get("mismatch/differing_tokens") for row in unchecked.metrics)
    found = fingerprint(unchecked.run_dir)
    assert any(
        found[part] != undisturbed(override)[part] for part in ("model.safetensors", "metrics")
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_an_error_of_the_backward_ends_the_run_where_gradients_are_checked(
    family: str, run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor's gradient is off by an eighth, once. The control does not check: nobody notices.
    And a run without errors has the bits, metrics included, that it has without the check."""
    tiny_model(family=family).save(tmp_path / "model")
    given = (
        f"model.path={tmp_path / 'model'}",
        "optimizer.micro_batch_tokens=40",
        "run.quantization_every=1",
    )
    checking = "run.check_gradients_every=1"
    whole = fingerprint(run(*given).run_dir)
    assert fingerprint(run(*given, checking).run_dir) == whole

    def open_with_an_error(
        self: Run, parts: SampledParts, *arguments: object, **options: object
    ) -> None:
        errors = [True]

        def once(gradient: Tensor) -> Tensor:
            return gradient * 1.125 if errors and errors.pop() else gradient

        parts.optimizer.parameters["layers.0.o"].register_hook(once)
        assemble(self, parts, *arguments, **options)  # type: ignore[arg-type]

    assemble = Run.__init__
    monkeypatch.setattr(Run, "__init__", open_with_an_error)
    unchecked = run(*given)
    assert not any(row["mismatch/differing_tokens"] for row in unchecked.metrics)
    assert (
        fingerprint(unchecked.run_dir)["trainer/optimizer.safetensors"]
        != whole["trainer/optimizer.safetensors"]
    )
    with pytest.raises(
        RunFailed, match=r"the gradient of layers\.0\.o has other bits .* go on with: isobit train"
    ):
        run(*given, checking)


def flip_at(when: tuple[type, str, int], flip: Flip, patch: pytest.MonkeyPatch) -> None:
    """After a call of a method has returned; before it, where it saves or evaluates."""
    owner, name, at = when
    called, opened, calls = getattr(owner, name), list[SampledParts](), list[object]()
    assemble = Run.__init__

    def opens(self: Run, parts: SampledParts, *arguments: object, **options: object) -> None:
        opened.append(parts)
        assemble(self, parts, *arguments, **options)  # type: ignore[arg-type]

    def flipping(self: object, *arguments: object, **options: object) -> object:
        calls.append(self)
        if len(calls) == at and owner in (Model, PeriodicEvaluation):
            flip(opened[-1])
        found = called(self, *arguments, **options)
        if len(calls) == at and owner not in (Model, PeriodicEvaluation):
            flip(opened[-1])
        return found

    patch.setattr(Run, "__init__", opens)
    patch.setattr(owner, name, flipping)


@pytest.mark.parametrize("flipped", [True, False])
def test_a_step_without_an_update_notices_too(
    model: Model, flipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, learner = roll_out(model), make_learner(model)
    learner.optimizer.checksums.begin()
    monkeypatch.setattr(Cutting, "_parts", lambda self, count, step, epoch: [])
    if flipped:
        learner.optimizer.parameters["layers.0.o"].detach().view(torch.int32)[0, 0] ^= 1 << 20
        with pytest.raises(Corruption, match=r"master layers\.0\.o changed in memory"):
            learner.learn(samples, alternating(samples), 0)
    else:
        learner.learn(samples, alternating(samples), 0)
