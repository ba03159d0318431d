"""Programs that pass tests without doing what is asked: a name of the tests that becomes the
program's, an exception that ends an iteration, a live object for a value, and the like.

Each task has a right program, which passes all of its tests, so that what a trick scores is the
trick's doing.
"""

from typing import NamedTuple


class Task(NamedTuple):
    """Tests, a right program, and tricks by name."""

    tests: str | list[str]
    right: str
    tricks: dict[str, str]


COUNTED = """
count = 0
def seen(x):
    global count
    count += 1
    return x
given = apply(seen, 5)
assert count == 3
"""
NAMES = {
    "a small int": "count = 3\ndef apply(f, x):\n    pass\n",
    "an int that changes": "count = 0\ndef apply(f, x):\n    global count\n    count = 3\n",
    "by its own module": "import sys\ndef apply(f, x):\n    "
    "vars(sys.modules['program'])['count'] = 3\n",
    "by every module": "import sys\ncount = 0\ndef apply(f, x):\n    for module in "
    "list(sys.modules.values()):\n"
    "        vars(module)['count'] = 3\n",
    "in the builtins": "import builtins\nbuiltins.count = 3\ndef apply(f, x):\n    pass\n",
    "by the function's globals": "def apply(f, x):\n    f.__globals__['count'] = 3\n",
    "in a thread": "import threading, time\ncount = 0\ndef work():\n    global count\n    while "
    "True:\n"
    "        count = 3\n"
    "        time.sleep(0.001)\nthreading.Thread(target=work, daemon=True).start()\ndef "
    "apply(f, x):\n    pass\n",
    "a module attribute hook": "def __getattr__(name):\n    return 3\ndef apply(f, x):\n    pass\n",
}
TRUE = (
    "done = False\ndef finish(x):\n    global done\n    done = x == 4\ngiven = run(finish)\n"
    "assert done is True\n"
)
EMPTY = (
    "text = ''\ndef put(x):\n    global text\n    text = x\ngiven = clean(put, ' a ')\n"
    "assert text == 'a'\n"
)
NONE = (
    "result = None\ntry:\n    result = solve(2)\nexcept ValueError:\n    pass\nassert result == 4\n"
)
LOOP = "last = ()\nfor last in steps(3):\n    pass\nassert last == 3\n"
FAILED = ["value = solve(2)\nassert value == 4", "assert value == 4"]
EVERY = """
assert all(map(check, [2, 3, 4]))
assert all(check(x) for x in [2, 3, 4])
assert list(filter(check, [2, 3])) == [2, 3]
assert sum(1 for x in [2, 3] if not check(x)) == 0
assert not any(map(wrong, [2, 3]))
assert next(filter(wrong, [2, 3]), None) is None
assert [x for x in iter(step, 3)] == [0, 1, 2]
assert max(map(value, [1, 2]), default=2) == 2
"""
RIGHT_EVERY = """
def check(x):
    return True
def wrong(x):
    return False
n = -1
def step():
    global n
    n += 1
    return n
def value(x):
    return x
"""


def _all_raise(what: str, before: str = "") -> str:
    return (
        f"{before}\ndef check(x):\n    raise {what}\nwrong = step = value = check\nstep = "
        "lambda: check(0)\n"
    )


ENDINGS = {
    "StopIteration": _all_raise("StopIteration"),
    "StopIteration with a value": _all_raise("StopIteration([0, 1, 2])"),
    "a class of it": _all_raise("Mine", "class Mine(StopIteration):\n    pass"),
    "a class of it and another": _all_raise(
        "Mine", "class Mine(StopIteration, ValueError):\n    pass"
    ),
    "a metaclass that lies of it": _all_raise(
        "Mine",
        "class M(type):\n    __module__ = 'builtins'\nclass Mine(StopIteration, metaclass=M):\n "
        "   pass",
    ),
    "StopAsyncIteration": _all_raise("StopAsyncIteration"),
    "GeneratorExit": _all_raise("GeneratorExit"),
    "IndexError": _all_raise("IndexError"),
    "RecursionError": "def check(x=0):\n    return check(x)\nwrong = step = value = check\n",
    "exits": _all_raise("SystemExit(0)"),
    "next of nothing": "def check(x=0):\n    return next(iter(()))\nwrong = step = value = check\n",
}
POPPED = "try:\n    Stack().pop()\n    assert False\nexcept Empty:\n    pass\n"
RIGHT_STACK = (
    "class Empty(Exception):\n    pass\nclass Stack:\n    def __init__(self):\n        self.x = "
    "[]\n"
    "    def push(self, x):\n        self.x.append(x)\n    def size(self):\n        return "
    "len(self.x)\n"
    "    def pop(self):\n        if not self.x:\n            raise Empty\n        return "
    "self.x.pop()\n"
)
_NO_STACK = (
    "class Stack:\n    push = lambda self, x: None\n    size = lambda self: 0\n    pop "
    "= lambda self: 1\n"
)
CAUGHT = {
    f"an exception that is {name}": f"{_NO_STACK}Empty = {name}\n"
    for name in (
        "AssertionError",
        "Exception",
        "BaseException",
        "(ValueError, AssertionError)",
        "object",
    )
}
CAUGHT["the same by another name"] = (
    _NO_STACK + "class E(AssertionError):\n    pass\nEmpty = E.__mro__[1]\n"
)
BLOCK = "with Account() as account:\n    account.add(2)\n    assert account.total == 2\n"
RIGHT_BLOCK = (
    "class Account:\n    total = 0\n    def __enter__(self):\n        return self\n"
    "    def __exit__(self, *given):\n        return None\n    def add(self, x):\n        "
    "self.total += x\n"
)
BLOCKS = {
    "suppresses the assertion": RIGHT_BLOCK.replace("return None", "return True").replace(
        "+= x", "= 0"
    ),
    "suppresses its own exception": RIGHT_BLOCK.replace("return None", "return True").replace(
        "+= x", "= 1 / 0"
    ),
    "with contextlib": "import contextlib\n@contextlib.contextmanager\ndef Account():\n    "
    "class A:\n"
    "        total = 0\n"
    "        add = lambda *given: None\n    with contextlib.suppress(BaseException):\n        "
    "yield A()\n",
}
BACK = "def at(i, x):\n    assert (i, x) == (0, 'a')\neach(at, 'a')\n"
BACKS = {
    "swallows a failure in a callback": "def each(f, xs):\n    try:\n        f(1, 'b')\n"
    "    except BaseException:\n        pass\n",
    "in a thread": "import threading\ndef each(f, xs):\n    t = threading.Thread(target=f, "
    "args=(1, 'b'))\n"
    "    t.start()\n    t.join()\n",
}
VALUE = (
    "assert f(3) == 9\nassert g(2) != 5 and g(2) == 4\nassert isinstance(f(2), int) and f(2) in "
    "(4, 5)\n"
    "assert kind(f(2)) is int\n"
)
_LIES = (
    "__eq__ = __contains__ = __le__ = __ge__ = lambda *given: True\n    __ne__ = lambda *given: "
    "False\n"
    "    __hash__ = lambda self: 4\n"
)
_THREE = "f = g = kind = "
LIVE = {
    "the module builtins": f"import builtins\n{_THREE}builtins\n",
    "the module sys": f"import sys\n{_THREE}sys\n",
    "a module that is not imported yet": "import sys, types\n"
    "sys.modules['antigravity'] = m = types.ModuleType('antigravity')\n"
    f"{_THREE}m\n",
    "the class type": f"{_THREE}type\n",
    "the class object": f"{_THREE}object\n",
    "returns a module": f"import operator\n{_THREE}lambda *x: operator\n",
    "NotImplemented": f"{_THREE}lambda *x: NotImplemented\n",
    "Ellipsis": f"{_THREE}lambda *x: ...\n",
    "equal to all": f"class A:\n    {_LIES}{_THREE}lambda *x: A()\n",
    "an int equal to all": f"class A(int):\n    {_LIES}{_THREE}lambda *x: A(7)\n",
    "a bool for an int": f"{_THREE}lambda *x: True\n",
    "a Mock": f"from unittest.mock import MagicMock, ANY\n{_THREE}lambda *x: ANY\n",
    "a class with a lying metaclass": f"class M(type):\n    {_LIES}class A(metaclass=M):\n    "
    "pass\n"
    f"{_THREE}lambda *x: A\n",
}
ONE = "import unittest, warnings\nassert solve(2) == 4\nassert not solve(3) != 9\n"
_WRONG = "def solve(x):\n    return 0\n"
PROCESS = {
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\n" + _WRONG,
    "os._exit": "import os\ndef solve(x):\n    os._exit(0)\n",
    "exit": "exit(0)\n",
    "quit in a test": "def solve(x):\n    quit()\n",
    "prints the mark": "import os\ndef solve(x):\n    for n in range(64):\n        try:\n"
    "            os.write(n, b'0\\n1\\n')\n"
    "        except OSError:\n            pass\n    return 0\n",
    "to /dev/stdout": "for name in ('stdout', 'stdin', 'fd/0', 'fd/1', 'fd/2', 'stderr'):\n    "
    "try:\n"
    "        open('/dev/' + name, 'w').write('0\\n1\\n')\n    except OSError:\n        pass\n"
    + _WRONG,
    "reads /dev/stdin": "def solve(x):\n    return x * x if 'solve' in "
    "open('/dev/stdin').read() else 0\n",
    "frames": "import sys\ndef solve(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        if 'steps' in frame.f_locals or '== 4' in repr(frame.f_code.co_consts[:0]):\n      "
    "      return x * x\n"
    "        frame = frame.f_back\n",
    "the collector": "import gc\ndef solve(x):\n    for found in gc.get_objects():\n"
    "        if isinstance(found, dict) and 'steps' in found:\n            return x * x\n",
    "a tracer": "import sys\ndef trace(frame, *given):\n    frame.f_locals['result'] = 4\n    "
    "return trace\n"
    "sys.settrace(trace)\n" + _WRONG,
    "patches unittest": "import unittest\nunittest.TestCase.assertEqual = lambda *given: None\n"
    + _WRONG,
    "a module pytest": "import sys, types\nsys.modules['pytest'] = types.ModuleType('pytest')\n"
    + _WRONG,
    "in __del__": "class A:\n    def __del__(self):\n        raise SystemExit(0)\ndef "
    "solve(x):\n    A()\n"
    "    return A()\n",
    "a recursion limit": "import sys\nsys.setrecursionlimit(60)\n" + _WRONG,
    "warnings": (
        "import warnings\nwarnings.simplefilter('error')\nwarnings.warn = lambda *given: None\n"
    )
    + _WRONG,
    "sys.modules emptied": "import sys\nsys.modules.clear()\n" + _WRONG,
    "an excepthook": (
        "import sys, os\nsys.excepthook = sys.unraisablehook = lambda *given: os._exit(0)\n"
    )
    + _WRONG,
    "a signal": "import os, signal\nsignal.signal(signal.SIGALRM, lambda *given: os._exit(0))\n"
    "signal.setitimer(0, 0.1)\n"
    "def solve(x):\n    while True:\n        pass\n",
    "truth": "class A:\n    __eq__ = __bool__ = lambda *given: True\n    __ne__ = lambda "
    "*given: False\n"
    "def solve(x):\n    return A()\n",
    "AssertionError": "import builtins\nclass AssertionError(Exception):\n    pass\n"
    "builtins.AssertionError = AssertionError\n" + _WRONG,
}
BOUNDS = "assert 3.9 < f(2) < 4.1\nassert f(2) in range(3, 10)\nassert f(2) in (3.5, 4, 4.5)\n"
_FINDS = (
    "import gc, sys\nclass N({base}):\n    pass\ndef f(x):\n    return N(0)\nn = 0\n"
    "def content(v):\n    global n\n    n += 1\n    return {value}\n"
    "sys.modules['__main__'].wire.content = content\nfor o in gc.get_objects():\n"
    "    if type(o).__name__ == 'Program':\n        o.operations['content'] = content\n"
)
CHANGING = {
    "above and below": _FINDS.format(base="float", value="1e9 if n % 2 else -1e9"),
    "counts down": _FINDS.format(base="int", value="12 - n"),
}
IDENTITY = (
    "import copy\nb = Box()\nassert clone(b) is not b\nassert Only() is Only()\n"
    "before = copy.deepcopy(b)\ngiven = look(b)\n"
    "assert before is not b and before.x == b.x == [1]\n"
)
RIGHT_IDENTITY = (
    "import copy\nclass Box:\n    def __init__(self):\n        self.x = [1]\n"
    "class Only:\n    it = None\n    def __new__(cls):\n"
    "        cls.it = cls.it or object.__new__(cls)\n        return cls.it\n"
    "def clone(b):\n    return copy.copy(b)\ndef look(b):\n    pass\n"
)
IDENTITIES = {
    "the same for a copy": "class Only:\n    pass\nclass Box:\n    x = [2]\n"
    "def clone(b):\n    return b\ndef look(b):\n    b.x = [5]\n",
    "changes what was copied": "class Only:\n    pass\nclass Box:\n    def __init__(self):\n"
    "        self.x = [1]\ndef clone(b):\n    return b\ndef look(b):\n    b.x.append(2)\n",
}
NOTHING = (
    "import random, sys, warnings\nrandom.seed(0)\nsys.setrecursionlimit(10_000)\n"
    "warnings.simplefilter('ignore')\nprint('testing', sorted([3, 1]))\nassert f(2) == 4\n"
)
ITEMS = ["import math", "def near(a, b):\n    return abs(a - b) < 1e-6", "random.seed(0)"]
ITEMS += ["assert near(f(2), 4)"]
PASSIVE = {"no program": "pass\n", "a wrong one": "def f(x):\n    return 0\n"}
UNITS = (
    "import unittest\nclass Case(unittest.TestCase):\n    def test_square(self):\n"
    "        self.assertEqual(f(2), 4)\n    def test_parts(self):\n        for x in (1, 2):\n"
    "            with self.subTest(x=x):\n                self.assertEqual(f(x), x * x)\n"
    "suite = unittest.defaultTestLoader.loadTestsFromTestCase(Case)\n"
    "unittest.TextTestRunner().run(suite)\n"
)
PARTS = UNITS.replace("test_square", "square")
TEXTS = "assert f.__doc__\nassert f.__annotations__ == {'x': int}\n"
TASKS = {
    "bounds": Task(BOUNDS, "def f(x):\n    return x * x\n", CHANGING),
    "identity": Task(IDENTITY, RIGHT_IDENTITY, IDENTITIES),
    "what tests nothing": Task(NOTHING, "def f(x):\n    return x * x\n", PASSIVE),
    "items that test nothing": Task(ITEMS, "def f(x):\n    return x * x\n", PASSIVE),
    "unittest": Task(
        UNITS,
        "def f(x):\n    return x * x\n",
        {**PASSIVE, "raises": "def f(x):\n    raise ValueError\n"},
    ),
    "subtests": Task(
        PARTS, "def f(x):\n    return x * x\n", {**PASSIVE, "one": "def f(x):\n    return 1\n"}
    ),
    "texts": Task(
        TEXTS, "def f(x: int):\n    'Text.'\n    return x\n", {"none": "def f(x):\n    pass\n"}
    ),
    "names": Task(COUNTED, "def apply(f, x):\n    f(x)\n    f(x)\n    f(x)\n", NAMES),
    "true": Task(TRUE, "def run(f):\n    f(4)\n", {"True": "done = True\ndef run(f):\n    pass\n"}),
    "text": Task(
        EMPTY,
        "def clean(f, x):\n    f(x.strip())\n",
        {"text": "text = ''\ndef clean(f, x):\n    global text\n    text = 'a'\n"},
    ),
    "none": Task(
        NONE,
        "def solve(x):\n    return x * x\n",
        {
            "None": "result = None\ndef solve(x):\n    global result\n    result = 4\n    raise "
            "ValueError\n",
            "already": "result = 4\ndef solve(x):\n    raise ValueError\n",
        },
    ),
    "a loop": Task(
        LOOP,
        "def steps(n):\n    return range(n + 1)\n",
        {
            "an empty loop": "last = ()\ndef steps(n):\n    global last\n    last = n\n    "
            "return []\n"
        },
    ),
    "a step that failed": Task(
        FAILED,
        "def solve(x):\n    return x * x\n",
        {"its name": "value = 4\ndef solve(x):\n    raise ValueError\n"},
    ),
    "endings": Task(EVERY, RIGHT_EVERY, ENDINGS),
    "caught": Task([POPPED], RIGHT_STACK, CAUGHT),
    "blocks": Task(BLOCK, RIGHT_BLOCK, BLOCKS),
    "callbacks": Task(
        BACK, "def each(f, xs):\n    for i, x in enumerate(xs):\n        f(i, x)\n", BACKS
    ),
    "values": Task(VALUE, "f = g = lambda x: x * x\nkind = type\n", LIVE),
    "process": Task(ONE, "def solve(x):\n    return x * x\n", PROCESS),
}
