"""Run the cases, each in a fork of one warm process: its exit code is right, it says one line and
that one says what is wrong; no traceback, no line twice, nothing silent."""

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from isobit.cli import main as isobit
from isobit.data.turns import Call, Turn
from isobit.engine import dialogue
from isobit.tasks.environments import pool
from isobit.tasks.workers import dispatch
from tests.environments.test_runs import CHARACTERS, TEMPLATE
from tests.models import tiny_model

from .cases import CASES, Case

_LONGEST_S = 300
_PASSED_OVER = re.compile(
    r"(native|reference) backend|report: |certificate of|step 1/1 |no group had a spread|"
    r"every completion in every step|environment: waiting for|a pipe of this process|warning: there is one|\s*$"
)
_HEAD = "import asyncio, os, signal, sys, time, types\nfrom isobit.data.turns import Step\n"
_GAME = '''
class Game:
    def __init__(self):
        {init}

    def reset(self, target, **columns):
        {reset}

    def add(self, n: int):
        """Add.

        Args:
            n: How much.
        """
        {tool}

    def get_reward(self):
        {reward}
'''
_STEP = """
class Game:
    def reset(self, **columns):
        pass

    async def step(self, turn):
        {step}
"""
_SERVER = """
import json, os, sys
hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {}}
tools = [{"name": "add", "inputSchema": {"type": "object", "properties": {}}}]
listed = {"tools": tools}
for line in sys.stdin:
    m = json.loads(line)
    if "id" not in m:
        continue
    def say(result=None, error=None):
        answer = {"error": error} if error else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": m["id"], **answer}), flush=True)
    first = m["method"] == "initialize"
    {body}
"""


def written(case: Case, folder: Path) -> list[str]:
    """Write a case's files; the changes of its config."""
    indented = textwrap.indent(case.body, "        ").strip()
    bodies = {"init": "pass", "reset": "pass", "tool": "return n", "reward": "return 1.0"}
    code, changes = _GAME.format(**bodies), list(case.changes)
    if case.where in bodies:
        code = _GAME.format(**{**bodies, case.where: indented})
    elif case.where == "step":
        code = _STEP.format(step=indented)
    if case.where == "mcp":
        body = textwrap.indent(case.body, "    ").strip()
        (folder / "game_server.py").write_text(_SERVER.replace("{body}", body))
        command = f"{sys.executable} {folder}/game_server.py"
        changes += ["environment.factory=null", f"environment.mcp=['{command}']"]
        changes += ["rewards.functions=[{function: format, options: {pattern: a}}]"]
    text = case.body if case.where == "file" else _HEAD + code
    (folder / "game.py").write_text(text)
    rows = [json.dumps({"prompt": "Play" + "!" * i, "target": i}) for i in range(2)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    values: dict[str, Any] = {
        "model": {"path": "../model", "chat_template": "../chat.jinja"},
        "task": {"path": "rows.jsonl", "chat": True, "held_out_size": 0},
        "environment": {"factory": "game.py:Game", "max_turns": 3, "max_tokens": 450},
        "sampling": {"group_size": 2, "max_new_tokens": 4},
        "prompts_per_step": 2,
        "optimizer": {"learning_rate": 1e-5},
        "run": {"dir": "run", "report": False},
        "steps": 1,
    }
    values["environment"] |= {"turn_deadline_s": 1.0}
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return changes


def _calls_add(number: int, *_: object) -> Turn:
    """What a model says that calls the tool in each turn."""
    return Turn(number, "text", "", (Call("add", '{"n": 1}'),))


def _run(case: Case, folder: Path) -> None:
    """In the fork: the command, with short deadlines."""
    os.setsid()
    torch.set_num_threads(1)  # a fork has none of the threads that the parent may have used
    os.chdir(folder)
    output = os.open("OUT", os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
    pool.GRACE_S = 0.5
    pool.START_DEADLINE_S = dispatch.START_DEADLINE_S = 2.0
    if case.where in ("tool", "mcp"):
        dialogue.turn_of = _calls_add
    sys.argv = ["isobit", "train", "run.yaml", *written(case, folder)]
    code: object = 70
    try:
        code = isobit()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)


def outcome(case: Case, root: Path) -> tuple[str, str]:
    """(what is wrong with what a case gave, or nothing; its line)."""
    folder = root / re.sub(r"\W", "_", case.name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    child = os.fork()
    if child == 0:
        _run(case, folder)
    end, ended, status = time.monotonic() + _LONGEST_S, 0, 0
    while not ended and time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if not ended:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return f"hangs for {_LONGEST_S} s", ""
    code = os.waitstatus_to_exitcode(status)
    text = (folder / "OUT").read_text(errors="replace")
    lines = [line for line in text.splitlines() if not _PASSED_OVER.match(line)]
    line = " | ".join(lines)
    if "Traceback" in text:
        return "a traceback", line
    if code != case.code:
        return f"ended with {code}, expected {case.code}", line
    if len(lines) != len(set(lines)) or not lines:
        return f"{len(lines)} lines", line
    if len(lines) > 1 and not all(each.startswith("unscored: ") for each in lines[:-1]):
        return f"{len(lines)} lines, expected one", line
    if case.says not in line or len(line) > 1400:
        return f"does not say {case.says!r}", line
    if code and not lines[-1].startswith("isobit: "):
        return "is not an error of the command", line
    return "", line


def prepare(root: Path) -> None:
    """Write what all cases share."""
    tiny_model(alphabet=CHARACTERS + "±", scale=2.0, max_positions=512).save(root / "model")
    (root / "chat.jinja").write_text(TEMPLATE)


def main() -> int:
    """Print the table; how many cases are not as they should be."""
    torch.set_num_threads(1)
    chosen = [case for case in CASES if not sys.argv[1:] or case.name in sys.argv[1:]]
    assert len({case.name for case in CASES}) == len(CASES)
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        prepare(root)
        for case in chosen:
            problem, line = outcome(case, root)
            wrong += bool(problem)
            print(f"{case.name}: {line}", flush=True)
            if problem:
                print(f"    WRONG: {problem}", flush=True)
    print(f"{len(chosen)} environments, {wrong} not as they should be")
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(), 99))
