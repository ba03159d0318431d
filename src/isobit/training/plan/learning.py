"""What learning takes of memory: a forward and a backward of a few tokens, counted, and carried on
to many.

Bytes grow with tokens in straight lines: from two lengths comes a line for each moment of a pass
(`measure`), since few tokens may take most where a weight is unpacked, and many where
activations are. In a mixture of experts the tokens are shared out, so that each expert has some.
The planner measures a model on the `meta` device (`meta.py`); tests compare that with models
that compute.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.kernels import Layout
from isobit.kernels.sampling.filtering import LOGITS_AT_ONCE, Context, Filtering
from isobit.model import ModelConfig
from isobit.model.forward.accumulate_grad import adding_in_place
from isobit.model.forward.head import head_rows
from isobit.model.forward.moe import RouteTape
from isobit.model.forward.recompute import Recompute
from isobit.model.transformer import Transformer
from isobit.training.plan.live_bytes import LiveTrace

_SHORT = 8  # tokens of the first of the two passes that are measured; more, where experts are many
_LONGER = 3  # times as many in the second
_FEW, _MORE = 4, 12  # rows of logits at a time in these: never all, as in a long pass


@dataclass(frozen=True)
class LinearBytes:
    """Bytes for a number of tokens: fixed + slope · tokens."""

    fixed: float
    slope: float

    def at(self, tokens: int) -> int:
        return int(self.fixed + self.slope * tokens)


@dataclass(frozen=True)
class Phase:
    """The bytes at each moment of a phase of a pass, each linear in the tokens; the largest counts.
    No moment is below another at every number of tokens."""

    lines: tuple[LinearBytes, ...]

    def at(self, tokens: int) -> int:
        return max(line.at(tokens) for line in self.lines)

    @property
    def slope(self) -> float:
        """Bytes of a token, where there are many."""
        return max(line.slope for line in self.lines)


@dataclass(frozen=True)
class LearningMemory:
    """The memory of one micro-batch, without its gradients or with them. `phases`: the forward, the
    output head with few rows of logits at a time, and the layers' backward; `logits`: the head's
    share by the rows of logits at a time, of which there are at most `head_rows`; `filtered`: the
    same where they are filtered, at most `filtered_rows` at a time."""

    phases: tuple[Phase, ...]
    logits: Phase
    head_rows: int
    filtered: Phase | None = None
    filtered_rows: int = 0

    def at(self, tokens: int, exchanged: int = 0, logits: int = 0, added: int | None = None) -> int:
        """Return the peak bytes for a micro-batch of `tokens`.

        `exchanged`: further bytes that a layer's gradients take while ranks send them;
        `logits`: bytes of logits that are alive when the head's backward begins; `added`:
        where the logits become their gradient in place, the bytes of the head's gradient and packed
        weight that never exist at once.
        """
        forward, head, layers = (phase.at(tokens) for phase in self.phases)
        more = self._logits_at(min(tokens, self.head_rows)) - self.logits.at(_FEW)
        head += more if added is None else -added
        return max(forward + logits, head + logits, layers + exchanged)

    def _logits_at(self, rows: int) -> int:
        """Return the head's memory for `rows` rows of logits at a time: the rows that are not being
        filtered are there before and after."""
        plain, sorts = self.logits.at(rows), min(rows, self.filtered_rows)
        if self.filtered is None:
            return plain
        return max(plain, self.filtered.at(sorts) + plain - self.logits.at(sorts))


@dataclass(frozen=True)
class Passes:
    """Bytes at the moments of the phases of two passes, over few tokens and more; `logits`: of the
    head, by the rows of logits at a time."""

    few: tuple[list[int], ...]
    more: tuple[list[int], ...]
    logits: Phase = Phase((LinearBytes(0.0, 0.0),))
    filtered: Phase | None = None

    def of_layers(self, larger: "Passes", times: float) -> "Passes":
        """Extrapolate the passes of a model with more layers of one kind: `larger` are those of one
        with a few more layers than this one, and the model has `times` as many beyond these. The
        layers between the first and the last take less than one of these."""
        few, more = (
            tuple(_beyond(a, b, times) for a, b in zip(mine, theirs))
            for mine, theirs in ((self.few, larger.few), (self.more, larger.more))
        )
        return Passes(few, more, larger.logits, larger.filtered)


def _beyond(fewer: list[int], more: list[int], times: float) -> list[int]:
    """Extrapolate a phase's moments from two models, the second with some more layers, to a model
    with `times` as many more. Only the first and the last moments are kept, where the phases differ
    in length."""
    half = (min(len(fewer), len(more)) + 1) // 2
    pairs = [*zip(fewer[:half], more[:half]), *zip(fewer[-half:], more[-half:])]
    return [b + round((b - a) * times) for a, b in pairs]


def measure(
    transformer: Transformer, recompute: Recompute = False, entropy: bool = False
) -> LearningMemory:
    """Measure the memory of a forward and backward of a few tokens on a CPU, as a function of the
    tokens."""
    measured = passes(transformer, recompute, entropy=entropy)
    return carried(measured, transformer.config, host=True)


def passes(
    transformer: Transformer,
    recompute: Recompute,
    keep: bool = False,
    entropy: bool = False,
    tied: bool = False,
    filtering: Filtering | None = None,
) -> Passes:
    """Measure a forward and a backward of few tokens, then of more, with tensors without storage.

    `keep`: gradients stay until the end, else each is dropped when it is complete.
    `entropy`: the loss includes the entropies. `tied`: embedding and head are one master, to which
    both add. `filtering`: that of the sampled distribution.
    """
    short, long = _lengths(transformer.config)
    _forward(
        transformer, long
    )  # what is made at first use, such as rotary tables, is no part of a pass
    few, more = (
        _pass(transformer, tokens, recompute, keep, entropy, tied) for tokens in (short, long)
    )
    filtered = None if filtering is None else _by_rows_of_logits(transformer, entropy, filtering)
    return Passes(tuple(few), tuple(more), _by_rows_of_logits(transformer, entropy), filtered)


def carried(measured: Passes, config: ModelConfig, *, host: bool) -> LearningMemory:
    """Extrapolate two measured passes to any number of tokens; logits in as many rows as on a CPU
    (`host`), or on a GPU."""
    short, long = _lengths(config)
    phases = tuple(
        _phase(a, b, short, max(long - short, 1)) for a, b in zip(measured.few, measured.more)
    )
    rows, at_once = head_rows(config.vocab_size, host), max(1, LOGITS_AT_ONCE // config.vocab_size)
    return LearningMemory(phases, measured.logits, rows, measured.filtered, at_once)


def forward_passes(transformer: Transformer) -> Passes:
    """Measure the passes of a forward without gradients, as of a rollout, without its logits."""
    _forward(transformer, _lengths(transformer.config)[0])
    few, more = (_forward(transformer, tokens) for tokens in _lengths(transformer.config))
    return Passes((few,), (more,))


def carried_forward(measured: Passes, config: ModelConfig) -> Phase:
    """Extrapolate the forward of two measured passes to any number of tokens."""
    short, long = _lengths(config)
    return _phase(measured.few[0], measured.more[0], short, max(long - short, 1))


def _lengths(config: ModelConfig) -> tuple[int, int]:
    """Return the numbers of tokens of the two measured passes."""
    experts = config.routed
    least = _SHORT if experts is None else max(_SHORT, -(-experts.count // experts.per_token))
    return min(least, config.max_positions), min(_LONGER * least, config.max_positions)


@torch.no_grad()
def _forward(transformer: Transformer, tokens: int) -> list[int]:
    """Measure the live bytes at the moments of one sequence's forward."""
    ids = torch.arange(tokens, dtype=torch.int64) % transformer.config.vocab_size
    tape = RouteTape(_shared_out(transformer.config, tokens))
    with LiveTrace() as meter:
        transformer.hidden(ids, Layout.packed([tokens]), use="learner", tape=tape)
        return meter.moments


def _phase(first: list[int], second: list[int], tokens: int, span: int) -> Phase:
    """Return the phase from the moments of two passes; where one has more moments, as a head over
    more rows has, from their peaks."""
    if len(first) != len(second):
        first, second = [max(first)], [max(second)]
    lines = {_line(a, b, tokens, span) for a, b in zip(first, second)}
    upper: list[LinearBytes] = []
    for line in sorted(lines, key=lambda line: (line.fixed, line.slope), reverse=True):
        if not upper or line.slope > upper[-1].slope:
            upper.append(line)
    return Phase(tuple(upper))


def _line(first: int, second: int, tokens: int, span: int) -> LinearBytes:
    slope = max(second - first, 0) / span
    return LinearBytes(max(first - slope * tokens, 0), slope)


def _pass(
    transformer: Transformer,
    tokens: int,
    recompute: Recompute,
    keep: bool = False,
    entropy: bool = False,
    tied: bool = False,
    chunk: int = _FEW,
) -> list[list[int]]:
    """Measure the live bytes at the moments of the three phases (forward, head, layers' backward)
    of one sequence, `chunk` rows of logits at a time."""
    config, device = transformer.config, transformer.ops["learner"].device
    moments: list[list[int]] = []
    ids = torch.arange(tokens, dtype=torch.int64) % config.vocab_size
    tape = RouteTape(_shared_out(config, tokens))

    def take() -> None:
        moments.append(meter.moments)
        meter.take()

    with (
        _tied(transformer, ids, keep) if tied else _gradients_dropped(transformer, keep),
        torch.enable_grad(),
        LiveTrace() as meter,
    ):
        layout = Layout.packed([tokens])
        hidden = transformer.hidden(ids, layout, use="learner", tape=tape, recompute=recompute)
        take()
        hidden.register_hook(lambda _: take())
        loss = _loss(transformer, hidden, ids.to(device), chunk, entropy)
        loss.backward()
        take()
        del hidden, loss
    return moments


class _AnyContext(Context):
    """The context of a distribution with a repetition penalty, on a device without numbers."""

    def seen(self, rows: slice, vocabulary: int) -> Tensor:
        count = len(self.first[rows])
        return torch.zeros(count, vocabulary, dtype=torch.bool, device=self.tokens.device)


def _loss(
    transformer: Transformer,
    hidden: Tensor,
    ids: Tensor,
    chunk: int,
    entropy: bool,
    filtering: Filtering | None = None,
) -> Tensor:
    """Return the sum of the log-probabilities, plus the entropies with `entropy`, `chunk` rows at a
    time."""
    logprobs, entropies = transformer.head_logprobs(
        hidden, ids, chunk=chunk, filtering=filtering, context=_AnyContext(ids, ids, ids)
    )
    return logprobs.sum() + entropies.sum() if entropy else logprobs.sum()


def _by_rows_of_logits(
    transformer: Transformer, entropy: bool, filtering: Filtering | None = None
) -> Phase:
    """Measure the output head alone, and return its live bytes as a phase over the rows of logits
    at a time. It has twice as many hidden rows, since the second chunk finds the gradient of the
    first."""
    peaks, device = [], transformer.ops["learner"].device
    dtype = transformer.precision.learner.compute.dtype
    for chunk in (_FEW, _MORE):
        shape = (2 * chunk, transformer.config.hidden_size)
        hidden = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
        ids = torch.zeros(2 * chunk, dtype=torch.int64, device=device)
        with _gradients_dropped(transformer), torch.enable_grad(), LiveTrace() as meter:
            _loss(transformer, hidden, ids, chunk, entropy, filtering).backward()
            peaks.append(meter.moments)
    return _phase(peaks[0], peaks[1], _FEW, _MORE - _FEW)


@contextmanager
def _tied(transformer: Transformer, tokens: Tensor, keep: bool) -> Iterator[None]:
    """Drop gradients as `_gradients_dropped`, except for the master that is embedding and head:
    both add to its gradient, which exists before the backward unless `keep`."""
    leaf = transformer.masters.leaves["embed"]
    if not keep:
        leaf.grad = torch.empty_like(leaf)
    try:
        with _gradients_dropped(transformer, keep, leaf), adding_in_place([leaf], leaf, tokens):
            yield
    finally:
        leaf.grad = None


@contextmanager
def _gradients_dropped(
    transformer: Transformer, keep: bool = False, apart: Tensor | None = None
) -> Iterator[None]:
    """Drop the gradient of each master except `apart`: when it is complete, or with
    `keep` at the end of the context."""
    leaves = [leaf for leaf in transformer.masters.leaves.values() if leaf is not apart]
    hooks = [] if keep else [leaf.register_post_accumulate_grad_hook(_drop) for leaf in leaves]
    try:
        yield
    finally:
        for leaf in leaves if keep else ():
            leaf.grad = None
        for hook in hooks:
            hook.remove()


def _shared_out(config: ModelConfig, tokens: int) -> Tensor | None:
    """Return experts for each token and layer in turn: [T, layers, k]."""
    if config.routed is None:
        return None
    count, slots = config.routed.count, config.routed.per_token
    turns = torch.arange(tokens * slots).view(tokens, 1, slots) % count
    return turns.expand(tokens, config.num_layers, slots)


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None
