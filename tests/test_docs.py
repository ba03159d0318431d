"""The documents are true: every command and snippet in them runs, every test and file that they
name exists."""

import json
import re
import shlex
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from isobit.config import Config, SftConfig, load_compare_config, load_config, load_sft_config
from isobit.config.__main__ import markdown
from isobit.monitor.report.intervals import mean_interval
from tests.documents import (
    CHECKED,
    DOCUMENTS,
    PAGES,
    README,
    ROOT,
    blocks,
    check,
    commands,
    first_word,
    follow,
    parsed,
    reader_folder,
    succeed,
    succeed_in_shell,
)
from tests.ports import free_port, with_free_ports

MEASURED = ROOT / "docs" / "measured.md"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reader_folder(tmp_path_factory.mktemp("reader"))


def _runs_something(path: Path) -> bool:
    return any(first_word(command) not in CHECKED for command in commands(path))


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=pytest.mark.slow if _runs_something(p) else ()) for p in PAGES],
    ids=lambda p: str(p.relative_to(ROOT / "docs")),
)
def test_a_page_does_what_it_says(path: Path, workplace: Path, tmp_path: Path) -> None:
    """In a folder of its own, with a reader's model, data and run.yaml, of fewer steps."""
    shutil.copytree(
        workplace, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("runs", "*.html")
    )
    run = tmp_path / "run.yaml"
    run.write_text(run.read_text().replace("steps: 60", "steps: 6"))
    follow(path.read_text(encoding="utf-8"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["environments", "tools"])
def test_a_page_that_brings_a_template_works_for_a_model_of_another_end(
    name: str, tmp_path: Path
) -> None:
    """One that ends answers with </s> alone, as a reader's; the model above ends at `!` too."""
    reader_folder(tmp_path, ends="")
    page = ROOT / "docs" / "how-to" / f"{name}.md"
    follow(page.read_text(encoding="utf-8"), tmp_path)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("```sh\nfalse  # fails\n```", "false"),
        ("```sh\nfalse | cat\n```", "false"),
        ("    ```sh\n    cat nowhere\n    ```", "nowhere"),
        ("```sh\nmake bread\n```", "bread"),
        ('```sh\npip install "isobit[bread]"\n```', "bread"),
        ("```sh\ncd somewhere\n```", "shell of its own"),
        ("```sh\nsource venv/bin/activate\n```", "no such environment"),
        ('```json title="../x.json"\n{}\n```', "x.json"),
    ],
)
def test_a_page_that_is_wrong_fails(page: str, message: str, tmp_path: Path) -> None:
    """The control of the test above."""
    with pytest.raises(AssertionError, match=message):
        follow(page + "\n", tmp_path)


def test_a_page_serves_beside_others_at_its_port(tmp_path: Path) -> None:
    """A page that is followed at the same time, or a reader's own server."""
    taken = socket.create_server(("127.0.0.1", free_port()))
    port = taken.getsockname()[1]
    page = f"""
```python title="listen.py"
import socket, sys
socket.create_server(("127.0.0.1", int(sys.argv[-1]))).close()
```

```sh
python listen.py --port {port}
```
"""
    with taken:
        follow(page, tmp_path)
        with pytest.raises(AssertionError, match="Address already in use"):
            follow(page.replace("--port ", ""), tmp_path)  # control: it is not said to be a port


def test_a_pages_clients_ask_where_its_server_listens() -> None:
    page = "isobit serve x --port {0}\nhttp://127.0.0.1:{0}/v1 18765 serve.port={1} :{1}"
    found = with_free_ports(page.format(8765, 9000))
    first, second = re.findall(r"(?:--port |serve.port=)(\d+)", found)
    assert len({first, second} - {"8765", "9000"}) == 2
    assert found == page.format(first, second)


def test_a_page_is_followed_in_order(tmp_path: Path) -> None:
    page = """
```text title="folder/a.txt"
one
```

- a list

    ```sh
    cp folder/a.txt b.txt   # the file as it is now
    WORD=two python -c \
        "import os; print(os.environ['WORD'])" | cat >> b.txt
    ```

```text title="folder/a.txt"
three
```
"""
    follow(page, tmp_path)
    assert (tmp_path / "b.txt").read_text() == "one\ntwo\n"
    assert (tmp_path / "folder/a.txt").read_text() == "three\n"


def test_make_targets_exist_and_say_what_they_would_do() -> None:
    used = {
        command for path in DOCUMENTS for command in commands(path) if first_word(command) == "make"
    }
    assert {"quickstart", "test"} <= {shlex.split(command)[1] for command in used}
    others = "install resolve lint test-full test-rest docs bench relock floor ceiling clean help"
    for command in used | {f"make {target}" for target in others.split()}:
        check(command)
    assert "isobit quickstart" in succeed("make --dry-run quickstart", ROOT)
    floor = succeed("make --dry-run --no-print-directory floor", ROOT).splitlines()[-1]
    places = [word for word in shlex.split(floor) if word.startswith("tests/")]
    assert len(places) > 10
    assert not [place for place in places if not (ROOT / place).exists()]


def test_make_ends_with_the_line_that_activates_the_environment(tmp_path: Path) -> None:
    """Of an environment that is installed already, whose `isobit` does nothing."""
    for source in ("pyproject.toml", "requirements.lock"):
        (tmp_path / source).touch()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    isobit = tmp_path / ".venv/bin/isobit"
    isobit.write_text("#!/bin/sh\n")
    isobit.chmod(0o755)
    (tmp_path / ".venv/bin/activate").write_text('PATH="$PWD/.venv/bin:$PATH"\n')
    for stamp in (".locked", ".torch", ".installed"):
        (tmp_path / ".venv" / stamp).touch()
    for target in ("install", "quickstart"):
        # `make test` runs this test too: its own flags are not for the make in here
        make = [
            "env",
            "-u",
            "MAKEFLAGS",
            "-u",
            "MAKELEVEL",
            "make",
            "-f",
            str(ROOT / "Makefile"),
            target,
        ]
        last = succeed(shlex.join(make), tmp_path).splitlines()[-1]
        line = last.partition("#")[0].strip()
        assert line in {" ".join(shlex.split(c, comments=True)) for c in commands(README)}, last
        assert succeed(f"unset -f isobit; {line}; command -v isobit", tmp_path).strip() == str(
            isobit
        )


@pytest.mark.slow
def test_the_readme_commands_run_in_order(workplace: Path) -> None:
    own = [command for command in commands(README) if first_word(command) == "isobit"]
    assert [shlex.split(line)[1] for line in own] == ["train"]
    for command in own:
        succeed_in_shell(command, workplace)
    rows = [
        json.loads(line)
        for line in (workplace / "runs/mine/metrics.jsonl").read_text().splitlines()
    ]
    assert rows[-1]["step"] == 60
    assert all(row["mismatch/differing_tokens"] == 0 for row in rows)
    assert "<svg" in (workplace / "runs/mine/report.html").read_text()


def test_the_page_of_commands_has_every_command() -> None:
    words = [
        shlex.split(c) for c in commands(ROOT / "docs/commands.md") if first_word(c) == "isobit"
    ]
    page = (ROOT / "docs/commands.md").read_text()
    listed = re.findall(
        r"^  (\w+)  ", succeed("isobit --help", ROOT).partition("Commands:")[2], re.M
    )
    assert len(listed) >= 10
    assert not [
        name
        for name in listed
        if name not in {w[1] for w in words} and f"`isobit {name}`" not in page
    ]


def test_the_quick_reference_has_the_keys_and_defaults_of_the_schema() -> None:
    page = (ROOT / "docs/quick-reference.md").read_text()
    shown = re.findall(
        r"^\| [^|]+ \| \[`([\w.]+)`\]\(config\.md#([\w.]+)\) \| ([^|]*) \| .+ \|$", page, re.M
    )
    declared = dict(
        reversed(re.findall(r"^\| `([\w.]+)` \| .+ \| ([^|]*) \| [^|]*\|$", markdown(), re.M))
    )
    assert len(shown) == 20
    for key, anchor, default in shown:
        assert key == anchor
        assert default == declared[key], key


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_code_fits_into_a_page(path: Path) -> None:
    """In at most 90 columns, which the site shows at 1280 pixels. Data and output may be longer."""
    wide = [
        line
        for block in parsed(path.read_text(encoding="utf-8"))
        for line in block.text.splitlines()
        if block.language not in ("text", "json", "") and len(line) > 90
    ]
    assert not wide


def test_the_readme_snippet_runs(workplace: Path) -> None:
    (workplace / "snippet.py").write_text(blocks(README, "python")[1])
    succeed("python snippet.py", workplace)


def test_no_other_command_is_left_without_a_test() -> None:
    """Outside the pages, whose commands all run, there are those of the README's quick start
    only."""
    rest = [c for path in DOCUMENTS if path not in PAGES for c in commands(path)]
    assert {first_word(command) for command in rest} <= CHECKED | {"isobit"}


@pytest.mark.slow
def test_the_quickstart_learns_under_fp8_without_a_differing_token(
    tmp_path: Path, quickstart_cache: Path
) -> None:
    """The first 60 steps of `make quickstart`, from a base that is trained by these tests: against
    what README and picture say of it. After 30 the accuracy may not have moved yet, on a processor
    whose sums have another order."""
    command = f"isobit train configs/quickstart.yaml steps=60 --out {tmp_path / 'run'} --quiet"
    succeed(command, ROOT, ISOBIT_CACHE=str(quickstart_cache))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    accuracies = [row["accuracy/held_out"] for row in rows if "accuracy/held_out" in row]
    assert 0.2 <= accuracies[0] <= 0.6
    assert {row["mismatch/differing_tokens"] for row in rows[1:]} == {0}
    # what the README says of it, with room for another machine's training
    text = " ".join((ROOT / "README.md").read_text().split())
    first, last = (
        float(value)
        for value in re.findall(r"goes from ([\d.]+) to ([\d.]+) in 300 steps", text)[0]
    )
    compared = int(re.findall(r"log-probabilities of ([\d,]+) tokens", text)[0].replace(",", ""))
    assert accuracies[0] == pytest.approx(first, abs=0.1)
    assert accuracies[0] + 0.1 * (last - first) <= accuracies[-1] <= last + 0.03  # on its way
    whole = load_config(ROOT / "configs/quickstart.yaml").steps
    assert whole == 300
    assert sum(row["mismatch/compared_tokens"] for row in rows[1:]) * whole / 60 == pytest.approx(
        compared, rel=0.05
    )
    assert len(rows) == 1 + 60
    assert "0 differing tokens" in (tmp_path / "run/report.html").read_text()
    draw = f"python -m benchmarks.pictures --run {tmp_path / 'run'} --out {tmp_path} --no-report"
    succeed(draw, ROOT)
    assert (tmp_path / "quickstart.png").read_bytes().startswith(b"\x89PNG")
    assert "exactly zero" in (tmp_path / "live-view.svg").read_text().replace("&#160;", " ")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_configs_are_valid(path: Path) -> None:
    values = yaml.safe_load(path.read_text())
    if "presets" in values:
        compared = load_compare_config(path, [], None, None)
        for preset in compared.presets:
            load_config(
                ROOT / compared.train, [*compared.changes, f"precision={json.dumps(preset)}"]
            )
    elif "init" in values["model"] or "batch_size" in values:
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
        assert not test or f"def {test}(" in (ROOT / file).read_text(), (
            f"{path.name}: no {test} in {file}"
        )
    for file in re.findall(r"`((?:src|configs|docs|benchmarks|tests)/[\w/.-]+)`", text):
        assert (ROOT / file).exists(), f"{path.name}: no {file}"


def test_the_comparison_in_the_documents_is_that_of_the_runs() -> None:
    """Every row of the measured page, of the log's and of the README's, from the numbers of each
    run; and what is concluded of them."""
    runs = json.loads((ROOT / "docs" / "compare-recipes.json").read_text())
    assert {len(run["accuracy"]) for run in runs.values()} == {3}
    chosen_page = ROOT / "docs" / "how-to" / "choose-a-preset.md"
    pages = (MEASURED, ROOT / "docs" / "log.md", chosen_page, README)
    measured, log, chosen, readme = (path.read_text().replace("**", "") for path in pages)
    compared = re.findall(r"^\| [^`|]+ \| `([\w-]+)` \| [\d.e-]+ \| [\d.]+ \|$", readme, re.M)
    assert compared == ["fp8", "fp8-unified", "fp8-e2e", "fp8-rollout", "fp8-rollout-kv"]
    for preset, run in runs.items():
        kl, error, largest = (
            sum(run[key]) / 3 for key in ("kl_k3", "token_mult_prob_error", "max_abs_logprob_diff")
        )
        accuracy = "{:.3f} [{:.3f}, {:.3f}]".format(*mean_interval(run["accuracy"]))
        exact = sum(run["differing_tokens"]) == 0
        shown = (
            ("0", "1", "0")
            if exact
            else (f"{kl:.1e}".replace("e-0", "e-"), f"{error:.3f}", f"{largest:.2f}")
        )
        assert f"| `{preset}` | {' | '.join(shown)} | {accuracy} |" in measured
        assert f"| `{preset}` | {shown[0]} | {shown[2]} | {accuracy} |" in chosen
        assert preset not in compared or f"| `{preset}` | {shown[0]} | {shown[2]} |" in readme
        counts = f"{sum(run['differing_tokens']):,.0f} of {sum(run['compared_tokens']):,.0f}"
        assert f"| `{preset}` | {accuracy} | {' | '.join(shown)} | {counts} |" in log
    kl = {preset: max(run["kl_k3"]) for preset, run in runs.items()}
    order = ["fp8", "bf16[engines=separate]", "fp8-e2e", "fp8-rollout", "fp8-rollout-kv"]
    assert [kl[preset] for preset in order] == sorted(kl[preset] for preset in order)
    _, low, high = mean_interval(runs["bf16"]["accuracy"])
    assert low <= sum(runs["fp8"]["accuracy"]) / 3 <= high


def nav_files(entries: Any) -> Iterator[str]:
    """The files that a nav of mkdocs names, in order."""
    if isinstance(entries, str):
        yield entries
    else:
        for entry in entries.values() if isinstance(entries, dict) else entries:
            yield from nav_files(entry)


def test_the_glossary_is_short_and_in_order() -> None:
    """A word that the field's reader knows, or that the page of its subject explains, is not in
    it."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| \*\*(.+?)\*\* \|", text, re.M)
    assert 20 < len(words) <= 40
    assert words == sorted(words, key=str.lower)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("rollout correction", "correction"),
        ("importance sampling", "correction"),
        ("W8A8", "precision flow"),
        ("recipe", "precision flow"),
        ("blockwise", "block"),
        ("dynamic scaling", "block"),
        ("recalibration", "calibrated"),
        ("refit", "sync"),
        ("generation", "rollout"),
        ("training engine", "learner"),
        ("disagreement", "mismatch"),
        ("R3", "router replay"),
    ],
)
def test_a_word_of_the_papers_leads_to_the_word_that_is_used_here(theirs: str, ours: str) -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| .* \| (.*)\|$", text, re.M)
    assert ours in [word for word, also in rows if re.search(rf"\b{theirs}\b", also)]


def test_the_reward_model_of_the_page_is_that_of_the_examples() -> None:
    page = (ROOT / "docs/how-to/whole-pipeline.md").read_text(encoding="utf-8")
    (block,) = [block for block in parsed(page) if block.title == "reward_model.py"]
    assert block.text == (ROOT / "examples/reward_model.py").read_text(encoding="utf-8")


def test_every_page_is_in_the_nav_and_the_other_way_round() -> None:
    named = list(nav_files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(named) == sorted(str(path.relative_to(ROOT / "docs")) for path in PAGES)
    assert len(named) == len(set(named))


def test_the_maps_tree_names_files_that_exist() -> None:
    tree = next(text for text in blocks(ROOT / "docs" / "map.md", "") if "src/" in text)
    source, parent, missing, seen = ROOT / "src" / "isobit", "", list[str](), 0
    for indent, name in re.findall(r"^( {2}| {4})([\w]+(?:\.py|/))", tree, re.M):
        parent = name if len(indent) == 2 else parent
        place = source / name if len(indent) == 2 else source / parent / name
        missing += [] if place.exists() else [str(place)]
        seen += 1
    assert seen > 20
    assert not missing
