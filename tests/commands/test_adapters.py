"""`isobit generate` and `isobit eval` with several adapters over one model: each answers as it does
alone."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.evaluation.comparison import ALONE
from isobit.model import Model
from isobit.model.adapters.targets import NewAdapter
from isobit.training.commands.serving import open_serving
from tests.conftest import RunIsobit

Isobit = Callable[..., str]
NEW = {"math": NewAdapter(4, 8), "code": NewAdapter(3, 2, ["q_proj", "down_proj"])}
ASKED = ("--data", "rows.jsonl", "--reward", "threes.py:threes", "--max-new-tokens", 6, "-n", 2)


@pytest.fixture
def folder(tmp_path: Path, base_model: Path) -> Path:
    """Two adapters of a model, `math` and `code`, prompts, and a reward that is earned now and
    then."""
    for number, (name, new) in enumerate(NEW.items()):
        model = Model.load(base_model, "bf16", adapter=new)
        random = torch.Generator().manual_seed(number)
        for key, parameter in model.named_parameters().items():
            if key.endswith("lora_B"):
                parameter.data.copy_(torch.randn(parameter.shape, generator=random))
        model.save(tmp_path / name)
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "threes.py").write_text(
        "def threes(prompts, completions, **k):\n    return [float('3' in c) for c in "
        "completions]\n"
    )
    return tmp_path


@pytest.fixture
def isobit(folder: Path, monkeypatch: pytest.MonkeyPatch, run_isobit: RunIsobit) -> Isobit:
    """Run a command in the folder; what it prints, or, of one that fails, its error."""
    monkeypatch.chdir(folder)

    def call(*words: object, fails: bool = False) -> str:
        code, out, err = run_isobit(*words)
        assert bool(code) == fails, err
        return err if fails else out

    return call


def test_generate_asks_each_adapter(isobit: Isobit, base_model: Path) -> None:
    words = ("--prompt", "1+2=", "--prompt", "3", "--max-new-tokens", 6, "--seed", 5, "-n", 2)
    every = isobit(
        "generate", base_model, "--adapter", "math", "--adapter", "c=code", *words, "--json"
    )
    rows = [json.loads(line) for line in every.splitlines()]
    alone = {
        name: [
            json.loads(line)
            for line in isobit(
                "generate", base_model, "--adapter", f, *words, "--json"
            ).splitlines()
        ]
        for name, f in (("math", "math"), ("c", "code"))
    }
    for name, wanted in alone.items():
        assert [row | {"adapter": None} for row in rows if row["adapter"] == name] == wanted
    assert [r["logprobs"] for r in alone["math"]] != [
        r["logprobs"] for r in alone["c"]
    ]  # the control
    lines = isobit(
        "generate", base_model, "--adapter", "math", "--adapter", "c=code", *words
    ).splitlines()
    headings = [
        f"[{name} {i}.{j}] {prompt}"
        for i, prompt in enumerate(("1+2=", "3"))
        for name in alone
        for j in (0, 1)
    ]
    assert [line[: len(heading)] for line, heading in zip(lines, headings, strict=True)] == headings


def test_eval_gives_each_adapter_a_row_and_a_file(
    isobit: Isobit, base_model: Path, folder: Path
) -> None:
    """The files are those of evaluations one at a time, so they are compared as these are."""
    given = ("--adapter", "math", "--adapter", "c=code")
    printed = isobit("eval", base_model, *given, *ASKED, "--out", "every.json")
    isobit("eval", base_model, *ASKED, "--out", "base.json")
    isobit("eval", "math", *ASKED, "--out", "math.json")
    isobit("eval", "code", *ASKED, "--out", "code.json")
    read = {
        name: json.loads((folder / f"{name}.json").read_text()) for name in ("base", "math", "code")
    }
    for name, other in (("every", "base"), ("every-math", "math"), ("every-c", "code")):
        assert json.loads((folder / f"{name}.json").read_text()) == read[other]
    assert len({json.dumps(one["prompts"]) for one in read.values()}) == 3  # the control
    table, pairs = (part.splitlines()[2:] for part in printed.split("\n\n")[1:3])
    assert [row.split()[0] for row in table] == [ALONE, "math", "c"]
    for row, name in zip(table, ("base", "math", "code"), strict=True):
        assert row.split()[2] == f"{read[name]['summary']['(all)']['accuracy']['value']:.3f}"
    paired = isobit("eval", "every-math.json", "--against", "every.json")
    found = next(line.split()[3:] for line in paired.splitlines() if line.startswith("accuracy"))
    assert next(row.split()[2:] for row in pairs if re.match(r"math +accuracy", row)) == found


def test_unscored_completions_are_told_of_each(
    isobit: Isobit, base_model: Path, folder: Path
) -> None:
    (folder / "threes.py").write_text(
        "def threes(prompts, completions, **k):\n    return [None if p.startswith('0') else 0.0 "
        "for p in prompts]\n"
    )
    printed = isobit("eval", base_model, "--adapter", "math", *ASKED).splitlines()
    for name in (ALONE, "math"):
        assert sum(line.startswith(f"{name}: unscored completions, wrong") for line in printed) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--adapter", "math", "--adapter", "x/../math"),
            r"--adapter 'x/../math': math is called math too; give each",
        ),
        (("--adapter", "a b=math"), "--adapter 'a b=math': expected NAME=DIR"),
        (("--adapter", "c=missing"), "adapter missing: no such directory"),
        (
            ("--adapter", "math", "--against", "code"),
            "--adapter: give the model .* without --against",
        ),
        (("--adapter", "math", "--precision", "fp8-rollout-kv"), "calibrates its KV cache"),
    ],
)
def test_mistakes_are_said_in_a_line(
    isobit: Isobit, base_model: Path, words: tuple[str, ...], message: str
) -> None:
    error = isobit("eval", base_model, *words, *ASKED, fails=True)
    assert re.search(message, error)
    assert len(error.strip().splitlines()) == 1


def test_a_model_that_is_an_adapter_itself_is_refused(isobit: Isobit, base_model: Path) -> None:
    assert "math is an adapter itself; give the model" in isobit(
        "eval", "math", "--adapter", "code", *ASKED, fails=True
    )
    merged = isobit("eval", base_model, "--adapter", f"merged={base_model}", *ASKED, fails=True)
    assert "a whole model, merged or never adapted; give it as the model itself" in merged


@pytest.mark.parametrize("precision", ["fp8", "fp8-rollout"])
def test_what_is_opened_keeps_no_masters_and_is_the_model(
    folder: Path, base_model: Path, precision: str
) -> None:
    """Rows that name no adapter have its bits. The control: those that name one."""
    flow = precision, "auto", "bitwise"
    served = open_serving(base_model, {name: folder / name for name in NEW}, flow)
    assert served.memory()["masters"] == 0 < Model.load(base_model, *flow).memory()["masters"]
    sampling = Sampling(max_new_tokens=6)
    wanted = Engine(Model.load(base_model, *flow)).generate(["1+2=", "3"], sampling)
    assert Engine(served).generate(["1+2=", "3"], sampling) == wanted
    found = Engine(served).generate(["1+2=", "3"], sampling, adapters=["math", "code"])
    assert all(ours[0].logprobs != theirs[0].logprobs for ours, theirs in zip(found, wanted))
