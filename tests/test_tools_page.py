"""The tables of docs/how-to/tools.md are what the code does."""

import re
from collections import Counter
from pathlib import Path

import pytest

from isobit.model.text.appending import Appending
from isobit.model.text.tool_formats.table import FORMATS
from tests.model.test_appending import of_file, templates_of_trl

PAGE = (Path(__file__).resolve().parents[1] / "docs/how-to/tools.md").read_text()


def test_every_format_is_in_the_table_and_reads_its_call() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| (.*?) ?\|$", PAGE, re.M)
    assert [name for name, _, _ in rows] == list(FORMATS)
    for name, call, _ in rows:
        reply = FORMATS[name].read_text(call)
        assert reply is not None
        assert not reply.problems
        assert [(each.name, each.arguments) for each in reply.calls] == [("add", '{"a": 1}')]


@pytest.mark.slow
def test_the_counts_of_templates_are_those_that_are_found() -> None:
    def kind(refusal: str | None) -> str:
        if refusal is None:
            return "kept"
        if "leaves out the thoughts" in refusal:
            return "thoughts"
        return "message" if "leaves out what" in refusal or "refuses" in refusal else "end"

    files = templates_of_trl()
    assert f"Of the {len(files)} templates" in PAGE
    for role, name in (("tool", "a tool's message"), ("user", "a user's message")):
        found = Counter(kind(Appending(of_file(file)).refusal(role)) for file in files)
        numbers = " | ".join(str(found[key]) for key in ("kept", "thoughts", "message", "end"))
        assert f"| {name} | {numbers} |" in PAGE
