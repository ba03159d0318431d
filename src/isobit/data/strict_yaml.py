"""YAML in which a key comes once: PyYAML itself takes the last of two silently, and the other is lost.

Plain values only, as of `yaml.safe_load`. A key that a merge (`<<`) brings along may be given again, which is what
merges are for.
"""

from typing import Any

import yaml


class DuplicateKey(yaml.YAMLError):
    """A key, with its path, that comes twice in one mapping; lines are counted from 1."""

    def __init__(self, key: str, first_line: int, line: int) -> None:
        super().__init__(f"key {key!r} comes twice")
        self.key, self.first_line, self.line = key, first_line, line


def load(text: str) -> Any:
    """The values of a YAML document. Raises yaml.YAMLError; `DuplicateKey` for a key that comes twice."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check(node, set(), "")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check(node: yaml.Node, seen: set[int], prefix: str) -> None:
    """Before anything is constructed, since construction writes merges out. `seen`: aliases may lead back; `prefix`:
    the path to the node."""
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check(item, seen, prefix)
        return
    places: dict[tuple[str, str], int] = {}
    for key, value in node.value:
        inner = prefix
        if isinstance(key, yaml.ScalarNode):
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in places:
                raise DuplicateKey(f"{prefix}{key.value}", places[name], line)
            places[name] = line
            inner = f"{prefix}{key.value}."
        _check(value, seen, inner)
