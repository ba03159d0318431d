"""The report in headless Chromium: everything on it is used, nothing is fetched, nothing of a
completion runs."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from isobit.monitor.report import write_report
from isobit.run.completions import COMPLETIONS, pack, read
from tests.browser import Open, Opened
from tests.report.recorded_run import write_run

pytestmark = pytest.mark.slow
TABS = (
    "Overview",
    "Learning",
    "Mismatch",
    "Quantization",
    "Time and memory",
    "Prompts",
    "Completions",
    "Configuration",
)
HOSTILE = (
    "</script><script>document.title='broken'</script>",
    "<img src=x onerror=\"document.title='broken'\">",
    "<svg onload=alert(1)>",
    "\u2028\u2029]]> --> <!-- <script>",
    "<iframe src='javascript:alert(1)'></iframe>",
    "javascript:alert(1)\x00\x1b[31m\ud800",
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(
        tmp_path_factory.mktemp("runs") / "run", 100, completions=16, tokens=60, prompts=40
    )
    return write_report([run], run / "report.html")


@pytest.fixture
def wide(report: Path, opened: Open) -> Iterator[Opened]:
    with opened(report) as found:
        yield found
        assert found.said == []


def test_tabs_show_one_part_each_and_have_addresses(wide: Opened) -> None:
    page = wide.page
    assert page.get_by_role("tab").all_inner_texts() == list(TABS)
    for name in TABS:
        wide.tab(name)
        panel = page.get_by_role("tabpanel")
        assert panel.count() == 1
        assert (
            panel.get_attribute("aria-labelledby") == f"tab-part-{name.lower().replace(' ', '-')}"
        )
    wide.tab("Overview")
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**#learning")  # the browser gets there a little later
    assert page.get_by_role("tab", name="Learning").get_attribute("aria-selected") == "true"
    page.keyboard.press("End")
    page.wait_for_url("**#configuration")  # the browser gets there a little later
    page.reload()
    assert "precision: fp8-rollout" in page.get_by_role("tabpanel").inner_text()


def test_a_chart_tells_its_values_to_pointer_and_keyboard(wide: Opened) -> None:
    figure = wide.page.locator("figure.chart", has_text="Reward").first
    values = figure.locator(".values")
    figure.locator("svg").hover()
    assert re.search(r"step\s*\d+\s*mean\s*0\.\d+", values.inner_text())
    figure.locator("svg").focus()
    wide.page.keyboard.press("End")
    assert values.inner_text().split()[:2] == ["step", "100"]
    wide.page.keyboard.press("ArrowLeft")
    assert values.inner_text().split()[:2] == ["step", "99"]
    wide.page.keyboard.press("Escape")
    assert not values.is_visible()


def test_the_pointer_finds_the_nearest_of_doubled_positions(wide: Opened) -> None:
    wide.tab("Mismatch")
    figure = wide.page.locator("figure.chart", has_text="by position")
    box = figure.locator("svg").bounding_box()
    assert box is not None
    scale = box["width"] / 360
    for power in range(8):  # 50 to 346 pixels of 360 from token 1 to token 128
        wide.page.mouse.move(
            box["x"] + scale * (50 + 296 * power / 7), box["y"] + box["height"] / 2
        )
        assert figure.locator(".values").inner_text().split()[:2] == ["token", str(2**power)]


def test_the_slider_moves_the_heat_maps(wide: Opened) -> None:
    wide.tab("Quantization")
    slider = wide.page.get_by_role("slider")
    table = wide.page.locator("[data-figure=relative_error]")
    last = table.inner_text()
    assert "Step 100" in wide.page.locator(".heat-controls").inner_text()
    slider.focus()
    wide.page.keyboard.press("Home")
    assert "Step 1" in wide.page.locator(".heat-controls").inner_text().split("\n")
    assert table.inner_text() != last
    wide.page.keyboard.press("End")
    assert table.inner_text() == last


def test_the_script_draws_the_heat_maps_that_are_there_without_it(
    report: Path, opened: Open
) -> None:
    tables = []
    for script in (True, False):
        with opened(report, script=script) as found:
            table = found.page.locator("[data-figure=flushed] tbody")
            tables.append((table.inner_html(), len(found.page.get_by_role("slider").all())))
    assert tables[0][0].replace('"', "'") == tables[1][0].replace('"', "'")


def test_prompts_are_filtered_ordered_and_paged(wide: Opened) -> None:
    wide.tab("Prompts")
    panel = wide.page.get_by_role("tabpanel")
    rows = panel.locator("tbody tr")
    assert "1–20 of 40" in panel.inner_text()
    assert rows.count() == 20
    panel.get_by_role("button", name="Next").click()
    assert "21–40 of 40" in panel.inner_text()
    assert panel.get_by_role("button", name="Next").is_disabled()
    for kind in set(rows.locator("td:nth-child(2)").all_inner_texts()):
        panel.get_by_label("Kind").select_option(kind)
        assert set(rows.locator("td:nth-child(2)").all_inner_texts()) == {kind}
    panel.get_by_label("Kind").select_option("all")
    panel.get_by_label("Order").select_option("easiest first")
    means = [float(text) for text in rows.locator("td:nth-child(4)").all_inner_texts()]
    assert means == sorted(means, reverse=True)
    panel.get_by_label("Prompt contains").fill("WHAT IS 7 +")
    assert rows.count() == 1
    panel.get_by_label("Prompt contains").fill("nowhere")
    assert "No prompt matches." in panel.inner_text()


def test_completions_are_filtered_ordered_and_paged(wide: Opened) -> None:
    wide.tab("Completions")
    panel = wide.page.get_by_role("tabpanel")
    heads = panel.locator("article h4")
    assert "All 1,600 completions, of 100 of 100 steps." in panel.inner_text()
    assert "1–10 of 1,600" in panel.inner_text()
    panel.get_by_role("button", name="Next").click()
    assert "11–20 of 1,600" in panel.inner_text()
    panel.get_by_label("Step from").fill("40")
    panel.get_by_label("Step to").fill("41")
    assert "1–10 of 32" in panel.inner_text()
    panel.get_by_label("Reward from").fill("1")
    assert all(
        "reward 1" in text and re.search("step 4[01] ", text) for text in heads.all_inner_texts()
    )
    for name in ("Step from", "Step to", "Reward from"):
        panel.get_by_label(name).fill("")
    panel.get_by_label("Prompt contains").fill("what is 7 +")
    assert set(panel.locator(".prompt").all_inner_texts()) == {
        "What is 7 + 49? Think step by step."
    }
    panel.get_by_label("Completion contains").fill("no completion says this")
    assert "No completion matches." in panel.inner_text()
    panel.get_by_label("Prompt contains").fill("")
    panel.get_by_label("Completion contains").fill("")
    panel.get_by_label("Order").select_option("largest mismatch")
    largest = [float(text.rpartition("| ")[2]) for text in heads.all_inner_texts()]
    assert largest == sorted(largest, reverse=True)
    panel.get_by_label("Order").select_option("latest step")
    assert "step 100 " in heads.first.inner_text()


def test_tokens_are_coloured_and_tell_their_numbers(wide: Opened) -> None:
    wide.tab("Completions")
    panel = wide.page.get_by_role("tabpanel")
    token = panel.locator(".token[data-token]")
    shades = {}
    for way in ("mismatch", "log-probability", "none"):
        panel.get_by_label(way, exact=True).check()
        shades[way] = set(
            token.evaluate_all("all => all.map(e => getComputedStyle(e).backgroundColor)")
        )
    assert len(shades["mismatch"]) > 3
    assert len(shades["log-probability"]) > 3
    assert shades["none"] == {"rgba(0, 0, 0, 0)"}
    token.nth(2).click()
    assert re.match(
        r'token 3 ".*": log p -\d+\.\d+ \(p [\d.e-]+\), \|learner − rollout\| ',
        panel.locator(".readout").inner_text(),
    )
    assert panel.locator("article").first.locator(".token").last.inner_text() == "</s>"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_it_fits_any_width_and_reads_in_both_schemes(
    report: Path, opened: Open, scheme: str, width: int
) -> None:
    with opened(report, width, scheme) as found:
        for name in TABS:
            found.tab(name)
            assert not found.scrolls_sideways(), name
            poor = found.page.evaluate(CONTRASTS)
            assert poor == [], name
        assert found.said == []


CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (color, under) => {
    canvas.fillStyle = under; canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = canvas.getImageData(0, 0, 1, 1).data;
    return `rgb(${r}, ${g}, ${b})`;
  };
  const light = (color) => {
    const part = color.match(/[0-9.]+/g).slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
  };
  const behind = (element) => {
    const chain = [];
    for (let e = element; e; e = e.parentElement) chain.unshift(getComputedStyle(e).backgroundColor);
    return chain.reduce((under, color) => rgb(color, under), "rgb(255, 255, 255)");
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || element.matches("script, :disabled") || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const back = behind(element);
    const ink = rgb(element.closest("svg") ? style.fill : style.color, back);
    const [a, b] = [ink, back].map(light).sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(`${element.tagName} ${element.className} ${element.textContent}`);
  }
  return poor.slice(0, 5);
}"""
"""Texts that stand out from what is behind them by less than 4.5 to 1 (WCAG 2.2, 1.4.3)."""


def test_every_control_has_a_name_and_every_id_is_one(wide: Opened) -> None:
    unnamed = """() => [...document.querySelectorAll("input, select, button")]
        .filter((e) => !(e.labels?.length || e.getAttribute("aria-label") || e.textContent.trim())).length"""
    assert wide.page.evaluate(unnamed) == 0
    ids = wide.page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("script", [True, False])
def test_nothing_of_a_completion_runs(tmp_path: Path, opened: Open, script: bool) -> None:
    """Hostile prompts, completions, configuration, and a hostile name of a run; with the script and
    without."""
    run = write_run(tmp_path / "<img src=x onerror=alert(2)>", 3, completions=8, prompts=2)
    rows = list(read(run / COMPLETIONS))
    for i, row in enumerate(rows):
        row |= {"prompt": HOSTILE[i % 6], "completion": HOSTILE[(i + 1) % 6]}
        if i % 2:
            del row["completion_ids"], row["rollout_logprobs"], row["policy_logprobs"]
    (run / COMPLETIONS).write_bytes(pack(rows))
    (run / "config.yaml").write_text(f"seed: 0\nnote: {json.dumps(HOSTILE[0])}\n")
    page = write_report([run], tmp_path / "report.html")
    with opened(page, script=script) as found:
        made = "document.querySelectorAll('img, iframe, main script:not([type])').length"
        if script:
            for name in TABS:
                found.tab(name)
            assert HOSTILE[0] in found.page.locator(".completion-browser").inner_text()
            assert found.page.evaluate(made) == 0
        assert found.page.title().startswith("isobit: <img")
        assert found.said == []


def test_without_a_script_everything_is_there(report: Path, opened: Open) -> None:
    with opened(report, script=False) as found:
        text = found.page.locator("main").inner_text()
        assert found.page.locator("figure.chart svg").first.is_visible()
        for words in (
            "tokens that differ",
            "Hardest prompts",
            "Relative error",
            "All 1,600 completions",
            "some/model",
        ):
            assert words in text
        assert found.page.locator("article pre").count() >= 4
        assert not found.scrolls_sideways()


def test_several_runs_side_by_side(tmp_path: Path, opened: Open) -> None:
    runs = [
        write_run(tmp_path / f / "seed-0", 30, 8, 40, exact=f == "fp8")
        for f in ("fp8", "fp8-rollout")
    ]
    page = write_report(runs, tmp_path / "report.html")
    for width in (360, 1200):
        with opened(page, width) as found:
            for name in TABS:
                found.tab(name)
                assert not found.scrolls_sideways(), name
            text = found.page.get_by_role("tabpanel").inner_text()
            assert re.search(r"precision\s+fp8\s+fp8-rollout", text)
            found.tab("Completions")
            for part in found.page.locator(".of-run:has(.completion-browser)").all():
                part.get_by_label("log-probability", exact=True).check()
            assert found.page.locator(".of-run:has(.completion-browser) input:checked").count() == 2
            assert found.said == []


@pytest.mark.parametrize("width", [320, 400, 1200])
def test_a_radio_button_stands_beside_its_label(report: Path, opened: Open, width: int) -> None:
    """In one line, whole, however narrow the page is; several lines of choices where one has no
    room."""
    with opened(report, width=width) as found:
        found.tab("Completions")
        labels = found.page.locator("fieldset label").all()
        assert len(labels) == 3
        for label in labels:
            box, button = label.bounding_box(), label.locator("input").bounding_box()
            assert box is not None
            assert button is not None
            assert box["height"] < 2 * button["height"]
            assert box["x"] + box["width"] <= width
        assert not found.scrolls_sideways()
