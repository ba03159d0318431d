"""Chat templates, rendered in a separate process (`template_child.py`), which is started with
the first one.

A template that takes too long or too much memory ends that process, and is an `IsobitError` here;
the next one gets a new process. One process serves all threads, in turn. A forked copy of this
process starts its own. A template's `strftime_now` says the time that the caller gives, so that a
conversation has one rendering.
"""

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from isobit.errors import IsobitError

_CHILD = Path(__file__).with_name("template_child.py")
CPU_SECONDS = 5  # of a request
# of a request, where the machine has no time for it; its own computing is bounded in the child
_WALL_SECONDS = 60.0
_MOST_TEMPLATES = 32
_NAME = "the model's chat template"
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # some templates know this one of transformers
Messages = Sequence[Mapping[str, Any]]


class TookTooMuch(IsobitError):
    """A template exceeded a limit."""


class _Renderer:
    """The process, and the templates that it has compiled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._numbers: dict[str, int] = {}

    def render(
        self, template: str, variables: Mapping[str, Any] | None, now: datetime | None = None
    ) -> str:
        """Return the rendered text; with no variables the template is only compiled. Raises
        IsobitError."""
        with self._lock:
            process = self._ready()
            if template not in self._numbers:
                self._ask(process, {"template": template})
                self._numbers[template] = len(self._numbers)
            if variables is None:
                return ""
            moment = None if now is None else now.isoformat()
            return self._ask(
                process, {"number": self._numbers[template], "variables": variables, "now": moment}
            )

    def close(self) -> None:
        """End the process that renders."""
        process, self._process, self._numbers = self._process, None, {}
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()

    def _ready(self) -> "subprocess.Popen[bytes]":
        gone = (
            self._process is None or self._owner != os.getpid() or self._process.poll() is not None
        )
        if gone or len(self._numbers) >= _MOST_TEMPLATES:
            self.close()
            command = [sys.executable, "-I", "-B", str(_CHILD), json.dumps(sys.path)]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for this process
                )
            except OSError as error:
                raise IsobitError(
                    f"{_NAME} cannot be rendered: no process for it: {error.strerror}"
                ) from None
            self._owner = os.getpid()
        assert self._process is not None
        return self._process

    def _ask(self, process: "subprocess.Popen[bytes]", request: Mapping[str, Any]) -> str:
        assert process.stdin is not None
        try:
            line = (
                json.dumps({**request, "seconds": CPU_SECONDS}, default=_mapping).encode() + b"\n"
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise IsobitError(
                f"a chat's messages must be plain text, numbers and lists: {str(error)[:200]}"
            ) from None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            received = _line(process)
        except BrokenPipeError:
            received = b""
        except BaseException:  # an interruption: what it still writes answers no later request
            self.close()
            raise
        if not received.endswith(b"\n"):
            waited = process.poll() is None
            self.close()
            limit = (
                f"{_WALL_SECONDS:g} seconds"
                if waited
                else f"{CPU_SECONDS} seconds of computing, or crashed"
            )
            raise TookTooMuch(
                f"{_NAME} took more than {limit}; expected one that renders a conversation at once"
            )
        reply = json.loads(received)
        if "text" in reply:
            return str(reply["text"])
        if "syntax" in reply:
            raise IsobitError(f"{_NAME} cannot be parsed: {reply['syntax']}")
        if "limit" in reply:
            raise TookTooMuch(f"{_NAME} took more than {reply['limit']} for a conversation")
        done = "refused a conversation" if "number" in request else "cannot be parsed"
        raise IsobitError(f"{_NAME} {done}: {reply['reason']}")


def _line(process: "subprocess.Popen[bytes]") -> bytes:
    """Return the bytes that the process writes up to the end of a line; without its newline where
    the process ended or took too long."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    chunks = list[bytes]()
    until = time.monotonic() + _WALL_SECONDS
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while not (chunks and chunks[-1].endswith(b"\n")):
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            break
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            process.wait()
            break
        chunks.append(chunk)
    return b"".join(chunks)


def _mapping(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is none of them")


_RENDERER = _Renderer()
atexit.register(_RENDERER.close)


def check_template(template: str) -> None:
    """Raise IsobitError unless the template can be compiled."""
    _RENDERER.render(template, None)


def render(template: str, variables: Mapping[str, Any], now: datetime) -> str:
    """Return the text of a template with these variables, which JSON can write, at a time. Raises
    IsobitError for what it refuses, for one that cannot be compiled, and for one that exceeds the
    limits."""
    return _RENDERER.render(template, variables, now)


def continued(messages: Messages, write: Callable[[Messages], str]) -> str:
    """Return a conversation up to the end of its last message, which the model goes on with:
    without the text that the template writes behind it, as `continue_final_message` of
    transformers. `write` renders messages. Raises IsobitError where the template changes that
    message."""
    if messages[-1].get("tool_calls"):
        raise IsobitError(
            "the prompt ends with a call of a tool, which nothing answers; end with the tool's message"
        )
    text, tagged = _tagged(messages[-1].get("content"))
    if text is None:
        raise IsobitError(
            "the prompt ends with an assistant's message without text, and so with nothing to "
            "continue"
        )
    rendered = write([*messages[:-1], {**messages[-1], "content": tagged}])
    if text.strip() not in rendered or _TAG.strip() not in rendered:
        raise IsobitError(
            f"the prompt ends with an assistant's message, which {_NAME} does not write as it is, "
            "so that the model cannot continue it; end with another message"
        )
    cut = rendered.rindex(_TAG.strip())
    # where the space is gone, the template took away all space at the message's end
    return rendered[:cut] if rendered.startswith(_TAG, cut) else rendered[:cut].rstrip()


def _tagged(content: Any) -> tuple[str | None, Any]:
    """Return the text that a message ends with, and its content with a tag behind that."""
    if isinstance(content, str):
        return content, content + _TAG
    blocks = list(content) if isinstance(content, (list, tuple)) else []
    for index in reversed(range(len(blocks))):
        if isinstance(blocks[index], Mapping) and isinstance(
            text := blocks[index].get("text"), str
        ):
            blocks[index] = {**blocks[index], "text": text + _TAG}
            return text, blocks
    return None, content
