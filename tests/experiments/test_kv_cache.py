"""The experiment on codings of the cache: nothing but the cache is coded, and the page has its
numbers."""

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks.experiments.kv_cache import (
    OWN,
    SCHEMES,
    Scheme,
    by_row,
    by_token,
    divergence,
    e4m3,
    hadamard,
    int8,
    measure,
    measure_own,
    observe,
    power_of_two,
    table,
)
from isobit import Model
from isobit.precision import precision_from, quantize
from tests.models import tiny_model

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/experiments/kv_cache.json"
SEQUENCES, PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13]], [2, 1]


def test_codes_are_those_of_the_formats() -> None:
    x = torch.tensor([[[448.0, 1.0, 17.0, -3.3]]])
    assert e4m3(x, x.abs().amax()).tolist() == [[[448.0, 1.0, 16.0, -3.25]]]  # ties to even
    assert int8(x, torch.tensor(127.0)).tolist() == [[[127.0, 1.0, 17.0, -3.0]]]
    matrix = hadamard(8)
    assert torch.allclose(matrix @ matrix, torch.eye(8), atol=1e-6)


@pytest.mark.parametrize("name", OWN)
def test_codings_that_isobits_cache_has_are_the_products_to_the_bit(name: str) -> None:
    """Values, and with them codes and scales. The control: a scale for all heads of a token."""
    kv = precision_from(OWN[name]).rollout.kv
    assert kv is not None
    x = torch.randn(50, 4, 32, generator=torch.Generator().manual_seed(1)) * torch.logspace(
        -6, 6, 50
    ).view(50, 1, 1)
    wanted = quantize(x.view(-1, 32), kv).dequantize().view(x.shape)
    code = int8 if kv.format.name == "int8" else e4m3
    largest = power_of_two if kv.scale == "ue8m0" else by_row
    assert torch.equal(SCHEMES[name].key(x, None, None), wanted)
    assert torch.equal(SCHEMES[name].value(x, None, None), wanted)
    assert torch.equal(code(x, largest(x)), wanted)
    assert not torch.equal(code(x, by_token(x)), wanted)


def test_the_formats_of_isobits_cache_diverge_as_their_simulation(base_model: Path) -> None:
    found = measure_own(base_model, ["1+2=", "3+4=", "5+6="], 4)
    assert [row["scheme"] for row in found["rows"]] == list(OWN)
    for row in found["rows"]:
        assert row["kl"] == pytest.approx(row["simulated"], rel=0.02)
    e4m3_kl, int8_kl = (found["rows"][place]["kl"] for place in (1, 2))
    assert e4m3_kl > 2 * int8_kl, "the control: one is not the other"


def test_the_page_has_the_numbers_of_isobits_own_formats() -> None:
    found = json.loads(RESULTS.with_name("kv_cache_own.json").read_text())
    page = (ROOT / "docs/experiments/kv-cache.md").read_text()
    for precision, kl in found["flows"].items():
        assert f"| `{precision}` | {kl:.1e} |".replace("e-0", "e-") in page
    for row in found["rows"]:
        assert f"| `{row['precision']}` | {row['kl']:.1e} |".replace("e-0", "e-") in page
        assert row["kl"] == pytest.approx(row["simulated"], rel=2e-4)
    flows = found["flows"]
    added = [flows[name] - flows["fp8[kv_cache=bf16]"] for name in ("fp8[kv_cache=e4m3]", "fp8")]
    assert added[0] > 10 * added[1] > 0


def test_nothing_but_the_cache_is_coded() -> None:
    """A coding that changes nothing has no divergence, to the bit; each of the others has some."""
    model = tiny_model("float32")
    seen = observe(model, SEQUENCES, PROMPTS)
    same = Scheme(lambda x, *_: x, lambda x, *_: x, lambda dim: 0)
    assert torch.equal(
        divergence(model, same, seen, SEQUENCES, PROMPTS), torch.zeros(6, dtype=torch.float64)
    )
    turned = Scheme(lambda x, _, turn: turn(turn(x, True), False), lambda x, *_: x, lambda dim: 0)
    assert divergence(model, turned, seen, SEQUENCES, PROMPTS).abs().max() < 1e-9
    for name, scheme in SCHEMES.items():
        found = divergence(model, scheme, seen, SEQUENCES, PROMPTS)
        assert 1e-10 < found.mean() < 0.1, name


def test_a_model_is_measured(base_model: Path) -> None:
    found = measure(base_model, ["1+2=", "3+4=", "5+6="], 4)
    assert found["head_dim"] == Model.load(base_model).config.head_dim
    assert [row["scheme"] for row in found["rows"]] == list(SCHEMES)
    assert table([found | {"model": "tiny"}]).count("\n") == 1 + len(SCHEMES)


def test_the_page_has_the_numbers_that_were_measured() -> None:
    models = json.loads(RESULTS.read_text())
    page = (ROOT / "docs/experiments/kv-cache.md").read_text()
    (shown,) = re.findall(r"<!-- table: kv cache -->\n\n(.*?)\n\n<!-- end -->", page, re.S)
    assert shown == table(models)
    for model in models:
        kl = {row["scheme"]: row["kl"] for row in model["rows"]}
        plain = kl["E4M3, token and head"]
        assert 1.7 < kl["E4M3, token and head, powers of two"] / plain < 4.5
        assert kl["the same, keys alone"] > 0.7 * plain
        assert plain / kl["INT8, token and head"] > 5
        assert kl["E4M3, channel, calibrated"] > plain
        halves = [row["halves"] for row in model["rows"]]
        assert all(abs(a - b) < 0.3 * (a + b) / 2 for a, b in halves)


def test_the_page_has_the_ends_of_the_quickstarts_curves() -> None:
    runs = json.loads(RESULTS.with_name("kv_cache_quickstart.json").read_text())
    page = " ".join((ROOT / "docs/experiments/kv-cache.md").read_text().split())
    old, new = (
        runs[f"base trained with {scales}"] for scales in ("powers of two", "float32 scales")
    )
    (first, last), (begun, ended) = (
        [run["accuracy/held_out"][i][1] for i in (0, -1)] for run in (old, new)
    )
    assert f"the same base ends at {last:.3f}, as before" in page
    assert (
        f"begins at {begun:.3f} where the old one has {first:.3f}, and ends at {ended:.3f}" in page
    )
    for seed in (1, 2):
        pair = [
            runs[f"seed {seed}, base trained with {s}"] for s in ("powers of two", "float32 scales")
        ]
        ends = [f"{run['accuracy/held_out'][i][1]:.3f}" for run in pair for i in (0, -1)]
        assert f"| {seed} | {' | '.join(ends)} |" in page
    assert {run["differing_tokens"] for run in runs.values()} == {0}
    assert min(run["compared_tokens"] for run in runs.values()) > 100_000


@pytest.mark.parametrize("name", ["kv-cache.png"])
def test_pictures_are_there(name: str) -> None:
    assert (ROOT / "docs/experiments" / name).read_bytes().startswith(b"\x89PNG")
