"""Which sockets processes listen on, as the kernel says it (/proc/net/tcp, as `ss -ltnp` reads
it)."""

import ipaddress
import os
from collections.abc import Collection
from pathlib import Path

MARK = "ISOBIT_TEST_MARK"
_LISTEN = "0A"


def marked(value: str) -> set[int]:
    """The processes, zombies aside, that inherited a mark by their environment."""
    found = set[int]()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={value}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.add(int(process.name))
        except OSError:  # it has ended
            continue
    return found


def listening(processes: Collection[int]) -> dict[tuple[str, int], int]:
    """(address, port) to the process that listens there."""
    owners = dict[str, int]()
    for process in processes:
        try:
            for link in Path(f"/proc/{process}/fd").iterdir():
                owners[os.readlink(link)] = process
        except OSError:
            continue
    found = dict[tuple[str, int], int]()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else []:
            fields = line.split()
            owner = owners.get(f"socket:[{fields[9]}]")
            if fields[3] == _LISTEN and owner is not None:
                address, _, port = fields[1].partition(":")
                found[_address(address), int(port, 16)] = owner
    return found


def beyond_loopback(places: Collection[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those that another machine could reach."""
    return [(address, port) for address, port in places if not _is_loopback(address)]


def _is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def _address(words: str) -> str:
    """The kernel writes each 32 bits in the machine's order."""
    data = b"".join(bytes.fromhex(words[i : i + 8])[::-1] for i in range(0, len(words), 8))
    return str(ipaddress.ip_address(data))
