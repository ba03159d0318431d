"""A server of the Model Context Protocol over stdio, by the specification alone, with the habits of
real ones: it prints, pages its list, asks back, is slow, fails and dies."""

import json
import sys
import threading
import time

TOOLS = [
    {
        "name": "add",
        "description": "Add two numbers.",
        "inputSchema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
    {"name": "act", "description": "Do something.", "inputSchema": {"type": "object"}},
]
ONE = threading.Lock()
READY, THREE, CANCELLED = threading.Event(), threading.Barrier(3), list[int]()


def say(message: object) -> None:
    with ONE:  # threads answer at once
        print(json.dumps(message), flush=True)


def text(number: int, *parts: object, error: bool = False) -> None:
    content = [p if isinstance(p, dict) else {"type": "text", "text": p} for p in parts]
    say({"jsonrpc": "2.0", "id": number, "result": {"content": content, "isError": error}})


def act(number: int, what: str) -> None:
    if what == "die":
        sys.stderr.write("dying\n")
        sys.stderr.flush()
        import os

        os._exit(4)
    if what == "slow":
        time.sleep(600)
    if what == "meet":
        THREE.wait()
    if what == "cancelled":
        text(number, f"did {len(CANCELLED)} cancelled")
        return
    begin = f'{{"jsonrpc":"2.0","id":{number},"result":'
    lines = {
        "deep": begin + "[" * 200_000 + "]" * 200_000 + "}",
        "only deep": "[" * 200_000,
        "digits": begin + "9" * 5000 + "}",
        "cut": begin + '{"content": [',
        "list": begin + "[1]}",
        "null": begin + '{"content": null}}',
        "text": begin + '{"content": "abc"}}',
    }
    if what in lines:
        with ONE:
            print(lines[what], flush=True)
    elif what == "endless":
        sys.stdout.write("A" * 70_000)
        sys.stdout.flush()
    elif what == "fail":
        text(number, "it failed", error=True)
    elif what == "refuse":
        say({"jsonrpc": "2.0", "id": number, "error": {"code": -32602, "message": "no such thing"}})
    elif what == "picture":
        resource = {"type": "resource", "resource": {"uri": "a", "text": "from a file"}}
        text(number, "seen", {"type": "image", "data": ""}, resource)
    else:
        text(number, f"did {what} as {'ready' if READY.is_set() else 'unready'}")


def serve(message: dict) -> None:  # type: ignore[type-arg]
    method, number, params = message.get("method"), message.get("id"), message.get("params", {})
    if method == "initialize":
        assert params["protocolVersion"]
        print("starting up")  # what is no message is passed over
        say({"jsonrpc": "2.0", "id": "ask", "method": "roots/list"})
        say({"jsonrpc": "2.0", "id": "pong", "method": "ping"})
        say({"jsonrpc": "2.0", "method": "notifications/message", "params": {}})
        result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
        info = {"name": "it", "version": "1"}
        say({"jsonrpc": "2.0", "id": number, "result": {**result, "serverInfo": info}})
    elif method == "notifications/initialized":
        READY.set()
    elif method == "notifications/cancelled":
        CANCELLED.append(params["requestId"])
    elif method == "tools/list":
        page = (
            {"tools": TOOLS[1:]}
            if params.get("cursor")
            else {"tools": TOOLS[:1], "nextCursor": "2"}
        )
        say({"jsonrpc": "2.0", "id": number, "result": page})
    elif method == "tools/call" and params["name"] == "add":
        text(number, str(params["arguments"]["a"] + params["arguments"]["b"]))
    elif method == "tools/call":
        assert number is not None
        act(number, params["arguments"]["what"])


if __name__ == "__main__":
    for line in sys.stdin:
        message = json.loads(line)
        if message.get("method", "").startswith("tools/call"):
            threading.Thread(target=serve, args=(message,), daemon=True).start()
        else:
            serve(message)
