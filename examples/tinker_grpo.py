"""GRPO by Tinker's client against a local server, with a reward for short answers.

isobit serve MODEL --train --token serve.token
python examples/tinker_grpo.py http://127.0.0.1:8000 serve.token 10
"""

import sys
from pathlib import Path

import numpy as np
import tinker
from tinker import types

THINGS = ("rain", "bread", "the sea", "foxes")
GROUP, LONGEST = 16, 24


def main(url: str, token: str, steps: str = "10") -> None:
    key = Path(token).read_text().split()[0]
    rest = tinker.RestClient(base_url=url, api_key=key)
    base = rest.get_server_capabilities().result().supported_models[0].model_name
    service = tinker.ServiceClient(base_url=url, api_key=key)
    policy = service.create_lora_training_client(base_model=base, rank=8, seed=0).result()
    tokenizer = policy.get_tokenizer()
    prompts = [tokenizer.encode(f"Say something short about {one}.") for one in THINGS]
    for step in range(int(steps)):
        sampler = policy.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=LONGEST, seed=step)
        sent = [types.ModelInput.from_ints(prompt) for prompt in prompts]
        groups = [sampler.sample(prompt, GROUP, params) for prompt in sent]
        data, sampled, rewards = [], [], []
        for prompt, group in zip(prompts, groups, strict=True):
            answers = group.result().sequences
            scores = np.array([-len(tokenizer.decode(one.tokens)) for one in answers])
            rewards += scores.tolist()
            advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
            for one, advantage in zip(answers, advantages, strict=True):
                given = [0.0] * (len(prompt) - 1)  # the prompt is not trained on
                inputs = {
                    "target_tokens": [*prompt[1:], *one.tokens],
                    "logprobs": np.float32([*given, *one.logprobs]),
                    "advantages": np.float32([*given, *[advantage] * len(one.tokens)]),
                }
                tokens = types.ModelInput.from_ints([*prompt, *one.tokens[:-1]])
                data.append(types.Datum(model_input=tokens, loss_fn_inputs=inputs))
                sampled.append(np.float32(one.logprobs))
        trained = policy.forward_backward(data, "importance_sampling")
        policy.optim_step(types.AdamParams(learning_rate=2e-3)).result()
        found = [one["logprobs"].to_numpy() for one in trained.result().loss_fn_outputs]
        again = [new[-len(old) :] for new, old in zip(found, sampled, strict=True)]
        old, new = np.concatenate(sampled), np.concatenate(again)
        differ = int((old.view(np.int32) != new.view(np.int32)).sum())
        reward = np.mean(rewards)
        print(f"step {step}  reward {reward:.2f}  {differ} of {len(old)} differ")
    print("saved", policy.save_state("short").result().path)


if __name__ == "__main__":
    main(*sys.argv[1:])
