"""TRL's own losses, given log-probabilities in place of a model; where trl is installed."""

import importlib.util
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.rl.test_sources import padded

needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="trl is not installed"
)


def trl_loss(
    policy: Tensor, old: Tensor, advantages: Tensor, *, trainer: str = "grpo", **given: Any
) -> tuple[Tensor, Tensor]:
    """`_compute_loss` of GRPOTrainer or GMPOTrainer, and its gradient by `policy` [tokens]; a
    number of `advantages` for each token, or one for each sequence. given: attributes of the
    trainer, which are changed in `own` if it is a dict; `args`: of its settings; `reference`,
    `rollout`: log-probabilities, `entropy`, [tokens]; `truncated` [sequences] has no tokens."""
    rows, mask = padded(policy)
    entropy = padded(given.pop("entropy"))[0] if "entropy" in given else torch.zeros_like(mask)
    if (truncated := given.pop("truncated", None)) is not None:
        mask = mask * ~truncated.unsqueeze(1)  # as _generate_and_score_completions has it
    own = given.pop("own", {})
    per_token = advantages.shape == policy.shape
    settings = {"use_bias_correction_kl": True, "delta": None, "steps_per_generation": 1}
    reference, rollout = given.pop("reference", None), given.pop("rollout", None)
    attributes = {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (rows, entropy, None),
        "accelerator": SimpleNamespace(
            num_processes=1,
            reduce=lambda x, reduction: x,
            gather=lambda x: x,
            pad_across_processes=lambda x, dim, pad_index: x,
            sync_gradients=True,
        ),
        "model": SimpleNamespace(training=True),
        "args": SimpleNamespace(**settings, use_liger_kernel=False, **given.pop("args", {})),
        "beta": 0.0,
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "_metrics": _Anything(),
    }
    ids = torch.zeros_like(mask, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": padded(advantages)[0] if per_token else advantages,
        "old_per_token_logps": padded(old)[0],
        "ref_per_token_logps": None if reference is None else padded(reference)[0],
        "num_items_in_batch": mask.sum(),
    }
    if rollout is not None:
        inputs["sampling_per_token_logps"] = padded(rollout)[0]
    if trainer == "grpo":
        from trl.trainer.grpo_trainer import GRPOTrainer as Trainer
    else:
        from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer as Trainer
    static = {name: getattr(Trainer, name) for name in ("get_off_policy_mask", "get_gamma_weights")}
    trainer_like = SimpleNamespace(**attributes | given | static)
    trainer_like.get_high_entropy_mask = partial(Trainer.get_high_entropy_mask, trainer_like)
    total = Trainer._compute_loss(trainer_like, None, inputs)
    own.update(vars(trainer_like))
    (gradient,) = torch.autograd.grad(total, policy)
    return total.detach(), gradient


class _Anything(dict[str, Any]):
    """Metrics, under any names."""

    def __missing__(self, key: str) -> Any:
        numbers = ("kl", "entropy", "entropy_coef", "policy_loss")
        self[key] = [] if "/" in key or key in numbers else _Anything()
        return self[key]
