"""A model that is its own teacher: the same tokens behind a prompt that shows more, whose
log-probabilities are those of a forward outside the run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from isobit.config import load_config
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.rl import ResolvedObjective, Sample
from isobit.rl.algorithm.advantages import Advantage
from isobit.run.checkpoints import all_checkpoints
from isobit.run.completions import COMPLETIONS, read
from isobit.training.train import replay, resume, train
from tests.models import tiny_model
from tests.rl.helpers import make_learner, roll_out, same_bits, snapshot
from tests.runs import fingerprint, write_config

TEMPLATE = "{shown}={prompt}"
DISTILLED = {
    "advantage": "distillation",
    "kl_coefficient": 1.0,
    "kl_in_reward": True,
    "loss_aggregation": "token_mean",
}
CHARGED = ResolvedObjective(**DISTILLED, kl_estimator="k1")  # type: ignore[arg-type]


def written(folder: Path, model: Path, shown: dict[str, Any], **changes: Any) -> Path:
    """A self-distillation on prompts with demonstrations, or with a reward of digits."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "prompts.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"{a}+{b}=", "how": f"{a + b}-{a}"}) + "\n"
            for a in range(5)
            for b in range(4)
        )
    )
    path = write_config(folder, model, steps=4)
    given: dict[str, Any] = {
        "algorithm": DISTILLED,
        "task": {"path": str(rows), "held_out_size": 0},
        "reference": {"weights": "policy", "shown": {"template": TEMPLATE, **shown}},
        "sampling": {"group_size": 4, "max_new_tokens": 6},
    }
    if "demonstration" in shown:
        given["rewards"] = {"functions": []}
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | given | changes))
    return path


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose distributions are not flat, so that a demonstration changes them."""
    folder = tmp_path_factory.mktemp("student") / "model"
    tiny_model("fp8", seed=4, scale=6.0).save(folder)
    return folder


def learned_from(config: Path, *changes: str) -> tuple[list[tuple[Sample, Advantage]], Any]:
    seen: list[tuple[Sample, Advantage]] = []

    def measure(samples: Any, advantages: Any) -> dict[str, float]:
        seen.extend(zip(samples, advantages, strict=True))
        return {}

    return seen, train(load_config(config, [*changes]), measures=[measure], quiet=True)


@pytest.mark.parametrize("weights", ["policy", "initial"])
def test_the_advantage_of_a_token_is_by_the_same_model_behind_a_demonstration(
    tmp_path: Path, student: Path, weights: str
) -> None:
    """SDFT: -(log policy(token | prompt) - log policy(token | prompt, demonstration)), bit for bit by
    a forward outside the run. The controls: behind its own prompt it would be 0, and another row's
    demonstration gives other numbers."""
    config = written(
        tmp_path,
        student,
        {"demonstration": "how"},
        reference={
            "weights": weights,
            "shown": {"demonstration": "how", "template": TEMPLATE},
        },
    )
    seen, found = learned_from(config, "steps=1")
    assert found.metrics[-1]["mismatch/differing_tokens"] == 0
    assert found.metrics[-1]["groups/unshown"] == 0
    model, rows = Model.load(student, "fp8"), yaml.safe_load(config.read_text())["task"]["path"]
    columns = [json.loads(line) for line in Path(rows).read_text().splitlines()]
    others = 0
    for sample, advantage in seen:
        prompt = model.tokenizer.decode(sample.prompt_ids)
        how = next(row["how"] for row in columns if row["prompt"] == prompt)

        def taught(shown: str, sample: Sample = sample, prompt: str = prompt) -> list[float]:
            before = model.tokenizer.encode_text(f"{shown}={prompt}")
            logprobs = model.logprobs([[*before, *sample.completion_ids]])[0]
            theirs = logprobs[-len(sample.completion_ids) :].double().tolist()
            return [-(mine - other) for mine, other in zip(sample.rollout_logprobs, theirs)]

        assert list(advantage) == taught(how)  # type: ignore[arg-type]
        assert any(taught(how))
        others += taught("9-9") != taught(how)
    assert others == len(seen) == 16


def test_the_rescored_tokens_are_transformers_own(tmp_path: Path) -> None:
    """In float32, one sequence after another, without packing: what the learner says of tokens
    behind other prompts; prompts of another length in one micro-batch, shared or not, and tokens
    that nobody sampled. The control: behind the sampled prompts the numbers are others."""
    transformers = pytest.importorskip("transformers")
    model = tiny_model("float32", seed=4, scale=6.0)
    model.save(tmp_path)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    samples = roll_out(model)
    masked = replace(
        samples[3],
        completion_mask=tuple(i % 2 == 0 for i in range(len(samples[3].completion_ids))),
    )
    samples[3] = masked
    before = [
        None if i == 5 else tuple(model.tokenizer.encode_text("12+3=" * (1 + i // 4) + "7"))
        for i in range(len(samples))
    ]

    def logprobs(prompt: tuple[int, ...], sample: Sample) -> list[float]:
        ids = torch.tensor([[*prompt, *sample.completion_ids]])
        with torch.no_grad():
            rows = oracle(ids).logits[0].log_softmax(-1)
        places = [len(prompt) - 1 + i for i in sample.trained]
        return [float(rows[p, int(ids[0, p + 1])]) for p in places]

    rows = {}
    for tokens, share in ((64, True), (10_000, True), (10_000, False)):
        learner = make_learner(
            model, CHARGED, share_prompts=share, reference=model, micro_batch_tokens=tokens
        )
        rows[tokens, share] = learner.reference_kl(samples, before)
    found = rows[64, True]
    assert all(each == found for each in rows.values()), "bits do not depend on packing"
    assert found[5] is None
    assert all(row is not None for i, row in enumerate(found) if i != 5)
    largest, control = 0.0, 0.0
    for sample, prompt, row in zip(samples, before, found, strict=True):
        if prompt is None or row is None:
            continue
        theirs, own = logprobs(prompt, sample), logprobs(sample.prompt_ids, sample)
        mine = [sample.rollout_logprobs[i] for i in sample.trained]
        assert len(row) == sample.num_trained
        largest = max(largest, *(abs(a - (b - c)) for a, b, c in zip(row, mine, theirs)))
        control = max(control, *(abs(a - (b - c)) for a, b, c in zip(row, mine, own)))
    assert largest < 2e-4 < 0.1 < control


def test_completions_without_a_teacher_are_as_if_not_there() -> None:
    """The weights after a step are those of a batch of the others alone, in every bit; the control:
    an advantage of 0 in its place counts in the averages."""
    model = tiny_model("fp8", seed=4, scale=6.0)
    samples = [replace(s, reward=0.0) for s in roll_out(model)]
    prompts = [
        None if i % 3 else tuple(model.tokenizer.encode_text("7-")) + s.prompt_ids
        for i, s in enumerate(samples)
    ]
    learner = make_learner(model, CHARGED, reference=model)
    kl = learner.reference_kl(samples, prompts)
    groups = [[replace(s, reference_kl=row)] for s, row in zip(samples, kl, strict=True)]

    def after(kept: list[list[Sample]]) -> Any:
        from isobit.rl.algorithm.credit import assign_credit

        again = tiny_model("fp8", seed=4, scale=6.0)
        own = make_learner(again, CHARGED, reference=again)
        own.learn(*assign_credit(kept, CHARGED), 0)
        return snapshot(own)

    alone = after([g for g in groups if g[0].reference_kl is not None])
    assert same_bits(after(groups), alone)
    zeros = [
        g if g[0].reference_kl else [replace(g[0], reference_kl=(0.0,) * g[0].num_trained)]
        for g in groups
    ]
    assert not same_bits(after(zeros), alone)


def test_a_success_of_the_group_teaches_the_others(tmp_path: Path, student: Path) -> None:
    """SDPO, through a run: who is shown which completion, a stop and a resume, and the learning
    repeated from the recorded rollouts."""
    shown = {"success": 0.6}
    config = written(tmp_path / "whole", student, shown)
    seen, whole = learned_from(config)
    rows = list(read(whole.run_dir / COMPLETIONS))
    by_group: dict[tuple[int, int], list[Any]] = {}
    for row in rows:
        by_group.setdefault((row["step"], row["prompt_index"]), []).append(row)
    unshown = 0
    for members in by_group.values():
        solved = [row["sample_index"] for row in members if row["reward"] >= 0.6]
        for row in members:
            wanted = [i for i in solved if i != row["sample_index"]]
            assert (row["reference_kl"] is not None) == bool(wanted)
            unshown += not wanted
    assert 0 < unshown < len(rows)
    assert sum(row["groups/unshown"] for row in whole.metrics if row["step"]) == unshown
    assert len(seen) == len(rows) - unshown
    config = written(tmp_path / "stopped", student, shown)
    train(load_config(config, ["steps=2"]), quiet=True)
    again = resume(tmp_path / "stopped" / "run", ["steps=4"], quiet=True)
    assert fingerprint(again.run_dir) == fingerprint(whole.run_dir)
    repeated = replay(whole.run_dir, tmp_path / "again", quiet=True)
    weights = "model.safetensors"
    assert fingerprint(repeated.run_dir)[weights] == fingerprint(whole.run_dir)[weights]


def test_a_step_without_a_teacher_learns_nothing(tmp_path: Path, student: Path) -> None:
    """No completion has so high a reward: weights stay, and nothing fails. Nor does one whose
    teacher has no room: a context of 64 tokens."""
    config = written(tmp_path / "none", student, {"success": 5.0})
    found = train(load_config(config, ["steps=2"]), quiet=True)
    assert [row["groups/unshown"] for row in found.metrics] == [16.0, 16.0]
    before = Model.load(student, "fp8").named_parameters()
    newest = all_checkpoints(found.run_dir / "checkpoints")[-1]
    after = Model.load(newest, "fp8").named_parameters()
    assert all(torch.equal(before[name], after[name]) for name in before)
    own = tmp_path / "own.py"
    own.write_text(
        "def long(completion, **given):\n    return '1' * (70 if '9' in completion else 5)\n"
    )
    shown = {"feedback": f"{own}:long", "feedback_template": TEMPLATE}
    config = written(tmp_path / "long", student, shown)
    found = train(load_config(config, ["steps=1"]), quiet=True)
    rows = list(read(found.run_dir / COMPLETIONS))
    long = sum("9" in row["completion"] for row in rows)
    assert found.metrics[-1]["groups/unshown"] == long
    assert 0 < long < len(rows)


def test_a_shown_teacher_makes_the_policy_like_it(tmp_path: Path, student: Path) -> None:
    """With the weights that the run began with; with those of the policy the target moves too."""
    changes: dict[str, Any] = {
        "optimizer": {"learning_rate": 5e-3},
        "prompts_per_step": 20,
        "reference": {"shown": {"demonstration": "how", "template": TEMPLATE}},
    }
    config = written(tmp_path, student, {"demonstration": "how"}, **changes)
    found = train(load_config(config, ["steps=10"]), quiet=True)
    kl = [row["reward/reference_kl"] for row in found.metrics]
    assert sum(kl[-3:]) < 0.7 * sum(kl[:3])


@pytest.mark.parametrize("weights", ["policy", "initial"])
@pytest.mark.parametrize("variant", ["adapter", "mixture"])
def test_an_adapter_and_a_mixture_of_experts_teach_themselves(
    tmp_path: Path, student: Path, variant: str, weights: str
) -> None:
    """The teacher of an adapter's first step is the same with it and without it: B is zero. Later
    it is not; and no other model is in memory where the policy is the teacher, or lies under its
    adapter."""
    if variant == "mixture":
        tiny_model("fp8", "qwen3_moe", seed=4, scale=6.0).save(tmp_path / "model")
    shown = {"demonstration": "how", "template": TEMPLATE}
    config = written(
        tmp_path,
        student if variant == "adapter" else tmp_path / "model",
        shown,
        adapter={"rank": 4} if variant == "adapter" else None,
        optimizer={"learning_rate": 1e-2},
        reference={"weights": weights, "shown": shown},
    )
    found = train(load_config(config, ["steps=2"]), quiet=True)
    kl = [row["reward/reference_kl"] for row in found.metrics]
    assert all(kl)
    assert [row["mismatch/differing_tokens"] for row in found.metrics] == [0, 0]
    own = variant == "mixture" and weights == "initial"
    assert all(("memory/reference_mib" in row) == own for row in found.metrics)
    other = {"policy": "initial", "initial": "policy"}[weights]
    again = train(
        load_config(config, ["steps=2", f"reference.weights={other}", f"run.dir={tmp_path / 'b'}"]),
        quiet=True,
    )
    others = [row["reward/reference_kl"] for row in again.metrics]
    assert others[0] == kl[0]
    assert others[1] != kl[1]


def test_what_teaches_nothing_is_refused(tmp_path: Path, student: Path) -> None:
    """Each in one line, before a run begins."""

    def refused(match: str, *changes: str, **given: Any) -> None:
        config = written(tmp_path, student, given.pop("shown", {"demonstration": "how"}), **given)
        with pytest.raises(IsobitError, match=match):
            train(load_config(config, [*changes]), quiet=True)

    refused("reference.shown is for a teacher", "algorithm.advantage=grpo")
    grpo = {"preset": "grpo", "kl_coefficient": 0.1}
    refused("no distance to itself", reference={"weights": "policy"}, algorithm=grpo)
    refused("is the policy itself: leave reference.path", "reference.precision=bf16")
    refused("set sampling.group_size to 2", "sampling.group_size=1", shown={"success": 1.0})
    refused("no column 'what'; there are: how", shown={"demonstration": "what"})
    refused("expected a text with", shown={"demonstration": "how", "template": "{prompt}"})
    refused(
        r"prompts.jsonl:1: .*with the demonstration the prompt has 6\d tokens",
        shown={"demonstration": "how", "template": "1" * 55 + "{prompt}{shown}"},
    )
    chats = tmp_path / "chats.jsonl"
    lines = [[{"role": role, "content": "1+1="}] for role in ("user", "system")]
    chats.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    template = tmp_path / "digits.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    refused(
        "chats.jsonl:2: reference.shown: the prompt's last message must be the user's",
        f"model.chat_template={template}",
        shown={"success": 1.0},
        task={"path": str(chats), "held_out_size": 0},
    )
    refused("no reward", shown={"success": 1.0}, rewards={"functions": []})
    refused("token", shown={"success": 1.0, "template": "{prompt}\n{shown}"})
