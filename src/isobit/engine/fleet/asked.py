"""`FleetEngine`: a fleet as one engine that is asked request by request, for conversations of
several turns.

A turn that goes on is a request whose prompt is all tokens so far; any engine may compute it, since
its bits do not depend on who does. Left out: which engine gets what (`fleet.py`), and what is asked
(`engine/episodes.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from isobit.engine.endings import joined
from isobit.engine.fleet import wire
from isobit.engine.fleet.fleet import Fleet
from isobit.engine.prompts import Prompt, encode_prompt
from isobit.engine.sequences import COUNTS, Stats
from isobit.engine.types import Completion, Request, Sampling


class FleetEngine:
    """A batch of a fleet with the methods of an engine, under the weights that were sent last:
    about `groups` groups of about `completions` completions. Raises as `Fleet.generate`."""

    def __init__(
        self, fleet: Fleet, groups: int, completions: int, note: Callable[[str], None]
    ) -> None:
        self.model = fleet.model
        self._fleet, self._batch = fleet, fleet.begin(groups, completions, note)
        self._open: dict[int, Request] = {}
        self._indices: dict[Request, int] = {}  # of those that are open
        self._before = Stats()

    @property
    def num_open(self) -> int:
        """Requests that have yet to be completed or cancelled."""
        return len(self._open)

    @property
    def stats(self) -> Stats:
        """The statistics since the first request that found none open."""
        pairs = [(name, getattr(self._batch.stats, name)) for name in COUNTS]
        return Stats(**{name: now - getattr(self._before, name) for name, now in pairs})

    @property
    def clamped(self) -> tuple[int, int]:
        """The number of keys and values that a calibrated scale clamped since then, and the number
        written."""
        return self.stats.kv_clamped, self.stats.kv_written

    def submit(
        self,
        prompt: Prompt,
        sampling: Sampling,
        prompt_id: int = 0,
        sample_index: int = 0,
        adapter: str | None = None,
    ) -> Request:
        """Ask for completions, as `Engine.submit`; engines of a fleet have no adapters."""
        assert adapter is None
        vocab_size = self.model.config.vocab_size
        tokens = encode_prompt("the prompt", prompt, self.model.tokenizer, vocab_size)
        return self._ask(Request(tokens, sampling, prompt_id, sample_index))

    def continue_from(
        self, completion: Completion, tokens: Sequence[int], sampling: Sampling
    ) -> Request:
        """Go on from a completion after given tokens, as `Engine.continue_from`."""
        so_far = [*completion.prompt_token_ids, *completion.token_ids, *tokens]
        named = completion.prompt_id, completion.sample_index
        return self._ask(Request(so_far, replace(sampling, n=1), *named, completion))

    def _ask(self, request: Request) -> Request:
        batch, tokens = self._batch, request.prompt_token_ids
        if not self._open:
            self._before = replace(batch.stats)
        index = len(batch.requests)
        named = request.prompt_id, request.sampling, request.sample_index
        batch.requests.append(wire.request(index, tokens, *named))
        batch.stats.prompt_tokens += len(tokens)
        self._open[index], self._indices[request] = request, index
        return request

    def step(self) -> list[tuple[Request, Completion]]:
        """Return the completions that are finished next; empty if that takes a while."""
        if not self._open:
            return []
        finished: list[tuple[Request, Completion]] = []
        for index in self._fleet.advance(self._batch):
            request = self._open.pop(index, None)
            if request is not None:
                del self._indices[request]
                extended = request.extends
                done, self._batch.done[index] = self._batch.done[index], []
                self._batch.requests[index][
                    "prompt"
                ] = []  # a turn's tokens, which nobody asks again
                for completion in done:
                    finished.append(
                        (request, completion if extended is None else joined(extended, completion))
                    )
        return finished

    def cancel(self, request: Request) -> None:
        """Drop a request: engines that have it are told with their next call."""
        if (index := self._indices.pop(request, None)) is not None:
            del self._open[index]
            self._batch.done[index] = []
