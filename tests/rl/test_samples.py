"""Samples: through JSON and back, with the same bits."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit.rl import Sample


def sample(logprobs: tuple[float, ...] = (-0.5, -1.25), **changes: object) -> Sample:
    values: dict[str, object] = {
        "prompt_index": 7,
        "sample_index": 2,
        "prompt_ids": (1, 5, 9),
        "completion_ids": tuple(range(len(logprobs))),
        "rollout_logprobs": logprobs,
        "completion": 'a "quoted"\nline, ü',
        "truncated": True,
        "weights_version": 3,
        "reward": 0.1,
        "rewards": {"format": 0.1, "answer": None},
    }
    return Sample(**(values | changes))  # type: ignore[arg-type]


@given(st.lists(st.floats(width=32, allow_nan=False, max_value=0), max_size=8))
def test_the_text_holds_the_bits_of_every_float32(values: list[float]) -> None:
    original = sample(tuple(values))
    again = Sample.from_json(json.loads(json.dumps(original.to_json())))
    assert again == original
    pack = struct.Struct("<f").pack
    assert [pack(v) for v in again.rollout_logprobs] == [
        pack(v) for v in values
    ]  # -0.0 == 0.0, but not in bits


def test_rounded_text_would_not_hold_them() -> None:
    """The negative control: six digits, as many loggers write."""
    value = struct.unpack("<f", struct.pack("<f", -0.1234567))[0]
    assert struct.pack("<f", float(f"{value:.6f}")) != struct.pack("<f", value)


@pytest.mark.parametrize(
    "changes", [{"reward": None, "rewards": {}}, {"logprobs": ()}, {"reward": -0.0}]
)
def test_edge_cases_survive(changes: dict[str, object]) -> None:
    original = sample(**changes)  # type: ignore[arg-type]
    again = Sample.from_json(json.loads(json.dumps(original.to_json())))
    assert again == original
    assert isinstance(again.prompt_ids, tuple)


def test_further_keys_are_ignored() -> None:
    row = {"step": 4, "prompt": "1+1=", **sample().to_json()}
    assert Sample.from_json(row) == sample()


def test_every_token_has_a_logprob() -> None:
    with pytest.raises(AssertionError):
        sample((-1.0,), completion_ids=(1, 2))
