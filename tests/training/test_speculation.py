"""A run whose rollouts have drafts is the run without, bit for bit: weights, optimizer, completions
and metrics but those of drafts; over several epochs, so that earlier completions are drafted."""

from pathlib import Path
from typing import Any

import pytest

from isobit.config import load_config
from isobit.run.directory import read_jsonl
from isobit.training.train import train
from tests.models import tiny_model
from tests.runs import dry_run_text, fingerprint, write_config
from tests.training.test_turns import config_of, save_chat_model

DRAFTS = "spec_decode/num_draft_tokens"


def trained(folder: Path, model: Path, most: int | str, **changes: Any) -> Path:
    folder.mkdir()
    path = write_config(
        folder, model, engine={"num_speculative_tokens": most, "page_size": 4}, **changes
    )
    return train(load_config(path)).run_dir


@pytest.mark.slow
@pytest.mark.parametrize("most", [pytest.param(3, marks=pytest.mark.slow), "auto"])
def test_a_run_with_drafts_is_the_run_without(tmp_path: Path, most: int | str) -> None:
    tiny_model(scale=2.0).save(tmp_path / "model")
    changes = {
        "task": {"options": {"digits": 1, "train_size": 6}},
        "prompts_per_step": 1,
        "sampling": {"group_size": 4, "max_new_tokens": 20, "temperature": 0.3, "ignore_eos": True},
        "steps": 12,
        "rollouts_ahead": 1,
        "evaluation": {"every": 1, "samples": 4},
    }
    plain, drafted = (
        trained(tmp_path / str(each), tmp_path / "model", each, **changes) for each in (0, most)
    )
    assert fingerprint(plain) == fingerprint(drafted)
    rows = list(read_jsonl(drafted / "metrics.jsonl"))
    assert sum(row.get("spec_decode/num_accepted_tokens", 0) for row in rows) > 0
    for row in rows:
        if DRAFTS in row:
            rate = row["spec_decode/num_accepted_tokens"] / row[DRAFTS]
            assert row["spec_decode/draft_acceptance_rate"] == rate
            assert 1 <= row["spec_decode/mean_acceptance_length"] <= 17
    assert not any(DRAFTS in row for row in read_jsonl(plain / "metrics.jsonl"))
    other = trained(tmp_path / "other", tmp_path / "model", most, **changes, seed=1)
    assert fingerprint(other)["completions"] != fingerprint(plain)["completions"], "the control"


@pytest.mark.slow
def test_a_run_of_several_turns(tmp_path: Path) -> None:
    model = save_chat_model(tmp_path / "chat")
    found = [
        train(
            load_config(
                config_of(tmp_path / f"run{most}", model, engine={"num_speculative_tokens": most})
            )
        ).run_dir
        for most in (0, 4)
    ]
    same = ("model.safetensors", "trainer/optimizer.safetensors", "metrics")
    plain, drafted = (fingerprint(run) for run in found)
    assert {name: plain[name] for name in same} == {name: drafted[name] for name in same}
    assert sum(row.get(DRAFTS, 0) for row in read_jsonl(found[1] / "metrics.jsonl")) > 0


def test_completions_that_go_on_after_an_update(tmp_path: Path) -> None:
    tiny_model(scale=2.0).save(tmp_path / "model")
    changes = {
        "partial": {"tokens_per_round": 4, "extra_prompts": 2},
        "task": {"options": {"digits": 1, "train_size": 6}},
        "prompts_per_step": 1,
        "sampling": {"group_size": 4, "max_new_tokens": 24, "temperature": 0.8},
        "steps": 6,
    }
    plain, drafted = (
        trained(tmp_path / str(each), tmp_path / "model", each, **changes) for each in (0, 3)
    )
    assert fingerprint(plain) == fingerprint(drafted)
    rows = list(read_jsonl(drafted / "metrics.jsonl"))
    assert sum(row.get("spec_decode/num_accepted_tokens", 0) for row in rows) > 0
    assert max(row.get("partial/versions_max", 0) for row in rows) > 1


def test_a_run_says_where_nothing_is_drafted(tmp_path: Path) -> None:
    tiny_model(family="qwen3_5_text").save(tmp_path / "linear")
    tiny_model().save(tmp_path / "plain")
    said: dict[tuple[str, str], list[str]] = {}
    for name in ("linear", "plain"):
        for consistency in ("bitwise", "fast"):
            path = write_config(
                tmp_path,
                tmp_path / name,
                engine={"num_speculative_tokens": "auto"},
                consistency=consistency,
            )
            lines = dry_run_text(load_config(path)).splitlines()
            said[name, consistency] = [line for line in lines if "nothing is drafted" in line]
    assert "linear attention" in "".join(said["linear", "bitwise"])
    assert "depend on its batch" in "".join(said["plain", "fast"])
    assert not said["plain", "bitwise"]
