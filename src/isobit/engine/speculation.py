"""Speculation without a draft model: which tokens a step computes beyond the next one of a
sequence, because what was said before makes them likely.

Drafts come of the texts of a prompt (`continuations.py`): its own, completions of its other
samples, done or under way, and those of earlier epochs. A draft is one more row of the step, and
every row is sampled from. A draft counts if and only if it is the token that is sampled in its
place; what comes after one that does not count is dropped. As the bits of a row depend neither on
its batch nor on the rows next to it, tokens and log-probabilities are those of decoding one token
after the other, whatever is drafted: tests/engine/test_speculation.py compares. Only speed depends
on what is decided here, and no clock is read, so a run that is repeated drafts the same.

A row costs less than a step: a step of R rows takes as long as `FIXED_ROWS` + R of its rows would
without what a step costs in any case, and a draft takes `DRAFT_ROWS`, since it is looked for. So it
pays where it counts more often than DRAFT_ROWS * R / (FIXED_ROWS + R). How often it does is known
of guesses of its kind, also of some that were not drafted: the sampled token says whether they were
right.

Left out: models whose layers keep states that a row overwrites (linear attention), and flows in
which a row's bits depend on its batch. Where there are drafts no step is launched ahead of its
tokens.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from isobit.engine.continuations import NUM_KINDS, ORDERS, Continuations, Guess
from isobit.engine.record import Record
from isobit.engine.sequences import Sequence
from isobit.engine.types import EngineSize
from isobit.model import Model, ModelConfig
from isobit.precision import Precision

FIXED_ROWS = 4
DRAFT_ROWS = 1.3
MOST_DRAFTED = 16
"""The most tokens drafted for one sequence in one step, where their number is not given."""
MOST_ROWS = int(FIXED_ROWS / (DRAFT_ROWS - 1))
"""A step with more rows than this drafts nothing by itself: what is always right would not pay."""
KEPT_TEXTS = 32
"""The number of texts that are kept of a prompt, the newest."""
KEPT_TOKENS, INDEXED_TOKENS = 2**22, 2**19
"""Of the texts of all prompts, and of those that are counted in an index, which takes about 1 KB
for a token. The least recently used prompts go first."""
LONGEST = max(ORDERS)
_OF_A_PROMPT = 256  # tokens of 4 bytes: its hash, and the objects that hold its texts
_REMEMBERED = 256
_PATIENCE, _PAUSE = 128, 15
_LOOKED_AT = 8  # one of these many guesses that do not pay is made, to know how often it is right
Tokens = NDArray[np.int32]


def cannot_speculate(config: ModelConfig, precision: Precision, consistency: str) -> str | None:
    """Return why a model decodes one token after the other in any case; None where it need not."""
    if config.linear is not None:
        return "layers with linear attention keep a state that a draft would overwrite"
    varies = not precision.shared or precision.varies_with_batch() is not None
    if consistency == "fast" or varies:
        return "under this precision or consistency a row's bits depend on its batch"
    return None


@dataclass(eq=False)
class _Texts:
    """The completions of one prompt, each with the position where its own tokens begin, and an
    index over all of them while a sequence needs it."""

    said: deque[tuple[Tokens, int]] = field(default_factory=lambda: deque(maxlen=KEPT_TEXTS))
    index: Continuations | None = None

    @property
    def size(self) -> int:
        """The size in tokens, with what the prompt takes by itself."""
        return _OF_A_PROMPT + sum(text.size for text, _ in self.said)


@dataclass(eq=False)
class _Followed:
    """A sequence under way: its first `seen` tokens are in `index`, and `expected` are guesses of
    what comes behind these."""

    of: _Texts
    index: Continuations | None = None
    seen: int = 0
    expected: list[Guess] = field(default_factory=list)


def speculation_of(model: Model, size: EngineSize) -> "Speculation | None":
    """Return the drafts of an engine, where they are asked for and the model may have them, else
    None. On a GPU steps are launched ahead of their tokens, and drafts cannot be; whether they pay
    there has not been measured, so `auto` makes none."""
    most = size.num_speculative_tokens
    unmeasured = most == "auto" and model.transformer.ops["rollout"].device.type == "cuda"
    cannot = cannot_speculate(model.config, model.precision, model.ops.consistency)
    return None if most == 0 or unmeasured or cannot is not None else Speculation(most)


class Speculation:
    """Drafts for the sequences of an engine: up to `most` tokens each, or as many as pay."""

    def __init__(self, most: int | Literal["auto"]) -> None:
        self._auto = most == "auto"
        self._most = MOST_DRAFTED if most == "auto" else most
        self._texts: OrderedDict[bytes, _Texts] = OrderedDict()  # the least recently used first
        self._kept = self._indexed = 0  # tokens
        self._followed: dict[Sequence, _Followed] = {}
        self._tried, self._right = [2.0] * NUM_KINDS, [1.0] * NUM_KINDS
        self._passed = [0] * NUM_KINDS  # guesses that would not have paid
        self._idle = self._pause = 0

    def looks(self, rows: int) -> bool:
        """Return whether a step of `rows` rows looks for drafts. Where none has paid for a while,
        one step of sixteen does."""
        if not self._auto:
            return True
        if rows > MOST_ROWS or self._pause:
            self._pause = max(self._pause - 1, 0)
            return False
        self._pause = _PAUSE if self._idle >= _PATIENCE else 0
        return True

    def draft(self, sequence: Sequence, record: Record, room: int, rows: int) -> list[int]:
        """Return at most `room` tokens that may follow a decoding sequence, in a step that computes
        `rows` rows already."""
        followed, request = self._follow(sequence, record), sequence.owner.request
        assert followed.index is not None
        key = (request.sampling.seed, request.prompt_id, sequence.sample_index)
        tail = _tokens(sequence, record, max(followed.seen - LONGEST, 0))
        drafted, most, likely = list[int](), min(room, self._most), 1.0
        pays = True

        def worth(kind: int) -> bool:
            nonlocal likely, pays
            likely *= self._right[kind] / self._tried[kind]
            computed = rows + len(drafted)
            pays = not self._auto or likely * (FIXED_ROWS + computed) >= DRAFT_ROWS * computed
            self._passed[kind] = 0 if pays else (self._passed[kind] + 1) % _LOOKED_AT
            return pays or not self._passed[kind]

        greedy, position = request.sampling.greedy, followed.seen
        for guess in followed.index.guesses(tail, key, greedy, position, worth):
            followed.expected.append(guess)
            if not pays:
                break
            drafted.append(guess.token)
            if len(drafted) == most:
                break
        self._idle = 0 if drafted else self._idle + 1
        return drafted

    def finish(self, sequence: Sequence, record: Record) -> None:
        """Keep the tokens of a sequence that has ended; later sequences may repeat them."""
        followed = self._followed.pop(sequence, None)
        if not record.generated[sequence.slot]:
            return
        texts, known = self._of(sequence), _known(sequence)
        text = np.array(_tokens(sequence, record, max(known - LONGEST, 0)))
        if texts.index is not None:
            same = followed is not None and followed.index is texts.index
            seen = followed.seen if followed is not None and same else known
            self._count(texts.index, _tokens(sequence, record, max(seen - LONGEST, 0)), seen)
        earlier_size = texts.size
        texts.said.append((text, min(known, LONGEST)))
        self._kept += texts.size - earlier_size
        while self._kept > KEPT_TOKENS and len(self._texts) > 1:
            _, oldest = self._texts.popitem(last=False)
            self._kept -= oldest.size
            self._forget_index(oldest)

    def _of(self, sequence: Sequence) -> _Texts:
        """Return the texts of a sequence's first prompt."""
        # a hash: whole prompts would be kept as long as their texts, and are much longer
        key = sha256(_first_prompt(sequence).tobytes()).digest()
        texts = self._texts.get(key)
        if texts is None:
            texts = self._texts[key] = _Texts()
            self._kept += texts.size
        self._texts.move_to_end(key)
        return texts

    def _follow(self, sequence: Sequence, record: Record) -> _Followed:
        """Count the tokens that a sequence has sampled since the last call, and learn which guesses
        were right."""
        followed = self._followed.get(sequence)
        if followed is None:
            followed = self._followed[sequence] = _Followed(self._of(sequence))
        if followed.of.index is None:
            followed.of = self._of(sequence)
            self._index(followed.of, sequence)
        index = followed.of.index
        assert index is not None
        if followed.index is not index:
            followed.index, followed.seen, followed.expected = index, _known(sequence), []
        text = _tokens(sequence, record, max(followed.seen - LONGEST, 0))
        self._count(index, text, followed.seen)
        self._learn(followed.expected, text[min(followed.seen, LONGEST) :].tolist())
        followed.seen += text.size - min(followed.seen, LONGEST)
        followed.expected = []
        return followed

    def _index(self, texts: _Texts, sequence: Sequence) -> None:
        if texts.index is not None:
            return
        texts.index = Continuations()
        self._count(texts.index, _first_prompt(sequence), 0)
        for text, known in texts.said:
            self._count(texts.index, text, known)
        for texts_of_other in list(self._texts.values()):
            if self._indexed <= INDEXED_TOKENS:
                return
            if texts_of_other is not texts:
                self._forget_index(texts_of_other)

    def _forget_index(self, texts: _Texts) -> None:
        if texts.index is not None:
            self._indexed -= texts.index.size
            texts.index = None

    def _count(self, index: Continuations, text: Tokens, known: int) -> None:
        """Add a text to an index that has counted its first `known` tokens already."""
        earlier_size = index.size
        index.add(text, min(known, LONGEST))
        self._indexed += index.size - earlier_size

    def _learn(self, expected: list[Guess], tokens: list[int]) -> None:
        """Record how often guesses of a kind are right, as far as a sequence followed them."""
        for guess, token in zip(expected, tokens):
            kind = guess.kind
            self._tried[kind] += 1
            self._right[kind] += guess.token == token
            if self._tried[kind] > _REMEMBERED:
                self._tried[kind] /= 2
                self._right[kind] /= 2
            if guess.token != token:
                return


def _first_prompt(sequence: Sequence) -> Tokens:
    request = sequence.owner.request
    first = request if request.extends is None else request.extends
    return np.array(first.prompt_token_ids, np.int32)


def _known(sequence: Sequence) -> int:
    """Return the number of a sequence's tokens that belong to its prompt, or to the completion that
    it goes on from: earlier sequences had them already."""
    extended = sequence.owner.request.extends
    if extended is None:
        return sequence.owner.prompt.size
    return len(extended.prompt_token_ids) + len(extended.token_ids)


def _tokens(sequence: Sequence, record: Record, start: int) -> Tokens:
    """Return a sequence's tokens from `start` on: its prompt and what it has sampled."""
    prompt, sampled = sequence.owner.prompt, record.tokens[sequence.slot]
    stop = int(record.generated[sequence.slot])
    if start >= prompt.size:
        return sampled[start - prompt.size : stop]
    return np.concatenate([prompt[start:].astype(np.int32), sampled[:stop]])
