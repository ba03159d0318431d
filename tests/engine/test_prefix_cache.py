"""Pages that are shared by equal beginnings: what is found in the cache has the bits of what is
computed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from isobit.engine.engine import Engine
from isobit.engine.pages import PagePool
from isobit.engine.types import Sampling
from isobit.model import Model
from isobit.model.forward.kv_scales import KVScales
from tests.models import slow_where, tiny_model

from .helpers import Outcome, fresh, outcome, rollout, scale, tiny
from .test_invariance import FLOWS, PROMPT_IDS, PROMPTS, SAMPLING, baseline

MakeEngine = Callable[..., Engine]

SYSTEM = [(7 * i) % 40 + 3 for i in range(37)]
CHATS = [[*SYSTEM, *tail] for tail in ([5, 6], [5, 6, 7, 8], [9] * 30, [], [5], [5, 7, 8])]
"""Prompts that begin alike, and go apart within a page and at its edge."""
SHORT = Sampling(n=2, max_new_tokens=6, temperature=0.9, seed=4)


def wanted(model: Model, prompts: list[list[int]], sampling: Sampling) -> Outcome:
    """Every prompt in an engine of its own."""
    found: Outcome = {}
    for index, prompt in enumerate(prompts):
        found |= outcome(Engine(model, kv_pages=200).generate([prompt], sampling, [index]))
    return found


SIZES = [{"page_size": 4}, {"page_size": 1, "kv_pages": 1600}, {"max_batch_tokens": 9}]


@pytest.mark.parametrize(
    ("preset", "backend", "sizes"),
    slow_where(
        [(*flow, sizes) for flow in FLOWS for sizes in SIZES],
        lambda preset, backend, sizes: backend == "reference" and sizes != SIZES[0],
    ),
)
def test_hits_have_the_bits_of_misses(
    preset: str, backend: str, sizes: dict[str, int], make_engine: MakeEngine
) -> None:
    """The prompts of a call again, and prompts that begin like others; after the first of them all
    hit."""
    engine = make_engine(tiny(preset, backend), **({"kv_pages": 400} | sizes))
    for _ in range(2):
        assert rollout(engine, PROMPTS, SAMPLING, PROMPT_IDS) == baseline(preset, backend)
    size = engine.page_size
    assert engine.stats.cached_tokens == sum((len(prompt) - 1) // size * size for prompt in PROMPTS)
    found: Outcome = {}
    for index, prompt in enumerate(CHATS):
        found |= rollout(engine, [prompt], SHORT, [index])
        assert index == 0 or engine.stats.cached_tokens >= 36 // size * size
    assert found == wanted(engine.model, CHATS, SHORT)


def test_captured_steps_leave_pages_that_others_may_share(make_captured: MakeEngine) -> None:
    engine = make_captured(tiny("fp8", "native"), kv_pages=60, page_size=4)
    for _ in range(3):
        assert rollout(engine, PROMPTS, SAMPLING, PROMPT_IDS) == baseline("fp8", "native")
    assert engine.stats.cached_tokens > 0


@pytest.mark.parametrize("kv_pages", [20, 24, 40, 100])
def test_under_pressure_pages_are_given_up_and_computed_again(
    kv_pages: int, make_engine: MakeEngine
) -> None:
    engine = make_engine(tiny("fp8", "native"), kv_pages=kv_pages, page_size=4, max_batch_tokens=40)
    for _ in range(3):
        assert rollout(engine, PROMPTS, SAMPLING, PROMPT_IDS) == baseline("fp8", "native")
        assert rollout(engine, CHATS, SHORT) == wanted(engine.model, CHATS, SHORT)


def test_negative_control_a_chain_that_forgets_a_token(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_the_last(tokens: np.ndarray, size: int, rest: bool = False) -> list[bytes]:
        return [tokens[i : i + size - 1].tobytes() for i in range(0, tokens.size - size + 1, size)]

    monkeypatch.setattr("isobit.engine.pages._parts", without_the_last)
    engine = make_engine(tiny("fp8", "native"), page_size=4)
    prompts = [[*SYSTEM[:35], 5, 6], [*SYSTEM[:35], 7, 6]]
    with pytest.raises(AssertionError):
        assert rollout(engine, prompts[:1], SHORT) | rollout(
            engine, prompts[1:], SHORT, [1]
        ) == wanted(engine.model, prompts, SHORT)


@pytest.mark.parametrize("broken", [False, True])
def test_a_conversation_goes_on_in_the_page_that_was_not_full(
    broken: bool, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the turn before is computed again but the last token, which never was. The control
    takes one token more for computed."""
    engine, model = make_engine(tiny("fp8", "native")), tiny("fp8", "native")
    find = PagePool.find_part

    def one_more(self: PagePool, *given: Any) -> tuple[int, int] | None:
        found = find(self, *given)
        return found and (found[0], found[1] + 1)

    if broken:
        monkeypatch.setattr(PagePool, "find_part", one_more)
    sampling, so_far, same = Sampling(max_new_tokens=5, seed=3, ignore_eos=True), SYSTEM[:4], True
    for turn in range(4):
        (found,) = engine.generate([so_far], sampling, [turn])[0]
        assert broken or turn == 0 or engine.stats.cached_tokens == len(so_far) - 4
        fresh = Engine(model, kv_pages=100).generate([so_far], sampling, [turn])[0][0]
        same &= found == fresh
        so_far = [*so_far, *fresh.token_ids, 3 + turn, 7, 9]
    assert same != broken


def test_negative_control_a_chain_that_forgets_what_came_before(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page by its own tokens alone: the second page of another beginning."""
    find = PagePool.find

    def apart(self: PagePool, root: object, tokens: np.ndarray) -> list[int]:
        parts = np.split(
            tokens[: tokens.size // self.page_size * self.page_size], range(4, tokens.size, 4)
        )
        pages = [page for part in parts for page in find(self, root, part)]
        return pages if len(pages) == len(parts) else []

    def remember(self: PagePool, root: object, tokens: np.ndarray, pages: list[int]) -> None:
        for i, page in enumerate(pages[: tokens.size // 4]):
            kept(self, root, tokens[4 * i : 4 * i + 4], [page])

    kept = PagePool.remember
    monkeypatch.setattr(PagePool, "find", apart)
    monkeypatch.setattr(PagePool, "remember", remember)
    a, b, c = [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]
    prompts = [[*a, *b, 3], [*c, *b, 3], [*b, *c, 3]]
    engine = make_engine(tiny("fp8", "native"), page_size=4)
    found = [rollout(engine, [prompt], SHORT, [index]) for index, prompt in enumerate(prompts)]
    with pytest.raises(AssertionError):
        assert found[0] | found[1] | found[2] == wanted(engine.model, prompts, SHORT)


def test_a_sync_drops_what_was_computed_with_other_weights(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a root without the version of the weights is noticed."""
    for broken in (False, True):
        model = fresh("fp8", "native")
        engine = make_engine(model)
        if broken:
            monkeypatch.setattr(Engine, "_root", lambda self: "always")
        rollout(engine, CHATS, SHORT)
        scale(model, 1.1)
        second = rollout(engine, CHATS, SHORT)
        assert (engine.stats.cached_tokens > 0) == broken
        assert (second == wanted(model, CHATS, SHORT)) != broken


def test_sleep_drops_everything(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a cache that outlives its pages is noticed."""
    for broken in (False, True):
        engine = make_engine(tiny("fp8", "native"))
        expected = rollout(engine, CHATS, SHORT)
        if broken:
            monkeypatch.setattr(engine.pages, "forget", lambda: None)
        engine.sleep()
        assert (rollout(engine, CHATS, SHORT) == expected) != broken
        assert (engine.stats.cached_tokens > 0) == broken


def test_other_scales_of_the_same_weights_drop_everything(make_engine: MakeEngine) -> None:
    """Calibrated again over other prompts, without a sync between; the scales do change bits."""
    model = tiny_model("fp8[kv_cache=e4m3-calibrated]")
    outcomes = []
    for factor in (1.0, 3.0):
        engine = make_engine(model, page_size=4)
        engine.calibrate(["1+1="])
        first = rollout(engine, CHATS_TINY, SHORT)
        assert rollout(engine, CHATS_TINY, SHORT) == first
        assert engine.stats.cached_tokens > 0
        scales = model.transformer.kv_scales
        assert scales is not None
        model.transformer.calibrate(KVScales(scales.values * factor, scales.version))
        outcomes.append((first, rollout(engine, CHATS_TINY, SHORT)))
        assert (engine.stats.cached_tokens == 0) == (factor != 1.0)
        assert outcomes[-1][1] == rollout(make_engine(model, page_size=4), CHATS_TINY, SHORT)
    assert outcomes[1][0] != outcomes[1][1]


CHATS_TINY = [[3, 4, 5, 6, 7, 8, 9, 3, 4, *tail] for tail in ([5], [5, 6, 7], [8, 8])]


def test_routes_are_found_with_the_pages(make_engine: MakeEngine) -> None:
    """Recorded routes of prompts from the cache; switching recording on drops pages that have
    none."""
    model = tiny_model("fp8", "qwen3_moe")
    fresh = [Engine(model, page_size=4) for _ in CHATS_TINY]
    for engine in fresh:
        engine.record_routes = True
    expected = [e.generate([p], SHORT, [i])[0] for i, (e, p) in enumerate(zip(fresh, CHATS_TINY))]
    assert len({c.routes for group in expected for c in group}) > 1
    engine = make_engine(model, page_size=4)
    engine.generate(CHATS_TINY, SHORT)
    engine.record_routes = True
    for cached in (False, True, True):
        assert engine.generate(CHATS_TINY, SHORT) == expected
        assert (engine.stats.cached_tokens > 0) == cached
    assert engine._routes is not None
    engine._routes.pages[:] = 0  # negative control: the routes of hits do come from there
    assert engine.generate(CHATS_TINY, SHORT) != expected


def test_without_the_cache_only_a_group_shares(make_engine: MakeEngine) -> None:
    engine = make_engine(tiny("bf16", "native"), page_size=4, max_sequences=2, prefix_cache=False)
    for _ in range(2):
        assert rollout(engine, CHATS, SHORT) == wanted(engine.model, CHATS, SHORT)
        assert (engine.stats.cached_tokens, engine.stats.prompt_tokens) == (0, sum(map(len, CHATS)))
    many = Sampling(n=5, max_new_tokens=3, ignore_eos=True)
    engine.generate([SYSTEM], many)
    assert engine.stats.shared_pages == 4 * (len(SYSTEM) // 4), (
        "those that wait for a row find their prompt"
    )


def pool_of(count: int) -> PagePool:
    return PagePool(count, 2)


def test_the_least_recently_used_page_goes_first_and_none_that_is_held() -> None:
    pool = pool_of(5)
    tokens = [np.array([i, i, i + 50, i + 50]) for i in range(2)]
    first, second = pool.allocate(2), pool.allocate(2)
    for ids, pages in zip(tokens, (first, second)):
        pool.remember("root", ids, pages)
    pool.release(first)
    pool.release(second)
    pool.integrity([])
    assert (pool.num_free, pool.num_idle(first), pool.num_idle(second)) == (5, 2, 2)
    pool.share(pool.find("root", tokens[0]))  # used again, and held
    assert pool.allocate(1) == [4], "a page that nobody remembers"
    assert pool.allocate(1) == second[1:], "of a chain the end first"
    assert pool.find("root", tokens[1]) == second[:1]
    pool.integrity([first, [4], second[1:]])
    assert pool.allocate(1) == second[:1]
    assert pool.find("root", tokens[1]) == []
    with pytest.raises(AssertionError, match="1 pages wanted, 0 free"):
        pool.allocate(1)
    assert pool.find("root", tokens[0]) == first


def test_a_page_is_found_by_everything_before_it() -> None:
    pool = pool_of(8)
    pages = pool.allocate(3)
    pool.remember(("root", 1), np.array([1, 2, 3, 4, 5, 6, 7]), pages)
    assert pool.find(("root", 1), np.array([1, 2, 3, 4, 5, 6])) == pages
    assert pool.find(("root", 1), np.array([1, 2, 3, 4, 5])) == pages[:2]
    assert pool.find(("root", 1), np.array([1, 2, 3, 9, 5, 6])) == pages[:1]
    for root, tokens in (
        (("root", 1), [9, 2, 3, 4, 5, 6]),
        (("root", 2), [1, 2, 3, 4]),
        (("root", 1), [3, 4]),
    ):
        assert pool.find(root, np.array(tokens)) == []
    twice = pool.allocate(3)
    pool.remember(("root", 1), np.array([1, 2, 3, 4, 8, 8]), twice)  # the first two pages are known
    assert pool.find(("root", 1), np.array([1, 2, 3, 4, 8, 8])) == [*pages[:2], twice[2]]
    pool.integrity([pages, twice])
    pool.forget()
    assert pool.find(("root", 1), np.array([1, 2])) == []
    pool.integrity([pages, twice])


def test_what_follows_a_forgotten_page_is_remembered_anew() -> None:
    pool = pool_of(4)
    first, twice = pool.allocate(1), pool.allocate(2)
    tokens = np.array([1, 2, 3, 4])
    pool.remember("root", tokens[:2], first)
    pool.remember("root", tokens, twice)  # its second page follows the first's
    pool.release(first)
    assert [pool.allocate(1) for _ in range(2)] == [[3], first]
    assert pool.find("root", tokens) == []
    pool.remember("root", tokens, twice)
    assert pool.find("root", tokens) == twice
    pool.integrity([twice, [3], first])


def test_integrity_sees_a_cache_that_is_wrong() -> None:
    for broken in ("_entry_of", "_page_of", "_idle"):
        pool = pool_of(3)
        pages = pool.allocate(1)
        pool.remember("root", np.array([1, 2]), pages)
        pool.release(pages)
        pool.integrity([])
        getattr(pool, broken).clear()
        with pytest.raises(AssertionError):
            pool.integrity([])


def test_a_page_that_is_not_full_is_taken_by_one_who_goes_on_in_it() -> None:
    pool = PagePool(4, 4)
    tokens = np.array([1, 2, 3, 4, 5, 6])
    pages = pool.allocate(2)
    pool.remember("root", tokens, pages)
    assert pool.find_part("root", tokens, pool.find("root", tokens)) is None, "it is held"
    pool.release(pages)
    found = pool.find("root", tokens)
    assert found == pages[:1]
    for other, expected in (
        ([1, 2, 3, 4, 5, 6, 9], (pages[1], 2)),
        ([1, 2, 3, 4, 5], None),
        ([1, 2, 3, 4, 5, 9, 6], None),
        ([1, 2, 3, 5, 5, 6], None),
    ):
        given = np.array(other)
        assert pool.find_part("root", given, pool.find("root", given)) == expected
    pool.share(found)
    pool.take_part(pages[1])
    pool.integrity([pages])
    assert pool.find_part("root", tokens, found) is None
    longer = np.array([1, 2, 3, 4, 5, 6, 7])
    pool.remember("root", longer, pages)
    pool.release(pages)
    assert pool.find_part("root", np.append(longer, 8), found) == (pages[1], 3)
    assert set(pool.allocate(4)) == {0, 1, 2, 3}, "all can be had, those that are remembered last"
    assert pool.find("root", longer) == []
    assert pool.find_part("root", longer, []) is None
    pool.integrity([range(4)])
    without = PagePool(4, 4, parts=False)
    pages = without.allocate(2)
    without.remember("root", tokens, pages)
    without.release(pages)
    assert without.find_part("root", tokens, without.find("root", tokens)) is None
