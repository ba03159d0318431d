"""`isobit serve`: where it listens, its token, its end, and what it refuses in one line."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from isobit import cli
from isobit.errors import IsobitError
from isobit.run import checkpoints
from isobit.run.format import FORMAT, FORMAT_NOW
from isobit.serve.app import Server
from isobit.serve.gateway import Gateway
from isobit.serve.keys import read_or_make, tenant_of
from isobit.serve.listening import listen
from isobit.serve.requests import BadRequest
from isobit.serve.state.database import FILE
from isobit.serve.state.identity import identity_of
from isobit.serve.state.rows import StoredRun, StoredSession
from isobit.serve.state.state import State
from tests import sockets

from .helpers import LONG

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="sockets are read from /proc")


@contextmanager
def started(
    base: Path, *words: object, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and the address that it prints."""
    command = [
        sys.executable,
        "-m",
        "isobit",
        "serve",
        base,
        "--port",
        0,
        "--kv-pages",
        100,
        *words,
    ]
    process = subprocess.Popen(
        list(map(str, command)), stderr=subprocess.PIPE, text=True, env=os.environ | environment
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.search(r"on (http://\S+)", line)
        assert found, line + process.stderr.read()
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@LINUX
def test_it_listens_on_this_machine_and_ends_at_sigterm(folder: Path, tmp_path: Path) -> None:
    mark, file = f"serve-{os.getpid()}", tmp_path / "token"
    words = ("--adapter", f"math={folder / 'math'}", "--token", file, "--name", "mine")
    with started(folder / "base", *words, **{sockets.MARK: mark}) as (process, url):
        assert process.stderr is not None
        token = file.read_text().strip()
        assert process.stderr.readline() == f"token: (a new one) in {file}\n"
        assert file.stat().st_mode & 0o777 == 0o600
        places = sockets.listening(sockets.marked(mark))
        assert len(places) == 1
        assert sockets.beyond_loopback(places) == []
        headers = {"Authorization": f"Bearer {token}"}
        models = httpx.get(f"{url}/v1/models", headers=headers).json()["data"]
        assert [model["id"] for model in models] == ["mine", "math"]
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200
        given = {"model": "math", "prompt": "abc", "max_tokens": 3}
        assert httpx.post(f"{url}/v1/completions", headers=headers, json=given).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG) == 0
        assert process.stderr.read() == ""


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Tinker's client needs Python 3.11")
def test_it_trains(folder: Path, tmp_path: Path) -> None:
    """A run of the official client's; what a client left half asked does not hold its end."""
    tinker = pytest.importorskip("tinker")
    from .training import data, message, train

    file, state = tmp_path / "token", tmp_path / "state"
    words = ("--train", "--state", state, "--token", file, "--name", "mine")
    (token,), _ = read_or_make(file)
    with started(folder / "base", *words, TINKER_TELEMETRY="0") as (process, url):
        assert process.stderr is not None
        assert process.stderr.readline() == f"token: (the one) in {file}\n"
        assert process.stderr.readline() == f"training runs are kept in {state}\n"
        service = tinker.ServiceClient(base_url=url, api_key=token)
        client = service.create_lora_training_client(base_model="mine", rank=4, seed=1).result()
        train(client, 1, 1)
        assert client.save_state("end").result().path.endswith("/weights/end")
        found = httpx.post(
            f"{url}/api/v1/forward_backward",
            content=message(client.model_id, 9, data(1)),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/x-protobuf"},
        )
        assert found.status_code == 200
        service.holder.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG) == 0
        assert process.stderr.read() == ""
    assert state.stat().st_mode & 0o777 == 0o700
    assert list(state.rglob("adapter_model.safetensors"))


def test_a_listener_beyond_the_machine_is_noticed() -> None:
    """The control."""
    assert sockets.beyond_loopback([("0.0.0.0", 80), ("127.0.0.1", 80)]) == [("0.0.0.0", 80)]


def said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object
) -> str:
    port = () if "--port" in words else ("--port", 0)
    monkeypatch.setattr(sys, "argv", ["isobit", "serve", *map(str, (*words, *port))])
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert done.value.code == 2
    return capsys.readouterr().err


def test_what_it_refuses(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base, token = folder / "base", ("--token", tmp_path / "token")
    assert "other machines could reach it; give the token's file" in said(
        monkeypatch, capsys, base, "--host", "0.0.0.0"
    )
    assert "nothing" in said(monkeypatch, capsys, tmp_path / "nothing", *token)
    assert "give --train too" in said(monkeypatch, capsys, base, "--state", tmp_path, *token)
    (open_to_all := tmp_path / "open").mkdir(mode=0o755)
    assert "others may enter it" in said(
        monkeypatch, capsys, base, "--train", "--state", open_to_all, *token
    )
    assert "did you mean 'hermes'" in said(
        monkeypatch, capsys, base, "--tool-format", "hermess", *token
    )
    assert "calibrates its KV cache" in said(
        monkeypatch, capsys, base, "--precision", "fp8-rollout-kv", *token
    )
    wrong = ("--adapter", f"math={base}")
    assert "adapter" in said(monkeypatch, capsys, base, *wrong, *token)
    assert "--drop-runs is about training runs that are kept; give --train too" in said(
        monkeypatch, capsys, base, "--drop-runs", *token
    )
    for given, message in (
        (("--grace", "nan"), "serve.grace: expected a finite number, got 'nan'"),
        (("--grace", "inf"), "serve.grace: expected a finite number"),
        (("--grace=-1",), "serve.grace: expected at least 0"),
        (("serve.grace=86401",), "serve.grace: expected at most 86,400"),
        (("--name", " "), "serve: name ' ': expected a name that is not empty"),
        (("--name", "math", *wrong), "serve.name 'math': an adapter has it too"),
        (("--port", 70000), "serve.port: expected at most 65,535"),
        (("--kv-pages", 0), "engine.kv_pages: expected at least 1"),
        (("--max-sequences", 0), "engine.max_sequences: expected at least 1"),
        (("engine.sleep=never",), "unknown key 'engine.sleep'"),
        (("environment.max_turns=3",), "unknown key 'environment.max_turns'"),
    ):
        line = said(monkeypatch, capsys, base, *given, *token)
        assert message in line
        assert line.count("\n") == 1
    assert "expected nothing more, or full, got 'half'" in said(
        monkeypatch, capsys, base, "--train=half", *token
    )
    full = ("--train", "full", "--state", tmp_path / "full")
    for words in (full, ()):
        assert (
            f"math is an adapter; give the model that it is for: isobit serve MODEL --adapter "
            f"{folder / 'math'}; or write both"
        ) in said(monkeypatch, capsys, folder / "math", *words, *token)
    assert "with --train full the weights that it is for would change" in said(
        monkeypatch, capsys, base, "--train", "full", *wrong, *token
    )


@pytest.mark.parametrize("words", [("--train",), ("--train", "full")])
def test_a_run_goes_on_in_a_server_of_its_kind(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
) -> None:
    state, full = tmp_path / "state", "full" in words
    with closing(State(state)) as kept:
        kept.add_session(StoredSession("s", "t", 1.0))
        kept.add_run(StoredRun("r", "t", "s", 0, "b", 4 if full else None, 0, {}, 1.0, 1.0))
    other = "--train;" if full else "--train full;"
    given = (folder / "base", *words, "--state", state, "--token", tmp_path / "token")
    assert f"a run of it goes on with {other}" in said(monkeypatch, capsys, *given)


def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends where it would read the model."""

    def opened(*_: object) -> None:
        raise IsobitError("it is read")

    monkeypatch.setattr("isobit.training.commands.serve._opened", opened)


@pytest.mark.parametrize("where", ["default", "given"])
def test_runs_of_another_model_are_not_dropped(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
) -> None:
    """Models whose folders have one name have a state each; a state that is given to another model
    is refused before a model is read, unless its runs may be dropped. The control is a copy."""
    read_only(monkeypatch)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    models = [tmp_path / name / "model" for name in "abc"]
    for model in models:
        shutil.copytree(folder / "base", model)
    weights = models[1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    given = ("--state", tmp_path / "state") if where == "given" else ()

    def serve(model: Path, *words: object) -> str:
        return said(monkeypatch, capsys, model, "--train", *given, *words)

    assert "it is read" in serve(models[0])
    (state,) = [each.parent for each in tmp_path.rglob(FILE)]
    with closing(State(state, model=identity_of(models[0]))) as kept:
        kept.add_session(StoredSession("s", "t", 1.0))
        kept.add_run(StoredRun("r", "t", "s", 0, "b", 4, 0, {}, 1.0, 1.0))
    found = serve(models[1])
    if where == "default":
        assert "it is read" in found
        assert len(list(tmp_path.rglob(FILE))) == 2
    else:
        assert "1 training runs of it are of a model with other weights; serve that one" in found
        assert found.count("\n") == 1
    assert "it is read" in serve(models[2])
    with closing(State(state)) as kept:
        assert len(kept.live_runs()) == 1
    assert "it is read" in serve(models[1], "--drop-runs")


def test_a_run_is_served_by_its_name(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And not by that of its newest checkpoint, which all runs have; one of an adapter is named as
    it would be right."""
    read_only(monkeypatch)
    called: list[str] = []

    def checked(name: str, *_: object) -> None:
        called.append(name)

    monkeypatch.setattr("isobit.training.commands.serve._check_names", checked)
    for run, model in (("base2", "base"), ("tuned", "math")):
        write = partial(shutil.copytree, folder / model, dirs_exist_ok=True)
        checkpoints.save(tmp_path / run / "checkpoints", 300, write, 1)
        (tmp_path / run / "config.yaml").write_text("")
        (tmp_path / run / FORMAT).write_text(str(FORMAT_NOW))
    token = ("--token", tmp_path / "token")
    assert "it is read" in said(monkeypatch, capsys, tmp_path / "base2", *token)
    adapter = tmp_path / "tuned"
    line = said(monkeypatch, capsys, adapter, *token)
    assert f"{adapter} is an adapter; give the model that it is for" in line
    assert f"isobit serve MODEL --adapter {adapter};" in line
    assert called == ["base2", "tuned"]


def test_a_run_is_found_by_its_own_path(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, relative and as a link, and by its checkpoint's; the controls are folders around it."""
    gateways: list[Gateway] = []
    monkeypatch.setattr(Server, "run", lambda server, sockets: gateways.append(server._gateway))
    write = partial(shutil.copytree, folder / "base", dirs_exist_ok=True)
    checkpoints.save(tmp_path / "run" / "checkpoints", 300, write, 1)
    (tmp_path / "run" / "config.yaml").write_text("")
    (tmp_path / "run" / FORMAT).write_text(str(FORMAT_NOW))
    (tmp_path / "linked").symlink_to("run")
    monkeypatch.chdir(tmp_path)
    words = ["serve", "linked", "--port", "0", "--token", "token", "--kv-pages", "100"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.exception
    (gateway,) = gateways
    for path in ("run", "./linked/", str(tmp_path / "run"), "linked", gateway.folder):
        assert gateway.adapter_of(path) is None
    for other in (".", "run/checkpoints", str(tmp_path), "config.yaml"):
        with pytest.raises(BadRequest, match="is not served"):
            gateway.adapter_of(other)


def test_a_state_by_the_name_alone_is_named(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where an earlier isobit kept runs. The controls: it is given, or there is none."""
    read_only(monkeypatch)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    older = tmp_path / "isobit" / "serve-base"
    words = (folder / "base", "--train")
    assert str(older) not in said(monkeypatch, capsys, *words)
    State(older).close()
    assert f"; --state {older} goes on with them\n" in said(monkeypatch, capsys, *words)
    assert str(older) not in said(monkeypatch, capsys, *words, "--state", older)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Tinker's client needs Python 3.11")
def test_it_trains_all_weights(folder: Path, tmp_path: Path) -> None:
    tinker = pytest.importorskip("tinker")
    from .training import train

    file, state = tmp_path / "token", tmp_path / "state"
    words = ("--train", "full", "--state", state, "--token", file, "--name", "mine")
    with started(folder / "base", *words, TINKER_TELEMETRY="0") as (process, url):
        service = tinker.ServiceClient(base_url=url, api_key=file.read_text().strip())
        client = service.create_lora_training_client(base_model="mine", rank=0).result()
        train(client, 1, 1)
        assert client.save_state("end").result().path.endswith("/weights/end")
        service.holder.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG) == 0
    assert list(state.rglob("model.safetensors"))
    assert not list(state.rglob("adapter_model.safetensors"))


WITHOUT = """
import os, sys, torch
sys.argv = ["isobit", "serve", sys.argv[1]]
for missing in ("uvicorn", "starlette", "prometheus_client"):
    if (child := os.fork()) == 0:  # a process each, and torch imported once
        sys.modules[missing] = None
        from isobit.cli import main
        main()
    print(missing, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=sys.stderr)
"""


@pytest.mark.slow
def test_without_the_extra_it_says_what_to_install(folder: Path) -> None:
    words = [sys.executable, "-c", WITHOUT, str(folder / "base")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    said = "".join(
        rf"isobit: serve needs {missing}[\w.]*: pip install starlette uvicorn prometheus-client\n{missing} 2\n"
        for missing in ("uvicorn", "starlette", "prometheus_client")
    )
    assert re.fullmatch(said, done.stderr), done.stderr


def test_what_is_taken_is_noticed_before_a_model_is_read(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A port, and a state that another server has. The control: without them it is read."""
    read = list[Path]()

    def opened(path: Path, *_: object) -> None:
        read.append(path)
        raise IsobitError("it is read")

    monkeypatch.setattr("isobit.training.commands.serve._opened", opened)
    base, token = folder / "base", ("--token", tmp_path / "token")
    with closing(listen("127.0.0.1", 0, "--port")) as other:
        port = other.getsockname()[1]
        found = said(monkeypatch, capsys, base, "--port", port, *token)
    assert found == (
        f"isobit: serve.port {port}: cannot listen on 127.0.0.1: it is in use; give another port, or "
        "end what listens there\n"
    )
    training = ("--train", "--state", tmp_path / "state", *token)
    with closing(State(tmp_path / "state")):
        assert "in use" in said(monkeypatch, capsys, base, *training)
    assert not read
    assert said(monkeypatch, capsys, base, "--port", port, *training) == "isobit: it is read\n"
    assert read == [base]


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("256.0.0.1", "Name or service not known|nodename nor servname provided, or not known"),
        ("é" * 70, "that is no name of a machine"),
        ("192.0.2.1", "(Cannot|Can't) assign requested address"),
    ],
)
def test_where_it_cannot_listen(host: str, reason: str) -> None:
    with pytest.raises(IsobitError, match=rf"^--port 0: cannot listen on {host}: ({reason})$"):
        listen(host, 0, "--port")


def test_tokens(tmp_path: Path) -> None:
    file = tmp_path / "state" / "token"
    (token,), made = read_or_make(file)
    assert made
    assert len(token) > 40
    assert read_or_make(file) == ((token,), False)
    file.write_text("first-token-0123456\nsecond-token-012345\n")
    tokens, _ = read_or_make(file)
    found = [
        tenant_of(f"Bearer {text}".encode(), b"", tokens)
        for text in (*tokens, "first", tokens[0][:-1])
    ]
    assert found == ["0", "1", None, None]
    assert tenant_of(b"", b"", tokens) is None
    assert tenant_of(b"", tokens[1].encode(), tokens) == "1"
    file.chmod(0o640)
    with pytest.raises(IsobitError, match="others may read it; run chmod 600"):
        read_or_make(file)
    file.chmod(0o600)
    file.write_text("short\n")
    with pytest.raises(IsobitError, match="expected in each line a token of at least 16"):
        read_or_make(file)
    with pytest.raises(IsobitError, match="cannot be read"):
        read_or_make(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(IsobitError, match=r"cannot be made: .* is a file"):
        read_or_make(tmp_path / "file" / "token")
