"""Computes the steps of a scheduler with the model: tokens, log-probabilities, copies of pages.

Where decode steps are captured on a GPU (`graphs.py`), the next one is launched before the tokens
of this one are read, so it does not wait for the host: a sequence that turns out to have ended, or was
cancelled, is then computed once more, in pages that no other sequence has written yet, and that token
is dropped. What would need a page taken back is not launched ahead. Chunks of prompts are computed
eagerly in the same step, behind what was launched: while Python launches their kernels, the GPU
decodes. tests/engine/test_graphs.py and test_mixed_steps.py compare with the simple step, which
is the definition.

Drafts (`speculation.py`) are further rows of the step, one for each, which store their keys and
values with all others before any row attends to them. A draft that counts makes the token that was
drawn behind it known too: `steps` gives these as steps that are computed already.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from isobit.engine.batch import adapter_numbers, build, stage
from isobit.engine.graphs import DecodeGraphs, Launch
from isobit.engine.routes import RouteStore
from isobit.engine.sampler import draw, top_of_draws
from isobit.engine.scheduler import Scheduler
from isobit.engine.sequences import StepPlan
from isobit.engine.shaping import Forbidden
from isobit.errors import NonFiniteError
from isobit.kernels import KVStore, StateStore, Store
from isobit.model import Model
from isobit.model.forward.moe import RouteTape

Drawn = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Tokens, and their log-probabilities."""
_NO_TOKENS = np.zeros(0, np.int64), np.zeros(0, np.float32)


@dataclass(frozen=True, eq=False)
class _Round:
    """Tokens of sequences, by their slots, each sampled behind a draft that counts."""

    slots: NDArray[np.int64]
    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]


def _rounds(
    plan: StepPlan, tokens: NDArray[np.int64], logprobs: NDArray[np.float32]
) -> list[_Round]:
    """Return the tokens sampled behind drafts, as long as each draft equals the token sampled in
    its position: first those behind every sequence's first draft, then behind the second, and so
    on."""
    draws_by_round: list[tuple[list[int], list[int]]] = []  # rows of the table, and draws
    behind = plan.decode
    for row, drafted in plan.drafts.items():
        draw = row
        for number, token in enumerate(drafted):
            if not counts(token, int(tokens[draw])):
                break
            draw = behind + number
            if number == len(draws_by_round):
                draws_by_round.append(([], []))
            draws_by_round[number][0].append(row)
            draws_by_round[number][1].append(draw)
        behind += len(drafted)
    return [
        _Round(plan.sampled[rows], tokens[draws], logprobs[draws]) for rows, draws in draws_by_round
    ]


def _joined(left: Drawn, right: Drawn) -> Drawn:
    return np.concatenate([left[0], right[0]]), np.concatenate([left[1], right[1]])


def counts(draft: int, sampled: int) -> bool:
    """Return whether a draft counts: it is the token that was sampled in its position."""
    return draft == sampled


class Runner:
    """Runs a scheduler's steps over `stores`, with captured steps where there are `graphs`,
    recording routes where there are `routes`."""

    def __init__(
        self,
        model: Model,
        scheduler: Scheduler,
        stores: list[Store],
        graphs: DecodeGraphs | None,
        routes: RouteStore | None,
    ) -> None:
        self.model = model
        self.scheduler = scheduler
        self.stores = stores
        self.graphs = graphs
        self.routes = routes
        self._ahead: Launch | None = None
        self._counted: list[_Round] = []  # drafts that count, and are not yet accounted for
        for layer, store in enumerate(stores):
            if isinstance(store, KVStore) and store.calibrated:
                store.set_scales(model.transformer.layer_scales(layer))

    def run(self) -> tuple[StepPlan, NDArray[np.int64]]:
        """Compute the next step: the plan, and the tokens that its `sampled` have drawn; the record
        has them too.

        Raises NonFiniteError where nothing can be drawn; the step is then as if it had not begun.
        Keys and values are written again with the same bits. States of linear attention were
        advanced in place, so all sequences give up their pages, and are computed again from the
        last ones that are full; not where Forbidden is raised, before anything is computed.
        """
        launched = self._ahead is not None
        try:
            return self._run()
        except BaseException as error:
            computed = launched or not isinstance(error, Forbidden)
            if computed and any(isinstance(store, StateStore) for store in self.stores):
                self.scheduler.preempt_all()
            raise

    def _run(self) -> tuple[StepPlan, NDArray[np.int64]]:
        scheduler = self.scheduler
        launch, self._ahead, ahead = self._ahead, None, None
        plan = None if launch is None else scheduler.launched(launch.sequences)
        if plan is None:  # nothing of a step that was launched ahead, if there was one, goes on
            plan = scheduler.plan()
            launch = None if plan.drafts else self._launch(plan)
            order = scheduler.rows.row_start[: plan.decode]
        elif launch is not None:
            order = launch.places(plan.sampled[: plan.decode])
        if plan.drafts:
            tokens, logprobs = self._with_drafts(plan)
        elif launch is None:
            tokens, logprobs = self._compute(plan)
        elif launch.is_done:
            tokens, logprobs = launch.read(order)
        else:
            ahead = self._launch_ahead(plan, order)
            prompts = self._compute(plan.prompts)
            tokens, logprobs = _joined(launch.read(order), prompts)
        if not np.isfinite(logprobs).all():
            self._counted = []
            self.model.transformer.ops["rollout"].raise_faults()  # names the tensor, if it was one
            running = scheduler.at[
                int(plan.sampled[np.flatnonzero(~np.isfinite(logprobs))[0]])
            ].owner
            raise NonFiniteError(
                f"{running.where}: the model's logits hold NaN or infinity, so nothing can be "
                "sampled"
            )
        self._ahead = ahead
        scheduler.record.write(plan.sampled, tokens, logprobs)
        return plan, tokens

    def steps(self) -> Iterator[tuple[StepPlan, NDArray[np.int64]]]:
        """Compute the next step, as `run` does, and yield it. Then, after the caller has accounted
        for it, yield the sequences whose draft was the token that they have just sampled as a
        further step, computed already; and so on."""
        self._counted = []  # a step that somebody's `on_token` broke off is computed again
        yield self.run()
        while self._counted:
            accepted = self._counted.pop(0)
            plan = self.scheduler.going(accepted.slots)
            if plan is None:
                continue
            order = np.argsort(accepted.slots)
            draws = order[np.searchsorted(accepted.slots, plan.sampled, sorter=order)]
            self.scheduler.record.write(
                plan.sampled, accepted.tokens[draws], accepted.logprobs[draws]
            )
            self.scheduler.stats.num_accepted_tokens += plan.decode
            yield plan, accepted.tokens[draws]

    def finish(self) -> None:
        """End the work when no request is open: raise faults of the device, and subtract what
        padded rows have counted."""
        self.model.transformer.ops["rollout"].raise_faults()
        if self.graphs is not None:
            self.graphs.subtract_padding()

    def copy_pages(self, copies: Iterable[tuple[int, int]]) -> None:
        pairs = list(copies)
        if not pairs:
            return
        source, target = stage(
            torch.tensor(pairs), self.model.transformer.ops["rollout"].device
        ).unbind(1)
        for store in self.stores:
            for pages in store.by_page(self.scheduler.page_size):
                pages[target] = pages[source]
        if self.routes is not None:
            self.routes.copy(*(list(pages) for pages in zip(*pairs)))

    def _with_drafts(self, plan: StepPlan) -> Drawn:
        """Return the next token and log-probability of each sampled sequence, as `_compute`; tokens
        behind drafts that count are kept for `steps`. A number behind a draft that is not finite
        would not have been computed without it: such a step is computed again without drafts."""
        try:
            launch = self._launch(plan)
            if launch is None:
                tokens, logprobs = self._compute(plan)
            else:
                decoding = np.arange(plan.decode + plan.num_drafted)
                prompts = self._compute(plan.prompts)
                tokens, logprobs = _joined(launch.read(decoding), prompts)
        except NonFiniteError:
            return self._compute(replace(plan, drafts={}))
        if not np.isfinite(logprobs).all():
            return self._compute(replace(plan, drafts={}))
        self._counted = _rounds(plan, tokens, logprobs)
        last = plan.decode + plan.num_drafted
        next_ones = np.concatenate([np.arange(plan.decode), np.arange(last, tokens.size)])
        return tokens[next_ones], logprobs[next_ones]

    def _compute(self, plan: StepPlan) -> Drawn:
        """Return the tokens and log-probabilities of the step's `draws`."""
        if not plan.decode and not plan.chunks:
            return _NO_TOKENS
        transformer = self.model.transformer
        ops = transformer.ops["rollout"]
        on_host = build(plan, self.scheduler, self.model.config.vocab_size)
        batch = on_host.to(ops.device)
        tape = RouteTape() if self.routes is not None else None
        adapters, served = None, transformer.served
        if served is not None:
            adapters = served.assignment(adapter_numbers(plan, self.scheduler, served))
        hidden = transformer.hidden(
            batch.tokens, batch.layout, self.stores, use="rollout", tape=tape, adapters=adapters
        )
        if self.routes is not None and tape is not None:
            self.routes.write(on_host.layout.slots.numpy(), tape.routes().cpu().numpy())
        if not plan.sampled.size:
            return _NO_TOKENS
        if batch.take is not None:
            hidden = hidden.index_select(0, batch.take)
        cap, weight = self.model.config.logit_cap, transformer.head_weight("rollout")
        drawn = hidden, weight, batch.draws, ops, batch.source, cap
        tokens, logprobs = draw(*drawn)
        if self.scheduler.num_with_top:
            sequences = [self.scheduler.at[slot] for slot in plan.draws.tolist()]
            counts = [sequence.owner.request.sampling.top_logprobs for sequence in sequences]
            for sequence, top in zip(sequences, top_of_draws(*drawn, counts)):
                if top:
                    self.scheduler.record.write_top(sequence.slot, top)
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    def _launch(self, plan: StepPlan) -> Launch | None:
        """Launch the step's decoding rows as a captured step; None where they cannot be."""
        if (
            self.graphs is None
            or not self.graphs.serves(plan.decode + plan.num_drafted, len(plan.chunks))
            or self.routes is not None
            or not self.scheduler.may_be_captured
        ):
            return None
        count, served = plan.decode + plan.num_drafted, self.model.transformer.served
        numbers = None if served is None else adapter_numbers(plan, self.scheduler, served)
        rows = plan.rows(self.scheduler.rows)
        return self.graphs.launch(rows, np.arange(count), adapters=numbers)

    def _launch_ahead(self, plan: StepPlan, launched_rows: NDArray[np.int64]) -> Launch | None:
        """Launch the next step of the decoding rows, which are `launched_rows` of the step under
        way; None where the scheduler has a decision to make first."""
        waits = self.scheduler.speculation is not None  # for the tokens
        if self.graphs is None or waits or not self.scheduler.may_be_captured:
            return None
        record, decoding = self.scheduler.record, plan.sampled[: plan.decode]
        going = np.flatnonzero(record.generated[decoding] + 1 < record.limit[decoding])
        if not self.scheduler.look_ahead(plan, going):
            return None
        return self.graphs.launch(self.scheduler.rows, going, launched_rows[going])
