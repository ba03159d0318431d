"""Experts of a layer that files hold in one tensor (gpt-oss), as if each had tensors of its own,
and back.

A file has `experts.gate_up_proj` [E, C, 2 I], of each expert the transposed matrix whose columns
are a gate and its up in turn, `experts.down_proj` [E, I, C], transposed too, and biases
`..._proj_bias` [E, 2 I] and [E, C]. Here expert 3 has `experts.3.gate_proj.weight` [I, C],
`experts.3.up_proj.weight`, `experts.3.down_proj.weight` [C, I], and biases.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

Read = Callable[[str, int, int], Tensor]
"""Rows of a Hugging Face tensor, float32, by its name, the first of them and the one after the
last."""
_OWN = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


class Place(NamedTuple):
    """Where the rows of an expert's own tensor are: the last dimension of `name`[expert], from
    `first` on by `step`."""

    name: str
    expert: int
    first: int
    step: int


def place(name: str) -> Place | None:
    """That of an expert's tensor; None for any other."""
    found = _OWN.fullmatch(name)
    if found is None:
        return None
    experts, number, role, kind = found.groups()
    first, step, role = (0, 1, "down") if role == "down" else (int(role == "up"), 2, "gate_up")
    return Place(
        f"{experts}.{role}_proj{'_bias' if kind == 'bias' else ''}", int(number), first, step
    )


def in_files(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The tensors of files, of those of single experts."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        at = place(name)
        if at is None:
            found[name] = shape
        else:
            count = max(found.get(at.name, (0,))[0], at.expert + 1)
            found[at.name] = (count, *shape[1:], shape[0] * at.step)
    return found


def apart(read: Read) -> Read:
    """Reads single experts' tensors by way of `read`, which reads those of files. The last expert
    read is kept, since its gates and ups are asked for one after the other."""
    kept: dict[tuple[str, int], Tensor] = {}

    def rows(name: str, lo: int, hi: int) -> Tensor:
        at = place(name)
        if at is None:
            return read(name, lo, hi)
        if (at.name, at.expert) not in kept:
            kept.clear()
            kept[at.name, at.expert] = read(at.name, at.expert, at.expert + 1)[0]
        return kept[at.name, at.expert][..., at.first :: at.step][..., lo:hi].t().contiguous()

    return rows


def joined(
    pieces: Iterable[tuple[Place, Tensor]], shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """A file's tensor of this shape, on the CPU, of experts' own."""
    out = torch.empty(shape, dtype=dtype)
    for at, rows in pieces:
        out[at.expert][..., at.first :: at.step] = rows.detach().t()
    return out
