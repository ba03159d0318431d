"""YAML in which a key comes once: PyYAML itself takes the last of two silently, and the other is
lost.

Plain values only, as of `yaml.safe_load`. A key that a merge (`<<`) brings along may be given
again, which is what merges are for. Documents are bounded: aliases and merges may not write out
more than `MOST_VALUES` values, and values may not lie deeper than `MOST_DEPTH` levels.
"""

import re
from typing import Any

import yaml

from isobit.data.foreign import MOST_DEPTH, MOST_DIGITS

MOST_VALUES = 20_000
_TEXT = 100  # characters
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_SURPRISING = re.compile(r"[-+]?0[0-7_]*[0-7][0-7_]*|[-+]?\d[\d_]*(:[0-5]?\d)+(\.[\d_]*)?")
"""Numbers that do not mean what they look like: `010` is 8, and `1:30` is 90."""
_TOO_MANY = f"more than {MOST_VALUES:,} values once its aliases are written out"
_TOO_DEEP = f"nested too deeply, in more than {MOST_DEPTH} levels"


class DuplicateKey(yaml.YAMLError):
    """A key, with its path, that comes twice in one mapping; lines are counted from 1."""

    def __init__(self, key: str, first_line: int, line: int) -> None:
        super().__init__(f"key {key!r} comes twice")
        self.key, self.first_line, self.line = key, first_line, line


class _Loader(yaml.SafeLoader):
    """Stops in the middle of a document that is too deep or too long: PyYAML takes seconds for a
    megabyte."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth, self._count = 0, 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose the next node and its children. Raises yaml.MarkedYAMLError beyond the limits."""
        self._depth, self._count = self._depth + 1, self._count + 1
        wrong = (
            _TOO_DEEP
            if self._depth > MOST_DEPTH + 1
            else _TOO_MANY
            if self._count > MOST_VALUES
            else None
        )
        if wrong is not None:
            raise yaml.MarkedYAMLError(problem=wrong, problem_mark=self.get_mark())
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


def load(text: str) -> Any:
    """Return the values of a YAML document. Raises yaml.YAMLError; `DuplicateKey` for a key that
    comes twice."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _measure(node, {}, 1)
        _check(node, set(), "")
        return loader.construct_document(node)
    except RecursionError:
        raise yaml.MarkedYAMLError(problem=_TOO_DEEP) from None
    except (ValueError, OverflowError, TypeError, LookupError, AttributeError) as error:
        # PyYAML's own constructors, of a date such as 2026-99-99 or of text that is tagged as a
        # number
        raise yaml.MarkedYAMLError(problem=f"a value cannot be read: {str(error)[:80]}") from None
    finally:
        loader.dispose()


def _measure(
    node: yaml.Node, sizes_by_node: dict[int, tuple[int, int] | None], depth: int
) -> tuple[int, int]:
    """Return (values, levels) of a node with aliases written out; a long text counts as several.
    `sizes_by_node`: of nodes that were measured; None of those that are being measured, to which an
    alias inside leads back."""
    if not isinstance(node, yaml.CollectionNode):
        if len(node.value) > MOST_DIGITS and node.tag == "tag:yaml.org,2002:int":
            raise _bad(node, f"a whole number of more than {MOST_DIGITS} digits")
        if node.tag in _NUMBERS and _SURPRISING.fullmatch(node.value):
            problem = f"{node.value} is a number of base {60 if ':' in node.value else 8} in YAML"
            raise _bad(node, f"{problem}; write it in decimals, or in quotes")
        return 1 + len(node.value) // _TEXT, 0
    if id(node) in sizes_by_node:
        known = sizes_by_node[id(node)]
        if known is None:
            raise _bad(node, "an alias to what it is inside of")
        return known
    if depth > MOST_DEPTH:
        raise _bad(node, _TOO_DEEP)
    sizes_by_node[id(node)] = None
    pairs = isinstance(node, yaml.MappingNode)
    inner = [child for pair in node.value for child in pair] if pairs else node.value
    sizes = [_measure(child, sizes_by_node, depth + 1) for child in inner]
    total = 1 + sum(size for size, _ in sizes)
    levels = 1 + max((height for _, height in sizes), default=0)
    if levels > MOST_DEPTH:
        raise _bad(node, _TOO_DEEP)
    if total > MOST_VALUES:
        raise _bad(node, _TOO_MANY)
    sizes_by_node[id(node)] = total, levels
    return total, levels


def _bad(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _check(node: yaml.Node, seen: set[int], prefix: str) -> None:
    """Refuse bad keys before anything is constructed, since construction writes merges out. `seen`:
    aliases come again; `prefix`: the path to the node."""
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check(item, seen, prefix)
        return
    line_of: dict[str, int] = {}  # `1` and `"1"` are one key to who reads names
    for key, value in node.value:
        inner = prefix
        if isinstance(key, yaml.ScalarNode):
            name, line = key.value, key.start_mark.line + 1
            if name in line_of:
                raise DuplicateKey(f"{prefix}{name}", line_of[name], line)
            line_of[name] = line
            inner = f"{prefix}{name}."
        _check(value, seen, inner)
