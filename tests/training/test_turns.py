"""Runs whose completions are episodes: an environment in worker processes answers between the
model's turns."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from isobit.config import load_config
from isobit.errors import IsobitError, RunFailed
from isobit.model import RewardModel
from isobit.run.completions import COMPLETIONS, HELD_OUT, read
from isobit.training.train import TrainResult, replay, resume, train
from tests import warm
from tests.conftest import RunIsobit
from tests.dialogues import SHORTENING, TEMPLATE
from tests.distributed.sessions import trained
from tests.models import ALPHABET, tiny_model
from tests.runs import fingerprint, killed_after
from tests.training.test_scoring import reward_model

ENVIRONMENT = '''
import os, random, time
from isobit.data.turns import Step

CALLED = os.path.join(os.path.dirname(__file__), "called.txt")


class Counting:
    """Says how many digits the model has written, for as many turns as the answer says. It takes a
    while, and each time another."""

    def reset(self, answer, **columns):
        self.turns = int(str(answer)[0]) % 3 + 1
        self.digits = self.number = 0

    def step(self, turn):
        with open(CALLED, "a") as file:
            file.write("x")
        time.sleep(random.random() * SLOW)
        self.number += 1
        self.digits += sum(c in "56789" for c in turn.text)
        message = {"role": "user", "content": f"{self.digits} so far"}
        return Step((message,), self.digits / 10, done=self.number >= self.turns)
'''


COUNTED = """
def roles(completions, **columns):
    return [float(sum(m['role'] == 'user' for m in c)) for c in completions]


def counted(environments, **columns):
    return [float(e.number) for e in environments]
"""


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("models") / "chat")


def save_chat_model(path: Path) -> Path:
    """A tiny random model with a chat template."""
    tiny_model(alphabet=ALPHABET, scale=2.0, max_positions=192).save(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def config_of(folder: Path, model: Path, slow: float = 0.0, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "counting.py").write_text(ENVIRONMENT.replace("SLOW", str(slow)))
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "model": {"path": str(model)},
        "task": {"path": str(folder / "sums.jsonl"), "held_out_size": 8, "chat": True},
        "environment": {"factory": f"{folder / 'counting.py'}:Counting", "max_turns": 4},
        "prompts_per_step": 4,
        "sampling": {"group_size": 4, "max_new_tokens": 5},
        "optimizer": {"learning_rate": 1e-3},
        "steps": 3,
        "run": {"dir": str(folder / "run"), "checkpoint_every": 1, "keep_last": 3, "report": False},
        **changes,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def run(folder: Path, model: Path, *overrides: str, **changes: Any) -> TrainResult:
    return train(load_config(config_of(folder, model, **changes), overrides))


def history_of(folder: Path, kind: str) -> list[str]:
    """Overrides: `fork` under a template that writes the past otherwise."""
    template = folder / "shortening.jinja"
    template.write_text(SHORTENING)
    fork = [f"model.chat_template={template}", "environment.history=fork"]
    return fork if kind == "fork" else []


def rows_of(run: Path) -> list[dict[str, Any]]:
    return list(read(run / COMPLETIONS))


def test_rollout_and_learner_agree_in_every_turn(tmp_path: Path, chat_model: Path) -> None:
    """0 differing tokens, over all trained tokens of all turns; the control: two flows."""
    result = run(tmp_path, chat_model, evaluation={"every": 1, "samples": 4})
    rows = rows_of(result.run_dir)
    assert {row["episode"]["turns"] for row in rows} == {1, 2, 3}
    for row in rows:
        episode = row["episode"]
        roles = [message["role"] for message in episode["messages"]]
        assert roles == ["assistant", "user"] * episode["turns"]
        assert row["reward"] == row["rewards"]["Counting"] == episode["rewards"]["Counting"]
        mask = row["completion_mask"] or [True] * len(row["completion_ids"])
        assert sum(a and not b for a, b in zip(mask, [*mask[1:], False])) == episode["turns"]
        assert row["policy_logprobs"] is not None
    for row in result.metrics:
        if row["step"]:
            assert row["mismatch/differing_tokens"] == 0
            assert row["mismatch/kl_k3"] == 0
            assert row["rollout/tokens"] > row["length/mean"]
            assert 1 < row["env/turns"] < 3
    assert "reward/held_out" in result.metrics[-1]
    for row in read(result.run_dir / HELD_OUT):
        messages = row["episode"]["messages"]
        assert [message["role"] for message in messages] == ["assistant", "user"] * row["episode"][
            "turns"
        ]
        assert row["completion"] == messages[-2]["content"]
        assert row["columns"]["answer"] == str(eval(row["prompt"].partition(" ")[2][:-1]))
        assert "found" in row
        assert "answer" not in row
    other = run(tmp_path / "other", chat_model, "precision=fp8-rollout")
    assert all(row["mismatch/differing_tokens"] > 0 for row in other.metrics)


@pytest.mark.slow
def test_the_time_that_tools_take_moves_no_bit(tmp_path: Path, chat_model: Path) -> None:
    """Also with more workers, fewer pages and resumed after each step; the control is another
    seed."""
    first = fingerprint(run(tmp_path / "a", chat_model).run_dir)
    slow = run(tmp_path / "b", chat_model, "environment.workers=2", slow=0.03)
    assert fingerprint(slow.run_dir) == first
    tight = ["engine.kv_pages=24", "engine.page_size=4", "engine.max_sequences=3"]
    ahead = run(tmp_path / "c", chat_model, *tight, "steps=1", slow=0.01)
    resume(ahead.run_dir, ["steps=3"])
    assert comparable(fingerprint(ahead.run_dir)) == comparable(first)
    other = fingerprint(run(tmp_path / "d", chat_model, "seed=1").run_dir)
    assert other["completions"] != first["completions"]


@pytest.mark.slow
@pytest.mark.parametrize(("history", "sizes"), [("append", (2, 3)), ("fork", (2,))])
def test_ranks_sample_the_same_episodes(
    tmp_path: Path, chat_model: Path, history: str, sizes: tuple[int, ...]
) -> None:
    """At one, two and three ranks, each with environments of its own, which reply in their time;
    the control is another seed."""
    config = config_of(tmp_path, chat_model, slow=0.01, evaluation={"every": 2, "samples": 3})
    given = ["steps=2", *history_of(tmp_path, history)]
    alone = trained(config, tmp_path / "alone", 0, given)
    rows = rows_of(tmp_path / "alone")
    assert any("forks" in row for row in rows) is (history == "fork")
    for size in sizes:
        assert trained(config, tmp_path / f"of {size}", size, given) == alone
    assert trained(config, tmp_path / "control", 2, [*given, "seed=1"]) != alone


@pytest.mark.slow
@pytest.mark.parametrize("history", ["append", "fork"])
def test_a_run_that_is_killed_goes_on_with_the_same_bits(
    tmp_path: Path, chat_model: Path, history: str
) -> None:
    """SIGKILL while tools are at work."""
    given = history_of(tmp_path, history)
    result = run(tmp_path / "whole", chat_model, *given)
    assert any("forks" in row for row in rows_of(result.run_dir)) is (history == "fork")
    whole = fingerprint(result.run_dir)
    config = config_of(tmp_path / "killed", chat_model, slow=0.2)
    process = warm.start(["isobit", "train", str(config), "--quiet", *given], config.parent)
    killed_after(process, tmp_path / "killed" / "run", 1, 0.05)
    assert fingerprint(resume(tmp_path / "killed" / "run").run_dir) == whole


@pytest.mark.slow
def test_a_run_goes_on_with_the_environment_that_it_began_with(
    tmp_path: Path, chat_model: Path
) -> None:
    """Another number of workers is the same run; another file is none."""
    half = run(tmp_path, chat_model, "steps=1")
    (tmp_path / "counting.py").write_text(ENVIRONMENT.replace("SLOW", "0.0") + "\n# another\n")
    with pytest.raises(IsobitError, match=r"changed since .* environment.factory \(.*counting.py"):
        resume(half.run_dir, ["steps=3"])
    (tmp_path / "counting.py").write_text(ENVIRONMENT.replace("SLOW", "0.0"))
    resume(half.run_dir, ["steps=3", "environment.workers=3"])
    whole = run(tmp_path / "whole", chat_model)
    assert fingerprint(half.run_dir) == fingerprint(whole.run_dir)


def test_eval_asks_a_run_with_its_environment(
    tmp_path: Path, chat_model: Path, run_isobit: RunIsobit
) -> None:
    """As the run's own evaluation does; the control is its first model."""
    result = run(tmp_path, chat_model, evaluation={"every": 3, "samples": 4})
    out = tmp_path / "result.json"
    code, _, errors = run_isobit("eval", result.run_dir, "--out", out)
    assert code == 0, errors
    saved = json.loads(out.read_text())
    assert saved["rewards"] == ["Counting"]
    rewards = [question["greedy"]["reward"] for question in saved["prompts"]]
    assert len(rewards) == 4
    assert sum(rewards) / 4 == pytest.approx(result.metrics[-1]["reward/held_out"])


def test_flows_are_compared_with_environments(
    tmp_path: Path, chat_model: Path, run_isobit: RunIsobit
) -> None:
    """Each run asks its own; what is finished is known again, and asks nobody."""
    config = config_of(tmp_path, chat_model, steps=1)
    command = ["compare", config, "--presets", "fp8,fp8-rollout", "--out", tmp_path / "out"]
    code, said, errors = run_isobit(*command, "--quiet")
    assert code == 0, errors
    assert "fp8-rollout" in said
    for preset in ("fp8", "fp8-rollout"):
        rows = rows_of(tmp_path / "out" / preset / "seed-0")
        assert max(row["episode"]["turns"] for row in rows) > 1
    called = (tmp_path / "called.txt").read_text()
    assert run_isobit(*command, "--quiet")[:2] == (0, said)
    assert (tmp_path / "called.txt").read_text() == called


def comparable(found: dict[str, Any]) -> dict[str, Any]:
    """What does not count pages."""
    return {name: found[name] for name in ("step", "model.safetensors", "completions")}


@pytest.mark.slow
def test_a_run_replays_without_an_environment(tmp_path: Path, chat_model: Path) -> None:
    """Whose file may be gone, also where it scored; the control asks held-out prompts, and needs
    it."""
    (tmp_path / "rewards.py").write_text(COUNTED)
    functions = [f"{tmp_path / 'rewards.py'}:{name}" for name in ("roles", "counted")]
    own = ["algorithm.decoupled_rewards=true"]  # which takes each reward by its name and weight
    first = run(tmp_path, chat_model, *own, rewards={"functions": functions})
    assert (tmp_path / "called.txt").read_text()
    for name in ("counting.py", "called.txt", "rewards.py"):
        (tmp_path / name).unlink()
    again = replay(first.run_dir, tmp_path / "again")
    assert not (tmp_path / "called.txt").exists()
    with pytest.raises(IsobitError, match=r"environment.factory.*counting.py"):
        replay(first.run_dir, tmp_path / "control", ["evaluation.every=1"])
    for name in ("model.safetensors", "trainer/optimizer.safetensors", "completions"):
        assert fingerprint(first.run_dir)[name] == fingerprint(again.run_dir)[name]


@pytest.mark.slow
def test_a_run_is_verified_without_calling_a_tool(
    tmp_path: Path, chat_model: Path, run_isobit: RunIsobit
) -> None:
    """Every turn is drawn again; the control is an observation that was not the one recorded."""
    first = run(tmp_path, chat_model)
    called = (tmp_path / "called.txt").read_text()
    code, said, _ = run_isobit("verify", first.run_dir)
    assert code == 0, said
    assert "and 0 of their" in said
    assert (tmp_path / "called.txt").read_text() == called
    falsify(first.run_dir)
    code, said, errors = run_isobit("verify", first.run_dir)
    assert code == 1
    assert "differ" in said + errors


def falsify(run: Path) -> None:
    """Another observation in one row of the newest step, tokens and hashes as they were."""
    rows = rows_of(run)
    row = next(row for row in rows if row["step"] == 2 and row["episode"]["turns"] > 1)
    row["episode"]["messages"][1]["content"] = "9 so far!"
    rewrite(run, rows)


def rewrite(run: Path, rows: list[dict[str, Any]]) -> None:
    from isobit.run.completions import pack

    steps = sorted({row["step"] for row in rows})
    packed = [pack(as_written(row) for row in rows if row["step"] == step) for step in steps]
    (run / COMPLETIONS).write_bytes(b"".join(packed))


def as_written(row: dict[str, Any]) -> dict[str, Any]:
    from isobit.training.recording.rows import _compact

    short = {name: _compact(row[name]) for name in ("rollout_logprobs",)}
    return row | short | {"policy_logprobs": "same"}


def test_dynamic_sampling_and_rollouts_ahead(tmp_path: Path, chat_model: Path) -> None:
    result = run(
        tmp_path, chat_model, "algorithm.preset=dapo", "rollouts_ahead=1", "replay.max_staleness=1"
    )
    rows = rows_of(result.run_dir)
    assert rows
    assert all(row["episode"]["turns"] for row in rows)


def test_a_template_that_changes_the_past_forks(
    tmp_path: Path, chat_model: Path, run_isobit: RunIsobit
) -> None:
    """Its contexts are one sample: no token differs, a group has as many samples as ever, and the
    run is repeated, replayed and verified; the control is a context that was not the recorded."""
    changes: dict[str, Any] = {"evaluation": {"every": 2, "samples": 3}}
    fork = [*history_of(tmp_path, "fork"), "steps=2"]
    result = run(tmp_path, chat_model, *fork, **changes)
    rows = rows_of(result.run_dir)
    assert len(rows) == 2 * 16
    assert all(row["mismatch/differing_tokens"] == 0 for row in result.metrics if row["step"])
    assert sum("forks" in row for row in rows) > 8
    slow = run(tmp_path / "slow", chat_model, *fork, slow=0.02, **changes)
    assert fingerprint(slow.run_dir) == fingerprint(result.run_dir)
    again = replay(result.run_dir, tmp_path / "again", ["evaluation.every=0"])
    for name in ("model.safetensors", "completions"):
        assert fingerprint(again.run_dir)[name] == fingerprint(result.run_dir)[name]
    code, said, _ = run_isobit("verify", result.run_dir)
    assert code == 0, said
    row = next(row for row in rows if row["step"] == 1 and row.get("forks"))
    row["completion_ids"][row["forks"][0] + 1] += 1
    rewrite(result.run_dir, rows)
    code, said, errors = run_isobit("verify", result.run_dir)
    assert code == 1
    assert "differ" in said + errors


def test_reward_functions_get_the_conversation(tmp_path: Path, chat_model: Path) -> None:
    """Every message under TRL's name, and the environment of each where they ask for it."""
    (tmp_path / "rewards.py").write_text(COUNTED)
    functions = [f"{tmp_path / 'rewards.py'}:{name}" for name in ("roles", "counted")]
    result = run(tmp_path, chat_model, rewards={"functions": functions})
    for row in rows_of(result.run_dir):
        assert row["rewards"]["roles"] == row["rewards"]["counted"] == row["episode"]["turns"]
        assert row["reward"] == pytest.approx(sum(row["rewards"].values()))


def test_a_reward_model_scores_conversations(tmp_path: Path, chat_model: Path) -> None:
    """Up to the model's last answer, beside the environment's own reward; the control is the last
    answer alone. One whose template refuses them says so in one line."""
    judge = reward_model(tmp_path / "judge", max_positions=256, alphabet=ALPHABET)
    (judge / "chat_template.jinja").write_text(TEMPLATE)
    models = {"models": [{"path": str(judge), "weight": 0.5}]}
    result = run(tmp_path, chat_model, "steps=1", rewards=models)
    model, wrong = RewardModel.load(judge), 0
    for row in rows_of(result.run_dir):
        messages = row["episode"]["messages"]
        prompt = [{"role": "user", "content": row["prompt_rendered"][5:-9]}]
        scores = model.score(
            [model.encode(prompt, messages[:-1]), model.encode(prompt, messages[-2:-1])]
        )
        assert row["rewards"]["reward_model"] == scores[0]
        assert row["reward"] == pytest.approx(row["rewards"]["Counting"] + 0.5 * scores[0])
        wrong += scores[0] != scores[1]
    assert wrong == sum(row["episode"]["turns"] > 1 for row in rows_of(result.run_dir)) > 0
    refusing = "{{ raise_exception('no users after answers') if messages|length > 2 }}" + TEMPLATE
    (judge / "chat_template.jinja").write_text(refusing)
    with pytest.raises(
        RunFailed, match=r"reward model reward_model, sample .*no users after"
    ) as raised:
        run(tmp_path / "refused", chat_model, "steps=1", rewards=models)
    assert "\n" not in str(raised.value)


def test_what_reset_adds_is_in_the_prompt_of_rewards(tmp_path: Path, chat_model: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "def asked(prompts, answer, **columns):\n"
        "    return [float(p[-1]['content'].endswith(a[-1] + '?')) for p, a in zip(prompts, answer)]\n"
    )
    functions = [f"{tmp_path / 'rewards.py'}:asked"]
    path = config_of(tmp_path, chat_model, rewards={"functions": functions}, steps=1)
    own = tmp_path / "counting.py"
    own.write_text(
        own.read_text().replace("number = 0\n", "number = 0\n        return answer[-1] + '?'\n")
    )
    for row in rows_of(train(load_config(path)).run_dir):
        assert row["rewards"]["asked"] == 1.0
        assert row["episode"]["prompt"][0]["content"].endswith("?")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"task.chat": False}, "set task.chat: true"),
    ],
)
def test_what_is_not_offered_is_refused_in_one_line(
    tmp_path: Path, chat_model: Path, changes: dict[str, Any], line: str
) -> None:
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    with pytest.raises(IsobitError, match=line) as raised:
        run(tmp_path, chat_model, *overrides)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()
