"""What the page says of routes and keys is what there is, and the examples run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.routing import Route

from isobit.serve.app import make_app
from isobit.serve.requests import NEUTRAL, Limits
from tests.documents import ROOT, parsed

from .helpers import TOKENS, Running

PAGE = (ROOT / "docs" / "how-to" / "serve.md").read_text()
PROSE = " ".join(PAGE.split())


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
    rows = re.findall(r"^\| (`(?:GET|POST|PUT|DELETE) [^|]*) \|", PAGE, re.M)
    said = [name for row in rows for name in re.findall("`([^`]+)`", row)]
    assert len(refused) == 4
    assert set(said) == found - refused


def test_the_keys_that_are_not_offered_are_named() -> None:
    (said,) = re.findall(r"where they ask for nothing: (.*?)\. Images", PROSE)
    assert set(re.findall(r"`(\w+)`", said)) == NEUTRAL.keys()


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
    assert f"{limits.open_samples:,} answers may be open" in PROSE


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


def test_the_tinker_client_of_the_page(running: Running, tmp_path: Path) -> None:
    (block,) = [block for block in parsed(PAGE) if block.title == "tinker_client.py"]
    script = block.text.replace("http://127.0.0.1:8765", running.url).replace(
        "hf_checkpoint", "tiny"
    )
    (tmp_path / "tinker_client.py").write_text(script)
    (tmp_path / "serve.token").write_text(running.token + "\n")
    command = [sys.executable, "tinker_client.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "True\n", done.stderr
