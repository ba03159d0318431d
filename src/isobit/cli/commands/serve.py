"""`isobit serve`: a model and its adapters over HTTP. Left out: the server itself
(`serve/app.py`)."""

import sys
from collections.abc import Mapping
from pathlib import Path

from isobit.cli.commands.serving import open_frozen
from isobit.engine.engine import Engine
from isobit.engine.types import EngineSize
from isobit.errors import IsobitError
from isobit.model import TextRules
from isobit.training.rollouts.lengths import say_ends

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve_model(
    path: Path,
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
    train: bool,
    state: Path | None,
    state_every: int,
) -> None:
    """Serve the model at `path` under `flow`, (precision, backend, consistency), until a signal.
    Raises IsobitError for what cannot be served, and for a host beyond this machine without a
    token."""
    try:
        from isobit.serve import app
        from isobit.serve.keys import default_file, owners_of, read_or_make
        from isobit.serve.state.state import State
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("isobit"):
            raise
        raise IsobitError(f"serve needs {error.name}: pip install 'isobit[serve]'") from None
    if token is None and host not in _LOOPBACK:
        raise IsobitError(
            f"--host {host}: other machines could reach it; give the token's file with --token FILE"
        )
    if state is not None and not train:
        raise IsobitError("--state is where training runs are kept; give --train too")
    tokens, made = read_or_make(token or default_file())
    base = open_frozen(path, flow, TextRules(chat_template=chat_template))
    say_ends(base)
    serving = base.serving({})  # which refuses flows whose bits depend on the batch
    # without adapters a GPU captures decode steps
    model = serving if adapters or train else base
    longest = model.config.max_positions
    engine = Engine.sized_for(model, [[0]], size.max_sequences, longest, size)
    called = name or path.resolve().name
    kept = None
    if train:
        folder = state or default_file().with_name(f"serve-{called}")
        kept = State(folder, owners_of(tokens), every=state_every)

    def started(chosen: int) -> None:
        address = f"[{host}]" if ":" in host else host
        print(
            f"serving {', '.join([called, *adapters])} on http://{address}:{chosen}",
            file=sys.stderr,
        )
        print(
            f"token: {tokens[0] if made else '(the one)'} in {token or default_file()}",
            file=sys.stderr,
        )

    options = app.ServerOptions(host, port, grace, tool_format)
    try:
        app.run(engine, called, dict(adapters), tokens, options, started, kept)
    finally:
        if kept is not None:
            kept.close()
