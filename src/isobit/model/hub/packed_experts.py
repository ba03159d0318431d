"""Experts of a layer that files hold in one tensor, as if each had its own tensors, and back.

Of gpt-oss (`columns`) a file has `experts.gate_up_proj` [E, C, 2 I], of each expert the transposed
matrix whose columns are a gate and its up in turn, `experts.down_proj` [E, I, C], transposed too,
and biases `..._proj_bias` [E, 2 I] and [E, C]. Of a Qwen3.5 that was published (`rows`) it has `experts.gate_up_proj`
[E, 2 I, C], gates before ups, and `experts.down_proj` [E, C, I], as of a Gemma 4; of a Qwen3-VL-MoE
(`halves`) the same transposed, [E, C, 2 I] and [E, I, C]. Here expert 3 has
`experts.3.gate_proj.weight` [I, C], `experts.3.up_proj.weight`, `experts.3.down_proj.weight` [C,
I], and biases.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from isobit.model.families.family import Packing

Read = Callable[[str, int, int], Tensor]
"""Rows of a Hugging Face tensor, float32, by its name, the first of them and the one after the
last."""
_OWN = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


class Place(NamedTuple):
    """The rows of an expert's own tensor: the `part`-th of `parts` of `name`[expert]."""

    name: str
    expert: int
    part: int
    parts: int


def place(name: str) -> Place | None:
    """Return the place of an expert's tensor; None for any other."""
    match = _OWN.fullmatch(name)
    if match is None:
        return None
    experts, number, role, kind = match.groups()
    half, halves, role = (0, 1, "down") if role == "down" else (int(role == "up"), 2, "gate_up")
    return Place(
        f"{experts}.{role}_proj{'_bias' if kind == 'bias' else ''}", int(number), half, halves
    )


def in_files(shapes: Mapping[str, tuple[int, ...]], packing: Packing) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in files, by name, from those of single experts' tensors."""
    shapes_in_files: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        at = place(name)
        if at is None:
            shapes_in_files[name] = shape
        else:
            count = max(shapes_in_files.get(at.name, (0,))[0], at.expert + 1)
            rows, inner = (shape[0] * at.parts,), shape[1:]
            shapes_in_files[at.name] = (
                (count, *rows, *inner) if packing == "rows" else (count, *inner, *rows)
            )
    return shapes_in_files


def apart(read: Read, packing: Packing) -> Read:
    """Return a function that reads single experts' tensors by way of `read`, which reads those of
    files. The last expert read is kept, since its gates and ups are read one after the other."""
    packed: dict[tuple[str, int], Tensor] = {}

    def rows(name: str, lo: int, hi: int) -> Tensor:
        at = place(name)
        if at is None:
            return read(name, lo, hi)
        if (at.name, at.expert) not in packed:
            packed.clear()
            packed[at.name, at.expert] = read(at.name, at.expert, at.expert + 1)[0]
        return _own(packed[at.name, at.expert], at, packing)[lo:hi].contiguous()

    return rows


def joined(
    pieces: Iterable[tuple[Place, Tensor]],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    packing: Packing,
) -> Tensor:
    """Assemble a file's tensor of this shape, on the CPU, from the tensors of single experts."""
    out = torch.empty(shape, dtype=dtype)
    for at, rows in pieces:
        _own(out[at.expert], at, packing).copy_(rows.detach())
    return out


def _own(expert: Tensor, at: Place, packing: Packing) -> Tensor:
    """Return the view of an expert's own tensor in what files have of the expert."""
    if packing == "columns":
        return expert[..., at.part :: at.parts].t()
    if packing == "halves":
        return expert.chunk(at.parts, -1)[at.part].t()
    return expert.chunk(at.parts)[at.part]
