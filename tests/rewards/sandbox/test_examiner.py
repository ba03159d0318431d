"""Tests on one side of a pipe and the program on the other: right programs pass as they would in
one process."""

import collections
import datetime
import json
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit.tasks.rewards.named import build
from isobit.tasks.rewards.named.code import steps_of
from isobit.tasks.rewards.named.free_names import names_of
from isobit.tasks.rewards.sandbox import wire
from isobit.tasks.rewards.sandbox.examiner import Connection
from isobit.tasks.rewards.sandbox.harness import Program

SAME = "def f(x):\n    return x\n"
STACK = """
class Empty(Exception):
    pass
class Stack:
    def __init__(self, *items):
        self.items = list(items)
    def push(self, x):
        self.items.append(x)
    def pop(self):
        if not self.items:
            raise Empty("nothing", 3)
        return self.items.pop()
    def __len__(self):
        return len(self.items)
    def __iter__(self):
        return iter(self.items)
    def __add__(self, other):
        return Stack(*self.items, *other.items)
    def __eq__(self, other):
        return isinstance(other, Stack) and self.items == other.items
    def __repr__(self):
        return f"Stack({self.items})"
    def __enter__(self):
        return self
    def __exit__(self, *given):
        self.items.clear()
"""
KINDS = """
from collections import *
from enum import IntEnum
class Color(IntEnum):
    RED = 1
Point = namedtuple("Point", "x y")
class Mine(dict):
    pass
def counter(): return Counter("aab")
def ordered(): return OrderedDict(a=1)
def default():
    found = defaultdict(list)
    found[1].append(2)
    return found
def point(): return Point(1, 2)
def two():
    yield 1
    yield 2
def red(): return Color.RED
def mine(): return Mine(a=1)
def queue(): return deque([1, 2])
"""
RIGHT = {
    "equality": (
        SAME,
        (
            "assert f(1) == 2 - 1\nassert f([1, (2, {3})]) == [1, (2, {3})]\nassert f(2**80) == "
            "2**80"
        ),
    ),
    "constants": (
        SAME,
        ("assert f(None) is None\nassert f(True) is True\nassert not f('')\nassert f(1.5) > 1"),
    ),
    "helpers": (
        SAME,
        (
            "assert sorted(f((3, 1))) == [1, 3]\nassert set(f([1, 1])) == {1}\nassert "
            "isinstance(f(1), int)"
        ),
    ),
    "text": (
        SAME,
        ("assert f('\\u00e9\\ud800\\0') == '\\u00e9\\ud800\\0'\nassert f(b'\\xff') == b'\\xff'"),
    ),
    "numbers": (
        SAME,
        (
            "import math\nassert math.isclose(f(1.4), 1.4)\nassert math.isnan(f(math.nan))\n"
            "assert f(1j) == 1j"
        ),
    ),
    "HumanEval": (
        SAME,
        (
            "METADATA = {}\n\ndef check(candidate):\n    assert abs(candidate(3.5) - 3.5) < "
            "1e-6\ncheck(f)"
        ),
    ),
    "a list": (
        ("def sum(a, b):\n    return 6"),
        ["assert sum(10, 15) == 6", "assert sum(100, 150) == 6"],
    ),
    "modules": (
        ("import math, os.path as p\nfrom math import gcd"),
        ("assert gcd(4, 6) == 2\nassert p.join('a') == 'a'"),
    ),
    "a class": (
        STACK,
        (
            "s = Stack()\n"
            "s.push(3)\n"
            "assert len(s) == 1\n"
            "assert list(s) == [3]\n"
            "assert 3 in s\n"
            "assert 4 not in s\n"
            "assert s.pop() == 3\n"
            "assert s.items == []\n"
            "assert repr(s) == 'Stack([])'\n"
            "assert isinstance(s, Stack)"
        ),
    ),
    "objects": (
        STACK,
        (
            "assert Stack(1) + Stack(2) == Stack(1, 2)\n"
            "assert Stack(1) != Stack(2)\n"
            "assert Stack(1) != [1]\n"
            "with Stack(1) as s:\n"
            "    assert s.items == [1]\n"
            "assert s.items == []\n"
            "s.items = [5]\n"
            "assert s.pop() == 5\n"
            "assert hasattr(s, 'push') and not hasattr(s, 'peek')"
        ),
    ),
    "exceptions": (
        STACK,
        (
            "try:\n    Stack().pop()\n    assert False\nexcept Empty as e:\n    assert e.args "
            "== ('nothing', 3)"
        ),
    ),
    "an exception's class, given back": (
        "class Bad(ValueError):\n    pass\n"
        "def fails():\n    raise Bad\n"
        "def is_bad(kind):\n    return kind is Bad",
        "try:\n    fails()\n    assert False\nexcept ValueError as e:\n    assert is_bad(type(e))",
    ),
    "builtin exceptions": (
        ("def f(x):\n    return [][x]"),
        ("try:\n    f(1)\nexcept IndexError:\n    pass\nelse:\n    assert 0"),
    ),
    "containers": (
        KINDS,
        (
            "assert counter() == {'a': 2, 'b': 1}\n"
            "assert ordered() == {'a': 1}\n"
            "assert default() == {1: [2]}\n"
            "assert list(queue()) == [1, 2]\n"
            "assert counter().most_common(1) == [('a', 2)]"
        ),
    ),
    "derived": (
        KINDS,
        (
            "assert point() == (1, 2)\n"
            "assert point().x == 1\n"
            "assert red() == 1\n"
            "assert red().name == 'RED'\n"
            "assert mine() == {'a': 1}\n"
            "assert mine()['a'] == 1\n"
            "assert len(mine()) == 1\n"
            "assert red() + 1 == 2"
        ),
    ),
    "generators": (
        KINDS,
        (
            "assert list(two()) == [1, 2]\nassert next(two()) == 1\nassert sum(two()) == 3\n"
            "assert 2 in two()"
        ),
    ),
    "numbers of classes": (
        SAME,
        (
            "from fractions import Fraction\n"
            "from decimal import Decimal\n"
            "import datetime\n"
            "assert f(Fraction(1, 3)) == Fraction(1, 3)\n"
            "assert f(Decimal('0.1')) == Decimal('0.1')\n"
            "assert f(datetime.date(2020, 1, 2)) == datetime.date(2020, 1, 2)"
        ),
    ),
    "functions": (
        ("def f(g, *x):\n    return g(*x)\ndef both(g, h):\n    return lambda x: g(h(x))"),
        (
            "assert f(lambda x: x + 1, 3) == 4\n"
            "assert f(len, 'ab') == 2\n"
            "assert f(str, 3) == '3'\n"
            "assert both(lambda x: x + 1, lambda x: 2 * x)(3) == 7"
        ),
    ),
    "a decorator": (
        ("def twice(g):\n    return lambda x: g(g(x))"),
        ("@twice\ndef h(x):\n    return x + 1\nassert h(1) == 3"),
    ),
    "iterators": (
        ("def f(x):\n    return max(x)"),
        (
            "assert f(x for x in (1, 3)) == 3\n"
            "assert f({1: 2}.keys()) == 1\n"
            "assert f(map(int, '12')) == 2\n"
            "assert f(range(3)) == 2"
        ),
    ),
    "in place": (
        ("def f(x):\n    x.sort()\ndef g(x):\n    x['a'] = 1\n    return x"),
        ("a = [3, 1]\nf(a)\nassert a == [1, 3]\nb = {}\nassert g(b) == {'a': 1} and b == {}"),
    ),
    "classes": (
        SAME + "Empty = IndexError\nkind = int\ndef g():\n    return [][0]",
        (
            "assert f(int) is int and f(KeyError) is KeyError and kind is int\n"
            "try:\n    g()\nexcept Empty:\n    pass\nelse:\n    assert 0"
        ),
    ),
    "iterators of the program": (
        "class Up:\n    def __init__(self):\n        self.n = 0\n    def __iter__(self):\n      "
        "  return self\n"
        "    def __next__(self):\n        if self.n == 2:\n            raise StopIteration\n"
        "        self.n += 1\n        return self.n\ndef gen():\n    return (yield 1)\n",
        "assert list(Up()) == [1, 2]\nup = Up()\nassert [next(up), next(up), next(up, None)] == "
        "[1, 2, None]\n"
        "g = gen()\nassert next(g) == 1\ntry:\n    next(g)\nexcept StopIteration:\n    pass\n"
        "else:\n    assert 0",
    ),
    "exits": (
        "def f(x):\n    exit(x)",
        "try:\n    f(3)\nexcept SystemExit as e:\n    assert e.code == 3\nelse:\n    assert 0",
    ),
    "names of the tests and of the program": (
        "count = 0\nresult = None\ndef f():\n    global count\n    count += 1\n    return count\n",
        "assert count == 0\nresult = f()\nassert result == 1 and count == 1\ncount = 7\nf()\n"
        "assert count == 7",
    ),
    "a name that becomes the tests'": ("def s(x):\n    return [x]", "s = s(1)\nassert s == [1]"),
    "variables": (
        ("n = 3\ndef f():\n    global n\n    n += 1"),
        ("assert n == 3\nf()\nassert n == 4"),
    ),
}


def score(source: str, tests: Any, **options: Any) -> Any:
    return build("code", options).score(source, {"tests": tests}, None)


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.usefixtures("cage")
def test_a_right_program_passes(name: str) -> None:
    source, tests = RIGHT[name]
    assert score(source, tests) == 1.0


@pytest.mark.usefixtures("cage")
def test_what_is_left_out() -> None:
    """Documented in `examiner.py`; a change here is one of the documentation too."""
    assert (
        score("async def f():\n    return 1", "import asyncio\nassert asyncio.run(f()) == 1") == 0
    )
    assert score("class A:\n    pass", "class B(A):\n    pass\nassert B()") == 0
    assert (
        score("def f():\n    return helper()", "def helper():\n    return 1\nassert f() == 1") == 0
    )
    assert score(SAME, "class A:\n    pass\nassert f(A())") == 0
    manager = (
        "class M:\n    def __enter__(self):\n        pass\n    def __exit__(self, "
        "*given):\n        return True\n"
    )
    assert score(manager, "with M():\n    raise ValueError\nassert M") == 0
    stops = "def f():\n    raise StopIteration"
    assert score(stops, ["try:\n    f()\nexcept StopIteration:\n    pass"]) == 0
    assert (
        score("import math as m", "assert m.sqrt(4) == 2 and m is not None") == 1
    )  # calls into the program's
    assert score("def f(x):\n    x.clear()\n    return x", "a = [1]\nassert f(a) == a") == 0


@pytest.mark.usefixtures("cage")
def test_arrays_are_compared_by_the_tests() -> None:
    pytest.importorskip("numpy")
    source = (
        "import numpy as np\ndef f(x):\n    return np.array(x) * 2\ndef g(x):\n    return "
        "np.float64(x)\n"
    )
    tests = (
        "assert np.allclose(f([1, 2]), [2, 4])\nassert math.isclose(g(1.5), 1.5)\nassert "
        "f([1]).tolist() == [2]"
    )
    assert score(source, tests, packages=True, memory_mib=2048) == 1.0
    lies = source + (
        "class A(np.ndarray):\n    __eq__ = lambda *given: True\ndef f(x):\n    return "
        "np.zeros(2).view(A)\n"
    )
    tests = "import numpy\nassert numpy.allclose(f([1, 2]), [2, 4])"
    assert score(lies, tests, packages=True, memory_mib=2048) == 0


@pytest.mark.parametrize(
    ("tests", "names", "modules"),
    [
        ("assert f(1) == sorted([2])", ["f"], {}),
        ("import math\nassert math.isclose(f(1), 2)", ["f"], {}),
        ("assert math.isclose(f(1), 2)", ["f"], {"math": "math"}),
        ("assert np.allclose(f(1), 2)", ["f"], {"np": "numpy"}),
        ("assert queue(1) == 2", ["queue"], {}),
        ("def check(c):\n    assert c(1)\ncheck(f)", ["f"], {}),
        ("assert sum(1, 2) == 3\nassert sum(2, 2) == 4", ["sum"], {}),
        ("assert list(sum(1, 2)) == 3", [], {}),
        ("assert all(f(x) for x in [1])", ["f"], {}),
        ("assert [f(x) for x in y] == [z for z in w]", ["f", "w", "y"], {}),
        ("n = 0\nassert n == f()", ["f"], {}),
        ("assert n == f()\nn = 0", ["f", "n"], {}),
        ("s = s(1)\nassert s.x", ["s"], {}),
        ("n += 1\nassert n == 2", ["n"], {}),
        ("def check():\n    assert n == f()\nn = 0\ncheck()", ["f"], {}),
        (
            "def count():\n    global n\n    n = 1\ndef check():\n    assert n == f()\ncount()\n"
            "check()",
            ["f"],
            {},
        ),
        ("try:\n    n = f()\nexcept ValueError:\n    pass\nassert n == 3", ["f"], {}),
        ("for n in f():\n    pass\nassert n == 3", ["f"], {}),
        ("with f() as n:\n    pass\nassert n == 3", ["f"], {}),
        ("assert (n := f()) and n == 3", ["f"], {}),
        ("class A:\n    n = f()\n    assert n\nassert A", ["f"], {}),
        ("assert (lambda n: n == m)(f())", ["f", "m"], {}),
        ("assert f(__name__, __file__) and __builtins__", ["f"], {}),
    ],
)
def test_the_names_that_are_the_programs(
    tests: str, names: list[str], modules: dict[str, str]
) -> None:
    steps = steps_of(tests, "tests")
    scored = [step["source"] for step in steps if step["token"] is not None]
    assert names_of([step["source"] for step in steps], scored) == (names, modules)


def refuse(*given: Any) -> Any:
    raise TypeError(given)


NUMBERS = (
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.decimals(allow_nan=False),
)
SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.integers(1 << 52, 1 << 200)),
    *(st.binary(), *NUMBERS),
    *(st.fractions(), st.dates(), st.datetimes(), st.timedeltas(), st.times()),
    *(st.text(st.characters(exclude_categories=())), st.just(range(1, 9, 2))),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        *(st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple)),
        st.lists(SCALARS, max_size=3).map(set),
        *(st.dictionaries(SCALARS, inner, max_size=3), st.lists(inner).map(collections.deque)),
        st.dictionaries(SCALARS, inner, max_size=3).map(collections.OrderedDict),
    ),
    max_leaves=12,
)


@given(VALUES)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    back = wire.decode(json.loads(json.dumps(wire.encode(value, refuse))), refuse)
    assert type(back) is type(value)
    assert back == value
    assert repr(back) == repr(value) or not isinstance(value, (int, float, str, Decimal))


def test_only_exact_classes_are_plain() -> None:
    """A class that calls itself by a plain one's name is not taken for it."""
    named = (type("int", (int,), {})(1), type("Counter", (dict,), {})())
    for value in (*named, object(), len, math, int, KeyError):
        with pytest.raises(TypeError):
            wire.encode(value, refuse)
    wrong = ({"os": 1}, {"int": [1]}, {"range": "a"}, {"type": "nothing"}, {"set": [[1]]})
    for body in (*wrong, {"int": "1", "set": []}):
        with pytest.raises((TypeError, ValueError, KeyError)):
            wire.decode(body, refuse)
    known = (Fraction(1, 2), Decimal("0.1"), datetime.date(2020, 1, 1))
    assert [wire.decode(wire.encode(value, refuse), refuse) for value in known] == list(known)


def test_no_live_object_crosses() -> None:
    """What the program's process says is not trusted: no module is imported for it, and no class
    caught by it is an AssertionError."""
    tests = Connection(0, 1)
    assert tests.decode({"type": "int"}) is int
    assert tests.decode({"type": "IndexError"}) is IndexError
    bodies = ({"module": "math"}, {"builtin": "len"}, {"function": 0}, {"type": "os"})
    for body in (*bodies, {"iterator": []}):
        with pytest.raises(wire.Gone):
            tests.decode(body)
    exceptions = ("AssertionError", "Exception", "BaseException")
    for kind in (*exceptions, "object", "type", "map", "super", "property"):
        with pytest.raises(wire.Gone):
            tests.decode({"type": kind})
    program = Program(0, 1)
    for value in (math, len, Exception, object, type, test_no_live_object_crosses, wire):
        assert set(program.encode(value)) <= {"object", "error"}
    stand_in = tests.decode(program.encode(Exception))
    assert not issubclass(AssertionError, stand_in)
