"""Results that are kept for a while: the newest, and none that is not there yet."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from isobit.serve.gateway import Refused
from isobit.serve.requests import BadRequest, Limits
from isobit.serve.tinker import futures
from isobit.serve.tinker.futures import Futures
from tests.until import until_here


class Gateway:
    limits = Limits()


def request(name: str) -> Request:
    async def receive() -> dict[str, Any]:
        body = f'{{"request_id": "{name}"}}'.encode()
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
    return Request({**scope, "state": {"tenant": "0"}}, receive)


async def said(content: bytes) -> Response:
    return Response(content)


def within(work: Callable[[Futures], Any]) -> None:
    asyncio.run(work(Futures(Gateway())))  # type: ignore[arg-type]


def test_the_oldest_results_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their number, and by their bytes; what is open stays, however old."""
    monkeypatch.setattr(futures, "_MOST_RESULTS", 3)
    monkeypatch.setattr(futures, "_MOST_RESULT_BYTES", 100)

    async def work(kept: Futures) -> None:
        opened = asyncio.Event()

        async def waits() -> Response:
            await opened.wait()
            return Response(b"late")

        kept.begin("0", "open", waits())
        for number in range(5):
            kept.begin("0", str(number), said(b"a" * 10))
        await until_here(lambda: not kept.knows("0", "1"))
        assert [kept.knows("0", str(number)) for number in range(5)] == [False] * 2 + [True] * 3
        kept.begin("0", "large", said(b"a" * 95))
        await until_here(lambda: not kept.knows("0", "4"))
        assert [kept.knows("0", name) for name in ("3", "4", "large")] == [False, False, True]
        with pytest.raises(BadRequest, match="it was forgotten"):
            await kept.retrieve(request("3"))
        assert len((await kept.retrieve(request("large"))).body) == 95
        opened.set()
        assert (await kept.retrieve(request("open"))).body == b"late"

    within(work)


def test_what_was_cancelled_or_refused_is_forgotten_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "_MOST_RESULTS", 2)

    async def refused() -> Response:
        raise Refused(503, "the server is ending")

    async def work(kept: Futures) -> None:
        kept.begin("0", "cancelled", asyncio.sleep(60), lambda: None)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await kept.cancel(request("cancelled"))
        kept.begin("0", "refused", refused())
        assert b"cancelled" in bytes((await kept.retrieve(request("cancelled"))).body)
        with pytest.raises(Refused):
            await kept.retrieve(request("refused"))
        for number in range(2):
            kept.begin("0", str(number), said(b"a"))
        await until_here(lambda: not kept.knows("0", "refused"))
        assert not kept.knows("0", "cancelled")
        assert not kept.knows("0", "refused")
        assert not kept._kept

    within(work)


def test_work_that_may_be_cancelled_says_when_it_is_over() -> None:
    """Also where it was cancelled before it began; and none too early."""

    async def work(kept: Futures) -> None:
        over, works = list[str](), asyncio.sleep(60)
        kept.begin("0", "done", said(b"a"), lambda: over.append("done"))
        kept.begin("0", "never begun", works, lambda: over.append("never"))  # type: ignore[arg-type]
        kept.give_up("0", "never begun")
        assert not over
        await until_here(lambda: len(over) == 2)
        works.close()
        assert sorted(over) == ["done", "never"]

    within(work)


def test_to_forget_takes_no_look_at_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies are looked at once each, when they are there."""
    looked = 0

    class Counted(Response):
        @property
        def body(self) -> bytes:
            nonlocal looked
            looked += 1
            return b"a"

        @body.setter
        def body(self, value: bytes) -> None:
            pass

    async def counted() -> Response:
        return Counted()

    monkeypatch.setattr(futures, "_MOST_RESULTS", 100)

    async def work(kept: Futures) -> None:
        nonlocal looked
        made = Counted()
        assert made.status_code == 200
        looked = 0
        for number in range(300):
            kept.begin("0", str(number), counted())
        before = looked
        await until_here(lambda: not kept.knows("0", "199"))
        assert sum(kept.knows("0", str(number)) for number in range(300)) == 100
        assert looked - before <= 2 * 300  # one in its own making

    within(work)
