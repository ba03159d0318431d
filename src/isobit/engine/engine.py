"""`Engine`: samples completions from a model, many at a time, over one paged cache of keys and
values.

It shares the model's working weights, and its results do not depend on the order of the work: not
on the batch, the order of arrival, chunks, preemption, shared pages or the page size.
tests/engine/test_invariance.py compares the bits, and test_consistency.py compares them with the
learner's. While no request is open it can sleep, which frees the memory of its cache for a learner.

Requests arrive at any time, each with its settings (`submit`), are computed step by step (`step`),
and may be cancelled. `generate` is a loop over these. A completion keeps nothing in the engine:
`continue_from` and `resume` go on from its tokens, whose pages the prefix cache still has unless
other sequences needed them, or the weights have changed.
"""

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from isobit.engine.calibration import Calibrator
from isobit.engine.captured import graph_kind
from isobit.engine.endings import Endings, OnToken
from isobit.engine.graphs import DecodeGraphs
from isobit.engine.groups import OpenGroups
from isobit.engine.integrity import integrity
from isobit.engine.pages import (
    DEFAULT_PAGES,
    PagePool,
    cache_pages,
    most_cache_bytes,
    pages_needed,
    tokens_of_a_page,
)
from isobit.engine.prompts import (
    Prompt,
    check_context,
    check_id,
    check_ids,
    check_sampling,
    encode,
    encode_prompt,
    new_token_limit,
)
from isobit.engine.routes import RouteStore
from isobit.engine.runner import Runner
from isobit.engine.scheduler import Scheduler
from isobit.engine.sequences import Stats, clamped_fraction
from isobit.engine.speculation import speculation_of
from isobit.engine.types import Completion, EngineSize, Request, Sampling
from isobit.errors import IsobitError
from isobit.kernels import Store
from isobit.model import Model
from isobit.model.forward.storage import new_store
from isobit.options.declare import plain
from isobit.options.reading import read

Progress = Callable[[int, int], None]
_DEFAULT, _DEFAULT_SIZE = Sampling(), EngineSize()
OnGroup = Callable[[int, list[Completion]], None]


class Engine:
    """A rollout engine of a `size`, on the model's device: over `kv_pages` pages of `page_size`
    tokens (`tokens_of_a_page`), of which there are 512 where the size says nothing.

    A step computes at most `max_batch_tokens` tokens of at most `max_sequences` sequences. With
    `cuda_graphs` what decodes in it is captured. With `prefix_cache` requests share full pages of
    equal beginnings, also of requests that have ended, while the weights stay the same.
    """

    def __init__(
        self,
        model: Model,
        size: EngineSize = _DEFAULT_SIZE,
        *,
        record_routes: bool = False,
        **given: Any,
    ) -> None:
        """`given`: fields of `EngineSize` by name, over those of `size`, as in `Engine(model,
        kv_pages=64)`; `record_routes`: which experts served each token, for a learner that uses
        them again. Raises IsobitError for a field that is unknown or out of range."""
        if not isinstance(model, Model):
            raise IsobitError(
                f"Engine: expected a Model, got {model!r:.80}; open one with Model.load(path)"
            )
        if not isinstance(size, EngineSize):
            raise IsobitError(
                f"Engine: expected its size by name, as in kv_pages=512, got {size!r:.80}"
            )
        size = read(type(size), {**plain(size), **given}, ("engine",))
        page_size = tokens_of_a_page(model.config, size.page_size)
        self.model = model
        self.page_size = page_size
        self.max_batch_tokens = size.max_batch_tokens
        self.max_sequences = size.max_sequences
        parts = model.config.linear is None
        self.pages = PagePool(size.kv_pages or DEFAULT_PAGES, page_size, parts=parts)
        self.scheduler = Scheduler(
            self.pages,
            max_batch_tokens=size.max_batch_tokens,
            max_sequences=size.max_sequences,
            prefix_cache=size.prefix_cache,
            speculation=speculation_of(model, size),
        )
        self.longest_prompt = 0  # tokens, of the prompts that it was sized for
        self.record_routes = record_routes
        self._graph_kind = graph_kind(model, size.cuda_graphs)
        self.graphs: DecodeGraphs | None = None  # made with the first request
        self.stores: list[Store] = []
        self._routes: RouteStore | None = None
        self._runner: Runner | None = None  # while a request is open
        self._endings = Endings(model, self.scheduler)
        self.wake()
        self.kv_bytes = sum(store.nbytes for store in self.stores)
        """Bytes of keys and values, scales included, while it is awake."""

    def __repr__(self) -> str:
        size = (
            f"{self.pages.num_pages} pages of {self.page_size} tokens, "
            f"{self.kv_bytes / 2**20:.1f} MiB"
        )
        return f"Engine({self.model!r}, {size})"

    @staticmethod
    def sized_for(
        model: Model,
        prompts: Sequence[Prompt],
        sequences: int,
        max_new_tokens: int,
        size: EngineSize = _DEFAULT_SIZE,
        reserved: int = 0,
        record_routes: bool = False,
    ) -> "Engine":
        """Make an engine for any of these prompts, whose cache holds `sequences` of them at their
        longest without preemption, as far as `size.max_sequences` at a time and 2 GiB, or a third
        of a GPU's free memory, allow; or has `size.kv_pages`. `reserved`: bytes of the GPU that are
        free now and will be held by others, a learner's moments and gradients. Raises IsobitError
        for a prompt that leaves no room for an answer."""
        lengths = [len(ids) for ids in encode(prompts, model.tokenizer, model.num_ids)]
        longest, positions = max(lengths, default=1), model.config.max_positions
        for index, length in enumerate(lengths):
            check_context(f"prompt {index}", length, positions)
        limit = min(max_new_tokens, positions - longest)
        page_size = tokens_of_a_page(model.config, size.page_size)
        each = pages_needed(longest, limit, page_size)
        kv_pages = size.kv_pages
        if kv_pages is None:
            page_bytes = Engine(model, kv_pages=1, page_size=page_size, cuda_graphs=False).kv_bytes
            limit_bytes = most_cache_bytes(model.transformer.ops["rollout"].device, reserved)
            kv_pages = cache_pages(each, sequences, size.max_sequences, limit_bytes, page_bytes)
            # schedules would part where one rank has fewer
            kv_pages = min(model.transformer.group.all_gather_json(kv_pages))
        engine = Engine(
            model, size, kv_pages=kv_pages, page_size=page_size, record_routes=record_routes
        )
        for index, length in enumerate(lengths):
            new_token_limit(f"prompt {index}", length, max_new_tokens, positions, engine.pages)
        engine.longest_prompt = longest
        return engine

    @property
    def captures(self) -> bool:
        """Whether decode steps are captured."""
        return self._graph_kind is not None

    @property
    def kv_bytes_per_token(self) -> float:
        """The bytes of cache, scales included, for one token in all layers: allocated bytes over
        tokens."""
        return self.kv_bytes / (self._num_pages * self.page_size)

    @property
    def num_open(self) -> int:
        """The number of requests that have yet to be completed or cancelled."""
        return len(self.scheduler.requests)

    @property
    def stats(self) -> Stats:
        """The counts of what was done since the first request that arrived while none was open."""
        return self.scheduler.stats

    def sleep(self) -> None:
        """Free the memory of keys and values, and that of captured steps, until the next request:
        they are not read again, and steps are captured anew. Raises IsobitError while requests are
        open."""
        if self.num_open:
            raise IsobitError(
                f"Engine.sleep: {self.num_open} requests are open; finish or cancel them first"
            )
        if self.graphs is not None:
            self.graphs.clear()
        self.pages.forget()
        self.stores, self._routes = [], None

    def wake(self) -> None:
        """Allocate what `sleep` has freed; the next request does so by itself."""
        if not self.stores:
            self.stores = [self._allocate(layer) for layer in range(self.model.config.num_stores)]

    def submit(
        self,
        prompt: Prompt,
        sampling: Sampling = _DEFAULT,
        prompt_id: int = 0,
        sample_index: int = 0,
        adapter: str | None = None,
        salt: Hashable = None,
    ) -> Request:
        """Ask for `sampling.n` completions of a prompt, while others run or not; by an `adapter`
        that the model serves (`Model.serving`), by default by the base alone. Requests of one
        `salt` share pages of the prefix cache: those of another cannot tell what was asked.

        The same (prompt, sampling, prompt_id, sample_index) gives the same completions whatever
        else runs: token t of the prompt and what follows it, in sample s, is drawn with the random
        numbers of (seed, prompt_id, sample_index + s, t). Raises IsobitError for a prompt that can
        never be answered.
        """
        check_sampling(sampling)
        token_ids = self._encoded(prompt)
        check_id("prompt_id", prompt_id)
        check_id("sample_index", sample_index)
        named = self._known(adapter)
        numbers = prompt_id, sample_index
        return self._submit(Request(token_ids, sampling, *numbers, None, named, salt=salt))

    def continue_from(
        self, completion: Completion, tokens: Sequence[int], sampling: Sampling = _DEFAULT
    ) -> Request:
        """Continue a completion after given `tokens`: a tool's answer, a user's next turn, or none.

        What is sampled has the bits of `submit` with all tokens so far as the prompt, and the
        completion's prompt id and sample index: keys and values are found in the prefix cache or
        computed again. One sample goes on, so `sampling.n` has no meaning. Raises IsobitError if
        the weights have changed since, or nothing can follow.
        """
        check_sampling(sampling)
        version = self.model.weights_version
        if completion.weights_version != version:
            raise IsobitError(
                f"Engine.continue_from: the completion is of version {completion.weights_version} "
                f"of the weights, which are at version {version}: a completion has one version; "
                "submit its tokens as a prompt"
            )
        if isinstance(tokens, str):
            raise IsobitError(
                "Engine.continue_from: expected token ids, got a text; encode it with the "
                "model's tokenizer"
            )
        return self._go_on(completion, tokens, sampling, inside=False)

    def resume(self, completion: Completion, sampling: Sampling = _DEFAULT) -> Request:
        """Continue an answer that its length limit has interrupted, under the present weights,
        which may be newer than those that began it: at most `sampling.max_new_tokens` more tokens.

        Keys and values of other weights are computed again. Text and stop strings are of the whole
        answer. Under the same weights it is what is sampled at once
        (tests/engine/test_resuming.py). Raises IsobitError for a completion that has ended.
        """
        check_sampling(sampling)
        if completion.finish_reason != "length" or completion.completion_mask or completion.forks:
            raise IsobitError(
                "Engine.resume: expected an answer of one turn that its length limit interrupted, "
                f"got one whose finish_reason is {completion.finish_reason!r}"
            )
        return self._go_on(completion, (), sampling, inside=True)

    def extend(
        self, completion: Completion, tokens: Sequence[int], sampling: Sampling = _DEFAULT
    ) -> Request:
        """Call `continue_from`, whose name this was until 0.2."""
        warnings.warn(
            "Engine.extend is called Engine.continue_from now", FutureWarning, stacklevel=2
        )
        return self.continue_from(completion, tokens, sampling)

    @torch.no_grad()
    def step(self, on_token: OnToken | None = None) -> list[tuple[Request, Completion]]:
        """Compute one batch of the open requests, and return the completions that ended with it,
        each with its request. `on_token` is called with every token that was sampled, those of the
        completions included.

        Raises IsobitError if the weights have changed since the oldest open request arrived.
        """
        if self._runner is None:
            return []
        if self._root() != self.scheduler.root:
            raise IsobitError(
                f"Engine.step: the weights changed while {self.num_open} requests are open; finish "
                "or cancel them before Model.sync and Engine.calibrate"
            )
        finished: list[tuple[Request, Completion]] = []
        self.scheduler.begun.clear()
        for plan, tokens in self._runner.steps():
            self._endings.report(plan, tokens, on_token)
            done, over = self._endings.of(plan, tokens, self._runner.routes)
            self.scheduler.commit(plan, tokens, done)
            self._runner.copy_pages(self.scheduler.take_copies())
            finished += over
        if not self.num_open:
            self._runner.finish()
            self._runner = None
        return finished

    def cancel(self, request: Request) -> None:
        """Drop a request, with what is done of it. A request that is over is not changed."""
        if request in self.scheduler.requests:
            self.scheduler.cancel(request)
        if not self.num_open:
            self._runner = None

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling = _DEFAULT,
        prompt_ids: Sequence[int] | None = None,
        progress: Progress | None = None,
        on_group: OnGroup | None = None,
        adapters: Sequence[str | None] | None = None,
    ) -> list[list[Completion]]:
        """Sample `sampling.n` completions for each prompt: one group of completions per prompt, in
        order.

        A prompt is a text, a list of token ids or a list of chat messages. `prompt_ids` stand for
        the prompts in the sampling keys (default: 0, 1, ...): the same id, prompt and seed give the
        same completion in any call. `progress(tokens, completions)` is called after every step with
        how many tokens were sampled and completions finished; `on_group(index, completions)` once
        for each group, as soon as its last completion is finished, in whatever order that is, while
        the others are still sampled. `adapters`: of each prompt, as in `submit`.

        Raises IsobitError, before anything is computed, for a prompt that can never be answered.
        """
        if self.num_open:
            raise IsobitError(
                f"Engine.generate: {self.num_open} requests are open; finish or cancel them first"
            )
        check_sampling(sampling)
        token_ids = encode(prompts, self.model.tokenizer, self.model.num_ids)
        ids = check_ids(prompt_ids, len(token_ids))
        if adapters is not None and len(adapters) != len(token_ids):
            raise IsobitError(
                f"adapters: expected one for each of {len(token_ids)} prompts, got {len(adapters)}"
            )
        named = [self._known(name) for name in adapters or [None] * len(token_ids)]
        groups: list[list[Completion]] = [[] for _ in token_ids]
        with OpenGroups(self) as gathering:
            for index, (tokens, prompt_id, name) in enumerate(zip(token_ids, ids, named)):
                request = Request(tokens, sampling, prompt_id, 0, None, name)
                gathering.add(index, self._submit(request, f"prompt {index}"))
            while gathering:
                finished = gathering.step()
                if progress is not None:
                    progress(self.stats.sampled_tokens, gathering.completed)
                for index, group in finished:
                    groups[index] = group
                    if on_group is not None:
                        on_group(index, group)
        return groups

    def calibrate(self, prompts: Sequence[Prompt]) -> None:
        """Find the static scales of a calibrated KV cache for the present weights; without such a
        cache there is nothing to do.

        To be called after every sync: requests with scales of other weights are refused.
        """
        Calibrator(self.model).calibrate(prompts)

    def cache_metrics(self) -> dict[str, float]:
        """Compute the fraction of the keys and values of the last call that a calibrated scale
        clamped; empty without such a scale, and while the engine sleeps."""
        return clamped_fraction(*self.clamped)

    @property
    def clamped(self) -> tuple[int, int]:
        """(keys and values of the last call that a calibrated scale clamped, all of its keys and
        values); zeros without such a scale, and while the engine sleeps."""
        counts = [store.counts for store in self.stores if store.counts is not None]
        if not counts:
            return 0, 0
        saturated, written = torch.stack(counts).sum(0).tolist()
        return saturated, written

    def integrity(self) -> None:
        """Prove that every page is free, or held by sequences that use it. Raises
        AssertionError."""
        integrity(self.scheduler)

    def _known(self, adapter: str | None) -> str | None:
        """Return the name of an adapter. Raises IsobitError for one that the model does not
        serve."""
        served = self.model.transformer.served
        if adapter is None or (served is not None and adapter in served.names):
            return adapter
        known = (
            ", ".join(served.names if served is not None else ())
            or "none; Model.serving opens it with some"
        )
        raise IsobitError(f"adapter: {adapter!r} is not served by this model; it serves {known}")

    def _go_on(
        self, before: Completion, tokens: Sequence[int], sampling: Sampling, *, inside: bool
    ) -> Request:
        """Submit a request that follows a completion and given tokens; `inside` its own answer."""
        so_far = self._encoded([*before.prompt_token_ids, *before.token_ids, *tokens])
        one, adapter = replace(sampling, n=1), self._known(before.adapter)
        numbers = before.prompt_id, before.sample_index
        return self._submit(Request(so_far, one, *numbers, before, adapter, inside))

    def _encoded(self, prompt: Prompt) -> list[int]:
        model = self.model
        return encode_prompt("the prompt", prompt, model.tokenizer, model.num_ids)

    def _submit(self, request: Request, where: str = "the prompt") -> Request:
        sampling, positions = request.sampling, self.model.config.max_positions
        if (images := self.model.transformer.images) is not None:
            images.check(where, request.prompt_token_ids)
            if sampling.repetition_penalty != 1 and images.are_in(request.prompt_token_ids):
                raise IsobitError(
                    f"{where}: repetition_penalty is not supported with images; expected 1"
                )
        limit = new_token_limit(
            where, len(request.prompt_token_ids), sampling.max_new_tokens, positions, self.pages
        )
        if self._runner is None:
            self._begin()
        self.scheduler.add(request, limit, self._endings.stop_strings(sampling.stop), where)
        return request

    def _begin(self) -> None:
        """Prepare the engine for the first request after none was open."""
        self.model.transformer.check_scales()
        self.wake()
        self.scheduler.begin(self._root())
        self.scheduler.images = self.model.transformer.images
        self._runner = Runner(
            self.model, self.scheduler, self.stores, self._ready_graphs(), self._ready_routes()
        )

    def _root(self) -> Hashable:
        """Return what keys and values depend on besides the tokens. An engine has one flow."""
        scales = self.model.transformer.kv_scales
        values = None if scales is None else scales.values.numpy().tobytes()
        return self.model.weights_version, values, self.record_routes

    def _ready_routes(self) -> RouteStore | None:
        config = self.model.config
        if not self.record_routes or config.routed is None:
            return None
        if self._routes is None:
            shape = (
                self.pages.num_pages,
                self.page_size,
                config.num_mixtures,
                config.routed.per_token,
            )
            self._routes = RouteStore(*shape)
        return self._routes

    @property
    def _num_pages(self) -> int:
        """The pages of the stores: padded rows write to a spare one next to the pool's."""
        return self.pages.num_pages + getattr(self._graph_kind, "asynchronous", False)

    def _ready_graphs(self) -> DecodeGraphs | None:
        if self._graph_kind is None:
            return None
        if self.graphs is None:
            self.graphs = DecodeGraphs(
                self.model,
                self._graph_kind,
                page_size=self.page_size,
                max_rows=min(self.max_sequences, self.max_batch_tokens),
                longest=min(self.model.config.max_positions, self.pages.num_pages * self.page_size),
                spare_page=self.pages.num_pages,
            )
        self.graphs.begin(self.stores)
        return self.graphs

    def _allocate(self, layer: int) -> Store:
        config = self.model.config
        flow = self.model.precision.flow("rollout", layer, config.num_layers)
        device = self.model.transformer.ops["rollout"].device
        return new_store(config, layer, flow, self._num_pages, self.page_size, device, flow.kv)
