"""The planner beside what runs on a CPU report and take, and beside models that compute: to 10
%, as the design asks."""

from pathlib import Path

import pytest
import torch

from isobit.config import Config, load_config
from isobit.config.sections import AdapterConfig
from isobit.distributed import ALONE, Ranks
from isobit.kernels.product.ordered_native import OrderedProducts
from isobit.model import Experts, Model
from isobit.model.adapters.targets import NewAdapter
from isobit.model.forward.kv_scales import KVScales
from isobit.model.hub.linear_attention import LinearAttention
from isobit.run.directory import METRICS, read_jsonl
from isobit.training.loop import training_step
from isobit.training.parts.assembly import open_parts
from isobit.training.plan import Job, Machine, job_of, plan
from isobit.training.plan.advice import changes
from isobit.training.plan.learning import Backward, measure, measure_forward
from isobit.training.plan.live_bytes import LiveBytes
from isobit.training.plan.memory import num_parameters
from isobit.training.plan.meta import Described, forward_bytes, learning_bytes, weight_bytes
from isobit.training.train import open_run, train
from tests.distributed.threads import run
from tests.models import tiny_model
from tests.runs import write_config

MIB = 2**20
HERE = Machine("this machine", 64 << 30, host=True, packs=True)
NARROW, WIDE, MANY = Experts(5, 2, 24), Experts(5, 2, 512), Experts(64, 4, 64)
RUNS = [
    ("fp8", "qwen3", ()),
    ("bf16", "qwen3", ("optimizer.activation_checkpointing=true",)),
    ("fp8-unified", "qwen3_moe", ()),
    ("fp8-rollout", "qwen3", ()),
    ("fp8-rollout", "gemma3_text", ()),
    ("fp8", "gemma4_text", ()),
    ("fp8", "gemma4_text-experts", ()),
    ("fp8", "gemma4_text-small", ()),
    ("fp8", "gpt_oss", ()),
    ("fp8", "nemotron_h-latent", ()),
    ("fp8", "qwen3_5_text", ("evaluation.every=1", "evaluation.samples=4")),
    ("fp8", "qwen3", ("optimizer.masters=bf16", "optimizer.state=8bit")),
    ("fp8", "qwen3", ("optimizer.name=muon",)),
    ("fp8", "qwen3", ("adapter.rank=8", "algorithm.kl_coefficient=0.01")),
    ("fp8-rollout", "qwen3_moe", ("adapter={rank: 4, targets: [q_proj, o_proj]}",)),
    ("fp8", "qwen3_moe", ("adapter.rank=4",)),
    ("nvfp4", "qwen3", ("adapter.rank=8", "algorithm.kl_coefficient=0.01")),
    ("nvfp4-rollout", "qwen3_moe", ("adapter={rank: 4, targets: [q_proj, o_proj]}",)),
    (
        "fp8",
        "qwen3_moe",
        ("algorithm.kl_coefficient=0.01", "evaluation.every=1", "evaluation.samples=4"),
    ),
]


@pytest.fixture(autouse=True)
def packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMX reads some matrices where they lie, and then less is taken than the plan says: it counts
    a processor that packs them all."""
    monkeypatch.setattr(OrderedProducts, "_reads", lambda products, a, b: False)


@pytest.mark.slow
def test_amx_takes_no_more_than_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("bf16", "qwen3_moe", hidden_size=256, experts=MANY)
    given, how = Described(model.config, model.precision, host=True, packs=True), Backward(True)
    packed = _most(model, 512, how)
    monkeypatch.undo()
    assert _most(model, 512, how) <= packed
    assert max(learning_bytes(given, 512, how)) == pytest.approx(packed, rel=0.1)


def _most(model: Model, tokens: int, how: Backward) -> int:
    return max(map(max, measure(model.transformer, tokens, how)))


@pytest.mark.parametrize(("flow", "family", "changes"), RUNS)
def test_a_run_reports_what_was_planned(
    flow: str, family: str, changes: tuple[str, ...], tmp_path: Path
) -> None:
    """Caches to 10 %; weights and moments to the byte."""
    tiny_model(family=family, hidden_size=128, intermediate_size=256).save(tmp_path / "model")
    given = (*changes, f"precision={flow}", "steps=1")
    config = load_config(write_config(tmp_path, tmp_path / "model"), given)
    parts = open_parts(config, quiet=True)
    parts.processes.close()
    job = job_of(config, HERE, parts.engine.longest_prompt)
    row = list(read_jsonl(Path(train(config, quiet=True).run_dir) / METRICS))[-1]
    planned, held = plan(job), dict(plan(job).held)
    adapter, masters = config.adapter, config.optimizer.masters
    count, each = num_parameters(job.model, adapter), 2 if masters == "bf16" else 4
    of_adapter = "" if adapter is None else ", of the adapter"
    assert held[f"{masters.upper()} masters{of_adapter}"] == each * count
    working = held["working weights, rollout"] + held.get("working weights, learner", 0)
    assert row["memory/weights_mib"] * MIB == each * count + working
    assert row["memory/optimizer_mib"] * MIB == held[config.optimizer.what_is_kept]
    assert held["working weights, packed by the backend"] == parts.model.transformer.packed_bytes()
    cache = sum(size for label, size in held.items() if label.startswith("keys"))
    assert row["memory/kv_cache_mib"] * MIB == pytest.approx(cache, rel=0.1)
    frozen = "reference, working weights only"
    if config.shares_reference:
        assert "memory/reference_mib" not in row
        assert frozen not in held
    elif job.reference is not None:
        packs = weight_bytes(Described(*job.reference, host=True, packs=True), frozen=True).packs
        assert row["memory/reference_mib"] * MIB == held[frozen] - packs
    assert planned.total > sum(held.values()) > each * count + working
    # the control: another flow's plan is not this run
    other = Described(job.model, tiny_model("bf16" if flow != "bf16" else "fp8").precision, adapter)
    of_another = weight_bytes(other)
    assert row["memory/weights_mib"] * MIB != each * count + of_another.rollout + of_another.learner


def test_the_cache_of_a_server_is_planned(tmp_path: Path) -> None:
    """To the byte, beside the rollout's; the control has no server."""
    tiny_model(max_positions=128).save(tmp_path / "model")
    (tmp_path / "token").write_text("test-token-0123456789")
    (tmp_path / "token").chmod(0o600)
    given = ("steps=1", "serve.port=0", f"serve.token={tmp_path / 'token'}")
    config = load_config(write_config(tmp_path, tmp_path / "model"), given)
    with open_run(config, quiet=True) as session:
        serving = session.parts.serving
        assert serving is not None
        took, longest = serving.engine.kv_bytes, session.parts.engine.longest_prompt
    job = job_of(config, HERE, longest)
    label = "keys and values of the server"
    assert dict(plan(job).held)[label] == took
    fewer, without = job.changed("serve.max_sequences=8"), job.changed("serve.port=null")
    assert 0 < dict(plan(fewer).held)[label] < took
    assert label not in dict(plan(without).held)
    assert plan(job).total == plan(without).total + took
    many = job.changed("serve.max_sequences=4096")
    assert "serve.max_sequences=2048" in {key for one in changes(many) for key in one.keys}


LETTERS = "0123456789+-*= " + "".join(chr(0x20000 + i) for i in range(16384))
"""So many that the output head is the largest part of a step."""
FLOWS = ("float32", "bf16", "fp8", "fp8-e2e", "fp8[bf16_layers=down]")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flow", "family", "experts"),
    [
        *((flow, "qwen3", None) for flow in (*FLOWS, "fp8-rollout-kv")),
        *(
            (flow, "qwen3_moe", experts)
            for flow in ("float32", "bf16", "fp8")
            for experts in (NARROW, WIDE)
        ),
        *((flow, "qwen3_moe", MANY) for flow in ("bf16", "fp8")),
        *(
            (flow, family, None)
            for family in ("olmo2", "gemma3_text", "gemma4_text", "qwen3_5_text")
            for flow in ("bf16", "fp8")
        ),
    ],
)
@pytest.mark.parametrize(
    "adapter", [None, AdapterConfig(8, 16, ("q_proj", "v_proj", "o_proj"))], ids=["all", "adapter"]
)
def test_learning_takes_what_was_planned(
    flow: str, family: str, experts: Experts | None, adapter: AdapterConfig | None, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_layers": 12, "head_dim": 64}
    more = {} if experts is None else {"experts": experts}
    if family == "qwen3_5_text":  # heads as wide, beside the rest, as its own
        more = {
            "linear": LinearAttention(
                tuple(layer for layer in range(12) if layer % 4 != 2), 4, 8, 64, 64
            )
        }
        if adapter is not None:  # a gradient goes through all layers
            adapter = AdapterConfig(8, 16, ("in_proj_qkv", "out_proj", "q_proj"))
    planned = _compared(tiny_model(flow, family, **sizes, **more), adapter, tmp_path)
    assert planned[2] < 0.5 * planned[0], "the control: one is not the other"
    assert family != "qwen3" or planned[1] < 0.75 * planned[0]


@pytest.mark.slow
def test_learning_takes_what_was_planned_of_two_small_models(tmp_path: Path) -> None:
    """The same without waiting."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_layers": 6, "head_dim": 64}
    for family, adapter in (
        ("qwen3", None),
        ("qwen3_moe", AdapterConfig(8, 16, ("q_proj", "o_proj"))),
    ):
        planned = _compared(tiny_model("fp8", family, **sizes), adapter, tmp_path / family)
        assert planned[2] < 0.6 * planned[0], "the control: one is not the other"


def _compared(model: Model, adapter: AdapterConfig | None, folder: Path) -> list[int]:
    """Bytes of a micro-batch of 4,096 tokens by level of activation checkpointing, as planned; and
    that a model which computes takes what is planned of fewer, to 10 %, as counted from its tensors,
    and of a forward."""
    flow = model.precision
    if adapter is not None:
        model.save(folder)
        given = NewAdapter(adapter.rank, adapter.alpha, adapter.targets)
        model = Model.load(folder, flow, consistency=model.ops.consistency, adapter=given)
    if flow.rollout.calibrated:
        model.transformer.calibrate(KVScales(torch.ones(model.config.num_layers, 3), 0))
    given, planned = Described(model.config, flow, adapter, host=True, packs=True), []
    for level in (False, "mlp", True):
        for tokens, gradients in ((100, "sent"), (100, "kept"), (400, "added")):
            how = Backward(level, gradients)
            foreseen = max(learning_bytes(given, tokens, how))
            assert foreseen == pytest.approx(_most(model, tokens, how), rel=0.1), how
        planned.append(max(learning_bytes(given, 4096, Backward(level, "sent"))))
    forward = measure_forward(model.transformer, 400)
    assert forward_bytes(given, 400) == pytest.approx(forward, rel=0.1)
    return planned


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "family"), [(2, "qwen3"), (4, "qwen3"), (2, "qwen3_moe")])
def test_a_rank_takes_what_was_planned(ranks: int, family: str, tmp_path: Path) -> None:
    """To 10 %: what the busiest rank holds and takes in a step beyond the weights, counted from
    tensors; without the weights, which a CPU packs for its products besides."""
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_layers": 4,
        "num_heads": 4,
        "head_dim": 64,
    }
    tiny_model("fp8", family, **sizes).save(tmp_path / "model")
    given = (
        "optimizer.micro_batch_tokens=64",
        "optimizer.share_prompts=false",
        "evaluation.every=0",
    )
    config = load_config(
        write_config(tmp_path, tmp_path / "model"), [*given, f"run.dir={tmp_path / 'run'}"]
    )

    found = run(ranks, lambda each: _second_step(config, each))
    job = found[0][1]
    measured = max(most for most, _ in found)
    assert measured == pytest.approx(_of_a_step(job.on(ranks)), rel=0.1)
    assert measured != pytest.approx(_of_a_step(job.on(ranks // 2)), rel=0.1), "the control"


@pytest.mark.slow
def test_the_gradient_of_the_entropy_takes_what_was_planned(tmp_path: Path) -> None:
    """To 10 %: what a step takes beyond the weights, where the head is its largest part. The control
    is the plan of a loss without a bonus; one of the user's own may use the entropy."""
    tiny_model("fp8", alphabet=LETTERS).save(tmp_path / "model")
    given = (
        "optimizer.micro_batch_tokens=1024",
        "optimizer.share_prompts=false",
        "prompts_per_step=16",
        "sampling.group_size=16",
        "sampling.max_new_tokens=16",
        "sampling.ignore_eos=true",
        "algorithm.entropy_coefficient=0.01",
    )
    config = load_config(write_config(tmp_path, tmp_path / "model"), given)
    measured, job = _second_step(config)
    assert measured == pytest.approx(_of_a_step(job), rel=0.1)
    without = job.changed("algorithm.entropy_coefficient=0")
    assert measured != pytest.approx(_of_a_step(without), rel=0.1), "the control"
    assert _of_a_step(without.changed("algorithm.loss=own.py:loss")) == _of_a_step(job)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes", "kept"),
    [
        ("qwen3", ("optimizer.micro_batch_tokens=4096", "prompts_per_step=4"), True),
        ("qwen3", ("optimizer.micro_batch_tokens=512",), True),
        ("qwen3", ("optimizer.micro_batch_tokens=512", "sampling.temperature=0.7"), True),
        ("gemma4_text", ("optimizer.micro_batch_tokens=512",), False),
    ],
)
def test_the_head_takes_what_was_planned(
    family: str, changes: tuple[str, ...], kept: bool, tmp_path: Path
) -> None:
    """To 10 %, where logits and the head's gradient are most of a step: logits are kept, unless they
    are filtered or capped, and then the gradients of micro-batches are added where they are. The
    control plans the other."""
    measured, job = _second_step(_of_a_wide_head(tmp_path, family, *changes))
    assert measured == pytest.approx(_of_a_step(job), rel=0.1)
    other = job.changed(f"sampling.top_k={50 if kept else 0}")
    if job.model.logit_cap is None:
        assert measured != pytest.approx(_of_a_step(other), rel=0.1), "the control"


@pytest.mark.slow
@pytest.mark.parametrize("filters", ["top_k=50", "top_p=0.9", "min_p=0.1 top_k=50"])
def test_filtered_logits_take_what_was_planned(filters: str, tmp_path: Path) -> None:
    """To 10 %, of what sorts the logits too. The control plans a run without filters."""
    changes = "optimizer.micro_batch_tokens=4096", *(f"sampling.{key}" for key in filters.split())
    measured, job = _second_step(_of_a_wide_head(tmp_path, "qwen3", *changes))
    assert measured == pytest.approx(_of_a_step(job), rel=0.1)
    without = job.changed("sampling.top_k=0", "sampling.top_p=1", "sampling.min_p=0")
    assert measured != pytest.approx(_of_a_step(without), rel=0.1), "the control"


def _of_a_wide_head(folder: Path, family: str, *changes: str) -> Config:
    """Of a run that learns from every group, and whose logits are most of a step."""
    tiny_model("fp8", family, alphabet=LETTERS, hidden_size=512).save(folder / "model")
    (folder / "every_other.py").write_text(
        "def earns(completions, **_):\n    return [float(i % 2) for i, _ in enumerate(completions)]\n"
    )
    given = (
        f"rewards.functions=[{folder / 'every_other.py'}:earns]",
        "optimizer.share_prompts=false",
        "prompts_per_step=16",
        "sampling.group_size=8",
        "sampling.max_new_tokens=16",
        "sampling.ignore_eos=true",
        "evaluation.every=0",
        *changes,
    )
    return load_config(write_config(folder, folder / "model"), given)


def _second_step(config: Config, ranks: Ranks = ALONE) -> tuple[int, Job]:
    """Bytes that a step takes of a rank beside the weights, the first of which makes the moments;
    and what is planned."""
    with (
        LiveBytes() as live,
        open_run(config, quiet=True, ranks=ranks) as session,
    ):
        loaded = live.live
        for _ in range(2):
            live.take()
            training_step(session)
        measured = live.take() - loaded
    return measured, job_of(session.parts.config, HERE, session.parts.engine.longest_prompt)


def _of_a_step(job: Job) -> int:
    """What a step takes of a rank beside weights and masters."""
    planned = plan(job)
    held = sum(size for label, size in planned.held if "moments" in label or "keys" in label)
    return held + next(size for label, size in planned.parts if label.startswith("learning"))
