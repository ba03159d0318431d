"""Opens the engines of `peers/` as contestants: processes that load the model and sample once for
each line that they read. Only those are there whose interpreter a variable names."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True)
class Kind:
    """A peer: what tables call it, its script, the variable with its interpreter, and what it is
    told beside the model."""

    name: str
    script: str
    variable: str
    given: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


VLLM = Kind(
    "vLLM CPU bfloat16", "vllm_cpu.py", "VLLM_PYTHON",
    environment={
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR", "KMP_BLOCKTIME": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    },
)  # fmt: skip
LLAMACPP = tuple(
    Kind(f"llama.cpp {form}", "llamacpp.py", "LLAMACPP_PYTHON", {"form": form})
    for form in ("Q8_0", "Q4_0")
)
KINDS = (VLLM, *LLAMACPP)


class Peer:
    """A process that has loaded the model. A call returns when it has sampled all tokens."""

    def __init__(self, name: str, process: "subprocess.Popen[str]", tokens: int) -> None:
        self._name, self._process, self._tokens = name, process, tokens
        self._answer("ready")

    def __call__(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("generate\n")
        self._process.stdin.flush()
        self._answer(str(self._tokens))

    def _answer(self, wanted: str) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("isobit: "):
                assert line.split()[1] == wanted, f"{self._name}: {line}"
                return
        raise RuntimeError(f"{self._name} ended; its messages are above")


@contextmanager
def peers(
    model: Path, prompts: list[list[int]], new: int, kinds: Sequence[Kind] = KINDS
) -> Iterator[dict[str, Peer]]:
    """By name, those of `kinds` whose interpreter is named."""
    with ExitStack() as stack:
        yield {
            kind.name: stack.enter_context(_peer(kind, model, prompts, new))
            for kind in kinds
            if kind.variable in os.environ
        }


@contextmanager
def _peer(kind: Kind, model: Path, prompts: list[list[int]], new: int) -> Iterator[Peer]:
    threads = torch.get_num_threads()
    surroundings = {
        **os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": str(threads), **kind.environment,
    }  # fmt: skip
    given = {"model": str(model), "prompts": prompts, "new": new, "threads": threads, **kind.given}
    command = [os.environ[kind.variable], str(Path(__file__).parent / "peers" / kind.script)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=surroundings
    ) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(given) + "\n")
        process.stdin.flush()
        try:
            yield Peer(kind.name, process, len(prompts) * new)
        finally:
            process.stdin.close()
            process.terminate()
