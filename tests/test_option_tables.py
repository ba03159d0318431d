"""The option tables for those who come from other trainers: every isobit key, value and metric in them exists."""

import dataclasses
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from isobit import metrics
from isobit.config import load_config
from isobit.precision import precision_from
from tests.documents import ROOT, reader_folder

TABLES = [ROOT / "docs" / name for name in ("from-trl.md", "from-verl.md", "from-nemo-rl.md")]
KEYS = set(re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs" / "config.md").read_text().split("## isobit sft")[0], re.M))
NONE = ("no counterpart", "always on")


def rows(path: Path, heading: str) -> list[list[str]]:
    """Cells of the first table under a heading, without its head."""
    section = path.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def is_key(text: str) -> bool:
    """Whether a quoted text is meant as a key of the config, `key` or `key: value`."""
    return not text.startswith("isobit ")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reader_folder(tmp_path_factory.mktemp("reader"))


@pytest.mark.parametrize("path", TABLES, ids=lambda p: p.stem)
def test_every_row_names_keys_that_exist(path: Path) -> None:
    table = rows(path, "Options")
    assert len(table) > 30
    for theirs, ours, _ in table:
        assert quoted(theirs), theirs
        assert quoted(ours) or ours in NONE, ours
        for text in filter(is_key, quoted(ours)):
            assert text.partition(":")[0] in KEYS, f"{path.name}: no key {text}"


@pytest.mark.parametrize("path", TABLES, ids=lambda p: p.stem)
def test_every_value_is_accepted(path: Path, reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`key: value` in any column of ours loads as an override."""
    monkeypatch.chdir(reader)
    found = [text for row in rows(path, "Options") for cell in row[1:] for text in quoted(cell)]
    pairs = [text.split(": ", 1) for text in found if re.match(r"[\w.]+: ", text) and text.partition(":")[0] in KEYS]
    assert len(pairs) > 8
    for key, value in pairs:
        config = load_config("run.yaml", [f"{key}={value}"])
        if key == "precision":
            precision_from(config.precision)


def test_a_wrong_key_or_value_would_be_noticed(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reader)
    assert "algorithm.loss_type" not in KEYS
    with pytest.raises(Exception, match="loss_aggregation"):
        load_config("run.yaml", ["algorithm.loss_aggregation=token-mean"])


@pytest.mark.parametrize("path", TABLES, ids=lambda p: p.stem)
def test_every_metric_exists(path: Path) -> None:
    known = [re.escape(name).replace(r"\*", ".+") for name in metrics.METRICS]
    for _, ours in rows(path, "What the metrics are called"):
        for name in quoted(ours):
            assert any(re.fullmatch(pattern, name) for pattern in known), name


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_trl_names_that_are_not_grpo_configs_are_training_arguments() -> None:
    """Where TRL itself is installed, all of them; else those that it takes over from transformers."""
    from transformers import TrainingArguments

    inherited = "learning_rate lr_scheduler_type warmup_steps weight_decay max_grad_norm adam_beta1 adam_beta2 optim "
    inherited += "adam_epsilon save_steps save_total_limit eval_steps output_dir resume_from_checkpoint max_steps seed "
    inherited += "num_train_epochs logging_steps gradient_accumulation_steps per_device_train_batch_size bf16"
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert set(shlex.split(inherited)) <= fields
    if importlib.util.find_spec("trl") is None:
        return
    from trl import GRPOConfig

    fields = {field.name for field in dataclasses.fields(GRPOConfig)}
    named = [text.partition("=")[0] for theirs, _, _ in rows(TABLES[0], "Options") for text in quoted(theirs)]
    others = {"model", "train_dataset", "eval_dataset", "reward_funcs", "vllm_server_*"}  # of GRPOTrainer; a pattern
    assert {name for name in named if not name.startswith('"')} - others <= fields
