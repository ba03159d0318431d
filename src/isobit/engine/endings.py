"""Which sequences end with the token that they have just drawn, and what they have become:
completions."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from isobit.engine.routes import RouteStore
from isobit.engine.scheduler import Scheduler
from isobit.engine.sequences import Sequence, StepPlan
from isobit.engine.stopping import StopStrings
from isobit.engine.types import Completion, Request, Top
from isobit.model import Model
from isobit.model.forward.moe import encode_routes

_KEPT_STOPS = 64
OnToken = Callable[[Request, int, int, float, Top], None]
"""Called with a request, a sample index, the token that was sampled, its log-probability, and the
likeliest tokens where the request asks for them."""


class Endings:
    """Ends the sequences of a scheduler: end-of-sequence tokens, stop strings, length."""

    def __init__(self, model: Model, scheduler: Scheduler) -> None:
        self._model, self._scheduler, size = model, scheduler, model.config.vocab_size
        self._is_eos = np.zeros(size, np.bool_)
        self._is_eos[[token for token in model.tokenizer.eos_ids if token < size]] = True
        self._stops = lru_cache(_KEPT_STOPS)(lambda stop: StopStrings(stop, model.tokenizer, size))

    def stop_strings(self, stop: tuple[str, ...]) -> StopStrings | None:
        """Return a finder of these stop strings; None without any."""
        return self._stops(stop) if stop else None

    def report(self, plan: StepPlan, tokens: NDArray[np.int64], on_token: OnToken | None) -> None:
        """Call `on_token`, if there is one, for the tokens of a step, whose log-probabilities the
        record has."""
        if on_token is None:
            return
        record, slots = self._scheduler.record, plan.sampled
        logprobs = record.logprobs[slots, record.generated[slots]]
        for slot, token, logprob in zip(slots.tolist(), tokens.tolist(), logprobs.tolist()):
            sequence = self._scheduler.at[slot]
            top = record.top[slot][-1] if slot in record.top else []
            on_token(sequence.owner.request, sequence.sample_index, token, logprob, top)

    def of(
        self, plan: StepPlan, tokens: NDArray[np.int64], routes: RouteStore | None
    ) -> tuple[NDArray[np.bool_], list[tuple[Request, Completion]]]:
        """Return (mask over `plan.sampled` of the sequences that finish with these tokens, the
        completed requests with their completions). The tokens are in the record already."""
        record, slots = self._scheduler.record, plan.sampled
        count = record.generated[slots] + 1
        stopped = self._is_eos[tokens] & record.ends[slots]
        for row in record.watched[slots].nonzero()[0].tolist():
            stopped[row] |= self._found(
                self._scheduler.at[int(slots[row])], int(tokens[row]), int(count[row])
            )
        done = stopped | (count >= record.limit[slots])
        finished = []
        for row in done.nonzero()[0].tolist():
            sequence = self._scheduler.at[int(slots[row])]
            pages = sequence.pages or plan.parent_pages(sequence)
            reason = "stop" if stopped[row] else "length"
            completion = self._completion(sequence, int(count[row]), reason, pages, routes)
            finished.append((sequence.owner.request, completion))
        return done, finished

    def _found(self, sequence: Sequence, token: int, count: int) -> bool:
        running, record = sequence.owner, self._scheduler.record
        if token in running.request.sampling.stop_tokens:
            return True
        if running.stop is None or not running.stop.may_end(token):
            return False
        request, sampled = running.request, record.tokens[sequence.slot, :count].tolist()
        return running.stop.found(request.asked, [*request.answered, *sampled])

    def _completion(
        self,
        sequence: Sequence,
        count: int,
        reason: str,
        pages: list[int],
        routes: RouteStore | None,
    ) -> Completion:
        request, record = sequence.owner.request, self._scheduler.record
        token_ids = record.tokens[sequence.slot, :count].tolist()
        ended = record.ends[sequence.slot] and self._is_eos[token_ids[-1]]
        visible = (
            token_ids[:-1] if ended or token_ids[-1] in request.sampling.stop_tokens else token_ids
        )
        prompt, answered = request.asked, request.answered
        text = self._model.tokenizer.decode_completion(prompt, [*answered, *visible])
        if (stop := sequence.owner.stop) is not None:
            text = stop.cut(prompt, [*answered, *token_ids], text)
        computed = len(request.prompt_token_ids) + count - 1  # the last token was only drawn
        completion = Completion(
            prompt_id=request.prompt_id,
            sample_index=sequence.sample_index,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=token_ids,
            text=text,
            logprobs=record.logprobs[sequence.slot, :count].tolist(),
            finish_reason=reason,
            weights_version=self._model.weights_version,
            routes=None if routes is None else encode_routes(routes.of(pages, computed)),
            adapter=request.adapter,
            top_logprobs=record.top.get(sequence.slot, [])
            if request.sampling.top_logprobs
            else None,
        )
        return completion if request.extends is None else joined(request.extends, completion)


def joined(earlier: Completion, turn: Completion) -> Completion:
    """Join a completion and the next turn, whose prompt begins with all of it, into one completion
    of the first prompt. Tokens between the two are marked as not sampled."""
    between = turn.prompt_token_ids[len(earlier.prompt_token_ids) + len(earlier.token_ids) :]
    mask = [*earlier.sampled, *[False] * len(between), *turn.sampled]
    return replace(
        turn,
        prompt_token_ids=earlier.prompt_token_ids,
        token_ids=[*earlier.token_ids, *between, *turn.token_ids],
        logprobs=[*earlier.logprobs, *[0.0] * len(between), *turn.logprobs],
        top_logprobs=_joined_top(earlier, len(between), turn),
        completion_mask=None if all(mask) else mask,
    )


def forked(earlier: Completion, turn: Completion) -> Completion:
    """Join a completion and a turn in a new context into one completion of the first prompt; the
    tokens of the turn's prompt are marked as not sampled."""
    prompt = turn.prompt_token_ids
    return replace(
        turn,
        sample_index=earlier.sample_index,
        prompt_token_ids=earlier.prompt_token_ids,
        token_ids=[*earlier.token_ids, *prompt, *turn.token_ids],
        logprobs=[*earlier.logprobs, *[0.0] * len(prompt), *turn.logprobs],
        top_logprobs=_joined_top(earlier, len(prompt), turn),
        completion_mask=[*earlier.sampled, *[False] * len(prompt), *turn.sampled],
        routes=None,
        forks=(*earlier.forks, len(earlier.token_ids)),
    )


def _joined_top(earlier: Completion, between: int, turn: Completion) -> list[Top] | None:
    """Return the likeliest tokens of both turns; empty lists for the `between` tokens in the middle
    and for a turn that did not ask for them."""
    if earlier.top_logprobs is None and turn.top_logprobs is None:
        return None

    def known(of: Completion) -> list[Top]:
        return [[] for _ in of.token_ids] if of.top_logprobs is None else of.top_logprobs

    return [*known(earlier), *[[] for _ in range(between)], *known(turn)]
