import pytest

from isobit.engine.types import Sampling
from isobit.errors import IsobitError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", True),
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", 1e-9),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.5),
        ("min_p", 2),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", None),
        ("stop", 3),
        ("ignore_eos", "no"),
        ("stop", ("",)),
        ("stop", (3,)),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(IsobitError, match=rf"^{field}(\.0)?: expected .*, got ") as raised:
        Sampling(**{field: value})  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_a_list_of_stop_strings_becomes_a_tuple() -> None:
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert Sampling(stop="text").stop == ("text",)  # type: ignore[arg-type]
    assert hash(Sampling(stop=["a"])) == hash(Sampling(stop=("a",)))  # type: ignore[arg-type]


def test_truncated_and_greedy() -> None:
    assert not Sampling().filtered
    assert Sampling(top_k=3).filtered
    assert Sampling(top_p=0.9).filtered
    assert Sampling(min_p=0.1).filtered
    assert Sampling(temperature=0).greedy
    assert not Sampling(temperature=0, top_k=3).filtered
