"""A model that lives on a GPU, where there is none (`pretend_device.py`): whatever mixes the two devices raises, and on
the reference operators every result has the bits of the CPU's."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isobit.inspection.quantization import activation_health, weight_health
from isobit.kernels import Ops, separate_ops
from isobit.kernels.reference import ReferenceOps
from isobit.model import Model, RewardModel, fp8_blocks
from isobit.model.checkpoint import read_weights
from isobit.model.kv_scales import KVScales
from isobit.model.transformer import Transformer
from isobit.precision import precision_from
from isobit.rl import Learner, Objective, Optimizer, OptimizerSettings, Sample, supervised_update
from isobit.rl.optim import _sums_of_squares
from isobit.statistics import PeakMemory, WeightTotals

from .conftest import tiny_model
from .pretend_device import DEVICE, Elsewhere, Mixed, PretendDevice

CASES = [
    ("bf16", "qwen3", {}),
    ("fp8", "llama", {"kl_coefficient": 0.1, "updates_per_batch": 2}),
    ("fp8", "qwen3_moe", {"router_aux_coefficient": 0.01}),
    ("fp8-rollout", "qwen2", {"shadow_every": 1}),
    ("fp8[kv_cache=e4m3-calibrated,kv_calibration=learner]", "llama", {}),
    ("mxfp8", "llama", {}),
]


@pytest.fixture
def pretend() -> Iterator[PretendDevice]:
    with PretendDevice() as mode:
        yield mode


def on(ops: Ops, precision: str, family: str = "qwen3") -> Model:
    """The same random model, on the operators' device."""
    config = tiny_model("float32", family).config
    given = tiny_model("float32", family)
    masters = {name: 5 * p.detach() for name, p in given.named_parameters().items()}
    model = Model(Transformer(config, precision_from(precision), ops, masters), given.tokenizer)
    if model.precision.calibrated:
        model.transformer.kv_scales = KVScales(torch.full((config.num_layers, 2), 0.01), model.weights_version)
    return model


def samples_of(model: Model, count: int = 6) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(count):
        tokens = torch.randint(3, model.config.vocab_size, (5 + index,), generator=generator).tolist()
        logprobs = model.logprobs([tokens])[0].tolist()[1:]
        found.append(Sample(index, 0, tuple(tokens[:2]), tuple(tokens[2:]), tuple(logprobs), "", False, 0))
    return found


def learn(ops: Ops, precision: str, family: str, objective: Objective, samples: list[Sample]) -> tuple[object, ...]:
    """Two steps; everything that came of them."""
    model = on(ops, precision, family)
    reference = on(ops, precision, family) if objective.kl_coefficient else None
    optimizer = Optimizer(model.named_parameters(), OptimizerSettings(1e-3, weight_decay=0.1, max_grad_norm=0.5))
    learner = Learner(model, optimizer, objective, reference=reference, micro_batch_tokens=30)
    metrics = []
    for step in range(2):
        metrics.append(learner.learn(samples, [(-1.0) ** i for i in range(len(samples))], step))
        model.sync()
    assert all(p.device == ops.device for p in model.parameters())
    amax = None if learner.kv_amax is None else learner.kv_amax.tolist()
    state = {name: bits(tensor) for name, tensor in optimizer.state().items()}
    weights = {name: bits(p.detach().cpu()) for name, p in model.named_parameters().items()}
    return metrics, amax, state, weights


def bits(tensor: Tensor) -> list[int]:
    assert tensor.device.type == "cpu"
    return tensor.float().contiguous().view(torch.int32).flatten().tolist()


@pytest.mark.parametrize(("precision", "family", "changes"), CASES, ids=lambda value: str(value))
def test_learning_has_the_bits_of_the_cpu(precision: str, family: str, changes: dict[str, float]) -> None:
    recompute = precision == "fp8-rollout"
    objective = Objective(recompute_old=recompute, **changes)  # type: ignore[arg-type]
    samples = samples_of(on(ReferenceOps(), precision, family))
    wanted = learn(ReferenceOps(), precision, family, objective, samples)
    with PretendDevice():
        found = learn(ReferenceOps(device=DEVICE), precision, family, objective, samples)
    assert repr(found) == repr(wanted)  # NaN is equal to itself
