"""`isobit plan`: its table, its JSON, what it warns of, and what it refuses in one line."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.plan_jobs import MODELS
from isobit import cli
from isobit.cli.completion import devices
from isobit.training.plan import CARDS
from tests.conftest import Refused
from tests.documents import ROOT, parsed
from tests.plan.shapes import model_folder

Plan = Callable[..., str]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config of Qwen3-8B, of which there is nothing but config.json; the data and the reward do
    not exist."""
    path = tmp_path / "run.yaml"
    values = {
        "model": {"path": str(model_folder(tmp_path, MODELS["Qwen3-8B"]))},
        "task": {"path": "nowhere.jsonl"},
        "rewards": {"functions": ["nowhere.py:score"]},
        "prompts_per_step": 64,
        "sampling": {"group_size": 16, "max_new_tokens": 2048},
        "optimizer": {"micro_batch_tokens": 8192},
    }
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def plan(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    def call(*words: object, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["isobit", "plan", str(config), *map(str, words)])
        with pytest.raises(SystemExit) as done:
            cli.main()
        captured = capsys.readouterr()
        assert (done.value.code or 0) == code, captured.err
        return captured.out + captured.err

    return call


def test_a_plan_has_memory_by_part_and_number_of_gpus(plan: Plan) -> None:
    text = plan("--gpus", "8,16")
    assert text.startswith(
        "qwen3, 8,190,735,360 parameters, fp8\n64 prompts x 16 completions a step: prompts of 512"
    )
    assert "completions of at most 2,048; micro-batches of 8,192 tokens" in text
    assert "Memory of each GPU in GiB\n" in text
    masters = next(line.split() for line in text.splitlines() if line.startswith("FP32 masters"))
    assert masters[-2:] == ["3.8", "1.9"]
    assert re.search(
        r"^8 GPUs: fits: [\d.]+ GiB of 139.8 GiB \(h200\), [\d.]+ GiB free$", text, re.M
    )
    assert "warning: 8 GPUs" not in text


def test_time_is_not_estimated(plan: Plan) -> None:
    """In one sentence; no device is measured."""
    assert plan("--gpus", "8").splitlines()[-1].startswith("isobit plan does not estimate time")
    assert "second" not in plan("--gpus", "8", "--json")


def test_json_has_the_numbers_of_the_table(plan: Plan) -> None:
    values = json.loads(plan("--gpus", "8", "--json"))
    (found,) = values["plans"]
    assert (found["gpus"], found["fits"], found["advice"]) == (8, True, [])
    assert found["held"]["FP32 masters"] == pytest.approx(4 * 8190735360 / 8, rel=1e-3)
    assert found["bytes"] == sum(found["held"].values()) + max(found["parts"].values())
    assert f"{found['bytes'] / 2**30:.1f} GiB of 139.8 GiB" in plan("--gpus", "8")


def test_any_other_card_is_given_by_its_memory(plan: Plan) -> None:
    for name in ("h100", "a100-80", "b200"):
        card = json.loads(plan("--gpus", "8", "--device", name, "--json"))["card"]
        assert card == {"name": name, "memory": CARDS[name].memory}
    assert (
        json.loads(plan("--gpus", "8", "--memory", "96GiB", "--json"))["card"]["memory"] == 96 << 30
    )
    assert (
        json.loads(plan("--gpus", "8", "--memory", "96 GB", "--json"))["card"]["memory"]
        == 96 * 10**9
    )


def test_the_number_of_gpus_is_the_configs_unless_it_is_given(plan: Plan) -> None:
    assert json.loads(plan("ranks=4", "--json"))["plans"][0]["gpus"] == 4
    assert json.loads(plan("ranks=4", "--gpus", "2", "--json"))["plans"][0]["gpus"] == 2


def test_auto_is_planned_as_a_run_resolves_it(plan: Plan) -> None:
    """The most that fit into 90 %: more memory, more tokens."""
    auto = "optimizer.micro_batch_tokens=auto"
    found = {
        card: json.loads(plan(auto, "--gpus", "8", "--device", card, "--json"))["plans"][0]
        for card in ("h100", "h200")
    }
    for card, each in found.items():
        assert 0.85 * CARDS[card].memory < each["bytes"] <= 0.9 * CARDS[card].memory
    assert max(found["h200"]["parts"].values()) > 1.5 * max(found["h100"]["parts"].values())


def test_overrides_change_the_plan(plan: Plan) -> None:
    assert " parameters, bf16\n" in plan("precision=bf16", "--gpus", 16)


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (("--gpus", "512"), "320 micro-batches in an optimizer step for 512 ranks: 192 wait"),
        (
            ("--gpus", "512"),
            "64 prompts in a step for 512 ranks: a group is sampled on one, so 448",
        ),
        (
            ("engine.kv_pages=100",),
            "the KV cache holds 1,600 tokens, and the longest sequence has 2,560",
        ),
        (("engine.kv_pages=1000",), "holds 6.2 of the longest sequences, and a group has 16"),
        (("precision=nvfp4",), "no kernel for weights in e2m1 1x16 nvfp4 (preset nvfp4): it takes"),
        (("precision=mxfp8",), "no kernel for weights in e4m3 1x32 ue8m0 (preset mxfp8)"),
        (("--device", "a100-80"), "has weights in FP8 (preset fp8) from sm_89 on"),
        (
            ("--prompt-tokens", "40000", "optimizer.activation_checkpointing=true"),
            "leave 960 of the model's context, fewer than sampling.max_new_tokens, 2,048",
        ),
    ],
)
def test_it_warns(plan: Plan, words: tuple[str, ...], warning: str) -> None:
    given = words if "--gpus" in words else (*words, "--gpus", "8")
    assert warning in plan(*given)
    assert "warning" not in plan("--gpus", "8"), "the control: the plan without these"
    old = "precision=bf16[kv_cache=int8]", "--device", "a100-80"
    assert "warning" not in plan(*old, "--gpus", "8"), "without FP8 an A100 will do"


def test_supervised_configs_are_planned(plan: Plan, config: Path, refused: Refused) -> None:
    """Without data or weights; the controls are a loss without a reference, and a config that no
    command knows."""
    values = {"model": yaml.safe_load(config.read_text())["model"], "task": "nowhere.jsonl"}

    def planned(*words: object, **keys: object) -> dict[str, Any]:
        config.write_text(yaml.safe_dump({**values, "batch_size": 8, **keys}))
        found: dict[str, Any] = json.loads(plan(*words, "--gpus", 8, "--json"))
        return found

    plain, pairs = planned(), planned(loss="dpo")
    assert plain["lengths"] == {"prompt": 512, "completion": 512}
    assert "reference, working weights only" in pairs["plans"][0]["held"]
    assert "reference, working weights only" not in plain["plans"][0]["held"]
    assert planned(loss="kto", adapter={"rank": 8})["model"]["trained"] < 1e8
    longer = planned("--prompt-tokens", 3000, "--completion-tokens", 9000)
    assert longer["lengths"] == {"prompt": 3000, "completion": 9000}
    assert longer["plans"][0]["bytes"] > plain["plans"][0]["bytes"]
    config.write_text(yaml.safe_dump({**values, "loss": "ipo"}))
    assert "64 examples x 2 completions a step: prompts of 512" in plan("--gpus", 8)
    assert "--completion-tokens 0: expected" in refused("plan", config, "--completion-tokens", "0")
    long = "--prompt-tokens", "40000", "--completion-tokens", "961"
    assert "longer than the model's context, 40960" in refused("plan", config, *long)
    nearly = {"path": "nowhere.jsonl", "max_prompt_tokens": 40900}
    short = planned(task=nearly, adapter={"rank": 8})
    assert short["lengths"] == {"prompt": 40900, "completion": 60}
    config.write_text(yaml.safe_dump({**values, "lost": "dpo"}))
    assert "unknown key 'lost'" in refused("plan", config)


@pytest.mark.parametrize("name", ["quickstart", "student-sft"])
def test_models_that_are_not_trained_yet_are_planned(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["isobit", "plan", str(ROOT / f"configs/{name}.yaml")])
    with pytest.raises(SystemExit):
        cli.main()
    assert re.search(r"^1 GPU: fits: 0\.\d GiB", capsys.readouterr().out, re.M)


@pytest.mark.slow
def test_gpus_that_hold_a_model_together(plan: Plan, config: Path, refused: Refused) -> None:
    """By the config's number, or as many as are needed; the control is whole on each."""
    whole, four = (
        json.loads(plan("--gpus", 8, f"divided={size}", "--json"))["plans"][0] for size in (1, 4)
    )
    assert (whole["divided"], four["divided"]) == (1, 4)
    kept, all_of_it = (each["held"]["working weights, rollout"] for each in (four, whole))
    assert all_of_it / 4 < kept < 1.01 * all_of_it / 4
    assert "8 GPUs, divided=4: fits" in plan("--gpus", 8, "divided=4")
    auto = plan(
        "--gpus", 8, "optimizer.state=8bit", "--memory", "30GiB", "--device", "h100", code=2
    )
    assert "8 GPUs, divided=8: does not fit" in auto
    assert "8 GPUs: fits" in plan("--gpus", 8)
    line = refused("plan", config, "--gpus", "8", "divided=3")
    assert "divided: 3 is no divisor of 8 ranks: choose 1, 2, 4 or 8" in line
    assert "precision fp8-e2e, which has a second engine" in refused(
        "plan", config, "--gpus", "8", "divided=2", "precision=fp8-e2e"
    )


def test_what_fits_barely_or_not_is_given_advice(plan: Plan) -> None:
    """A tenth of the memory is asked for: allocators and drivers take some."""
    whole = "--gpus", "8", "divided=1"
    total = json.loads(plan(*whole, "--json"))["plans"][0]["bytes"] / 2**30
    assert "optimizer.state=8bit" in plan(*whole, "--memory", f"{1.02 * total:.1f}GiB")
    assert "optimizer.state=8bit" not in plan(*whole, "--memory", f"{1.2 * total:.1f}GiB")


@pytest.mark.slow
def test_what_does_not_fit_is_refused_after_its_table(plan: Plan) -> None:
    text = plan("--gpus", "1", code=2)
    assert "FP32 masters" in text
    assert text.splitlines()[-1].startswith("isobit: fp8 on 1 x h200: does not fit: ")
    assert text.splitlines()[-1].endswith("; it fits on 2")
    assert "does not fit" in plan("--gpus", "1,8")  # one of them fits, so there is a plan
    none = plan("--gpus", "1", "precision=float32", "--device", "rtx4090", code=2)
    assert "; not on 64 either: " in none.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--device", "h1000"),
            "--device 'h1000': unknown card; did you mean 'h100'?; known: rtx4090, rtx5090",
        ),
        (
            ("--device", "tpu"),
            "--device 'tpu': unknown card; known: rtx4090, rtx5090, a100-40, l40s, a100-80, h100",
        ),
        (("--memory", "24"), "--memory '24': expected a size with its unit, such as 24GiB or 80GB"),
        (("--memory", "0GiB"), "--memory '0GiB': expected a size with its unit"),
        (
            ("--gpus", "0"),
            "--gpus '0': expected whole numbers from 1 to 65,536, such as 8 or 1,8,64",
        ),
        (("--gpus", "8,,9"), "--gpus '8,,9': expected whole numbers"),
        (("--gpus", "-1"), "--gpus '-1': expected whole numbers"),
        (("--prompt-tokens", "0"), "--prompt-tokens 0: expected a whole number, at least 1"),
        (
            ("--prompt-tokens", "99999"),
            "leaves no room for an answer: the model's context is 40960",
        ),
        (("precision=fp9",), "unknown precision preset 'fp9' (did you mean 'fp8'?)"),
        (("model.path=nowhere",), "model nowhere: no such directory"),
        (
            ("model={sft: base.yaml}",),
            "cannot read config base.yaml: No such file",
        ),
        (
            ("--completion-tokens", "9"),
            "whose answers are given; this one samples them: sampling.max_new_tokens=9",
        ),
    ],
)
def test_mistakes_are_one_line(
    config: Path, refused: Refused, words: tuple[str, ...], message: str
) -> None:
    assert message in refused("plan", config, *words)


def test_a_directory_without_config_json(config: Path, refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "empty: config.json is missing" in refused(
        "plan", config, f"model.path={tmp_path / 'empty'}"
    )


def test_a_strangers_config_is_bounded(config: Path, refused: Refused, tmp_path: Path) -> None:
    """No weights are there that would contradict its sizes."""
    file = tmp_path / "model" / "config.json"
    values = MODELS["Qwen3-30B-A3B"].to_hf()
    file.write_text(json.dumps(values | {"num_experts": 1 << 20, "num_local_experts": 1 << 20}))
    assert "50,331,648 experts in all layers: expected at most 65,536" in refused("plan", config)
    file.write_text("[]")
    assert "config.json: expected a JSON object" in refused("plan", config)
    file.write_text(json.dumps({"model_type": "rwkv7"}))
    assert "unsupported architecture 'rwkv7'" in refused("plan", config)


def test_numbers_without_end_are_refused(config: Path, refused: Refused) -> None:
    number = "1" + "0" * 400
    given = f"engine.kv_pages={number}"
    assert "too large to be planned with" in refused("plan", config, given)
    assert "completions in a step; give at most" in refused(
        "plan", config, f"prompts_per_step={number}"
    )


def test_a_tab_knows_the_cards() -> None:
    assert devices("") == list(CARDS)
    assert devices("h") == ["h100", "h200"]


@pytest.mark.slow
def test_the_page_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The config in docs/how-to/plan.md, by the command below it."""
    text = (ROOT / "docs" / "how-to" / "plan.md").read_text()
    (config,) = [block.text for block in parsed(text) if block.title == "large.yaml"]
    (shown,) = [block.text for block in parsed(text) if block.language == "text"]
    (command,) = re.findall(r"`isobit (plan large.yaml [^`]+)` prints", text)
    model_folder(tmp_path, MODELS["Qwen3-8B"]).rename(tmp_path / "Qwen3-8B")
    (tmp_path / "large.yaml").write_text(config)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["isobit", *command.split()])
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert not done.value.code
    assert capsys.readouterr().out == shown
