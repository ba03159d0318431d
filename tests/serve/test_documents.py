"""What the page says of routes and keys is what there is, and the examples run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.routing import Route

from benchmarks.experiments import cookbook
from isobit.rl.stepwise.losses import LOSSES
from isobit.serve.app import make_app
from isobit.serve.requests import Limits
from isobit.serve.scoring import MOST_PROMPT_TOP
from isobit.serve.state import store
from isobit.serve.state.state import DISK_PART, MOST_CHECKPOINTS
from isobit.serve.tinker import room, wire
from isobit.serve.tinker.protocol import Sample
from isobit.serve.tinker.training import _MOST_UNNAMED
from tests.documents import ROOT, parsed

from . import figures, keys
from .helpers import TOKENS, Running

PAGE = (ROOT / "docs" / "how-to" / "serve.md").read_text()
TINKER = (ROOT / "docs" / "how-to" / "tinker.md").read_text()
PROSE, TINKER_PROSE = " ".join(PAGE.split()), " ".join(TINKER.split())


def test_the_table_of_routes_is_that_of_the_server(server: Running) -> None:
    routes = [
        route for route in make_app(server.gateway, TOKENS).routes if isinstance(route, Route)
    ]
    found = {
        f"{method} {route.path}"
        for route in routes
        for method in route.methods or ()
        if method != "HEAD"
    }
    refused = {name for name in found if name.endswith("/api/v1/{path:path}")}
    methods = "|".join(("GET", "POST", "PUT", "DELETE"))
    rows = re.findall(rf"^\| (`(?:{methods}) [^|]*) \|", PAGE + TINKER, re.M)
    said = [name for row in rows for name in re.findall("`([^`]+)`", row)]
    assert len(refused) == 4
    assert set(said) == found - refused


def test_the_lists_of_keys_are_those_of_the_requests() -> None:
    """As `python -m tests.serve.keys` prints them."""
    for part in (keys.served, keys.not_served, keys.ignored):
        assert f"\n\n{part()}\n\n" in PAGE


KEYS = (
    "max_tokens",
    "n",
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop",
)


@pytest.mark.parametrize("key", KEYS)
def test_the_keys_of_sampling_are_offered(server: Running, key: str) -> None:
    value = {
        "temperature": 0.5,
        "top_p": 0.5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "stop": "a",
    }.get(key, 2)
    assert f"`{key}`" in PAGE
    assert (
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 2, key: value}).status_code
        == 200
    )


def test_the_limits_are_those_of_the_server() -> None:
    limits = Limits()
    assert (
        f"at most {limits.body_bytes >> 20} MiB and must arrive in {limits.body_seconds:g} seconds"
        in PROSE
    )
    assert f"at most {limits.samples} answers and {limits.stop_strings} stop strings" in PROSE
    assert f"{limits.open_samples:,} answers of a tenant may be open" in PROSE
    assert f"{limits.held_bytes >> 20} MiB of a tenant's bodies" in PROSE
    assert f"at most {MOST_PROMPT_TOP:,} of the likeliest" in PROSE
    assert f"{limits.connections:,} connections may be open" in PROSE
    assert f"reads nothing for {limits.reader_seconds:g} seconds" in PROSE


@pytest.mark.slow
def test_the_openai_client_of_the_examples(server: Running, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(server.token + "\n")
    command = [
        sys.executable,
        ROOT / "examples" / "openai_client.py",
        server.url,
        tmp_path / "token",
    ]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "models: tiny, math, code" in done.stdout
    assert "the same, streamed: True" in done.stdout
    assert done.stdout.count("turn:") == 2


def test_the_table_of_losses_is_that_of_the_learner() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) ?\|$", TINKER, re.M))
    assert rows.keys() == LOSSES.keys()
    for name, said in rows.items():
        options = {key: float(value) for key, value in re.findall(r"`(\w+)` ([\d.]+)", said)}
        assert options == LOSSES[name].options


def test_the_table_of_parameters_is_that_of_the_client() -> None:
    """All there are in the client that is installed: offered, or named as not."""
    tinker = pytest.importorskip("tinker")
    rows = dict(re.findall(r"^\| `(\w+)` \| (`.*) \|$", TINKER, re.M))
    said = {name: set(re.findall(r"`(\w+)`", row)) for name, row in rows.items()}
    assert said["AdamParams"] == tinker.AdamParams.model_fields.keys()
    assert said["SamplingParams"] == tinker.SamplingParams.model_fields.keys()
    assert said["create_lora_training_client"] == tinker.types.LoraConfig.model_fields.keys()
    (refused,) = re.findall(r"of `sample` (.*?); and the routes", TINKER_PROSE)
    assert set(re.findall(r"`(\w+)`", refused)) == Sample.neutral.keys()


def test_what_is_not_offered_is_refused_in_one_line(trainer: Running) -> None:
    (routes,) = re.findall(r"and the routes (.*?)\. ", TINKER_PROSE)
    names = re.findall(r"`([\w/]+)`", routes)
    assert len(names) == 6
    for name in names:
        response = trainer.post(f"/api/v1/{name}", {})
        assert response.status_code == 404
        assert "does not offer" in response.json()["error"]["message"]


def test_the_limits_of_training_are_those_of_the_server() -> None:
    limits = Limits()
    assert f"may have {limits.runs} runs that train at the same time" in TINKER_PROSE
    assert f"may take {limits.adapter_bytes >> 30} GiB, or half of the memory" in TINKER_PROSE
    assert f"sampled from {limits.snapshot_bytes >> 30} GiB more" in TINKER_PROSE
    assert f"Of a tenant {limits.waiting_bytes >> 20} MiB may wait" in TINKER_PROSE
    assert f"and {limits.all_waiting_bytes >> 30} GiB of all" in TINKER_PROSE
    parts, entries = wire._MOST_PARTS, wire._MOST_ENTRIES
    assert f"{parts:,} data, chunks and tensors, and {entries:,} entries" in TINKER_PROSE
    most = store.MOST_REQUEST_BYTES
    assert f"A run may have {most >> 30} GiB of requests" in TINKER_PROSE
    assert f"beyond {most // store._HEAVY >> 20} MiB it is kept" in TINKER_PROSE
    assert f"at most {MOST_CHECKPOINTS:,} checkpoints and {store.MOST_RUNS:,} runs" in TINKER_PROSE
    assert (DISK_PART, room._MEMORY_PART) == (4 / 5, 2)
    assert f"of its {_MOST_UNNAMED} newest sampling clients" in TINKER_PROSE


def test_the_measured_figures_are_those_of_the_results() -> None:
    """As `python -m tests.serve.figures` prints them."""
    page = " ".join((ROOT / "docs" / "measured.md").read_text().split())
    for part in (figures.load, figures.kills, figures.hostile):
        assert " ".join(part().split()) in page
    assert figures.claims(figures.read("serve_kills"))["kills"] == 30
    values = {name: figures.claims(figures.read(f"serve_{name}")) for name in ("load", "kills")}
    assert values["load"]["answers that are others than alone"] == 0
    assert values["kills"]["rounds that end otherwise than without kills"] == 0


def test_the_page_of_the_cookbook_is_made_of_its_results() -> None:
    """And none of the runs had sampling and training apart."""
    page = (ROOT / "docs" / "experiments" / "cookbook.md").read_text()
    found = json.loads((figures.RESULTS / "experiments" / "cookbook.json").read_text())
    assert f"\n\n{cookbook.table(found)}\n\n" in page
    assert all(f"{name} {number}" in page for name, number in found["versions"].items())
    logged = [
        one["metrics"][name]
        for one in found["recipes"].values()
        for name in cookbook.KL
        if name in one["metrics"]
    ]
    assert len(logged) >= 10
    assert all(each["zeros"] == each["of"] >= 2 for each in logged)
    examples = (ROOT / "examples" / "cookbook.py").read_text()
    assert all(f"\ndef {name}(" in examples for name in cookbook.RECIPES)


def test_the_loop_of_the_page_is_the_example() -> None:
    (block,) = [block for block in parsed(TINKER) if block.title == "grpo.py"]
    assert block.text == (ROOT / "examples" / "tinker_grpo.py").read_text()
