"""The `code` reward and its cage: what passes, and every limit with a control that shows it is the
cage's doing."""

import os
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from isobit.errors import IsobitError, RunFailed
from isobit.tasks.rewards.named import build
from isobit.tasks.rewards.named.code import same_output, steps_of
from isobit.tasks.rewards.pool import RewardPool
from isobit.tasks.rewards.sandbox import launch
from isobit.tasks.rewards.sandbox.launch import Limits, Outcome, check_cage, run_caged
from isobit.tasks.rewards.spec import RewardSpec
from tests.documents import ROOT, parsed
from tests.documents import run as run_command
from tests.until import until

pytestmark = pytest.mark.usefixtures("cage")

LIMITS = Limits(timeout_s=20, memory_mib=512, disk_mib=4, processes=16)


def run(
    source: str, stdin: str = "", isolation: str = "namespaces", limits: Limits = LIMITS
) -> Outcome:
    (outcome,) = run_caged({"program.py": source}, "program.py", [stdin], limits, isolation)
    return outcome


def test_packages_may_stand_under_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an environment is made in /tmp, the cage has a /tmp that is not the program's own; it
    still has one."""
    (tmp_path / "mine.py").write_text("answer = 42\n")
    tmp_path.chmod(0o755)  # the program is another user
    monkeypatch.setattr(launch, "_packages", lambda: [str(tmp_path)])
    source = (
        "import mine, tempfile\nwith tempfile.TemporaryFile() as file:\n    "
        "print(mine.answer, file.write(b'12'))"
    )
    (outcome,) = run_caged(
        {"program.py": source}, "program.py", [""], LIMITS, "namespaces", packages=True
    )
    assert (outcome.status, outcome.output) == (0, "42 2\n")
    environment = sysconfig.get_path("platstdlib")  # of a virtual environment, where this is one
    assert sys.prefix == sys.base_prefix or environment not in launch._python_paths()


def rate(text: str, options: dict[str, Any] | None = None, **row: Any) -> float:
    reward = build("code", options or {}).score(text, row, None)
    assert isinstance(reward, float)
    return reward


GOOD = "def double(x):\n    return 2 * x\n"
TESTS = "assert double(1) == 2\nassert double(3) == 6\n"


@pytest.mark.parametrize(
    ("text", "tests", "fraction"),
    [
        (f"Sure:\n```python\n{GOOD}```\nDone.", TESTS, 1.0),
        (GOOD, ["assert double(1) == 2", "assert double(2) == 5"], 0.5),
        (GOOD, "def check(f):\n    assert f(2) == 4\ncheck(double)", 1.0),
        (GOOD, "def check(f):\n    assert f(2) == 5\ncheck(double)", 0.0),
        (
            GOOD,
            "import math\nx = math.floor(2.5)\nassert double(x) == 4\nfor i in range(3):\n    "
            "assert i",
            0.5,
        ),
        ("def double(x):\n    return 2 +* x\n", TESTS, 0.0),
        ("def other(x):\n    return x\n", TESTS, 0.0),
        ("raise ValueError\n" + GOOD, TESTS, 0.0),
        (GOOD + "if __name__ == '__main__':\n    input()\n", TESTS, 1.0),
        (
            "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n" + GOOD,
            TESTS,
            1.0,
        ),
        ("print(input())", TESTS, 0.0),
    ],
)
def test_asserts(text: str, tests: Any, fraction: float) -> None:
    assert rate(text, tests=tests) == fraction
    assert rate(text, {"reward": "all"}, tests=tests) == float(fraction == 1)


CHEATS = {
    "leaves before the tests": "import sys\nsys.exit(0)",
    "leaves at once": "import os\nos._exit(0)",
    "leaves in the test": "import os\ndef double(x):\n    os._exit(0)",
    "raises SystemExit in the test": "def double(x):\n    raise SystemExit(0)",
    "prints that it passed": "print('passed', 'OK', 0, 1)\nimport os\nos.write(1, b'0 0\\n0 "
    "1\\n')\nos._exit(0)",
    "writes everywhere": "import os\nfor i in range(64):\n    try:\n        os.write(i, b'x "
    "0\\nx 1\\n')\n"
    "    except OSError:\n        pass\nos._exit(0)",
    "redefines the helpers": "import builtins, math\nmath.isclose = lambda *a: True\n"
    "builtins.all = lambda x: True\n"
    "builtins.isinstance = lambda *a: True\ndef check(f):\n    pass\ndef double(x):\n    return "
    "None",
    "redefines AssertionError": "import builtins\nbuiltins.AssertionError = None\ndef "
    "double(x):\n    return 0",
    "exits by a thread": "import threading, os\nthreading.Thread(target=lambda: "
    "os._exit(0)).start()\nimport time\n"
    "time.sleep(30)",
    "kills its parents": "import os, signal\nfor pid in (os.getppid(), 1, -1):\n    try:\n      "
    "  os.kill(pid, 9)\n"
    "    except OSError:\n        pass\ndef double(x):\n    return 0",
    "reads stdin": "import sys\nexec(sys.stdin.read())",
    "closes everything": "import os\nos.closerange(0, 64)\n",
}
HELPERS = (
    "import math\n"
    "def check(f):\n    assert math.isclose(f(1), 2)\n"
    "check(double)\n"
    "assert all([double(1) == 2])\n"
    "assert isinstance(double(1), int) and double(1) == 2\n"
)


@pytest.mark.parametrize("name", CHEATS)
def test_no_test_is_passed_by_cheating(name: str) -> None:
    assert rate(CHEATS[name], tests=HELPERS) == 0.0
    assert rate(CHEATS[name], tests=TESTS) == 0.0


def test_the_cheats_fail_for_what_they_do_and_the_honest_one_passes() -> None:
    assert rate(GOOD, tests=HELPERS) == 1.0


NEEDS = """from __future__ import annotations
class Solution:
    def longest(self, words: List[str]) -> float:
        return sqrt(len(max(deque(words), key=len)))
"""


def test_imports_that_livecodebench_has_are_an_option() -> None:
    """Also for programs that read stdin, and beside what a program imports of `__future__`."""
    tests = ["assert Solution().longest(['a', 'bbbb']) == 2"]
    assert rate(NEEDS, {"prelude": "livecodebench"}, tests=tests) == 1
    assert rate(NEEDS, tests=tests) == 0
    pair: dict[str, Any] = {"inputs": ["3 4"], "outputs": ["5.0"]}
    source = "a, b = map(int, input().split())\nprint(sqrt(a * a + b * b))"
    assert rate(source, {"tests": "stdin", "prelude": "livecodebench"}, **pair) == 1
    assert rate(source, {"tests": "stdin"}, **pair) == 0


@pytest.mark.slow
def test_pairs_of_input_and_output() -> None:
    source = "```python\nn = int(input())\nprint(n * n, end=' \\n\\n')\n```"
    assert rate(source, {"tests": "stdin"}, inputs=["2\n", "3"], outputs=["4", "9\n"]) == 1.0
    assert rate(source, {"tests": "stdin"}, inputs=["2\n", "3"], outputs=["4", "8\n"]) == 0.5
    assert (
        rate(source, {"tests": "stdin", "reward": "all"}, inputs=["2\n", "3"], outputs=["4", "8\n"])
        == 0.0
    )
    assert (
        rate(source, {"tests": "stdin"}, inputs=["2", "x"], outputs=["4", ""]) == 0.5
    )  # it failed
    both = '{"inputs": ["5"], "outputs": ["25"]}'
    assert rate(source, {"tests": "stdin", "column": "answer"}, answer=both) == 1.0
    hangs = "n = int(input())\nwhile n == 2:\n    pass\nprint(n * n)"
    options = {"tests": "stdin", "timeout_s": 2}
    assert rate(hangs, options, inputs=["3", "2", "4"], outputs=["9", "4", "16"]) == pytest.approx(
        1 / 3
    )


OUTPUTS = [
    ("7", "7.0", True),
    ("1e3 2", " 1000.00  2 \n", True),
    ("0.1", "0.10000000000000001", False),
    ("50000000000000000", "50000000000000001", False),
    ("7 a", "7.0 a", False),
    ("a", "A", False),
    ("a\nb", "a\r\nb\r\n", True),
    ("  a  \nb\n\n", "a\nb", True),
    ("a\n\nb", "a\nb", False),
    ("a b", "a  b", False),
    ("a\x0cb", "a\nb", False),
    ("", "\n", True),
    ("nan", "nan", True),
    ("nan", "NaN", False),
    ("sNaN", "1", False),
    ("1 2", "1", False),
    ("1e999999999999999999999", "1", False),
]


@pytest.mark.parametrize(("found", "expected", "same"), OUTPUTS)
def test_outputs_are_compared_as_livecodebench_does(found: str, expected: str, same: bool) -> None:
    assert same_output(found, expected) is same


STDIN = {
    "exit": ("n = int(input())\nprint(n)\nexit()\n1 / 0", "3", "3", 1.0),
    "quit with a code": ("print(input())\nquit(1)", "3", "3", 0.0),
    "exit in a function": (
        "def main():\n    print(input())\n    exit(0)\nif __name__ == '__main__':\n    main()",
        "3",
        "3",
        1,
    ),
    "/dev/stdin": ("print(open('/dev/stdin').read().split()[1])", "3\n4\n", "4", 1.0),
    "/dev/fd/0": ("import os\nprint(os.read(os.open('/dev/fd/0', 0), 9).decode())", "3", "3", 1.0),
    "descriptor 0": ("print(*open(0))", "3", "3", 1.0),
    "/dev/stdin of a child": ("import os\nos.system('cat /dev/stdin')", "3", "3", 1.0),
    "/dev/stdout": (
        "with open('/dev/stdout', 'w') as out:\n    print(input(), file=out)",
        "3",
        "3",
        1.0,
    ),
    "CRLF on stdin": ("print({'yes': 1}[input()], repr(input()))", "yes\r\nb\r\n", "1 'b'", 1.0),
    "CRLF expected": ("print(1)\nprint(2)", "", "1\r\n2\r\n", 1.0),
    "not UTF-8": ("import sys\nsys.stdout.buffer.write(b'\\xff')", "", "\ufffd", 0.0),
    "not UTF-8, Latin 1": ("import sys\nsys.stdout.buffer.write(b'\\xe9')", "", "\u00e9", 0.0),
    "that character": ("print('\\ufffd')", "", "\ufffd", 1.0),
    "text that is no text": ("print(input())", "\ud800", "\ud800", 1.0),
    "its name and its file": (
        "import sys, os\nprint(__name__, os.path.exists(__file__), len(sys.argv))",
        "",
        "__main__ True 1",
        1,
    ),
    "pickles its class": (
        "import pickle\nclass A:\n    pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
        "",
        "True",
        1.0,
    ),
}


@pytest.mark.parametrize("name", STDIN)
@pytest.mark.parametrize("isolation", ["namespaces", "none"])
def test_a_program_reads_and_ends_as_programs_do(name: str, isolation: str) -> None:
    source, given, expected, wanted = STDIN[name]
    options = {"tests": "stdin", "isolation": isolation}
    assert rate(source, options, inputs=["9\n9\n", given], outputs=["-", expected]) == wanted / 2


def test_what_is_printed_above_a_mebibyte_is_an_option() -> None:
    source, row = "print('ab\\n' * 700_000)", {"inputs": [""], "outputs": ["ab\n" * 700_000]}
    with pytest.raises(
        ValueError, match=r"column 'outputs': 2100000 bytes expected; options.output_mib: 1 lets a"
    ):
        rate(source, {"tests": "stdin"}, **row)
    assert rate(source, {"tests": "stdin", "output_mib": 3}, **row) == 1.0


def test_nothing_of_one_run_is_alive_in_the_next() -> None:
    source = (
        "import os, time\n"
        "def alive(p):\n    try:\n        os.kill(p, 0)\n    except OSError:\n        return "
        "False\n    return True\n"
        "print(sum(alive(p) for p in range(2, 300)))\n"
        "if os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n"
    )
    outcomes = run_caged({"program.py": source}, "program.py", ["", "", ""], LIMITS, "namespaces")
    assert [o.output for o in outcomes] == ["1\n"] * 3  # only itself


PAIRS, STDIN_OF_A = {"tests": "stdin"}, {"tests": "stdin", "column": "a"}
NUMBER, NAMED = {"inputs": [1], "outputs": ["1"]}, {"inputs": [], "outputs": [], "fn_name": "f"}
BAD_ROWS = [
    ({}, {"tests": 3}, "column 'tests': expected Python source or a list of it, got 3"),
    ({}, {"tests": "assert ("}, "column 'tests': not Python"),
    ({}, {"tests": "x = 1"}, "column 'tests': no test in it: nothing asserts, or calls what"),
    ({}, {"tests": "import unittest\nunittest.main(exit=False)"}, "no test in it"),
    ({}, {"tests": ["import math", "print(1)"]}, "column 'tests': no test in it"),
    ({}, {"tests": []}, "column 'tests': no test in it"),
    (PAIRS, {"inputs": ["1"], "outputs": []}, "column 'inputs': 1 inputs for 0 outputs"),
    (PAIRS, NUMBER, "column 'inputs': inputs and outputs must be lists of text"),
    (STDIN_OF_A, {"a": "{}"}, "column 'a': expected an object with inputs and outputs"),
    (STDIN_OF_A, {"a": NAMED}, "column 'a': it calls 'f' by name; only stdin is supported"),
]


@pytest.mark.parametrize(("options", "row", "message"), BAD_ROWS)
def test_rows_that_cannot_be_used(
    options: dict[str, Any], row: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        rate(GOOD, options, **row)


@pytest.mark.parametrize("tests", ["assert 1", "def f():\n    pass\nassert f() is None"])
def test_a_row_that_asks_nothing_of_the_program_is_refused_at_the_start(tests: str) -> None:
    reward = build("code", {})
    with pytest.raises(ValueError, match="column 'tests': the tests use no name of the program"):
        reward.check({"tests": tests})
    reward.check({"tests": TESTS})


def test_steps_tell_tests_from_what_prepares_them() -> None:
    steps = steps_of(
        "import os\nx = 1\nassert x\ndef f():\n    assert 1\nf()\nwith open('a'):\n    assert 2",
        "tests",
    )
    assert [step["token"] for step in steps] == [None, None, 0, None, 1, 2]


# Every limit, and the control in which the same program does without the cage what it could not do
# inside.


@pytest.fixture
def port() -> Any:
    """A server of this machine that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
        yield server.getsockname()[1]


def _accept(server: socket.socket) -> None:
    try:
        while True:
            server.accept()[0].close()
    except OSError:
        return


def test_no_network(port: int) -> None:
    source = (
        f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)\nprint('connected')"
    )
    assert run(source, isolation="none").output == "connected\n"
    caged = run(source)
    assert (caged.status, caged.output) == (1, "")


def test_no_socket_of_the_machine(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        os.chmod(path, 0o777)
        os.chmod(tmp_path, 0o755)
        source = (
            f"import socket\nsocket.socket(socket.AF_UNIX).connect({path!r})\nprint('connected')"
        )
        assert run(source, isolation="none").output == "connected\n"
        assert run(source).output == ""


def test_no_file_outside_is_written_or_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("42")
    for source in (f"print(open({str(secret)!r}).read())", "print(open('/etc/passwd').read())"):
        assert run(source, isolation="none").output
        assert (caged := run(source)).output == "", caged
    mark = tmp_path / "mark"
    source = (
        f"import os\nos.makedirs({str(tmp_path)!r}, exist_ok=True)\nopen({str(mark)!r}, "
        "'w').write('x')"
    )
    run(source)
    assert not mark.exists()
    run(source, isolation="none")
    assert mark.exists()
    everywhere = (
        "import os\nfound = []\n"
        "for top in ('/', '/usr', '/usr/lib', os.path.dirname(os.__file__), '/dev'):\n"
        "    try:\n        open(top + '/mark', 'w')\n        found.append(top)\n    except "
        "OSError:\n        pass\n"
        "print(found, os.listdir('/home') if os.path.exists('/home') else [], "
        "os.path.exists('/proc/1'))\n"
    )
    assert run(everywhere).output == "[] [] False\n"


def test_the_working_directory_is_fresh_writable_and_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where no other process makes any
    source = (
        "import os, tempfile\nprint(os.getcwd(), os.listdir())\nopen('a', 'w').write('x')\n"
        "tempfile.mkdtemp()"
    )
    for isolation in ("namespaces", "none"):
        first, second = run(source, isolation=isolation), run(source, isolation=isolation)
        assert first.status == second.status == 0
        assert first.output.endswith(" []\n")
        assert second.output.endswith(" []\n")
    assert list(tmp_path.iterdir()) == []


def test_memory_is_limited() -> None:
    source = "x = bytearray(300 << 20)\nprint(len(x))"
    assert run(source).status == 0
    assert run(source, limits=Limits(20, 128, 4, 16)).status != 0


def test_files_are_limited_one_and_all() -> None:
    one = (
        "f = open('a', 'wb')\nfor _ in range(16):\n    f.write(bytes(1 << 20))\n    "
        "f.flush()\nprint('done')"
    )
    many = "for i in range(16):\n    open(str(i), 'wb').write(bytes(1 << 20))\nprint('done')"
    for source in (one, many):
        assert run(source).output == ""
        assert run(source, limits=Limits(20, 512, 64, 16)).output == "done\n"


@pytest.mark.slow
def test_an_infinite_loop_ends_in_time() -> None:
    began = time.monotonic()
    outcome = run("while True:\n    pass", limits=Limits(1, 512, 4, 16))
    assert outcome.late or outcome.status == -24 or outcome.status == -9
    assert time.monotonic() - began < 15
    sleeper = run("import time\ntime.sleep(600)", limits=Limits(1, 512, 4, 16))
    assert sleeper == Outcome(None, True, False, "")


def test_output_is_limited() -> None:
    outcome = run("while True:\n    print('x' * 100000)")
    assert outcome.long
    assert len(outcome.output) == LIMITS.output_bytes
    assert not run("print('x' * 100000)").long


BOMB = """
import os, sys, time
count = 0
while count < 400:
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        time.sleep(60)
    count += 1
print(count)
"""


def test_processes_are_limited() -> None:
    """The control is another limit: to let it run free would be to run a fork bomb."""
    assert int(run(BOMB, limits=Limits(20, 512, 4, 10)).output) == 9  # and itself
    assert int(run(BOMB, limits=Limits(20, 512, 4, 40)).output) == 39


@pytest.mark.slow
def test_a_real_fork_bomb_leaves_nothing() -> None:
    before = len(list(Path("/proc").glob("[0-9]*")))
    outcome = run(
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        limits=Limits(2, 512, 4, 32),
    )
    assert outcome.status is None or outcome.status < 0
    assert len(list(Path("/proc").glob("[0-9]*"))) < before + 30


MARK = "isobit-background-child"


def marked() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [path.parent.name] if MARK in path.read_text() else []
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_a_child_in_the_background_dies_with_the_program() -> None:
    source = (
        "import os, sys\n"
        "begun, ends = os.pipe()  # which a program that begins closes\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.execv(sys.executable, [sys.executable, '-S', '-c', 'import time; "
        f"time.sleep(30)', {MARK!r}])\n"
        "    os._exit(0)\n"
        "os.close(ends)\n"
        "os.read(begun, 1)\n"
        "print('left')\n"
    )
    assert run(source).output == "left\n"
    assert marked() == []
    try:  # the control: without the cage it is not followed
        assert run(source, isolation="none").output == "left\n"
        assert marked() != []
    finally:
        for pid in marked():
            os.kill(int(pid), 9)


def test_everything_dies_with_the_worker() -> None:
    """A pool that kills its worker at the deadline kills the cage too."""
    source = (
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-S', '-c', 'while 1: "
        f"pass', {MARK!r}])"
    )
    for isolation in ("namespaces", "none"):
        options = {"timeout_s": 500.0, "isolation": isolation}  # longer than the test waits
        with RewardPool([RewardSpec("code", options=options, deadline_s=600)]) as pool:
            batch = pool.begin(1)
            batch.add(0, ["p"], [source], [{"tests": "assert 1"}])
            until(marked)
        until(lambda: not marked())


def test_no_privileges_and_a_small_environment() -> None:
    source = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(os.getuid(), libc.prctl(39, 0, 0, 0, 0), sorted(os.environ))\n"
        "print(libc.mount(b'tmpfs', b'/usr', b'tmpfs', 0, None), libc.sethostname(b'x', 1), "
        "os.getpid() > 1)\n"
        "print(libc.ptrace(16, 1, None, None))\n"  # attach to the first process
    )
    first, second, third = run(source).output.splitlines()
    assert first.startswith("1000 1 [")
    assert "SECRET" not in first
    assert second == "-1 -1 True"
    assert third == "-1"


def test_packages_are_imported_only_where_that_is_asked() -> None:
    pytest.importorskip("numpy")
    text = "import numpy\ndef double(x):\n    return int(numpy.array(x) * 2)"
    assert rate(text, tests=TESTS) == 0.0
    assert rate(text, {"packages": True, "memory_mib": 2048}, tests=TESTS) == 1.0


def test_where_there_are_no_namespaces_nothing_runs_and_the_option_is_named(tmp_path: Path) -> None:
    """In a cage no further one can be made, as in a container that forbids it: limits on namespaces
    are inherited."""
    program_text = (
        "import sys\n"
        f"sys.path[:0] = {[str(Path(__file__).parents[3] / 'src')]!r}\n"
        "from isobit.errors import IsobitError\n"
        "from isobit.tasks.rewards.sandbox.launch import check_cage\n"
        "open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"
        "try:\n    check_cage('namespaces', False)\nexcept IsobitError as error:\n    "
        "print(error)\n"
        "check_cage('none', False)\nprint('none works')\n"
    )
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        sys.executable,
        "-c",
        program_text,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    if "max_user_namespaces" in done.stderr or done.returncode != 0:
        pytest.skip(f"namespaces cannot be forbidden here: {done.stderr[-200:]}")
    error, works = done.stdout.splitlines()
    assert error.startswith(
        "reward code: this machine cannot isolate programs: namespaces cannot be made (No space"
    )
    assert error.endswith("reach network and files with options.isolation: none")
    assert works == "none works"


@pytest.mark.slow
def test_in_a_pool_several_run_at_a_time_and_a_bad_row_is_named() -> None:
    with RewardPool([RewardSpec("code", options={"timeout_s": 2})], num_workers=2) as pool:
        texts = [GOOD, "def double(x):\n    return x", "while True: pass"]
        rows = [{"tests": TESTS}] * 3
        assert [r.total for r in pool.score(["p"] * 3, texts, rows)] == [1.0, 0.0, 0.0]
        with pytest.raises(
            RunFailed, match=r"reward function code, sample 1 .*ValueError: column 'tests': no test"
        ):
            pool.score(["p"] * 2, [GOOD] * 2, [{"tests": TESTS}, {"tests": "x = 1"}])


def test_on_other_systems_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(
        IsobitError,
        match=r"cannot isolate programs: namespaces are Linux's; .*options\.isolation: none",
    ):
        check_cage("namespaces", False)


@pytest.mark.slow
def test_the_output_on_the_page_is_what_the_command_prints(tmp_path: Path) -> None:
    blocks = parsed((ROOT / "docs" / "how-to" / "rewards.md").read_text(encoding="utf-8"))
    place = next(i for i, block in enumerate(blocks) if block.title == "code.jsonl")
    rows, command, printed = blocks[place : place + 3]
    (tmp_path / rows.title).write_text(rows.text)
    assert run_command(command.text.strip(), tmp_path).stdout == printed.text
