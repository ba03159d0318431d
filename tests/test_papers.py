"""What the page of the papers names exists: every key, option, preset, metric, symbol, file and
command in it."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import isobit
from isobit.config import load_compare_config, load_config
from isobit.config.__main__ import markdown
from isobit.errors import IsobitError
from isobit.monitor.report.comparison import DATA, PAGE
from isobit.options.declare import options_of
from isobit.options.precisions import PrecisionChanges
from isobit.options.reading import OptionError
from isobit.precision import PRESETS, precision_from
from isobit.rl.algorithm.correction_rule import CORRECTIONS
from isobit.run.metrics import markdown as metrics_markdown
from tests.documents import README, ROOT, succeed

PAPERS = ROOT / "docs" / "papers.md"
SYSTEMS = {
    "fp8-rollout": "https://arxiv.org/abs/2601.18150",
    "fp8-e2e": "https://developer.nvidia.com/blog/run-high-throughput-reinforcement-learning-",
    "fp8-unified": "https://arxiv.org/abs/2601.14243",
}
QUICKSTART = ROOT / "configs/quickstart.yaml"
KEYS = set(re.findall(r"^\| `([\w.]+)` \|", markdown(), re.M))
METRICS = set(re.findall(r"^\| `([\w/*]+)` \|", metrics_markdown(), re.M))


def accepted(load: Callable[[], object]) -> bool:
    try:
        load()
    except (IsobitError, OptionError):
        return False
    return True


def command_works(span: str) -> bool:
    """Whether a command is one of isobit's, and its config with the changes is taken."""
    word, *rest = shlex.split(span)[1:]
    if word not in re.findall(r"^  (\w+)  ", succeed("isobit --help", ROOT), re.M):
        return False
    if not rest:
        return True
    path, changes = ROOT / rest[0], rest[1:]
    load = load_config if word == "train" else load_compare_config
    more = [changes] if word == "train" else [changes, None, None]
    return path.is_file() and accepted(lambda: load(path, *more))


def pair_works(span: str) -> bool:
    """Whether an option of a precision, or a key of a config, takes this value."""
    key, value = span.split(": ", 1)
    flows = [{"preset": preset, key: yaml.safe_load(value)} for preset in PRESETS]
    if any(accepted(lambda flow=flow: precision_from(flow)) for flow in flows):
        return True
    return key in KEYS and accepted(lambda: load_config(QUICKSTART, [f"{key}={value}"]))


def exists(span: str, row: str = "") -> bool:
    """Whether what a span of code names is there; a bare word may be one of a file of its row."""
    if span.startswith("isobit "):
        return command_works(span)
    if "/" in span and (ROOT / span.split("/")[0]).is_dir():
        return (ROOT / span).exists()
    if re.match(r"[\w-]+\[.*\]$", span):
        return accepted(lambda: precision_from(span))
    if span.startswith("{"):
        return pair_works(f"algorithm.correction: {span}")
    if "=" in span:
        return accepted(lambda: load_config(QUICKSTART, [span]))
    if ": " in span:
        return pair_works(span)
    names = (KEYS, METRICS, CORRECTIONS, options_of(PrecisionChanges), (PAGE, DATA))
    if any(span in known for known in names) or accepted(lambda: precision_from(span)):
        return True
    if span.startswith("Precision."):
        return hasattr(isobit.Precision, span.partition(".")[2])
    files = [ROOT / path for path in re.findall(r"`(src/[\w/.]+\.py)`", row)]
    return any(re.search(rf"\b{re.escape(span)}\b", path.read_text()) for path in files)


def spans(text: str) -> list[tuple[str, str]]:
    """Every span of code of a text, with its line."""
    return [(span, line) for line in text.splitlines() for span in re.findall(r"`([^`]+)`", line)]


def test_everything_that_the_page_names_exists() -> None:
    found = spans(PAPERS.read_text(encoding="utf-8"))
    assert len(found) > 150
    assert not [span for span, line in found if not exists(span, line)]


@pytest.mark.parametrize(
    "span",
    [
        *(
            "fp9",
            "fp8-rollout[kv_margins=2]",
            "fp8[rollout={wei: bf16}]",
            "kv_margins",
            "kv_cache: int4",
            "Precision.equal",
        ),
        *("mismatch/kl_k9", "algorithm.corrections", "algorithm.correction: tis", "{weigh: token}"),
        *("src/isobit/none.py", "tests/test_none.py", "configs/none.yaml", "precision=fp9"),
        *("isobit trian", "isobit train configs/none.yaml", "isobit train configs/kto.yaml"),
    ],
)
def test_a_name_that_does_not_exist_is_seen(span: str) -> None:
    assert not exists(span, "`src/isobit/precision/flow.py`")


def test_every_claim_has_a_place_and_a_number_or_says_that_it_has_none() -> None:
    text = PAPERS.read_text(encoding="utf-8").partition("## The claims")[2]
    rows = re.findall(r"^\| ([AN]) \| (.+?) \| (.*?) \| (.*?) \|$", text, re.M)
    assert len(rows) == text.count("\n| A |") + text.count("\n| N |") > 95
    assert not [row for row in rows if not all(cell.strip() for cell in row)]
    shown = ("](", "not measured", "nothing to measure", "tested", "`tests/", "runs in", "drawn by")
    plain = [row for row in rows if not any(word in row[3] for word in shown)]
    assert len(plain) < 15, plain


@pytest.mark.parametrize("path", [README, PAPERS, ROOT / "docs/how-to/choose-a-preset.md"])
def test_each_system_stands_with_its_paper_and_its_preset(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    for preset, address in SYSTEMS.items():
        assert any(f"`{preset}`" in line and address in line for line in lines), preset
