"""What goes into the rollout engine and what comes out: `EngineSize`, `Sampling`, `Request` and
`Completion`.

Left out: the prompts, which are plain text, token ids or chat messages, and the stopping tokens,
which are the model's.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Annotated, Literal

from isobit.data.dataset import Prompt
from isobit.data.episodes import EpisodeRecord
from isobit.engine.shaping import Shaping
from isobit.options.declare import NotAnOption, above, at_least, at_most, below
from isobit.options.reading import Expected, read_own_fields

LOWEST_TEMPERATURE = 1e-3
MOST_TOP_LOGPROBS = 20
Top = list[tuple[int, float]]
"""The likeliest tokens at one place with their log-probabilities, the likeliest first; of equal
logits the lower token first."""


@dataclass(frozen=True)
class Sampling:
    """The settings by which completions are sampled from a prompt.

    `n` completions per prompt, of at most `max_new_tokens` tokens each. `temperature` 0 is greedy.
    Before all else `repetition_penalty` divides positive logits of tokens that stand in prompt or
    completion so far, and multiplies the others of these (1: off). The filters act in this order,
    each on what the previous one kept: `top_k` (0: off), `top_p` (1: off), `min_p` (0: off).
    `stop`: the text ends before the first of these strings, or before this one. `ignore_eos`
    samples on through the end-of-sequence token; `stop_tokens` end a completion as that does.
    `top_logprobs`: the number of the likeliest tokens that are kept with each drawn token, at most
    20; the drawn ones are the same. `shaping`: what else moves or forbids single tokens.
    Raises IsobitError for values that cannot work.
    """

    n: NotAnOption[int] = 1
    max_new_tokens: Annotated[int, at_least(1), below(2**31), "the most tokens of a completion"] = (
        128
    )
    temperature: Annotated[float, at_least(0)] = 1.0
    top_k: Annotated[int, at_least(0), below(2**31), "only the k likeliest tokens; 0: off"] = 0
    top_p: Annotated[
        float,
        above(0),
        at_most(1),
        "only the likeliest tokens, whose probabilities add up to this; 1: off",
    ] = 1.0
    min_p: Annotated[
        float,
        at_least(0),
        at_most(1),
        "only tokens that are at least this share as likely as the likeliest one; 0: off",
    ] = 0.0
    seed: NotAnOption[int] = 0
    stop: Annotated[tuple[str, ...], "texts that end a completion"] = ()
    ignore_eos: Annotated[bool, "sample on after the token that ends a text"] = False
    repetition_penalty: Annotated[
        float,
        above(0),
        at_most(100),
        "above 1, tokens that are in the prompt or in the completion already become less "
        "likely; 1: off",
    ] = 1.0
    stop_tokens: NotAnOption[tuple[int, ...]] = ()
    top_logprobs: NotAnOption[int] = 0
    shaping: NotAnOption[Shaping | None] = None

    def __post_init__(self) -> None:
        read_own_fields(self, Sampling)
        _check_count("n", self.n, 1, 2**31)
        _check_count("seed", self.seed, 0, 2**63)
        _check_count("top_logprobs", self.top_logprobs, 0, MOST_TOP_LOGPROBS + 1)
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise Expected(
                ("temperature",), f"0 or at least {LOWEST_TEMPERATURE}", self.temperature
            )
        for token in self.stop_tokens:
            _check_count("stop_tokens", token, 0, 2**31)
        if "" in self.stop:
            raise Expected(("stop",), "texts that are not empty", list(self.stop))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def changed(self) -> bool:
        """Whether logits are changed before they are filtered: by a penalty, or by its shaping."""
        return self.repetition_penalty != 1 or self.shaping is not None

    @property
    def settings(self) -> tuple[float, float, float, float]:
        """The settings of each draw: temperature, top-k, top-p, min-p; a greedy one has no
        filter."""
        return (
            (0.0, 0.0, 1.0, 0.0)
            if self.greedy
            else (self.temperature, self.top_k, self.top_p, self.min_p)
        )

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p leaves out tokens, or a penalty moves them: the
        distribution is another."""
        limited = not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
        return limited or self.repetition_penalty != 1

    @property
    def filtering(self) -> tuple[int, float, float, float] | None:
        """Top-k, top-p, min-p and repetition penalty, where the distribution is another by them."""
        limits = (0, 1.0, 0.0) if self.greedy else (self.top_k, self.top_p, self.min_p)
        return (*limits, self.repetition_penalty) if self.filtered else None


@dataclass(frozen=True)
class EngineSize:
    """An engine's memory and batch."""

    kv_pages: Annotated[
        int | None, at_least(1), "pages of the KV cache; default: as many as one step needs"
    ] = None
    page_size: Annotated[
        int | None,
        at_least(1),
        at_most(1024),
        "tokens per page; default: 16, or 256 for layers with linear attention, which keep a "
        "state for each page",
    ] = None
    max_batch_tokens: Annotated[
        int, at_least(1), "tokens of one forward; longer prompts are computed in parts"
    ] = 2048
    max_sequences: Annotated[int, at_least(1), "sequences that are decoded at the same time"] = 512
    cuda_graphs: Annotated[
        bool, "capture decode steps: as CUDA graphs, or on a CPU as lists of calls in C++"
    ] = True
    prefix_cache: Annotated[
        bool, "share pages between prompts that begin alike, until the weights change"
    ] = True
    num_speculative_tokens: Annotated[
        int | Literal["auto"],
        at_least(0),
        "how many tokens of a sequence a step guesses ahead and checks; guesses come from what "
        "was said of the same prompt before. 0: none. auto: as many as save time. No bit of a "
        "result depends on it",
    ] = 0


@dataclass(frozen=True, eq=False)
class Request:
    """A request to an engine: `sampling.n` completions of a prompt, whose sample indices begin at
    `sample_index`.

    `extends`: the completion that it goes on from, where it does; the prompt is then all tokens so
    far. `resumes`: it goes on inside the answer itself, which a length limit has interrupted, so
    its text and its stop strings begin where that did. `adapter`: the name of one that the model
    serves, None: the base alone. `salt`: it shares pages with requests of the same salt alone."""

    prompt_token_ids: list[int]
    sampling: Sampling
    prompt_id: int
    sample_index: int
    extends: "Completion | None" = None
    adapter: str | None = None
    resumes: bool = False
    salt: Hashable = None

    @property
    def answered(self) -> list[int]:
        """The tokens at the end of the prompt that the answer begins with."""
        return self.extends.token_ids if self.resumes and self.extends is not None else []

    @property
    def asked(self) -> list[int]:
        """The tokens in front of the answer."""
        ids, answered = self.prompt_token_ids, self.answered
        return ids[: len(ids) - len(answered)] if answered else ids


@dataclass(frozen=True)
class Completion:
    """A sampled answer, or several turns of which the last is sampled.

    `token_ids` holds every sampled token, including the end-of-sequence token and those that made
    up a stop string; `text` ends before either. `logprobs[t]` is the log-probability of
    `token_ids[t]` under the distribution it was sampled from (temperature and filtering included;
    under greedy decoding: the model's own, at temperature 1). After `Engine.continue_from` the
    given tokens are among `token_ids`: `completion_mask` is True for each sampled token and False
    for each given one, whose entry in `logprobs` is 0.0; None: all were sampled. `text` is the last
    turn's. After `Engine.resume` `weights_version` is that of its newest tokens. `routes`, where
    the engine records them, are the experts that served prompt and completion
    (`model/forward/moe.py`). `finish_reason` is "stop" (end of sequence or a stop string) or
    "length". `adapter` is the request's. `top_logprobs[t]`, where the request asks for them, are
    the likeliest tokens at the place of `token_ids[t]` and their log-probabilities under the same
    distribution, the likeliest first; tokens that it excludes are not among them, and a given token
    has none. `episode`: what happened in a conversation with an environment. `forks`: the places in
    `token_ids` where a new context begins, which sees nothing before it.
    """

    prompt_id: int
    sample_index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    logprobs: list[float]
    finish_reason: str
    weights_version: int
    routes: str | None = None
    completion_mask: list[bool] | None = None
    adapter: str | None = None
    top_logprobs: list[Top] | None = None
    episode: EpisodeRecord | None = None
    forks: tuple[int, ...] = ()

    @property
    def sampled(self) -> list[bool]:
        """The `completion_mask`, with True for every token where the mask is left out."""
        return (
            [True] * len(self.token_ids) if self.completion_mask is None else self.completion_mask
        )


def asked_in(prompt: Prompt, completion: Completion) -> Prompt:
    """Return the prompt of a row, or what an environment has made of it for this completion."""
    changed = None if completion.episode is None else completion.episode.prompt
    return prompt if changed is None else changed


def said_in(completion: Completion) -> str | EpisodeRecord:
    """Return what is scored of a completion: its text, or the episode where an environment
    answered."""
    return completion.text if completion.episode is None else completion.episode


def _check_count(name: str, value: object, lowest: int, highest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value < highest:
        raise Expected((name,), f"a whole number from {lowest} to {highest - 1:,}", value)
