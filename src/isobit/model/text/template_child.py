"""The process that renders chat templates: jinja2's sandbox under limits of the operating system.

A template is a program of the model's maker, and the sandbox bounds neither its time nor its
memory: so it is compiled and run here, in `MEMORY_BYTES` and the seconds of computing that each
request may take, after which the kernel ends this process. One JSON object a line comes in and goes
out (`chat.py` is the other side). Imports nothing of isobit, whose parts load torch.
"""

import json
import sys

if __name__ == "__main__":
    sys.path[:] = json.loads(
        sys.argv[1]
    )  # the parent's, which an isolated interpreter does not have

import resource
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 1 << 29
MOST_CHARACTERS = 1 << 25


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`, with which some templates mark the assistant's
    text: rendered as is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> jinja2.Environment:
    """Return the jinja2 environment that `transformers` gives a chat template."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", GenerationBlock],
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_template_error
    return made


def answer(request: dict[str, Any], compiled: list[jinja2.Template]) -> dict[str, Any]:
    """Return the reply to one request: `template`, a text to compile, or `number`, the one of those
    to render with `variables` at the time `now`. It is a text, or the reason why there is none."""
    try:
        if "template" in request:
            compiled.append(environment().from_string(request["template"]))
            return {"text": ""}
        now = datetime.fromisoformat(request["now"])
        variables = {"strftime_now": lambda form: now.strftime(form), **request["variables"]}
        text = compiled[request["number"]].render(**variables)
    except jinja2.TemplateSyntaxError as error:
        return {"syntax": f"{(error.message or '')[:300]} (line {error.lineno})"}
    except MemoryError:
        return {"limit": f"{MEMORY_BYTES >> 20} MiB of memory"}
    except RecursionError:
        return {"reason": "it is nested too deeply, or calls itself without end"}
    except Exception as error:  # a template, and what compiles it, may raise anything
        return {"reason": " ".join(str(error).split())[:1000] or type(error).__name__}
    return (
        {"text": text}
        if len(text) <= MOST_CHARACTERS
        else {"limit": f"{MOST_CHARACTERS:,} characters"}
    )


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return the filter that chat templates expect: unlike jinja2's own, it does not escape for
    HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    with suppress(ValueError, OSError):  # macOS has no limit of memory; that of time holds there
        resource.setrlimit(
            kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
        )


def _serve(read: Callable[[], bytes], write: Callable[[bytes], Any]) -> None:
    compiled: list[jinja2.Template] = []
    _limit(resource.RLIMIT_CORE, 0)
    while line := read():
        request = json.loads(line)
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + request["seconds"])
        _limit(resource.RLIMIT_AS, MEMORY_BYTES)
        reply = answer(request, compiled)
        _limit(resource.RLIMIT_AS, 2 * MEMORY_BYTES)  # so that the reply can be written
        write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve(sys.stdin.buffer.readline, sys.stdout.buffer.write)
