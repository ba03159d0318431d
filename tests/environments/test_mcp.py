"""Tools of MCP servers over stdio, against a server that speaks the protocol by itself."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isobit.environments.pool import EnvironmentPool
from isobit.environments.settings import EnvironmentConfig, McpServer
from isobit.errors import IsobitError
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
    ],
)
def test_what_goes_wrong_is_one_observation_and_the_next_call_works(
    pool: EnvironmentPool, what: str, content: str
) -> None:
    begun(pool, 0)
    assert contents(turned(pool, 0, 0, call("act", {"what": what}))) == [content]
    assert contents(turned(pool, 0, 1, call("add", {"a": 1, "b": 1}))) == ["2"]
    pool.end(0)


@pytest.mark.slow
def test_a_late_call_is_cancelled_and_the_server_goes_on() -> None:
    config = EnvironmentConfig(mcp=(McpServer(COMMAND),), turn_deadline_s=1.0)
    with EnvironmentPool(config) as pool:
        begun(pool, 0)
        (late,) = contents(turned(pool, 0, 0, call("act", {"what": "slow"})))
        assert late == "{'error': 'no result in time: it has not come back'}"
        process = pool._workers[0].process._process
        assert contents(turned(pool, 0, 1, call("act", {"what": "cancelled"}))) == [
            "did 1 cancelled"
        ]
        assert pool._workers[0].process._process is process


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
