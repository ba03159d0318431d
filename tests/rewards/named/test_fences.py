"""Where code begins and ends in a completion, as models write it."""

import pytest

from isobit.tasks.rewards.named.fences import program

CODE = "def double(x):\n    return 2 * x\n"
BLOCK = f"```python\n{CODE}```"
DOCUMENTED = (
    'def double(x):\n    """Twice.\n\n    ```{language}\n    double(1)\n    ```\n    '
    '"""\n    return 2 * x\n'
)


def moved(text: str, by: str = "   ") -> str:
    return "".join(f"{by}{line}\n" for line in text.splitlines())


FOUND = {
    "text alone": (CODE, CODE),
    "in words": (f"Sure:\n\n{BLOCK}\n\nDone.", CODE),
    "in a list": (f"1. The function:\n\n{moved(BLOCK)}\n2. Done.", CODE),
    "in a list of a list": (f"- a\n  - b\n\n{moved(BLOCK, '    ')}", CODE),
    "by tabs": (f"* It:\n\n{moved(BLOCK, chr(9))}", CODE),
    "on the line of the list": (f"1. ```python\n{moved(CODE)}   ```\n", CODE),
    "in a list, but not its lines": (f"1. It:\n\n   ```python\n{CODE}   ```\n", CODE),
    "in a quotation": (moved(BLOCK, "> "), CODE),
    "after words": (f"Sure! {BLOCK}", CODE),
    "after a tag": (f"<think>easy</think><answer>{BLOCK}</answer>", CODE),
    "in a tag without a fence": (f"<think>easy</think>\n<answer>{CODE}</answer>", CODE),
    "closed behind the code": (f"```python\n{CODE.rstrip()}```", CODE.rstrip()),
    "closed behind the code, with a tag": (
        f"```python\n{CODE.rstrip()}```</answer>",
        CODE.rstrip(),
    ),
    "closed behind the code, twice": (
        f"```python\na = 1```\nor\n```python\n{CODE.rstrip()}```\nDone.",
        CODE.rstrip(),
    ),
    "not closed": (f"```python\n{CODE}", CODE),
    "cut off": ("so\n```python\ncut off", "cut off"),
    "tildes": (f"~~~python\n{CODE}~~~\n", CODE),
    "tildes without a language": (f"It:\n~~~\n{CODE}~~~\nDone.", CODE),
    "tildes around a fence": (f"~~~markdown\n{BLOCK}\n~~~\n", CODE),
    "four": (f"````python\n{CODE}````\n", CODE),
    "four around three": (f"````markdown\n# It\n{BLOCK}\n````\n", CODE),
    "a language in braces": (f"``` {{.python .numbered}}\n{CODE}```", CODE),
    "a language with a title": (f'```Python title="a.py"\n{CODE}```', CODE),
    "CRLF": (f"{BLOCK}\nDone.".replace("\n", "\r\n"), CODE.replace("\n", "\r\n")),
    "a stray fence in thoughts": (f"<think>\n```\nlet me see\n</think>\n{BLOCK}\n", CODE),
    "a stray fence without thoughts": (f"I type\n```\nand then:\n\n{BLOCK}\n", CODE),
    "a stray fence behind words": (f"I type ```\nand then:\n\n{BLOCK}\n", CODE),
    "a draft in thoughts": (f"<think>\n```python\nx = 1\n```\n</think>\n{CODE}", "\n" + CODE),
    "the program in thoughts": (f"<think>\n{BLOCK}\n</think>\nDone", CODE),
    "a fence in a docstring": (
        f"```python\n{DOCUMENTED.format(language='')}```\n",
        DOCUMENTED.format(language=""),
    ),
    "Python in a docstring": (
        f"```python\n{DOCUMENTED.format(language='python')}```\nDone.",
        DOCUMENTED.format(language="python"),
    ),
    "a fence in a string": (f"```python\nfence = '```'\n{CODE}```", f"fence = '```'\n{CODE}"),
    "a shell before it": (f"```bash\nls\n```\n```\n{CODE}```\n", CODE),
    "a shell alone": ("```bash\nls\n```", "```bash\nls\n```"),
    "a cell within a line": (f"Use ```foo``` so:\n```\n{CODE}```\n", CODE),
    "the last of Python": ("so\n```python\na\n```\nor\n```py\nb\n```\nprints\n```\nc\n```", "b\n"),
    "the last without a language": ("so\n```\na\n```\nor\n```\nb\n```", "b\n"),
    "the last, though it is no Python": (f"{BLOCK}\n```python\n2 +* x\n```", "2 +* x\n"),
    "one that was only begun": (f"{BLOCK}\nor\n```python", CODE),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_run(name: str) -> None:
    text, wanted = FOUND[name]
    assert program(text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "`" * 100_000 + "x`",
        "```\n" * 10_000,
        "x ```\n" * 10_000,
        "```python\n" + "a = 1\n```x\n" * 10_000 + "(",
        "```python\n" + "(" * 50_000,
        "```python\nx = " + "-" * 50_000 + "1\n```",
        "```python\nx = a" + ".b" * 50_000 + "\n```",
        "```python\n" + "".join(" " * i + "if 1:\n" for i in range(300)) + "```",
        "```python\n\0\n```",
        "```python\n\ud800\n```",
    ],
    ids=lambda text: text[:16],
)
def test_what_a_parser_would_choke_on_is_read_all_the_same(text: str) -> None:
    """Completions are foreign: whatever stands in one, there is an answer."""
    assert isinstance(program(text), str)


def test_python_reads_so_many_characters_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobit.tasks.rewards.named.fences._Parser.__init__.__defaults__", (10,))
    assert (
        program(f"```python\n{CODE.rstrip()}```\n") == CODE.rstrip()
    )  # as if it were no Python: to the first fence
