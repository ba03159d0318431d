"""What of a run goes into its certificate (`run/certificate.py`), a row for each step.

The hash of the weights is that of one number for each master: the sum of its int64 words in blocks
of 256 elements, each block times an odd number of its place, modulo 2^64. No range of a rank cuts a
block, and integer sums have no order, so it is the same at any number of ranks, on every device; it
reads each weight once, at the memory's speed. Any change of one word changes it
(tests/training/test_certificate.py); two words of a block that are exchanged do not, which only the
SHA-256 of a checkpoint's manifest sees.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isobit.config import Config, SftConfig, repeated
from isobit.model import Model
from isobit.options.declare import plain
from isobit.run.certificate import Facts, build, digest, of_metrics, row_of

_BLOCK = 256  # elements, of which no rank's range begins inside (`distributed/shards.py`)
_PLACE = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as a signed number
_ELEMENTS = {4: torch.int32, 2: torch.int16}


class Certificate:
    """Makes the rows of an open run's certificate."""

    def __init__(self, config: Config | SftConfig, model: Model) -> None:
        self._config, self._model = of_config(plain(config)), model

    def row(
        self, step: int, previous: str, rollouts: str | None, metrics: Mapping[str, float]
    ) -> dict[str, Any]:
        """Return the certificate's row of a step, from the model's present weights. All ranks call
        this, and get the same."""
        weights = of_weights(self._model)
        return row_of(
            step, previous, Facts(weights, rollouts, of_metrics(metrics), self._config, build())
        )


def of_config(values: Mapping[str, Any]) -> str:
    """Return the hash of a run's config, as plain values, without the keys that may change on
    resumption."""
    return digest(repeated(values))


def of_weights(model: Model) -> str:
    """Return the hash of a model's masters; of an adapter's factors if the model has an adapter."""
    shards = model.transformer.masters.shards
    named = {name: rows for name, rows in model.named_parameters().items() if rows.numel()}
    sums = [
        _sum(rows, shards.own(name)[0] * shards.width(name) // _BLOCK)
        for name, rows in named.items()
    ]
    mine = dict(zip(named, torch.stack(sums).tolist())) if sums else {}
    totals = dict.fromkeys(shards.shapes, 0)
    for sums_of_rank in model.ranks.all_gather_json(mine):
        for name, value in sums_of_rank.items():
            totals[name] += value
    words = {name: value % (1 << 64) for name, value in totals.items()}
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()


@torch.no_grad()
def _sum(rows: Tensor, first: int) -> Tensor:
    """Return the weighted sum [] int64 over a master's blocks, modulo 2^64; `first`: the number of
    the first of these blocks in the whole master."""
    flat = rows.detach().contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()  # so that it can be viewed as words
    whole = len(flat) // _BLOCK * _BLOCK
    blocks = flat[:whole].view(torch.int64).view(-1, _BLOCK * flat.element_size() // 8).sum(-1)
    if whole < len(flat):  # the end of a small master, by elements: it may have no whole words
        rest = flat[whole:].clone().view(_ELEMENTS[flat.element_size()]).sum(dtype=torch.int64)
        blocks = torch.cat([blocks, rest.view(1)])
    weights = torch.arange(first, first + len(blocks), device=blocks.device) * 2 + 1
    return (blocks * (weights * _PLACE)).sum()
