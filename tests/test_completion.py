"""What a tab offers, driven as bash drives it; and that a tab imports nothing heavy."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from isobit.cli.completion import schema_keys
from isobit.config import CompareConfig, Config, SftConfig, parse_config
from isobit.options.declare import options_of, sections, type_text
from isobit.options.precisions import PRECISIONS
from isobit.precision import PRESETS as FLOWS
from isobit.precision import precision_from

ROOT = Path(__file__).resolve().parents[1]


def tab(line: str, folder: Path = ROOT) -> list[str]:
    """What bash gets at a tab at the end of a line. Bash makes a word of each `=`."""
    words = line.replace("=", " = ").split()
    at = len(words) if line.endswith((" ", "=")) else len(words) - 1
    at = len(words) - 1 if line.endswith("=") else at
    code = (
        "import sys; from isobit.cli import main\ntry: main()\nfinally: "
        "print(sorted(sys.modules), file=sys.stderr)"
    )
    variables = {
        "_ISOBIT_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(at),
    }
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )
    imported = done.stderr.strip("[]\n").replace("'", "").split(", ")
    assert "isobit.cli.completion" in imported
    assert not {"torch", "numpy", "pyarrow"} & set(imported)
    return done.stdout.split()


def test_commands() -> None:
    assert tab("isobit tr") == ["train", "track"]


@pytest.mark.slow
def test_config_files(tmp_path: Path) -> None:
    assert tab("isobit train configs/quick") == [
        "configs/quickstart-sft.yaml",
        "configs/quickstart.yaml",
    ]
    assert "configs/dapo.yaml" in tab("isobit compare conf")
    (tmp_path / "a.yaml").touch()
    (tmp_path / "b.txt").touch()
    (tmp_path / ".hidden.yaml").touch()
    (tmp_path / "deep/er").mkdir(parents=True)
    assert tab("isobit sft ", tmp_path) == ["a.yaml", "deep/"]
    assert tab("isobit sft dee", tmp_path) == ["deep/er/"]
    assert tab("isobit sft none/", tmp_path) == []


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        (
            "isobit train c.yaml sampling.t",
            ["sampling.temperature=", "sampling.top_k=", "sampling.top_p="],
        ),
        ("isobit train c.yaml steps=5 prompts_", ["prompts_per_step=", "prompts_per_step=8"]),
        ("isobit train c.yaml model.pa", ["model.path=", "model.path=..."]),
        (
            "isobit train c.yaml consistency=",
            ["exact", "bitwise", "bitwise-tdp32", "bitwise-vdp32", "fast"],
        ),
        ("isobit train c.yaml consistency=f", ["fast"]),
        ("isobit train c.yaml run.report=", ["true", "false"]),
        (
            "isobit train c.yaml precision=fp8-rollout-k",
            ["fp8-rollout-kv", "fp8-rollout-kv-verl"],
        ),
        ("isobit train c.yaml algorithm.correction=k", ["k3_mask"]),
        ("isobit train c.yaml tracking.wandb.mode=", ["online", "offline"]),
        ("isobit sft c.yaml batch", ["batch_size=", "batch_size=64"]),
        ("isobit train c.yaml nothing_like_it", []),
        ("isobit generate model --precision mx", ["mxfp8-rollout", "mxfp8"]),
        ("isobit generate model --backend ", ["auto", "triton", "native", "reference"]),
        ("isobit eval model consistency=b", ["bitwise", "bitwise-tdp32", "bitwise-vdp32"]),
        (
            "isobit eval model evaluation.num",
            ["evaluation.num_samples=", "evaluation.num_samples=0"],
        ),
        ("isobit eval model prompts_", []),
        ("isobit generate model sampling.group", ["sampling.group_size=", "sampling.group_size=1"]),
        ("isobit serve model serve.po", ["serve.port=", "serve.port=8000"]),
        ("isobit compare c.yaml --presets bf16,nv", ["bf16,nvfp4-rollout", "bf16,nvfp4"]),
        ("isobit inspect model --presets fp8-u", ["fp8-unified"]),
    ],
)
def test_words(line: str, offered: list[str]) -> None:
    assert tab(line) == offered


def keys(schema: type, prefix: str = "") -> Iterator[str]:
    """The keys by the words for their types in docs/config.md: a section is no key, and what is in
    a list neither."""
    for name, option in options_of(schema).items():
        kind = type_text(option.kind)
        if kind != "section":
            yield f"{prefix}{name}"
        for section in () if kind.startswith("list of") else sections(option.kind):
            yield from keys(section, f"{prefix}{name}.")


@pytest.mark.parametrize("schema", [Config, SftConfig, CompareConfig])
def test_the_keys_are_those_of_the_schema(schema: type) -> None:
    assert sorted(key for key, _ in schema_keys(schema)) == sorted(keys(schema))


def test_the_values_are_accepted() -> None:
    """Every value that is offered for a key is one, where the others do not contradict it."""
    offered = {key: values for key, values in schema_keys(Config) if len(values) > 1}
    assert len(offered) > 12
    for key in (
        "precision",
        "backend",
        "consistency",
        "algorithm.preset",
        "algorithm.correction",
        "run.report",
    ):
        for value in offered[key]:
            values: dict[str, object] = {"model": {"path": "m"}}
            first, _, second = key.partition(".")
            parse_config(Config, values | {first: {second: value} if second else value}, "a test")


def test_the_presets_are_those_that_there_are() -> None:
    assert tuple(FLOWS) == PRECISIONS
    assert all(precision_from(name) for name in PRECISIONS)


def test_the_script_for_bash_names_the_command() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "_ISOBIT_COMPLETE": "source_bash"}
    command = [sys.executable, "-m", "isobit"]
    script = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert "_ISOBIT_COMPLETE=complete_bash" in script
    assert script.rstrip().endswith(" isobit")
