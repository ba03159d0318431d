"""How a run's processes are started, and what they say where they cannot meet."""

import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import isobit
from isobit import cli
from isobit.distributed import launch
from isobit.errors import IsobitError, RankLost
from isobit.model import model
from isobit.run.format import FORMAT, FORMAT_NOW
from isobit.run.source import source_digest
from isobit.training.commands import ranks
from isobit.training.running import restoring
from tests.distributed import threads
from tests.distributed.sessions import session, written
from tests.runs import write_config


@pytest.mark.parametrize("how", ["new", "--resume", "--from-rollouts"])
def test_ranks_are_started_with_the_command_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    config, again = write_config(tmp_path, tmp_path), tmp_path / "again"
    (tmp_path / FORMAT).write_text(f"{FORMAT_NOW}\n")
    given = {
        "new": [str(config), "--out", str(again)],
        "--resume": [how, str(tmp_path)],
        "--from-rollouts": [how, str(tmp_path), "--out", str(again)],
    }[how]
    calls: list[Any] = []
    monkeypatch.setattr(ranks, "start", lambda *call: calls.append(call) or 3)
    monkeypatch.setattr(sys, "argv", ["isobit", "train", *given, "ranks=2"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    directory = tmp_path if how == "--resume" else again
    assert calls == [
        (2, ["train", *given, "ranks=2"], f"go on with: isobit train --resume {directory}")
    ]
    assert stop.value.code == 3


def test_a_mistake_in_a_config_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    code = f"""import sys, isobit.cli
sys.argv = ["isobit", "train", {str(write_config(tmp_path, tmp_path))!r}, "steps=none"]
try:
    isobit.cli.main()
finally:
    print({{"yaml", "torch"}} & sys.modules.keys())"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "{'yaml'}\n"
    assert done.stderr.endswith("config.yaml: steps: expected a whole number, got 'none'\n")


def test_ranks_that_are_started_again_find_nothing_of_those_before() -> None:
    """torchrun's store outlives ranks: their addresses are there, and hellos that nobody says any
    more."""
    store = dist.HashStore()
    store.set("isobit/hello/2", "of one that died")
    with ThreadPoolExecutor(3) as pool:
        for life in ("first", "second"):
            parts = list(pool.map(lambda rank: launch._of_this_life(store, rank, 3, 30), range(3)))
            assert not any(part.check(["address"]) for part in parts)
            parts[2].set("address", life)
            assert {part.get("address") for part in parts} == {
                life.encode()
            }  # it is one and the same
            assert store.check(["address"]) == (
                life == "second"
            )  # the control: the store that all lives share
            store.set("address", life)


def test_the_first_rank_names_those_that_do_not_come() -> None:
    store = dist.HashStore()
    with pytest.raises(RankLost, match=r"start: waited 0.1 s for rank 1, rank 2"):
        launch._of_this_life(store, 0, 3, 0.1)


def test_a_port_in_use_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the rank that would listen there, at once. The control: the same once the port is free."""
    monkeypatch.setattr(launch, "_end_with_launcher", lambda: None)
    other = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    port = other.getsockname()[1]
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }.items():
        monkeypatch.setenv(name, str(value))
    with (
        pytest.raises(
            IsobitError,
            match=rf"meet at localhost:{port}: another program uses that port; set MASTER_PORT",
        ),
        launch.joined(30),
    ):
        pass
    other.close()
    with launch.joined(30) as ranks:
        assert ranks.all_gather_json("here") == ["here"]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' in the environment: expected a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "-1"}, "WORLD_SIZE='-1' in the environment: expected a whole"),
        (
            {"RANK": "2", "WORLD_SIZE": "2"},
            "RANK=2 and WORLD_SIZE=2 in the environment: ranks count",
        ),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 and WORLD_SIZE=0 in the environment"),
        ({"TORCHELASTIC_RESTART_COUNT": "a"}, "TORCHELASTIC_RESTART_COUNT='a' in the environment"),
    ],
)
def test_a_launchers_variables_that_cannot_be_are_one_line(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(IsobitError, match=said):
        launch.launched() if "RANK" in variables else launch.restarted()


def test_ranks_that_add_in_other_orders_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where one machine has a compiler and the other has none. The control: alike, they go
    on."""
    config = written(tmp_path)
    threads.run(
        2, lambda ranks: session(config, [f"run.dir={tmp_path / 'alike'}", "steps=1"], ranks)
    )
    orders, get_ops = iter(["exact", "bitwise"]), model.get_ops
    monkeypatch.setattr(model, "get_ops", lambda backend, _: get_ops(backend, next(orders)))
    with pytest.raises(
        IsobitError, match=r"^the ranks differ: consistency is \S+ on rank 0 .* and \S+ on rank 1"
    ):
        threads.run(2, lambda ranks: session(config, [f"run.dir={tmp_path / 'other'}"], ranks))


def test_ranks_whose_source_differs_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte of a file in C++ on one machine. The control: alike, they go on (the test above)."""
    config, copy = written(tmp_path), tmp_path / "isobit"
    shutil.copytree(
        Path(isobit.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__")
    )
    source_digest.cache_clear()  # an editor may have changed what this process runs with
    assert source_digest(copy) == source_digest()
    changed = copy / "kernels" / "product" / "product.cpp"
    changed.write_bytes(changed.read_bytes() + b"\n")
    source_digest.cache_clear()
    digests = iter([source_digest(), source_digest(copy)])
    monkeypatch.setattr(restoring, "source_digest", lambda: next(digests))
    with pytest.raises(
        IsobitError,
        match=r"^the ranks differ: isobit's source is \w{16} on rank 0 .* \w{16} on rank 1",
    ):
        threads.run(2, lambda ranks: session(config, [f"run.dir={tmp_path / 'run'}"], ranks))
    assert not (tmp_path / "run").exists()
