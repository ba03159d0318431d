"""`isobit serve`: a model and its adapters over HTTP. Left out: the server itself
(`serve/app.py`)."""

import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from isobit.cli.commands.serving import open_frozen
from isobit.engine.engine import Engine
from isobit.engine.types import EngineSize
from isobit.errors import IsobitError
from isobit.model import Model, TextRules
from isobit.model.adapters.peft import is_adapter
from isobit.model.hub.checkpoint import model_folder
from isobit.model.text.tool_formats.table import format_of
from isobit.run.directory import model_directory
from isobit.serve import INSTALLED_BY
from isobit.training.rollouts.lengths import say_ends

if TYPE_CHECKING:
    from isobit.serve.state.state import State

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_MOST_GRACE = 86_400


def serve_model(
    given: Path,
    adapters: Mapping[str, Path],
    flow: tuple[str, str, str],
    size: EngineSize,
    *,
    host: str,
    port: int,
    token: Path | None,
    name: str | None,
    chat_template: Path | None,
    tool_format: str,
    grace: float,
    train: str | None,
    state: Path | None,
    state_every: int,
    drop_runs: bool,
) -> None:
    """Serve the model at `given`, a directory or a run, under `flow`, (precision, backend,
    consistency), until a signal. Raises IsobitError for a model or options that cannot be served,
    and for a host beyond this machine without a token."""
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
    if token is None and host not in _LOOPBACK:
        raise IsobitError(
            f"--host {host}: other machines could reach it; give the token's file with --token FILE"
        )
    called = given.resolve().name if name is None else name
    _check_names(grace, called, adapters, tool_format)
    _check_training(train, adapters, {"--state": state is not None, "--drop-runs": drop_runs})
    path, full, file = _model_of(given), train == "full", token or default_file()
    rules = TextRules(chat_template=chat_template)
    with ExitStack() as held:  # refuse early, before a model is read
        listener = listen(host, port, "--port")
        held.callback(listener.close)
        tokens, made = read_or_make(file)
        kept = None
        if train:
            identity = identity_of(path)
            folder = state or _default_state(default_file(), called, identity)
            owners = owners_of(tokens)
            kept = State(folder, owners, every=state_every, model=identity, drops=drop_runs)
            held.callback(kept.close)
            _check_runs(kept, full)
        model = _opened(path, flow, rules, full, bool(adapters or train))
        longest = model.config.max_positions
        engine = Engine.sized_for(model, [[0]], size.max_sequences, longest, size)

        def started(chosen: int) -> None:
            address = f"[{host}]" if ":" in host else host
            names = ", ".join([called, *adapters])
            print(f"serving {names} on http://{address}:{chosen}", file=sys.stderr)
            print(f"token: {'(a new one)' if made else '(the one)'} in {file}", file=sys.stderr)
            if kept is not None:
                print(f"training runs are kept in {kept.folder}", file=sys.stderr)

        options = app.ServerOptions(grace, given, tool_format)
        app.run(engine, called, dict(adapters), tokens, options, listener, started, kept)


def _check_names(grace: float, called: str, adapters: Mapping[str, Path], tool_format: str) -> None:
    """Raise IsobitError, before a model is read, for a tool format that does not exist, for seconds
    of grace out of range, and for a model's name that is empty or that an adapter has too."""
    format_of(tool_format, None)
    if not 0 <= grace <= _MOST_GRACE:
        raise IsobitError(f"--grace {grace:g}: expected seconds from 0 to {_MOST_GRACE:,}")
    if not called.strip() or called in adapters:
        what = (
            "an adapter has it too" if called in adapters else "expected a name that is not empty"
        )
        raise IsobitError(f"--name {called!r}: {what}; clients ask for the model by it")


def _check_training(
    train: str | None, adapters: Mapping[str, Path], given: Mapping[str, bool]
) -> None:
    """Raise IsobitError for another value of `train` than None, adapters and full, for adapters of
    a model that is trained in full, and for options of training that are `given` without it."""
    if train not in (None, "adapters", "full"):
        raise IsobitError(f"--train: expected nothing more, or full, got {train!r}")
    for option in (name for name, there in given.items() if there and not train):
        raise IsobitError(f"{option} is about training runs that are kept; give --train too")
    if train == "full" and adapters:
        raise IsobitError("--adapter: with --train full the weights that it is for would change")


def _opened(
    path: Path, flow: tuple[str, str, str], rules: TextRules, full: bool, serves: bool
) -> Model:
    """Load the model: with masters if all its weights are trained (`full`); otherwise frozen, and
    ready for adapters if it `serves` any. Raises IsobitError for a flow whose bits depend on the
    batch."""
    base = Model.load(path, *flow, rules=rules) if full else open_frozen(path, flow, rules)
    say_ends(base)
    serving = base.serving({})  # refuses flows whose bits depend on the batch
    return serving if serves and not full else base  # a GPU captures its decode steps


def _model_of(given: Path) -> Path:
    """Return the directory of a model, or of the model of a run. Raises IsobitError for an
    adapter."""
    path = model_directory(given)
    if is_adapter(path):
        raise IsobitError(
            f"{given} is an adapter; give the model that it is for: isobit serve MODEL --adapter "
            f"{given}; or write both as one model with isobit export --merge"
        )
    return model_folder(path)


def _default_state(token: Path, called: str, identity: str) -> Path:
    """Return the folder in which the runs of a model are kept unless another is given: next to the
    `token` file, named by the model's name and its weights. Prints a line where there is a folder
    named by the name alone, as an earlier isobit named it."""
    own = re.sub(r"[^\w.-]", "-", called)  # a name may have a slash in it
    older = token.with_name(f"serve-{own}")
    if older.is_dir():
        print(
            f"an earlier isobit kept training runs in {older}, of this model or another of its "
            f"name; --state {older} goes on with them",
            file=sys.stderr,
        )
    return token.with_name(f"serve-{own}-{identity[:16]}")


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
        other = "--train" if full else "--train full"
        raise IsobitError(
            f"--state {state.folder}: a run of it goes on with {other}; give that, or another "
            "folder, or end it with --drop-runs"
        )
