"""The figures of docs/measured.md, and of the pages that repeat some, are those of
`benchmarks/results`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
MEASURED = ROOT / "docs" / "measured.md"


class Results:
    """What a benchmark has left: rates by case and contestant, and claims by what they say."""

    def __init__(self, name: str) -> None:
        found = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
        rows = found["rows"]
        self.cases = list(dict.fromkeys(row["case"] for row in rows))
        self.rate = {(row["case"], row["contestant"]): row["rate"] for row in rows}
        self.seconds = {(row["case"], row["contestant"]): row["median_s"] for row in rows}
        self.claims: dict[str, dict[str, Any]] = {each["what"]: each for each in found["claims"]}

    def aim(self, what: str) -> str:
        """A claim's value and its target, as the page writes them."""
        claim = self.claims[what]
        missed = "" if claim["holds"] else ": missed"
        return f"{claim['value']:.2f} (aim {claim['target']:g}{missed})"


def test_the_measured_figures_are_those_of_the_results() -> None:
    """The ratios of the page's table are among the claims that were measured, and a claim that does
    not hold is said to be missed."""
    results = [
        json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")
    ]
    claims = [claim for result in results for claim in result["claims"]]
    page = MEASURED.read_text()
    table = re.sub(r"\n## Measured once\n.*?(?=\n## )", "", page, flags=re.S)
    assert len(table) < len(page)
    ratios = re.findall(r"\| ([\d.]+) × \|", table)
    assert len(ratios) == 4
    for claim in claims:
        assert (
            claim["holds"] or f"{claim['value']:.2f} (aim {claim['target']:g}: missed)" in table
        ), claim["what"]
    aims = {
        (f"{claim['value']:.2f}", f"{claim['target']:g}", not claim["holds"]) for claim in claims
    }
    shown = re.findall(r"([\d.]+) \(aim ([\d.]+)(: missed)?\)", table)
    assert len(shown) >= 9
    assert {(value, aim, bool(missed)) for value, aim, missed in shown} <= aims
    assert set(ratios) <= {f"{claim['value']:.2f}" for claim in claims}
    repeated = re.findall(
        r"^\| .+ \| [\d.]+ × \|$", (ROOT / "docs/how-to/choose-a-preset.md").read_text(), re.M
    )
    assert len(repeated) == 4
    assert all(line in page for line in repeated)
    rates = {f"{row['rate']:,.0f}" for result in results for row in result["rows"] if row["rate"]}
    for pair in re.findall(r"([\d,]+) against ([\d,]+)", table):
        assert set(pair) <= rates


def test_the_prose_beside_the_measured_figures_has_their_numbers() -> None:
    text = " ".join(MEASURED.read_text().split())
    rollout = json.loads((ROOT / "benchmarks/results/rollout.json").read_text())
    rate = {(row["case"], row["contestant"]): row["rate"] for row in rollout["rows"]}
    small, wide, one = (
        f"hidden {h}, {n} layers, batch {b}"
        for h, n, b in ((512, 8, 32), (1024, 12, 16), (1024, 12, 1))
    )
    single, bf16 = (rate["2,048 cubed", f"product in {kind}"] for kind in ("float32", "BF16"))
    reached = rate[wide, "computed by isobit fp8 bitwise"]
    for sentence in (
        f"the rollout of `fp8` has {rate[small, 'isobit fp8 exact']:,.0f} tokens per second",
        f"has {single:.0f} GFLOP/s in float32 and {bf16:.0f} in BF16, a copy "
        f"{rate['256 MiB', 'copy']:.0f} GB/s",
        f"make {reached:.0f} GFLOP/s of all that a rollout does, {reached / single:.0%} of".replace(
            "%", " %"
        ),
        f"weights are read at {rate[one, 'weights read by isobit fp8 bitwise']:.0f} GB/s",
    ):
        assert sentence in text, sentence
    ours = {case: rate[case, "isobit fp8 bitwise"] for case in (small, wide, one)}
    assert f"(batch 1: {ours[one] / rate[one, 'isobit bf16 bitwise']:.2f} times `bf16`" in text
    step = json.loads((ROOT / "benchmarks/results/grpo_step.json").read_text())
    ours |= {row["case"]: row["rate"] for row in step["rows"] if "fp8" in row["contestant"]}
    rate |= {(row["case"], row["contestant"]): row["rate"] for row in step["rows"]}
    gains = [rate[case, "isobit bf16 bitwise"] / own - 1 for case, own in ours.items()]
    chosen = " ".join((ROOT / "docs/how-to/choose-a-preset.md").read_text().split())
    low, *_, high = sorted(100 * gain for gain in gains if gain > 0)
    assert f"`bf16` is faster, by {low:.0f} to {high:.0f} % on a Zen 4" in chosen
    readme = " ".join(README.read_text().split())
    over = [
        [rate[case, "isobit fp8 bitwise"] / rate[case, peer] for case in (small, wide, one)]
        for peer in ("transformers bfloat16", "vLLM CPU bfloat16")
    ]
    assert (
        f"{min(over[0]):.1f} to {max(over[0]):.1f} times as fast as those of `transformers`"
        in readme
    )
    assert (
        f"{min(over[1]):.1f} to {max(over[1]):.1f} times as fast as those of vLLM's CPU build"
        in readme
    )


@pytest.mark.parametrize("machine", ["beside_others", "beside_others_amx"])
def test_the_figures_beside_busy_processes_are_those_of_the_results(machine: str) -> None:
    results, page = Results(machine), MEASURED.read_text()
    for name in ("isobit imported first", "torch imported first"):
        cells = [f"{results.rate['beside 0 busy processes', name]:,.0f}"]
        for count in (1, 2):
            case = f"beside {count} busy processes"
            share = results.aim(f"{name}: speed {case} over the fair share")
            cells.append(f"{results.rate[case, name]:,.0f}, {share}")
        assert f"| {name} | {' | '.join(cells)} |" in page


def test_the_figures_of_peers_beside_busy_processes_are_those_of_the_results() -> None:
    results, page = Results("beside_others"), MEASURED.read_text()
    peers = {
        "transformers bfloat16": "`transformers`, bfloat16",
        "vLLM CPU bfloat16": "vLLM CPU, bfloat16",
        "llama.cpp Q8_0": "llama.cpp, Q8_0",
    }
    for peer, shown in peers.items():
        cells = [
            f"{results.rate[case, peer]:,.0f}, {results.aim(f'{case}: isobit over {peer}')}"
            for case in results.cases
        ]
        assert f"| {shown} | {' | '.join(cells)} |" in page


def test_the_figures_of_open_episodes_are_those_of_the_results() -> None:
    results = json.loads((ROOT / "benchmarks/results/turns_memory.json").read_text())
    page = MEASURED.read_text()
    for name, part in results["parts"].items():
        objects, pages, workers = part.values()
        assert f"| {name} | {objects:.1f} MiB | {pages:,.0f} | {workers:.1f} MiB |" in page
    assert f"A turn leaves {results['claims'][0]['value']:.2f} KiB in an episode" in page


def test_the_figures_of_adapters_are_those_of_the_results() -> None:
    """Each cell of their table, with its aim where there is one."""
    results, page = Results("adapters"), MEASURED.read_text()

    def cell(kind: str, case: str) -> str:
        claim = f"tokens a second, {kind} over the base, {case}"
        if claim in results.claims:
            return results.aim(claim)
        return f"{results.rate[case, kind] / results.rate[case, 'base']:.2f}"

    words = {
        "16 adapters": "16 adapters",
        "8 adapters and the base": "8 adapters, and 8 of the base",
        "one adapter": "one adapter",
    }
    assert f"| 16 requests, of | {' | '.join(results.cases)} |" in page
    for kind, said in words.items():
        cells = (cell(kind, case) for case in results.cases)
        assert f"| {said} | {' | '.join(cells)} |" in page


def test_the_figures_of_rollouts_beside_peers_are_those_of_the_results() -> None:
    """Those of `fp8`, and of four bits a weight."""
    results, page = Results("rollout"), MEASURED.read_text()
    own, four = "isobit fp8 bitwise", "isobit nvfp4[activation=bf16] bitwise"
    peers = ("transformers bfloat16", "vLLM CPU bfloat16", "llama.cpp Q8_0")
    cases = [case for case in results.cases if (case, four) in results.rate]
    assert len(cases) == 4
    for case in cases:
        cells = [f"{results.rate[case, own]:,.0f}"]
        cells += [results.aim(f"{case}: {own} over {peer}") for peer in peers]
        cells += [results.aim(f"{case}: isobit fp8, bitwise over fast")]
        assert f"| {case} | {' | '.join(cells)} |" in page
        cells = [
            f"{results.rate[case, four]:,.0f}",
            results.aim(f"{case}: {four} over llama.cpp Q4_0"),
            f"{results.rate[case, four] / results.rate[case, own]:.2f}",
        ]
        assert f"| {case} | {' | '.join(cells)} |" in page


def test_the_figures_of_rollouts_on_amx_are_those_of_the_results() -> None:
    results, page = Results("rollout_amx"), MEASURED.read_text()
    own = "isobit fp8 bitwise"
    cases = [case for case in results.cases if (case, own) in results.rate]
    assert len(cases) == 4
    assert "Q4_0 was never faster than Q8_0 by more than a tenth" in page
    for case in cases:
        q8, q4 = (results.rate[case, f"llama.cpp {form}"] for form in ("Q8_0", "Q4_0"))
        assert q4 <= 1.1 * q8
        cells = [
            f"{results.rate[case, own]:,.0f}",
            *(
                results.aim(f"{case}: {own} over {peer}")
                for peer in ("transformers bfloat16", "llama.cpp Q8_0")
            ),
            f"{results.rate[case, own] / results.rate[case, 'isobit bf16 bitwise']:.2f}",
        ]
        assert f"| {case} | {' | '.join(cells)} |" in page


def test_the_figures_of_learning_are_those_of_the_results() -> None:
    """With matrix units, and without."""
    results, page = [Results("learning"), Results("learning_zen4")], MEASURED.read_text()
    peer = "transformers bf16 autocast"
    for flow in ("bf16", "fp8"):
        own = f"isobit {flow} bitwise"
        cells = [
            cell
            for each in results
            for cell in (f"{each.seconds['learning', own]:.1f}", each.aim(f"{own} over {peer}"))
        ]
        assert f"| `{flow}` | {' | '.join(cells)} |" in page
    cells = [f"{each.seconds['learning', peer]:.1f} | 1" for each in results]
    assert f"| autocast | {' | '.join(cells)} |" in page


def test_the_figures_of_drafts_are_those_of_the_results() -> None:
    results, page = Results("speculation"), (ROOT / "docs/how-to/speculation.md").read_text()
    for case in results.cases:
        rate = {name: rate for (of, name), rate in results.rate.items() if of == case}
        cells = [
            case.removeprefix("batch "),
            f"{rate['steps without drafts']:.0f} → {rate['steps with drafts']:.0f}",
            f"{rate['acceptance rate']:.2f}",
            f"{rate['with drafts'] / rate['one token a step']:.2f}",
        ]
        assert f"| {' | '.join(cells)} |" in page
