"""The option tables for those who come from other trainers: every isobit key, value and metric in
them exists."""

import dataclasses
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from isobit.config import aliases, load_config
from isobit.config.aliases import counterpart
from isobit.precision import precision_from
from isobit.run import metrics
from tests.documents import ROOT, reader_folder

TABLES = [ROOT / "docs" / name for name in ("from-trl.md", "from-verl.md", "from-nemo-rl.md")]
KEYS = set(
    re.findall(
        r"^\| `([\w.]+)` \|",
        (ROOT / "docs" / "config.md").read_text().split("## isobit sft")[0],
        re.M,
    )
)
NONE = ("no counterpart", "always on")
NOT_KEYS = {"remax", "grpo_passk", "tis", "seq_sum_k1"}  # values in a column of keys
ALSO = {  # a name whose values lead to several keys, and rows that say so
    "loss_type": ("algorithm.loss_aggregation",),
    "scale_rewards": ("algorithm.advantage",),
    "actor_rollout_ref.actor.loss_agg_mode": ("algorithm.loss_aggregation",),
    "algorithm.adv_estimator": ("algorithm.advantage",),
}


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
    pairs = [
        text.split(": ", 1)
        for text in found
        if re.match(r"[\w.]+: ", text) and text.partition(":")[0] in KEYS
    ]
    assert len(pairs) > 8
    for key, value in pairs:
        config = load_config("run.yaml", [f"{key}={value}"])
        if key == "precision":
            precision_from(config.precision)


def full_names(cell: str) -> list[str]:
    """The names in a cell of theirs: values cut off, `.name` completed by the name before it."""
    names: list[str] = []
    for text in quoted(cell):
        name = re.split("[=:]", text)[0]
        if re.fullmatch(r"[.a-zA-Z][\w.]*", name):
            names.append(names[-1].rpartition(".")[0] + name if name.startswith(".") else name)
    return names


@pytest.mark.parametrize("path", TABLES, ids=lambda p: p.stem)
def test_messages_about_unknown_keys_say_what_the_tables_say(path: Path) -> None:
    """A name of theirs leads to the key beside it: to the one in its place, where there are as
    many, else to any."""
    compared = 0
    for theirs, ours, _ in rows(path, "Options"):
        keys = [text.partition(":")[0] for text in filter(is_key, quoted(ours))]
        names = [name for name in full_names(theirs) if name not in NOT_KEYS | KEYS]
        for i, name in enumerate(names if keys or ours == NONE[0] else ()):
            known, key = counterpart(name)
            wanted = [keys[i]] if len(keys) == len(names) else keys
            same = name.rpartition(".")[2] in {
                each.rpartition(".")[2] for each in wanted
            }  # found without a table
            allowed_elsewhere = key in ALSO.get(name, ())
            assert (
                (known and (key in wanted or (key is None and not wanted)))
                or same
                or allowed_elsewhere
            ), f"{name}: name it in config/aliases.py"
            compared += 1
    assert compared > 30


def test_every_alias_leads_to_a_key_that_exists() -> None:
    assert set(aliases._NAMES) <= KEYS
    names = [name for names in (*aliases._NAMES.values(), aliases._NONE) for name in names.split()]
    assert len(names) == len(set(names)) == len(aliases._KEYS)
    assert not set(names) & KEYS
    assert counterpart("no.such.name") == (False, None)


def test_a_wrong_key_or_value_would_be_noticed(
    reader: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
def test_trl_names_that_are_not_grpo_configs_are_training_arguments() -> None:
    """Where TRL itself is installed, all of them; else those that it takes over from
    transformers."""
    from transformers import TrainingArguments

    inherited = (
        "learning_rate lr_scheduler_type warmup_steps weight_decay max_grad_norm "
        "adam_beta1 adam_beta2 optim "
    )
    inherited += (
        "adam_epsilon save_steps save_total_limit eval_steps output_dir "
        "resume_from_checkpoint max_steps seed "
    )
    inherited += (
        "num_train_epochs logging_steps gradient_accumulation_steps "
        "per_device_train_batch_size bf16"
    )
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert set(shlex.split(inherited)) <= fields
    if importlib.util.find_spec("trl") is None:
        return
    from trl import GRPOConfig, ModelConfig

    fields = {
        field.name for kind in (GRPOConfig, ModelConfig) for field in dataclasses.fields(kind)
    }
    named = [
        text.partition("=")[0]
        for theirs, _, _ in rows(TABLES[0], "Options")
        for text in quoted(theirs)
    ]
    others = {
        "model",
        "train_dataset",
        "eval_dataset",
        "reward_funcs",
        "tools",
        "environment_factory",
        "vllm_server_*",
    }  # of GRPOTrainer; a pattern
    assert {name for name in named if not name.startswith('"')} - others <= fields
