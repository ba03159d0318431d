"""A name for the source of isobit that a process runs with: two of the same name compute the same,
on the same machine. `code_digest` names what a room computes, whatever its comments say.

Left out: the libraries beneath, whose versions are recorded by name (`isobit.kernels.versions`).
"""

import ast
import hashlib
from functools import cache
from pathlib import Path

import isobit

_SUFFIXES = {".py", ".cpp", ".h"}


@cache
def source_digest(root: Path = Path(isobit.__file__).parent) -> str:
    """Return the SHA-256, in hexadecimal, over every Python and C++ file under `root`, by path and
    bytes."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in _SUFFIXES and path.is_file():
            data = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()} {len(data)}\n".encode() + data)
    return digest.hexdigest()


@cache
def code_digest(root: Path) -> str:
    """Return the SHA-256, in hexadecimal, over the syntax of every Python file under `root`:
    comments, layout and docstrings change nothing."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        tree = _Bare().visit(ast.parse(path.read_bytes()))
        digest.update(f"{path.relative_to(root).as_posix()} {ast.dump(tree)}\n".encode())
    return digest.hexdigest()


class _Bare(ast.NodeTransformer):
    """A transformer of syntax trees that removes strings that are statements, such as
    docstrings."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if text else node
