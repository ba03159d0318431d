"""Names of the standard library in tests that do not import them: the library's, whatever the
program calls so; and `unittest.main`, which runs the tests' own module."""

import importlib
from typing import Any

import pytest

from isobit.tasks.rewards.named import build
from isobit.tasks.rewards.named.free_names import names_of
from isobit.tasks.rewards.named.library_names import _HOMES

pytestmark = pytest.mark.usefixtures("cage")
LIES = "    def __eq__(self, other): return True\n    def __init__(self, *a, **k): pass\n"


def score(program: str, tests: Any, **options: Any) -> float:
    reward = build("code", options)
    reward.check({"tests": tests})
    return reward.score(f"```python\n{program}\n```", {"tests": tests}, None)


HELPERS: dict[str, tuple[str, str, str]] = {
    "Counter": (
        f"class Counter:\n{LIES}def f(x): return 0",
        "assert Counter(f('aab')) == Counter(a=2, b=1)",
        "from collections import Counter\ndef f(x): return list(x)",
    ),
    "isclose": (
        "def isclose(*a, **k): return True\ndef f(x): return 0",
        "assert isclose(f(2), 4.0)\nassert isclose(f(3), 9.0)",
        "from math import *\ndef f(x): return x * x",
    ),
    "deque": (
        f"class deque:\n{LIES}def f(x): return 0",
        "assert f([1, 2]) == deque([2, 1])",
        "from collections import deque\ndef f(x): return deque(reversed(x))",
    ),
    "an argument": (
        "class OrderedDict(dict): pass\ndef f(x): return 1",
        "assert f(OrderedDict(a=1, b=2)) == OrderedDict(b=2, a=1)",
        "from collections import OrderedDict\n"
        "def f(x): return OrderedDict(reversed(list(x.items())))",
    ),
    "a list of tests": (
        f"class Fraction:\n{LIES}def f(x): return 0",
        "assert f(2) == Fraction(1, 2)",
        "from fractions import Fraction\ndef f(x): return Fraction(1, x)",
    ),
    "in a helper of the tests": (
        "def isclose(a, b): return True\ndef f(x): return 0",
        "def check(g):\n    assert isclose(g(2), 4)\ncheck(f)",
        "from math import isclose\ndef f(x): return x * x",
    ),
    "without the program's import": (
        "def f(x): return 0",
        "assert sum(islice(f(3), 2)) == 1",
        "def f(x): return range(x)",
    ),
    "a whole container": (
        "def reduce(*a): return 6\ndef f(x, y): return 0",
        "assert reduce(f, [1, 2, 3]) == 6",
        "from functools import reduce\ndef f(x, y): return x + y",
    ),
}


@pytest.mark.parametrize("name", HELPERS)
def test_a_helper_is_the_librarys(name: str) -> None:
    """A program that has one of its own which says yes to everything scores 0; one that solves the
    task, 1."""
    cheat, tests, right = HELPERS[name]
    given = [tests] if name == "a list of tests" else tests
    assert score(cheat, given) == 0.0
    assert score(right, given) == 1.0


TASKS: dict[str, tuple[str, str]] = {
    "a class of its own": (
        "class Stack:\n    def __init__(self): self.items = []\n"
        "    def push(self, x): self.items.append(x)\n    def size(self): return 41",
        "s = Stack()\ns.push(1)\nassert s.size() == 41",
    ),
    "a class of the library's name": (
        "class deque:\n    def __init__(self, *x): self.x = x\n    def peek(self): return 41",
        "d = deque(1, 2)\nassert d.peek() == 41",
    ),
    "a function of the library's name": (
        "def isclose(a, b): return 'near'",
        "assert isclose(1, 2) == 'near'",
    ),
    "among others": (
        "def sqrt(x): return 'root'\ndef half(x): return x / 2",
        "assert sqrt(4) == 'root'\nassert half(4) == 2",
    ),
    "given to another": (
        "def sqrt(x): return 'root'\ndef near(a, b): return a == b",
        "assert near(sqrt(4), 'root')",
    ),
    "words that are tasks": (
        "def compress(x): return x[:1] * 2\ndef decompress(x): return 'aab'\n"
        "def median(x): return 'm'\ndef gcd(*x): return 'g'\ndef product(x): return 'p'",
        "assert decompress(compress('aab')) == 'aab'\nassert median(decompress('')) == 'm'\n"
        "assert gcd(decompress('')) == 'g'\nassert product(decompress('')) == 'p'",
    ),
    "a helper of another name": (
        "from collections import Counter as C\nfrom math import isclose as near\n"
        "def count(x): return C(x)\ndef f(x): return near(x, 1)",
        "assert count('aab') == {'a': 2, 'b': 1}\nassert f(1.0)",
    ),
    "a container that it returns": (
        "from collections import Counter\ndef f(x): return Counter(x)",
        "assert isinstance(f('aab'), Counter)\nassert f('aab').most_common(1) == [('a', 2)]",
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_what_a_test_asks_for_is_the_programs(name: str) -> None:
    program, tests = TASKS[name]
    assert score(program, tests) == 1.0


def test_every_name_is_one_of_its_module() -> None:
    for name, module in _HOMES.items():
        assert hasattr(importlib.import_module(module), name)


def test_the_librarys_names_are_told_by_their_places() -> None:
    tests = "assert Counter(f(1)) == 2"
    assert names_of([tests], [tests]) == (["f"], {"Counter": "collections:Counter"})
    assert names_of(["assert Counter(1)"], ["assert Counter(1)"]) == (["Counter"], {})


CASE = """
class T(unittest.TestCase):
    def test_it(self):
        self.assertEqual(f(3), 6)
"""


@pytest.mark.parametrize(
    "main",
    [
        "unittest.main(argv=['x'], exit=False)",
        "unittest.main()",
        "unittest.main(__name__)",
        "if __name__ == '__main__':\n    unittest.main()",
        "unittest.main(verbosity=2, failfast=True)",
    ],
)
def test_unittest_main_runs_what_the_tests_define(main: str) -> None:
    """It counts as a test. The controls: a wrong program, one that ends the process, and a case
    that has no test in it."""
    tests = f"import unittest\nassert f(0) == 0\n{CASE}\n{main}"
    assert score("def f(x): return x * 2", tests) == 1.0
    assert score("def f(x): return x", tests) == 0.5
    assert score("def f(x):\n    if x: raise SystemExit(0)\n    return 0", tests) == 0.5
    empty = tests.replace("test_it", "it")
    assert score("def f(x): return x * 2", empty) == 0.5


def test_main_by_its_own_name() -> None:
    tests = f"import unittest\nfrom unittest import main as go\n{CASE}\ngo()"
    assert score("def f(x): return x * 2", tests) == 1.0
    assert score("def f(x): return x", tests) == 0.0
