"""The forward: the same bits however rows are grouped, with negative controls; working weights and
their storage."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.kernels import KVStore, Layout, tensors_of
from isobit.model import Model
from isobit.precision import QTensor
from tests.models import slow_where

from .helpers import config, random_model, tokens

_LENGTHS = [37, 1, 18, 50, 5]
_SEQUENCES = [tokens(length, seed) for seed, length in enumerate(_LENGTHS)]
# FP32 scales: with powers of two, most values survive a change of the scale without a change of
# bits
_PER_TENSOR = {"preset": "fp8", "activation_granularity": "tensor", "activation_scale": "fp32"}
BACKENDS = pytest.mark.parametrize("backend", ["reference", "native"])


def _packed(model: Model, sequences: list[list[int]], use: str = "learner") -> list[Tensor]:
    """Hidden states of each sequence, all in one forward."""
    lengths = [len(sequence) for sequence in sequences]
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    return list(
        model.transformer.hidden(ids, Layout.packed(lengths), use=use).detach().split(lengths)
    )


def _stores(model: Model, slots: int) -> list[KVStore]:
    given, precision = model.config, model.precision
    flows = [
        precision.flow("rollout", layer, given.num_layers) for layer in range(given.num_layers)
    ]
    return [
        KVStore.allocate(slots, given.num_kv_heads, given.head_dim, f.kv, f.compute) for f in flows
    ]


@torch.no_grad()
def _decoded(
    model: Model, sequences: list[list[int]], prefill: int, page_size: int = 4
) -> list[Tensor]:
    """Hidden states by the rollout: prompts in chunks of `prefill`, then token by token, in
    shuffled pages."""
    pages = [-(-len(sequence) // page_size) for sequence in sequences]
    shuffled = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)).int()
    table = torch.zeros(len(sequences), max(pages), dtype=torch.int32)
    for row, own in zip(table, shuffled.split(pages)):
        row[: len(own)] = own
    stores, done = _stores(model, sum(pages) * page_size), [0] * len(sequences)
    outputs: list[list[Tensor]] = [[] for _ in sequences]
    step = 0
    while any(position < len(sequence) for position, sequence in zip(done, sequences)):
        # an admission order of some irregularity: not every sequence moves in every step
        moving = [i for i, s in enumerate(sequences) if done[i] < len(s) and (step + i) % 3 != 0]
        step += 1
        if not moving:
            continue
        counts = [min(prefill if done[i] < 20 else 1, len(sequences[i]) - done[i]) for i in moving]
        layout = Layout.build(counts, [done[i] for i in moving], table[moving], page_size)
        ids = [
            token for i, n in zip(moving, counts) for token in sequences[i][done[i] : done[i] + n]
        ]
        hidden = model.transformer.hidden(torch.tensor(ids), layout, stores, "rollout")
        for i, n, part in zip(moving, counts, hidden.split(counts)):
            outputs[i].append(part)
            done[i] += n
    return [torch.cat(parts) for parts in outputs]


def _cosines(model: Model) -> Tensor:
    """The rotary table of all layers."""
    return model.transformer._tables[model.config.rope, model.config.head_dim].cos


def _differing(a: list[Tensor], b: list[Tensor]) -> int:
    """Rows that differ in any bit."""
    return sum(int((x != y).any(-1).sum()) for x, y in zip(a, b, strict=True))


@BACKENDS
@pytest.mark.parametrize(
    ("preset", "family"), [("fp8", "llama"), ("fp8", "qwen3"), ("fp8-unified", "qwen2")]
)
def test_a_sequence_alone_is_the_sequence_in_a_batch(
    preset: str, family: str, backend: str
) -> None:
    model = random_model(preset, backend, family)
    together = _packed(model, _SEQUENCES)
    assert _differing(together, [_packed(model, [s])[0] for s in _SEQUENCES]) == 0
    assert _differing(together, _packed(model, _SEQUENCES[::-1])[::-1]) == 0
    alone = torch.cat([model.logprobs([s])[0] for s in _SEQUENCES])
    assert torch.equal(torch.cat(model.logprobs(_SEQUENCES)), alone)


@BACKENDS
def test_a_scale_per_tensor_does_depend_on_the_batch(backend: str) -> None:
    """The negative control of the test above."""
    model = random_model(_PER_TENSOR, backend)
    assert _differing(_packed(model, _SEQUENCES), [_packed(model, [s])[0] for s in _SEQUENCES]) > 0
    alone = torch.cat([model.logprobs([s])[0] for s in _SEQUENCES])
    assert not torch.equal(torch.cat(model.logprobs(_SEQUENCES)), alone)


@BACKENDS
@pytest.mark.parametrize(
    ("preset", "family"),
    [("fp8", "llama"), ("fp8", "qwen3"), ("fp8-unified", "qwen2"), ("bf16", "llama")],
)
@pytest.mark.parametrize("prefill", [1, 7])
def test_incremental_decoding_is_the_packed_forward(
    preset: str, family: str, backend: str, prefill: int
) -> None:
    model = random_model(preset, backend, family)
    assert _differing(_decoded(model, _SEQUENCES, prefill), _packed(model, _SEQUENCES)) == 0


@pytest.mark.parametrize(
    "precision", ["fp8-rollout", _PER_TENSOR, {"preset": "fp8-rollout", "kv_cache": "e4m3"}]
)
def test_two_flows_do_differ(precision: Any) -> None:
    """Negative controls: a BF16 learner under FP8 rollouts, and a scale per tensor."""
    model = random_model(precision)
    assert (
        _differing(_decoded(model, _SEQUENCES, 7), _packed(model, _SEQUENCES)) > sum(_LENGTHS) // 2
    )


@pytest.mark.slow
def test_stale_weights_do_differ() -> None:
    model = random_model("fp8")
    before = _decoded(model, _SEQUENCES[:2], 7)
    with torch.no_grad():
        model.named_parameters()["layers.1.down"].mul_(1.3)
    assert (
        _differing(_decoded(model, _SEQUENCES[:2], 7), before) == 0
    )  # the old weights, until sync
    version = model.weights_version
    model.sync()
    assert model.weights_version == version + 1
    assert _differing(before, _packed(model, _SEQUENCES[:2])) > 0
    assert _differing(_decoded(model, _SEQUENCES[:2], 7), _packed(model, _SEQUENCES[:2])) == 0


@BACKENDS
@pytest.mark.parametrize("preset", ["fp8", "bf16"])
def test_recording_a_graph_changes_no_bit(preset: str, backend: str) -> None:
    model = random_model(preset, backend, "qwen3")
    with torch.enable_grad():
        recorded = _packed(model, _SEQUENCES)
    with torch.no_grad():
        assert _differing(recorded, _packed(model, _SEQUENCES)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "family"),
    slow_where(
        list(product(("float32", "bf16", "fp8-rollout", "fp8"), ("qwen2", "qwen3"))),
        lambda preset, family: preset in ("float32", "bf16") and family == "qwen3",
    ),
)
def test_masters_change_nothing_before_sync(preset: str, family: str) -> None:
    model = random_model(preset, family=family)
    before = {use: _packed(model, _SEQUENCES[2:3], use) for use in ("rollout", "learner")}
    for name, master in model.named_parameters().items():
        saved = master.detach().clone()
        with torch.no_grad():
            master.mul_(2.5).add_(1)
        for use, wanted in before.items():
            assert _differing(_packed(model, _SEQUENCES[2:3], use), wanted) == 0, name
        with torch.no_grad():
            master.copy_(saved)


def test_every_parameter_gets_a_gradient_and_a_later_sync_uses_it() -> None:
    model = random_model("fp8", "auto", "qwen3", tie_embeddings=True)
    ids = torch.tensor(_SEQUENCES[3])
    hidden = model.transformer.hidden(ids[:-1], Layout.packed([len(ids) - 1]))
    model.transformer.head_logprobs(hidden, ids[1:])[0].mean().backward()
    before = _packed(model, _SEQUENCES)
    for name, master in model.named_parameters().items():
        assert master.grad is not None, name
        assert master.grad.dtype == torch.float32
        assert master.grad.shape == master.shape
        assert float(master.grad.abs().sum()) > 0, name
        with torch.no_grad():
            master.add_(master.grad, alpha=0.1)
    model.sync()
    assert _differing(before, _packed(model, _SEQUENCES)) == sum(_LENGTHS)


def _bytes(model: Model) -> tuple[int, int, int]:
    sizes = model.memory()
    return sizes["masters"], sizes["rollout"], sizes["learner"]


def test_memory_of_working_weights() -> None:
    linear = sum(
        p.numel()
        for name, p in random_model("bf16").named_parameters().items()
        if "norm" not in name
    )
    linear -= 2 * 61 * 144
    outside = 2 * 61 * 144
    norms = 7 * 144
    masters, rollout, learner = _bytes(random_model("bf16"))
    assert masters == 4 * (linear + outside + norms)
    assert (rollout, learner) == (2 * (linear + outside + norms), 0)
    _, rollout, learner = _bytes(random_model("fp8"))
    # 128x128 blocks of 288x144, 144x144, 416x144, 144x208: 6 + 4 + 8 + 4 scales a layer
    assert (rollout, learner) == (linear + 3 * 22 * 4 + 2 * (outside + norms), 0)
    _, rollout, learner = _bytes(random_model("fp8-rollout"))
    # an engine of its own has a copy of everything
    assert (rollout, learner) == (
        linear + 3 * 22 * 4 + 2 * (outside + norms),
        2 * (linear + outside + norms),
    )
    _, rollout, learner = _bytes(random_model("fp8-rollout[engines=shared]"))
    # the learner has BF16 layers of its own, the final norm, embedding and head are the rollout's
    assert learner == 2 * (linear + 6 * 144)
    _, _, learner = _bytes(
        random_model("fp8-rollout[engines=shared, bf16_first_layers=1, bf16_last_layers=1]")
    )
    assert learner == 2 * (linear // 3 + 2 * 144)
    tied = random_model("bf16", tie_embeddings=True).memory()
    assert tied["rollout"] == 2 * (linear + 61 * 144 + norms)


_VARIANTS: dict[str, tuple[str, dict[str, bool]]] = {
    "llama-tied": ("llama", {"tie_embeddings": True}),
    "llama-biases": ("llama", {"qkv_bias": True, "o_bias": True, "mlp_bias": True}),
    "qwen3_moe": ("qwen3_moe", {}),
}


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("variant", _VARIANTS)
@pytest.mark.parametrize("preset", ["bf16", "fp8", "nvfp4", "fp8-rollout"])
def test_a_sync_writes_where_the_last_one_was(preset: str, variant: str, backend: str) -> None:
    """The addresses stay, so that captured steps read the new weights; the bits are those of a
    model made of the same masters, whose packs cannot be old."""
    family, changes = _VARIANTS[variant]
    model = random_model(preset, backend, family, **changes)
    addresses, before = model.transformer.rollout_storage(), _packed(model, _SEQUENCES, "rollout")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    model.sync()
    other = model.under(preset)
    assert model.transformer.rollout_storage() == addresses != other.transformer.rollout_storage()
    for use in ("rollout", "learner"):
        assert _differing(_packed(model, _SEQUENCES, use), _packed(other, _SEQUENCES, use)) == 0
    assert _differing(_packed(model, _SEQUENCES, "rollout"), before) > 0
    assert model.memory() == other.memory()
    assert model.transformer.packed_bytes() == other.transformer.packed_bytes()


@pytest.mark.parametrize("preset", ["bf16", "fp8", "fp8-rollout"])
@pytest.mark.parametrize("variant", ["llama-tied", "qwen3_moe"])
def test_control_a_pack_from_before_a_sync_is_noticed(
    preset: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same comparison as above, with a backend that does not prepare overwritten weights
    again."""
    family, changes = _VARIANTS[variant]
    model = random_model(preset, "native", family, **changes)
    prepare = type(model.ops).prepare
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    monkeypatch.setattr(
        type(model.ops), "prepare", lambda ops, weight, into=None: into or prepare(ops, weight)
    )
    model.sync()
    learned = _packed(model, _SEQUENCES), _packed(model.under(preset), _SEQUENCES)
    assert _differing(*learned) == sum(_LENGTHS)


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize(
    ("preset", "family", "changes", "name"),
    [
        ("fp8", "llama", {"tie_embeddings": True}, "embed"),
        ("fp8", "qwen2", {}, "layers.1.qkv_bias"),
        ("bf16", "qwen3_moe", {}, "layers.0.experts.2.down"),
        (
            "fp8-rollout",
            "llama",
            {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
            "layers.1.gate_up",
        ),
    ],
)
def test_one_master_is_synced_by_its_name(
    preset: str, family: str, changes: dict[str, bool], name: str, backend: str
) -> None:
    """Its working weights are those of a model made so; the control: those of every other name keep
    their bits, which a whole sync after other masters have changed does not leave them."""
    model = random_model(preset, backend, family, **changes)
    other_name = "layers.1.o"
    before, version = _working_bits(model), model.weights_version
    other = model.named_parameters()[other_name].detach()
    kept = other.clone()
    other.mul_(1.5)  # and not synced
    model.named_parameters()[name].detach().mul_(1.3)
    model.transformer.sync(names=(name,))
    after = _working_bits(model)
    assert {key for key in before if not torch.equal(before[key], after[key])} == {
        (use, name) for use in ("rollout", "learner")
    }
    assert model.weights_version == version + 1
    other.copy_(kept)
    assert _differing(_packed(model, _SEQUENCES), _packed(model.under(preset), _SEQUENCES)) == 0
    other.mul_(1.5)
    model.sync()
    changed = {
        key for key, bits in _working_bits(model).items() if not torch.equal(before[key], bits)
    }
    assert changed == {(use, each) for use in ("rollout", "learner") for each in (name, other_name)}


def _working_bits(model: Model) -> dict[tuple[str, str], torch.Tensor]:
    found = {}
    for use, working in model.transformer._working.items():
        for name, operand, _ in working.tensors():
            parts = [
                t.detach().contiguous().view(torch.uint8).flatten().clone()
                for t in tensors_of(operand)
            ]
            found[use, name] = torch.cat(parts)
    return found


def test_packs_are_counted_once() -> None:
    """A byte per code, in panels of 16 rows and 32 columns; the head's of the tied embedding has
    two, and the uses share."""
    model = random_model("fp8", "native", tie_embeddings=True)
    sizes = {
        name: -(-p.shape[0] // 16) * 16 * -(-p.shape[-1] // 32) * 32
        for name, p in model.named_parameters().items()
    }
    linear = sum(size for name, size in sizes.items() if "norm" not in name and name != "embed")
    assert model.transformer.packed_bytes() == linear + 2 * sizes["embed"]
    assert random_model("fp8", "reference").transformer.packed_bytes() == 0


def test_excepted_layers_stay_in_bf16() -> None:
    model = random_model({"preset": "fp8", "bf16_first_layers": 1, "bf16_last_layers": 1})
    kinds = [isinstance(weight.working, QTensor) for weight in model.transformer.rollout_weights()]
    assert kinds == [False] * 4 + [True] * 4 + [False] * 4
    weights = model.transformer.rollout_weights()
    assert [w.dgrad for w in weights] == ["bf16"] * 4 + ["fp8"] * 4 + ["bf16"] * 4
    assert [store.kv is not None for store in _stores(model, 16)] == [False, True, False]
    assert _differing(_decoded(model, _SEQUENCES, 7), _packed(model, _SEQUENCES)) == 0
    everywhere = random_model("fp8")
    assert _differing(_packed(everywhere, _SEQUENCES), _packed(model, _SEQUENCES)) == sum(_LENGTHS)


def test_rope_tables_grow_to_what_is_needed() -> None:
    model = random_model("float32", max_positions=1 << 20)
    assert _cosines(model).shape[0] == 0
    _packed(model, [tokens(30)])
    assert _cosines(model).shape[0] == 64
    first = _cosines(model).clone()
    _packed(model, [tokens(100)])
    assert _cosines(model).shape[0] == 128
    assert torch.equal(_cosines(model)[:64], first)


def test_no_rows() -> None:
    model = random_model("fp8")
    hidden = model.transformer.hidden(torch.zeros(0, dtype=torch.int64), Layout.packed([]))
    assert hidden.shape == (0, config().hidden_size)
