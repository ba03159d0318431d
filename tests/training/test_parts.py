"""What a run is opened from: the memory plan, and a dry run that writes nothing."""

import re
import string
from pathlib import Path

import pytest

from isobit.config import load_config
from isobit.errors import IsobitError
from isobit.precision import precision_from
from isobit.rl.algorithm.correction_rule import CorrectionRule, Rejection
from isobit.tasks.builtin.gsm8k import INSTRUCTION
from isobit.training.parts.assembly import open_parts
from isobit.training.running.resolved import objective_of
from tests.models import tiny_model
from tests.runs import dry_run_text, write_config


def test_a_dry_run_says_what_would_be_and_writes_nothing(tmp_path: Path, base_model: Path) -> None:
    config = load_config(write_config(tmp_path, base_model))
    before = sorted(tmp_path.rglob("*"))
    text = dry_run_text(config)
    assert [p for p in sorted(tmp_path.rglob("*")) if "__pycache__" not in p.parts] == before
    parameters = sum(p.numel() for p in tiny_model().named_parameters().values())
    assert f"{parameters:,} parameters" in text
    assert "task arithmetic: 60 training and 8 held-out prompts" in text
    assert "4 steps of 4 prompts x 4 completions" in text
    assert "int8 per token and head fp32" in text
    masters = re.search(r"FP32 masters\s+([\d.]+)", text)
    moments = re.search(r"AdamW moments\s+([\d.]+)", text)
    assert masters is not None
    assert moments is not None
    assert float(masters[1]) == pytest.approx(4 * parameters / 2**20, abs=0.06)
    assert float(moments[1]) == pytest.approx(8 * parameters / 2**20, abs=0.06)


@pytest.mark.parametrize(
    ("masters", "state"), [("fp32", "fp32"), ("bf16", "fp32"), ("fp32", "8bit")]
)
def test_a_dry_run_says_the_formats_of_what_is_trained(
    tmp_path: Path, base_model: Path, masters: str, state: str
) -> None:
    given = [f"optimizer.masters={masters}", f"optimizer.state={state}"]
    text = dry_run_text(load_config(write_config(tmp_path, base_model), given))
    assert re.search(rf"^masters, moments +{masters}, {state}$", text, re.M)
    assert re.search(rf"^ *{masters.upper()} masters", text, re.M), "as the memory plan says"


CHAT = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<s>bot:{% endif %}"
)


def chat_model(path: Path) -> Path:
    """A random model over printable ASCII whose chat template writes the special token <s>."""
    model = tiny_model(alphabet=string.printable, max_positions=512)
    model.tokenizer.chat_template = CHAT
    model.save(path)
    return path


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ({"chat": True}, "<s>user: How many?<s>bot:"),
        (
            {"chat": True, "options": {"instruction": True}},
            f"<s>user: How many?\n{INSTRUCTION}<s>bot:",
        ),
        ({}, f"Question: How many?\n{INSTRUCTION}\nAnswer:"),
    ],
)
def test_a_dry_run_shows_the_first_prompt_as_the_model_reads_it(
    tmp_path: Path, task: dict[str, object], expected: str
) -> None:
    data = tmp_path / "questions.jsonl"
    data.write_text('{"question": "How many?", "answer": "#### 2"}\n')
    given = {"name": "gsm8k", "path": str(data), "held_out_size": 0, "options": {}, **task}
    path = write_config(
        tmp_path, chat_model(tmp_path / "model"), task=given, rewards={"functions": []}
    )
    text = dry_run_text(load_config(path))
    first = re.search(r"first prompt \((.*), (\d+) tokens\):\n(.*)", text, re.S)
    assert first is not None
    assert first[1] == f"{data}:1"
    hint = "\n\nThe model has a chat template that this prompt does not use; task.chat: true would."
    assert first[3] == expected + ("" if "chat" in task else hint)
    assert int(first[2]) == len(
        expected.replace("<s>", "~")
    )  # a token a character, and one for <s>


def test_longer_completions_need_more_memory(tmp_path: Path, base_model: Path) -> None:
    config = write_config(tmp_path, base_model)
    caches = []
    for tokens in (3, 30):
        parts = open_parts(load_config(config, [f"sampling.max_new_tokens={tokens}"]), quiet=True)
        parts.processes.close()
        caches.append(parts.engine.kv_bytes)
    assert caches[1] > caches[0]


@pytest.mark.parametrize(
    ("overrides", "correction", "recompute"),
    [
        (["precision=fp8"], "none", False),
        (["precision=bf16"], "none", False),
        (["precision=fp8-rollout"], "token_tis", True),
        (["precision=fp8-rollout", "algorithm.correction=none"], "none", True),
        (["precision=fp8", "algorithm.recompute_old_logprobs=always"], "none", True),
    ],
)
def test_auto_follows_the_precision(
    tmp_path: Path, base_model: Path, overrides: list[str], correction: str, recompute: bool
) -> None:
    config = load_config(write_config(tmp_path, base_model), overrides)
    objective = objective_of(config, precision_from(config.precision))
    assert (str(objective.rule), objective.recompute_old) == (correction, recompute)


def test_a_correction_put_together_by_hand(tmp_path: Path, base_model: Path) -> None:
    """`{weight, cap, veto, rejection: {...}}`: what is not given has no bound."""
    given = (
        "algorithm.correction={weight: sequence, cap: 3, rejection: {measure: k3, level: "
        "sequence_mean, high: 0.02}}"
    )
    config = load_config(write_config(tmp_path, base_model), ["precision=fp8-rollout", given])
    rule = objective_of(config, precision_from("fp8-rollout")).rule
    assert rule == CorrectionRule(
        "sequence", 3.0, rejection=Rejection("k3", "sequence_mean", high=0.02)
    )


def test_what_is_given_replaces_the_presets_part(tmp_path: Path, base_model: Path) -> None:
    config = load_config(
        write_config(tmp_path, base_model), ["algorithm={preset: dapo, clip_high: 0.4}"]
    )
    objective = objective_of(config, precision_from(config.precision))
    assert (objective.clip_low, objective.clip_high, objective.dynamic_sampling) == (0.2, 0.4, True)
    assert objective.loss_aggregation == "token_mean"


def test_columns_that_a_reward_needs_are_checked_before_anything_is_written(
    tmp_path: Path, base_model: Path
) -> None:
    reward = tmp_path / "needs.py"
    reward.write_text("def f(prompts, completions, level):\n    return [1.0] * len(prompts)\n")
    changes = [f"rewards.functions=[{{function: '{reward}:f'}}]"]
    with pytest.raises(IsobitError, match="level"):
        open_parts(load_config(write_config(tmp_path, base_model), changes), quiet=True)
    assert not (tmp_path / "run").exists()
