"""What moves and forbids single tokens: the distribution in float64, and the same bits whatever else
runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from isobit.engine import token_bits
from isobit.engine.changes import Changes
from isobit.engine.engine import Engine
from isobit.engine.fleet import wire
from isobit.engine.shaping import Forbidden, Matcher, Shaping
from isobit.engine.token_bits import Bits, full
from isobit.engine.types import Completion, Sampling
from isobit.errors import IsobitError
from isobit.kernels import Layout
from isobit.model import Model
from tests.models import tiny_model

from .helpers import outcome, tiny
from .test_consistency import HARD
from .test_invariance import PROMPT_IDS, PROMPTS

MakeEngine = Callable[..., Engine]
VOCABULARY = 64


@dataclass
class Classes:
    """A grammar by remainders: behind a token t comes one whose remainder is that of t + `step`."""

    step: int
    last: int = 0

    def begin(self) -> Matcher:
        return Classes(self.step)

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            assert token % 4 == (self.last + self.step) % 4
            self.last = token

    def allow(self, bits: Bits) -> None:
        allowed = np.arange(bits.size * 8) % 4 == (self.last + self.step) % 4
        bits &= np.packbits(allowed, bitorder="little")


SHAPING = Shaping(
    presence_penalty=0.5,
    frequency_penalty=0.4,
    bias=((9, 3.5), (0, -2.0), (10, 1.25)),
    banned=((13,), (9, 10)),
    min_tokens=4,
    ends=(2,),
    grammar=Classes(1),
)
SHAPED = Sampling(n=3, max_new_tokens=14, seed=3, temperature=0.9, top_k=9, shaping=SHAPING)
PLAIN = Sampling(n=2, max_new_tokens=12, seed=3)


def distribution(model: Model, completion: Completion, sampling: Sampling) -> torch.Tensor:
    """The log-probabilities of its tokens, in float64, by the definition of each key."""
    shaping = sampling.shaping
    assert shaping is not None
    ids, drawn = completion.prompt_token_ids, completion.token_ids
    tokens = torch.tensor([*ids, *drawn[:-1]])
    hidden = model.transformer.hidden(tokens, Layout.packed([len(tokens)]), use="learner")
    weight = model.transformer.head_weight("learner")
    logits = model.ops.product(hidden[len(ids) - 1 :], weight, None, torch.float32).double()
    found = []
    for place, row in enumerate(logits):
        behind = drawn[:place]
        for token, amount in shaping.bias:
            row[token] += amount
        for token in set(behind):
            row[token] -= shaping.presence_penalty + shaping.frequency_penalty * behind.count(token)
        last = behind[-1] if behind else 0
        row[torch.arange(len(row)) % 4 != (last + 1) % 4] = -torch.inf
        row[[13, *([10] if last == 9 else []), *([2] if place < 4 else [])]] = -torch.inf
        row /= sampling.temperature
        least = row.topk(sampling.top_k).values[-1]
        found.append(torch.where(row >= least, row, -torch.inf).log_softmax(0)[drawn[place]])
    return torch.stack(found)


def finish(engine: Engine, done: list[Completion]) -> None:
    """Run all that is open."""
    while engine.num_open:
        done += [completion for _, completion in engine.step()]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("more", [{}, {"num_speculative_tokens": 3}])
def test_the_distribution_and_its_bits_under_preemption_and_sharing(
    make_engine: MakeEngine, more: dict[str, int]
) -> None:
    model = tiny("fp8", "native")
    engine = make_engine(model, **HARD, **more)
    groups = engine.generate(PROMPTS, SHAPED, PROMPT_IDS)
    assert engine.stats.preemptions > 0
    assert engine.stats.shared_pages > 0
    alone = [make_engine(model).generate([p], SHAPED, [i])[0] for p, i in zip(PROMPTS, PROMPT_IDS)]
    assert outcome(alone) == outcome(groups)
    for completion in [completion for group in groups for completion in group]:
        oracle = distribution(model, completion, SHAPED)
        torch.testing.assert_close(
            torch.tensor(completion.logprobs).double(), oracle, atol=2e-5, rtol=0
        )


@pytest.mark.parametrize(
    "change",
    [
        {"grammar": Classes(3)},
        {"bias": ()},
        {"presence_penalty": 0.6},
        {"frequency_penalty": 0.0},
        {"banned": ()},
    ],
)
def test_negative_control_each_key_changes_the_bits(
    make_engine: MakeEngine, change: dict[str, object]
) -> None:
    model = tiny("fp8", "native")
    other = replace(SHAPED, shaping=replace(SHAPING, **change))
    found = outcome(make_engine(model).generate(PROMPTS, SHAPED, PROMPT_IDS))
    assert found != outcome(make_engine(model).generate(PROMPTS, other, PROMPT_IDS))


def test_a_plain_row_is_as_it_is_alone(make_engine: MakeEngine) -> None:
    """And the shaped ones, of every kind at once."""
    model, engine = tiny("fp8", "native"), make_engine(tiny("fp8", "native"))
    kinds = [
        PLAIN,
        replace(SHAPED, n=2),
        replace(PLAIN, shaping=Shaping(allowed=(5, 6, 7))),
        replace(PLAIN, temperature=0.0, shaping=Shaping(bias=((7, 100.0),))),
        replace(PLAIN, repetition_penalty=1.3, top_logprobs=3, shaping=Shaping(banned=((9,),))),
    ]
    alone = [make_engine(model).generate([[5, 6, 7]], kind, [i]) for i, kind in enumerate(kinds)]
    for index, kind in enumerate(kinds):
        engine.submit([5, 6, 7], kind, prompt_id=index)
    done = list[Completion]()
    finish(engine, done)
    assert outcome([done]) == {k: v for groups in alone for k, v in outcome(groups).items()}
    assert {t for c in alone[2][0] for t in c.token_ids} <= {5, 6, 7}
    assert alone[3][0][0].token_ids == [7] * 12
    for completion in alone[4][0]:
        tops = completion.top_logprobs or []
        assert all(9 not in dict(top) for top in tops)
        assert any(
            dict(top).get(token) == logprob
            for top, token, logprob in zip(tops, completion.token_ids, completion.logprobs)
        )


def test_what_is_resumed_goes_on_in_its_grammar(make_engine: MakeEngine) -> None:
    model = tiny("fp8", "native")
    engine, whole = make_engine(model), replace(SHAPED, n=1)
    (at_once,) = make_engine(model).generate([[5, 6, 7]], whole, [4])[0]
    (begun,) = engine.generate([[5, 6, 7]], replace(whole, max_new_tokens=5), [4])[0]
    engine.resume(begun, replace(whole, max_new_tokens=9))
    ended = [completion for _ in range(10) for _, completion in engine.step()]
    assert outcome([ended]) == outcome([[at_once]])


def test_an_answer_that_cannot_go_on_says_so_and_no_other_fails(make_engine: MakeEngine) -> None:
    model, engine = tiny("fp8", "native"), make_engine(tiny("fp8", "native"))
    alone = outcome(make_engine(model).generate([[5, 6, 7]], PLAIN, [0]))
    engine.submit([5, 6, 7], PLAIN, prompt_id=0)
    shaping = Shaping(allowed=(4, 5), banned=((5, 4), (5, 5), (4, 4), (4, 5)))
    stuck = engine.submit([5, 6, 7], replace(PLAIN, shaping=shaping), prompt_id=1)
    done = list[Completion]()
    with pytest.raises(Forbidden, match="no token may come next") as refused:
        finish(engine, done)
    assert refused.value.request is stuck
    engine.cancel(stuck)
    finish(engine, done)
    assert outcome([done]) == alone


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3"])
def test_no_other_answer_is_computed_again_where_nothing_was_computed(
    family: str, make_engine: MakeEngine
) -> None:
    """Also of a model with states that are written in place. The control is a step that fails when
    it was computed."""
    model, engine = tiny_model("fp8", family), make_engine(tiny_model("fp8", family))
    alone = outcome(make_engine(model).generate([[5, 6, 7]], PLAIN, [0]))
    engine.submit([5, 6, 7], PLAIN, prompt_id=0)
    done = [completion for _ in range(3) for _, completion in engine.step()]
    nothing = replace(PLAIN, shaping=Shaping(allowed=(4,), banned=((4,),)))
    stuck = engine.submit([5, 6, 8], nothing, prompt_id=1)
    with pytest.raises(Forbidden):
        finish(engine, done)
    engine.cancel(stuck)
    assert engine.stats.preemptions == 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine.scheduler.record, "write", lambda *drawn: {}["a fault"])
        with pytest.raises(KeyError):
            engine.step()
    assert (engine.stats.preemptions > 0) == (family == "qwen3_5_text")
    finish(engine, done)
    assert outcome([done]) == alone


def test_the_bits_of_allowed_tokens_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control is another request's."""
    made, bits_of = list[int](), token_bits.bits_of

    def counted(tokens: Sequence[int]) -> Bits:
        made.append(len(tokens))
        return bits_of(tokens)

    monkeypatch.setattr(token_bits, "bits_of", counted)
    for shaping in (Shaping(allowed=(0, 9, 50)), Shaping(allowed=(60,)), Shaping(allowed=())):
        for _ in range(3):
            bits = full(1, VOCABULARY)[0]
            shaping.mask(bits, [], None)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
            assert tuple(allowed) == shaping.allowed
    assert sorted(filter(None, made)) == [1, 3]


def test_rows_that_are_not_changed_keep_their_bits() -> None:
    """Also those of a negative zero, which a sum with zero would change."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    logits[:, 0] = -0.0
    bits = full(3, 50)
    bits[1, 0] = 0b101
    changes = Changes(
        torch.tensor([False, True, True]),
        tokens=torch.tensor([[0, 0], [0, 7], [3, 0]]),
        amounts=torch.tensor([[-0.0, -0.0], [1.5, 2.5], [0.25, -0.0]]),
        bits=torch.from_numpy(bits),
    )
    found = changes.apply(logits)
    assert torch.equal(found[0].view(torch.int32), logits[0].view(torch.int32))
    masked = torch.tensor([i in (1, 3, 4, 5, 6, 7) for i in range(50)])
    wanted = torch.where(masked, -torch.inf, logits[1])
    wanted[0] += 1.5
    assert torch.equal(found[1], wanted)
    moved = logits[2].clone()
    moved[3] += 0.25
    assert torch.equal(found[2].view(torch.int32), moved.view(torch.int32))


def test_settings_that_are_sent_away_have_no_shaping() -> None:
    assert wire.request(0, [5], 0, PLAIN)["sampling"]["n"] == 2
    with pytest.raises(IsobitError, match=r"sampling\.shaping: only an engine in this process"):
        wire.request(0, [5], 0, SHAPED)
