"""Schemas of tools are those of transformers, key by key in the same order; what cannot be a tool
is one line."""

import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest

from isobit.errors import IsobitError
from isobit.tasks.environments.schemas import tool_schema


class Colour(Enum):
    RED = "red"
    GREEN = "green"


def add(a: int, b: float = 2.0) -> float:
    """
    Add two numbers.

    Args:
        a: The first one,
            described in two lines.
        b (float, optional): The second: it has a default.

    Returns:
        Their sum.
    """
    return a + b


async def nothing() -> str:
    """Take no arguments."""
    return ""


def many(
    colour: Colour,
    kind: Literal["a", "b", 3],
    maybe: int | None,
    either: int | str,
    both: list[int] | dict[str, float] | None,
    pair: tuple[int, str],
    flags: dict[str, bool],
    anything: Any,
    plain: list,
    free: dict,
    drink: str = "tea",
) -> Path:
    """Take many things. Of all kinds.

    Args:
        colour: A colour.
        kind: A kind.
        maybe: Or not.

        either: One of the two.
        both: A list, a mapping or nothing.
        pair: Two.
        flags: By name.
        anything: What you like.
        plain: A list.
        free: A mapping.
        drink: What to drink (choices: ["tea", " coffee"])

    Raises:
        ValueError: Never.
    """
    raise ValueError


class Box:
    def put(self, thing: str) -> None:
        """Put a thing into the box.

        Args:
            thing: The thing.
        """


@pytest.mark.parametrize("function", [add, nothing, many, Box().put, Box.put])
def test_schemas_are_those_of_transformers(function: Callable[..., Any]) -> None:
    from transformers.utils import get_json_schema

    expected = json.dumps(get_json_schema(function))
    assert json.dumps(tool_schema(function, "it")) == expected


def untyped(a) -> int:  # type: ignore[no-untyped-def]
    """Add one.

    Args:
        a: It.
    """
    return a + 1


def undescribed(a: int) -> int:
    """Add one."""
    return a + 1


def undocumented(a: int) -> int:
    return a + 1


def of_a_path(a: Path) -> int:
    """Take a path.

    Args:
        a: It.
    """
    return 1


def badly_chosen(a: str) -> int:
    """Take one.

    Args:
        a: It (choices: [tea])
    """
    return 1


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (untyped, "it: its argument 'a' has no type; a tool has a docstring in Google's form"),
        (undescribed, "it: its docstring does not describe 'a'; a tool has"),
        (undocumented, "it has no docstring; a tool has"),
        (of_a_path, "it: JSON has no type Path; a tool has"),
        (badly_chosen, "it, argument 'a': its choices are no JSON list"),
    ],
)
def test_what_cannot_be_a_tool_is_one_line(function: Callable[..., Any], says: str) -> None:
    with pytest.raises(IsobitError) as caught:
        tool_schema(function, "it")
    assert str(caught.value).startswith(says)
