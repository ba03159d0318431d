"""What a plan says where it does not fit: keys, and the total that a plan with each of them has."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.plan_jobs import MODELS, job
from isobit import cli
from isobit.training.plan import card_of, plan
from isobit.training.plan.advice import (
    HEAD_ROOM,
    advice,
    cannot_fit,
    changes,
    fits_well,
    together,
    verdict,
)
from tests.plan.shapes import model_folder


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    values = {
        "model": {"path": str(model_folder(tmp_path, MODELS["Qwen3-0.6B"]))},
        "precision": "bf16",
        "prompts_per_step": 16,
        "sampling": {"group_size": 8, "max_new_tokens": 1024},
        "engine": {"kv_pages": 2000},
    }
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.slow
def test_each_total_is_the_one_that_a_plan_with_these_keys_prints(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned(*keys: str) -> dict[str, object]:
        words = ["isobit", "plan", str(config), *keys, "--memory", "12GiB", "--json"]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit):
            cli.main()
        found: dict[str, object] = json.loads(capsys.readouterr().out)["plans"][0]
        return found

    given = planned()
    assert not given["fits"]
    named = {tuple(each["keys"]): each["bytes"] for each in given["advice"]}  # type: ignore[attr-defined]
    for keys, total in named.items():
        found = planned(*keys)
        assert found["bytes"] == total < given["bytes"], keys  # type: ignore[operator]
    single = [key.partition("=")[0] for keys in named for key in keys if len(keys) == 1]
    assert set(single) >= {
        "optimizer.micro_batch_tokens",
        "optimizer.activation_checkpointing",
        "precision",
        "optimizer.state",
        "optimizer.masters",
        "ranks",
        "adapter.rank",
    }
    assert sum(len(keys) > 1 for keys in named) == 1, "and some of them together"
    assert len(set(named.values())) == len(named), "the control: another key has another total"


@pytest.mark.slow
def test_together_they_are_as_few_as_fit() -> None:
    """The control: one fewer leaves less than a tenth."""
    given = job("Qwen3-1.7B", card=card_of("24GiB"))
    found = plan(given)
    assert verdict(given, found).startswith("does not fit: ")
    both = together(given, changes(given))
    assert both is not None
    assert both.total <= (1 - HEAD_ROOM) * given.machine.memory
    assert plan(given.changed(*both.keys)).total == both.total
    assert not fits_well(given, plan(given.changed(*both.keys[:-1])))
    assert f"  {both.typed}" in advice(given, found)


@pytest.mark.slow
def test_what_fits_is_given_no_advice() -> None:
    keys = "optimizer.micro_batch_tokens=4608", "engine.kv_pages=1000"
    given = job("Qwen3-0.6B", *keys, card="h200")
    assert advice(given, plan(given)).startswith("fits: ")
    assert advice(given, plan(given)).count("\n") == 0
    total = plan(given).total
    barely = job("Qwen3-0.6B", *keys, card=card_of(f"{total // 2**20 + 200}MiB"))
    assert advice(barely, plan(barely)).startswith("fits: ")
    assert "optimizer.state=8bit" in advice(barely, plan(barely)), "where little is left, it is"


@pytest.mark.slow
def test_a_mixture_is_advised_to_adapt_its_attention() -> None:
    """Factors of all its experts would take several times as much."""
    keys = [key for change in changes(job("Qwen3-30B-A3B", card="h100")) for key in change.keys]
    assert "adapter={rank: 32, targets: [q_proj, k_proj, v_proj, o_proj]}" in keys


@pytest.mark.slow
def test_a_model_that_is_too_large_for_a_gpu_is_advised_to_be_divided() -> None:
    """Before it is read, and among the keys; the controls divide it already, or cannot."""
    small = "optimizer.masters=bf16", "optimizer.state=8bit"
    given = job("Llama-3.1-70B", *small, "divided=1", ranks=8, card="h100")
    line = cannot_fit(given)
    assert line is not None
    assert "set divided=8, which divides the weights, or isobit train --dry-run" in line
    assert cannot_fit(given.together(8)) is None
    other = cannot_fit(given.changed("precision=fp8-e2e"))
    assert other is not None
    assert "divided" not in other
    keys = {change.keys[0]: change.total for change in changes(given)}
    assert keys["divided=8"] == plan(given.together(8)).total < plan(given).total
