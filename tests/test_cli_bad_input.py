"""A user's mistake: one clear line on stderr, exit code 2, nothing written; the same message from
Python."""

import errno
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isobit import cli
from isobit.cli.app import lines_of_stdin
from isobit.config import load_config
from isobit.errors import IsobitError
from isobit.model import Model, Tokenizer
from isobit.run.directory import METRICS
from isobit.training.train import train
from tests.runs import write_config

Run = Callable[..., tuple[int, str]]
REWARD = "def score(prompts, completions, **columns):\n    return [1.0] * len(prompts)\n"


def _host_memory() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def _numpy_memory() -> None:
    np.empty(1 << 60, dtype=np.uint8)


def _python_memory() -> None:
    bytearray(1 << 60)


def _gpu_memory() -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB.\nSee documentation"
    )


def _another_error() -> None:
    raise RuntimeError("shapes do not match")


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (_host_memory, "can't allocate memory: you tried to allocate 1152921504606846976 bytes"),
        (_numpy_memory, "Unable to allocate 1.00 EiB"),
        (_python_memory, "Python found none"),
        (_gpu_memory, "CUDA out of memory. Tried to allocate 20.00 GiB.; less is taken"),
    ],
)
def test_memory_that_is_not_there_is_said_in_one_line(
    ask: Callable[[], None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With real allocations on the host. The control: another RuntimeError is a bug, and keeps its
    traceback."""
    monkeypatch.setattr(cli, "app", lambda **_: ask())
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("isobit: out of memory: ")
    assert said in line
    assert line.endswith("goes on from its last checkpoint with --resume")
    monkeypatch.setattr(cli, "app", lambda **_: _another_error())
    with pytest.raises(RuntimeError, match="shapes do not match"):
        cli.main()


@pytest.fixture
def config(tmp_path: Path, base_model: Path) -> Path:
    """A run that would work, on a copy of the model that may be damaged."""
    shutil.copytree(base_model, tmp_path / "model")
    return write_config(tmp_path, tmp_path / "model")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["sampling.temprature=1"],
            "unknown key 'sampling.temprature' (did you mean 'sampling.temperature'?)",
        ),
        (
            ["sampling.top_p=0.9", "precision=fp8-rollout"],
            "may keep other tokens than the rollout drew from",
        ),
        (["algorithm.overlong_buffer=3"], "must be below sampling.max_new_tokens"),
        (
            ["algorithm.correction=token_tis", "algorithm.recompute_old_logprobs=never"],
            "makes equal",
        ),
        (["steps"], "expected key.sub=value"),
        (["precision=fp9"], "did you mean 'fp8'"),
        (["model.path=nowhere"], "nowhere: no such directory"),
        (["task.options.digts=2"], "digts"),
        (["task.name=chess"], "chess"),
        (["sampling.max_new_tokens=40", "algorithm.preset=dapo", "engine.kv_pages=1"], "page"),
        (
            ["sampling.max_new_tokens=64"],
            "leaves no room for a prompt in the model's context of 64",
        ),
        (["rewards.functions=[{function: 'gone.py:score'}]"], "gone.py"),
        (["rewards.functions=[{function: 'reward.py:scor'}]"], "scor"),
        (["rewards.functions=[{function: 'broken.py:score'}]"], "broken.py"),
        (["task.prompt_template='no place for it'"], "{prompt}"),
        (["task.held_out_size=0", "evaluation.every=1"], "the held-out split is empty"),
        (
            ["precision.kv_cache=fp16"],
            "precision.kv_cache: expected bf16, e4m3, e4m3-calibrated or int8",
        ),
        (["precision={preset: bf16, kv_calibration: once}"], "there is no calibrated KV cache"),
        (["algorithm.correction=token_tiss"], "correction"),
        (["algorithm.router_replay=true"], "algorithm.router_replay: the model is dense"),
        (
            ["replay={capacity: 4, groups_per_step: 2, max_staleness: 0}"],
            "max_staleness: 0 forgets every past group",
        ),
        (["replay.groups_per_step=2"], "groups_per_step 2 exceeds capacity 0"),
        (["rollouts_ahead=9"], "rollouts_ahead 9 exceeds replay.max_staleness 8"),
        (["rewards.models=[{path: model}]"], "no tensor score.weight"),
        (["algorithm.shadow_every=20"], "algorithm.shadow_every: shadow passes have left"),
        (["optimizer.state=4bit"], "optimizer.state"),
        (["evaluation={every: 1, pass_at: [2]}"], "pass_at needs samples: set num_samples"),
        (
            ["evaluation={every: 1, num_samples: 2, pass_at: [4]}"],
            "pass_at: 4 is not from 1 to num_samples, which is 2",
        ),
        (
            ["evaluation={every: 1, best_by: accuracy/held}"],
            "no metric 'accuracy/held'; did you mean 'accuracy/held_out'?",
        ),
        (["evaluation={every: 1, tag: level}"], "tag 'level': example 0 has no such column"),
        (
            ["evaluation={every: 1, answer_pattern: '['}"],
            "answer pattern '[': not a regular expression",
        ),
    ],
    ids=lambda value: value[0][:40] if isinstance(value, list) else None,
)
def test_train(
    config: Path, refused: Callable[..., str], overrides: list[str], message: str
) -> None:
    (config.parent / "reward.py").write_text(REWARD)
    (config.parent / "broken.py").write_text("def score(:\n")
    assert message in refused("train", config, *overrides, "--quiet")
    assert message in refused("train", config, *overrides, "--dry-run")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "rows.jsonl"),
        ("", "rows.jsonl: no examples"),
        ('{"prompt": "1+1="}\n{"prompt": "1+2="\n', "rows.jsonl:2: malformed JSON"),
        ('{"prompt": "1+1="}\n["1+2="]\n', "rows.jsonl:2: expected a JSON object"),
        ('{"question": "1+1="}\n', "prompt"),
        ('{"prompt": 3}\n', "rows.jsonl:1:"),
        ('{"prompt": "' + "1" * 80 + '"}\n', "context of 64"),
        ('{"prompt": "abc"}\n', "abc"),
    ],
    ids=[
        "missing",
        "empty",
        "not JSON",
        "no object",
        "no prompt",
        "number",
        "too long",
        "alphabet",
    ],
)
def test_data(config: Path, refused: Callable[..., str], content: str | None, message: str) -> None:
    rows = config.parent / "rows.jsonl"
    if content is not None:
        rows.write_text(content)
    task = ["task={path: rows.jsonl, held_out_size: 0}"]
    assert message in refused("train", config, *task, "--quiet")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("path: rows.csv", "rows.csv:3: 1 field, but the header names 2"),
        ("path: cut.parquet", "cut.parquet: truncated or corrupt Parquet"),
        ("path: folder", "folder: no data in this directory: expected Parquet, JSONL or CSV files"),
        (
            "path: splits, split: trian",
            "task.split: splits has no split 'trian'; known: test, train",
        ),
        ("path: splits, format: csv", "splits: no data in this directory: expected csv files"),
        (
            "path: splits, format: arrow",
            "task.format: expected auto, jsonl, csv, parquet or dataset",
        ),
        ("path: splits, columns: {prompt: question}", "no column 'question' (task.columns.prompt)"),
        ("path: splits, columns: [question]", "task.columns: expected a mapping"),
        ("path: splits, too_long: skip", "task.too_long: expected stop or drop"),
        (
            "path: splits, prompt_template: '{prompt} {level}'",
            "splits/train.jsonl:1: task.prompt_template has {level} in it, and only {prompt} is filled",
        ),
        ("path: splits, max_prompt_tokens: 2", "splits/train.jsonl:1: the prompt has 4 tokens"),
        (
            "path: splits, chat: true",
            "splits/train.jsonl:1: the prompt is a chat, but the model has no chat template",
        ),
        ("path: splits, system: Hi", "splits/train.jsonl:1: task.system needs a chat"),
    ],
)
def test_data_of_any_format(
    config: Path, refused: Callable[..., str], task: str, message: str
) -> None:
    """No run directory is written; `tests/data/test_readers.py` has the rest of the messages."""
    folder = config.parent
    (folder / "rows.csv").write_text("prompt,answer\n1+1=,2\n1+2=\n")
    (folder / "cut.parquet").write_bytes(b"PAR1 and no end")
    (folder / "folder").mkdir()
    (folder / "splits").mkdir()
    for split in ("train", "test"):
        (folder / "splits" / f"{split}.jsonl").write_text('{"prompt": "1+1=", "level": 1}\n')
    assert message in refused("train", config, f"task={{{task}, held_out_size: 0}}", "--quiet")


def test_an_architecture_that_is_not_supported(config: Path, refused: Callable[..., str]) -> None:
    def change(values: dict[str, object]) -> None:
        values |= {"architectures": ["BertForMaskedLM"], "model_type": "bert"}

    edit_json(config.parent / "model" / "config.json", change)
    line = refused("train", config)
    assert "unsupported architecture 'bert': supported are llama, qwen2, qwen3" in line


def edit_json(path: Path, change: Callable[[dict[str, object]], None]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def truncated(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def garbage(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\x80\x04not a safetensors file" * 100)


def no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def another_shape(model: Path) -> None:
    edit_json(model / "config.json", lambda values: values.update(intermediate_size=40))


def another_depth(model: Path) -> None:
    edit_json(model / "config.json", lambda values: values.update(num_hidden_layers=3))


def an_end_that_is_no_text(model: Path) -> None:
    edit_json(model / "tokenizer_config.json", lambda values: values.update(eos_token=5))


def a_template_that_is_no_text(model: Path) -> None:
    edit_json(model / "tokenizer_config.json", lambda values: values.update(chat_template=[{}]))


def two_tokens_of_one_id(model: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        values["model"]["vocab"]["1"] = values["model"]["vocab"]["2"]

    edit_json(model / "tokenizer.json", change)


def a_key_twice(model: Path) -> None:
    path = model / "config.json"
    path.write_text('{"num_hidden_layers": 1,' + path.read_text().lstrip()[1:])


def a_mark_in_front(model: Path) -> None:
    path = model / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())


def small_vocabulary(model: Path) -> None:
    edit_json(model / "config.json", lambda values: values.update(vocab_size=5))


def foreign_tokenizer(model: Path) -> None:
    Tokenizer.characters("0123456789+-*=abcdefgh").save(model)


def no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def no_config(model: Path) -> None:
    (model / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, "model.safetensors"),
        (garbage, "model.safetensors"),
        (no_weights, "safetensors"),
        (another_shape, "shape"),
        (another_depth, "layers.2"),
        (small_vocabulary, "embed_tokens.weight has shape (17, 32)"),
        (foreign_tokenizer, "the tokenizer has ids up to"),
        (no_tokenizer, "tokenizer.json"),
        (no_config, "config.json"),
        (
            an_end_that_is_no_text,
            "tokenizer_config.json: eos_token: expected the token's text, got 5",
        ),
        (
            a_template_that_is_no_text,
            "tokenizer_config.json: chat_template: expected text, or a list",
        ),
        (two_tokens_of_one_id, "both have the id"),
        (a_key_twice, "config.json: not valid JSON: key 'num_hidden_layers' comes twice"),
        (a_mark_in_front, "config.json: not valid JSON: it begins with a byte order mark; save it"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_model_directories(
    config: Path, refused: Callable[..., str], damage: Callable[[Path], None], message: str
) -> None:
    model = config.parent / "model"
    damage(model)
    line = refused("train", config, "--quiet")
    assert message in line
    assert refused("generate", model, "--prompt", "1+1=") == line
    with pytest.raises(IsobitError) as raised:
        Model.load(model)
    assert line == f"isobit: {raised.value}\n"


def test_the_same_line_from_python(config: Path, refused: Callable[..., str]) -> None:
    with pytest.raises(IsobitError) as raised:
        load_config(config, ["stesp=3"])
    assert refused("train", config, "stesp=3") == f"isobit: {raised.value}\n"


def test_run_directories(config: Path, refused: Callable[..., str]) -> None:
    taken = config.parent / "run"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    assert "exists and is not empty" in refused("train", config)
    assert "not a run directory" in refused("train", "--resume", taken)
    assert "not a run directory" in refused("report", taken)
    assert "not a run directory" in refused("train", "--from-rollouts", taken, "--out", "again")
    assert "leave 'x.yaml' out" in refused("train", "x.yaml", "--resume", taken)
    assert "say where with --out" in refused("train", "--from-rollouts", taken)
    assert "give a config" in refused("train")
    assert "cannot read config" in refused("train", "gone.yaml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--precision", "fp9"], "did you mean 'fp8'"),
        (["--backend", "gpu"], "gpu"),
        (["consistency=loose"], "loose"),
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["-n", "0"], "sampling.group_size: expected at least 1"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
        (["--chat"], "chat template"),
        (["--prompt", "1" * 70], "context"),
        (["--prompt", ""], "empty"),
    ],
    ids=lambda value: " ".join(value)[:24] if isinstance(value, list) else None,
)
def test_generate(
    config: Path, refused: Callable[..., str], options: list[str], message: str
) -> None:
    assert message in refused("generate", config.parent / "model", "--prompt", "1+1=", *options)


def test_eval(config: Path, refused: Callable[..., str]) -> None:
    model, rows = config.parent / "model", config.parent / "rows.jsonl"
    rows.write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    arithmetic = ("--task", "arithmetic", "task.options.digits=1")
    assert "give a model to evaluate" in refused("eval", *arithmetic)
    assert "give a model to evaluate" in refused(
        "eval", model, *arithmetic, "--completions", "answer"
    )
    assert "no such column" in refused(
        "eval", "--task", "gsm8k", "--data", rows, "--completions", "gold"
    )
    assert "expected a whole number" in refused("eval", model, *arithmetic, "--pass-at", "one")
    assert "9 is not from 1 to num_samples, which is 4" in refused(
        "eval", model, *arithmetic, "--pass-at", "9", "-n", "4"
    )
    assert "is not from 1 to num_samples, which is 8" in refused(
        "eval", model, *arithmetic, "--pass-at", "9"
    )
    assert "--option 'digits': expected NAME=VALUE" in refused("eval", model, "--option", "digits")
    assert "gone.jsonl" in refused("eval", model, "--task", "gsm8k", "--data", "gone.jsonl")
    assert "reward" in refused("eval", model, "--data", rows, "--column", "prompt=question")
    assert "--column 'question': expected NAME=VALUE" in refused(
        "eval", model, "--data", rows, "--column", "question"
    )
    assert "a file, which has no splits" in refused(
        "eval", model, "--data", rows, "task.split=test"
    )
    for asked in (
        (),
        ("--data", rows),
        ("--adapter", "a=b"),
    ):  # before what a run there would have said
        assert "model gone: no such directory" in refused("eval", "gone", *asked)


RESULT = {
    "model": "m",
    "settings": {},
    "ks": [],
    "rewards": ["f"],
    "prompts": [
        {
            "prompt": "1+1=",
            "tag": None,
            "greedy": {
                "completion": "2",
                "reward": 1,
                "answer": "2",
                "tokens": 1,
                "truncated": False,
                "error": None,
            },
            "samples": [],
        }
    ],
}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("model", "--tag", "levle"),
            "tag 'levle': example 0 has no such column; did you mean 'level'?",
        ),
        (
            ("model", "--tag", "parts"),
            "tag 'parts': expected text or a number, got a list in example 0",
        ),
        (("model", "--tag", "many", "--data", "many.jsonl"), "tag 'many' has 101 different values"),
        (
            ("model", "evaluation.answer_pattern='('"),
            "answer pattern '(': not a regular expression",
        ),
        (
            ("model", "--temperature", "0.5"),
            "evaluation.temperature is for samples, and the greedy completion",
        ),
        (("model", "evaluation.top_p=0.5"), "evaluation: top_p is for samples: set num_samples"),
        (
            ("model", "sampling.min_p=0.5"),
            "sampling.min_p is for samples, and the greedy completion is",
        ),
        (("model", "-n", "-1"), "num_samples"),
        (("model", "-n", "1001"), "num_samples"),
        (("model", "-n", "2", "--temperature", "0"), "temperature: expected at least 0.001"),
        (("model", "--samples", "0"), "samples: expected at least 1"),
        (("model", "--data", "empty.jsonl"), "empty.jsonl: no examples"),
        (("model", "--best"), "--best: there is no run"),
        (("gone",), "gone: no such directory"),
        (("model", "--against", "gone"), "gone: no such directory"),
        (("model", "--against", "gone.json"), "cannot read result gone.json"),
        (
            ("model", "--against", "two.json"),
            "two.json and the data cannot be paired: they have 2 and 1 prompts",
        ),
        (("run",), "there is none"),
        (("run", "--best"), "run has no best model"),
        (
            ("model", "--out", "gone/result.json"),
            "--out gone/result.json: there is no directory gone",
        ),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else None,
)
def test_evaluations_are_refused(
    config: Path, refused: Callable[..., str], words: tuple[str, ...], message: str
) -> None:
    folder = config.parent
    (folder / "reward.py").write_text(REWARD)
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "level": 1, "parts": [1]}\n')
    (folder / "many.jsonl").write_text(
        "".join(f'{{"prompt": "1+{i}=", "many": {i}}}\n' for i in range(101))
    )
    (folder / "empty.jsonl").write_text("\n")
    (folder / "two.json").write_text(json.dumps({**RESULT, "prompts": RESULT["prompts"] * 2}))
    (folder / "run").mkdir()
    (folder / "run" / "format.txt").write_text("2\n")
    shutil.copy(config, folder / "run" / "config.yaml")
    first, *options = words
    data = () if "--data" in options else ("--data", "rows.jsonl")
    assert message in refused(
        "eval", first, *data, "--reward", "reward.py:score", "--max-new-tokens", 1, *options
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"prompts": [{**RESULT["prompts"][0], "prompt": "1+2="}]},
            "prompt 0 is '1+1=' in one and '1+2=' in the other",
        ),
        ({"prompts": RESULT["prompts"] * 2}, "they have 1 and 2 prompts"),
        ({"rewards": ["g"]}, "their rewards differ: f and g"),
        ({"ks": [2]}, "b.json: not a result of isobit eval --out: prompts or samples are missing"),
        (
            {"prompts": []},
            "b.json: not a result of isobit eval --out: prompts or samples are missing",
        ),
        (
            {"prompts": [{"prompt": "1+1="}]},
            "b.json: not a result of isobit eval --out: no key 'greedy'",
        ),
        ({"prompts": 3}, "b.json: not a result of isobit eval --out: 'int' object is not iterable"),
    ],
    ids=["prompts", "number", "rewards", "k", "empty", "key", "type"],
)
def test_results_that_cannot_be_compared(
    tmp_path: Path, refused: Callable[..., str], change: dict[str, object], message: str
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(RESULT))
    (tmp_path / "b.json").write_text(json.dumps({**RESULT, **change}))
    assert message in refused("eval", "a.json", "--against", "b.json")


def test_files_that_are_no_results(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(RESULT))
    (tmp_path / "b.json").write_text('{"model": "m",\n "ks": [}')
    assert "b.json, line 2: malformed JSON" in refused("eval", "a.json", "--against", "b.json")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe")
    assert "b.json: not UTF-8 text" in refused("eval", "b.json")
    (tmp_path / "b.json").write_text("[" * 100_000)
    assert "b.json: malformed JSON: nested too deeply" in refused("eval", "b.json")
    (tmp_path / "b.json").write_text("[]")
    assert "b.json: not a result of isobit eval --out" in refused("eval", "b.json")
    for key, value in (("model", None), ("rewards", [["f"]])):
        (tmp_path / "b.json").write_text(json.dumps({**RESULT, key: value}))
        assert "b.json: not a result of isobit eval --out: a name is " in refused("eval", "b.json")
    assert "saved results are not evaluated again" in refused("eval", "a.json", "-n", 4)
    assert "give a model to evaluate" in refused(
        "eval", "--against", "a.json", "--completions", "answer"
    )


@pytest.mark.parametrize(
    "words", [["train"], ["train", "--resume"], ["eval"], ["report"], ["watch"]]
)
def test_paths_longer_than_a_file_system_takes(
    refused: Callable[..., str], words: list[str]
) -> None:
    assert "File name too long" in refused(*words, "name" * 2000)


def test_sft(tmp_path: Path, refused: Callable[..., str]) -> None:
    config = tmp_path / "sft.yaml"
    config.write_text(
        "model: {init: {hidden_size: 16}}\ntask: {path: rows.jsonl, held_out_size: 0}\nsteps: 2\n"
    )
    assert "rows.jsonl" in refused("sft", config)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    assert "model.init.vocabulary" in refused("sft", config)
    assert "no column 'completion'" in refused(
        "sft", config, "model.init.vocabulary='0123456789+='", "--quiet"
    )
    assert "did you mean 'model.init.hidden_size'" in refused(
        "sft", config, "model.init.hidden_sise=4"
    )


OF_SFT = (
    "model: {init: {hidden_size: 16}}\ntask: {name: arithmetic}\nsteps: 2\nbatch_size: 2\n"
    "out: base\n"
)
OF_TRAIN = "model: m\ntask: {name: arithmetic}\nsampling: {group_size: 2}\nsteps: 2\n"
OF_COMPARE = "train: train.yaml\npresets: [bf16, fp8]\nout: both\n"


def test_a_config_of_another_command_is_told_whose_it_is(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    files = {"sft": OF_SFT, "train": OF_TRAIN, "compare": OF_COMPARE}
    for command, text in files.items():
        (tmp_path / f"{command}.yaml").write_text(text)
    for command in files:
        for other in files.keys() - {
            command,
            "train" if command == "compare" else "",
        }:  # which takes both
            said = refused(command, f"{other}.yaml")
            assert f"{other}.yaml: a config of `isobit {other}`, and not of `isobit " in said
            assert f"; run isobit {other} {other}.yaml" in said
    assert "it has batch_size, model.init, out; run" in refused("train", "sft.yaml")
    assert (
        "it has sampling; run isobit train train.yaml, or else: unknown key 'sampling'"
        in refused("sft", "train.yaml")
    )
    assert "run isobit sft sft.yaml" in refused("play", "sft.yaml")
    (tmp_path / "base.yaml").write_text("model: {sft: train.yaml}\ntask: {name: arithmetic}\n")
    assert "train.yaml: a config of `isobit train`, and not of `isobit sft`" in refused(
        "train", "base.yaml"
    )


def test_a_config_of_the_command_is_not_told_so(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    """The control: a wrong key, from the file or the command line, is what it was."""
    (tmp_path / "train.yaml").write_text(OF_TRAIN)
    said = "isobit: train.yaml: unknown key 'batch_size' (did you mean 'prompts_per_step'?)\n"
    assert refused("train", "train.yaml", "batch_size=2") == said
    (tmp_path / "train.yaml").write_text(OF_TRAIN + "batch_size: 2\n")
    assert refused("train", "train.yaml") == said
    (tmp_path / "sft.yaml").write_text(OF_SFT + "optimiser: {}\n")
    assert "did you mean 'optimizer'?" in refused("sft", "sft.yaml")
    assert "a config of `isobit sft`" in refused("train", "sft.yaml")  # also with a mistake in it


def test_as_a_process_and_wrong_options(config: Path) -> None:
    """The real command, once; options that do not exist are typer's to refuse, with the same exit
    code."""
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}

    def command(*words: str) -> "subprocess.CompletedProcess[str]":
        line = [sys.executable, "-m", "isobit", *words]
        return subprocess.run(
            line, env=environment, capture_output=True, text=True, check=False, cwd=config.parent
        )

    done = command("train", str(config), "stesp=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"isobit: {config}: unknown key 'stesp' (did you mean 'steps'?)\n"
    assert command("train", str(config), "--fast").returncode == 2
    assert not (config.parent / "run").exists()


def test_comparisons_and_inspections_are_refused_before_anything_runs(
    config: Path, refused: Callable[..., str], tmp_path: Path
) -> None:
    assert "unknown precision preset 'fp9'" in refused("compare", config, "--presets", "fp9")
    assert "say what to compare with --presets" in refused("compare", config)
    assert "unknown key 'sampling.temprature'" in refused(
        "compare", config, "sampling.temprature=1", "--presets", "fp8"
    )
    assert "unknown precision preset 'fp9'" in refused(
        "inspect", tmp_path / "model", "--presets", "fp9"
    )
    assert "nowhere: no such directory" in refused("inspect", "nowhere")
    assert "reward model nowhere" in refused(
        "inspect",
        tmp_path / "model",
        "--presets",
        "fp8",
        "--prompts",
        prompts(tmp_path),
        "--reward-model",
        "nowhere",
    )


def prompts(folder: Path) -> Path:
    path = folder / "asked.jsonl"
    path.write_text('{"prompt": "1+1="}\n')
    return path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "No such command 'trian'"),
        (["--halp"], "No such option: --halp"),
        (
            ["train", "c.yaml", "--fast"],
            "given without dashes, such as steps=5; isobit train --help",
        ),
        (["train", "c.yaml", "--steps=5"], "given without dashes, such as steps=5"),
        (["generate"], "Missing argument 'MODEL|RUN'"),
        (["generate", "m", "--prompt"], "requires an argument"),
        (["generate", "m", "-n", "many"], "group_size: expected a whole number, got 'many'"),
        (["generate", "m", "--max-turns", "0"], "environment.max_turns: expected at least 1"),
        (["generate", "m", "--sampling.seed=5"], "given without dashes, such as steps=5"),
        (["verify", "run", "--samples", "0"], "0 is not in the range x>=1"),
        (["doctor", "now"], "unexpected extra argument"),
    ],
)
def test_what_typer_refuses_is_one_line_too(
    refused: Callable[..., str], words: list[str], said: str
) -> None:
    assert said in refused(*words)


def test_without_a_command_there_is_help(run_isobit: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run_isobit()
    assert code == 2
    assert "Usage: isobit" in out + err
    assert run_isobit("--help")[0] == run_isobit("--version")[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "model", "--to", "."], "--to .: give the directory by a name of its own"),
        (["export", "model", "--to", "link"], "--to link: a link; give the directory itself"),
        (["export", "model", "--to", "o", "--best"], "--best: model is no run"),
        (["report", "run", "--out", "."], "--out .: a directory; give the name of a file in it"),
        (["report", "run", "--out", "/dev/null"], "--out /dev/null: a device or a pipe, which"),
        (["eval", "model", "--out", "link"], "--out link: a directory; give the name of a file"),
        (["eval", "model", "--out", "dangling"], "--out dangling: a link, which the file would"),
        (["inspect", "model", "--presets", ""], "--presets: expected at least one, such as fp8"),
        (["inspect", "model", "--column", "prompt=x"], "--column names a column of the prompts"),
        (
            ["inspect", "model", "--out", "config.yaml"],
            "--out config.yaml: a file; give a directory",
        ),
        (["plan", "config.yaml", "--memory", "9" * 400 + "GiB"], "expected a size with its unit"),
        (
            ["compare", "config.yaml", "seed=3", "--presets", "fp8"],
            "changes: seed: a comparison sets",
        ),
        (["compare", "config.yaml", "precision=bf16", "--presets", "fp8"], "changes: precision: a"),
        (
            ["train", "config.yaml", "task={path: ''}"],
            "task: path: expected a file or directory, got",
        ),
        (["train", "config.yaml", "task={files: ['']}"], "path: expected a file or directory, got"),
        (["train", "config.yaml", f"steps={'9' * 400}"], "steps: expected below 1,099,511,627,776"),
        (
            ["train", "config.yaml", "epochs=1e300"],
            "steps; give less than 1,099,511,627,776 of them",
        ),
        (
            ["train", "config.yaml", "sampling.group_size=1000000000"],
            "completions in a step; give at",
        ),
        (["train", "config.yaml", "--out", "config.yaml/run"], "config.yaml is a file"),
        (["train", "config.yaml", "--out", "dangling"], "dangling is a link to gone, which is not"),
        (["report", "run", "--out", "gone/a.html"], "there is no directory gone"),
        (["eval", "model", "--out", "empty"], "--out empty: a directory; give the name of a file"),
        (["eval", "--completions", "a", "--out", ""], "--out .: a directory; give the name"),
        (["generate", "model", "--prompt", "1", "environment.parser=json"], "between the turns"),
        (
            ["generate", "model.gguf", "--prompt", "1"],
            "model model.gguf: GGUF files, which are not",
        ),
        (
            ["generate", "model", "--prompt", "1", "--chat-template", "t.jinja"],
            "model.chat_template: without --chat prompts are text, which no template renders",
        ),
        (
            ["generate", "model", "--prompt", "1", "model.chat_template_kwargs.a=1"],
            "model.chat_template_kwargs: without --chat prompts are text",
        ),
    ],
)
def test_places_and_options_that_nothing_could_come_of(
    config: Path,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    said: str,
) -> None:
    """Before anything is computed."""
    folder = config.parent
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("empty")
    (folder / "dangling").symlink_to("gone")
    (folder / "model.gguf").write_bytes(b"GGUF")
    if words == ["export", "model", "--to", "."]:  # which is empty
        words = ["export", "../model", "--to", "."]
        monkeypatch.chdir(folder / "empty")
    assert said in refused(*words)


class _Full(io.RawIOBase):
    """A disk without room."""

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_behind_stdout_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["isobit", "--version"])
    full = io.TextIOWrapper(io.BufferedWriter(_Full()), encoding="utf-8")  # type: ignore[arg-type]
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "isobit: cannot write stdout: No space left on device\n"
    with suppress(OSError):
        full.detach()


def test_a_run_outlives_its_stderr(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a full disk, from the command line and from Python: warnings, notes and steps are lost, and
    nothing else. The control: a plain line there raises."""
    full = io.TextIOWrapper(
        io.BufferedWriter(_Full()),  # type: ignore[arg-type]
        encoding="utf-8",
        line_buffering=True,
    )
    wrong = load_config(config, ["prompts_per_step=61", "steps=1"])  # warned of, and so are steps
    words = [
        "isobit",
        "train",
        str(config),
        "steps=1",
        "task.options.train_size=3",
        "--out",
        "run2",
    ]
    monkeypatch.chdir(config.parent)
    monkeypatch.setattr(sys, "argv", words)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", full)
        with pytest.raises(OSError, match="No space left"):
            print("a line", file=sys.stderr)
        ended = train(wrong)
        with pytest.raises(SystemExit) as command:
            cli.main()
        assert sys.stderr is full
    assert (ended.exit_code, command.value.code) == (0, 0)
    assert len((config.parent / "run2" / METRICS).read_text().splitlines()) == 1
    assert capsys.readouterr().err == ""
    with suppress(OSError):
        full.detach()


@pytest.mark.slow
def test_a_stderr_that_is_closed_is_no_file_of_a_run(config: Path) -> None:
    """The next file that is opened would be number 2, and hold what libraries write there."""
    command = [sys.executable, "-c", _CLOSED, "train", str(config), "steps=1", "--quiet"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *command],
        stdout=subprocess.PIPE,
        cwd=config.parent,
        check=False,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "/dev/null\n")


_CLOSED = """
import atexit, os
from isobit.cli import main
atexit.register(lambda: print(os.readlink("/proc/self/fd/2")))
main()
"""


def test_where_a_command_runs_may_be_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_isobit: Callable[..., tuple[int, str, str]]
) -> None:
    """A current directory that is gone, no folder for temporary files, a file that vanishes, and a
    loop of links. The control: an error of no place is a bug, and keeps its traceback."""

    def raises(error: Exception) -> Callable[..., None]:
        def fail(**_: object) -> None:
            raise error

        return fail

    def said(ask: Callable[..., Any]) -> str:
        monkeypatch.setattr(cli, "app", ask)
        code, _, line = run_isobit("doctor")
        assert code == 2
        assert line.count("\n") == 1
        return line.removeprefix("isobit: ").rstrip("\n")

    (tmp_path / "loop").symlink_to("loop")
    gone = tmp_path / "gone"
    loop = RuntimeError(f"Symlink loop from {str(tmp_path / 'loop')!r}")  # of Python before 3.13
    assert said(raises(loop)).endswith("loop': Too many levels of symbolic links")
    assert said(lambda **_: gone.read_text()) == f"{gone}: No such file or directory"
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "tempdir", None)
        patched.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(gone)])
        assert said(lambda **_: tempfile.gettempdir()) == (
            "no folder for temporary files can be written: set TMPDIR to one that can"
        )
    with pytest.raises(FileNotFoundError):
        said(raises(FileNotFoundError(errno.ENOENT, "of nothing")))
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    try:
        assert "current directory is not there any more" in said(lambda **_: os.getcwd())
    finally:
        monkeypatch.chdir(tmp_path)


def test_a_locale_that_lacks_a_character_costs_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written as JSON escapes it, so that --json stays JSON."""
    written = io.BytesIO()
    narrow = io.TextIOWrapper(written, encoding="ascii")
    monkeypatch.setattr(sys, "argv", ["isobit", "--help"])
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", narrow)
        patched.setattr(cli, "app", lambda **_: print('{"text": "1 ü 😀"}'))
        with pytest.raises(SystemExit):
            cli.main()
    assert written.getvalue() == b'{"text": "1 \\u00fc \\ud83d\\ude00"}\n'
    assert json.loads(written.getvalue()) == {"text": "1 ü 😀"}


def test_standard_input_that_cannot_be_read(
    config: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["generate", config.parent / "model"]
    for given, message in (
        (None, "no prompt: give --prompt, or lines on standard input"),
        (b"", "no prompt: give --prompt, or lines on standard input"),
        (b"1+1=\n\xff\n", "standard input, line 2: not UTF-8 text"),
    ):
        stream = None if given is None else io.TextIOWrapper(io.BytesIO(given), encoding="ascii")
        monkeypatch.setattr(sys, "stdin", stream)
        assert message in refused(*words)


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_lines_of_standard_input(monkeypatch: pytest.MonkeyPatch, line_end: str) -> None:
    data = ("\ufeff" + line_end.join(("1+1=", "ü\u2028", ""))).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
    assert lines_of_stdin() == ["1+1=", "ü\u2028"]


@pytest.mark.parametrize("key", ["run.dir=~/x", "task={path: ~/x.jsonl}", "model.path=~/m"])
def test_a_home_directory_is_written_whole(
    config: Path, refused: Callable[..., str], key: str
) -> None:
    said = refused("train", config, key)
    assert "~ is not read as the home directory here: write the whole path" in said
