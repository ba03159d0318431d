"""Some seconds of damaged files, hostile ones by name, and the controls: with a broken loader the
fuzzer says so."""

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isobit.config import load_config
from isobit.data import foreign, strict_yaml
from isobit.data.dataset import Shaping, read_examples
from isobit.data.readers import Source
from isobit.errors import LEFT_OUT, IsobitError
from isobit.model import Model, ModelConfig, Tokenizer
from isobit.model.hub.checkpoint import read_json, read_weights, write_weights
from isobit.model.text import chat
from isobit.tasks.builtin import TaskSettings, load_task
from isobit.tasks.rewards.functions import load_function

from . import __main__ as fuzzer
from . import cases
from .outcome import some_seconds

SEED = 20261122


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("valid")
    cases.write_valid(folder)
    return folder


@pytest.fixture
def dense(valid: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(valid / "dense", tmp_path / "dense"))


def test_the_valid_files_are_read(valid: Path) -> None:
    for pattern, given, load, _ in cases.TARGETS:
        assert list(valid.glob(pattern)) or pattern.endswith(".jinja"), pattern
        load(valid / given)


@pytest.mark.slow
def test_some_seconds_without_a_traceback_or_a_hang(valid: Path) -> None:
    counts = some_seconds(partial(fuzzer.outcome, valid), SEED, seconds=8, most=400)
    assert counts["refused"] > counts["ok"] > 0


def _planted(error: BaseException) -> Callable[[Path], Any]:
    def load(path: Path) -> Any:
        raise error

    return load


@pytest.mark.parametrize(
    ("load", "kind", "said"),
    [
        (_planted(ZeroDivisionError("planted")), "failed", "ZeroDivisionError: planted"),
        (_planted(IsobitError("of some length " * 200)), "failed", "not one clear line"),
        (_planted(IsobitError("one line")), "refused", "one line"),
        (lambda path: print("Traceback", file=sys.stderr), "failed", "Traceback"),
        (lambda path: time.sleep(5), "hang", ""),
    ],
)
def test_negative_control_a_broken_loader_is_found(
    valid: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[Path], Any], kind: str, said: str
) -> None:
    monkeypatch.setattr(cases, "TARGETS", (("rows.jsonl", "rows.jsonl", load, 1),))
    monkeypatch.setattr(fuzzer, "CASE_SECONDS", 0.3)
    found = fuzzer.outcome(valid, SEED)
    assert found[0] == kind
    assert said in found[1]


def _config(**values: Any) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


def _text(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text)


def _pipe(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")


def _device(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_config(num_hidden_layers=10**9), "num_hidden_layers must be at most 65,536"),
        (_config(num_hidden_layers=60_000), "60,000 layers, but the weights are 25 tensors"),
        (
            _config(vocab_size=2**31 - 1),
            r"embed_tokens.weight has shape .* asks for \(2147483647, 16\)",
        ),
        (_config(hidden_size=10**12), "hidden_size must be at most"),
        (_config(model_type=[]), "unsupported architecture"),
        (
            _config(rope_scaling={"type": "yarn", "factor": 10**299}),
            "no angles with these parameters",
        ),
        (_text("config.json", '{"a": ' + "9" * 5000 + "}"), "a whole number of 5,000 digits"),
        (_text("config.json", '{"a": ' + "[" * 100_000), "nested too deeply"),
        (_text("config.json", '{"a": ' + "[" * 200 + "]" * 200 + "}"), "nested too deeply"),
        (_text("config.json", '{"a": "\\ud800"}'), "half of a surrogate pair"),
        (_text("generation_config.json", '{"eos_token_id": Infinity}'), "inf is not a token id"),
        (_pipe, "tokenizer.json: cannot be read: not a regular file"),
        (_device, "config.json: cannot be read: not a regular file"),
    ],
)
def test_hostile_models_are_one_clear_line(
    dense: Path, damage: Callable[[Path], Any], message: str
) -> None:
    damage(dense)
    began = time.process_time()
    with pytest.raises(IsobitError, match=message) as caught:
        Model.load(dense, "float32", "reference")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert time.process_time() - began < 5


LONG = "of many words " * 600
"""What the cut of a single endless word lets through; as a path it is more than any file system
takes."""


def _row(**columns: Any) -> Callable[[Path], Any]:
    text = json.dumps(columns)
    return lambda folder: (folder / "rows.jsonl").write_text('{"prompt": "a"}\n' + text + "\n")


def _index(**places: str) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "all.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    return damage


def _tensors(**tensors: torch.Tensor) -> Callable[[Path], Any]:
    return lambda folder: write_weights(folder, load_file(folder / "model.safetensors") | tensors)


def _load_model(folder: Path) -> None:
    Model.load(folder, "float32", "reference")


def _render(folder: Path) -> None:
    Tokenizer.load(folder).render_chat(cases.CHAT)


def _load_rows(folder: Path) -> None:
    read_examples(Source(folder / "rows.jsonl"), Shaping())


def _load_settings(**settings: Any) -> Callable[[Path], Any]:
    model, task = {"path": "."}, {"name": "arithmetic"}
    rewards = {"functions": ["exact_match"]}
    return lambda folder: load_config(
        {"model": model, "task": task, "rewards": rewards, **settings}
    )


_UNCHANGED = _text("unused", "")
_NAMED = {
    "file": (_index(a=LONG), _load_model, "cannot be read: File name too long"),
    "tensor in the index": (
        _index(**{LONG: "all.safetensors"}),
        _load_model,
        "where weight_map says it is",
    ),
    "tensor": (_tensors(**{LONG: torch.ones(1)}), _load_model, "config.json says qwen3"),
    "tensor of infinity": (
        _tensors(**{LONG: torch.ones(1) / 0}),
        _load_model,
        "config.json says qwen3",
    ),
    "architectures": (_config(architectures=[LONG] * 99, model_type=None), _load_model, "mixtral"),
    "syntax": (_text("chat_template.jinja", "{% " + LONG + " %}"), _render, "(line 1)"),
    "column": (_row(**{"prompt": "a", LONG: 1}), _load_rows, "words '"),
    "columns": (
        _row(**{"prompt": "a"} | dict.fromkeys(map(str, range(5000)))),
        _load_rows,
        "and 4,8",
    ),
    "key": (_UNCHANGED, _load_settings(**{LONG: 1}), "prompts_per_step, ranks, divided, seed"),
    "inner key": (_UNCHANGED, _load_settings(sampling={LONG: 1}), "stop"),
    "value": (_UNCHANGED, _load_settings(steps=LONG), "words '"),
    "precision": (
        _UNCHANGED,
        _load_settings(precision={"preset": "fp8", "wgrad": LONG}),
        "got 'of many",
    ),
    "precision's name": (_UNCHANGED, _load_settings(precision=LONG), "choose from"),
    "precision's option": (_UNCHANGED, _load_settings(precision={LONG: 1}), "rollout, learner"),
    "task": (_UNCHANGED, lambda folder: load_task(TaskSettings(name=LONG)), "known: "),
    "reward": (_UNCHANGED, lambda folder: load_function(LONG), "package.module:function"),
    "reward's file": (
        _UNCHANGED,
        lambda folder: load_function(f"{LONG}.py:f"),
        "File name too long",
    ),
    "override": (_UNCHANGED, lambda folder: load_config({}, [LONG]), "sampling.temperature=0.8"),
}


@pytest.mark.parametrize("place", _NAMED)
def test_a_long_name_leaves_the_message_whole(dense: Path, place: str) -> None:
    damage, load, said = _NAMED[place]
    damage(dense)
    with pytest.raises(IsobitError) as caught:
        load(dense)
    message = str(caught.value)
    assert LEFT_OUT not in message
    assert said in message[-300:]


def test_a_message_is_bounded_whoever_wrote_it() -> None:
    message = str(IsobitError(f"here: {LONG}; expected another"))
    assert len(message) < 1300
    assert message.startswith("here: of many words")
    assert message.endswith("words ; expected another")
    assert f"[{len(f'here: {LONG}; expected another') - 1200:,} {LEFT_OUT}]" in message
    assert LEFT_OUT not in str(IsobitError("a " * 600))


def test_links_to_files_are_followed(dense: Path) -> None:
    """As in the cache of huggingface_hub."""
    for path in list(dense.iterdir()):
        path.rename(path.with_name(f"blob-{path.name}"))
        path.symlink_to(path.with_name(f"blob-{path.name}"))
    Model.load(dense, "float32", "reference")


def test_a_file_that_may_not_be_read_says_so(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def refuse(self: Path, *arguments: Any, **more: Any) -> Any:
        if self.name == "model.safetensors":
            raise PermissionError(13, "Permission denied")
        return opened(self, *arguments, **more)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(IsobitError, match=r"model.safetensors: cannot be read: Permission denied$"):
        Model.load(dense, "float32", "reference")


def test_a_tensor_is_in_one_shard(tmp_path: Path) -> None:
    write_weights(tmp_path, {"a": torch.ones(4), "b": torch.ones(4)}, shard_bytes=16)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first, second = index["weight_map"]["a"], index["weight_map"]["b"]
    from safetensors.torch import save_file

    save_file(load_file(tmp_path / second) | {"a": torch.zeros(4)}, tmp_path / second)
    with pytest.raises(IsobitError, match=f"tensor a is in both {first} and {second}"):
        read_weights(tmp_path)
    save_file({"c": torch.zeros(4)}, tmp_path / second)
    with pytest.raises(
        IsobitError, match=f"tensor b is not in {second}, where weight_map says it is"
    ):
        read_weights(tmp_path)


_HOSTILE = {
    "{% for a in range(10**9) %}x{% endfor %}": "Range too big",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "1 seconds of computing",
    "{{ 'a' * 10**10 }}": "512 MiB of memory",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor "
    "%}": "512 MiB of memory",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}": "calls itself without end",
    "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}": "nested too deeply",
}


@pytest.mark.parametrize("template", _HOSTILE, ids=lambda text: text[:30])
@pytest.mark.parametrize("main", [True, False])
def test_hostile_templates_end(monkeypatch: pytest.MonkeyPatch, template: str, main: bool) -> None:
    """In the main thread and elsewhere; and the next template is rendered."""
    monkeypatch.setattr(chat, "CPU_SECONDS", 1)
    tokenizer = Tokenizer.characters("abc")
    found: list[str] = []

    def render() -> None:
        tokenizer.chat_template = template
        try:
            tokenizer.render_chat([{"role": "user", "content": "a"}])
        except IsobitError as error:
            found.append(str(error))
        tokenizer.chat_template = "{{ messages[0].content }}"
        found.append(tokenizer.render_chat([{"role": "user", "content": "a"}]))

    if main:
        render()
    else:
        thread = threading.Thread(target=render)
        thread.start()
        thread.join(30)
    assert _HOSTILE[template] in found[0]
    assert found[1] == "a"


def _bomb(merge: bool) -> str:
    first = "a: &a {k: v}\n" if merge else "a: &a [x, x]\n"
    form = "{{<<: [{}]}}" if merge else "[{}]"
    return first + "".join(
        f"{b}: &{b} {form.format(f'*{a}, ' * 9)}\n" for a, b in zip("abcdefgh", "bcdefghi")
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            _bomb(False),
            "line .*: not valid YAML: more than 20,000 values once its aliases are written out",
        ),
        (_bomb(True), "line .*: not valid YAML: more than 20,000 values"),
        ("a: &a [*a]\n", "line 1: not valid YAML: an alias to what it is inside of"),
        ("steps: " + "[" * 5000, "nested too deeply"),
        ("steps: " + "[" * 150 + "]" * 150, "nested too deeply"),
        (
            "".join(f"a{i}: &a{i} [{f'*a{i - 1}' if i else 1}]\n" for i in range(300)),
            "nested too deeply",
        ),
        ("steps: " + "9" * 5000, "a whole number of more than 300 digits"),
        ("steps: 2026-99-99", "a value cannot be read: month must be in 1..12"),
    ],
)
def test_hostile_yaml_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(IsobitError, match=message) as caught:
        load_config(tmp_path / "run.yaml")
    assert "\n" not in str(caught.value)


def test_aliases_and_depth_within_the_limits_are_read() -> None:
    assert strict_yaml.load("a: &a [1, 2]\nb: *a\nc: [*a, *a]\n") == {
        "a": [1, 2],
        "b": [1, 2],
        "c": [[1, 2]] * 2,
    }
    deep = "[" * (foreign.MOST_DEPTH - 1) + "]" * (foreign.MOST_DEPTH - 1)
    assert strict_yaml.load(deep) == foreign.parse_json(deep)
    assert foreign.parse_json("[" * foreign.MOST_DEPTH + "]" * foreign.MOST_DEPTH)
    with pytest.raises(foreign.BadJson, match="nested too deeply"):
        foreign.parse_json("[" * 101 + "]" * 101)
    assert foreign.parse_json("9" * 300) == int("9" * 300)
    assert foreign.parse_json(f'"{"9" * 5000}"') == "9" * 5000  # of text it is no limit


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": ' + b"[" * 100_000, "rows.jsonl:1: malformed JSON: nested too deeply"),
        (
            b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}",
            "rows.jsonl:1: malformed JSON: a whole number of 5,000 digits",
        ),
        (b'{"prompt": "\\ud800"}', "rows.jsonl:1: malformed JSON: half of a surrogate pair"),
        (None, "cannot read data file .*rows.jsonl: not a regular file"),
    ],
)
def test_hostile_rows_are_one_clear_line(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    os.mkfifo(path) if content is None else path.write_bytes(content)
    with pytest.raises(IsobitError, match=message):
        read_examples(Source(path), Shaping())


def test_a_packed_file_that_grows_without_end_is_refused(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b"\0" * (1 << 27)))
    with pytest.raises(IsobitError, match="unpacks to more than 400 times its size"):
        read_examples(Source(tmp_path / "rows.jsonl.gz"), Shaping())


def test_a_mixture_of_too_many_experts_is_refused_at_once(valid: Path) -> None:
    values = read_json(valid / "mixed" / "config.json") | {
        "num_local_experts": 2**30,
        "num_experts": 2**30,
    }
    config = ModelConfig.from_hf(values)
    from isobit.model.hub import names

    with pytest.raises(IsobitError, match="2 layers of 1,073,741,824 experts"):
        names.check_shapes({"a": (1,)} | {f"b{i}": (1,) for i in range(9)}, config, "here")
