"""Strangers' texts beside others: in turns, within bounds, and never in the event loop."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from isobit.data import foreign
from isobit.data.foreign import BadJson, parse_json
from isobit.model.text import escape_special
from isobit.model.text import tokenizer as tokenizers
from isobit.serve import desk as desks
from isobit.serve import requests, texts, wire
from isobit.serve.desk import Desk, written
from isobit.serve.requests import BadRequest, parse_body
from tests.until import until_here

from .helpers import Running

OVER = RuntimeError("it is over")


class Gate:
    """Work that ends when the test says so."""

    def __init__(self) -> None:
        self.begun, self.threads = list[str](), set[int]()
        self._events = dict[str, threading.Event]()

    def work(self, name: str) -> Callable[[], str]:
        event = self._events[name] = threading.Event()

        def wait() -> str:
            self.begun.append(name)
            self.threads.add(threading.get_ident())
            assert event.wait(60)
            return name

        return wait

    def end(self, *names: str) -> None:
        for name in names:
            self._events[name].set()


def test_long_texts_of_one_tenant_leave_a_thread_for_others() -> None:
    """Eight of a's do not delay b's, nor c's for more than one of them; each has its result."""

    async def main() -> None:
        desk, gate = Desk(threads=3), Gate()
        names = [f"a{number}" for number in range(8)]
        asked = [asyncio.ensure_future(desk.do("a", gate.work(name))) for name in names]
        await until_here(lambda: len(gate.begun) == 2)
        asked.append(asyncio.ensure_future(desk.do("b", gate.work("b"))))
        await until_here(lambda: gate.begun == ["a0", "a1", "b"])
        asked.append(asyncio.ensure_future(desk.do("c", gate.work("c"))))
        gate.end("b")
        await until_here(lambda: gate.begun == ["a0", "a1", "b", "c"])
        assert len(desk) == 6
        gate.end(*names, "c")
        assert await asyncio.gather(*asked) == [*names, "b", "c"]
        assert threading.get_ident() not in gate.threads
        desk.end(OVER)

    asyncio.run(main())


def test_tenants_take_turns() -> None:
    """Where all threads are busy, the next piece is of the tenant that had none for longest."""

    async def main() -> None:
        desk, gate = Desk(threads=1), Gate()
        names = ["a0", "a1", "a2", "b0", "b1"]
        asked = [asyncio.ensure_future(desk.do(name[0], gate.work(name))) for name in names]
        await until_here(lambda: gate.begun == ["a0"])
        gate.end(*names)
        await asyncio.gather(*asked)
        assert gate.begun == ["a0", "a1", "b0", "a2", "b1"]
        desk.end(OVER)

    asyncio.run(main())


def test_at_the_end_all_are_told() -> None:
    """Who has a thread, who waits, and who comes."""

    async def main() -> None:
        desk, gate = Desk(threads=1), Gate()
        asked = [asyncio.ensure_future(desk.do("a", gate.work(name))) for name in "xy"]
        await until_here(lambda: gate.begun == ["x"])
        desk.end(OVER)
        assert await asyncio.gather(*asked, return_exceptions=True) == [OVER, OVER]
        with pytest.raises(RuntimeError, match="over"):
            await desk.do("a", lambda: 1)
        gate.end("x", "y")
        assert gate.begun == ["x"]

    asyncio.run(main())


class Purse:
    """An account that is closed until it is opened."""

    def __init__(self) -> None:
        self.is_open, self.charged = False, list[float]()

    def open(self) -> bool:
        return self.is_open

    def charge(self, seconds: float) -> None:
        self.charged.append(seconds)


def test_work_waits_for_its_account_and_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desks, "_RETRY_SECONDS", 0.001)

    async def main() -> None:
        times = iter([1.0, 3.5])
        desk, begun = Desk(clock=lambda: next(times)), list[int]()
        desk.account = purse = Purse()
        asked = asyncio.ensure_future(desk.do("a", begun.append, 1))
        await asyncio.sleep(0.02)
        assert begun == []
        purse.is_open = True
        await asked
        assert begun == [1]
        assert purse.charged == [2.5]
        desk.end(OVER)

    asyncio.run(main())


def test_errors_and_clients_that_go_away() -> None:
    async def main() -> None:
        desk, gate = Desk(threads=1), Gate()
        with pytest.raises(ZeroDivisionError):
            await desk.do("a", lambda: 1 / 0)
        running = asyncio.ensure_future(desk.do("a", gate.work("running")))
        waiting = asyncio.ensure_future(desk.do("a", gate.work("waiting")))
        await until_here(lambda: gate.begun == ["running"])
        waiting.cancel()
        running.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        assert len(desk) == 0
        gate.end("running")
        assert await desk.do("a", lambda: 5) == 5
        assert gate.begun == ["running"]
        desk.end(OVER)

    asyncio.run(main())


@pytest.mark.parametrize(
    "value",
    [
        {"tokens": list(range(10000)), "count": 3, "é": None},
        {"choices": [{"a": [1.5, "x"]}, {}], "list": [], "one": [[1, 2]], "mixed": [1, "a", None]},
        {},
    ],
)
def test_answers_are_written_as_the_library_does(value: dict[str, Any]) -> None:
    whole = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert written(value) == whole.encode()


MANY = foreign._PLAIN + 10


@pytest.mark.parametrize(
    "text",
    [
        "[" + "1," * MANY + "1]",
        '{"a": ["\\u00e9\\n", 1.5, -3, true, null, {"b": {}}], "c": "' + "x, [{" * MANY + '"}',
        "[" + '{"a":1},' * MANY + "2]",
    ],
)
def test_many_values_are_read_in_python(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which lets other threads run, and reads the same; the control has few."""
    made = list[bool]()
    scanner = foreign.py_make_scanner
    monkeypatch.setattr(foreign, "py_make_scanner", lambda *a: (made.append(True), scanner(*a))[1])
    assert parse_json(text, patient=True) == json.loads(text)
    assert made == [True]
    assert parse_json("[1, 2]", patient=True) == [1, 2]
    assert made == [True]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" + "[]," * (foreign.MOST_CONTAINERS + 1) + "1]", "131,072 lists and objects"),
        ("[" * 5000 + "1," * MANY, "nested too deeply"),
        ("[" + "1," * MANY + "]", "Expecting value"),
        ("{" + ",".join(f'"{i}":1' for i in range(MANY)) + ',"7":2}', "key '7' comes twice"),
        ("[" + "1," * MANY + "9" * 400 + "]", "a whole number of 400 digits"),
    ],
)
def test_what_is_wrong_with_many_values(text: str, reason: str) -> None:
    with pytest.raises(BadJson) as refused:
        parse_json(text, patient=True)
    assert reason in refused.value.reason


def test_a_large_body_is_read_at_the_desk(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is wrong with it is told as ever; a small one is read at once."""
    threads = list[str]()

    def told(body: bytes) -> Any:
        threads.append(threading.current_thread().name.partition("_")[0])
        return parse_body(body)

    monkeypatch.setattr(wire, "parse_body", told)
    body = json.dumps({"tokens": [5, 6, 7] * 10000}).encode()
    assert len(server.post("/detokenize", content=body).json()["prompt"]) == 30000
    assert server.post("/detokenize", content=body[:-1]).status_code == 400
    assert threads == ["texts", "texts"]
    assert server.post("/detokenize", {"tokens": [5]}).status_code == 200
    assert threads[2] != "texts"


@pytest.mark.parametrize(
    ("path", "body"),
    [("/generate", {"input_ids": [5] * 30000}), ("/v1/responses", {"input": "a" * 99999})],
)
def test_a_large_body_is_read_once(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    threads = list[str]()

    def told(text: str, **options: Any) -> Any:
        threads.append(threading.current_thread().name.partition("_")[0])
        return parse_json(text, **options)

    monkeypatch.setattr(requests, "parse_json", told)
    assert server.post(path, body).status_code == 400  # longer than the context
    assert threads == ["texts"]


def test_a_text_that_fits_no_prompt_is_not_encoded(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its characters, or by its beginning; the control is encoded, and too long as ever."""
    longest, encoding = list[int](), tokenizers.encoding

    def counted(fast: Any, text: str, add_special: bool = False) -> Any:
        longest.append(len(text))
        return encoding(fast, text, add_special)

    for module in (tokenizers, escape_special):
        monkeypatch.setattr(module, "encoding", counted)
    text = "a" * 200000
    chat = [{"role": "user", "content": text}]
    for path, asked, key in (
        ("/v1/completions", {"prompt": text}, "prompt"),
        ("/v1/completions", {"prompt": ["a", text]}, "prompt"),
        ("/v1/chat/completions", {"messages": chat}, "messages"),
    ):
        found = server.post(path, asked)
        assert found.status_code == 400
        error = found.json()["error"]
        assert error["param"] == key
        assert (
            "characters has more tokens than the model's maximum context length of 256"
            in error["message"]
        )
    assert max(longest, default=0) <= 16 * 256
    found = server.post("/v1/completions", {"prompt": "a" * 1000})
    assert found.status_code == 400
    assert "1,000" in found.text or "1000" in found.text
    assert max(longest) == 1000


def test_texts_are_counted_up_to_a_bound(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what a prompt may have, since that is what is asked."""
    monkeypatch.setattr(texts, "_MOST_CHARACTERS", 20000)
    assert server.post("/tokenize", {"prompt": "a" * 20000}).json()["count"] == 20000
    for asked in (
        {"prompt": "a" * 20001},
        {"messages": [{"role": "user", "content": "a" * 20001}]},
    ):
        found = server.post("/tokenize", asked)
        assert found.status_code == 400
        assert "at most 20,000 characters are encoded at a time" in found.text


def test_a_beginning_that_says_too_little_refuses_nothing(server: Running) -> None:
    """Tokens of many characters: a text may be longer than its beginning promises."""
    tokenizer = server.gateway.tokenizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizers, "_SHORT", 10)
        patch.setattr(tokenizer, "_longest_token", 1000)
        assert not tokenizer.surely_longer("a" * 100, 100)
        assert not tokenizer.surely_longer("a" * 20, 12)  # its beginning is all of it
        assert tokenizer.surely_longer("a" * 400, 12)  # 192 of the first 192 characters
        patch.setattr(tokenizers, "_PROBED", 2)
        assert not tokenizer.surely_longer("a" * 400, 12)  # 24 tokens, which are not enough
        patch.setattr(tokenizer, "_longest_token", 1)
        assert tokenizer.surely_longer("a" * 400, 12)


def test_refusals_name_their_key() -> None:
    for key in ("prompt", "messages"):
        check = texts.check_counted(10, key)
        check("a" * 100)
        with pytest.raises(BadRequest, match=f"^{key}: at most 1,048,576 characters"):
            check("a" * ((1 << 20) + 1))
