"""The fused output head against the reference's product, log-probabilities, draws and gradients.

Logits are float32 sums here and float64 in the reference; they differ by at most C + 2 units of the
sum of magnitudes (`logit_error`), to which `test_sampling.py` adds what follows.
"""

import pytest
import torch
from torch import Tensor

from isobit.kernels import Watching, get_ops
from isobit.kernels.gpu import ARCHITECTURES, HOPPER
from isobit.kernels.head import triton as head
from isobit.kernels.triton.launch import compile_for, record_launches

from ..helpers import draw, keys_of, same
from .helpers import DEVICE
from .test_sampling import UNIT, check_draws, entropy_bound, logprob_bound

REFERENCE = get_ops("reference", "exact")
T, V, C = 70, 300, 48
DTYPES = [torch.bfloat16, torch.float32]


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden rows, the head's weight with a gap between its rows, and tokens; the first and last of
    the vocabulary."""
    weight = (draw(1, V, C + 16, dtype=torch.float32) * 0.5).to(dtype)[:, :C]
    tokens = torch.randint(0, V, (T,), generator=torch.Generator().manual_seed(0))
    tokens[:4] = torch.tensor([0, 127, 128, V - 1])
    return draw(0, T, C, dtype=dtype), weight, tokens


def on_device(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


def head_on_device(weight: Tensor) -> Tensor:
    """With its stride, which `to` would not keep."""
    return torch.as_strided(weight, (V, C + 16), (C + 16, 1)).to(DEVICE)[:, :C]


def logit_error(hidden: Tensor, weight: Tensor, temperature: float) -> float:
    return (
        (C + 2)
        * UNIT
        * float((hidden.double().abs() @ weight.double().abs().t()).max())
        / temperature
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logprobs_and_entropies_are_the_references(dtype: torch.dtype, temperature: float) -> None:
    hidden, weight, tokens = operands(dtype)
    rows, chosen = on_device(hidden, tokens)
    found = head.head_logprobs(rows, head_on_device(weight), chosen, temperature)
    z = REFERENCE.product(hidden, weight, None, torch.float32) / temperature
    wanted = REFERENCE.token_logprobs(z, tokens, 1.0)
    error = logit_error(hidden, weight, temperature)
    assert float((found[0].cpu() - wanted[0]).abs().max()) < logprob_bound(z, error)
    assert float((found[1].cpu() - wanted[1]).abs().max()) < entropy_bound(z, error)
    other = head.head_logprobs(rows, head_on_device(weight), chosen, temperature + 0.01)
    assert float((other[0].cpu() - wanted[0]).abs().max()) > logprob_bound(z, error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_the_same_in_every_batch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, tokens = operands(dtype)
    (rows, chosen), weight = on_device(hidden, tokens), head_on_device(weight)
    whole = head.head_logprobs(rows, weight, chosen, 0.7)
    for picked in ([69], [5], list(range(64, 70)), [68, 3, 66, 0]):
        for ours, theirs in zip(
            head.head_logprobs(rows[picked], weight, chosen[picked], 0.7), whole
        ):
            assert same(ours, theirs[picked])
    monkeypatch.setattr(head, "PARTIALS_AT_ONCE", 4 * 32 * 33)  # 33 rows a launch
    for ours, theirs in zip(head.head_logprobs(rows, weight, chosen, 0.7), whole):
        assert same(ours, theirs)


def test_other_tiles_have_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a tile that depended on the batch would be noticed."""
    hidden, weight, tokens = operands(torch.bfloat16)
    (rows, chosen), weight = on_device(hidden, tokens), head_on_device(weight)
    before = head.head_logprobs(rows, weight, chosen, 0.7)[0]
    monkeypatch.setattr(head, "VOCABULARY_TILE", {torch.bfloat16: 64})
    assert not same(head.head_logprobs(rows, weight, chosen, 0.7)[0], before)


@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize("block_t", [16, 32, 64, 128])
def test_the_tile_of_rows_changes_no_bit(
    block_t: int, race: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is summed over the vocabulary is summed in the same tree, whatever rows stand beside.
    The control is a tile of other tokens, above."""
    hidden, weight, tokens = operands(torch.bfloat16)
    (rows, chosen, keys), weight = on_device(hidden, tokens, keys_of(T)), head_on_device(weight)

    def run() -> tuple[Tensor, ...]:
        if race:
            return head.head_sample(rows, weight, keys, 0.7)
        return head.head_logprobs(rows, weight, chosen, 0.7)

    whole = run()
    _, block_k, warps, stages = head._tile(1, torch.bfloat16)
    monkeypatch.setattr(
        head, "_tile", lambda rows, dtype: (block_t, block_k, warps * max(block_t // 64, 1), stages)
    )
    assert all(same(ours, theirs) for ours, theirs in zip(run(), whole, strict=True))


def test_only_many_rows_on_hopper_have_the_larger_tile() -> None:
    assert [head._tile(rows, torch.bfloat16)[0] for rows in (1, 64, 65, 8192)] == [64, 64, 128, 128]
    for architecture in ARCHITECTURES.values():
        compile_for(architecture)
        tiles = {head._tile(rows, dtype)[1] for rows in (1, 8192) for dtype in (torch.bfloat16,)}
        assert tiles == {64}, "the step along C decides bits"
        assert (head._tile(8192, torch.bfloat16)[0] == 128) == (architecture is HOPPER)
    compile_for(HOPPER)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_draws_are_the_references_and_have_the_learners_bits(
    dtype: torch.dtype, temperature: float
) -> None:
    """Several keys a row: the log-probabilities of the draws are those that the learner computes of
    its own rows."""
    hidden, weight, _ = operands(dtype)
    source = torch.arange(90) * 7 % T
    keys = keys_of(90)
    rows, device_keys, index = on_device(hidden, keys, source)
    tokens, logprobs = head.head_sample(
        rows, head_on_device(weight), device_keys, temperature, index
    )
    logits = REFERENCE.product(hidden, weight, None, torch.float32)[source]
    assert (
        check_draws(
            tokens.cpu(), logits, keys, temperature, logit_error(hidden, weight, temperature)
        )
        <= 1
    )
    learned = head.head_logprobs(rows[index].clone(), head_on_device(weight), tokens, temperature)[
        0
    ]
    assert same(logprobs, learned)
    other = head.head_logprobs(
        rows[index].clone(), head_on_device(weight), tokens, temperature * (1 + 2.0**-20)
    )[0]
    assert not same(logprobs, other)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_temperature_for_each_row(dtype: torch.dtype) -> None:
    """The bits of every row with its temperature as one number; the next row's would be noticed."""
    hidden, weight, _ = operands(dtype)
    (rows, keys), weight = on_device(hidden[:6], keys_of(6)), head_on_device(weight)
    each = torch.tensor([1.0, 0.7, 1.3, 1.0, 0.05, 4.0])
    found = head.head_sample(rows, weight, keys, each.to(DEVICE))
    alone = [
        head.head_sample(rows[i : i + 1], weight, keys[i : i + 1], float(each[i])) for i in range(6)
    ]
    assert all(
        same(ours, torch.cat(theirs)) for ours, theirs in zip(found, zip(*alone), strict=True)
    )
    rolled = head.head_sample(rows, weight, keys, each.roll(1).to(DEVICE))
    assert not same(rolled[1], found[1])


@pytest.mark.parametrize("counts", [(1, 64), (65, 3000)])
def test_rollout_and_learner_run_the_same_instructions(counts: tuple[int, int]) -> None:
    """One binary for both, for few rows and for many: the same kernels with the same constants,
    told by a runtime argument what to do."""
    weight = torch.empty(151936, 1024, dtype=torch.bfloat16, device="meta")
    rows = [torch.empty(count, 1024, dtype=torch.bfloat16, device="meta") for count in counts]
    given = [
        torch.empty(n, *size, dtype=torch.int64, device="meta")
        for n, size in zip(counts, ((4,), ()))
    ]
    with record_launches() as found:
        head.head_sample(rows[0], weight, given[0], 0.7)
        head.head_logprobs(rows[1], weight, given[1], 0.7)
    assert len(found) == 4
    for rollout, learner in zip(found[:2], found[2:]):
        assert rollout.kernel is learner.kernel
        assert rollout.constants == learner.constants
        assert (rollout.num_warps, rollout.num_stages) == (learner.num_warps, learner.num_stages)
        names, free = rollout.kernel.arg_names, {"num_rows", "race"}
        for name, ours, theirs in zip(names, rollout.arguments, learner.arguments):
            if isinstance(ours, Tensor):
                assert isinstance(theirs, Tensor)
                assert ours.dtype == theirs.dtype
            else:
                assert name in free or ours == theirs, name


@pytest.mark.slow
def test_draws_depend_on_the_row_and_the_key_alone() -> None:
    hidden, weight, _ = operands(torch.bfloat16)
    keys = keys_of(T)
    (rows, device_keys), weight = on_device(hidden, keys), head_on_device(weight)
    base = head.head_sample(rows, weight, device_keys, 0.9)
    order = torch.randperm(T, generator=torch.Generator().manual_seed(1))[:37]
    for ours, theirs in zip(head.head_sample(rows[order], weight, device_keys[order], 0.9), base):
        assert same(ours, theirs[order])
    rows, device_keys = rows[:32], device_keys[:32]
    tokens = head.head_sample(rows, weight, device_keys, 4.0)[0]
    for column, step in ((0, 1), (0, 1 << 40), (1, 1), (2, 1), (3, 1), (3, 1 << 31)):
        changed = device_keys.clone()
        changed[:, column] += step
        assert (
            float((tokens == head.head_sample(rows, weight, changed, 4.0)[0]).double().mean()) < 0.2
        )


@pytest.mark.slow
def test_frequencies_are_the_probabilities() -> None:
    """Chi-squared with 19 degrees of freedom: above 50 once in 10,000; it must notice a temperature
    of 1.5."""
    count, vocabulary = 1024, 20
    hidden = draw(3, 1, 16, dtype=torch.float32)
    weight = draw(4, vocabulary, 16, dtype=torch.float32) * 0.25
    rows, table, keys, source = on_device(
        hidden, weight, keys_of(count), torch.zeros(count, dtype=torch.int64)
    )
    tokens = head.head_sample(rows, table, keys, 1.0, source)[0].cpu()
    logits = (hidden.double() @ weight.double().t())[0]

    def chi_squared(temperature: float) -> float:
        expected = torch.softmax(logits / temperature, -1) * count
        return float(
            ((torch.bincount(tokens, minlength=vocabulary) - expected) ** 2 / expected).sum()
        )

    assert chi_squared(1.0) < 50 < chi_squared(1.5)


def both(found: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
    """The gradients of hidden states and of a trained weight."""
    assert found[1] is not None
    return found[0], found[1]


def test_no_rows() -> None:
    hidden, weight, tokens = operands(torch.bfloat16)
    (rows, chosen), weight = on_device(hidden[:0], tokens[:0]), head_on_device(weight)
    assert [x.shape for x in head.head_logprobs(rows, weight, chosen, 1.0)] == [(0,), (0,)]
    keys = torch.empty(0, 4, dtype=torch.int64, device=DEVICE)
    assert [x.shape for x in head.head_sample(rows, weight, keys, 1.0)] == [(0,), (0,)]
    nothing = torch.empty(0, device=DEVICE)
    dhidden, dweight = both(head.head_backward(REFERENCE, nothing, rows, weight, chosen, 1.0))
    assert dhidden.shape == (0, C)
    assert not dweight.any()


class _Products(Watching):
    """The reference's, of operands on the device."""

    def product(self, a: Tensor, b: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
        return REFERENCE.product(a.cpu(), b.cpu(), bias, out).to(DEVICE)

    def gradient_product(
        self, a: Tensor, b: Tensor, out: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        found = REFERENCE.gradient_product(a.cpu(), b.cpu(), out).to(DEVICE)
        return found if into is None else into.add_(found)


PRODUCTS = _Products(REFERENCE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_entropys_gradient_is_the_references(dtype: torch.dtype) -> None:
    """With that of the log-probabilities, at another temperature than 1. The control is the
    reference without the entropy's."""
    hidden, weight, tokens = operands(dtype)
    dlogprobs, dentropy = (draw(n, T, dtype=torch.float32) for n in (5, 6))
    dy, x, targets, of_entropy = on_device(dlogprobs, hidden, tokens, dentropy)
    given = (PRODUCTS, dy, x, head_on_device(weight), targets, 0.7)
    found = both(head.head_backward(*given, of_entropy))
    wanted = both(REFERENCE.head_backward(dlogprobs, hidden, weight, tokens, 0.7, dentropy))
    without = both(REFERENCE.head_backward(dlogprobs, hidden, weight, tokens, 0.7))
    near = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for ours, theirs, other in zip(found, wanted, without):
        scale = float(theirs.abs().max())
        assert float((ours.cpu().float() - theirs.float()).abs().max()) < near * scale
        assert float((other.float() - theirs.float()).abs().max()) > 0.1 * scale


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_the_references(dtype: torch.dtype, temperature: float) -> None:
    """Element by element: a gradient of a logit is off by its probability's relative error and four
    roundings, and in BF16 by a unit, 2^-8, where the two sides round apart; what the products make
    of that is the bound."""
    hidden, weight, tokens = operands(dtype)
    dlogprobs = draw(5, T, dtype=torch.float32)
    dy, x, targets = on_device(dlogprobs, hidden, tokens)
    on_head = head_on_device(weight)
    found = both(head.head_backward(PRODUCTS, dy, x, on_head, targets, temperature))
    wanted = both(REFERENCE.head_backward(dlogprobs, hidden, weight, tokens, temperature))
    z = REFERENCE.product(hidden, weight, None, torch.float32) / temperature
    slope = (dlogprobs / temperature).unsqueeze(1).double()
    probability = torch.softmax(z.double(), -1)
    onehot = torch.nn.functional.one_hot(tokens, V)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 4 * UNIT
    off = slope.abs() * (probability * logprob_bound(z) + (onehot - probability).abs() * rounding)
    for ours, theirs, bound in (
        (found[0], wanted[0], off @ weight.double().abs()),
        (found[1], wanted[1], off.t() @ hidden.double().abs()),
    ):
        assert ours.dtype == theirs.dtype
        last = 2.0**-7 if theirs.dtype == torch.bfloat16 else 4 * UNIT
        assert bool(
            (
                (ours.cpu().double() - theirs.double()).abs()
                <= bound + last * theirs.double().abs()
            ).all()
        )


def test_a_wrong_token_breaks_the_gradients_bound() -> None:
    """The control of the gradients' test: another token's gradient is far outside."""
    hidden, weight, tokens = operands(torch.float32)
    dlogprobs = draw(5, T, dtype=torch.float32)
    other = (tokens + 1) % V
    dy, x, targets = on_device(dlogprobs, hidden, other)
    found = head.head_backward(PRODUCTS, dy, x, head_on_device(weight), targets, 1.0)
    wanted = REFERENCE.head_backward(dlogprobs, hidden, weight, tokens, 1.0)
    assert float((found[0].cpu() - wanted[0]).abs().max()) > 0.1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_logits_fill_every_element(dtype: torch.dtype) -> None:
    """Rows of (onehot - softmax) add up to 0, and far tokens have exactly no gradient."""
    logits = torch.zeros(3, 5000)
    logits[:, :8] = 200.0
    tokens, dlogprobs = torch.tensor([0, 7, 4999]), torch.tensor([1.0, -2.0, 0.5])
    dy, z, targets = on_device(dlogprobs, logits, tokens)
    gradient = head.logits_gradient(dy, z, targets, 1.0, dtype).cpu().float()
    wanted = -torch.softmax(logits, -1)
    wanted[torch.arange(3), tokens] += 1
    assert torch.equal(gradient, wanted * dlogprobs.unsqueeze(1))
