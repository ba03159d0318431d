"""`isobit serve`: a model and its adapters over HTTP. Left out: the server itself
(`serve/app.py`)."""

import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from isobit.config.commands import ServerConfig
from isobit.engine.engine import Engine
from isobit.errors import IsobitError
from isobit.model import Model, TextRules
from isobit.model.adapters.peft import is_adapter
from isobit.model.hub.checkpoint import model_folder
from isobit.model.hub.folders import from_hub_cache
from isobit.model.text.tool_formats.table import format_of
from isobit.run.directory import model_directory
from isobit.serve import INSTALLED_BY
from isobit.training.commands.serving import Flow, open_frozen, rules_of
from isobit.training.rollouts.lengths import say_ends

if TYPE_CHECKING:
    from isobit.serve.state.state import State

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Files:
    """The files and modes of a server. `token`: the clients' tokens; `train`: None, adapters or
    full; `state`: the folder of training runs; `drop_runs`: whether those that cannot go on end."""

    token: Path | None = None
    train: str | None = None
    state: Path | None = None
    drop_runs: bool = False


def serve_model(config: ServerConfig, adapters: Mapping[str, Path], files: Files) -> None:
    """Serve a model, a directory or a run, and its adapters, until a signal. Raises IsobitError for
    a model or options that cannot be served, and for a host beyond this machine without a token."""
    try:
        from isobit.serve import app
        from isobit.serve.keys import default_file, owners_of, read_or_make
        from isobit.serve.listening import listen
        from isobit.serve.state.identity import identity_of
        from isobit.serve.state.state import State
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("isobit"):
            raise
        raise IsobitError(f"serve needs {error.name}: {INSTALLED_BY}") from None
    serve, flow = config.serve, (config.precision, config.backend, config.consistency)
    if files.token is None and serve.host not in _LOOPBACK:
        raise IsobitError(
            f"serve.host {serve.host}: other machines could reach it; give the token's file with "
            "--token FILE"
        )
    model_path = Path(config.model.path)
    called = model_path.resolve().name if serve.name is None else serve.name
    tool_format = config.environment.parser
    _check_names(called, adapters, tool_format)
    _check_training(files, adapters)
    path, full, file = _model_of(model_path), files.train == "full", files.token or default_file()
    with ExitStack() as held:  # refuse early, before a model is read
        listener = listen(serve.host, serve.port, "serve.port")
        held.callback(listener.close)
        tokens, made = read_or_make(file)
        store = None
        if files.train:
            identity = identity_of(path)
            folder = files.state or _default_state(default_file(), called, identity)
            owners, every = owners_of(tokens), serve.state_every
            store = State(folder, owners, every=every, model=identity, drops=files.drop_runs)
            held.callback(store.close)
            _check_runs(store, full)
        rules = rules_of(config.model)
        model = _opened(path, flow, rules, full, bool(adapters or files.train))
        longest, size = model.config.max_positions, config.engine
        engine = Engine.sized_for(model, [[0]], size.max_sequences, longest, size)

        def started(chosen: int) -> None:
            address = f"[{serve.host}]" if ":" in serve.host else serve.host
            names = ", ".join([called, *adapters])
            print(f"serving {names} on http://{address}:{chosen}", file=sys.stderr)
            print(f"token: {'(a new one)' if made else '(the one)'} in {file}", file=sys.stderr)
            if store is not None:
                print(f"training runs are kept in {store.folder}", file=sys.stderr)

        options = app.ServerOptions(serve.grace, model_path, tool_format)
        app.run(engine, called, dict(adapters), tokens, options, listener, started, store)


def _check_names(called: str, adapters: Mapping[str, Path], tool_format: str) -> None:
    """Raise IsobitError, before a model is read, for a tool format that does not exist, and for a
    model's name that an adapter has too."""
    format_of(tool_format, None)
    if called in adapters:
        raise IsobitError(
            f"serve.name {called!r}: an adapter has it too; clients ask for the model by it"
        )


def _check_training(files: Files, adapters: Mapping[str, Path]) -> None:
    """Raise IsobitError for another value of `train` than None, adapters and full, for adapters of
    a model that is trained in full, and for options of training that are given without it."""
    if files.train not in (None, "adapters", "full"):
        raise IsobitError(f"--train: expected nothing more, or full, got {files.train!r}")
    if not files.train and (files.state is not None or files.drop_runs):
        option = "--state" if files.state is not None else "--drop-runs"
        raise IsobitError(f"{option} is about training runs that are kept; give --train too")
    if files.train == "full" and adapters:
        raise IsobitError("--adapter: with --train full the weights that it is for would change")


def _opened(path: Path, flow: Flow, rules: TextRules, full: bool, serves: bool) -> Model:
    """Load the model: with masters if all its weights are trained (`full`); otherwise frozen, and
    ready for adapters if it `serves` any. Raises IsobitError for a flow whose bits depend on the
    batch."""
    base = Model.load(path, *flow, rules=rules) if full else open_frozen(path, flow, rules)
    say_ends(base)
    serving = base.serving({})  # refuses flows whose bits depend on the batch
    return serving if serves and not full else base  # a GPU captures its decode steps


def _model_of(model_path: Path) -> Path:
    """Return the directory of a model, or of the model of a run. Raises IsobitError for an
    adapter."""
    path = from_hub_cache(model_directory(model_path))
    if is_adapter(path):
        raise IsobitError(
            f"{model_path} is an adapter; give the model that it is for: isobit serve MODEL --adapter "
            f"{model_path}; or write both as one model with isobit export --merge"
        )
    return model_folder(path)


def _default_state(token: Path, called: str, identity: str) -> Path:
    """Return the folder in which the runs of a model are kept unless another is given: next to the
    `token` file, named by the model's name and its weights. Prints a line where there is a folder
    named by the name alone, as an earlier isobit named it."""
    name = re.sub(r"[^\w.-]", "-", called)  # a name may have a slash in it
    older = token.with_name(f"serve-{name}")
    if older.is_dir():
        print(
            f"an earlier isobit kept training runs in {older}, of this model or another of its "
            f"name; --state {older} goes on with them",
            file=sys.stderr,
        )
    return token.with_name(f"serve-{name}-{identity[:16]}")


def _check_runs(state: "State", full: bool) -> None:
    """Raise IsobitError for a state with live runs that this server would end: runs of a model with
    other weights, and runs of the other kind (adapters or all weights); not if the state may drop
    runs."""
    if state.drops:
        return
    if count := state.num_of_other_models:
        raise IsobitError(
            f"--state {state.folder}: {count:,} training runs of it are of a model with other "
            "weights; serve that one, give another folder, or end them with --drop-runs"
        )
    if any((run.rank is None) != full for run in state.live_runs()):
        option = "--train" if full else "--train full"
        raise IsobitError(
            f"--state {state.folder}: a run of it goes on with {option}; give that, or another "
            "folder, or end it with --drop-runs"
        )
