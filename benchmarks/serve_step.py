"""Seconds of a GRPO step by Tinker's client beside the same step of `isobit train`, in one process.

Both train an adapter of rank 8 on all projections under `fp8` (hidden 256, 4 layers): 32 prompts x
8 completions of 16 tokens, one optimizer step. A step by the client is all that its loop does:
snapshot, 32 samplings, rewards, advantages, `forward_backward`, `optim_step`; the client runs in
this process too, so its Python takes turns with the server's. Log-probabilities of sampling and of
training are compared in every step, on both sides. Both learners compute a prompt once for all its
completions; a second run does so for each. Left out: evaluation and saving.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks import rewards
from benchmarks.common import Claim, Result, race
from benchmarks.models import save_model
from benchmarks.serve import serving
from isobit.config import load_config
from isobit.model import Model
from isobit.model.adapters.targets import NewAdapter
from isobit.serve.state.state import State
from isobit.training.loop import training_step
from isobit.training.train import open_run

PROMPTS, GROUP, NEW, RANK = 32, 8, 16, 8
TOKEN = "tml-benchmark-token-0123456789"


def run(rounds: int) -> Result:
    result = Result("serve_step")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        path = save_model(folder / "model", 256, 4, 64, 512)
        shared = _own_step(folder, path, stack, share_prompts=True)
        whole = _own_step(folder, path, stack, share_prompts=False)
        client = stack.enter_context(_client_step(folder, path))
        contestants = {
            "isobit train": shared,
            "isobit train, prompts whole": whole,
            "Tinker's client": client,
        }
        amount = float(PROMPTS * GROUP * NEW)
        result.rows += race("GRPO step", contestants, rounds, amount=amount, unit="tokens")
    ratio = result.median("Tinker's client") / result.median("isobit train")
    result.claims.append(Claim("a step by the client over one of train", ratio, "<=", 1.15))
    return result


def _own_step(
    folder: Path, model: Path, stack: ExitStack, share_prompts: bool
) -> Callable[[], None]:
    values = {
        "model": {"path": str(model)},
        "adapter": {"rank": RANK, "alpha": 32.0},
        "task": {"name": "arithmetic", "options": {"digits": 3}},
        "rewards": {"functions": [{"function": f"{rewards.__file__}:digits"}]},
        "precision": "fp8",
        "prompts_per_step": PROMPTS,
        "sampling": {"group_size": GROUP, "max_new_tokens": NEW, "ignore_eos": True},
        "optimizer": {"share_prompts": share_prompts},
        "run": {
            "dir": str(folder / f"run-{share_prompts}"),
            "checkpoint_every": 0,
            "report": False,
        },
        "steps": 1_000_000,
    }
    config = folder / f"run-{share_prompts}.yaml"
    config.write_text(yaml.safe_dump(values))
    session = stack.enter_context(open_run(load_config(config), quiet=True))
    return lambda: training_step(session)


@contextmanager
def _client_step(folder: Path, model: Path) -> Iterator[Callable[[], None]]:
    import tinker

    base = Model.load(model, "fp8", adapter=NewAdapter(1, 1.0, ())).serving({})
    state = State(folder / "state")
    with closing(state), serving(base, TOKEN, state, PROMPTS * GROUP) as (url, gateway):
        service = tinker.ServiceClient(base_url=url, api_key=TOKEN)
        policy = service.create_lora_training_client(base_model="model", rank=RANK).result()
        tokenizer, count = gateway.model.tokenizer, 0

        def step() -> None:
            nonlocal count
            prompts = [f"{100 + count + i}+{999 - i}=" for i in range(PROMPTS)]
            count += 1
            _step(policy, [list(tokenizer.encode(text)) for text in prompts], tokenizer, count)

        yield step
        service.close("success").result()


def _step(policy: Any, prompts: list[list[int]], tokenizer: Any, seed: int) -> None:
    import tinker
    from tinker import types

    sampler = policy.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=NEW, seed=seed, stop=[])
    groups = [
        sampler.sample(types.ModelInput.from_ints(prompt), GROUP, params) for prompt in prompts
    ]
    data, sampled = list[Any](), list[Any]()
    for prompt, group in zip(prompts, groups, strict=True):
        answers = group.result().sequences
        texts = [tokenizer.decode(list(one.tokens)) for one in answers]
        scores = np.array(rewards.digits([""] * len(texts), texts))
        advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
        for one, advantage in zip(answers, advantages, strict=True):
            given = [0.0] * (len(prompt) - 1)
            inputs = {
                "target_tokens": [*prompt[1:], *one.tokens],
                "logprobs": np.float32([*given, *one.logprobs]),
                "advantages": np.float32([*given, *[advantage] * len(one.tokens)]),
            }
            tokens = types.ModelInput.from_ints([*prompt, *one.tokens[:-1]])
            data.append(types.Datum(model_input=tokens, loss_fn_inputs=inputs))
            sampled.append(np.float32(one.logprobs))
    trained = policy.forward_backward(data, "ppo")
    policy.optim_step(tinker.AdamParams(learning_rate=1e-6)).result()
    for old, found in zip(sampled, trained.result().loss_fn_outputs, strict=True):
        assert (found["logprobs"].to_numpy()[-len(old) :] == old).all()
