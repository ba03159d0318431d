"""The documents are true: every command and snippet in them runs, every test and file that they name exists."""

import json
import os
import re
import shlex
import string
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from isobit import Model
from isobit.config import Config, SftConfig, load_compare_config, load_config, load_sft_config
from isobit.intervals import mean_interval
from isobit.model import ModelConfig, Tokenizer

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def blocks(path: Path, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(path.read_text(encoding="utf-8")) if kind == language]


def commands(path: Path) -> list[list[str]]:
    """The words of every command in a document's `sh` blocks, without comments."""
    lines = [line for block in blocks(path, "sh") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def run(words: list[str], folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    if words[0] == "isobit":
        words = [sys.executable, "-m", "isobit.cli", *words[1:]]
    elif words[0] == "python":
        words = [sys.executable, *words[1:]]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "2", **environment}
    return subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the README's reader has: a model, prompts, and the README's own rewards.py and run.yaml."""
    folder = tmp_path_factory.mktemp("reader")
    tokenizer = Tokenizer.characters(string.ascii_letters + string.digits + string.punctuation + " ")
    config = ModelConfig(
        family="llama",
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        max_positions=160,
        eos_ids=tokenizer.eos_ids,
    )
    Model.init(config, tokenizer, "float32").save(folder / "path" / "to" / "hf_checkpoint")
    prompts = [{"prompt": f"Tell me about {thing}."} for thing in ("rain", "the sea", "bread", "a fox", "two cats")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts * 4))
    readme = ROOT / "README.md"
    (folder / "rewards.py").write_text(blocks(readme, "python")[0])
    (folder / "run.yaml").write_text(blocks(readme, "yaml")[0])
    return folder


def test_make_targets_exist_and_say_what_they_would_do() -> None:
    used = {words[1] for path in DOCUMENTS for words in commands(path) if words[0] == "make"}
    assert {"quickstart", "test"} <= used
    for target in used | {"install", "lint", "bench", "clean", "help"}:
        done = run(["make", "--dry-run", target], ROOT)
        assert done.returncode == 0, done.stderr
    assert "isobit train configs/quickstart.yaml" in run(["make", "--dry-run", "quickstart"], ROOT).stdout


@pytest.mark.slow
def test_the_readme_commands_run_in_order(workplace: Path) -> None:
    own = [words for words in commands(ROOT / "README.md") if words[0] == "isobit"]
    assert {words[1] for words in own} == {"train", "generate", "eval", "report", "compare", "inspect"}
    for words in own:
        done = run(words, workplace)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    rows = [json.loads(line) for line in (workplace / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 80
    assert all(row["mismatch/differing_tokens"] == 0 for row in rows)
    assert "<svg" in (workplace / "compare.html").read_text()


def test_the_readme_snippet_runs(workplace: Path) -> None:
    done = run(["python", "-c", blocks(ROOT / "README.md", "python")[1]], workplace)
    assert done.returncode == 0, done.stderr


def test_other_commands_run(tmp_path: Path) -> None:
    """Everything in `sh` blocks that neither make nor the README's own-model section covers."""
    rest = [w for path in DOCUMENTS for w in commands(path) if w[0] not in ("make", "isobit")]
    assert rest
    for words in rest:
        assert words[:3] == ["python", "-m", "benchmarks"], f"no test runs {shlex.join(words)}"
        out = tmp_path / words[words.index("--out") + 1]
        done = run([*words, "--rounds", "1"], tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(next(out.glob("*.json")).read_text())["claims"]


@pytest.mark.slow
def test_the_quickstart_learns_under_fp8_without_a_differing_token(tmp_path: Path) -> None:
    """`make quickstart` whole: what the README and its picture claim."""
    done = run(
        ["isobit", "train", "configs/quickstart.yaml", "--out", str(tmp_path / "run"), "--quiet"],
        ROOT,
        ISOBIT_CACHE=str(tmp_path / "cache"),
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    accuracies = [row["accuracy/held_out"] for row in rows if "accuracy/held_out" in row]
    assert 0.2 <= accuracies[0] <= 0.6
    assert accuracies[-1] >= 0.9
    assert {row["mismatch/differing_tokens"] for row in rows[1:]} == {0}
    # what the README says of it, with room for another machine's training
    text = " ".join((ROOT / "README.md").read_text().split())
    first, last = (float(value) for value in re.findall(r"goes from ([\d.]+) to ([\d.]+) in 300 steps", text)[0])
    compared = int(re.findall(r"log-probabilities of ([\d,]+) tokens", text)[0].replace(",", ""))
    assert (accuracies[0], accuracies[-1]) == (pytest.approx(first, abs=0.1), pytest.approx(last, abs=0.05))
    assert sum(row["mismatch/compared_tokens"] for row in rows[1:]) == pytest.approx(compared, rel=0.05)
    assert len(rows) == 1 + load_config(ROOT / "configs/quickstart.yaml").steps
    assert "0 differing tokens" in (tmp_path / "run/report.html").read_text()
    picture = tmp_path / "picture.png"
    assert run(["python", str(ROOT / "docs/plot_run.py"), str(tmp_path / "run"), str(picture)], ROOT).returncode == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_configs_are_valid(path: Path) -> None:
    values = yaml.safe_load(path.read_text())
    if "presets" in values:
        compared = load_compare_config(path, [], None, None)
        for preset in compared.presets:
            load_config(ROOT / compared.train, [*compared.changes, f"precision={json.dumps(preset)}"])
    elif "init" in values["model"]:
        assert isinstance(load_sft_config(path), SftConfig)
    else:
        assert isinstance(load_config(path), Config)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_what_documents_name_exists(path: Path) -> None:
    """Links, files of the tree, and tests by name."""
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (path.parent / target).exists(), f"{path.name}: no {target}"
    for file, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
        assert (ROOT / file).is_file(), f"{path.name}: no {file}"
        assert not test or f"def {test}(" in (ROOT / file).read_text(), f"{path.name}: no {test} in {file}"
    for file in re.findall(r"`((?:src|configs|docs|benchmarks|tests)/[\w/.-]+)`", text):
        assert (ROOT / file).exists(), f"{path.name}: no {file}"


def test_the_readme_figures_are_those_of_the_results() -> None:
    """Every claim that was measured holds, and the ratios of the README's table are among them."""
    results = [json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")]
    claims = [claim for result in results for claim in result["claims"]]
    assert all(claim["holds"] for claim in claims)
    table = (ROOT / "README.md").read_text().split("## Measured")[1]
    ratios = re.findall(r"\| ([\d.]+) × \|", table)
    assert len(ratios) == 9
    assert set(ratios) <= {f"{claim['value']:.2f}" for claim in claims}
    rates = {f"{row['rate']:,.0f}" for result in results for row in result["rows"] if row["rate"]}
    for pair in re.findall(r"([\d,]+) against ([\d,]+)", table):
        assert set(pair) <= rates


def test_the_comparison_in_the_documents_is_that_of_the_runs() -> None:
    """Every row of the README's table and of the log's, from the numbers of each run; and what is concluded of them."""
    runs = json.loads((ROOT / "docs" / "compare-recipes.json").read_text())
    assert {len(run["accuracy"]) for run in runs.values()} == {3}
    readme, log = (path.read_text().replace("**", "") for path in (ROOT / "README.md", ROOT / "docs" / "log.md"))
    for preset, run in runs.items():
        kl, error, largest = (sum(run[key]) / 3 for key in ("kl_k3", "token_mult_prob_error", "max_abs_logprob_diff"))
        accuracy = "{:.3f} [{:.3f}, {:.3f}]".format(*mean_interval(run["accuracy"]))
        exact = sum(run["differing_tokens"]) == 0
        shown = ("0", "1", "0") if exact else (f"{kl:.1e}".replace("e-0", "e-"), f"{error:.3f}", f"{largest:.2f}")
        assert f"| `{preset}` | {' | '.join(shown)} | {accuracy} |" in readme
        counts = f"{sum(run['differing_tokens']):,.0f} of {sum(run['compared_tokens']):,.0f}"
        assert f"| `{preset}` | {accuracy} | {' | '.join(shown)} | {counts} |" in log
    kl = {preset: max(run["kl_k3"]) for preset, run in runs.items()}
    order = ["fp8", "bf16[engines=separate]", "fp8-e2e", "fp8-rollout", "fp8-rollout-kv"]
    assert [kl[preset] for preset in order] == sorted(kl[preset] for preset in order)
    _, low, high = mean_interval(runs["bf16"]["accuracy"])
    assert low <= sum(runs["fp8"]["accuracy"]) / 3 <= high


def test_the_maps_tree_names_files_that_exist() -> None:
    for path in (ROOT / "README.md", ROOT / "docs" / "map.md"):
        tree = next(text for text in blocks(path, "") if "src/" in text)
        folder = ROOT / "src" / "isobit"
        names = re.findall(r"^ {2,4}([\w]+(?:\.py|/))", tree, re.M)
        assert len(names) > 8
        missing = [name for name in names if not (folder / name).exists() and not (folder / "kernels" / name).exists()]
        assert not missing, f"{path.name}: {missing}"
