"""GRPO by Tinker's client against a local server, with a reward for short answers.

    isobit serve MODEL --train --token serve.token
    python examples/tinker_grpo.py http://127.0.0.1:8000 serve.token 10

Each step prints the mean reward, and how many log-probabilities of sampled tokens differ in any bit
between sampling and training. At the end the adapter is saved, and its path is printed.
"""

import sys
from pathlib import Path

import numpy as np
import tinker
from tinker import types

PROMPTS = [f"Say something short about {thing}." for thing in ("rain", "bread", "the sea", "foxes")]
GROUP, LONGEST = 16, 24


def main(url: str, token: str, steps: str = "10") -> None:
    key = Path(token).read_text().split()[0]
    offered = tinker.RestClient(base_url=url, api_key=key).get_server_capabilities().result()
    base = offered.supported_models[0].model_name
    service = tinker.ServiceClient(base_url=url, api_key=key)
    policy = service.create_lora_training_client(base_model=base, rank=8, seed=0).result()
    prompts = [policy.get_tokenizer().encode(text) for text in PROMPTS]
    for step in range(int(steps)):
        sampler = policy.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=LONGEST, seed=step)
        sent = [types.ModelInput.from_ints(prompt) for prompt in prompts]
        groups = [
            sampler.sample(prompt=one, num_samples=GROUP, sampling_params=params) for one in sent
        ]
        data, sampled, rewards = [], [], []
        for prompt, group in zip(prompts, groups, strict=True):
            answers = group.result().sequences
            scores = np.array([1 - len(one.tokens) / LONGEST for one in answers])
            rewards += scores.tolist()
            advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
            for one, advantage in zip(answers, advantages, strict=True):
                untrained = [0.0] * (len(prompt) - 1)  # the prompt's own tokens
                inputs = {
                    "target_tokens": [*prompt[1:], *one.tokens],
                    "logprobs": np.float32([*untrained, *one.logprobs]),
                    "advantages": np.float32([*untrained, *[advantage] * len(one.tokens)]),
                }
                tokens = types.ModelInput.from_ints([*prompt, *one.tokens[:-1]])
                data.append(types.Datum(model_input=tokens, loss_fn_inputs=inputs))
                sampled.append(np.float32(one.logprobs))
        trained = policy.forward_backward(data, "importance_sampling")
        policy.optim_step(types.AdamParams(learning_rate=2e-3)).result()
        found = [datum["logprobs"].to_numpy() for datum in trained.result().loss_fn_outputs]
        again = [new[-len(old) :] for new, old in zip(found, sampled, strict=True)]
        old, new = np.concatenate(sampled), np.concatenate(again)
        differ = int((old.view(np.int32) != new.view(np.int32)).sum())
        print(
            f"step {step}  reward {np.mean(rewards):.3f}  differ {differ} of {len(old)}", flush=True
        )
    print("saved", policy.save_weights_for_sampler("short").result().path)


if __name__ == "__main__":
    main(*sys.argv[1:])
