"""`Engine`: samples completions from a model, many at a time, over one paged cache of keys and values.

It shares the model's working weights, and its results do not depend on the order of the work: not on the batch, the
order of admission, chunks, preemption, shared pages or the page size. tests/engine/test_invariance.py compares the
bits, and test_consistency.py compares them with the learner's. Between calls it can sleep, which gives the memory of
its cache to whoever learns.

Left out: serving (requests that arrive while others run) and streaming.
"""

from collections.abc import Callable, Sequence

import torch

from isobit.engine.calibration import Calibrator
from isobit.engine.generation import Generation
from isobit.engine.graphs import DecodeGraphs, graph_kind
from isobit.engine.pages import PagePool, pages_needed
from isobit.engine.prompts import Prompt, check_context, check_ids, encode, new_token_limits
from isobit.engine.scheduler import Stats
from isobit.engine.types import Completion, Sampling
from isobit.errors import IsobitError
from isobit.kernels import KVStore
from isobit.model import Model

_CACHE_BYTES = 2 << 30
_GPU_FRACTION = 4  # of the memory that is free
Progress = Callable[[int, int], None]
_DEFAULT = Sampling()
OnGroup = Callable[[int, list[Completion]], None]


class Engine:
    """A rollout engine over `kv_pages` pages of `page_size` tokens, on the device of the model's operators.

    A step computes at most `max_batch_tokens` tokens of at most `max_sequences` sequences. On a GPU, steps of decoding
    sequences only are captured as `cuda_graphs`.
    """

    def __init__(
        self,
        model: Model,
        kv_pages: int = 512,
        page_size: int = 16,
        max_batch_tokens: int = 2048,
        max_sequences: int = 512,
        cuda_graphs: bool = True,
    ) -> None:
        if not isinstance(model, Model):
            raise IsobitError(f"Engine: expected a Model, got {model!r:.80}; open one with Model.load(path)")
        for name, value in (
            ("kv_pages", kv_pages),
            ("page_size", page_size),
            ("max_batch_tokens", max_batch_tokens),
            ("max_sequences", max_sequences),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise IsobitError(f"engine.{name}: expected a whole number, at least 1, got {value!r}")
        self.model = model
        self.page_size = page_size
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.pages = PagePool(kv_pages)
        self._graph_kind = graph_kind(model, cuda_graphs)
        self.graphs: DecodeGraphs | None = None  # made at the first call
        self.stores: list[KVStore] = []
        self.wake()
        self.kv_bytes = sum(store.nbytes for store in self.stores)
        """Bytes of keys and values, scales included, while it is awake."""
        self.stats = Stats()
        self.longest_prompt = 0  # tokens, of the prompts that it was sized for
        self.record_routes = False  # of a mixture of experts, for router replay
        self._generation: Generation | None = None

    def __repr__(self) -> str:
        size = f"{self.pages.num_pages} pages of {self.page_size} tokens, {self.kv_bytes / 2**20:.1f} MiB"
        return f"Engine({self.model!r}, {size})"

    @staticmethod
    def sized_for(
        model: Model,
        prompts: Sequence[Prompt],
        sequences: int,
        max_new_tokens: int,
        *,
        kv_pages: int | None = None,
        page_size: int = 16,
        max_batch_tokens: int = 2048,
        max_sequences: int = 512,
        cuda_graphs: bool = True,
    ) -> "Engine":
        """An engine for any of these prompts, whose cache holds `sequences` of them at their longest without
        preemption, as far as `max_sequences` at a time and 2 GiB, or a quarter of a GPU's free memory, allow; or has
        `kv_pages`.

        Raises IsobitError for a prompt that leaves no room for an answer.
        """
        lengths = [len(ids) for ids in encode(prompts, model.tokenizer, model.config.vocab_size)]
        longest = max(lengths, default=1)
        check_context(lengths, model.config.max_positions)
        limit = min(max_new_tokens, model.config.max_positions - longest)
        each = pages_needed(longest, limit, page_size)
        if kv_pages is None:
            page_bytes = Engine(model, 1, page_size, cuda_graphs=False).kv_bytes
            limit_bytes = _most_cache_bytes(model.transformer.ops["rollout"].device)
            # a prompt is held beside the sequences that share its pages
            kv_pages = max(each, min((min(sequences, max_sequences) + 1) * each, limit_bytes // page_bytes))
        engine = Engine(model, kv_pages, page_size, max_batch_tokens, max_sequences, cuda_graphs)
        new_token_limits(lengths, Sampling(1, max_new_tokens), model.config.max_positions, kv_pages, page_size)
        engine.longest_prompt = longest
        return engine

    @property
    def captures(self) -> bool:
        """Whether decode steps are captured."""
        return self._graph_kind is not None

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of cache, scales included, for one token in all layers: what is allocated over what it holds."""
        return self.kv_bytes / (self._num_pages * self.page_size)

    def sleep(self) -> None:
        """Free the memory of keys and values, and of captured steps, until the next call; between two calls they hold
        nothing that is read again. Captured steps are then captured anew."""
        assert self._generation is None, "an engine cannot sleep while it is at work"
        if self.graphs is not None:
            self.graphs.clear()
        self.stores = []

    def wake(self) -> None:
        """Allocate what `sleep` has freed; `generate` does so by itself."""
        if not self.stores:
            self.stores = [self._allocate(layer) for layer in range(self.model.config.num_layers)]

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling = _DEFAULT,
        prompt_ids: Sequence[int] | None = None,
        progress: Progress | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """Sample `sampling.n` completions for each prompt: one group of completions per prompt, in order.

        A prompt is a text, a list of token ids or a list of chat messages. `prompt_ids` stand for the prompts in the
        sampling keys (default: 0, 1, ...): the same id, prompt and seed give the same completion in any call.
        `progress(tokens, completions)` hears, after every step, how many tokens were sampled and completions finished.
        `on_group(index, completions)` hears of each group once, as soon as its last completion is finished, in whatever
        order that is, while the others are still sampled.

        Raises IsobitError, before anything is computed, for a prompt that can never be answered.
        """
        assert self._generation is None, "generate was called while it was at work"
        if not isinstance(sampling, Sampling):
            raise IsobitError(f"sampling: expected Sampling(n=4, ...), got {sampling!r:.80}")
        config = self.model.config
        token_ids = encode(prompts, self.model.tokenizer, config.vocab_size)
        self.wake()
        self._generation = generation = Generation(
            self.model,
            self.stores,
            self.pages,
            token_ids,
            check_ids(prompt_ids, len(token_ids)),
            sampling,
            page_size=self.page_size,
            max_batch_tokens=self.max_batch_tokens,
            max_sequences=self.max_sequences,
            record_routes=self.record_routes,
            graphs=self._ready_graphs(),
        )
        self.stats = generation.scheduler.stats
        try:
            while not generation.finished:
                generation.step()
                if progress is not None:
                    progress(generation.num_tokens, generation.num_completions)
                if on_group is not None:
                    for index in generation.take_finished():
                        on_group(index, generation.group(index))
            self.model.transformer.ops["rollout"].raise_faults()
            if self.graphs is not None:
                self.graphs.settle()
            return generation.completions()
        finally:
            generation.scheduler.release()
            self._generation = None

    def calibrate(self, prompts: Sequence[Prompt]) -> None:
        """Find the static scales of a calibrated KV cache for the present weights; without one there is nothing to do.

        To be called after every sync: `generate` refuses scales of other weights.
        """
        Calibrator(self.model).calibrate(prompts)

    def cache_metrics(self) -> dict[str, float]:
        """Which part of the keys and values of the last call a calibrated scale clamped; empty without one, and while
        it sleeps."""
        counts = [store.counts for store in self.stores if store.counts is not None]
        if not counts:
            return {}
        saturated, written = torch.stack(counts).sum(0).tolist()
        return {"quant/kv_saturated_fraction": saturated / max(written, 1)}

    def integrity(self) -> None:
        """Prove that every page is either free or held by whom it should be, at any moment. Raises AssertionError."""
        if self._generation is not None:
            self._generation.scheduler.integrity()
        else:
            self.pages.integrity([])

    @property
    def _num_pages(self) -> int:
        """Of the stores: captured steps need a spare one beside the pool's, which padded rows write to."""
        return self.pages.num_pages + self.captures

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

    def _allocate(self, layer: int) -> KVStore:
        config = self.model.config
        flow = self.model.precision.flow("rollout", layer, config.num_layers)
        shape = (self._num_pages * self.page_size, config.num_kv_heads, config.head_dim)
        device = self.model.transformer.ops["rollout"].device
        return KVStore.allocate(*shape, flow.kv, flow.compute, device=device)


def _most_cache_bytes(device: torch.device) -> int:
    """Bytes of keys and values that an engine takes without being told to."""
    return torch.cuda.mem_get_info(device)[0] // _GPU_FRACTION if device.type == "cuda" else _CACHE_BYTES
