"""One `generate` call: its scheduler, its record, and the step that joins them with the model.

A step is planned, computed, recorded and committed. Where decode steps are captured (`graphs.py`), the next one is
launched before the tokens of this one are read, so the GPU does not wait for the host: a sequence that turns out to
have ended is then computed once more, in pages that are still its own, and that token is dropped. Prompts are never
launched ahead, and neither is what would need a page taken back. tests/engine/test_graphs.py compares with the simple
step, which is the definition.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from isobit.engine.batch import build, stage
from isobit.engine.graphs import DecodeGraphs, Launch
from isobit.engine.pages import PagePool
from isobit.engine.prompts import new_token_limits
from isobit.engine.record import LENGTH, REASONS, STOP, Record
from isobit.engine.routes import RouteRecord
from isobit.engine.sampler import draw
from isobit.engine.scheduler import Plan, Scheduler
from isobit.engine.stopping import StopStrings, cut
from isobit.engine.types import Completion, Sampling
from isobit.errors import NonFiniteError
from isobit.kernels import KVStore
from isobit.model import Model
from isobit.model.moe import RouteTape, encode_routes


class Generation:
    """All sequences of one call, from the prompts to the completions. Sequence i is sample i % n of prompt i // n."""

    def __init__(
        self,
        model: Model,
        stores: list[KVStore],
        pages: PagePool,
        prompts: list[list[int]],
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        page_size: int,
        max_batch_tokens: int,
        max_sequences: int,
        record_routes: bool = False,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.graphs = graphs
        self._ahead: Launch | None = None
        self.model, self.stores, self.sampling = model, stores, sampling
        self.prompts, self.prompt_ids = prompts, prompt_ids
        self.page_size = page_size
        self.weights_version = model.weights_version
        model.transformer.check_scales()
        for layer, store in enumerate(stores):
            if store.calibrated:
                store.set_scales(model.transformer.layer_scales(layer))
        lengths = [len(prompt) for prompt in prompts]
        config, n = model.config, sampling.n
        limits = new_token_limits(lengths, sampling, config.max_positions, pages.num_pages, page_size)
        self.scheduler = Scheduler(
            lengths,
            limits,
            prompt_ids,
            pages,
            n=n,
            seed=sampling.seed,
            page_size=page_size,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
        )
        self.record = Record(len(prompts) * n)
        self.limits = np.repeat(np.array(limits, np.int64), n)
        self.prompt_tokens = [np.array(prompt, np.int64) for prompt in prompts]
        self.stop = StopStrings(sampling.stop, model.tokenizer, config.vocab_size) if sampling.stop else None
        self.is_eos = np.zeros(config.vocab_size, np.bool_)
        if not sampling.ignore_eos:
            self.is_eos[[token for token in model.tokenizer.eos_ids if token < config.vocab_size]] = True
        self.num_tokens = 0
        self.num_completions = 0
        self.unfinished = np.full(len(prompts), n, np.int64)  # completions of each group
        self._finished: list[int] = []
        self._groups: dict[int, list[Completion]] = {}
        self.routes = None
        if record_routes and config.experts is not None:
            self.routes = RouteRecord(lengths, n, config.num_mixtures, config.experts.per_token)

    @property
    def finished(self) -> bool:
        return self.scheduler.finished

    def step(self) -> None:
        """Compute one batch, draw the tokens it gives, and account for them."""
        assert self.model.weights_version == self.weights_version, "the weights changed while completions were sampled"
        launch, self._ahead = self._ahead, None
        if launch is not None and self.scheduler.rows.count:
            plan = self.scheduler.launched(launch.sequences.size)
        else:  # nothing of a step that was launched ahead, if there was one, goes on
            plan = self.scheduler.plan()
            launch = self._launch(plan)
        if launch is None:
            tokens, logprobs = self._compute(plan)
        else:
            places = launch.places(plan.sampled)
            self._ahead = self._launch_ahead(plan, places)
            tokens, logprobs = launch.read(places)
        done = self._record(plan, tokens, logprobs)
        self.scheduler.commit(plan, tokens, done)
        self._copy_pages(self.scheduler.take_copies())
        self.num_tokens += tokens.size
        self.num_completions += int(np.count_nonzero(done))
        groups, counts = np.unique(plan.sampled[done] // self.sampling.n, return_counts=True)
        self.unfinished[groups] -= counts
        self._finished += groups[self.unfinished[groups] == 0].tolist()

    def take_finished(self) -> list[int]:
        """The groups that have become whole since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def group(self, index: int) -> list[Completion]:
        """The completions of a finished group, samples in order."""
        if index not in self._groups:
            n = self.sampling.n
            self._groups[index] = [self._completion(index * n + sample) for sample in range(n)]
        return self._groups[index]

    def completions(self) -> list[list[Completion]]:
        """One group for each prompt."""
        return [self.group(index) for index in range(len(self.prompts))]

    def _tokens(self, sequence: int, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [start, stop) of a sequence: of its prompt, then of what it has sampled."""
        prompt = self.prompt_tokens[sequence // self.sampling.n]
        sampled = self.record.tokens[sequence, max(start - prompt.size, 0) : max(stop - prompt.size, 0)]
        return np.concatenate([prompt[start:stop], sampled])

    def _compute(self, plan: Plan) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens and log-probabilities of the step's sampled rows."""
        transformer = self.model.transformer
        ops = transformer.ops["rollout"]
        on_host = build(plan, self.scheduler, self._tokens)
        batch = on_host.to(ops.device)
        tape = RouteTape() if self.routes is not None else None
        hidden = transformer.hidden(batch.tokens, batch.layout, self.stores, use="rollout", tape=tape)
        if self.routes is not None and tape is not None:
            self.routes.write(plan, on_host.layout.positions.numpy(), tape.routes().cpu().numpy())
        if not plan.sampled.size:
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        if batch.take is not None:
            hidden = hidden.index_select(0, batch.take)
        weight = transformer.head_weight("rollout")
        tokens, logprobs = draw(hidden, weight, batch.keys, self.sampling, ops, batch.source)
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    def _launch(self, plan: Plan) -> Launch | None:
        """The step as a captured one, where it can be."""
        if self.graphs is None or plan.chunks or self.routes is not None:
            return None
        return self.graphs.launch(self.scheduler.rows, np.arange(plan.decode), self.sampling)

    def _launch_ahead(self, plan: Plan, places: NDArray[np.int64]) -> Launch | None:
        """The step after this one, whose rows stand at `places` of what is under way, unless it takes a decision."""
        going = np.flatnonzero(self.scheduler.generated[plan.sampled] + 1 < self.limits[plan.sampled])
        if self.graphs is None or not self.scheduler.look_ahead(going):
            return None
        return self.graphs.launch(self.scheduler.rows, going, self.sampling, places[going])

    def _record(self, plan: Plan, tokens: NDArray[np.int64], logprobs: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Write the sampled tokens down; which of the sequences end with them?"""
        sequences = plan.sampled
        if not np.isfinite(logprobs).all():
            self.model.transformer.ops["rollout"].raise_faults()  # names the tensor, if it was one
            index = int(sequences[np.flatnonzero(~np.isfinite(logprobs))[0]]) // self.sampling.n
            raise NonFiniteError(f"prompt {index}: the model's logits hold NaN or infinity, so nothing can be sampled")
        column = self.scheduler.generated[sequences]
        self.record.write(sequences, column, tokens, logprobs)
        stopped = self.is_eos[tokens]
        if self.stop is not None:
            for row in self.stop.candidates(tokens).tolist():
                generated = self.record.tokens[sequences[row], : column[row] + 1].tolist()
                prompt = self.prompts[int(sequences[row]) // self.sampling.n]
                stopped[row] |= self.stop.found(prompt, generated)
        done = stopped | (column + 1 >= self.limits[sequences])
        if done.any():
            self.record.reason[sequences[done]] = np.where(stopped[done], STOP, LENGTH)
        return done

    def _copy_pages(self, copies: list[tuple[int, int]]) -> None:
        if not copies:
            return
        source, target = stage(torch.tensor(copies), self.stores[0].k.device).unbind(1)
        for store in self.stores:
            scales = () if store.calibrated else (store.k_scale, store.v_scale)
            for tensor in (store.k, store.v, *scales):
                if tensor is not None:
                    pages = tensor.view(-1, self.page_size, *tensor.shape[1:])
                    pages[target] = pages[source]

    def _completion(self, sequence: int) -> Completion:
        group, sample = divmod(sequence, self.sampling.n)
        count = int(self.scheduler.generated[sequence])
        token_ids = self.record.tokens[sequence, :count].tolist()
        visible = token_ids[:-1] if self.is_eos[token_ids[-1]] else token_ids
        text = self.model.tokenizer.decode_completion(self.prompts[group], visible)
        return Completion(
            prompt_id=self.prompt_ids[group],
            sample_index=sample,
            prompt_token_ids=self.prompts[group],
            token_ids=token_ids,
            text=cut(text, self.sampling.stop),
            logprobs=self.record.logprobs[sequence, :count].tolist(),
            finish_reason=REASONS[int(self.record.reason[sequence])],
            weights_version=self.weights_version,
            routes=encode_routes(self.routes.of(sequence, count)) if self.routes is not None else None,
        )
