"""Each attack scores 0 and ends nothing; beside each family a right program scores 1, and each hole
would be seen."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isobit.tasks.rewards.named import build
from isobit.tasks.rewards.pool import Reward, RewardPool
from isobit.tasks.rewards.sandbox import launch
from isobit.tasks.rewards.sandbox.launch import Limits, run_caged
from isobit.tasks.rewards.spec import RewardSpec
from tests.models import slow_where
from tests.rewards.sandbox import attacks

pytestmark = pytest.mark.usefixtures("cage")

OPTIONS = {"timeout_s": 2.0, "memory_mib": 256}
LIMITS = Limits(timeout_s=5, memory_mib=256, disk_mib=4, processes=16)
ALLOWING = bytes.fromhex("060000000000ff7f")  # the filter that lets everything through


def rewards(sources: list[str], row: dict[str, Any], options: dict[str, Any]) -> list[Reward]:
    """Of a pool that stops at the first error, with a right program between the attacks."""
    with RewardPool([RewardSpec("code", options=options)], num_workers=2) as pool:
        given = pool.score(["p"] * len(sources), sources, [row] * len(sources))
        again = pool.score(["p"], sources[-1:], [row])
    return [*given, *again]


def test_there_are_sixty() -> None:
    assert sum(map(len, attacks.FAMILIES.values())) + len(attacks.STDIN) >= 60
    assert attacks.HONEST.keys() == attacks.FAMILIES.keys()
    for family in (*attacks.FAMILIES.values(), attacks.STDIN, attacks.HONEST):
        for name, source in family.items():
            compile(source, name, "exec")


@pytest.mark.parametrize(
    "family",
    slow_where(list(attacks.FAMILIES), lambda family: family not in ("outside", "helpers")),
)
def test_an_attack_scores_nothing_and_ends_nothing(family: str) -> None:
    programs = {**attacks.FAMILIES[family], "honest": attacks.HONEST[family]}
    found = rewards(list(programs.values()), {"tests": attacks.TESTS}, OPTIONS)
    *scores, again = [reward.total for reward in found]
    assert dict(zip(programs, scores)) == {
        **dict.fromkeys(attacks.FAMILIES[family], 0.0),
        "honest": 1.0,
    }
    assert again == 1.0
    assert [reward.error for reward in found if reward.error] == []


def test_an_attack_on_pairs_scores_nothing_and_ends_nothing() -> None:
    programs = {**attacks.STDIN, "honest": attacks.GOOD_STDIN}
    row = {"inputs": attacks.INPUTS, "outputs": attacks.OUTPUTS}
    *scores, again = [
        r.total for r in rewards(list(programs.values()), row, {**OPTIONS, "tests": "stdin"})
    ]
    assert dict(zip(programs, scores)) == {**dict.fromkeys(attacks.STDIN, 0.0), "honest": 1.0}
    assert again == 1.0


# Negative controls: each wall taken away, attacks get through, and the corpus shows it.


def score(source: str, **options: Any) -> float:
    reward = build("code", {**OPTIONS, **options}).score(source, {"tests": attacks.TESTS}, None)
    assert isinstance(reward, float)
    return reward


def test_without_the_filter_system_calls_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "filter_for", lambda machine: ALLOWING)
    names = (
        "unshare",
        "System V shared memory",
        "a System V queue",
        "memory without a mapping",
        "netlink",
        "personality",
    )
    assert {name: score(attacks.CALLS[name]) for name in names} == dict.fromkeys(names, 1.0)
    assert score(attacks.SIGNALS["takes time from the first process"]) == 1.0


def test_without_namespaces_the_machine_is_reached() -> None:
    for name in ("reads a file of the machine", "reads /proc"):
        assert score(attacks.OUTSIDE[name], isolation="none") == 1.0


@pytest.mark.parametrize("family", ["helpers", "values"])
def test_in_the_programs_interpreter_the_tests_are_fooled(family: str) -> None:
    """A harness of one process: some test passes for nearly every attack of these families."""
    passed = {name: together(source) for name, source in attacks.FAMILIES[family].items()}
    assert together(attacks.WRONG) == 0
    assert sum(count > 0 for count in passed.values()) >= 5, passed


TOGETHER = """
import ast
space = {"__name__": "program"}
texts = [ast.unparse(statement) for statement in ast.parse(open("/tests.py").read()).body]
write, run, make = __import__("os").write, exec, compile
run(make(open("/source.py").read(), "p", "exec"), space)
for text in texts:
    try:
        run(make(text, "t", "exec"), space)
    except BaseException:
        continue
    if text.startswith(("assert", "check")):
        write(1, b"x")
"""


def together(source: str) -> int:
    """How many tests pass if they run in the program's namespace and process."""
    files = {"main.py": TOGETHER, "source.py": source, "tests.py": attacks.TESTS}
    (outcome,) = run_caged(files, "main.py", [""], LIMITS, "namespaces")
    return len(outcome.output)


# A child kills the group that its parent has left: were the program itself killed, its end might be
# reported first.
KILLS_ITS_GROUP = """
import contextlib, os, time
left, leave = os.pipe()
if os.fork() == 0:
    os.read(left, 1)
    os.kill(0, 9)
with contextlib.suppress(PermissionError):  # the leader of a session stays in its group
    os.setpgid(0, 0)
os.write(leave, b"+")
time.sleep(3)
"""
INTERRUPTS = (
    attacks.SIGNALS["interrupts the first process"] + "\nimport time\ntime.sleep(3)"
)  # else it may end first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wall", "attack"),
    [
        ("        os.setsid()", KILLS_ITS_GROUP),
        ("        signal.signal(signal.SIGINT, signal.SIG_IGN)", INTERRUPTS),
    ],
    ids=["session", "signals"],
)
def test_without_its_session_and_signals_the_cage_is_ended(
    wall: str, attack: str, tmp_path: Path
) -> None:
    """In a session of its own, since such an attack reaches the whole process group."""
    jail = tmp_path / "isobit" / "tasks" / "rewards" / "sandbox" / "jail.py"
    shutil.copytree(Path(launch.__file__).parent, jail.parent)
    source = jail.read_text()
    assert source.count(wall) == 1
    program = (
        "import signal, sys\nfrom isobit.tasks.rewards.sandbox import launch\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"  # a shell's background jobs ignore it
        "launch._SOURCE = sys.argv[1]\n"
        "print(launch.run_caged({'p.py': sys.argv[2]}, 'p.py', [''], launch.Limits(5, 256, 4, "
        "16), 'namespaces'))\n"
    )

    def ended(text: str) -> bool:
        """Whether the attack ends the cage, or the process that made it."""
        jail.write_text(text)
        command = [sys.executable, "-c", program, str(tmp_path), attack]
        done = subprocess.run(
            command, capture_output=True, text=True, start_new_session=True, check=False
        )
        assert done.returncode or done.stdout.startswith("[")
        return bool(done.returncode) or done.stdout == "[]\n"

    assert not ended(source)
    without = source.replace(wall, wall[: len(wall) - len(wall.lstrip())] + "pass  #")
    assert ended(without)
