"""A tiny frozen base, data of it, and bits, for the tests of the stepwise learner."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from isobit.engine.engine import Engine
from isobit.engine.types import Completion, Sampling
from isobit.model import Model
from isobit.model.adapters.targets import NewAdapter
from isobit.rl.stepwise import Adam, Datum, StepwiseLearner
from tests.models import require, tiny_model

NEW = NewAdapter(4, 32.0, seed=3)
_NOTHING = NewAdapter(1, 1.0, ())
STEP = Adam(learning_rate=1e-2)


def saved_base(folder: Path) -> Path:
    """A directory of a model whose distributions are not flat."""
    require("native")
    tiny_model("bf16", scale=4).save(folder)
    return folder


def frozen(folder: Path, precision: str = "fp8") -> Model:
    """That model without masters."""
    return Model.load(folder, precision, "native", adapter=_NOTHING)


def learner(base: Model, adapter: NewAdapter = NEW, tokens: int = 16) -> StepwiseLearner:
    """One that trains an adapter; of the data below, two share a micro-batch."""
    return StepwiseLearner(base.adapted(adapter), micro_batch_tokens=tokens)


def data(count: int = 6, length: int = 8, seed: int = 0, several: int = 0) -> list[Datum]:
    """Random sequences, with everything that a loss reads; with `several` targets each."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        ids = torch.randint(0, 14, (length + 1,), generator=random)
        shape = (length, several) if several else (length,)
        targets = torch.randint(0, 14, shape, generator=random) if several else ids[1:]
        inputs = {
            "target_tokens": targets,
            "weights": torch.rand(shape, generator=random),
            "advantages": torch.randn(shape, generator=random),
            "logprobs": -3 * torch.rand(shape, generator=random),
            "sequence_ratio_mask": (torch.rand(shape, generator=random) > 0.3).float(),
        }
        found.append(Datum(tuple(ids[:-1].tolist()), inputs))
    return found


def sampled(model: Model, name: str | None, seed: int) -> list[Completion]:
    """Three answers by an adapter that a model serves, or by the model."""
    prompts, sampling = ["1+1=", "23*4="], Sampling(n=3, max_new_tokens=6, seed=seed)
    names = None if name is None else [name, name]
    groups = Engine(model, page_size=4).generate(prompts, sampling, adapters=names)
    return [completion for group in groups for completion in group]


def as_data(completions: Iterable[Completion]) -> list[Datum]:
    """Them to learn from, as Tinker's clients send them: zeros for the prompt."""
    found = []
    for number, one in enumerate(completions):
        ids = [*one.prompt_token_ids, *one.token_ids]
        zeros = torch.zeros(len(one.prompt_token_ids) - 1)
        advantage = torch.full((len(one.token_ids),), 1.0 - number % 3)
        inputs = {
            "target_tokens": torch.tensor(ids[1:]),
            "logprobs": torch.cat([zeros, torch.tensor(one.logprobs)]),
            "advantages": torch.cat([zeros, advantage]),
        }
        found.append(Datum(tuple(ids[:-1]), inputs))
    return found


def gradients(learner: StepwiseLearner) -> dict[str, Tensor]:
    """Copies of those that wait for a step, computed again where the next call would do that."""
    list(learner._compute_again())
    holders = learner.model.transformer.masters.holders
    return {name: h.grad.clone() for name, h in holders.items() if h.grad is not None}


def masters(learner: StepwiseLearner) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in learner.model.named_parameters().items()}


def digest(tensors: Mapping[str, Tensor] | Iterable[Tensor]) -> str:
    """SHA-256 of all bytes."""
    found = hashlib.sha256()
    for each in tensors.values() if isinstance(tensors, Mapping) else tensors:
        found.update(each.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def state_of(learner: StepwiseLearner) -> str:
    """Of everything that a call may change: gradients, masters, moments and working weights."""
    optimizer = learner._optimizer
    parts = (gradients(learner), masters(learner), optimizer.state())
    working = learner.model.transformer.learner_storage()
    return digest([*(t for part in parts for _, t in sorted(part.items())), *working])


def train(learner: StepwiseLearner, steps: range, adam: Callable[[int], Adam] | None = None) -> str:
    """Some steps, each of two calls; the SHA-256 of the masters then."""
    for step in steps:
        learner.forward_backward(data(seed=2 * step), "cross_entropy", {})
        learner.forward_backward(data(seed=2 * step + 1), "ppo", {})
        learner.optim_step(STEP if adam is None else adam(step))
    return digest(masters(learner))
