"""`async` reward functions: one event loop for a worker's whole life, and what one call leaves for
the next."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isobit.tasks.rewards.pool import Reward, RewardPool
from isobit.tasks.rewards.spec import RewardSpec

FUNCTIONS = """
import asyncio, os

_slots = asyncio.Semaphore(1)  # at most one request to a judge at a time

async def _limited(text):
    async with _slots:
        await asyncio.sleep(0.001)
    return float(len(text))

async def limited(completions, **columns):
    return await asyncio.gather(*[_limited(text) for text in completions])

async def compute_score(solution_str, ground_truth):
    return await _limited(solution_str)

_loop = asyncio.get_event_loop()

async def same_loop(completions, **columns):
    return [float(asyncio.get_running_loop() is _loop)] * len(completions)

# A connection, opened once and kept, to a server on the same loop.
_connection = _server = None

async def _echo(reader, writer):
    while line := await reader.readline():
        writer.write(line)
        await writer.drain()

async def _asked(text):
    global _connection, _server
    if _connection is None:
        _server = await asyncio.start_server(_echo, "127.0.0.1", 0)
        _connection = await asyncio.open_connection(*_server.sockets[0].getsockname())
    if text == "bad":
        raise ValueError("no good")
    reader, writer = _connection
    writer.write(text.encode() + b"\\n")
    await writer.drain()
    return float(len(await reader.readline()))

async def connected(completions, **columns):
    return [await _asked(text) for text in completions]

# A queue with a consumer of the module's own, which waits between calls.
_questions = None

async def _consume():
    while True:
        text, answer = await _questions.get()
        if text == "bad":
            answer.set_exception(ValueError("no good"))
        else:
            answer.set_result(float(len(text)))

async def _queued(text):
    answer = asyncio.get_running_loop().create_future()
    await _questions.put((text, answer))
    return await answer

async def queued(completions, **columns):
    global _questions, _consumer
    if _questions is None:
        _questions = asyncio.Queue()
        _consumer = asyncio.create_task(_consume())
    return await asyncio.gather(*[_queued(text) for text in completions])

# What is still at work when a call raises.
_late = []

async def _turns(number):
    for _ in range(number):
        await asyncio.sleep(0)

async def _slowly(text):
    if text == "bad":
        raise ValueError("no good")
    await _turns(20)  # those beside a bad one are ended meanwhile
    _late.append(text)
    return 1.0

async def raising(completions, **columns):
    if completions == ["how many"]:
        await _turns(100)
        return [float(len(_late))]
    return await asyncio.gather(*[_slowly(text) for text in completions])

async def hanging(completions, **columns):
    await asyncio.sleep(60 if "bad" in completions else 0)
    return await limited(completions)

async def exiting(completions, **columns):
    if "bad" in completions:
        raise SystemExit("enough")
    return await limited(completions)

async def closing(completions, **columns):
    asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)
    await asyncio.sleep(60)

def closed(completions, **columns):
    asyncio.get_event_loop().close()
    return [1.0] * len(completions)
"""


def scored(pool: RewardPool, *texts: str) -> list[float | None]:
    rewards: list[Reward] = pool.score(["p"] * len(texts), texts, [{"answer": "a"}] * len(texts))
    return [reward.total for reward in rewards]


@pytest.mark.parametrize("name", ["limited", "compute_score", "queued"])
def test_what_a_module_keeps_serves_every_call(file: str, name: str, capfd: Any) -> None:
    """No call fails, so that none of it is scored one by one."""
    with RewardPool([RewardSpec(f"{file}:{name}")], chunk_size=4) as pool:
        for _ in range(3):
            assert scored(pool, "a", "bb", "ccc", "dddd", "e", "ff") == [1, 2, 3, 4, 1, 2]
    assert capfd.readouterr().err == ""


def test_a_connection_is_kept_over_calls_and_failures(file: str) -> None:
    with RewardPool([RewardSpec(f"{file}:connected")], on_error="skip") as pool:
        assert scored(pool, "bad", "b") == [None, 2]
        for _ in range(3):
            assert scored(pool, "aa", "b", "ccc") == [3, 2, 4]


def test_an_own_task_of_the_module_lives_on_after_a_failure(file: str) -> None:
    with RewardPool([RewardSpec(f"{file}:queued")], on_error="skip", deadline_s=5) as pool:
        assert scored(pool, "a", "bad", "cc") == [1, None, 2]
        assert scored(pool, "a", "cc") == [1, 2]


def test_what_is_imported_finds_the_loop_that_calls_run_on(file: str) -> None:
    with RewardPool([RewardSpec(f"{file}:same_loop")]) as pool:
        assert scored(pool, "a", "b") == [1, 1]
        assert scored(pool, "a") == [1]


def test_siblings_of_what_raised_do_not_go_on_in_the_next_call(file: str) -> None:
    """Three completions are scored alone after the call that failed: without the siblings that were
    still waiting then, three have been at work, and not six."""
    with RewardPool([RewardSpec(f"{file}:raising")], on_error="skip") as pool:
        assert scored(pool, "a", "bad", "b", "c") == [1, None, 1, 1]
        assert scored(pool, "how many") == [3]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hanging", "exiting"])
def test_a_call_that_hangs_or_exits_costs_its_sample_alone(file: str, name: str) -> None:
    with RewardPool([RewardSpec(f"{file}:{name}")], on_error="skip", deadline_s=2) as pool:
        assert scored(pool, "a", "bad", "bb") == [1, None, 2]
        assert scored(pool, "a", "bb", "ccc") == [1, 2, 3]


def test_a_loop_that_a_function_stops_or_closes_is_no_end(file: str) -> None:
    with RewardPool([RewardSpec(f"{file}:closing")], on_error="skip") as pool:
        assert scored(pool, "a") == [None]
    with RewardPool([RewardSpec(f"{file}:closed"), RewardSpec(f"{file}:limited")]) as pool:
        assert scored(pool, "a") == [2]


def test_objects_of_this_process_have_one_loop_too(file: str) -> None:
    """Also where a loop runs already, as in a notebook."""
    import asyncio

    namespace: dict[str, Any] = {"__name__": "notebook"}
    source = Path(file).read_text().replace("_loop = asyncio.get_event_loop()", "_loop = None")
    exec(compile(source, file, "exec"), namespace)
    limited: Callable[..., Any] = namespace["limited"]

    async def cell() -> list[float | None]:
        return scored(pool, "a", "bb", "ccc")

    with RewardPool(
        [RewardSpec("<python>:limited")], objects={"<python>:limited": limited}
    ) as pool:
        assert scored(pool, "a", "bb", "ccc") == [1, 2, 3]
        assert asyncio.run(cell()) == [1, 2, 3]
        assert scored(pool, "a", "bb", "ccc") == [1, 2, 3]


def test_negative_control_a_loop_for_each_call_loses_what_a_module_keeps(
    tmp_path: Path, file: str, capfd: Any
) -> None:
    apart = "def apart(completions, **columns):\n    return asyncio.run(limited(completions))\n"
    (tmp_path / "own.py").write_text(Path(file).read_text() + apart)
    with RewardPool([RewardSpec(f"{tmp_path}/own.py:apart")]) as pool:
        scored(pool, "a", "bb")
        assert capfd.readouterr().err == ""
        scored(pool, "a", "bb")
        assert "is bound to a different event loop" in capfd.readouterr().err
