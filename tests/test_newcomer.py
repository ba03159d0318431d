"""What people type at a Python prompt in their first hour: taken where its meaning is plain, else
one clear line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import isobit
from isobit import Engine, IsobitError, Model, Sampling, load_config, resume, train
from isobit.data.readers import Source, read_rows
from isobit.errors import download_hint
from isobit.model import RewardModel

SHORT = Sampling(max_new_tokens=3)


@pytest.fixture(scope="module")
def model(base_model: Path) -> Model:
    return Model.load(base_model)


@pytest.fixture(scope="module")
def engine(model: Model) -> Engine:
    return Engine(model, kv_pages=64)


Mistake = tuple[Callable[[Model, Engine], Any], str]
MISTAKES: dict[str, Mistake] = {
    "a missing model": (
        lambda m, e: Model.load("nowhere"),
        "model nowhere: no such directory; expected a Hugging",
    ),
    "no path": (
        lambda m, e: Model.load(None),
        "model: expected the path of a Hugging Face model directory, got None",
    ),
    "a file for a model": (
        lambda m, e: Model.load(__file__),
        "a file; give the Hugging Face model directory",
    ),
    "a wrong preset": (
        lambda m, e: m.under("fp9"),
        "unknown precision preset 'fp9' (did you mean 'fp8'?)",
    ),
    "a number as preset": (
        lambda m, e: m.under(8),
        "precision: expected a preset's name, such as 'fp8'",
    ),
    "a path for parts": (
        lambda m, e: Model("path", "fp8"),
        "a model directory is opened with Model.load(path)",
    ),
    "a path for a model": (
        lambda m, e: Engine("path"),
        "Engine: expected a Model, got 'path'; open one with Model.load",
    ),
    "pages without a name": (
        lambda m, e: Engine(m, 512),
        "Engine: expected its size by name, as in kv_pages=512, got",
    ),
    "pages as words": (
        lambda m, e: Engine(m, kv_pages="many"),
        "engine.kv_pages: expected a whole number, got 'many'",
    ),
    "one text": (
        lambda m, e: e.generate("12", SHORT),
        "prompts: expected a list of prompts, got one text; write [text]",
    ),
    "one list of ids": (
        lambda m, e: e.generate([1, 2], SHORT),
        "got one of token ids; write [ids]",
    ),
    "one chat": (
        lambda m, e: e.generate([{"role": "user", "content": "1"}], SHORT),
        "got one chat; write [messages]",
    ),
    "no prompts": (
        lambda m, e: e.generate(None, SHORT),
        "prompts: expected a list of prompts, got None",
    ),
    "a dict of options": (
        lambda m, e: e.generate(["12"], {"n": 2}),
        "sampling: expected Sampling(n=4, ...), got {'n': 2}",
    ),
    "an empty prompt": (lambda m, e: e.generate([""], SHORT), "prompt 0 is empty"),
    "an id out of range": (
        lambda m, e: e.generate([[999]], SHORT),
        "token id 999 is not in the model's vocabulary",
    ),
    "too few pages": (
        lambda m, e: Engine(m, kv_pages=1).generate(["1" * 30], SHORT),
        "raise kv_pages or lower max_new_tokens",
    ),
    "a long prompt": (
        lambda m, e: e.generate(["1" * 80], SHORT),
        "the model's context of 64 takes at most 63",
    ),
    "ids that are a number": (
        lambda m, e: e.generate(["1"], SHORT, 3),
        "prompt_ids: expected a list of whole numbers",
    ),
    "one sequence": (
        lambda m, e: m.logprobs([1, 2]),
        "a list of sequences of token ids, such as [[1, 5]], got one sequence",
    ),
    "a text": (
        lambda m, e: m.logprobs("12"),
        "sequences: expected a list of sequences of token ids",
    ),
    "texts": (lambda m, e: m.logprobs(["12"]), "and sequence 0 is '12'"),
    "fractions": (
        lambda m, e: m.logprobs([[1.5, 2]]),
        "sequence 0: expected token ids, found 1.5 in it",
    ),
    "nothing": (
        lambda m, e: m.logprobs(None),
        "sequences: expected a list of sequences of token ids",
    ),
    "an id that is none": (
        lambda m, e: m.logprobs([[1, 999]]),
        "sequence 0: token id 999 is not in the model's",
    ),
    "a temperature as text": (
        lambda m, e: m.logprobs([[1]], "1"),
        "temperature: log-probabilities need one above 0",
    ),
    "a dtype as text": (
        lambda m, e: m.save("x", "bf16"),
        "save: dtype: expected a floating-point dtype, such as",
    ),
    "saved into a file": (lambda m, e: m.save(__file__), "save: expected the path of a directory"),
    "a missing config": (lambda m, e: train("nowhere.yaml"), "cannot read config nowhere.yaml"),
    "a model to train": (lambda m, e: train(m), "a mapping of settings, got Model(qwen3, "),
    "a folder": (lambda m, e: train(Path(__file__).parent), "it is a directory, not a YAML file"),
    "overrides as text": (
        lambda m, e: load_config({"model": "x"}, "steps=2"),
        'a list of texts, such as ["steps=10"]',
    ),
    "overrides as mapping": (
        lambda m, e: load_config({"model": "x"}, {"steps": 2}),
        "overrides: expected a list of texts",
    ),
    "no data": (
        lambda m, e: train({"model": "x"}),
        "task.path: task file needs a file or directory of data",
    ),
    "a missing run": (lambda m, e: resume("nowhere"), "nowhere is not a run directory"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name: str, model: Model, engine: Engine) -> None:
    make, message = MISTAKES[name]
    with pytest.raises(IsobitError) as caught:
        make(model, engine)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_what_is_plain_is_taken(model: Model, engine: Engine) -> None:
    """No `Sampling`, tensors of ids, tuples of ids; the controls are the long forms."""
    assert engine.generate(["12"]) == engine.generate(["12"], Sampling())
    assert engine.generate([(5, 6)], SHORT) == engine.generate([[5, 6]], SHORT)
    [wanted] = model.logprobs([[5, 6, 7]])
    for given in (torch.tensor([[5, 6, 7]]), [torch.tensor([5, 6, 7])], ((5, 6, 7),)):
        assert torch.equal(model.logprobs(given)[0], wanted)  # type: ignore[arg-type]


def test_a_run_given_as_a_config_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: x\n")
    with pytest.raises(
        IsobitError, match="it is a directory, not a YAML file; a run goes on with --resume "
    ):
        train(tmp_path)


def test_reprs_say_what_it_is(model: Model, engine: Engine) -> None:
    count = sum(parameter.numel() for parameter in model.parameters())
    text = (
        f"Model(qwen3, {count:,} parameters, precision fp8, {model.ops.backend}, "
        f"{model.ops.consistency})"
    )
    assert repr(model) == text
    assert (
        repr(engine) == f"Engine({text}, 64 pages of 16 tokens, {engine.kv_bytes / 2**20:.1f} MiB)"
    )
    assert repr(model.under("bf16")) != text


def test_a_misspelled_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'isobit' has no attribute 'trian'"):
        isobit.trian  # type: ignore[attr-defined]  # noqa: B018


def test_a_name_on_the_hub_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = (
        "hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B, then give models/Qwen3-0.6B"
    )
    for load in (Model.load, RewardModel.load):
        with pytest.raises(IsobitError, match=wanted.replace(".", r"\.")):
            load("Qwen/Qwen3-0.6B")
    with pytest.raises(
        IsobitError,
        match="hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k, then",
    ):
        list(read_rows(Source(Path("openai/gsm8k"))))
    (tmp_path / "runs").mkdir()
    for path in (
        "model",
        "a/b/c",
        "/a/b",
        "../b",
        "data/rows.jsonl",
        "runs/one",
        "a/rows.json.gz",
    ):
        assert download_hint(path) == "", path
    assert "~ is not read as the home directory" in download_hint("~/model")
