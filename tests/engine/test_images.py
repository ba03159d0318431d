"""Prompts with images in the engine: rollout and learner compute the same bits, whatever the engine
decides, and an image is told from another."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isobit.engine.engine import Engine
from isobit.engine.scheduler import Scheduler
from isobit.engine.sequences import Sequence
from isobit.engine.types import Completion, Sampling
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.model.images.bank import Image
from isobit.rl.algorithm.samples import Sample
from isobit.rl.learner.forward import forward
from isobit.rl.learner.packing import pack
from tests.model.seeing import flat, seeing, with_images, words

SETTINGS: dict[str, dict[str, Any]] = {
    "no cache": {"prefix_cache": False},
    "chunks of 7": {"max_batch_tokens": 7, "max_sequences": 5},
    "pages of 4": {"page_size": 4},
    "few pages": {"kv_pages": 12},
    "no capture": {"cuda_graphs": False},
    "drafts": {"num_speculative_tokens": 3},
}
SAMPLING = Sampling(n=3, max_new_tokens=9, seed=5, ignore_eos=True)
Bits = list[list[tuple[tuple[int, ...], tuple[float, ...]]]]


def _prompts(first: Image, second: Image) -> list[list[int]]:
    head, middle, tail = words(0, 18), words(1, 3), words(2, 5)
    return [
        flat(head, first, tail),
        flat(head, second, tail),
        flat(head, first, middle, second, tail),
        flat(head, tail),
        flat(head, first, middle, first, tail),
        flat(head, second),
    ]


def _bits(groups: list[list[Completion]]) -> Bits:
    return [[(tuple(c.token_ids), tuple(c.logprobs)) for c in group] for group in groups]


def _differing(model: Model, groups: list[list[Completion]], share: bool) -> int:
    """How many log-probabilities of the learner are not the rollout's bits."""
    samples = [
        Sample(
            n,
            c.sample_index,
            tuple(c.prompt_token_ids),
            tuple(c.token_ids),
            tuple(c.logprobs),
            "",
            False,
            1,
        )
        for n, group in enumerate(groups)
        for c in group
    ]
    packed = pack(samples, share, images=model.transformer.images)
    assert (packed.rows_shared > 0) == share
    logprobs, _ = forward(model, packed, 1.0)
    rollout = torch.tensor([x for s in samples for x in s.rollout_logprobs])
    return int((logprobs.detach() != rollout).sum())


@pytest.mark.parametrize(
    ("name", "precision", "backend"),
    [
        ("qwen3_vl", "fp8", "native"),
        ("qwen3_vl", "bf16", "native"),
        ("qwen2_5_vl", "fp8", "native"),
        ("llava", "fp8", "native"),
        pytest.param("qwen3_5", "fp8", "native", marks=pytest.mark.slow),
        pytest.param("qwen3_vl_moe", "fp8", "native", marks=pytest.mark.slow),
    ],
)
def test_the_learner_has_the_bits_of_the_rollout(
    name: str, precision: str, backend: str, tmp_path: Path
) -> None:
    """In eight settings of the engine, with and without shared prompts. The controls: another
    image, and none, are answered otherwise under one cache; and so are wrong turns."""
    theirs = seeing(tmp_path, name)
    model, *images = with_images(tmp_path, precision, backend, theirs, name)
    prompts, linear = _prompts(*images), model.config.linear is not None
    engine = Engine(model, page_size=16)
    groups = engine.generate(prompts, SAMPLING)
    plain = _bits(groups)
    again = engine.generate(prompts, SAMPLING)
    assert _bits(again) == plain
    assert engine.stats.cached_tokens > 0.5 * engine.stats.prompt_tokens
    for setting, size in SETTINGS.items():
        size = {"kv_pages": 9} if setting == "few pages" and linear else size
        other = Engine(model, **{"page_size": 16, **size})
        assert _bits(other.generate(prompts, SAMPLING)) == plain, setting
        assert other.stats.preemptions > 0 or setting != "few pages"
    for share in (False, True)[: 1 if linear else 2]:
        assert _differing(model, groups, share) == 0
    assert len({str(group) for group in plain}) == len(prompts)


@pytest.mark.slow
def test_the_reference_has_its_own_bits(tmp_path: Path) -> None:
    """Cut into chunks too."""
    model, *images = with_images(
        tmp_path, "fp8", "reference", seeing(tmp_path, "qwen3_vl"), "qwen3_vl"
    )
    sampling, bits = Sampling(n=2, max_new_tokens=2, seed=5, ignore_eos=True), list[Bits]()
    for size in ({}, {"max_batch_tokens": 7, "max_sequences": 5}):
        groups = Engine(model, page_size=16, **size).generate(_prompts(*images)[:2], sampling)
        bits.append(_bits(groups))
        assert _differing(model, groups, True) == 0
    assert bits[0] == bits[1]


def test_a_row_of_another_image_is_noticed(tmp_path: Path) -> None:
    """By the learner, whose log-probabilities are then other ones: of one row among twelve."""
    model, *images = with_images(
        tmp_path, "fp8", "native", seeing(tmp_path, "qwen3_vl"), "qwen3_vl"
    )
    groups = Engine(model).generate(_prompts(*images)[:1], SAMPLING)
    assert _differing(model, groups, True) == 0
    bank, (first, second) = model.transformer.images, images
    assert bank is not None
    rows = tuple(row.clone() for row in first.rows)
    for row, other in zip(rows, second.rows):
        row[5] = other[5]
    bank._images[0] = replace(first, rows=rows)
    assert _differing(model, groups, True) > 0


def test_stale_turns_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoding row that turned by its position would have other bits."""
    model, *images = with_images(
        tmp_path, "fp8", "native", seeing(tmp_path, "qwen3_vl"), "qwen3_vl"
    )
    turns_of = Scheduler.turns

    def stale(self: Scheduler, sequence: Sequence, start: int, stop: int) -> Any:
        turns = turns_of(self, sequence, start, stop)
        return turns if start < sequence.owner.prompt.size else np.arange(start, stop)

    monkeypatch.setattr(Scheduler, "turns", stale)
    groups = Engine(model).generate(_prompts(*images)[:1], SAMPLING)
    assert _differing(model, groups, True) > 0
    text = Engine(model).generate([words(0, 18)], SAMPLING)
    assert _differing(model, text, True) == 0


def test_what_an_engine_refuses(tmp_path: Path) -> None:
    """In a line: ids of no image, an image that is cut, and a repetition penalty; which text may
    have."""
    model, *images = with_images(tmp_path, "fp8", "native", seeing(tmp_path, "llava"), "llava")
    engine, (first, second) = Engine(model), images
    for prompt, more, match in (
        ([1, second.ids.stop], {}, r"token id \d+ is not in the model's vocabulary"),
        ([1, *first.ids[1:]], {}, "the image at token 1 is not whole"),
        (flat([1], first, [3]), {"repetition_penalty": 1.5}, "repetition_penalty is not supported"),
    ):
        with pytest.raises(IsobitError, match=match):
            engine.generate([prompt], Sampling(max_new_tokens=2, **more))
    assert engine.generate([[1, 3]], Sampling(max_new_tokens=2, repetition_penalty=1.5))
    model.transformer.images = None
    with pytest.raises(IsobitError, match="is not in the model's vocabulary of 64"):
        Engine(model).generate([flat([1], first)], SAMPLING)
