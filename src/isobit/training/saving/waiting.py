"""Samples that wait in a checkpoint: their token ids, log-probabilities and masks are tensors, and
the state's JSON has, for each sample, how many numbers of each tensor belong to it.

A batch of rollouts that run ahead may have 10^8 tokens, which as text are gigabytes in one string.
Left out: the other fields of a sample (`rl/algorithm/samples.py`), which are short.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_COLUMNS = {
    "prompt_ids": np.int64,
    "completion_ids": np.int64,
    "teacher_ids": np.int64,
    "rollout_logprobs": np.float64,
    "reference_kl": np.float64,
    "completion_mask": np.bool_,
}
_Change = Callable[[Mapping[str, Any]], dict[str, Any]]
_NARROW = {np.int64: np.int32, np.float64: np.float32}


def packed(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (the state of a run, in which the length of each long column of a sample replaces the
    column; the columns, each [numbers of all samples]). A column has 32 bits per number where that
    changes none of its numbers."""
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}

    def short(sample: Mapping[str, Any]) -> dict[str, Any]:
        row = dict(sample)
        for name, dtype in _COLUMNS.items():
            if row.get(name) is not None:
                columns[name].append(np.array(row[name], dtype))
                row[name] = len(columns[name][-1])
        return row

    plain = _mapped(state, short)
    return plain, {name: _tensor(rows) for name, rows in columns.items() if rows}


def unpacked(plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the state of a run from what `packed` returned. Raises ValueError for columns that do
    not fit the lengths in the state."""
    offsets = dict.fromkeys(_COLUMNS, 0)

    def whole(sample: Mapping[str, Any]) -> dict[str, Any]:
        row = dict(sample)
        for name in _COLUMNS:
            length = row.get(name)
            if length is None or isinstance(length, list):  # the list of an older checkpoint
                continue
            start = offsets[name]
            if type(length) is not int or not 0 <= length <= tensors[name].numel() - start:
                raise ValueError(f"{name}: {length!r} numbers")
            row[name] = tensors[name][start : start + length].tolist()
            offsets[name] = start + length
        return row

    state = _mapped(plain, whole)
    if any(offsets.get(name) != tensor.numel() for name, tensor in tensors.items()):
        raise ValueError("numbers that are no sample's")
    return state


def _mapped(state: Mapping[str, Any], change: _Change) -> dict[str, Any]:
    """Return the state of a run with `change` applied to each sample, always in the same order."""
    mapped = dict(state)
    for name in ("pending", "replay", "unfinished"):
        if name in mapped:
            mapped[name] = _groups(mapped[name], change)
    mapped["queue"] = [
        {**batch, **{name: _groups(batch[name], change) for name in ("groups", "scored")}}
        for batch in mapped["queue"]
    ]
    return mapped


def _groups(groups: Any, change: _Change) -> list[Any]:
    """Return the groups with `change` applied to each sample. An integer in the place of a group,
    which is the number of another group, stays."""
    return [
        group if isinstance(group, int) else [change(sample) for sample in group]
        for group in groups
    ]


def _tensor(rows: list[Any]) -> Tensor:
    column = np.concatenate(rows)
    kind = _NARROW.get(column.dtype.type)
    if kind is not None:
        narrow = column.astype(kind)
        if np.array_equal(narrow.astype(column.dtype), column, equal_nan=column.dtype.kind == "f"):
            column = narrow
    return torch.from_numpy(column)
