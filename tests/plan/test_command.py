"""`isobit plan`: its tables, its JSON, what it warns of, and what it refuses in one line."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from benchmarks.plan_jobs import MODELS
from isobit import cli
from isobit.cli.completion import devices
from isobit.plan import DEVICES
from tests.conftest import Refused
from tests.documents import ROOT, parsed
from tests.plan.shapes import model_folder

Plan = Callable[..., str]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config of Qwen3-8B, of which there is nothing but config.json; the data and the reward do not exist."""
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


def test_a_plan_has_memory_by_part_and_seconds_by_preset(plan: Plan) -> None:
    text = plan("--gpus", "8,16", "--presets", "bf16,fp8-unified", "--new-tokens", 1000)
    assert text.startswith("qwen3, 8,190,735,360 parameters, on h200 (139.8 GiB; NVIDIA H200 SXM data sheet), 8 in a")
    assert "completions of 1,000 on average and at most 2,048" in text
    assert "Memory of a GPU in GiB, fp8\n" in text
    masters = next(line.split() for line in text.splitlines() if line.startswith("FP32 masters"))
    assert masters[-2:] == ["3.8", "1.9"]
    rows = [line.split()[:2] for line in text.partition("Seconds of a step")[2].splitlines()]
    for ranks in ("8", "16"):
        assert [[name, ranks] in rows for name in ("fp8", "bf16", "fp8-unified", "fp8-e2e")] == [
            True,
            True,
            True,
            False,
        ]
    assert "Seconds are a model" in text
    assert "Nothing was measured with isobit on a GPU" in " ".join(text.split())
    assert "warning: 8 GPUs" not in text


def test_json_has_the_numbers_of_the_tables(plan: Plan) -> None:
    values = json.loads(plan("--gpus", "8", "--presets", "bf16", "--json"))
    assert [(each["precision"], each["gpus"], each["fits"]) for each in values["plans"]] == [
        ("fp8", 8, True),
        ("bf16", 8, True),
    ]
    assert values["memory"]["8"]["FP32 masters, this rank's rows"] == pytest.approx(4 * 8190735360 / 8, rel=1e-3)
    seconds = values["plans"][0]["seconds"]
    assert seconds["step"] == pytest.approx(sum(seconds.values()) - seconds["step"] - seconds["exchange"])
    assert f"{values['plans'][0]['seconds']['rollout']:.2g}" in plan("--gpus", "8", "--presets", "bf16")


def test_overrides_change_the_plan(plan: Plan) -> None:
    assert "Memory of a GPU in GiB, bf16" in plan("precision=bf16", "--gpus", 16)


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (("optimizer.micro_batch_tokens=27000",), "less than 10%: an allocator keeps"),
        (("--gpus", "512"), "342 micro-batches in an optimizer step for 512 GPUs: 170 wait"),
        (("--gpus", "512"), "64 prompts in a step for 512 GPUs: a group is sampled on one"),
        (("--gpus", "1024"), "a layer's gradient goes to its 1024 owners in messages of 736 KiB"),
        (
            ("--gpus", "64", "optimizer.micro_batch_tokens=2600"),
            "of learning: sum them in a machine first (optimizer.sum_group=8)",
        ),
        (("engine.kv_pages=100",), "the KV cache holds 1,600 tokens, and the longest sequence has 2,560"),
        (("engine.kv_pages=1000",), "holds 6.2 of the longest sequences, and a group has 16"),
        (
            ("--prompt-tokens", "40000", "optimizer.activation_checkpointing=true"),
            "leave 960 of the model's context, fewer than sampling.max_new_tokens, 2,048",
        ),
    ],
)
def test_it_warns(plan: Plan, words: tuple[str, ...], warning: str) -> None:
    assert warning in plan(*words), "and the plan without these has no warning"
    assert "warning" not in plan()


def test_what_does_not_fit_is_refused_after_its_table(plan: Plan) -> None:
    text = plan("--gpus", "1", code=2)
    assert "FP32 masters" in text
    assert text.splitlines()[-1].startswith("isobit: fp8 on 1 x h200: ")
    assert "does not fit; it fits on 2" in text.splitlines()[-1]
    assert "does not fit" in plan("--gpus", "1,8")  # one of them fits, so there is a plan
    none = plan("--gpus", "1", "precision=float32", "--device", "h100", "sampling.max_new_tokens=8000", code=2)
    assert "does not fit; no number of GPUs is enough: learning: activations of" in none.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device", "h1000"), "--device 'h1000': unknown device; did you mean 'h100'?; known: h100, h200, h20, b200"),
        (("--device", "tpu"), "--device 'tpu': unknown device; known: h100, h200, h20, b200"),
        (("--gpus", "0"), "--gpus '0': expected whole numbers from 1 to 65,536, such as 8 or 1,8,64"),
        (("--gpus", "8,,9"), "--gpus '8,,9': expected whole numbers"),
        (("--gpus", "-1"), "--gpus '-1': expected whole numbers"),
        (("--gpus", "12"), "--gpus 12: not whole machines of 8 GPUs; give a multiple, or another --per-node"),
        (("--per-node", "0"), "--per-node 0: expected a whole number, at least 1"),
        (("--prompt-tokens", "0"), "--prompt-tokens 0: expected a whole number, at least 1"),
        (("--new-tokens", "-5"), "--new-tokens -5: expected a whole number, at least 1"),
        (("--new-tokens", "5000"), "--new-tokens 5000: a completion has at most sampling.max_new_tokens, 2048"),
        (("--prompt-tokens", "99999"), "leaves no room for an answer: the model's context is 40960"),
        (("--presets", "fp9"), "unknown precision preset 'fp9' (did you mean 'fp8'?)"),
        (("model.path=nowhere",), "model nowhere: no such directory"),
        (("model={sft: base.yaml}",), "model.sft: its model is not trained yet and has no config.json"),
    ],
)
def test_mistakes_are_one_line(config: Path, refused: Refused, words: tuple[str, ...], message: str) -> None:
    assert message in refused("plan", config, *words)


def test_a_directory_without_config_json(config: Path, refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "empty: config.json is missing" in refused("plan", config, f"model.path={tmp_path / 'empty'}")


def test_a_strangers_config_is_bounded(config: Path, refused: Refused, tmp_path: Path) -> None:
    """No weights are there that would contradict its sizes."""
    file = tmp_path / "model" / "config.json"
    values = MODELS["Qwen3-30B-A3B"].to_hf()
    file.write_text(json.dumps(values | {"num_experts": 1 << 20, "num_local_experts": 1 << 20}))
    assert "50,331,648 experts in all layers: expected at most 65,536" in refused("plan", config)
    file.write_text("[]")
    assert "config.json: expected a JSON object" in refused("plan", config)
    file.write_text(json.dumps({"model_type": "deepseek_v3"}))
    assert "unsupported architecture 'deepseek_v3'" in refused("plan", config)


def test_numbers_without_end_are_refused(config: Path, refused: Refused) -> None:
    assert "too large to be planned with" in refused("plan", config, f"prompts_per_step=1{'0' * 400}")


def test_a_tab_knows_the_devices() -> None:
    assert devices("") == list(DEVICES)
    assert devices("h2") == ["h200", "h20"]


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
