"""`Engine`: samples completions from a model, many at a time, over one paged cache of keys and values.

It shares the model's working weights, and its results do not depend on the order of the work: not on the batch, the
order of admission, chunks, preemption, shared pages or the page size (tests/engine/test_engine.py compares the bits).
Left out: serving (requests that arrive while others run) and streaming.
"""

from collections.abc import Callable, Sequence

import torch

from isobit.engine.generation import Generation
from isobit.engine.pages import PagePool
from isobit.engine.prompts import Prompt, check_ids, encode
from isobit.engine.scheduler import Stats
from isobit.engine.types import Completion, Sampling
from isobit.errors import IsobitError
from isobit.kernels import KVStore
from isobit.model import Model

Progress = Callable[[int, int], None]


class Engine:
    """A rollout engine over `kv_pages` pages of `page_size` tokens, allocated once.

    A step computes at most `max_batch_tokens` tokens of at most `max_sequences` sequences.
    """

    def __init__(
        self,
        model: Model,
        kv_pages: int = 512,
        page_size: int = 16,
        max_batch_tokens: int = 2048,
        max_sequences: int = 512,
    ) -> None:
        for name, value in (
            ("kv_pages", kv_pages),
            ("page_size", page_size),
            ("max_batch_tokens", max_batch_tokens),
            ("max_sequences", max_sequences),
        ):
            if not isinstance(value, int) or value < 1:
                raise IsobitError(f"engine.{name}: expected a whole number, at least 1, got {value!r}")
        self.model = model
        self.page_size = page_size
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.pages = PagePool(kv_pages)
        self.stores = [self._allocate(layer) for layer in range(model.config.num_layers)]
        self.stats = Stats()
        self._generation: Generation | None = None

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of cache, scales included, for one token in all layers: what is allocated over what it holds."""
        return sum(store.nbytes for store in self.stores) / (self.pages.num_pages * self.page_size)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        prompt_ids: Sequence[int] | None = None,
        progress: Progress | None = None,
    ) -> list[list[Completion]]:
        """Sample `sampling.n` completions for each prompt: one group of completions per prompt, in order.

        A prompt is a text, a list of token ids or a list of chat messages. `prompt_ids` stand for the prompts in the
        sampling keys (default: 0, 1, ...): the same id, prompt and seed give the same completion in any call.
        `progress(tokens, completions)` hears, after every step, how many tokens were sampled and completions finished.

        Raises IsobitError, before anything is computed, for a prompt that can never be answered.
        """
        assert self._generation is None, "generate was called while it was at work"
        config = self.model.config
        token_ids = encode(prompts, self.model.tokenizer, config.vocab_size)
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
        )
        self.stats = generation.scheduler.stats
        try:
            while not generation.finished:
                generation.step()
                if progress is not None:
                    progress(generation.num_tokens, generation.num_completions)
            return generation.completions()
        finally:
            generation.scheduler.release()
            self._generation = None

    def integrity(self) -> None:
        """Prove that every page is either free or held by whom it should be, at any moment. Raises AssertionError."""
        if self._generation is not None:
            self._generation.scheduler.integrity()
        else:
            self.pages.integrity([])

    def _allocate(self, layer: int) -> KVStore:
        config = self.model.config
        flow = self.model.precision.flow("rollout", layer, config.num_layers)
        slots = self.pages.num_pages * self.page_size
        return KVStore.allocate(slots, config.num_kv_heads, config.head_dim, flow.kv, flow.compute)
