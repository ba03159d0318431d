"""Long completions: rollout and learner have the same bits after thousands of tokens, and
bookkeeping grows with them.

`benchmarks/long_completions.py`, whose code this runs, has 8,192 and 32,768 tokens on both
backends."""

import pytest

from benchmarks.long_completions import PROMPT, SAMPLES, compare
from tests.models import require

LENGTHS = {"native": 8192, "reference": 2048}


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["fp8", "bf16"])
@pytest.mark.parametrize("backend", LENGTHS)
def test_zero_bits_differ_in_long_completions(backend: str, preset: str) -> None:
    """Of two samples, one preempted and computed again, whose prompt is prefilled in chunks; the
    control is a learner whose attention sees the last half of the keys: it differs where a token
    sees more, and nowhere before."""
    require(backend)
    length = LENGTHS[backend]
    found = compare(backend, preset, length)
    assert found.differing.shape == (SAMPLES, length - PROMPT)
    assert found.differing.sum() == 0
    assert found.preemptions > 0
    assert found.prefilled > PROMPT
    whole = max(
        length // 2 - PROMPT + 1, 0
    )  # tokens whose last key is the first that half a context leaves out
    assert found.control[:, :whole].sum() == 0
    assert found.control[:, whole:].double().mean() > 0.5
