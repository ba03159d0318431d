"""Shell completion: config files, `key.sub=value` overrides, presets.

The keys come from the source text of `isobit.config`, read as a syntax tree: importing it, or torch for the presets,
would be too slow for a tab key. Install with `isobit --install-completion`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

PRESETS = (
    "float32", "bf16", "fp8-rollout", "fp8-rollout-kv", "fp8-e2e", "fp8-unified", "fp8", "mxfp8", "nvfp4",
    "mxfp8-rollout", "nvfp4-rollout",
)  # fmt: skip
"""Names of precision flows, here too so that torch is not imported for them (tests/test_completion.py)."""

_CONFIG = Path(__file__).resolve().parents[1] / "config"
_ROOTS = {"train": "Config", "track": "Config", "compare": "Config", "sft": "SftConfig"}
_NO_VALUES = {"bool": ("true", "false"), "Precision": PRESETS}

Key = tuple[str, tuple[str, ...]]
"""A dotted key, and the values that can be named: its choices, or its default alone."""


def config_files(incomplete: str) -> list[str]:
    """YAML files, and directories to go on in; the content of a directory where it is the only match."""
    folder, _, start = incomplete.rpartition("/")
    where = Path(f"{folder}/" if "/" in incomplete else ".")
    if not where.is_dir():
        return []
    found = [p for p in sorted(where.iterdir()) if p.name.startswith(start) and not p.name.startswith(".")]
    prefix = f"{folder}/" if "/" in incomplete else ""
    names = [f"{prefix}{p.name}" for p in found if p.suffix in (".yaml", ".yml") and p.is_file()]
    folders = [f"{prefix}{p.name}/" for p in found if p.is_dir()]
    if not names and len(folders) == 1 and folders[0] != incomplete:
        return config_files(folders[0]) or folders
    return names + folders


def overrides(ctx: typer.Context, incomplete: str) -> list[str]:
    """Keys, then values. Bash passes what follows the `=` as a separate word, other shells pass the whole."""
    keys = dict(schema_keys(_ROOTS[str(ctx.info_name)]))
    key, sign, start = incomplete.partition("=")
    if sign:
        return [f"{key}={value}" for value in keys.get(key, ()) if value.startswith(start)]
    before = [word for word in ctx.params.get("overrides") or () if word != "="]
    if before and before[-1] in keys:
        return [value for value in keys[before[-1]] if value.startswith(incomplete)]
    found = [key for key in keys if key.startswith(incomplete)]
    if len(found) == 1:  # more than one candidate, or the shell would put a space after the `=`
        return [f"{found[0]}=", *(f"{found[0]}={value}" for value in keys[found[0]] or ("...",))]
    return [f"{key}=" for key in found]


def presets(incomplete: str) -> list[str]:
    """Names of precision flows; after a comma, another."""
    before, comma, start = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in PRESETS if name.startswith(start)]


def backends(incomplete: str) -> list[str]:
    """Values of --backend."""
    return [name for name in ("auto", "triton", "native", "reference") if name.startswith(incomplete)]


def consistencies(incomplete: str) -> list[str]:
    """Values of --consistency."""
    return [name for name in ("bitwise", "fast") if name.startswith(incomplete)]


def schema_keys(root: str) -> Iterator[Key]:
    """Every dotted key of a schema that takes a value, and those of its sections."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(_CONFIG.glob("*.py"))]
    body = [node for tree in trees for node in tree.body]
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    names = {t.id: n.value for n in body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    yield from _fields(classes[root], "", classes, names)


def _fields(
    schema: ast.ClassDef, prefix: str, classes: dict[str, ast.ClassDef], names: dict[str, ast.expr]
) -> Iterator[Key]:
    for node in schema.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        key = f"{prefix}{node.target.id}"
        parts = list(_parts(node.annotation, names))
        values = tuple(value for part in parts for value in _choices(part)) or tuple(_default(node.value))
        sections = [part.id for part in parts if isinstance(part, ast.Name) and part.id in classes]
        if values or not sections:
            yield key, values
        for name in sections:
            yield from _fields(classes[name], f"{key}.", classes, names)


def _parts(annotation: ast.expr, names: dict[str, ast.expr]) -> Iterator[ast.expr]:
    """The members of a union, with the names that the modules give to types resolved; not what a list holds."""
    if isinstance(annotation, ast.BinOp):
        yield from _parts(annotation.left, names)
        yield from _parts(annotation.right, names)
    elif isinstance(annotation, ast.Name) and annotation.id in names and annotation.id not in _NO_VALUES:
        yield from _parts(names[annotation.id], names)
    elif isinstance(annotation, ast.Subscript) and getattr(annotation.value, "id", "") == "Annotated":
        assert isinstance(annotation.slice, ast.Tuple)
        yield from _parts(annotation.slice.elts[0], names)
    else:
        yield annotation


def _choices(part: ast.expr) -> Iterator[str]:
    if isinstance(part, ast.Name):
        yield from _NO_VALUES.get(part.id, ())
    elif isinstance(part, ast.Subscript) and getattr(part.value, "id", "") == "Literal":
        options = part.slice.elts if isinstance(part.slice, ast.Tuple) else [part.slice]
        yield from (str(_constant(option)) for option in options)


def _default(value: ast.expr | None) -> Iterator[str]:
    """The default, where it is a number or a text."""
    if isinstance(value, ast.Call) and value.args:
        value = value.args[0]
    found = _constant(value)
    if isinstance(found, (int, float, str)) and found != "":
        yield str(found)


def _constant(node: ast.expr | None) -> Any:
    return node.value if isinstance(node, ast.Constant) else None
