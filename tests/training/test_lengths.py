"""Prompts against their limits of length, and chats against the model's template, before a run
begins."""

import json
import shutil
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from isobit.config import load_config
from isobit.errors import IsobitError
from isobit.model import Model, TextRules, Tokenizer
from isobit.run.completions import COMPLETIONS, read
from isobit.tasks.builtin import TaskSettings, load_task
from isobit.training.parts.assembly import open_parts
from isobit.training.rollouts.lengths import fit_prompts
from isobit.training.train import resume, train
from tests.conftest import RunIsobit
from tests.models import tiny_model
from tests.runs import dry_run_text, fingerprint, write_config

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
REWARD = (
    "def score(prompts, completions, **columns):\n    return [len(str(c)) / 50 for c in "
    "completions]\n"
)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base model over printable characters, context 64, without a chat template."""
    path = tmp_path_factory.mktemp("text") / "model"
    tiny_model("float32", "llama", alphabet=string.printable).save(path)
    return path


@pytest.fixture
def run(tmp_path: Path, text_model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write a config of a run of two steps over rows of the given prompts."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(text_model, tmp_path / "model")
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "template.jinja").write_text(TEMPLATE)

    def write(
        prompts: list[Any], column: str = "prompt", model: dict[str, str] | None = None, **task: Any
    ) -> Path:
        (tmp_path / "rows.jsonl").write_text(
            "".join(json.dumps({column: prompt}) + "\n" for prompt in prompts)
        )
        values = {
            "model": {"path": "model", **(model or {})},
            "task": {"path": "rows.jsonl", "held_out_size": 0, **task},
            "rewards": {"functions": [{"function": "reward.py:score"}]},
            "precision": "float32",
            "sampling": {"group_size": 2, "max_new_tokens": 8},
            "prompts_per_step": 2,
            "run": {"dir": "run", "report": False, "checkpoint_every": 1},
            "steps": 2,
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
        return tmp_path / "run.yaml"

    return write


PROMPTS = ["a" * 10, "b" * 57, "c" * 20, "d" * 56]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {},
            "rows.jsonl:2: the prompt has 57 tokens: the model's context of 64 leaves 56 beside "
            "sampling.max_new",
        ),
        ({"max_prompt_tokens": 15}, "rows.jsonl:2: the prompt has 57 tokens: "),
        (
            {"max_prompt_tokens": 9},
            "rows.jsonl:1: the prompt has 10 tokens: task.max_prompt_tokens is 9; change it or",
        ),
        (
            {"min_prompt_tokens": 11},
            "rows.jsonl:1: the prompt has 10 tokens: task.min_prompt_tokens is 11; change it or",
        ),
        (
            {"max_prompt_tokens": 9, "too_long": "drop"},
            "no training example is within the limits of length; the first: ",
        ),
        (
            {"max_prompt_tokens": 9, "min_prompt_tokens": 10},
            "min_prompt_tokens 10 exceeds max_prompt_tokens",
        ),
    ],
    ids=str,
)
def test_a_prompt_outside_the_limits_stops_the_run_before_it_starts(
    run: Callable[..., Path], refused: Callable[..., str], limits: dict[str, Any], message: str
) -> None:
    config = run(PROMPTS, **limits)
    assert message in refused("train", config, "--quiet")
    assert message in refused("train", config, "--dry-run")


def test_what_is_too_long_is_dropped_and_counted(
    run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(run(PROMPTS, too_long="drop", min_prompt_tokens=11))
    assert "2 training and 0 held-out prompts" in dry_run_text(config)
    said = capsys.readouterr().err
    assert said.startswith(
        "2 of 4 training examples dropped for their length; the first: rows.jsonl:1: the prompt "
        "has 10"
    )
    train(config, quiet=True)  # which leaves out progress, and not what is dropped
    assert capsys.readouterr().err.startswith(said.partition(";")[0])
    shown = {row["prompt"] for row in read(Path("run") / COMPLETIONS)}
    assert shown == {"c" * 20, "d" * 56}


def test_the_limits_are_exact_and_hold_for_the_held_out_split(
    text_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": c * n}) + "\n"
            for c, n in [("a", 5), ("b", 6), ("c", 7), ("d", 8)]
        )
    )
    task = load_task(TaskSettings(path=str(path), held_out_path=str(path)))
    model = Model.load(text_model, "float32")
    limits = TaskSettings(max_prompt_tokens=7, min_prompt_tokens=6, too_long="drop")
    fitted = fit_prompts(task, model, limits, 8, quiet=True)
    assert [e.prompt[0] for e in fitted.task.train.examples] == ["b", "c"]
    assert [e.prompt[0] for e in fitted.task.held_out.examples] == ["b", "c"]
    assert fitted.longest.prompt == "c" * 7
    whole = fit_prompts(task, model, TaskSettings(), 56, quiet=True)
    assert whole.task.train is task.train
    with pytest.raises(IsobitError, match=r"rows\.jsonl:4: the prompt has 8 tokens: .* leaves 7"):
        fit_prompts(task, model, TaskSettings(), 57, quiet=True)


CHAT = [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Ho"}]]


def test_a_chat_needs_a_template(run: Callable[..., Path], refused: Callable[..., str]) -> None:
    line = refused("train", run(CHAT), "--quiet")
    assert (
        "rows.jsonl:1: the prompt is a chat, but the model has no chat template; give text "
        "prompts, or a "
    ) in line
    assert "model.chat_template" in line
    for content, message in [
        (None, "cannot read chat template template.jinja: No such file"),
        (b"\xff", "cannot read chat template template.jinja: not UTF-8"),
        (
            b"\n{% for m in messages %}",
            "template.jinja: the model's chat template cannot be parsed: Unexpected end of",
        ),
        (
            b"{{ messages[1].content }}",
            "rows.jsonl:1: the model's chat template refused a conversation: ",
        ),
        (
            b"{{ raise_exception('no\nsystem') }}",
            "rows.jsonl:1: the model's chat template refused a conversation: no sys",
        ),
        (
            b"{{ ''.__class__.__mro__ }}",
            "rows.jsonl:1: the model's chat template refused a conversation: access to",
        ),
    ]:
        config = run(CHAT, model={"chat_template": "template.jinja"})
        Path("template.jinja").unlink(missing_ok=True)
        if content is not None:
            Path("template.jinja").write_bytes(content)
        assert message in refused("train", config, "--quiet")


def test_a_template_that_fails_on_one_row_names_it(
    run: Callable[..., Path], refused: Callable[..., str]
) -> None:
    config = run(
        [*CHAT, [{"role": "tool", "content": "x"}]], model={"chat_template": "template.jinja"}
    )
    Path("template.jinja").write_text(
        "{% for m in messages %}{{ {'user': 'U'}[m.role] + m.content }}{% endfor %}"
    )
    assert "rows.jsonl:3: the model's chat template refused a conversation: " in refused(
        "train", config, "--quiet"
    )


def test_a_given_template_is_used_and_saved_with_the_checkpoints(run: Callable[..., Path]) -> None:
    """Also for a model that has one; a resumed run takes the saved one, wherever the file is by
    then."""
    Path("model/chat_template.jinja").write_text("another {{ messages }}")
    config = run(
        ["Hi", "Ho"], model={"chat_template": "template.jinja"}, chat=True, system="Be brief."
    )
    train(load_config(config, ["run.dir=whole"]))
    train(load_config(config, ["steps=1"]))
    Path("template.jinja").unlink()
    resume(Path("run"), ["steps=2"])
    assert fingerprint(Path("run")) == fingerprint(Path("whole"))
    shown = {row["prompt"] for row in read(Path("run") / COMPLETIONS)}
    assert shown == {f"[system]Be brief.[user]{text}[assistant]" for text in ("Hi", "Ho")}
    saved = Tokenizer.load("run/checkpoints/step-000002")
    assert saved.chat_template == TEMPLATE
    assert saved.render_chat(CHAT[0]) == "[user]Hi[assistant]"


@pytest.mark.slow
def test_a_template_replaces_the_one_in_the_tokenizers_settings(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer.characters(string.printable)
    tokenizer.settings["chat_template"] = tokenizer.chat_template = "old"
    tokenizer.save(tmp_path)
    assert Tokenizer.load(tmp_path).render_chat(CHAT[0]) == "old"
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.load(tmp_path, TextRules(chat_template=tmp_path / "t.jinja"))
    assert tokenizer.render_chat(CHAT[0]) == "[user]Hi[assistant]"
    tokenizer.save(tmp_path)
    assert "chat_template" not in json.loads((tmp_path / "tokenizer_config.json").read_text())
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.apply_chat_template(CHAT[0], tokenize=False) == "[user]Hi[assistant]"


def test_the_reference_model_needs_no_template_of_its_own(run: Callable[..., Path]) -> None:
    config = run(CHAT, model={"chat_template": "template.jinja"})
    changes = [
        "algorithm.kl_coefficient=0.1",
        "precision={preset: bf16, kv_cache: e4m3-calibrated}",
    ]
    parts = open_parts(load_config(config, changes), quiet=True)
    parts.processes.close()
    assert parts.reference is not None


def test_data_without_shuffling_are_seen_in_their_order(run: Callable[..., Path]) -> None:
    train(load_config(run(["a", "b", "c", "d"], shuffle=False)))
    shown = [row["prompt"] for row in read(Path("run") / COMPLETIONS)]
    assert shown == [text for text in "abcd" for _ in range(2)]


@pytest.mark.slow
def test_a_model_that_cannot_end_a_completion_is_said(
    tmp_path: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the start and in a dry run; not with an end-of-sequence token, a stop string, or where it
    is wanted."""
    endless = tmp_path / "endless"
    shutil.copytree(base_model, endless)
    for name, key in (
        ("generation_config", "eos_token_id"),
        ("config", "eos_token_id"),
        ("tokenizer_config", "eos_token"),
    ):
        values = json.loads((endless / f"{name}.json").read_text())
        values.pop(key, None)
        (endless / f"{name}.json").write_text(json.dumps(values))

    def said(model: Path, *overrides: str) -> str:
        config = load_config(
            write_config(tmp_path, model), ["steps=1", f"run.dir={tmp_path / 'run'}", *overrides]
        )
        printed = dry_run_text(config)
        train(config, quiet=False)
        shutil.rmtree(tmp_path / "run")
        found = [
            line
            for line in capsys.readouterr().err.splitlines()
            if "no end-of-sequence token" in line
        ]
        assert found == [
            line for line in printed.splitlines() if "no end-of-sequence token" in line
        ]
        return "".join(found)

    assert "so every completion runs to 3 tokens; name one, or give sampling.stop" in said(endless)
    assert said(endless, "sampling.stop=['=']") == ""
    assert said(endless, "sampling.ignore_eos=true") == ""
    assert said(base_model) == ""


@pytest.mark.parametrize(
    ("template", "told"),
    [("hello", True), ("{% for m in messages %}{{ m.content }}{% endfor %}", False)],
)
def test_a_template_that_leaves_the_messages_out_is_said(
    run: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    template: str,
    told: bool,
) -> None:
    config = run(["one", "two", "three"], chat=True)
    Path("own.jinja").write_text(template)
    parts = open_parts(load_config(config, ["model.chat_template=own.jinja"]), quiet=False)
    parts.processes.close()
    said = "training prompts are the same tokens: the chat template writes nothing of what they say"
    assert (said in capsys.readouterr().err) == told


@pytest.mark.parametrize("rule", ["escape", "allow", "refuse"])
def test_special_tokens_in_prompts_are_said_once(
    run: Callable[..., Path], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(run(["one</s> <s>", "two", "three</s>"], special_tokens_in_content=rule))
    if rule == "refuse":
        with pytest.raises(IsobitError, match=r"rows.jsonl:1: .*the special token '</s>' in it"):
            open_parts(config, quiet=False)
        return
    parts = open_parts(config, quiet=False)
    parts.processes.close()
    said = capsys.readouterr().err.splitlines()
    done = "encoded as text" if rule == "escape" else "taken for the tokens"
    assert said == [
        f"the prompts' own text spells 3 special tokens, such as </s>: {done} "
        f"(task.special_tokens_in_content: {rule})"
    ]
    ids = parts.model.tokenizer.encode_text("two</s>")
    assert len(ids) == (7 if rule == "escape" else 4)


def test_an_evaluation_leaves_out_what_its_template_makes_too_long(
    run: Callable[..., Path], run_isobit: RunIsobit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the template and the variables of the command, and no weights are loaded for that. The
    control is the run's own template, under which one prompt more has room."""
    prompts = [[{"role": "user", "content": c * n}] for c, n in (("a", 5), ("b", 20), ("c", 40))]
    model = {"chat_template": "template.jinja"}
    limits = {"too_long": "drop", "held_out_path": "rows.jsonl", "held_out_size": 3}
    config = run(prompts, model=model, **limits)
    finished = train(load_config(config), quiet=True).run_dir
    longer = "{% for m in messages %}{{ '~' * (n or 16) }}{{ m.content }}{% endfor %}"
    Path("longer.jinja").write_text(longer)
    loads, load = list[object](), Model.load

    def loading(*args: Any, **kwargs: Any) -> Model:
        loads.append(args)
        return load(*args, **kwargs)

    monkeypatch.setattr(Model, "load", loading)
    for words, count in (
        ((), 2),
        (("model.chat_template=longer.jinja",), 3),
        (("model.chat_template=longer.jinja", "model.chat_template_kwargs={n: 37}"), 1),
    ):
        code, _, err = run_isobit("eval", finished, "--out", "result.json", *words)
        assert not code, err
        assert len(json.loads(Path("result.json").read_text())["prompts"]) == count
    assert len(loads) == 3
