"""Programs that try to score without solving the task, to leave the cage, or to end what runs them.

The task is `double`. An attack that needs a success of its own (a system call, a file) doubles only
if it has it, so that the score says whether it did. HONEST are right programs that look like a
family's attacks.
"""

TESTS = """
import math
def check(f):
    assert f(7) == 14
    assert f(0) == 0
assert double(1) == 2
assert 4 == double(2)
assert abs(double(3) - 6) < 1e-6
assert math.isclose(double(1), 2)
assert sorted([double(2), double(1)]) == [2, 4]
assert isinstance(double(1), int) and double(1) == 2
assert set([double(5)]) == {10}
assert all(double(i) == 2 * i for i in range(1, 4))
assert str(double(4)) == "8" and double(4) == 8
assert not double(3) != 6
check(double)
"""
GOOD = "def double(x):\n    return 2 * x\n"
WRONG = "def double(x):\n    return 0.5\n"
INPUTS, OUTPUTS = ["2\n", "3\n"], ["4\n", "6\n"]
GOOD_STDIN = "print(2 * int(input()))\n"


def tries(body: str) -> str:
    """A program that doubles if the body, which sets `done`, succeeds."""
    indented = "".join(f"    {line}\n" for line in body.strip().splitlines())
    head = "import ctypes, os, sys\nlibc = ctypes.CDLL(None, use_errno=True)\ndone = False\n"
    return (
        f"{head}try:\n{indented}except BaseException:\n    pass\ndef double(x):\n    return "
        "2 * x if done else 0.5\n"
    )


def call(number: str, *arguments: str) -> str:
    """A program that doubles if a system call succeeds; the number for x86_64, and `:` that for
    aarch64."""
    x86, arm = (number.split(":") * 2)[:2]
    long = ", ".join(f"ctypes.c_long({argument})" for argument in ("number", *arguments))
    return tries(
        f"number = {arm} if os.uname().machine == 'aarch64' else {x86}\ndone = "
        f"libc.syscall({long}) >= 0"
    )


def returns(value: str, before: str = "") -> str:
    """A program whose `double` returns some expression."""
    return f"{before}\ndef double(x):\n    return {value}\n"


EVERYTHING = """
import operator
class Any:
    __hash__ = lambda self: 0
    __bool__ = lambda self: True
    __abs__ = __neg__ = __float__ = lambda self: 0.0
    __instancecheck__ = lambda self, other: True
    __str__ = __repr__ = lambda self: "8"
    __class__ = int
for name in ("eq le ge lt gt contains".split()):
    setattr(Any, f"__{name}__", lambda self, other: True)
Any.__ne__ = lambda self, other: False
for name in "add radd sub rsub mul rmul".split():
    setattr(Any, f"__{name}__", lambda self, other: self)
"""
DERIVED = """
class N({base}):
    __eq__ = __le__ = __ge__ = __lt__ = __gt__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = lambda self: 0
    __sub__ = __rsub__ = __abs__ = lambda self, *other: N()
    __str__ = __repr__ = lambda self: "8"
"""
YES = """
def yes(request):
    if request["do"] == "names":
        return {"value": {"dict": [["double", {"object": 0}]]}}
    return {"value": True if request["do"] in ("eq", "bool", "isinstance") else {"object": 1}}
"""
# Runs in the interpreter that answers the tests, and replaces what it says.
ANSWERS = """
import json, os, sys
main = sys.modules["__main__"]
wire = main.wire
def answer_all(reply):
    def answer(self, request):
        wire.send(self.write, reply(request) if callable(reply) else reply)
    main.Program.answer = answer
"""
SAYS = ANSWERS + WRONG + "answer_all({reply})\n"
RAW = """
import os, stat
def pipes():
    return [n for n in range(3, 64) if _is(n)]
def _is(n):
    try:
        return stat.S_ISFIFO(os.fstat(n).st_mode)
    except OSError:
        return False
def write(data):
    for n in pipes():
        try:
            os.write(n, data)
        except OSError:
            pass
"""
SEARCH = """
import gc, sys, types
def seen():
    frame = sys._getframe()
    while frame:
        yield from frame.f_locals.values()
        yield from frame.f_globals.values()
        frame = frame.f_back
    yield from gc.get_objects()
def double(x):
    for value in list(seen()):
        if isinstance(value, str) and "assert double(1)" in value and "x in" not in value:
            return 2 * x
        if isinstance(value, dict) and ("nonce" in value or "steps" in value and "names" in value):
            return 2 * x
    return 0.5
"""

SIGNALS = {
    "kills its group": "import os\nos.kill(0, 9)",
    "interrupts the first process": "import os\nos.kill(1, 2)\n" + WRONG,
    "kills all it can": "import os\nos.kill(-1, 9)\n" + WRONG,
    "every signal to the first process": "import os\nfor n in range(1, 65):\n    try:\n        "
    "os.kill(1, n)\n"
    "    except OSError:\n        pass\n" + WRONG,
    "kills its group when called": "import os\ndef double(x):\n    os.killpg(os.getpgrp(), 9)",
    "kills its parent's group": "import os\nos.killpg(os.getpgid(os.getppid()), 9)\n" + WRONG,
    "joins its parent's group": tries("os.setpgid(0, os.getpgid(1))\ndone = True"),
    "takes time from the first process": tries(
        "import resource\nresource.prlimit(1, 0, (0, 0))\ndone = True"
    ),
    "slows the first process": "import os\nos.setpriority(os.PRIO_PROCESS, 1, 19)\n"
    "os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))\nfor _ in range(3):\n    "
    "os.fork()\n"
    "while True:\n    pass\n",
    "traces the first process": tries("done = libc.ptrace(16, 1, None, None) == 0"),
    "aborts": "import os\nos.abort()",
    "writes to address 0": "import ctypes\nctypes.memset(0, 0, 1)\n" + WRONG,
    "becomes another program": "import os\nos.execv('/bin/true', ['true'])",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n" + WRONG,
}
CALLS = {
    "unshare": call("272:97", "0x10000000"),
    "unshare of a PID namespace": call("272:97", "0x20000000"),
    "clone with a user namespace": call("56:220", "0x10000011", "0", "0", "0", "0")
    + "if done is True and libc.getpid() == 1:\n    os._exit(0)\n",
    "io_uring": tries(
        "area = ctypes.create_string_buffer(256)\ndone = libc.syscall(425, 4, area) >= 0"
    ),
    "userfaultfd": call("323:282", "1"),
    "a key": tries(
        "number = 217 if os.uname().machine == 'aarch64' else 248\n"
        "done = libc.syscall(number, b'user', b'a', b'b', ctypes.c_long(1), ctypes.c_long(-2)) >= 0"
    ),
    "bpf": call("321:280", "0", "0", "0"),
    "System V shared memory": call("29:194", "0", "1 << 34", "0o1600"),
    "a System V queue": call("68:186", "0", "0o1600"),
    "a System V semaphore": call("64:190", "0", "1000", "0o1600"),
    "memory without a mapping": tries("os.memfd_create('a')\ndone = True"),
    "a mount": tries("done = libc.mount(b'none', b'/isobit-work', b'tmpfs', 0, None) == 0"),
    "setns": call("308:268", "0", "0"),
    "netlink": tries("import socket\nsocket.socket(16, socket.SOCK_RAW, 0)\ndone = True"),
    "vsock": tries("import socket\nsocket.socket(40, socket.SOCK_STREAM)\ndone = True"),
    "personality": call("135:92", "0xffffffff"),
    "the x32 ABI": tries("done = libc.syscall(ctypes.c_long((1 << 30) + 39)) > 0"),
}
OUTSIDE = {
    "reads a file of the machine": tries("done = bool(open('/etc/passwd').read())"),
    "reads /proc": tries("done = bool(os.listdir('/proc'))"),
    "writes beside itself": tries("open('/harness.py', 'w')\ndone = True"),
    "finds the tests": tries(
        "done = any(b'assert double(1)' in open(f'{top}/{name}', 'rb').read() for top in ('/', "
        "'/isobit-work', '/tmp') for name in os.listdir(top) if name != 'program.py' and "
        "os.path.isfile(f'{top}/{name}'))"
    ),
    "connects": tries("import socket\nsocket.create_connection(('127.0.0.1', 22), 1)\ndone = True"),
    "finds other processes": tries(
        "others = [p for p in range(2, 400) if p != os.getpid() and not os.kill(p, 0)]\ndone = "
        "bool(others)"
    ),
}
HELPERS = {
    "sorted": "def sorted(*given, **named):\n    return [2, 4]\n" + WRONG,
    "abs, all, isinstance, set and str": "abs = lambda x: 0\nall = isinstance = lambda *given: "
    "True\n"
    "set = lambda x: {10}\nstr = lambda x: '8'\nrange = lambda *given: []\n" + WRONG,
    "builtins": "import builtins\nbuiltins.abs = lambda x: 0\n"
    "builtins.all = builtins.isinstance = lambda *given: True\n"
    "builtins.sorted = lambda x: [2, 4]\nbuiltins.range = lambda *given: []\n" + WRONG,
    "math": "import math\nmath.isclose = lambda *given, **named: True\n" + WRONG,
    "a false module math": "import sys, types\nfake = types.ModuleType('math')\nfake.isclose = "
    "lambda *given: True\n"
    "sys.modules['math'] = math = fake\n" + WRONG,
    "check": "def check(f):\n    pass\n" + WRONG,
    "AssertionError": "import builtins\nbuiltins.AssertionError = AssertionError = None\n" + WRONG,
    "an import hook": "import builtins\nbuiltins.__import__ = lambda *given: __builtins__\n"
    + WRONG,
    "the compiler": (
        "import builtins\nbuiltins.compile = lambda *given, **named: None\nbuiltins.exec = print\n"
    )
    + WRONG,
}
VALUES = {
    "equals everything": returns("Any()", EVERYTHING),
    "a class that equals everything": returns(
        "Any",
        "class Meta(type):\n    __eq__ = lambda self, other: True\n"
        "    __ne__ = lambda self, other: False\n    __hash__ = lambda self: 0\nclass "
        "Any(metaclass=Meta):\n    pass\n",
    ),
    "an int that equals everything": returns("N()", DERIVED.format(base="int")).replace(
        "N()", "N(77)"
    ),
    "a float that equals everything": returns("N(77.5)", DERIVED.format(base="float")),
    "a str that equals everything": returns("N('77')", DERIVED.format(base="str")),
    "a list that equals everything": returns("N([77])", DERIVED.format(base="list")),
    "in a list": returns("[Any()]", EVERYTHING),
    "unequal to nothing": returns("float('nan')"),
    "double is such an object": EVERYTHING
    + "Any.__call__ = lambda self, x: self\ndouble = Any()\n",
    "raises what passes": returns("fail()", "def fail():\n    raise StopIteration\n"),
    "a list without end": returns(
        "N()",
        "class N(list):\n    def __iter__(self):\n        i = 0\n        while i < 1000:\n"
        "            yield i\n            i += 1\n",
    ),
    "leaves": returns("leave()", "def leave():\n    raise SystemExit(0)\n"),
}
PROTOCOL = {
    "prints the tokens": RAW + "write(b''.join(b'%d\\n' % i for i in range(20)))\n" + WRONG,
    "writes to every descriptor": "import os\nfor n in range(64):\n    try:\n        "
    "os.write(n, b'0\\n1\\n2\\n3\\n')\n"
    "    except OSError:\n        pass\nos._exit(0)",
    "closes everything": "import os\nos.closerange(0, 64)\n" + WRONG,
    "searches its process": SEARCH,
    "a length of 16 EB": RAW + "write(b'\\xff' * 8 + b'[]')\n" + WRONG,
    "depth": RAW + "write((200000).to_bytes(8, 'big') + b'[' * 200000)\n" + WRONG,
    "an unknown class": SAYS.format(
        reply="{'value': {'dict': [['double', {'os.system': 'true'}]]}}"
    ),
    "answers itself with a Remote": SAYS.format(reply="{'value': {'object': 0}}"),
    "a class for a function": SAYS.format(
        reply="{'value': {'dict': [['double', {'type': 'bool'}]]}}"
    ),
    "the tests' own module": SAYS.format(
        reply="{'value': {'dict': [['double', {'module': '__main__'}]]}}"
    ),
    "calls back what was not given": SAYS.format(reply="{'call': 0, 'arguments': [], 'named': {}}"),
    "other names than asked": SAYS.format(
        reply="{'value': {'dict': [['abs', {'object': 0}], ['check', {'type': 'str'}], ['sorted', "
        "{'type': 'list'}], ['math', {'object': 1}], ['__builtins__', {'dict': []}]]}}"
    ),
    "says yes to every question": ANSWERS + WRONG + YES + "answer_all(yes)\n",
    "raises AssertionError": SAYS.format(
        reply="{'raise': ['AssertionError', []], 'class': 0, 'name': 'x'}"
    ),
    "raises no exception": SAYS.format(reply="{'raise': ['int', [0]], 'class': None, 'name': 'x'}"),
}
TAKES = {
    "never ends": "while True:\n    pass\n",
    "sleeps in a test": "import time\ndef double(x):\n    time.sleep(60)\n",
    "a fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n  "
    "      pass\n",
    "memory": "hoard = []\nwhile True:\n    hoard.append(bytearray(1 << 20))\n",
    "an answer of 300 MB": returns("'a' * (300 << 20)"),
    "files": "import os\nfor i in range(100):\n    open(str(i), 'wb').write(bytes(1 << 20))\n"
    + WRONG,
}
FAMILIES = {
    "signals": SIGNALS,
    "calls": CALLS,
    "outside": OUTSIDE,
    "helpers": HELPERS,
    "values": VALUES,
    "protocol": PROTOCOL,
    "takes": TAKES,
}
ANSWERS_RIGHT = """
def right(request):
    if request["do"] == "names":
        return {"value": {"dict": [["double", {"object": 0}]]}}
    return {"value": 2 * request["arguments"][1]}
answer_all(right)
"""
HONEST = {
    "signals": (
        "import os, signal\nsignal.signal(10, lambda *given: None)\nos.kill(os.getpid(), 10)\n"
    )
    + GOOD,
    "calls": "import subprocess, sys, threading, socket, os\nthread = "
    "threading.Thread(target=print)\nthread.start()\n"
    "thread.join()\nassert subprocess.run([sys.executable, '-S', '-c', 'pass']).returncode == 0\n"
    "socket.socketpair()\n" + GOOD,
    "outside": "open('a', 'w').write('b')\nassert open('a').read() == 'b'\n" + GOOD,
    "helpers": "def sorted(x):\n    return x\ndef check(x):\n    return 2 * x\ndef double(x):\n "
    "   return check(x)\n",
    "values": "class Int(int):\n    pass\nclass Double:\n    def __call__(self, x):\n        "
    "return int(Int(2 * x))\n"
    "double = Double()\n",
    "protocol": "print('0 1 2 3')\n" + ANSWERS + WRONG + ANSWERS_RIGHT,
    "takes": "data = bytearray(100 << 20)\n" + GOOD,
}
STDIN = {
    "kills its group": "import os\nos.kill(0, 9)",
    "interrupts the first process": "import os\nos.kill(1, 2)\ninput()",
    "stays for the next run": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    "
    "time.sleep(1)\n    print(6)\n",
    "prints without end": "while True:\n    print('4')\n",
    "reads what is expected": "import os\nfor n in range(64):\n    try:\n        os.lseek(n, 0, "
    "0)\n"
    "        print(os.read(n, 99))\n    except OSError:\n        pass\n",
}
