"""`divided` in a config: how many ranks hold the policy together, and with it a reference, reward
models and models from nothing. No bit depends on it; what cannot be is refused in one line."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from isobit.config import load_config, load_sft_config
from isobit.distributed import Ranks
from isobit.errors import IsobitError, RunFailed
from isobit.model import Model, Tokenizer
from isobit.training.loop import training_loop
from isobit.training.parts import assembly
from isobit.training.plan import divided
from isobit.training.plan.cards import Machine
from isobit.training.plan.divided import together
from isobit.training.plan.job import Job, architecture, job_with
from isobit.training.plan.memory import MemoryPlan
from isobit.training.train import open_run
from tests.distributed.sessions import SMALL, bits, resumed
from tests.distributed.threads import run
from tests.models import tiny_model
from tests.runs import write_config
from tests.training.test_preference_run import pairs
from tests.training.test_scoring import reward_model
from tests.training.test_sft_run import written as sft_config

ALPHABET = "0123456789+-*=" + "".join(map(chr, range(0x4E00, 0x4E00 + 120)))
HALVES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 128,
    "alphabet": ALPHABET,
}
"""Two blocks of 128 in every matrix, in the vocabulary and in keys: two ranks hold such a model
together, and three cannot."""
REWARD = """
def even(prompts, completions, **columns):
    return [sum(ord(c) % 2 for c in text) / 3 for text in completions]
"""


@dataclass(frozen=True)
class Models:
    """The directories of a policy, a teacher and a reward model."""

    policy: Path
    teacher: Path
    judge: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("policy", "teacher")):
        tiny_model("fp8", seed=seed, scale=3.0, **HALVES).save(folder / name)
    reward_model(folder / "judge", **HALVES)
    return Models(folder / "policy", folder / "teacher", folder / "judge")


def written(folder: Path, policy: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "even.py").write_text(REWARD)
    rewards = {"functions": [{"function": f"{folder}/even.py:even"}]}
    return write_config(folder, policy, rewards=rewards, steps=2, **changes)


def trained(
    load: Callable[[Path, Sequence[str]], Any],
    config: Path,
    directory: Path,
    ranks: int,
    overrides: Sequence[str],
    divided: int = 1,
) -> dict[str, Any]:
    """The bits of a run, whose models are all held by so many ranks."""
    given = [*SMALL, *overrides, f"divided={divided}", f"run.dir={directory}"]

    def session(mine: Ranks) -> None:
        with open_run(load(config, given), quiet=True, ranks=mine) as opened:
            models = opened.parts.trained.model.transformer, *opened.parts.trained.frozen
            assert {model.group.size for model in models} == {divided}
            said = "2 ranks hold each model together" in "".join(opened.parts.notes())
            assert said == (divided == 2)
            training_loop(opened)
            opened.finish()

    run(ranks, session)
    return bits(directory)


RUNS = {
    "reference": ["algorithm.kl_coefficient=0.1"],
    "reference in the reward, evaluation": [
        "algorithm={kl_coefficient: 0.1, kl_in_reward: true}",
        "evaluation.every=1",
    ],
    "reference that follows": [
        "algorithm.kl_coefficient=0.1",
        "reference={sync_every: 1, sync_alpha: 0.5, precision: bf16}",
    ],
    "teacher": [
        "algorithm={advantage: distillation, kl_coefficient: 1, kl_in_reward: true}",
        "reference.path=TEACHER",
    ],
    "adapter beside its model": [
        "adapter={rank: 8, alpha: 32}",
        "optimizer.learning_rate=0.02",
        "algorithm.kl_coefficient=0.1",
    ],
    "adapter's reference that follows": [
        "adapter={rank: 8, alpha: 32}",
        "optimizer.learning_rate=0.02",
        "algorithm.kl_coefficient=0.1",
        "reference={sync_every: 1, sync_alpha: 0.5}",
    ],
    "teacher's whole distribution": [
        "algorithm={advantage: distillation, kl_coefficient: 1, kl_in_reward: true}",
        "algorithm.loss=divergence",
        "reference.path=TEACHER",
    ],
    "reward model": ["rewards.models=[{path: JUDGE, weight: 0.5}]", "evaluation.every=1"],
    "reward model alone": [
        "rewards={functions: [], models: [{path: JUDGE, precision: bf16}]}",
        "task={path: ROWS, held_out_size: 3}",
        "evaluation.every=1",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", RUNS)
def test_models_that_ranks_hold_together_have_the_bits_of_one(
    tmp_path: Path, models: Models, name: str, ranks: int
) -> None:
    """A run of a policy beside others, on one group of two ranks and on two."""
    places = {"TEACHER": str(models.teacher), "JUDGE": str(models.judge)}
    places["ROWS"] = str(tmp_path / "rows.jsonl")  # without a reward of their own
    rows = "".join(f'{{"prompt": "{number}+{number}="}}\n' for number in range(10, 20))
    (tmp_path / "rows.jsonl").write_text(rows)
    overrides = [re.sub("TEACHER|JUDGE|ROWS", lambda m: places[m[0]], text) for text in RUNS[name]]
    config = written(tmp_path, models.policy)
    alone = trained(load_config, config, tmp_path / "alone", 1, overrides)
    assert trained(load_config, config, tmp_path / "together", ranks, overrides, 2) == alone
    other = trained(load_config, config, tmp_path / "other", 1, [*overrides, "seed=1"])
    assert other != alone  # the control


@pytest.mark.slow
def test_preferences_are_compared_with_a_reference_that_ranks_hold_together(
    tmp_path: Path, models: Models
) -> None:
    config = pairs(tmp_path, models.policy, steps=3)
    alone = trained(load_sft_config, config, tmp_path / "alone", 1, [])
    assert trained(load_sft_config, config, tmp_path / "together", 2, [], 2) == alone


@pytest.mark.slow
def test_random_weights_are_made_by_ranks_that_hold_them_together(tmp_path: Path) -> None:
    init = {k: v for k, v in HALVES.items() if k != "alphabet"}
    init |= {"num_layers": 2, "max_positions": 32, "vocabulary": ALPHABET}
    config, given = sft_config(tmp_path, steps=3), [f"model.init={json.dumps(init)}"]
    alone = trained(load_sft_config, config, tmp_path / "alone", 1, given)
    assert trained(load_sft_config, config, tmp_path / "together", 2, given, 2) == alone


@pytest.mark.slow
def test_a_resume_may_hold_a_model_in_another_way(tmp_path: Path, models: Models) -> None:
    """And a run that begins whole goes on in two groups."""
    config = written(tmp_path, models.policy)
    alone = trained(load_config, config, tmp_path / "alone", 1, ["steps=4"])
    directory = tmp_path / "run"
    trained(load_config, config, directory, 2, ["steps=2"], 2)
    resumed(directory, ["steps=3", "ranks=1", "divided=1"])
    run(4, lambda ranks: resumed(directory, ["steps=4", "divided=2"], ranks))
    assert bits(directory) == alone


def test_a_reward_model_that_fails_on_one_rank_of_a_group_fails_on_all(
    tmp_path: Path, models: Models
) -> None:
    """Whose context is too short for what the first rank has sampled."""
    judge = reward_model(tmp_path / "judge", max_positions=2, **HALVES)
    config = written(tmp_path, models.policy)
    given = [f"rewards.models=[{{path: {judge}}}]", "rewards.on_error=stop"]
    with pytest.raises(RunFailed, match=r"reward model .*, its context takes 1 to 2"):
        trained(load_config, config, tmp_path / "run", 2, given, 2)


def job(path: Path, *overrides: str, ranks: int = 4, machine: Machine | None = None) -> Job:
    config = load_config(write_config(path.parent, path), [f"ranks={ranks}", *overrides])
    model = architecture(str(path))
    return job_with(config, model, 8, machine or Machine("a card", 1 << 40))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["divided=3"], "divided: 3 is no divisor of 4 ranks: choose 1, 2 or 4"),
        (["divided=8", "ranks=1"], "divided: 8 is no divisor of 1 rank: give ranks=8, or 1"),
        (["divided=4"], "divided: 4 ranks cannot hold .* has 2 parts, so choose 2 at most"),
        (["divided=2", "fleet.engines=2"], "divided: engines of a fleet hold the whole model"),
        *(
            (["divided=2", f"precision={name}"], f"divided: 2 ranks .* under precision {name}")
            for name in ("fp8-rollout", "fp8-rollout-kv", "fp8-e2e", "nvfp4", "mxfp8-rollout")
        ),
        (
            ["divided=2", "algorithm.kl_coefficient=0.1", "reference.precision=fp8-rollout"],
            "divided: the reference: 2 ranks .* which has a second engine",
        ),
        (
            ["divided=2", "rewards.models=[{path: JUDGE, precision: nvfp4, name: nice}]"],
            "divided: reward model nice: 2 ranks .* under precision nvfp4",
        ),
    ],
)
def test_what_ranks_cannot_hold_together_is_refused(
    models: Models, overrides: Sequence[str], message: str
) -> None:
    given = [text.replace("JUDGE", str(models.judge)) for text in overrides]
    with pytest.raises(IsobitError, match=message) as refused:
        together(job(models.policy, *given))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("overrides", [[], ["divided=1", "precision=fp8-rollout"]])
def test_whole_models_are_not_refused(models: Models, overrides: Sequence[str]) -> None:
    machine = Machine("a machine", 1 << 30, host=True)
    assert together(job(models.policy, *overrides, machine=machine)) == 1


def test_a_key_below_1_is_refused_where_it_is_read(models: Models) -> None:
    for value in ("0", "-2", "two", "1.5"):
        with pytest.raises(IsobitError, match="divided"):
            job(models.policy, f"divided={value}")


def test_auto_takes_the_fewest_with_which_the_plan_fits(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into nine tenths of a card; on a CPU 1. Where nothing fits it takes those with the least memory,
    and the control is a model of which two ranks need more."""
    more = 0

    def planned_on(job: Job) -> MemoryPlan:
        bytes_ = 600 // job.divided + more * (job.divided > 1)
        return MemoryPlan((("working weights", bytes_),), (("learning", 0),), 1, 1)

    monkeypatch.setattr(divided, "plan", planned_on)
    planned = job(models.policy)
    for memory, size in ((667, 1), (666, 2), (334, 2), (1, 2)):
        for host in (False, True):
            machine = Machine("a card", memory, host=host)
            assert together(replace(planned, machine=machine)) == (1 if host else size)
    more = 301
    assert together(replace(planned, machine=Machine("a card", 1))) == 1
    fleet = job(models.policy, "fleet.engines=1", machine=Machine("a card", 1))
    assert together(fleet) == 1


def test_whether_a_run_fits_is_asked_of_it_as_it_is_divided(
    tmp_path: Path, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, on the first rank."""
    asked = list[int]()
    monkeypatch.setattr(assembly, "cannot_fit", lambda job: asked.append(job.divided))
    config = written(tmp_path, models.policy)
    for ranks, size in ((2, 2), (1, 1)):
        trained(load_config, config, tmp_path / f"{ranks}", ranks, ["steps=1"], size)
    assert asked == [2, 1]


@pytest.mark.parametrize("divided", [2, 0, -1])
def test_python_is_refused_a_group_that_does_not_divide_its_ranks(
    models: Models, divided: int
) -> None:
    with pytest.raises(IsobitError, match=f"divided: {divided} ranks .* choose a divisor"):
        run(3, lambda ranks: Model.load(models.policy, ranks=ranks, divided=divided))
    with pytest.raises(IsobitError, match=f"divided: {divided} ranks cannot be a group of 1"):
        Model.init(
            Model.load(models.policy).config, Tokenizer.characters(ALPHABET), divided=divided
        )
