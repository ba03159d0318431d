"""A model that lives on a GPU, where there is none (`pretend_device.py`): whatever mixes the two
devices raises, and on the reference operators every result has the bits of the CPU's."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from isobit.engine.calibration import measured_amax
from isobit.evaluation.inspection.quantization import activation_health, weight_health
from isobit.kernels import Ops, inference_engine_ops
from isobit.kernels.backends.reference import ReferenceOps
from isobit.model import Model, RewardModel, fp8_blocks
from isobit.model.families.rope import Table
from isobit.model.forward.kv_scales import KVScales
from isobit.model.hub.checkpoint import read_weights
from isobit.model.transformer import Transformer
from isobit.precision import precision_from
from isobit.rl import Objective, OptimizerSettings, ResolvedObjective, Sample
from isobit.rl.learner.learner import Learner
from isobit.rl.optim import eight_bit
from isobit.rl.optim.sharded import ShardedOptimizer
from isobit.training.measuring.meter import Meter
from isobit.training.measuring.statistics import WeightTotals
from tests.models import slow_where
from tests.rl.supervised import supervised_update

from .models import tiny_model
from .pretend_device import DEVICE, Elsewhere, Mixed, PretendDevice

CASES = [
    ("bf16", "qwen3", {}),
    ("fp8", "llama", {"kl_coefficient": 0.1, "updates_per_batch": 2}),
    ("fp8", "qwen3_moe", {"router_aux_coefficient": 0.01}),
    ("fp8-rollout", "qwen2", {}),
    ("fp8[kv_cache=e4m3-calibrated,kv_calibration_data=batch]", "llama", {}),
    ("mxfp8", "llama", {}),
]


QUICK_CASES = slow_where(CASES, lambda precision, *_: precision != "fp8")


def on(ops: Ops, precision: str, family: str = "qwen3") -> Model:
    """The same random model, on the operators' device."""
    config = tiny_model("float32", family).config
    given = tiny_model("float32", family)
    masters = {name: 5 * p.detach() for name, p in given.named_parameters().items()}
    model = Model(Transformer(config, precision_from(precision), ops, masters), given.tokenizer)
    if model.precision.calibrated:
        model.transformer.calibrate(
            KVScales(torch.full((config.num_layers, 2), 0.01), model.weights_version)
        )
    return model


def samples_of(model: Model, count: int = 4) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(count):
        tokens = torch.randint(
            3, model.config.vocab_size, (5 + index,), generator=generator
        ).tolist()
        logprobs = model.logprobs([tokens])[0].tolist()[1:]
        found.append(
            Sample(index, 0, tuple(tokens[:2]), tuple(tokens[2:]), tuple(logprobs), "", False, 0)
        )
    return found


def learn(
    ops: Ops, precision: str, family: str, objective: Objective, samples: list[Sample]
) -> tuple[object, ...]:
    """Two steps; everything that came of them."""
    model = on(ops, precision, family)
    reference = on(ops, precision, family) if objective.kl_coefficient else None
    optimizer = ShardedOptimizer(
        model.named_parameters(), OptimizerSettings(1e-3, weight_decay=0.1, max_grad_norm=0.5)
    )
    learner = Learner(model, optimizer, objective, reference=reference, micro_batch_tokens=16)
    metrics = []
    for step in range(2):
        metrics.append(
            learner.learn(samples, [(-1.0) ** i for i in range(len(samples))], step).metrics
        )
        model.sync()
    assert all(p.device == ops.device for p in model.parameters())
    sequences = [(*s.prompt_ids, *s.completion_ids) for s in samples]
    amax = measured_amax(model, sequences, "learner", 16).tolist()
    state = {name: bits(tensor) for name, tensor in optimizer.state().items()}
    weights = {name: bits(p.detach().cpu()) for name, p in model.named_parameters().items()}
    return metrics, amax, state, weights


def bits(tensor: Tensor) -> list[int]:
    assert tensor.device.type == "cpu"
    return tensor.float().contiguous().view(torch.int32).flatten().tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "family", "changes"), QUICK_CASES, ids=lambda value: str(value)
)
def test_learning_has_the_bits_of_the_cpu(
    precision: str, family: str, changes: dict[str, float]
) -> None:
    recompute = precision == "fp8-rollout"
    objective = ResolvedObjective(recompute_old=recompute, **changes)  # type: ignore[arg-type]
    samples = samples_of(on(ReferenceOps("exact"), precision, family))
    wanted = learn(ReferenceOps("exact"), precision, family, objective, samples)
    with PretendDevice():
        found = learn(ReferenceOps("exact", device=DEVICE), precision, family, objective, samples)
    assert repr(found) == repr(wanted)  # NaN is equal to itself


@pytest.mark.slow
def test_checkpointed_activations_too() -> None:
    samples = samples_of(on(ReferenceOps("exact"), "fp8"))

    def trained(ops: ReferenceOps, recompute: bool) -> tuple[object, ...]:
        model = on(ops, "fp8")
        optimizer = ShardedOptimizer(model.named_parameters(), OptimizerSettings(1e-2))
        found = supervised_update(model, optimizer, samples, 1e-2, 20, recompute)
        return found, [bits(p.detach().cpu()) for p in model.parameters()]

    wanted = trained(ReferenceOps("exact"), False)
    with PretendDevice():
        assert trained(ReferenceOps("exact", device=DEVICE), True) == wanted


def test_a_forgotten_move_raises() -> None:
    """The controls: what the tests above would find."""
    there, here = torch.ones(3).to("cpu"), torch.ones(3)
    assert torch.equal(there + here, here + 1)
    with PretendDevice():
        there = torch.ones(3, device=DEVICE)
        for mixed in (
            lambda: there + here,
            lambda: there[torch.arange(2)],
            lambda: torch.cat((there, here)),
            lambda: torch.where(here > 0, there, 0.0),
        ):
            with pytest.raises(Mixed):
                mixed()
        model = on(ReferenceOps("exact", device=DEVICE), "bf16")
        tables = model.config.rope.tables(64, model.config.head_dim)
        key = next(iter(model.transformer._tables))
        model.transformer._tables = {key: Table(*tables, None)}
        with pytest.raises(Mixed):
            model.logprobs([[3, 4, 5]])


@pytest.mark.parametrize("misplaced", ["step", "exp_avg"])
def test_a_moment_that_is_elsewhere_raises(misplaced: str) -> None:
    with PretendDevice():
        parameter = torch.nn.Parameter(torch.ones(2, 2).to(DEVICE))
        optimizer = ShardedOptimizer({"weight": parameter}, OptimizerSettings())
        for _ in range(2):
            parameter.grad = torch.ones(2, 2, device=DEVICE)
            optimizer.step(1e-3, 1.0)
        state = optimizer._tensors()["weight"]
        state[misplaced] = state[misplaced].cpu()  # type: ignore[index]
        parameter.grad = torch.ones(2, 2, device=DEVICE)
        with pytest.raises(Mixed):
            optimizer.step(1e-3, 1.0)


def test_the_optimizer_waits_once_for_all_gradients() -> None:
    with PretendDevice() as mode:
        parameters = {
            str(i): torch.nn.Parameter(torch.full((3, i + 1), 0.5).to(DEVICE)) for i in range(4)
        }
        optimizer = ShardedOptimizer(parameters, OptimizerSettings())
        for parameter in parameters.values():
            parameter.grad = 3 * parameter.detach()
        mode.waits.clear()
        norm = optimizer.gradient_norm()
        assert dict(mode.waits) == {"tolist": 1}
        optimizer.step(1e-3, norm)
        assert dict(mode.waits) == {"tolist": 1}
        assert norm == (30 * 1.5**2) ** 0.5
        for parameter in parameters.values():
            parameter.grad = 3 * parameter.detach()
        parameters["2"].grad[0, 0] = torch.inf  # type: ignore[index]
        assert optimizer.gradient_norm() == torch.inf


def test_a_state_goes_to_the_parameters_and_comes_back() -> None:
    settings = OptimizerSettings(1e-2, weight_decay=0.1)

    def steps(optimizer: ShardedOptimizer, count: int) -> None:
        for step in range(count):
            for parameter in optimizer.parameters.values():
                parameter.grad = (parameter.detach() * (step + 2)).clone()
            optimizer.step(1e-2, 0.5)

    start = torch.linspace(-1, 1, 64 * 128).view(64, 128)
    here = ShardedOptimizer({"w": torch.nn.Parameter(start.clone())}, settings)
    steps(here, 1)
    saved = here.state()
    moved = here.parameters["w"].detach().clone()
    steps(here, 2)
    with PretendDevice():
        there = ShardedOptimizer({"w": torch.nn.Parameter(moved.to(DEVICE))}, settings)
        there.load_state(saved)
        steps(there, 2)
        found = there.state()
        weights = there.parameters["w"].detach().cpu()
    assert torch.equal(weights, here.parameters["w"])
    assert all(torch.equal(found[name], value) for name, value in here.state().items())
    assert not any(isinstance(value, Elsewhere) for value in found.values())


def test_moments_in_8_bits_are_where_their_parameter_is() -> None:
    parameter = torch.nn.Parameter(torch.empty(64, 128, device="meta"))
    optimizer = ShardedOptimizer({"w": parameter}, OptimizerSettings(state="8bit"))
    assert list(optimizer._optimizers) == [eight_bit.AdamW8bit]
    moments = eight_bit._fresh(parameter)
    assert {part.device for m in moments.values() for part in (m.codes, m.scale)} == {
        parameter.device
    }


def test_saved_from_there_it_is_the_file_of_the_cpu(tmp_path: Path) -> None:
    wanted = on(ReferenceOps("exact"), "fp8")
    wanted.save(tmp_path / "here")
    with PretendDevice():
        on(ReferenceOps("exact", device=DEVICE), "fp8").save(tmp_path / "there")
    names = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == names
    assert all(
        (tmp_path / "here" / n).read_bytes() == (tmp_path / "there" / n).read_bytes() for n in names
    )
    assert read_weights(tmp_path / "there")


def test_fp8_blocks_of_a_model_there(tmp_path: Path) -> None:
    def written(ops: ReferenceOps, folder: Path) -> bytes:
        given = tiny_model(
            "float32",
            hidden_size=128,
            intermediate_size=128,
            num_heads=2,
            num_kv_heads=2,
            head_dim=64,
        )
        masters = {name: p.detach() for name, p in given.named_parameters().items()}
        model = Model(
            Transformer(given.config, precision_from("fp8"), ops, masters), given.tokenizer
        )
        model.write(folder, fp8_blocks.block_checkpoint(model).tensors, {})
        return (folder / "model.safetensors").read_bytes()

    here = written(ReferenceOps("exact"), tmp_path / "here")
    with PretendDevice():
        there = written(ReferenceOps("exact", device=DEVICE), tmp_path / "there")
    assert here == there


@pytest.mark.slow
def test_scores_and_log_probabilities_and_what_is_measured_of_a_model() -> None:
    sequences = [[3, 4, 5, 6], [7], [8, 9, 10]]

    def everything(ops: ReferenceOps) -> tuple[object, ...]:
        model = on(ops, "fp8")
        learned = [bits(row) for row in model.logprobs(sequences)]
        rolled = [bits(row) for row in on(ops, "fp8-e2e").logprobs(sequences, use="rollout")]
        judge = RewardModel(
            on(ops, "fp8").transformer, torch.ones(1, model.config.hidden_size), model.tokenizer
        )
        totals = WeightTotals(model)
        health = weight_health(model), activation_health(model, sequences)
        return learned, rolled, judge.score(sequences), totals.metrics(), totals.by_tensor(), health

    wanted = everything(ReferenceOps("exact"))
    with PretendDevice():
        assert everything(ReferenceOps("exact", device=DEVICE)) == wanted


def test_the_weights_are_measured_without_waiting_for_each() -> None:
    with PretendDevice() as mode:
        model = on(ReferenceOps("exact", device=DEVICE), "fp8")
        mode.waits.clear()
        totals = WeightTotals(model)
        assert not mode.waits
        totals.metrics()
        assert dict(mode.waits) == {"tolist": 1}


def test_a_separate_engine_is_on_the_learners_device() -> None:
    assert inference_engine_ops(ReferenceOps("exact", device=DEVICE)).device == DEVICE


def test_more_logits_at_a_time_on_a_gpu() -> None:
    with PretendDevice():
        both = (ReferenceOps("exact"), ReferenceOps("exact", device=DEVICE))
        rows = [on(ops, "bf16", "llama").transformer.head_rows for ops in both]
    assert round(rows[1] / rows[0]) == 64


def test_peaks_of_a_phase_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated, peak = [5.0], [0.0]

    def most(device: torch.device) -> float:
        assert device == DEVICE
        return peak[0] * 2**20

    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: peak.__setitem__(0, allocated[0])
    )
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", most)
    memory, found = Meter(lambda phase: None, DEVICE), dict[str, float]()
    for phase, used in (("rollout", 40.0), ("learn", 7.0), ("rollout", 20.0)):
        with memory.timed(found, phase, peak=True):
            peak[0] = max(peak[0], used)
    peaks = {name: value for name, value in found.items() if name.startswith("memory/")}
    assert peaks == {"memory/peak_rollout_mib": 40.0, "memory/peak_learn_mib": 7.0}
    nowhere, nothing = Meter(lambda phase: None, torch.device("cpu")), dict[str, float]()
    with nowhere.timed(nothing, "learn", peak=True):
        pass
    assert list(nothing) == ["time/learn"]
