"""Ports for servers that tests begin as processes of their own, which cannot say which one is
free."""

import os
import random
import re
import socket

_RANGE = range(20_000, 32_000)
"""Below those that Linux gives to outgoing connections, which could come before the server."""
_GIVEN = re.compile(r"(?:--port[ =]|\bserve\.port=)(\d+)")


def free_port() -> int:
    """A port of this machine at which nothing listens."""
    chosen = random.Random(os.urandom(8))
    while True:
        port = chosen.choice(_RANGE)
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def with_free_ports(text: str) -> str:
    """A page whose servers listen at free ports in the place of its own, and whose clients ask
    there: tests follow pages side by side, and a reader's server may listen at the port too."""
    given, free = set(_GIVEN.findall(text)), set[int]()
    while len(free) < len(given):
        free.add(free_port())
    instead = dict(zip(given, map(str, free)))
    return re.sub(r"\b\d+\b", lambda found: instead.get(found[0], found[0]), text)
