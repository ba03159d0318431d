"""The operators of a second engine: near the reference, and rounded where an inference engine
rounds."""

import torch

from isobit.kernels import KVStore, Layout, get_ops, inference_engine_ops
from isobit.precision import BF16, E4M3, QuantSpec, quantize
from tests.models import require

from .helpers import normal

REFERENCE = get_ops("reference")
SEPARATE = inference_engine_ops(REFERENCE)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def test_fp8_products_are_scaled_block_sums() -> None:
    for columns in (48, 128, 300):
        a = quantize(normal(9, columns), QuantSpec(E4M3, "1x128", "fp32"))
        b = quantize(normal(140, columns, seed=1), QuantSpec(E4M3, "128x128", "fp32"))
        bias = normal(140, seed=2)
        exact = REFERENCE.product(a, b, bias, torch.float32)
        assert _error(SEPARATE.product(a, b, bias, torch.float32), exact) < 1e-6
        assert not torch.equal(SEPARATE.product(a, b, bias, torch.float32), exact)


def test_logits_are_rounded_to_bf16() -> None:
    hidden, head = normal(5, 64).bfloat16(), normal(30, 64, seed=1).bfloat16()
    logits = SEPARATE.product(hidden, head, None, torch.float32)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, logits.bfloat16().float())
    assert not torch.equal(REFERENCE.product(hidden, head, None, torch.float32), logits)


def test_row_operators_round_in_between() -> None:
    x, residual = normal(7, 64).bfloat16(), normal(7, 64, seed=1).bfloat16()
    weight = (1 + 0.1 * normal(64, seed=2)).bfloat16()
    y, summed, rstd = SEPARATE.rms_norm(x, weight, 1e-6, residual)
    expected = REFERENCE.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(summed, expected[1])
    assert torch.equal(y, (summed.float() * rstd.unsqueeze(-1)).bfloat16() * weight)
    assert 0 < _error(y, expected[0]) < 0.005
    gate_up = normal(7, 128, seed=3).bfloat16()
    assert (
        0 < _error(SEPARATE.gate_mul("silu", gate_up), REFERENCE.gate_mul("silu", gate_up)) < 0.005
    )


def test_attention_rounds_the_probabilities() -> None:
    layout = Layout.packed([37, 5])
    q, k, v = (normal(42, heads, 16, seed=heads).bfloat16() for heads in (4, 2, 2))
    for kv, limit in ((None, 0.01), (QuantSpec(E4M3, "row", "fp32"), 0.01)):
        store = KVStore.allocate(layout.num_slots, 2, 16, kv, BF16)
        REFERENCE.kv_write(store, k, v, layout)
        found, lse = SEPARATE.attention(q, store, layout, 0.25)
        expected, expected_lse = REFERENCE.attention(q, store, layout, 0.25)
        assert 0 < _error(found, expected) < limit
        torch.testing.assert_close(lse, expected_lse)


def test_logprobs_are_a_float32_log_softmax() -> None:
    logits, tokens = normal(6, 50), torch.arange(6)
    found, entropy = SEPARATE.token_logprobs(logits, tokens, 0.7)
    expected, expected_entropy = REFERENCE.token_logprobs(logits, tokens, 0.7)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=1e-5)


def test_a_token_that_was_cut_off_has_no_part_in_the_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    assert (
        SEPARATE.token_logprobs(logits, torch.tensor([0]), 1.0)[1].item()
        == torch.tensor(2.0).log().item()
    )


def test_what_both_engines_compute_alike_has_the_bits_of_the_learners_backend() -> None:
    for backend in ("reference", "native"):
        require(backend)
        separate, x = inference_engine_ops(get_ops(backend)), normal(9, 200)
        spec = QuantSpec(E4M3, "1x128", "fp32")
        assert torch.equal(
            separate.quantize(x, spec).data.view(torch.uint8),
            quantize(x, spec).data.view(torch.uint8),
        )
        keys = torch.tensor([[7, i, 0, 3] for i in range(9)])
        assert torch.equal(separate.sample(x, keys, 0.9), REFERENCE.sample(x, keys, 0.9))
