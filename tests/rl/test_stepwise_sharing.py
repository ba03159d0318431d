"""Data of a call that begin with the same tokens share their rows: the same log-probabilities bit
for bit, the gradient up to rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.kernels import Copies
from isobit.model import Model
from isobit.rl.learner.forward import forward
from isobit.rl.stepwise import Datum, StepwiseLearner
from isobit.rl.stepwise import data as stepwise_data
from isobit.rl.stepwise.data import pack
from tests.models import require, tiny_model

from .helpers import distance, first_only, seen_by_rows
from .stepwise_helpers import as_data, frozen, gradients, learner, sampled, saved_base

FAMILIES = ["llama", "qwen3", "qwen3_moe", "olmo3", "gpt_oss"]


def datum(*tokens: int) -> Datum:
    """Each token predicts itself; the last two teach."""
    weights = torch.zeros(len(tokens))
    weights[-2:] = torch.tensor([1.0, -0.5])[-len(tokens) :]
    return Datum(tokens, {"target_tokens": torch.tensor(tokens), "weights": weights})


TREE = [
    datum(1, 2, 3, 4, 5, 6),
    datum(1, 2, 3, 4, 7, 8, 9),
    datum(9, 9, 3),
    datum(1, 2, 3, 4, 7, 8, 2, 2),  # begins as the second, which begins as the first
    datum(1, 2, 3),  # all of it is there
    datum(9, 9, 3),
]


def test_rows_by_hand() -> None:
    packed = pack(TREE)
    assert packed.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 3, 2, 2]
    assert packed.layout.row_start.tolist() == [0, 6, 9, 12, 14]
    assert packed.layout.context.tolist() == [0, 4, 0, 6]
    assert packed.layout.page_table[3].tolist() == [0, 1, 2, 3, 6, 7, 12, 13]
    assert packed.rows.tolist() == [
        *(0, 1, 2, 3, 4, 5),
        *(0, 1, 2, 3, 6, 7, 8),
        *(9, 10, 11),
        *(0, 1, 2, 3, 6, 7, 12, 13),
        *(0, 1, 2),
        *(9, 10, 11),
    ]
    assert packed.rows_shared == 4 + 6 + 3 + 3
    assert pack(TREE, share=False).rows_shared == 0


def test_too_little_in_common_is_not_shared() -> None:
    """There is little to gain then."""
    alike = [datum(1, *range(2 + 12 * n, 14 + 12 * n)) for n in range(4)]
    assert pack(alike).rows_shared == 0
    assert pack([*alike, alike[0]]).rows_shared == 13 + 3


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=12))
def test_every_row_sees_the_tokens_of_its_own_datum(drawn: list[list[int]]) -> None:
    packed = pack([datum(*tokens) for tokens in drawn])
    seen = seen_by_rows(packed)
    wanted = [tokens[: end + 1] for tokens in drawn for end in range(len(tokens))]
    assert [seen[row] for row in packed.rows.tolist()] == wanted
    for place, row in enumerate(packed.whole.tolist()):
        assert int(packed.context.tokens[row]) == int(packed.tokens[place])


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_have_the_bits_of_data_apart(
    family: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control takes for the same what is not."""
    require(backend)
    model = tiny_model("fp8", family, backend=backend, scale=4)
    with torch.no_grad():
        wanted, found = (forward(model, pack(TREE, share), 1.0)[0] for share in (False, True))
        assert torch.equal(found, wanted)
        monkeypatch.setattr(stepwise_data, "_in_common", lambda one, other: 2)
        assert not torch.equal(forward(model, pack(TREE), 1.0)[0], wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_data_apart(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, up to its rounding; without the gradients of the other copies it is another
    one."""
    found = dict[str, Any]()
    for case, least in (("apart", 2.0), ("shared", 0.1), ("broken", 0.1)):
        monkeypatch.setattr(stepwise_data, "_LEAST_SHARED", least)
        if case == "broken":
            monkeypatch.setattr(Copies, "added", first_only)
        ours = StepwiseLearner(tiny_model("float32", family, scale=4))
        found[case] = ours.forward_backward(TREE, "cross_entropy", {}), gradients(ours)
    assert found["shared"][0].metrics == found["apart"][0].metrics
    assert distance(found["shared"][1], found["apart"][1]) < 1e-5
    assert distance(found["broken"][1], found["apart"][1]) > 1e-2


@pytest.mark.parametrize("grad", [False, True])
def test_a_group_is_computed_once_as_far_as_its_prompt_goes(
    tmp_path: Path, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the model, and rows of the output head where nothing is learned; with the bits of
    sampling, and the gradient near that of whole data."""
    base = frozen(saved_base(tmp_path / "base"))
    drawn = sampled(base, None, 1)
    given = as_data(drawn)
    rows, heads = list[int](), list[int]()
    transformer = type(base.transformer)
    hidden, head = transformer.hidden, transformer.head_logprobs

    def counted(self: Any, tokens: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        rows.append(len(tokens))
        return hidden(self, tokens, *rest, **more)

    def counted_head(self: Any, x: torch.Tensor, *rest: Any, **more: Any) -> Any:
        heads.append(len(x))
        return head(self, x, *rest, **more)

    monkeypatch.setattr(transformer, "hidden", counted)
    monkeypatch.setattr(transformer, "head_logprobs", counted_head)
    ours = learner(base, tokens=1000)
    asked = ours.forward_backward if grad else ours.forward
    outputs = asked(given, "importance_sampling", {})
    for row, one in zip(outputs.logprobs, drawn):
        assert row[-len(one.token_ids) :].tolist() == one.logprobs
    distinct = {each.tokens[: end + 1] for each in given for end in range(len(each.tokens))}
    assert rows == [len(distinct)]
    assert sum(rows) < 0.8 * sum(len(each.tokens) for each in given)
    assert sum(heads) < sum(len(each.tokens) for each in given)


def test_recurrent_layers_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since their backward is of whole sequences."""
    shares = list[bool]()
    real = pack

    def noted(data: Any, share: bool = True, images: Any = None) -> Any:
        shares.append(share)
        return real(data, share, images)

    monkeypatch.setattr("isobit.rl.stepwise.learner.pack", noted)
    for family in ("qwen3", "qwen3_5_text"):
        model: Model = tiny_model("float32", family, scale=4)
        StepwiseLearner(model).forward_backward(TREE, "cross_entropy", {})
    assert shares == [True, False]
