from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from isobit.engine.engine import Engine
from isobit.engine.pages import most_cache_bytes
from isobit.engine.types import Completion, EngineSize, Sampling
from isobit.errors import IsobitError
from isobit.kernels import KVStore
from isobit.model import Model
from isobit.model.text.tokenizer import Tokenizer
from tests.models import ALPHABET

from .helpers import CONFIG, fresh, outcome, rollout, tiny

MakeEngine = Callable[..., Engine]


def greedy_with_transformers(
    directory: Path, prompts: list[list[int]], count: int
) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    generated = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=count, num_beams=1
        )
        generated.append(ids[0, len(prompt) :].tolist())
    return generated


def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, make_engine: MakeEngine) -> None:
    model = tiny("float32")
    model.save(tmp_path)
    prompts = [[5, 6, 7], [12], [9, 30, 31, 8, 20] * 6]
    groups = make_engine(model, page_size=4).generate(
        prompts, Sampling(max_new_tokens=30, temperature=0)
    )
    assert [group[0].token_ids for group in groups] == greedy_with_transformers(
        tmp_path, prompts, 30
    )


@pytest.mark.slow
def test_greedy_tokens_of_a_real_model_are_those_of_transformers(
    stories: Path, make_engine: MakeEngine
) -> None:
    model = Model.load(stories, "float32", "reference", "exact")
    texts = ["Once upon a time", "Tom had a red ball."]
    groups = make_engine(model).generate(texts, Sampling(max_new_tokens=60, temperature=0))
    expected = greedy_with_transformers(
        stories, [model.tokenizer.encode(text) for text in texts], 60
    )
    assert [group[0].token_ids for group in groups] == expected
    assert groups[0][0].text.startswith(", there was a little girl")


def test_text_token_ids_and_chat_messages_are_one_prompt_in_three_forms(
    make_engine: MakeEngine,
) -> None:
    tokenizer = Tokenizer.characters(ALPHABET)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}?"
    model = Model.init(CONFIG, tokenizer, "float32", 1, "reference")
    prompts = ["12+3=?", tokenizer.encode("12+3=?"), [{"role": "user", "content": "12+3="}]]
    groups = make_engine(model).generate(prompts, Sampling(n=2, max_new_tokens=5), [4, 4, 4])
    assert groups[0] == groups[1] == groups[2]
    assert groups[0][0].prompt_token_ids == prompts[1]
    assert [c.sample_index for c in groups[0]] == [0, 1]


def test_by_default_prompts_are_numbered_in_order(make_engine: MakeEngine) -> None:
    groups = make_engine(tiny()).generate([[5]] * 3, Sampling(max_new_tokens=8))
    assert [group[0].prompt_id for group in groups] == [0, 1, 2]
    assert len({tuple(group[0].token_ids) for group in groups}) == 3


def test_no_prompts_no_completions(make_engine: MakeEngine) -> None:
    assert make_engine(tiny()).generate([], Sampling()) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[5], [6] * 96], "prompt 1 has 96 tokens, but the model's context of 96 takes at most 95"),
        (
            [[5] * 60],
            "prompt 0 has 60 tokens and needs 5 pages of 16 tokens with 20 new ones, but the "
            "engine has 4",
        ),
        ([[5], []], "prompt 1 is empty"),
        ([[5], ""], "prompt 1 is empty"),
        ([[64]], "prompt 0: token id 64 is not in the model's vocabulary of 64"),
        ([[-1]], "prompt 0: token id -1 is not in the model's vocabulary"),
        ([[1.5]], "prompt 0: expected text, token ids or chat messages, found 1.5"),
        ([5], r"expected a list of prompts, got one of token ids; write \[ids\]"),
        ("text", "expected a list of prompts, got one text"),
        ([[{"role": "user", "content": "x"}]], "no chat template"),
    ],
)
def test_prompts_that_cannot_be_answered_are_refused_at_once(
    prompts: list, message: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny()
    monkeypatch.setattr(
        model.transformer, "hidden", None
    )  # computing anything would fail otherwise
    with pytest.raises(IsobitError, match=message) as raised:
        make_engine(model, kv_pages=4).generate(prompts, Sampling(max_new_tokens=20))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("prompt_ids", [[1], [1, -1], [1, 2**32], [1, "2"], [1, True]])
def test_prompt_ids_that_do_not_fit_are_refused(prompt_ids: list, make_engine: MakeEngine) -> None:
    with pytest.raises(IsobitError, match="prompt_ids: expected"):
        make_engine(tiny()).generate([[5], [6]], Sampling(), prompt_ids)


@pytest.mark.parametrize("name", ["kv_pages", "page_size", "max_batch_tokens", "max_sequences"])
@pytest.mark.parametrize("value", [0, -3, 1.5, True])
def test_engine_sizes_are_checked(name: str, value: object) -> None:
    with pytest.raises(
        IsobitError, match=f"engine.{name}: expected (a whole number|at least 1), got"
    ):
        Engine(tiny(), **{name: value})


def test_a_size_is_declared_once() -> None:
    """Its fields may be given as a whole, by name, or both; a name that it has not is refused."""
    size = EngineSize(kv_pages=9, page_size=4, max_sequences=3)
    other = EngineSize(kv_pages=5, max_sequences=3)
    for engine in (Engine(tiny(), size), Engine(tiny(), other, kv_pages=9, page_size=4)):
        assert (engine.pages.num_pages, engine.page_size, engine.max_sequences) == (9, 4, 3)
        assert engine.max_batch_tokens == EngineSize().max_batch_tokens
    assert Engine(tiny()).pages.num_pages == 512
    with pytest.raises(IsobitError, match=r"engine.kv_page: unknown, did you mean 'kv_pages'\?"):
        Engine(tiny(), kv_page=3)


def test_sized_for_a_number_of_sequences_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[5] * 30, [6] * 7, "12+3="]
    sampling = Sampling(n=4, max_new_tokens=20, ignore_eos=True)
    engine = Engine.sized_for(tiny("fp8"), prompts, 12, 20)
    # 30 + 20 - 1 tokens are 4 pages, for 12 sequences and a prompt beside them
    assert (engine.pages.num_pages, engine.longest_prompt) == (13 * 4, 30)
    engine.generate(prompts, sampling)
    assert (engine.stats.steps, engine.stats.preemptions) == (20, 0)
    assert (
        Engine.sized_for(tiny(), prompts, 12, 20, EngineSize(max_sequences=3)).pages.num_pages
        == 4 * 4
    )
    assert Engine.sized_for(tiny(), prompts, 12, 20, EngineSize(kv_pages=9)).pages.num_pages == 9
    # memory is the limit, but never below one sequence
    monkeypatch.setattr("isobit.engine.pages.CACHE_BYTES", 10 * engine.kv_bytes // 52)
    assert Engine.sized_for(tiny("fp8"), prompts, 12, 20).pages.num_pages == 10
    monkeypatch.setattr("isobit.engine.pages.CACHE_BYTES", 1)
    assert Engine.sized_for(tiny("fp8"), prompts, 12, 20).pages.num_pages == 4
    with pytest.raises(IsobitError, match="prompt 1 has 200 tokens"):
        Engine.sized_for(tiny(), [[5], [5] * 200], 1, 5)
    with pytest.raises(
        IsobitError, match="needs 4 pages of 16 tokens with 20 new ones, but the engine has 3"
    ):
        Engine.sized_for(tiny(), prompts, 12, 20, EngineSize(kv_pages=3))


def test_a_cache_leaves_what_others_will_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU: whoever opens an engine before its moments and gradients exist says how large they
    are."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4000, 9000))
    assert [
        most_cache_bytes(torch.device("cuda"), reserved) for reserved in (1000, 3400, 5000)
    ] == [1000, 200, 0]


def test_the_longest_prompts_that_fit_are_answered(make_engine: MakeEngine) -> None:
    groups = make_engine(tiny(), kv_pages=6).generate(
        [[5] * 95], Sampling(max_new_tokens=20, seed=1)
    )
    assert (len(groups[0][0].token_ids), groups[0][0].finish_reason) == (1, "length")
    sampling = Sampling(max_new_tokens=21, ignore_eos=True)
    groups = make_engine(tiny(), kv_pages=4).generate(
        [[5] * 44], sampling
    )  # 44 + 21 - 1 = 64 slots
    assert len(groups[0][0].token_ids) == 21


def test_progress_counts_tokens_and_completions(make_engine: MakeEngine) -> None:
    seen: list[tuple[int, int]] = []
    groups = make_engine(tiny(), max_sequences=3).generate(
        [[5], [6, 7]], Sampling(n=4, max_new_tokens=9), progress=lambda *counts: seen.append(counts)
    )
    assert seen == sorted(seen)
    assert seen[-1] == (sum(len(c.token_ids) for group in groups for c in group), 8)


def test_statistics_count_what_was_computed(make_engine: MakeEngine) -> None:
    engine = make_engine(tiny(), page_size=4)
    engine.generate([[5] * 10, [6] * 8], Sampling(n=3, max_new_tokens=7, ignore_eos=True))
    stats = engine.stats
    assert (stats.prefill_tokens, stats.decode_tokens, stats.steps) == (18, 6 * 6, 7)
    assert (stats.shared_pages, stats.copied_pages, stats.preemptions) == (8, 2, 0)
    assert stats.peak_pages == (2 + 3 * 2) + (2 + 3 * 2)
    engine.generate([[5]], Sampling(max_new_tokens=1))
    assert engine.stats.steps == 1, "the statistics are of the last call"


def test_bytes_per_token_are_counted_from_what_is_allocated() -> None:
    values = CONFIG.num_layers * 2 * CONFIG.num_kv_heads * CONFIG.head_dim
    scales = CONFIG.num_layers * 2 * CONFIG.num_kv_heads * 4
    assert Engine(tiny("float32")).kv_bytes_per_token == 4 * values
    assert Engine(tiny("bf16")).kv_bytes_per_token == 2 * values
    assert Engine(tiny("fp8"), kv_pages=7, page_size=3).kv_bytes_per_token == values + scales
    mixed = Engine(tiny({"preset": "fp8", "bf16_first_layers": 1, "bf16_last_layers": 1}))
    assert [isinstance(store, KVStore) and store.kv is None for store in mixed.stores] == [
        True,
        False,
        True,
    ]
    assert mixed.kv_bytes_per_token == (2 * values) * 2 / 3 + (values + scales) / 3


def test_an_engine_works_after_a_call_that_was_broken_off(make_engine: MakeEngine) -> None:
    engine, sampling = make_engine(tiny(), kv_pages=20), Sampling(n=3, max_new_tokens=10)

    def stop(tokens: int, completions: int) -> None:
        if tokens > 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate([[5] * 20], sampling, progress=stop)
    engine.integrity()
    assert engine.pages.num_used == 0
    assert rollout(engine, [[5] * 20], sampling) == rollout(
        make_engine(tiny()), [[5] * 20], sampling
    )


@pytest.mark.parametrize("settings", [{}, {"max_sequences": 3}, {"kv_pages": 9, "page_size": 4}])
def test_each_group_is_told_of_once_when_it_is_whole(
    make_engine: MakeEngine, settings: dict[str, int]
) -> None:
    """Before the call is over, and the same completions as it returns; telling changes none of
    them."""
    engine = make_engine(tiny(), **settings)
    sampling, prompts = Sampling(n=3, max_new_tokens=8), [[5] * 9, [6], [7, 8], [9] * 4]
    told: dict[int, list[Completion]] = {}
    unfinished: list[int] = []

    def on_group(index: int, completions: list[Completion]) -> None:
        assert index not in told
        told[index] = completions
        unfinished.append(engine.num_open)

    groups = engine.generate(prompts, sampling, on_group=on_group)
    assert [told[index] for index in range(4)] == groups
    assert outcome(groups) == outcome(engine.generate(prompts, sampling))
    if settings:
        assert unfinished[0] > 0


def test_weights_that_change_in_the_middle_are_refused(make_engine: MakeEngine) -> None:
    model = fresh("float32")
    engine = make_engine(model)
    with pytest.raises(IsobitError, match="the weights changed while 1 requests are open"):
        engine.generate([[5]], Sampling(), progress=lambda *_: model.sync())
    assert len(engine.generate([[5]], Sampling(max_new_tokens=2))[0]) == 1


def test_a_call_inside_a_call_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(tiny())
    with pytest.raises(IsobitError, match=r"Engine\.generate: 1 requests are open"):
        engine.generate(
            [[5]], Sampling(), progress=lambda *_: engine.generate([[6]], Sampling()) and None
        )


@pytest.mark.parametrize("preset", ["float32", "bf16"])
def test_weights_that_are_not_finite_stop_the_call(preset: str, make_engine: MakeEngine) -> None:
    model = fresh(preset)
    with torch.no_grad():
        model.named_parameters()["layers.1.down"][3, 3] = float("nan")
    model.sync()
    with pytest.raises(IsobitError, match="prompt 0: the model's logits hold NaN or infinity"):
        make_engine(model).generate([[5]], Sampling())
