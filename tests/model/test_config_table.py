"""What is accepted is what `transformers` computes (`config_table.py`), and the table notices when
it is not."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from isobit.model.families import FAMILIES
from isobit.model.families.rope import Rope
from isobit.model.hub import config as reading
from tests.models import slow_where

from .config_table import CLOSE, run
from .config_variants import BASES, variants

PARTS = 6


@pytest.mark.parametrize("part", slow_where(range(PARTS), lambda part: part > 0))
@pytest.mark.parametrize("family", BASES)
def test_every_variant_is_equal_or_refused(family: str, part: int) -> None:
    """As the table says, and a refusal is one line that names the file and what is wrong there. A
    part is every sixth variant, of which neighbours in the table change the same keys."""
    for outcome in run([row for row in variants() if row.family == family][part::PARTS]):
        case = (outcome.variant.name, outcome.ours, outcome.theirs, outcome.distance)
        if outcome.variant.says:
            assert outcome.kind == "refused", case
            assert outcome.variant.says in outcome.ours, case
            assert "/variant" in outcome.ours or outcome.ours.startswith("config.json: "), case
            assert "\n" not in outcome.ours, case
        else:
            assert outcome.kind == "equal", case


def test_the_table_is_as_large_as_it_says() -> None:
    names = [(row.family, row.name) for row in variants()]
    assert len(names) == len(set(names))
    assert len(names) >= 700
    assert sum(row.says == "" for row in variants()) >= 400


def _wrong_theta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "mixtral", replace(FAMILIES["mixtral"], rope_theta=10000.0))


def _no_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "windows_of", lambda *arguments: ())


def _one_key_less(monkeypatch: pytest.MonkeyPatch) -> None:
    given = reading.windows_of
    monkeypatch.setattr(reading, "windows_of", lambda *a: tuple(w and w - 1 for w in given(*a)))


def _one_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading.ModelConfig, "rope_of", lambda config, layer: config.rope)


def _changed(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    monkeypatch.setitem(FAMILIES, "gemma3_text", replace(FAMILIES["gemma3_text"], **changes))


def _no_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    _changed(monkeypatch, norm_offset=0.0)


def _scale_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    _changed(monkeypatch, query_scalar=None)


def _unscaled(monkeypatch: pytest.MonkeyPatch) -> None:
    _changed(monkeypatch, scaled_embedding=False)


def _theta_a_little_off(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Rope.from_hf
    monkeypatch.setattr(Rope, "from_hf", lambda *a, **k: replace(given(*a, **k), theta=505.0))


def _only_the_first_section(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Rope.from_hf

    def without(values: dict, where: str, **own: float) -> Rope:
        return given({k: v for k, v in values.items() if k != "rope_scaling"}, where, **own)

    monkeypatch.setattr(Rope, "from_hf", without)


def _original_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Rope.from_hf

    def without(values: dict, where: str, **own: float) -> Rope:
        return given(
            {k: v for k, v in values.items() if not k.startswith("original_max")}, where, **own
        )

    monkeypatch.setattr(Rope, "from_hf", without)


@pytest.mark.parametrize(
    ("broken", "family", "name", "least"),
    [
        (_wrong_theta, "mixtral", "rope_theta left out", 0.1),
        (_theta_a_little_off, "llama", "base", 2 * CLOSE),
        (_no_windows, "mixtral", "sliding_window 8", 0.5),
        (_no_windows, "qwen3_moe", "use_sliding_window, 8", 0.1),
        (_no_windows, "qwen2", "use_sliding_window, 63", None),
        (_no_windows, "mistral", "sliding_window 8", 0.1),
        (_one_key_less, "mistral", "sliding_window 8", 2 * CLOSE),
        (_one_rope, "smollm3", "base", 2 * CLOSE),
        (_one_rope, "olmo3", "rope_scaling yarn, window 8", 2 * CLOSE),
        (_one_rope, "gemma3_text", "base", 2 * CLOSE),
        (_no_offset, "gemma3_text", "base", 0.1),
        (_scale_of_heads, "gemma3_text", "base", 2 * CLOSE),
        (_unscaled, "gemma3_text", "base", 0.1),
        (_only_the_first_section, "qwen3", "two sections that differ", 0.02),
        (_original_inside, "llama", "rope_scaling yarn, two originals", 0.005),
        (_original_inside, "llama", "rope_scaling llama3, two originals", 0.005),
    ],
)
def test_a_wrong_reading_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    broken: Callable[[pytest.MonkeyPatch], None],
    family: str,
    name: str,
    least: float | None,
) -> None:
    """Each control is one of the mistakes that were made, or a smaller one. A window that hides no
    token of the sequence is the one thing that a sequence cannot show."""
    broken(monkeypatch)
    [outcome] = run(row for row in variants() if (row.family, row.name) == (family, name))
    if least is None:
        assert outcome.kind == "equal"
    else:
        assert outcome.kind == "different"
        assert (outcome.distance or 0.0) > least
