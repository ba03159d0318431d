"""Long options that are short forms of keys: what each becomes, that those of the release before
still work, and that a help says each once."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from isobit.cli import app
from isobit.cli.keys import option_at
from isobit.config import Config, parse_config
from isobit.config.commands import GenerateConfig, ServerConfig, command_config
from isobit.config.reading import override, read_source
from isobit.errors import IsobitError
from isobit.model.text.tool_formats.table import FORMATS
from isobit.options import reading
from tests.conftest import RunIsobit

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
KEYED = ("eval", "generate", "serve")
OF_THE_RELEASE_BEFORE = {
    "eval": "against adapter best task data option reward environment column split prompt-template "
    "chat system chat-template chat-template-kwargs completions samples tag answer-pattern n "
    "pass-at max-new-tokens temperature top-k top-p min-p repetition-penalty stop seed out "
    "precision consistency backend",
    "generate": "prompt n max-new-tokens temperature top-k top-p min-p repetition-penalty stop seed "
    "chat chat-template chat-template-kwargs tools max-turns parser adapter json precision "
    "consistency backend",
    "serve": "adapter port host token name chat-template tool-format train state state-every "
    "drop-runs kv-pages max-sequences grace precision consistency backend",
}


@pytest.fixture(autouse=True)
def _warn_again() -> None:
    reading.say_renamed.cache_clear()


def given(command: str, *words: str) -> list[str]:
    """The overrides that a command gets."""
    context = COMMANDS[command].make_context(command, list(words))
    overrides: list[str] = context.params["overrides"]
    return overrides


@pytest.mark.parametrize("command", KEYED)
def test_every_option_of_the_release_before_is_there(command: str) -> None:
    own = COMMANDS[command]
    context = own.context_class(own)
    flags = {flag.lstrip("-") for option in own.get_params(context) for flag in option.opts}
    assert {*OF_THE_RELEASE_BEFORE[command].split()} <= flags
    shown = [short for short in own.shorts if not short.former and short.flag != "--data"]
    assert len(shown) == 12
    for short in own.shorts:
        assert option_at(own.schema(), short.key), short


@pytest.mark.parametrize(
    ("command", "words", "overrides"),
    [
        ("eval", ("-n", "4"), ['evaluation.num_samples="4"']),
        ("eval", ("--pass-at", "1,4"), ['evaluation.pass_at=["1", "4"]']),
        ("eval", ("--task", "gsm8k"), ["task={}", 'task.name="gsm8k"']),
        ("eval", ("--column", "a b=c: d"), ['task.columns={"a b": "c: d"}']),
        ("eval", ("--option", "digits=2"), ["task.options.digits=2"]),
        ("eval", ("--reward", "a", "--reward", "b"), ['rewards.functions=["a", "b"]']),
        ("eval", ("--split", "s"), ['task.split="s"', 'task.held_out_split="s"']),
        ("eval", ("--chat", "seed=3"), ["task.chat=true", "seed=3"]),
        ("generate", ("--temperature", "0", "seed=1"), ['sampling.temperature="0"', "seed=1"]),
        ("generate", ("--stop", "\x7f", "--stop", "\ud800"),
            ['sampling.stop=["\\u007f", "\\ud800"]']),
        ("serve", ("--port", "0"), ['serve.port="0"']),
    ],
)  # fmt: skip
def test_what_a_short_form_becomes(
    command: str, words: tuple[str, ...], overrides: list[str]
) -> None:
    assert given(command, "model", *words) == overrides


@pytest.mark.parametrize("text", ["You: are [it]", "no", "1", "#", "\x7f\n", "\ud800", "", "😀"])
def test_a_text_is_taken_as_it_was_typed(text: str) -> None:
    """The control: as YAML it is another value."""
    values, _ = read_source({}, [override("a", text), override("b", [text])])
    assert values == {"a": text, "b": [text]}
    if text in ("no", "1", "#", ""):
        assert read_source({}, [f"a={text}"])[0] != {"a": text}


@pytest.mark.parametrize("command", KEYED)
def test_the_help_says_each_once(command: str, run_isobit: RunIsobit) -> None:
    _, text, _ = run_isobit(command, "--help")
    flags = re.findall(r"^  (-[-\w]+)", text, re.M)
    assert len(flags) == len(set(flags))
    for short in COMMANDS[command].shorts:
        assert (short.flag in flags) != short.former
        assert short.former or re.search(rf"\b{re.escape(short.key)}(:|$)", text, re.M), short


def test_a_former_option_warns_and_a_present_one_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert given("eval", "model", "--top-k", "5", "-n", "2")
    assert capsys.readouterr().err == (
        'warning: --top-k is called evaluation.top_k="5" now; the old name ends with this release\n'
    )
    assert given("eval", "model", "evaluation.top_k=5", "-n", "2")
    assert capsys.readouterr().err == ""


def test_a_key_and_its_short_form_are_one_config() -> None:
    words = ("-n", "2", "--max-new-tokens", "6", "--temperature", "0", "--stop", "a")
    keys = ["sampling.group_size=2", "sampling.max_new_tokens=6", "sampling.temperature=0"]
    short = command_config(GenerateConfig, "m", given("generate", "m", *words), "test")
    assert short == command_config(GenerateConfig, "m", [*keys, "sampling.stop=[a]"], "test")
    assert short != command_config(GenerateConfig, "m", keys, "test"), "the control"
    short_server = command_config(ServerConfig, "m", given("serve", "m", "--port", "7"), "test")
    assert short_server == command_config(ServerConfig, "m", ["serve.port=7"], "test")
    values, _ = read_source({"model": "m"}, given("eval", "m", "--pass-at", "1,2", "-n", "2"))
    assert parse_config(Config, values, "test").evaluation.pass_at == (1, 2)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("steps=3",), "override 'steps=3': an evaluation does not depend on steps"),
        (("evaluation.every=3",), "does not depend on evaluation.every"),
        (("serve.port=3",), "does not depend on serve.port"),
        (("model.path=x",), "does not depend on model.path"),
        (("sampling.temprature=1",), "did you mean 'sampling.temperature'"),
    ],
)
def test_a_key_that_no_evaluation_reads_is_refused(
    words: tuple[str, ...], line: str, base_model: Path, run_isobit: RunIsobit
) -> None:
    code, _, error = run_isobit("eval", base_model, *words)
    assert code == 2
    assert line in error
    assert len(error.splitlines()) == 1


def test_an_environment_that_generates_nothing_is_refused() -> None:
    for word in ("environment.parser=json", "environment.factory=x.py:X"):
        with pytest.raises(IsobitError, match=r"m: environment|m: environment\.factory"):
            command_config(GenerateConfig, "m", [word], "m")
    tools = ["environment.tools=[x.py:f]", "environment.parser=json"]
    assert command_config(GenerateConfig, "m", tools, "m").environment.used, "the control"


def test_the_help_names_every_tool_format() -> None:
    """The list is typed by hand, since a config imports no tokenizer; the control has one less."""
    text = option_at(ServerConfig, "environment.parser").text
    named = re.split(", | or ", text.partition(": ")[2])
    assert named == ["auto", *FORMATS]
    assert named != ["auto", *list(FORMATS)[:-1]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--column a", r"^--column 'a': expected NAME=VALUE$"),
        ("--column a=", r"^--column 'a=': expected NAME=VALUE$"),
        ("--column a=b --column a=c", r"^--column 'a=c': a is 'b' already; give it once$"),
        ("--option a=1 --option a=2", r"^--option 'a=2': a is '1' already; give it once$"),
    ],
)
def test_names_and_values_are_read_in_one_way(words: str, said: str) -> None:
    """The control: names that differ."""
    with pytest.raises(IsobitError, match=said):
        given("eval", *words.split())
    assert given("eval", "--column", "a=b", "--column", "c=b=d") == [
        'task.columns={"a": "b", "c": "b=d"}'
    ]
