"""Documents as their readers use them: their code blocks, the commands in these, and a folder to
run them in.

The convention of every page: a block with a title is a file, written where it stands; every line of
a `sh` block is a command, run where it stands, in a folder with a model, prompts, `rewards.py` and
`run.yaml`. `make`, `pip`, `uv pip`, `mkdocs` and the `source` that activates the environment are checked and
not run. `isobit serve` runs to the page's end. `text` is output. A port that a command listens at is
replaced by a free one, wherever the page has it.
"""

import json
import os
import re
import shlex
import string
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from isobit.model import Model, ModelConfig, Tokenizer
from tests import warm
from tests.ports import with_free_ports

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *PAGES]
CHECKED = {"make", "pip", "uv", "mkdocs", "source"}
"""First words of commands that make or change an environment: checked, not run."""

_FENCE = re.compile(r"^( *)```([\w-]*)([^\n]*)\n(.*?)^\1```$", re.M | re.S)
_SHELL = 'isobit() { "$PYTHON" -m isobit "$@"; }\npython() { "$PYTHON" "$@"; }\n'
_LONGEST_S = 600


@dataclass(frozen=True)
class Block:
    """A fenced block of code: its language, its title (a file's path) or "", its text."""

    language: str
    title: str
    text: str

    def commands(self) -> list[str]:
        """Lines of a `sh` block without comments; a backslash at the end goes on with the next
        line."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return (
            [line for line in lines if shlex.split(line, comments=True)]
            if self.language == "sh"
            else []
        )


def parsed(text: str) -> list[Block]:
    """Every fenced block of a Markdown text, those inside lists and tabs too."""
    return [
        Block(language, (re.findall(r'title="([^"]+)"', rest) or [""])[0], textwrap.dedent(code))
        for _, language, rest, code in _FENCE.findall(text)
    ]


def blocks(path: Path, language: str) -> list[str]:
    return [
        block.text
        for block in parsed(path.read_text(encoding="utf-8"))
        if block.language == language
    ]


def commands(path: Path) -> Iterator[str]:
    """Every command of a document, in order."""
    for block in parsed(path.read_text(encoding="utf-8")):
        yield from block.commands()


def first_word(command: str) -> str:
    """The program of a command: its first word that is not NAME=value."""
    return next(word for word in shlex.split(command, comments=True) if not re.match(r"\w+=", word))


def run(command: str, folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """One command in a shell in which `isobit` and `python` are those under test; in a fork of a
    warm interpreter where it needs no shell (`warm.py`)."""
    forked = warm.plain(command)
    return (
        warm.start(forked[0], folder, **forked[1], **environment).wait()
        if forked
        else shell(command, folder, **environment)
    )


def shell(command: str, folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """One command in a shell of its own, from nothing."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    threads = "1" if "PYTEST_XDIST_WORKER" in os.environ else "2"
    variables = {
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": threads,
        "PYTHON": sys.executable,
        **environment,
    }
    inherited = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    }  # this process's own
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", _SHELL + command],
        cwd=folder,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=_LONGEST_S,
    )


def succeed(command: str, folder: Path, **environment: str) -> str:
    """Run a command that must end with status 0; what it printed."""
    return _printed(run(command, folder, **environment))


def succeed_in_shell(command: str, folder: Path) -> str:
    """The same from nothing, as a reader runs it."""
    return _printed(shell(command, folder))


def _printed(done: "subprocess.CompletedProcess[str]") -> str:
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def check(command: str) -> None:
    """That a command which is not run could be: a target of the Makefile, an extra of
    pyproject.toml, mkdocs.yml."""
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        succeed(shlex.join(["make", "--dry-run", *words[1:]]), ROOT)
        return
    if words[0] == "source":
        assert f"{shlex.join(words)} " in succeed("make --dry-run install", ROOT), (
            f"{command}: no such environment"
        )
        return
    words = words[1:] if words[:2] == ["uv", "pip"] else words
    assert words[:2] in (["pip", "install"], ["mkdocs", "build"], ["mkdocs", "serve"]), command
    assert words[0] == "pip" or (ROOT / "mkdocs.yml").is_file()
    declared = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
    for extras in re.findall(r"(?:isobit|\.)\[([\w,]+)\]", command):
        assert set(extras.split(",")) <= set(declared), f"{command}: the extras are {declared}"


def follow(text: str, folder: Path) -> None:
    """Do what a page says, in order: write its files, run its commands, parse the rest."""
    with ExitStack() as servers:
        _follow(with_free_ports(text), folder, servers)


@contextmanager
def _serving(command: str, folder: Path) -> Iterator[None]:
    """`isobit serve`, from when it listens."""
    words = [sys.executable, "-m", "isobit", *shlex.split(command, comments=True)[1:]]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": paths, "XDG_STATE_HOME": str(folder / "state")}
    process = subprocess.Popen(
        words, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("serving "), f"{command}: {line}"
        yield
    finally:
        process.kill()
        process.communicate()


def _follow(text: str, folder: Path, servers: ExitStack) -> None:
    for block in parsed(text):
        if block.title:
            file = (folder / block.title).resolve()
            assert file.is_relative_to(folder.resolve()), block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            compile(block.text, "block", "exec")
        for command in block.commands():
            word = first_word(command)
            assert word not in ("cd", "export", "."), (
                f"{command}: the next command has a shell of its own"
            )
            if word in CHECKED:
                check(command)
            elif shlex.split(command)[:2] == ["isobit", "serve"]:
                servers.enter_context(_serving(command, folder))
            else:
                succeed(command, folder)


def _larger(config: ModelConfig) -> tuple[ModelConfig, Tokenizer]:
    """A model whose matrices and vocabulary have several blocks of 128, so that ranks divide it."""
    tokenizer = Tokenizer.characters(string.printable[:95] + "".join(map(chr, range(0xC0, 0x180))))
    sizes = {"vocab_size": tokenizer.vocab_size, "eos_ids": tokenizer.eos_ids}
    sizes |= {"hidden_size": 256, "intermediate_size": 256, "num_heads": 4, "num_kv_heads": 4}
    return replace(config, **sizes), tokenizer


def reader_folder(folder: Path, ends: str = "!?.,;:'()-") -> Path:
    """What the README's reader has: a random model over printable ASCII, prompts, its rewards.py
    and run.yaml. The model `ends` at punctuation too, or every completion would be as long as it
    may."""
    tokenizer = Tokenizer.characters(
        string.ascii_letters + string.digits + string.punctuation + " "
    )
    tokenizer.eos_ids += tuple(tokenizer.encode(ends))
    config = ModelConfig(
        family="llama",
        vocab_size=tokenizer.vocab_size,
        hidden_size=128,  # whole blocks, so that it can be exported in FP8
        intermediate_size=128,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=64,
        max_positions=160,
        eos_ids=tokenizer.eos_ids,
    )
    Model.init(config, tokenizer, "float32").save(folder / "path" / "to" / "hf_checkpoint")
    Model.init(*_larger(config), "float32").save(folder / "large")
    prompts = [
        {"prompt": f"Tell me about {thing}."}
        for thing in ("rain", "the sea", "bread", "a fox", "two cats")
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts * 4))
    (folder / "rewards.py").write_text(blocks(README, "python")[0])
    (folder / "run.yaml").write_text(blocks(README, "yaml")[0])
    return folder
