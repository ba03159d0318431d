"""The tensors of a step: tokens, layout, and which rows of the result are sampled.

A step that only decodes is made of views of the table's arrays and one gather for the slots. A step
with chunks of prompts appends theirs. Batches are made on the host; `Batch.to` takes one to a GPU.
Left out: decisions (`scheduler.py`), and the buffers of captured steps (`graphs.py`).
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isobit.engine.changes import Changes
from isobit.engine.sampler import Draws, kinds_of
from isobit.engine.scheduler import Scheduler
from isobit.engine.sequences import Sequence, StepPlan
from isobit.engine.shaping import Forbidden, Shaped, Shaping
from isobit.engine.token_bits import full
from isobit.errors import IsobitError
from isobit.kernels import Layout
from isobit.model.adapters.multi_lora import MultiLora
from isobit.model.images.bank import joined


@dataclass(frozen=True, eq=False)
class Batch:
    """The tensors of a step. `tokens` [T] and `layout` go into the model. Of the hidden states,
    rows `take` (None: all) are sampled from, and draw r is from the `source[r]`-th of these (None:
    each from its own)."""

    tokens: Tensor
    layout: Layout
    take: Tensor | None
    source: Tensor | None
    draws: Draws

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on `device`; on a CPU itself. The arrays that it was built from may
        change at once."""
        if device.type == "cpu":
            return self
        layout = replace(
            self.layout,
            row_start=stage(self.layout.row_start, device),
            context=stage(self.layout.context, device),
            page_table=stage(self.layout.page_table, device),
            positions=stage(self.layout.positions, device),
            slots=stage(self.layout.slots, device),
            turns=None if self.layout.turns is None else stage(self.layout.turns, device),
        )
        take, source = (None if x is None else stage(x, device) for x in (self.take, self.source))
        keys, settings = stage(self.draws.keys, device), stage(self.draws.settings, device)
        changes = self.draws.changes
        if changes is not None:
            changes = changes.each(lambda tensor: stage(tensor, device))
        draws = Draws(keys, settings, self.draws.kinds, changes)
        return Batch(stage(self.tokens, device), layout, take, source, draws)


def stage(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to `device` through pinned memory without waiting; on a CPU return
    it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def build(plan: StepPlan, scheduler: Scheduler, vocabulary: int = 0) -> Batch:
    """Build the step's tensors. `vocabulary`: the model's size of it, for changes of logits.
    Raises Forbidden for a request whose answer cannot go on."""
    rows, count = plan.rows(scheduler.rows), plan.decode + plan.num_drafted
    tokens, position, slots = rows.token[:count], rows.position[:count], rows.slots(count)
    if not plan.chunks:
        layout = _layout(
            rows.row_start[: count + 1],
            position,
            rows.table[:count],
            rows.page_size,
            position,
            slots,
            rows.turn[:count],
        )
        draws = Draws(
            torch.from_numpy(rows.key[:count]), torch.from_numpy(rows.settings[:count]), rows.kinds
        )
        draws = _changed(draws, plan, scheduler, vocabulary)
        return Batch(torch.from_numpy(tokens), layout, None, None, draws)
    all_tokens, contexts, positions, all_slots = [tokens], [position], [position], [slots]
    tables, keys, settings = [rows.table[:count]], [rows.key[:count]], [rows.settings[:count]]
    lengths, take, repeats = [1] * count, list(range(count)), [1] * count
    total, turns = count, [rows.turn[:count]]
    for chunk in plan.chunks:
        sequence = chunk.sequence
        table = np.zeros(rows.table.shape[1], np.int32)
        table[: len(sequence.pages)] = sequence.pages
        at = np.arange(chunk.start, chunk.stop, dtype=np.int64)
        all_tokens.append(scheduler.tokens(sequence, chunk.start, chunk.stop))
        contexts.append(at[:1])
        positions.append(at)
        turns.append(scheduler.turns(sequence, chunk.start, chunk.stop))
        all_slots.append(
            table[at // rows.page_size] * np.int64(rows.page_size) + at % rows.page_size
        )
        tables.append(table[None])
        lengths.append(at.size)
        total += at.size
        if chunk.samples:
            take.append(total - 1)
            repeats.append(len(chunk.samples))
            keys.append(
                np.array(
                    [(*scheduler.key(sample), chunk.stop) for sample in chunk.samples], np.int64
                )
            )
            settings.append(
                np.tile(np.array(sequence.owner.request.sampling.settings), (len(chunk.samples), 1))
            )
    row_start = np.concatenate([[0], np.cumsum(lengths)])
    context, table = np.concatenate(contexts), np.concatenate(tables)
    layout = _layout(
        row_start,
        context,
        table,
        rows.page_size,
        np.concatenate(positions),
        np.concatenate(all_slots),
        joined(turns),
    )
    all_settings = np.concatenate(settings)
    draws = Draws(
        torch.from_numpy(np.concatenate(keys)),
        torch.from_numpy(all_settings),
        kinds_of(all_settings),
    )
    draws = _changed(draws, plan, scheduler, vocabulary)
    source = np.repeat(np.arange(len(take)), repeats) if max(repeats, default=1) > 1 else None
    return Batch(
        torch.from_numpy(np.concatenate(all_tokens)),
        layout,
        torch.tensor(take, dtype=torch.int64),
        None if source is None else torch.from_numpy(source),
        draws,
    )


def adapter_numbers(plan: StepPlan, scheduler: Scheduler, served: MultiLora) -> NDArray[np.int64]:
    """Return the number of the adapter of each row of the step, [T] int64. Raises IsobitError for
    an adapter that is not served any more."""
    count = plan.decode + plan.num_drafted
    decoding = [scheduler.at[slot] for slot in plan.rows(scheduler.rows).slot[:count].tolist()]
    pairs = [(sequence, 1) for sequence in decoding] + [
        (c.sequence, c.stop - c.start) for c in plan.chunks
    ]
    numbers = [served.number(sequence.owner.request.adapter) for sequence, _ in pairs]
    counts = [count for _, count in pairs]
    return np.repeat(np.array(numbers, np.int64), counts)


def _changed(draws: Draws, plan: StepPlan, scheduler: Scheduler, vocabulary: int) -> Draws:
    """Return the draws with the changes of their logits, where an open request has some: each is
    made of all tokens so far, computed in this step or before."""
    if not scheduler.num_changed:
        return draws
    sequences = [scheduler.at[slot] for slot in plan.draws.tolist()]
    samplings = [sequence.owner.request.sampling for sequence in sequences]
    rows = torch.tensor([sampling.changed for sampling in samplings])
    changes = Changes(rows, *_seen(plan, scheduler, sequences, vocabulary))
    shaped = [
        (row, sequences[row], sampling.shaping)
        for row, sampling in enumerate(samplings)
        if sampling.shaping is not None
    ]
    if shaped:
        changes = replace(changes, **_shaped(shaped, scheduler, len(sequences), vocabulary))
    return replace(draws, changes=changes)


def _seen(
    plan: StepPlan, scheduler: Scheduler, sequences: list[Sequence], vocabulary: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return what a repetition penalty needs, where a request has one."""
    penalty = torch.tensor(
        [sequence.owner.request.sampling.repetition_penalty for sequence in sequences]
    )
    if (penalty == 1).all():
        return None, None
    seen = torch.zeros(len(sequences), vocabulary, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        if penalty[row] != 1:
            seen[
                row, torch.from_numpy(scheduler.tokens(sequence, 0, scheduler.length(sequence)))
            ] = True
    behind = plan.decode
    for drafted in plan.drafts.values():  # a draft stands in front of what is drawn behind it
        for number, token in enumerate(drafted):
            seen[behind + number : behind + len(drafted), token] = True
        behind += len(drafted)
    return seen, penalty


def _shaped(
    shaped: list[tuple[int, Sequence, Shaping]], scheduler: Scheduler, rows: int, vocabulary: int
) -> dict[str, Tensor]:
    """Return the fields of `Changes` for rows of sequences that are shaped. Raises Forbidden."""
    bits, amounts = full(rows, vocabulary), list[tuple[int, dict[int, float]]]()
    for row, sequence, shaping in shaped:
        request = sequence.owner.request
        start, stop = sequence.owner.prompt.size, scheduler.length(sequence)
        answer = [*request.answered, *scheduler.tokens(sequence, start, stop).tolist()]
        if shaping.grammar is not None and sequence.shaped is None:
            sequence.shaped = Shaped(shaping.grammar.begin())
        matcher, problem = (
            None,
            "no token may come next: what is allowed excludes what is asked for",
        )
        try:
            matcher = None if sequence.shaped is None else sequence.shaped.go_on(answer)
            shaping.mask(bits[row], answer, matcher)
        except IsobitError as error:
            bits[row], problem = 0, str(error)
        if not bits[row].any():
            raise Forbidden(f"the answer cannot go on: {problem}", request)
        amounts.append((row, shaping.amounts(answer)))
    width = max(len(added) for _, added in amounts)
    if not width:
        return {"bits": torch.from_numpy(bits)}
    tokens = torch.zeros(rows, width, dtype=torch.int64)
    values = torch.full((rows, width), -0.0)  # which a sum does not notice
    for row, added in amounts:
        tokens[row, : len(added)] = torch.tensor(list(added), dtype=torch.int64)
        values[row, : len(added)] = torch.tensor(list(added.values()))
    return {"bits": torch.from_numpy(bits), "tokens": tokens, "amounts": values}


def _layout(
    row_start: NDArray[np.int64],
    context: NDArray[np.int64],
    page_table: NDArray[np.int32],
    page_size: int,
    positions: NDArray[np.int64],
    slots: NDArray[np.int64],
    turns: NDArray[np.int64],
) -> Layout:
    from_numpy = torch.from_numpy
    table = from_numpy(page_table)
    return Layout(
        from_numpy(row_start),
        from_numpy(context),
        table,
        page_size,
        from_numpy(positions),
        from_numpy(slots),
        max_rows=int(np.diff(row_start).max(initial=0)),
        max_keys=int(positions.max(initial=-1)) + 1,
        num_slots=0,  # the engine's store is there
        turns=from_numpy(turns),
    )
