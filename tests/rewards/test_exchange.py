"""Scoring beside other work: the same rewards as all at once, and nothing left behind when it is
broken off."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from isobit.errors import IsobitError, RunFailed
from isobit.tasks.rewards.exchange import Exchange
from isobit.tasks.rewards.pool import RewardPool
from isobit.tasks.rewards.spec import RewardSpec
from isobit.tasks.rewards.worker_process import WorkerProcess
from tests.rewards.conftest import HANG
from tests.rewards.test_worker_process import children
from tests.until import until

FUNCTIONS = (
    """
import os, time

def size(completions, **k):
    return [float(len(completions))] * len(completions)

def slow(completions, **k):
    time.sleep(0.01)
    return [1.0] * len(completions)

def hanging(completions, **k):
    if "bad" in completions:
        hang()
    return [1.0] * len(completions)

def vanishing(completions, **k):
    os.remove(__file__)
    os._exit(1)
"""
    + HANG
)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my.py"
    path.write_text(FUNCTIONS)
    return str(path)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "isobit-rewards"]


def waits(thread: int) -> bool:
    """Whether a thread waits in `Exchange.finish` for the replies."""
    frame = sys._current_frames()[thread]
    waiting = frame.f_code.co_name == "wait"
    while frame is not None and frame.f_code is not Exchange.finish.__code__:
        frame = frame.f_back
    return waiting and frame is not None


@pytest.mark.parametrize("workers", [1, 3])
def test_calls_are_of_what_is_added_together_in_whatever_order(file: str, workers: int) -> None:
    with RewardPool([RewardSpec(f"{file}:size")], chunk_size=3, num_workers=workers) as pool:
        batch = pool.begin(9)
        batch.add(5, ["p"] * 4, ["c"] * 4, [{}] * 4)
        until(lambda: batch._running.replies)  # type: ignore[union-attr]
        batch.add(0, ["p"] * 5, ["c"] * 5, [{}] * 5)
        assert [r.total for r in batch.collect()] == [3, 3, 3, 2, 2, 3, 3, 3, 1]
        assert [r.total for r in pool.score(["p"] * 4, ["c"] * 4, [{}] * 4)] == [3, 3, 3, 1]
    assert threads() == []


@pytest.mark.usefixtures("only_hanging_takes_time")
def test_errors_name_the_sample_in_the_order_of_samples(file: str) -> None:
    with RewardPool([RewardSpec(f"{file}:hanging")], deadline_s=0.5) as pool:
        batch = pool.begin(4)
        batch.add(2, ["p2", "p3"], ["c", "bad"], [{}] * 2)
        batch.add(0, ["p0", "p1"], ["bad", "c"], [{}] * 2)
        with pytest.raises(RunFailed, match=r"sample 0 \(prompt 'p0'\): no answer within 0\.5 s"):
            batch.collect()
        assert pool.score(["p"], ["c"], [{}])[0].total == 1.0


def test_ctrl_c_while_a_function_hangs_leaves_no_thread_behind(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPython 3.11 takes a thread for ended whose `join` was interrupted; it then met closed
    pipes."""
    failed = list[threading.ExceptHookArgs]()
    monkeypatch.setattr(threading, "excepthook", failed.append)
    # a shell without job control starts what is in the background with SIGINT ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with RewardPool([RewardSpec(f"{file}:hanging")], deadline_s=30) as pool:
        batch = pool.begin(1)
        batch.add(0, ["p"], ["bad"], [{}])
        main = threading.get_ident()
        interrupts = threading.Thread(
            target=lambda: until(lambda: waits(main)) or os.kill(os.getpid(), signal.SIGINT)
        )
        interrupts.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                batch.collect()
        finally:
            signal.signal(signal.SIGINT, before)
        batch.cancel()
    interrupts.join()
    until(lambda: threads() == [])
    assert failed == []


def test_what_ran_before_it_was_asked_for_is_counted(file: str) -> None:
    with RewardPool([RewardSpec(f"{file}:slow")]) as pool:
        pool.start()
        batch, began = pool.begin(2), time.monotonic()
        batch.add(0, ["p"], ["c"], [{}])
        until(lambda: len(batch._running.replies) == 1)  # type: ignore[union-attr]
        batch.add(1, ["p"], ["c"], [{}])
        assert [r.total for r in batch.collect()] == [1.0, 1.0]
        assert 0.01 <= batch.overlapped_s < time.monotonic() - began


@pytest.mark.usefixtures("only_hanging_takes_time")
def test_a_function_has_its_own_deadline(file: str) -> None:
    specs = [RewardSpec(f"{file}:slow"), RewardSpec(f"{file}:hanging", deadline_s=0.2)]
    with RewardPool(specs, deadline_s=100, on_error="skip") as pool:
        rewards = pool.score(["p", "p"], ["c", "bad"], [{}, {}])
    assert [r.by_function["hanging"] for r in rewards] == [1.0, None]
    assert [r.by_function["slow"] for r in rewards] == [1.0, 1.0]
    assert "no answer within 0.2 s" in (rewards[1].error or "")


def test_a_batch_that_is_broken_off_leaves_no_thread_and_no_process(file: str) -> None:
    before = children()
    with RewardPool([RewardSpec(f"{file}:hanging")], num_workers=2) as pool:
        pool.begin(2).add(0, ["p"], ["bad"], [{}])
        assert threads() == ["isobit-rewards"]
    assert threads() == []
    assert children() == before


def test_a_column_that_is_not_there_breaks_the_batch_off(file: str) -> None:
    with RewardPool([RewardSpec("exact_match")]) as pool:
        with pytest.raises(IsobitError, match="no column 'answer'"):
            pool.score(["p"], ["c"], [{}])
        assert pool.score(["p"], ["c"], [{"answer": "c"}])[0].total == 1.0
    assert threads() == []


def test_a_worker_that_cannot_be_replaced_ends_the_run(file: str) -> None:
    with (
        RewardPool([RewardSpec(f"{file}:vanishing")]) as pool,
        pytest.raises(RunFailed, match=r"no file .*my\.py"),
    ):
        pool.score(["p"] * 2, ["c"] * 2, [{}] * 2)
    assert threads() == []


def test_cancelling_twice_and_after_the_end(file: str) -> None:
    worker = WorkerProcess([f"{file}:size"])
    worker.loaded()
    running = Exchange([worker])
    assert running.finish() == ([], 0.0)
    running.cancel()
    running.cancel()
    worker.close()
