"""The cases: a name, where its code stands, the code, and what the line must say.

`init`, `reset`, `reward` and `tool` are bodies of methods of a TRL environment, whose tool the model
calls in each turn; `step` is that of an `Environment` of one's own; `file` is a whole file with a
`Game`; `mcp` what a server does with a request `m`; `config` changes of the config alone.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """`code` 2: refused before anything is written; 1: the run ended; 0: it went on, and said so."""

    name: str
    where: str
    body: str
    says: str
    code: int = 1
    changes: tuple[str, ...] = ()


def _of(where: str, code: int, *rows: Any) -> list[Case]:
    return [Case(row[0], where, row[1], row[2], code, tuple(row[3:])) for row in rows]


_WRITES = """for fd in range(3, 30):
    try: os.write(fd, b"{}\\n")
    except OSError: pass
"""
_TOOL = '''
    def add(self, n: int) -> int:
        """Add.

        Args:
            n: How much.
        """
        {}
'''
_SAY = '{"role": "user", "content": "No"}'

LOADED = _of(
    "file",
    2,
    ("no such class", "class Gaem: ...", "has no factory 'Game'; did you mean 'Gaem'?"),
    ("syntax error", "class Game", "SyntaxError: expected ':' (game.py, line 1)"),
    ("module missing", "import gymnasium_gone", "No module named 'gymnasium_gone' (game.py, line 1)"),
    ("name missing", "Game = Gmae", "NameError: name 'Gmae' is not defined (game.py, line 1)"),
    ("no reset", "class Game: ...", "Game has no method reset; it begins an episode"),
    ("an instance", "class A:\n    def reset(self, **c): ...\nGame = A()", "expected a class, a"),
    ("a number", "Game = 3", "expected a class, a function or a dict of them by names; it is int"),
    ("an empty dict", "Game = {}", "a dict without environments"),
    ("makes nothing", "def Game(): return None", "NoneType has no method reset"),
    ("makes itself", "def Game(): return Game", "function has no method reset"),
    ("a tool without words", "class Game:\n    def reset(self, **c): ...\n    def a(self): ...",
     "its method 'a' has no docstring"),
    ("a tool without types", "class Game:\n    def reset(self, **c): ..." + _TOOL.format("pass")
     .replace("n: int", "n"), "its argument 'n' has no type"),
    ("an argument undescribed", "class Game:\n    def reset(self, **c): ..." + _TOOL.format("pass")
     .replace("n: How", "m: How"), "its docstring does not describe 'n'"),
    ("a type JSON lacks", "class Game:\n    def reset(self, **c): ..." + _TOOL.format("pass")
     .replace("n: int", "n: set"), "JSON has no type set"),
    ("a type unknown", "class Game:\n    def reset(self, **c): ..." + _TOOL.format("pass")
     .replace("n: int", "n: 'Gone'"), "its types cannot be read: name 'Gone' is not defined"),
    ("step of two arguments", "class Game:\n    def reset(self, **c): ...\n"
     "    async def step(self, action, info): ...", "its method 'step' has no docstring"),
    ("exits when imported", "import os\nos._exit(3)", "ended with exit code 3 while it was loaded"),
    ("sys.exit when imported", "import sys\nsys.exit(4)", "SystemExit: 4 (game.py, line 2)"),
    ("killed when imported", "import os\nos.kill(os.getpid(), 9)", "was killed by SIGKILL while"),
    ("hangs when imported", "import time\ntime.sleep(600)", "environment.factory was not loaded wi"),
    ("recurses when imported", "def f(): f()\nf()", "RecursionError: maximum recursion depth"),
    ("writes into pipes when imported", f"import os\n{_WRITES}", "wrote what is not a reply into"),
    ("variable missing when imported", "import os\nos.environ['GAME_KEY_GONE']",
     "GAME_KEY_GONE is not set: set it, and name it in environment.variables"),
    ("lower-case variable missing", "import os\nos.environ['game_url_gone']",
     "game_url_gone is not set: set it, and name it in environment.variables"),
)  # fmt: skip

MADE = _of(
    "init",
    2,
    ("init raises", "raise OSError('no database')", "OSError: no database (game.py, line"),
    ("init without attribute", "self.gone", "AttributeError: 'Game' object has no attribute 'gone'"),
    ("init exits", "os._exit(5)", "ended with exit code 5 while it was loaded"),
    ("init hangs", "time.sleep(600)", "environment.factory"),
    ("init hangs later", "self.reset = None", "Game has no method reset"),
    ("init raises at length", "raise ValueError('x ' * 500_000)", "ValueError: x x x"),
    ("init raises what cannot be said", "class E(Exception):\n    __str__ = lambda self: 1 / 0\n"
     "raise E", "exception str() failed"),
    ("variable missing in init", "os.environ['GAME_KEY_GONE']", "GAME_KEY_GONE is not set: set it"),
)  # fmt: skip

BEGUN = _of(
    "reset",
    2,
    ("reset raises", "raise RuntimeError('server is down')", "reset: RuntimeError: server is down"),
    ("reset returns int", "return 3", "returned int; expected text, messages or None"),
    ("reset returns dict", "return {}", "returned dict; expected text, messages or None"),
    ("reset returns bytes", "return b'Go'", "returned bytes; expected text, messages or None"),
    ("reset returns a generator", "return (x for x in 'ab')", "returned generator; expected text"),
    ("reset returns texts", "return ['Go', 'on']", "its messages[0] is str, expected a message"),
    ("reset without role", "return [{'content': 'a'}]", "its messages[0] has no role, expected sys"),
    ("reset without content", "return [{'role': 'user'}]", "its messages[0] has no content"),
    ("reset of another role", "return [{'role': 'usr', 'content': 'a'}]", "has the role 'usr', exp"),
    ("reset of many messages", f"return [{_SAY}] * 257", "257 messages, the most are 256"),
    ("reset of long messages", "return [{'role': 'user', 'content': 'a' * 32000}] * 9",
     "messages of 288,279 characters, the most are 262,144"),
    ("reset hangs", "time.sleep(600)", "reset: no result in time: it has not come back"),
    ("reset awaits for ever", "return asyncio.sleep(600)", "reset: no result in time"),
    ("reset exits", "os._exit(6)", "its process ended with exit code 6"),
    ("reset raises SystemExit", "sys.exit(7)", "reset: SystemExit: 7 (game.py, line"),
    ("reset is killed", "os.kill(os.getpid(), signal.SIGKILL)", "its process was killed by SIGKILL"),
    ("reset stops its process", "os.kill(os.getpid(), signal.SIGSTOP)", "did not answer within 1.5"),
    ("reset interrupts", "raise KeyboardInterrupt", "reset: KeyboardInterrupt (game.py, line"),
    ("reset cancels", "raise asyncio.CancelledError", "reset: asyncio.exceptions.CancelledError"),
    ("reset lacks a name", "return gaol", "reset: NameError: name 'gaol' is not defined"),
    ("reset lacks an attribute", "return self.gaol", "no attribute 'gaol' (game.py, line"),
    ("reset lacks a module", "import gone_module", "No module named 'gone_module' (game.py, line"),
    ("reset lacks a key", "return columns['goal']", "reset: KeyError: 'goal' (game.py, line"),
    ("reset adds text and number", "return 'Count to ' + target", "TypeError: can only concatenate"),
    ("reset lacks a variable", "os.environ['GAME_KEY_GONE']",
     "GAME_KEY_GONE is not set: set it, and name it in environment.variables"),
    ("reset wraps a missing variable", "try: os.environ['GAME_KEY_GONE']\n"
     "except KeyError: raise RuntimeError('no connection')", "GAME_KEY_GONE is not set: set it"),
    ("reset recurses", "return self.reset(target, **columns)", "RecursionError: maximum recursion"),
    ("reset has no memory", "raise MemoryError", "reset: MemoryError (game.py, line"),
    ("reset writes into pipes", _WRITES, "wrote what is not a reply into the pipe of its replies"),
    ("reset closes everything", "os.closerange(3, 100)", "environment: its process "),
    ("reset starts what exits", "import threading\nthreading.Timer(0.01, os._exit, [8]).start()\n"
     "time.sleep(5)", "its process ended with exit code 8"),
)  # fmt: skip

BEGUN += _of(
    "reset",
    1,
    (
        "reset fills the context",
        "return 'a ' * 3000",
        "with what reset adds, the prompt has 6017 tok",
    ),
)
SIGNED = [
    Case("reset takes another column", "file", "class Game:\n    def reset(self, goal, **c): ...\n"
         "    def get_reward(self): return 0.0", "missing a required argument: 'goal'; it is", 2),
    Case("reset takes no columns", "file", "class Game:\n    def reset(self): ...\n"
         "    def get_reward(self): return 0.0", "got an unexpected keyword argument 'prompt'", 2),
    Case("reset takes places", "file", "class Game:\n    def reset(self, target, /): ...\n"
         "    def get_reward(self): return 0.0", "parameter is positional only, but was passed as a", 2),
    Case("no reward at all", "file", "class Game:\n    def reset(self, **c): ...", "no reward: give", 2),
]  # fmt: skip

STEPS = _of(
    "step",
    1,
    ("step returns text", "return 'No'", "returned str, expected a Step, such as"),
    ("step returns nothing", "pass", "returned NoneType, expected a Step, such as"),
    ("step returns Gymnasium's tuple", "return 'No', 0.5, False, False, {}", "returned tuple, expec"),
    ("step returns a class", "return Step", "returned type, expected a Step"),
    ("messages are text", "return Step('No', reward=0.5)", "its messages are str, expected a tuple"),
    ("messages are one", f"return Step({_SAY})", "its messages are dict, expected a tuple of messa"),
    ("messages are none", "return Step(None)", "its messages are NoneType, expected a tuple"),
    ("messages are a set", "return Step({'No'})", "its messages are set, expected a tuple"),
    ("a message is text", "return Step(('No',))", "its messages[0] is str, expected a message"),
    ("a message without role", "return Step(({'content': 'No'},))", "its messages[0] has no role"),
    ("a message of the assistant", "return Step(({'role': 'assistant', 'content': 'No'},))",
     "has the role 'assistant', expected tool or user"),
    ("a role that is a number", "return Step(({'role': 5, 'content': 'No'},))", "has the role 5, ex"),
    ("a message without content", "return Step(({'role': 'user'},))", "has no content, expected text"),
    ("a content of None", "return Step(({'role': 'user', 'content': None},))", "the content NoneType"),
    ("a content that is a function", "return Step(({'role': 'user', 'content': print},))",
     "has the content builtin_function_or_method, expected text"),
    ("a content that is an image", "return Step(({'role': 'user', 'content': [{'type': 'image'}]},))",
     "has the content list, expected text"),
    ("keys that are numbers", "return Step(({'role': 'user', 'content': 'No', 1: 2},))",
     "has keys that are not text"),
    ("a reward of text", "return Step(reward='1')", "its reward returned str '1', expected a finite"),
    ("a reward of a list", "return Step(reward=[1])", "its reward returned list, expected a finite"),
    ("done is text", "return Step(done='no')", "done is str 'no', expected True or False"),
    ("done is nothing", "return Step(done=None)", "done is NoneType None, expected True or False"),
    ("an argument that Step lacks", "return Step(terminated=True)", "argument 'terminated' (game.py"),
    ("step lacks a name", "return Setp()", "step: NameError: name 'Setp' is not defined"),
    ("step lacks an attribute", "return self.board", "object has no attribute 'board' (game.py"),
    ("step lacks a variable", "os.environ['GAME_KEY_GONE']", "GAME_KEY_GONE is not set: set it"),
    ("a reward that is no number", "return Step(reward=float('nan'))", "its reward returned nan, ex"),
    ("a reward without end", "return Step(reward=float('inf'))", "its reward returned inf, expected"),
    ("a reward that is huge", "return Step(reward=1e31)", "its reward returned 1e+31, expected"),
    ("a reward beyond float", "return Step(reward=10**400)", "its reward returned int 1000000000"),
    ("no reward ever", f"return Step(({_SAY},))", "no reward was given (Game said None)"),
    ("over without a reward", "return Step(done=True)", "no reward was given (Game said None)"),
    ("step raises", "raise KeyError('board')", "step: KeyError: 'board' (game.py, line"),
    ("step compares text and number", "return turn.text < 3", "TypeError: '<' not supported between"),
    ("step hangs", "time.sleep(600)", "did not answer within 1.5 s and was killed"),
    ("step awaits for ever", "await asyncio.sleep(600)", "step: no result in time"),
    ("step exits", "os._exit(9)", "its process ended with exit code 9"),
    ("step raises SystemExit", "sys.exit(3)", "step: SystemExit: 3 (game.py, line"),
    ("step is killed", "os.kill(os.getpid(), 11)", "its process was killed by SIGSEGV"),
    ("step stops its process", "os.kill(os.getpid(), signal.SIGSTOP)", "did not answer within 1.5"),
    ("step of 100,000 messages", f"return Step(({_SAY},) * 100_000, 1.0)", "100,000 messages, the m"),
    ("step of much text", "return Step(({'role': 'user', 'content': 'a' * 32_000},) * 9, 1.0)",
     "messages of 288,279 characters, the most are 262,144"),
    ("a message with a circle", "m = {'role': 'user', 'content': 'a'}\nm['m'] = m\n"
     "return Step((m,), 1.0)", "its messages[0] is not JSON: Circular reference detected"),
    ("a message that is deep", "m = []\nfor _ in range(100_000): m = [m]\n"
     "return Step(({'role': 'user', 'content': 'a', 'm': m},), 1.0)", "its messages[0] is not JSON"),
    ("a message with an object", "return Step(({'role': 'user', 'content': 'a', 'm': self},), 1.0)",
     "its messages[0] is not JSON: Object of type Game is not JSON serializable"),
    ("a message of 10 MB", "return Step(({'role': 'user', 'content': 'a', 'm': 'a' * 10**7},), 1.0)",
     "characters, the most are 262,144"),
    ("step writes into pipes", _WRITES, "wrote what is not a reply into the pipe of its replies"),
    ("step writes without end", "for fd in range(3, 30):\n    try:\n        if os.fstat(fd).st_mode "
     "& 0o10000: os.write(fd, b'[' * 60_000 + b'\\n')\n    except OSError: pass",
     "wrote what is not a reply into the pipe of its replies"),
    ("step closes everything", "os.closerange(3, 100)", "its process "),
)  # fmt: skip

REWARDS = _of(
    "reward",
    1,
    ("reward of text", "return 'good'", "returned str 'good', expected a finite number or None"),
    ("reward of a list", "return [1.0]", "returned list, expected a finite number or None"),
    ("reward of a dict", "return {'reward': 1}", "returned dict, expected a finite number or None"),
    ("reward of None", "return None", "no reward was given (Game said None)"),
    ("reward of NaN", "return float('nan')", "returned nan, expected a finite number or None"),
    ("reward beyond bounds", "return 1e38", "returned 1e+38, expected a number within ±1e+30"),
    ("reward raises", "return 1 / 0", "get_reward: ZeroDivisionError: division by zero (game.py"),
    ("reward lacks an attribute", "return self.scroe", "no attribute 'scroe' (game.py, line"),
    ("reward lacks a variable", "os.environ['GAME_KEY_GONE']", "GAME_KEY_GONE is not set: set it"),
    ("reward hangs", "time.sleep(600)", "get_reward: TimeoutError: no result in time"),
    ("reward exits", "os._exit(2)", "its process ended with exit code 2"),
)  # fmt: skip
REWARDS += [
    Case("reward takes an argument", "file", "class Game:\n    def reset(self, **c): ...\n"
         "    def get_reward(self, final): return 1.0", "missing a required argument: 'final'; it"),
    Case("function of another column", "file", "class Game:\n    def reset(self, **c): ...\n"
         "def judge(environments, goal, **c): return [1.0]", "has no column 'goal', which it takes",
         2, ("rewards.functions=[game.py:judge]",)),
    Case("function that raises", "file", "class Game:\n    def reset(self, **c): ...\n"
         "def judge(environments, **c): raise OSError('no judge')", "judge: OSError: no judge (game",
         1, ("rewards.functions=[game.py:judge]",)),
    Case("function of another length", "file", "class Game:\n    def reset(self, **c): ...\n"
         "def judge(environments, **c): return [1.0, 2.0]", "returned 2 values for 1 completion",
         1, ("rewards.functions=[game.py:judge]",)),
    Case("function of text", "file", "class Game:\n    def reset(self, **c): ...\n"
         "def judge(environments, **c): return ['good']", "returned str 'good', expected a finite",
         1, ("rewards.functions=[game.py:judge]",)),
]  # fmt: skip

TOOLS = _of(
    "tool",
    1,
    ("tool lacks a name", "return gone", "tool add: NameError: name 'gone' is not defined (game.py"),
    ("tool lacks an attribute", "return self.gone", "tool add: AttributeError: 'Game' object has no"),
    ("tool lacks a variable", "os.environ['GAME_KEY_GONE']", "GAME_KEY_GONE is not set: set it, and"),
    ("tool lacks a module", "import gone_module", "tool add: ModuleNotFoundError: No module named"),
) + _of(
    "tool",
    0,
    ("tool raises", "raise OSError('no shop')", "8 calls of step 1, and the model was told: OSError: no shop (game.py"),
    ("tool of wrong types", "return 'a' + n", "was told: TypeError: can only concatenate str (not"),
    ("tool with an address", "return [self]", "tool add says an address of memory ([<isobit_"),
    ("tool that cannot be shown", "return type('A', (), {'__str__': lambda s: 1 / 0})()",
     "TypeError: its result cannot be shown: ZeroDivisionError"),
)  # fmt: skip
TOOLS += _of(
    "tool",
    1,
    ("tool exits", "os._exit(4)", "its process ended with exit code 4"),
    ("tool hangs", "time.sleep(600)", "tool add: no result in time: it has not come back"),
    ("tool writes into pipes", _WRITES, "wrote what is not a reply into the pipe of its replies"),
)  # fmt: skip

SERVERS = _of(
    "mcp",
    2,
    ("server exits", "sys.exit(3)", "game_server.py': the server ended with exit code 3"),
    ("server is silent", "continue", "server_is_silent/game_server.py'"),
    ("server refuses", "say(error={'code': 1, 'message': 'no license'})", "': no license"),
    ("server lists no list", "say(hello if first else {'tools': 5})", "tools/list is not a list of"),
    ("server lists texts", "say(hello if first else {'tools': ['a']})", "tools/list is not a list of"),
    ("server's tools have no names", "say(hello if first else {'tools': [{}]})", "tools/list is not"),
    ("server lists without end", "say(hello if first else {'tools': tools * 99, 'nextCursor': 'a'})",
     "it lists more than 1,024 tools"),
    ("server answers deep", "print('[' * 100_000, flush=True)", "its answer cannot be read: it is n"),
    ("server answers a cut line", "print('{\"id\": 1, \"result\": {', flush=True)",
     "its answer cannot be read: Expecting property name"),
) + _of(
    "mcp",
    0,
    ("server fails each call", "say(hello if first else listed if m['method'] == 'tools/list' else "
     "None, {'code': 1, 'message': 'closed'} if m['method'] == 'tools/call' else None)",
     "was told: ServerError: closed"),
    ("server answers calls deep", "say(hello if first else listed) if m['method'] != 'tools/call' "
     "else print('{\"id\": ' + str(m['id']) + ', \"result\": ' + '[' * 100_000, flush=True)",
     "was told: ServerError: its answer cannot be read: it is nested too deep"),
    ("server dies in each call", "say(hello if first else listed) if m['method'] != 'tools/call' "
     "else os._exit(3)", "was told: ServerError: the server "),
)  # fmt: skip

_CLIENT = """
from types import SimpleNamespace
class Game:
    def _step_payload(self, action): ...
    def reset(self, **c):
        {}
    def step(self, action):
        return SimpleNamespace(observation={{"at": 1}}, reward=0.0, done=True)
"""
CLIENTS = _of(
    "file",
    2,
    ("OpenEnv's server is down", _CLIENT.format("raise ConnectionError('refused')"),
     "reset: ConnectionError: refused (game.py, line"),
    ("OpenEnv returns nothing", _CLIENT.format("return None"), "returned NoneType, expected a result with observation"),
    ("OpenEnv's result has no end", _CLIENT.format("return SimpleNamespace(observation='a')"),
     "returned SimpleNamespace, expected a result with"),
    ("OpenEnv's reward is text", _CLIENT.format(
        "return SimpleNamespace(observation='a', reward='x', done=False)"), "could not convert"),
    ("OpenEnv lists nothing", _CLIENT.format("...") + "    def list_tools(self): return []",
     "the server of Game has no tools"),
    ("OpenEnv lists texts", _CLIENT.format("...") + "    def list_tools(self): return ['a']",
     "list_tools of Game returned what are not tools"),
)  # fmt: skip

CONFIGS = _of(
    "config",
    2,
    ("no such file", "", "no file gone.py", "environment.factory=gone.py:Game"),
    ("no class named", "", "environment.factory 'game.py': expected path/to", "environment.factory=game.py"),
    ("no such parser", "", "environment.parser 'hermess'", "environment.parser=hermess"),
    ("not chats", "", "has a text as its prompt, and turns need chats", "task.chat=false"),
    ("no template", "", "chat template", "model.chat_template=gone.jinja"),
    ("no such program", "", "cannot be started: No such file", "environment.mcp=[no-such-program]"),
    ("an open quote", "", "cannot be started: No closing quotation", 'environment.mcp=["\'open"]'),
    ("a tool that is a class", "", "is not a function", "environment.tools=[game.py:Game]"),
    ("several, and no column", "", "no column 'environment', which chooses one of",
     "environment.factory={a: 'game.py:Game', b: 'game.py:Game'}"),
)  # fmt: skip

CASES = [
    *LOADED, *MADE, *BEGUN, *SIGNED, *STEPS, *REWARDS, *TOOLS, *SERVERS, *CLIENTS, *CONFIGS
]  # fmt: skip
