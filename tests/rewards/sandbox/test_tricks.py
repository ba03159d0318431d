"""No trick passes a test; the right program beside each does, and in one process with the tests
most tricks would."""

import pytest

from isobit.tasks.rewards.pool import RewardPool
from isobit.tasks.rewards.sandbox.launch import Limits, run_caged
from isobit.tasks.rewards.spec import RewardSpec
from tests.rewards.sandbox import tricks

pytestmark = pytest.mark.usefixtures("cage")

OPTIONS = {"timeout_s": 3.0, "memory_mib": 256}
LIMITS = Limits(timeout_s=3, memory_mib=256, disk_mib=4, processes=16)


@pytest.mark.parametrize("name", tricks.TASKS)
def test_a_trick_scores_nothing(name: str) -> None:
    task = tricks.TASKS[name]
    programs = {"right": task.right, **task.tricks}
    with RewardPool([RewardSpec("code", options=OPTIONS)], num_workers=2) as pool:
        found = pool.score(
            ["p"] * len(programs), list(programs.values()), [{"tests": task.tests}] * len(programs)
        )
    assert {n: r.total for n, r in zip(programs, found)} == {
        **dict.fromkeys(task.tricks, 0.0),
        "right": 1.0,
    }
    assert [reward.error for reward in found if reward.error] == []


TOGETHER = """
import ast, os
space = {"__name__": "program"}
texts = [ast.unparse(statement) for statement in ast.parse(open("/tests.py").read()).body]
write, run, make = os.write, exec, compile
try:
    run(make(open("/source.py").read(), "p", "exec"), space)
    for text in texts:
        try:
            run(make(text, "t", "exec"), space)
        except BaseException:
            continue
        if "assert" in text.splitlines()[-1] or "try" in text or "with" in text:
            write(1, b"x")
except BaseException:
    pass
"""


@pytest.mark.slow
def test_in_one_process_with_the_tests_tricks_pass() -> None:
    passed = {}
    for name in ("names", "endings", "caught", "blocks", "none", "a loop", "values"):
        task = tricks.TASKS[name]
        tests = task.tests if isinstance(task.tests, str) else "\n".join(task.tests)
        for trick, source in task.tricks.items():
            files = {"main.py": TOGETHER, "source.py": source, "tests.py": tests}
            passed[trick] = len(run_caged(files, "main.py", [""], LIMITS, "namespaces")[0].output)
    assert sum(count > 0 for count in passed.values()) >= 20, passed


def test_there_are_many() -> None:
    assert sum(len(task.tricks) for task in tricks.TASKS.values()) >= 60
    for task in tricks.TASKS.values():
        for name, source in {"right": task.right, **task.tricks}.items():
            compile(source, name, "exec")
