"""Computes the steps of a scheduler with the model: tokens, log-probabilities, copies of pages.

Where decode steps are captured on a GPU (`graphs.py`), the next one is launched before the tokens
of this one are read, so it does not wait for the host: a sequence that turns out to have ended, or was
cancelled, is then computed once more, in pages that nobody else has written yet, and that token is
dropped. What would need a page taken back is not launched ahead. Chunks of prompts are computed
eagerly beside the decoding rows, behind what was launched: while Python launches their kernels, the
GPU decodes. tests/engine/test_graphs.py and test_mixed_steps.py compare with the simple step, which
is the definition.
"""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from isobit.engine.batch import adapter_numbers, build, stage
from isobit.engine.graphs import DecodeGraphs, Launch
from isobit.engine.routes import RouteStore
from isobit.engine.sampler import draw, top_of_draws
from isobit.engine.scheduler import Scheduler
from isobit.engine.sequences import StepPlan
from isobit.errors import NonFiniteError
from isobit.kernels import KVStore, StateStore, Store
from isobit.model import Model
from isobit.model.forward.moe import RouteTape

_NO_TOKENS = np.zeros(0, np.int64), np.zeros(0, np.float32)


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
        for layer, store in enumerate(stores):
            if isinstance(store, KVStore) and store.calibrated:
                store.set_scales(model.transformer.layer_scales(layer))

    def run(self) -> tuple[StepPlan, NDArray[np.int64]]:
        """Compute the next step: the plan, and the tokens that its `sampled` have drawn; the record
        has them too.

        Raises NonFiniteError where nothing can be drawn; the step is then as if it had not begun.
        Keys and values are written again with the same bits. States of linear attention were
        advanced in place, so all sequences give up their pages, and are computed again from the
        last ones that are full.
        """
        try:
            return self._run()
        except BaseException:
            if any(isinstance(store, StateStore) for store in self.stores):
                self.scheduler.preempt_all()
            raise

    def _run(self) -> tuple[StepPlan, NDArray[np.int64]]:
        scheduler = self.scheduler
        launch, self._ahead, ahead = self._ahead, None, None
        plan = None if launch is None else scheduler.launched(launch.sequences)
        if plan is None:  # nothing of a step that was launched ahead, if there was one, goes on
            plan = scheduler.plan()
            launch, places = self._launch(plan), scheduler.rows.row_start[: plan.decode]
        elif launch is not None:
            places = launch.places(plan.sampled[: plan.decode])
        if launch is None:
            tokens, logprobs = self._compute(plan)
        elif launch.is_done:
            tokens, logprobs = launch.read(places)
        else:
            ahead = self._launch_ahead(plan, places)
            first_tokens, first_logprobs = self._compute(plan.prompts)
            tokens, logprobs = launch.read(places)
            tokens = np.concatenate([tokens, first_tokens])
            logprobs = np.concatenate([logprobs, first_logprobs])
        if not np.isfinite(logprobs).all():
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

    def finish(self) -> None:
        """No request is open: say what went wrong on the device, and count what padded rows have
        written."""
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

    def _compute(self, plan: StepPlan) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens and log-probabilities of the step's sampled rows."""
        if not plan.decode and not plan.chunks:
            return _NO_TOKENS
        transformer = self.model.transformer
        ops = transformer.ops["rollout"]
        on_host = build(plan, self.scheduler, self.model.config.vocab_size)
        batch = on_host.to(ops.device)
        tape = RouteTape() if self.routes is not None else None
        numbers = adapter_numbers(plan, self.scheduler, transformer.served)
        hidden = transformer.hidden(
            batch.tokens, batch.layout, self.stores, use="rollout", tape=tape, adapters=numbers
        )
        if self.routes is not None and tape is not None:
            self.routes.write(on_host.layout.slots.numpy(), tape.routes().cpu().numpy())
        if not plan.sampled.size:
            return _NO_TOKENS
        if batch.take is not None:
            hidden = hidden.index_select(0, batch.take)
        drawn = hidden, transformer.head_weight("rollout"), batch.draws, ops, batch.source
        tokens, logprobs = draw(*drawn)
        if self.scheduler.num_with_top:
            sequences = [self.scheduler.at[slot] for slot in plan.sampled.tolist()]
            counts = [each.owner.request.sampling.top_logprobs for each in sequences]
            for sequence, top in zip(sequences, top_of_draws(*drawn, counts)):
                if top:
                    self.scheduler.record.write_top(sequence.slot, top)
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    def _launch(self, plan: StepPlan) -> Launch | None:
        """The step's decoding rows as a captured step, where they can be."""
        if (
            self.graphs is None
            or not self.graphs.serves(plan.decode, len(plan.chunks))
            or self.routes is not None
            or not self.scheduler.may_be_captured
        ):
            return None
        return self.graphs.launch(self.scheduler.rows, np.arange(plan.decode))

    def _launch_ahead(self, plan: StepPlan, places: NDArray[np.int64]) -> Launch | None:
        """The step after this one of the decoding rows, which stand at `places` of what is under
        way, unless it takes a decision."""
        if self.graphs is None or not self.scheduler.may_be_captured:
            return None
        record, decoding = self.scheduler.record, plan.sampled[: plan.decode]
        going = np.flatnonzero(record.generated[decoding] + 1 < record.limit[decoding])
        if not self.scheduler.look_ahead(plan, going):
            return None
        return self.graphs.launch(self.scheduler.rows, going, places[going])
