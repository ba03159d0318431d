"""Decode steps that are captured (`captured.py`): one replay instead of hundreds of calls from
Python.

A graph is captured for a number of rows, a longest context and the kinds of draws
(`sampler.Kinds`), when a step first needs it, and recorded on a CPU when one needs it again.
Settings are inputs of a row, as its token is. A CUDA graph serves every smaller step: what is
missing is padded. A padded row decodes token 0 at position 0 into a spare page that no sequence
uses, so it changes nothing that is read; and since a row's bits do not depend on its batch, a
padded step gives the bits of the plain one. tests/engine/test_graphs.py compares them, over a
stand-in for captured graphs on a CPU. A CPU captures each number of rows by itself, and pads
nothing (tests/engine/test_recorded.py).

A graph reads and writes fixed addresses: buffers of this module, the stores, the working weights.
`begin` drops graphs whose weights or stores have moved; `Transformer.sync` keeps them in place.
Tokens stay on a GPU, so a step can be launched there before the host has read the previous one.
Left out: chunks of prompts, which `runner.py` computes as they are.
"""

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isobit.engine.captured import Graph
from isobit.engine.rows import DecodeRows
from isobit.engine.sampler import NEUTRAL, Draws, Kinds, draw
from isobit.kernels import Layout, Store
from isobit.model import Model
from isobit.model.adapters.multi_lora import Assignment

SMALLEST_CONTEXT = 1024
MOST_KEPT = 512
"""Captured steps; beyond these, all are dropped."""
Rows = NDArray[np.int64]
# of a row, eight bytes each: token, position, slot, the sampling key's four, the four settings, and
# the turn
_INTS = 12


def ladder(most: int) -> list[int]:
    """Return the numbers of rows that are captured, up to `most`; above 16 rows fewer than a third
    of a step's rows are padding."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 32)]
    return [*(step for step in steps if step < most), most]


class _Inputs(NamedTuple):
    """The inputs of a step of R rows over P pages, as the host writes them: `tokens`, `positions`,
    `slots` and `turns` [R], `keys` [R, 4], `settings` [R, 4] float64, `table` [R, P] int32."""

    tokens: Rows
    positions: Rows
    slots: Rows
    keys: Rows
    settings: NDArray[np.float64]
    turns: Rows
    table: NDArray[np.int32]


class _Host:
    """The memory by which one launch exchanges inputs and results with the host: the `buffers` of
    the graphs, or memory `apart` from them, which is pinned for a GPU."""

    def __init__(self, buffers: Sequence[Tensor], apart: bool) -> None:
        on_gpu = buffers[0].device.type == "cuda"
        self.ints, self.table, self.tokens, self.logprobs = (
            torch.zeros(x.shape, dtype=x.dtype, pin_memory=on_gpu) if apart else x for x in buffers
        )
        self.drawn = self.tokens.numpy(), self.logprobs.numpy()
        self._inputs: dict[tuple[int, int], _Inputs] = {}
        self._event = torch.cuda.Event() if on_gpu else None

    def inputs(self, rows: int, pages: int) -> _Inputs:
        """Return views of the input buffer for a step of `rows` rows and `pages` pages."""
        views = self._inputs.get((rows, pages))
        if views is None:
            ints = self.ints.numpy()[: _INTS * rows]
            views = self._inputs[rows, pages] = _Inputs(
                ints[:rows],
                ints[rows : 2 * rows],
                ints[2 * rows : 3 * rows],
                ints[3 * rows : 7 * rows].reshape(rows, 4),
                ints[7 * rows : 11 * rows].view(np.float64).reshape(rows, 4),
                ints[11 * rows :],
                self.table.numpy()[: rows * pages].reshape(rows, pages),
            )
        return views

    def record(self) -> None:
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until everything that was launched before `record` is computed."""
        if self._event is not None:
            self._event.synchronize()


class Launch:
    """A step that is under way, or done already: row r of it continues `sequences[r]`."""

    def __init__(self, sequences: Rows, host: _Host, is_done: bool) -> None:
        self.sequences, self.is_done = sequences, is_done
        self._host = host

    def places(self, sequences: Rows) -> Rows:
        """Return the row of each of these sequences, which are among the launch's."""
        order = np.argsort(self.sequences)
        return order[np.searchsorted(self.sequences, sequences, sorter=order)]

    def read(self, rows: Rows) -> tuple[Rows, NDArray[np.float32]]:
        """Return (tokens, log-probabilities float32) of some rows. Waits for the step; to be called
        before the next launch but one."""
        self._host.wait()
        tokens, logprobs = self._host.drawn
        return tokens[rows], logprobs[rows]


class DecodeGraphs:
    """The captured decode steps of an engine, of up to `max_rows` rows, or as many as the kind of
    graph takes, and `longest` tokens of context."""

    def __init__(
        self,
        model: Model,
        kind: type[Graph],
        *,
        page_size: int,
        max_rows: int,
        longest: int,
        spare_page: int,
    ) -> None:
        self._transformer, self._kind = model.transformer, kind
        self._ops = model.transformer.ops["rollout"]
        self._last_token = model.config.vocab_size - 1
        self.asynchronous, max_rows = kind.asynchronous, min(max_rows, kind.most_rows)
        served = model.transformer.served
        self._assignment = None if served is None else Assignment(served, max_rows, max_rows)
        self.page_size, self.max_rows, self.longest = page_size, max_rows, longest
        self.spare_page, self.smallest_context = spare_page, SMALLEST_CONTEXT
        self.ladder = ladder(max_rows) if self.asynchronous else list(range(1, max_rows + 1))
        device, pages = self._ops.device, -(-longest // page_size)
        self._ints = torch.zeros(_INTS * max_rows, dtype=torch.int64, device=device)
        self._table = torch.zeros(max_rows * pages, dtype=torch.int32, device=device)
        self._row_start = torch.arange(max_rows + 1, device=device)
        self._tokens = torch.zeros(
            max_rows + 1, dtype=torch.int64, device=device
        )  # the last is a padded row's: 0
        self._logprobs = torch.zeros(max_rows, device=device)
        buffers = self._ints, self._table, self._tokens, self._logprobs
        self._hosts = [_Host(buffers, self.asynchronous) for _ in range(2)]
        self._graphs: dict[tuple[int, int, Kinds, int], Graph] = {}
        self._kept: list[object] = []
        self._storage: tuple[int, ...] = ()
        self._stores: list[Store] = []
        self._padded = 0

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def serves(self, decode: int, prompts: int) -> bool:
        """Return whether a step with `decode` decoding rows and `prompts` chunks of prompts is
        captured. A CPU computes both in one forward, which reads the weights once."""
        return 0 < decode <= self.max_rows and (self.asynchronous or not prompts)

    def clear(self) -> None:
        """Drop all graphs, and the memory that they hold."""
        self._graphs.clear()
        self._kept.clear()
        self._stores = []

    def begin(self, stores: list[Store]) -> None:
        """Prepare for new requests: drop graphs that read other weights or stores than the present
        ones."""
        held = [tensor.data_ptr() for store in stores for tensor in store.tensors]
        storage = (*self._transformer.rollout_storage(), *held)
        if storage != self._storage:
            self.clear()
        self._storage, self._stores, self._padded = storage, stores, 0

    def launch(
        self,
        rows: DecodeRows,
        which: Rows,
        source: Rows | None = None,
        adapters: Rows | None = None,
    ) -> Launch:
        """Start a step of the table's rows `which`, by `adapters` of these numbers, where the model
        serves several. With `source` it is the step after the one that is under way, whose row
        source[r] has the token that row r continues with."""
        positions = rows.position[which] + (source is not None)
        count, most = self.ladder[bisect_left(self.ladder, which.size)], int(positions.max()) + 1
        context = self.smallest_context
        while context < most:
            context *= 2
        context = min(context, self.longest)
        key = (count, context, rows.kinds, torch.get_num_threads())
        graph = self._graphs.get(key)
        if graph is None and self.asynchronous:
            graph = self._captured_on_padding(count, context, rows.kinds)
        host, self._hosts = self._hosts[0], self._hosts[::-1]
        self._fill(host, count, context, rows, which, positions, source)
        if source is not None:
            tokens = self._ints[:count]
            # a token drawn from NaN may be any; the host stops there, and what is under way must
            # not read outside
            tokens.copy_(self._tokens.index_select(0, tokens).clamp_(0, self._last_token))
        assigned: AbstractContextManager[None] = nullcontext()
        if self._assignment is not None:
            assert adapters is not None
            assigned = self._assignment.of(adapters)
        with assigned:
            if graph is not None:
                graph.replay()
            else:
                graph = self._captured(count, context, rows.kinds)
        self._graphs[key] = graph
        if self.asynchronous:
            host.tokens[:count].copy_(self._tokens[:count], non_blocking=True)
            host.logprobs[:count].copy_(self._logprobs[:count], non_blocking=True)
            host.record()
        self._padded += count - which.size
        return Launch(rows.slot[which], host, not self.asynchronous)

    def subtract_padding(self) -> None:
        """Subtract, when no request is open, what padded rows have added to the counts of
        calibrated stores."""
        counts = [store.counts for store in self._stores if store.counts is not None]
        if not counts or not self._padded:
            return
        saved = [count.clone() for count in counts]
        context = min(self.smallest_context, self.longest)
        self._pad(1, context)
        self._transformer.hidden(
            self._ints[:1], self._layout(1, context), self._stores, use="rollout"
        )
        for count, count_before in zip(counts, saved):
            count.copy_(count_before - self._padded * (count - count_before))
        self._padded = 0

    def _captured(self, count: int, context: int, kinds: Kinds) -> Graph:
        """Capture a step over the present buffers and return its graph."""
        layout, weight = self._layout(count, context), self._transformer.head_weight("rollout")
        tokens, keys = self._ints[:count], self._ints[3 * count : 7 * count].view(count, 4)
        settings = self._ints[7 * count : 11 * count].view(torch.float64).view(count, 4)
        draws = Draws(keys, settings, kinds)

        def step() -> None:
            hidden = self._transformer.hidden(
                tokens, layout, self._stores, use="rollout", adapters=self._assignment, images=False
            )
            cap = self._transformer.config.logit_cap
            drawn, logprobs = draw(hidden, weight, draws, self._ops, cap=cap)
            self._tokens[:count].copy_(drawn)
            self._logprobs[:count].copy_(logprobs)

        if len(self._graphs) >= MOST_KEPT:
            self._graphs.clear()
            self._kept.clear()
        # made here, and kept: a longer context brings others, and would free these
        self._kept += [self._transformer.rope_tables(layout), self._transformer.kv_scales]
        graph = self._kind(next(iter(self._graphs.values()), None))
        graph.capture(step)
        return graph

    def _captured_on_padding(self, count: int, context: int, kinds: Kinds) -> Graph:
        """Capture a step over padded rows, so that capturing changes neither counts nor tokens."""
        counts = [
            (store.counts, store.counts.clone())
            for store in self._stores
            if store.counts is not None
        ]
        last = self._tokens.clone()  # the step under way may have the inputs of the next
        self._pad(count, context)
        graph = self._captured(count, context, kinds)
        self._tokens.copy_(last)
        for now, saved in counts:
            now.copy_(saved)
        return graph

    def _layout(self, count: int, context: int) -> Layout:
        """Return the layout of the first `count` rows of the buffers: one row a sequence, so its
        context is its position."""
        positions = self._ints[count : 2 * count]
        slots = self._ints[2 * count : 3 * count]
        pages = self._pages(context)
        table = self._table[: count * pages].view(count, pages)
        row_start, turns = self._row_start[: count + 1], self._ints[11 * count : _INTS * count]
        sizes = self.page_size, positions, slots, 1, context, 0
        return Layout(row_start, positions, table, *sizes, turns=turns)

    def _pages(self, context: int) -> int:
        return -(-context // self.page_size)

    def _pad(self, count: int, context: int) -> None:
        """Fill the buffers with padded rows only, by way of the memory that the next launch will
        use: the other memory may belong to the step under way."""
        nothing, empty = np.zeros(0, np.int64), DecodeRows(1, self.page_size)
        self._fill(self._hosts[0], count, context, empty, nothing, nothing, None)
        self._hosts[0].record()

    def _fill(
        self,
        host: _Host,
        count: int,
        context: int,
        rows: DecodeRows,
        which: Rows,
        positions: Rows,
        source: Rows | None,
    ) -> None:
        """Write a step's inputs to where graphs read them, through the host's memory."""
        host.wait()
        real, pages, more = which.size, self._pages(context), source is not None
        to = host.inputs(count, pages)
        to.tokens[:real] = rows.token[which] if source is None else source
        to.positions[:real] = positions
        to.turns[:real] = rows.turn[which] + more
        to.slots[:real] = rows.slots_at(which, positions)
        to.keys[:real] = rows.key[which]
        to.keys[:real, 3] += more
        to.settings[:real] = rows.settings[which]
        width = min(rows.table.shape[1], pages)
        to.table[:real, :width] = rows.table[which, :width]
        if real < count:
            to.tokens[real:] = self.max_rows if more else 0
            to.positions[real:], to.keys[real:], to.settings[real:] = 0, 0, NEUTRAL
            to.turns[real:] = 0
            to.slots[real:] = self.spare_page * self.page_size
            to.table[real:] = self.spare_page
        if self.asynchronous:
            ints, table = _INTS * count, count * pages
            self._ints[:ints].copy_(host.ints[:ints], non_blocking=True)
            self._table[:table].copy_(host.table[:table], non_blocking=True)
