"""Tools of MCP servers over stdio, against a server that speaks the protocol by itself."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isobit.errors import IsobitError
from isobit.tasks.environments import mcp
from isobit.tasks.environments import pool as environment_pool
from isobit.tasks.environments.mcp import Server, ServerError
from isobit.tasks.environments.pool import EnvironmentPool
from isobit.tasks.environments.settings import EnvironmentConfig, McpServer
from isobit.tasks.workers import dispatch
from tests.environments.helpers import (
    begun,
    call,
    calling,
    contents,
    finished,
    replies,
    turned,
    written,
)

SERVER = Path(__file__).parent / "mcp_server.py"
COMMAND = f"{sys.executable} {SERVER}"


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    with EnvironmentPool(EnvironmentConfig(mcp=(McpServer(COMMAND),))) as pool:
        yield pool


def test_a_servers_tools_are_listed_and_called(pool: EnvironmentPool) -> None:
    functions = [tool["function"] for tool in pool.tools]
    assert [each["name"] for each in functions] == ["add", "act"]
    assert functions[0]["description"] == "Add two numbers."
    assert functions[0]["parameters"]["required"] == ["a", "b"]
    begun(pool, 0)
    calls = [call("add", {"a": 2, "b": 40}), call("act", {"what": "this"})]
    assert contents(turned(pool, 0, 0, *calls)) == ["42", "did this as ready"]
    assert finished(pool, 0).rewards == {}


@pytest.mark.parametrize(
    ("what", "content"),
    [
        ("fail", "{'error': 'it failed'}"),
        ("refuse", "{'error': 'no such thing'}"),
        ("picture", "seen\n[image left out]\nfrom a file"),
        ("die", "{'error': 'the server ended with exit code 4'}"),
        ("deep", "{'error': 'its answer cannot be read: it is nested too deep'}"),
        ("only deep", "{'error': 'its answer cannot be read: it is nested too deep'}"),
        ("cut", "{'error': 'its answer cannot be read: Expecting value: line "),
        ("digits", "{'error': 'its answer cannot be read: Exceeds the limit (4300 digits)"),
        ("list", "{'error': 'its result has no list of content'}"),
        ("null", "{'error': 'its result has no list of content'}"),
        ("text", "{'error': 'its result has no list of content'}"),
    ],
)
def test_what_goes_wrong_is_one_observation_and_the_next_call_works(
    pool: EnvironmentPool, what: str, content: str
) -> None:
    begun(pool, 0)
    (shown,) = contents(turned(pool, 0, 0, call("act", {"what": what})))
    assert shown.startswith(content)
    assert contents(turned(pool, 0, 1, call("add", {"a": 1, "b": 1}))) == ["2"]
    pool.end(0)


@pytest.mark.slow
def test_a_late_call_is_cancelled_and_the_server_goes_on() -> None:
    config = EnvironmentConfig(mcp=(McpServer(COMMAND),), turn_deadline_s=1.0)
    with EnvironmentPool(config) as pool:
        begun(pool, 0)
        (late,) = contents(turned(pool, 0, 0, call("act", {"what": "slow"})))
        assert late == "{'error': 'no result in time: it has not come back'}"
        process = pool._workers[0]._process
        assert contents(turned(pool, 0, 1, call("act", {"what": "cancelled"}))) == [
            "did 1 cancelled"
        ]
        assert pool._workers[0]._process is process


def test_calls_of_several_episodes_overlap(pool: EnvironmentPool) -> None:
    """Each is answered when three are under way."""
    for key in range(3):
        begun(pool, key)
        pool.turn(key, calling(0, call("act", {"what": "meet"})))
    found = replies(pool, 3)
    assert [contents(found[key]) for key in range(3)] == [["did meet as ready"]] * 3
    for key in range(3):
        pool.end(key)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("no-such-program --at all", "cannot be started: No such file or directory"),
        ("'open quote", "cannot be started: No closing quotation"),
        (f"{sys.executable} -c 'raise SystemExit(9)'", "the server ended with exit code 9"),
    ],
)
def test_a_server_that_cannot_be_used_is_one_line(command: str, says: str) -> None:
    pool = EnvironmentPool(EnvironmentConfig(mcp=(McpServer(command),)))
    with pytest.raises(IsobitError) as caught:
        pool.start()
    assert str(caught.value) == f"environment.mcp {command!r}: {says}"


def test_a_line_that_breaks_the_reading_fails_all_who_wait_and_the_next_call_starts_it_again() -> (
    None
):
    """Whatever goes wrong there: too many bytes of a line, or an exception of isobit's own."""

    async def calls() -> None:
        server = Server(McpServer(COMMAND))
        _, act = await server.tools(60.0)
        waiting = [asyncio.create_task(act.call(what="slow")) for _ in range(2)]
        await asyncio.sleep(0)
        real, server._take = server._take, broken  # type: ignore[method-assign]
        with pytest.raises(ServerError, match="the server wrote what cannot be read: ZeroDiv"):
            await act.call(what="this")
        for task in waiting:
            with pytest.raises(ServerError, match="the server wrote what cannot be read"):
                await task
        server._take = real  # type: ignore[method-assign]
        assert await act.call(what="this") == "did this as ready"
        assert server._process is not None
        server._process.kill()
        await server._process.wait()

    def broken(line: bytes, waiting: object) -> None:
        raise ZeroDivisionError

    asyncio.run(calls())


def test_a_line_without_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "_MOST_BYTES", 1 << 15)

    async def calls() -> None:
        server = Server(McpServer(COMMAND))
        _, act = await server.tools(60.0)
        with pytest.raises(ServerError, match="wrote a line of more than 32,768 bytes"):
            await act.call(what="endless")
        assert await act.call(what="this") == "did this as ready"
        assert server._process is not None
        server._process.kill()
        await server._process.wait()

    asyncio.run(calls())


def test_a_server_that_does_not_answer_is_named_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line says what is waited for; the control, a server that answers, is not named."""
    monkeypatch.setattr(environment_pool, "PATIENCE_S", 0.05)
    monkeypatch.setattr(dispatch, "START_DEADLINE_S", 1.0)
    monkeypatch.setattr(environment_pool, "START_DEADLINE_S", 1.0)
    command = f"{sys.executable} -c 'import time; time.sleep(600)'"
    with pytest.raises(IsobitError) as caught:
        EnvironmentPool(EnvironmentConfig(mcp=(McpServer(command),))).start()
    assert str(caught.value).startswith("environment")
    assert f"environment.mcp {command!r}" in str(caught.value)
    waited = f"environment: waiting for environment.mcp {command!r}; it has to load within 1 s"
    assert waited in capsys.readouterr().err.splitlines()


def test_a_server_that_was_cut_off_while_it_began_is_started_again() -> None:
    """The first call's deadline comes while the server has not said hello."""

    async def calls() -> None:
        server = Server(McpServer(COMMAND))
        with pytest.raises(IsobitError, match="no answer within 0 s"):
            await server.tools(0.0)
        starting = asyncio.create_task(server._asked("tools/list", {}))
        while not server._waiting:
            await asyncio.sleep(0)
        starting.cancel()
        assert (await server.tools(60.0))[0].name == "add"
        assert server._process is not None
        server._process.kill()
        await server._process.wait()

    asyncio.run(calls())


def test_two_tools_of_one_name_are_refused(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "add.py",
        'def add(a: int) -> int:\n    """Add.\n\n    Args:\n        a: It.\n    """\n    return a\n',
    )
    settings: dict[str, Any] = {"mcp": (McpServer(COMMAND),), "tools": (f"{path}:add",)}
    with pytest.raises(IsobitError, match="two tools are called 'add'; rename one"):
        EnvironmentPool(EnvironmentConfig(**settings)).start()


def test_a_server_of_the_published_package(tmp_path: Path) -> None:
    """FastMCP's own server, where the package `mcp` is installed."""
    pytest.importorskip("mcp")
    code = '''
try:
    from mcp.server.mcpserver import MCPServer as Server
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server

server = Server("it")

@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

server.run()
'''
    path = written(tmp_path, "published.py", code)
    config = EnvironmentConfig(mcp=(McpServer(f"{sys.executable} {path}"),))
    with EnvironmentPool(config) as pool:
        assert [tool["function"]["name"] for tool in pool.tools] == ["add"]
        begun(pool, 0)
        reply = turned(pool, 0, 0, call("add", {"a": 2, "b": 3}), call("add", {"a": "x"}))
        assert contents(reply)[0] == "5"
        assert contents(reply)[1].startswith("{'error': ")
