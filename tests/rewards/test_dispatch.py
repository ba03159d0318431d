"""Scoring beside other work: the same rewards as all at once, and nothing left behind when it is
broken off."""

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from isobit.errors import IsobitError, RunFailed
from isobit.tasks.rewards.pool import RewardPool
from isobit.tasks.rewards.spec import RewardSpec
from isobit.tasks.workers.dispatch import Dispatcher, Worker
from tests.rewards.conftest import HANG
from tests.rewards.test_worker_process import children
from tests.until import until

FUNCTIONS = (
    """
import os, stat, time

def size(completions, **k):
    return [float(len(completions))] * len(completions)

def slow(completions, **k):
    time.sleep(0.01)
    return [1.0] * len(completions)

def hanging(completions, **k):
    if "bad" in completions:
        hang()
    return [1.0] * len(completions)

def writing(completions, text, **k):
    for descriptor in sorted(map(int, os.listdir("/proc/self/fd")))[3:]:
        try:
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.write(descriptor, text[0].encode())
        except OSError:
            pass
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
    """Whether a thread waits in `Dispatcher.next` for a reply."""
    return sys._current_frames()[thread].f_code is Dispatcher.next.__code__


@pytest.mark.parametrize("workers", [1, 3])
def test_calls_are_of_what_is_added_together_in_whatever_order(file: str, workers: int) -> None:
    with RewardPool([RewardSpec(f"{file}:size")], chunk_size=3, num_workers=workers) as pool:
        batch = pool.begin(9)
        batch.add(5, ["p"] * 4, ["c"] * 4, [{}] * 4)
        until(lambda: not batch._dispatcher._replies.empty())
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
        until(lambda: not batch._dispatcher._replies.empty())
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


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds pipes through /proc")
def test_what_is_not_a_reply_costs_its_process_and_is_told(file: str) -> None:
    """The control writes nothing beside its reply, and another reply's key is passed over."""
    wrote = "its process wrote what is not a reply into the pipe of its replies, and was killed"
    texts = [
        "no JSON\n",
        "5\n",
        "{}\n",
        "[" * 9000 + "\n",
        '{"key": 0, "values": 5}\n',
        '{"loaded": 1}\n',
    ]
    with RewardPool([RewardSpec(f"{file}:writing")], on_error="skip") as pool:
        for text in texts:
            (reward,) = pool.score(["p"], ["c"], [{"text": text}])
            assert (reward.total, (reward.error or "").endswith(wrote)) == (None, True)
        for text in ("", '{"key": 9, "raised": "forged"}\n'):
            assert pool.score(["p"], ["c"], [{"text": text}])[0].total == 1.0


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds pipes through /proc")
@pytest.mark.parametrize(
    ("values", "wrong"),
    [("[]", "{}"), ('["a"]', "{}"), ("[1.0]", '{"7": "x"}'), ("[0.5]", "{}")],
)
def test_a_forged_result_is_no_result(file: str, values: str, wrong: str) -> None:
    """Unless it has the form of one, as the last, which is the control."""
    text = f'{{"key": 0, "values": {values}, "wrong": {wrong}, "unscored": {{}}}}\n'
    with RewardPool([RewardSpec(f"{file}:writing")], on_error="skip") as pool:
        (reward,) = pool.score(["p"], ["c"], [{"text": text}])
    form = values == "[0.5]"
    assert reward.total == (0.5 if form else None)
    assert form or "what is no result" in str(reward.error)


def test_a_column_that_is_not_there_breaks_the_batch_off(file: str) -> None:
    with RewardPool([RewardSpec("exact_match")]) as pool:
        with pytest.raises(IsobitError, match="no column 'answer'"):
            pool.score(["p"], ["c"], [{}])
        assert pool.score(["p"], ["c"], [{"answer": "c"}])[0].total == 1.0
    assert threads() == []


def test_a_worker_that_dies_while_others_are_loading_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second loads only when the first, which has loaded, is dead."""
    (tmp_path / "two.py").write_text(
        "import os, time\nhere = os.path.dirname(__file__)\n"
        "if 'first' in os.listdir(here):\n    while 'dead' not in os.listdir(here):\n"
        "        time.sleep(0.01)\nelse:\n    os.mkdir(os.path.join(here, 'first'))\n"
        "def one(completions):\n    return [1.0] * len(completions)\n"
    )
    take, spawn = Worker.take, Worker.spawn

    def killed(worker: Worker, message: Mapping[str, Any]) -> None:
        take(worker, message)
        if "loaded" in message and not (tmp_path / "dead").exists():
            assert worker._process is not None
            os.kill(worker._process.pid, signal.SIGKILL)
            os.waitid(os.P_PID, worker._process.pid, os.WEXITED | os.WNOWAIT)
            (tmp_path / "dead").touch()

    def after_the_first(worker: Worker) -> None:
        spawn(worker)
        until((tmp_path / "first").exists)

    monkeypatch.setattr(Worker, "take", killed)
    monkeypatch.setattr(Worker, "spawn", after_the_first)
    with RewardPool([RewardSpec(f"{tmp_path}/two.py:one")], num_workers=2, chunk_size=1) as pool:
        pool.start()
        assert [worker.alive for worker in pool.workers] == [False, True]
        assert [r.total for r in pool.score(["p"] * 4, ["c"] * 4, [{}] * 4)] == [1.0] * 4


def test_a_worker_that_cannot_be_replaced_ends_the_run(file: str) -> None:
    with (
        RewardPool([RewardSpec(f"{file}:vanishing")]) as pool,
        pytest.raises(RunFailed, match=r"no file .*my\.py"),
    ):
        pool.score(["p"] * 2, ["c"] * 2, [{}] * 2)
    assert threads() == []


def test_cancelling_twice_and_after_the_end(file: str) -> None:
    with RewardPool([RewardSpec(f"{file}:size")]) as pool:
        batch = pool.begin(0)
        assert (batch.collect(), batch.overlapped_s) == ([], 0.0)
        batch.cancel()
        batch.cancel()
