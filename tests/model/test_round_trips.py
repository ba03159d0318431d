"""What `save` writes is the model: random configs of every family, read again, by isobit and by
`transformers`."""

from itertools import islice
from pathlib import Path

import pytest
import torch
import transformers

from isobit.config import load_config
from isobit.errors import IsobitError
from isobit.model import Experts, Model, ModelConfig, Tokenizer
from isobit.model.families import FAMILIES
from isobit.model.families.rope import KINDS, PROPORTIONAL, Rope
from isobit.model.hub.layer_kinds import LETTERS
from isobit.training.train import train
from tests.models import ALPHABET, tiny_model
from tests.runs import write_config

from .config_table import SEQUENCE, their_logprobs
from .config_variants import BASES
from .random_configs import accepted

CLOSE = 5e-4
"""Of log-probabilities: the farthest of 840 was 1.5e-4 off. Another model is off by tenths."""


def random_model(config: ModelConfig, seed: int) -> Model:
    """With weights large enough to matter."""
    model = Model.init(
        config, Tokenizer.characters(ALPHABET), "float32", seed, "reference", "exact"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(0.25 * torch.randn(parameter.shape, generator=generator))
    model.sync()
    return model


def round_trips(family: str, first: int, count: int, folder: Path, theirs: int) -> None:
    """Of `count` configs, the first `theirs` with transformers too."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for number, (seed, values, config) in enumerate(islice(accepted(family, first), count)):
        model, directory = random_model(config, seed), folder / str(seed)
        model.save(directory)
        again = Model.load(directory, "float32", "reference", "exact")
        found = model.logprobs([SEQUENCE])[0]
        assert again.config == config, (seed, values)
        assert torch.equal(again.logprobs([SEQUENCE])[0], found), (seed, values)
        if number < theirs:
            assert float((their_logprobs(directory) - found).abs().max()) <= CLOSE, (seed, values)


@pytest.mark.parametrize("family", BASES)
def test_a_model_that_was_saved_is_the_model(family: str, tmp_path: Path) -> None:
    """The same config, log-probabilities bit for bit, and those of transformers within rounding."""
    round_trips(family, 0, 12, tmp_path, theirs=2)


@pytest.mark.slow
@pytest.mark.parametrize("family", BASES)
def test_many_models_that_were_saved_are_the_models(family: str, tmp_path: Path) -> None:
    round_trips(family, 1000, 60, tmp_path, theirs=60)


def test_every_family_and_every_feature_is_drawn() -> None:
    assert BASES.keys() == FAMILIES.keys()
    drawn = [config for family in BASES for _, _, config in islice(accepted(family, 0), 12)]
    assert {config.rope.kind for config in drawn} == {*KINDS, PROPORTIONAL}
    own = [config.global_heads for config in drawn if config.global_heads is not None]
    assert {heads.joint for heads in own} == {False, True}
    assert {config.logit_cap is None for config in drawn} == {False, True}
    long = [c for c in drawn if c.rope.kind == "longrope"]
    assert {c.rope.is_long(c.max_positions) for c in long} == {False, True}
    assert any(config.experts is not None and config.routed is None for config in drawn)
    assert any(
        dict(c.rope.parameters).get("partial_rotary_factor", 1.0) == 1.0
        for c in drawn
        if c.linear is not None
    )
    assert any(config.windows for config in drawn)
    assert any(config.unrotated for config in drawn)
    assert all(len({c.rms_eps for c in drawn if c.family == family}) > 1 for family in FAMILIES)
    assert {kind for config in drawn for kind in config.kinds} == {*LETTERS.values()}


def test_control_a_key_that_is_left_out_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part of a head that is rotated, as it was left out where it is all."""
    write = Rope.to_hf
    monkeypatch.setattr(
        Rope, "to_hf", lambda self, scaled=False, partial=None: write(self, scaled or bool(partial))
    )
    with pytest.raises((AssertionError, IsobitError)):  # another model, or none
        round_trips("qwen3_5_text", 0, 12, tmp_path, theirs=0)


@pytest.mark.parametrize("dense", [(0, 1), (0,)])
def test_a_mixture_whose_layers_are_all_dense_is_trained(
    dense: tuple[int, ...], tmp_path: Path
) -> None:
    """As a Qwen3 of its weights, under a flow that records routes. The control has a layer with
    experts, and routes."""
    experts = Experts(5, 2, 24, dense_layers=dense)
    model = tiny_model(family="qwen3_moe", experts=experts, backend="reference")
    model.save(tmp_path / "model")
    result = train(
        load_config(write_config(tmp_path, tmp_path / "model", precision="fp8-rollout", steps=2))
    )
    last = result.metrics[-1]
    assert last["mismatch/compared_tokens"] > 0
    assert ("router/idle_fraction" in last) == (dense == (0,))
    if dense == (0, 1):
        other = tiny_model(family="qwen3", backend="reference")
        for name, parameter in other.named_parameters().items():
            parameter.data.copy_(model.named_parameters()[name].data)
        other.sync()
        assert torch.equal(model.logprobs([[1, 2, 3, 4]])[0], other.logprobs([[1, 2, 3, 4]])[0])


def test_all_dense_layers_have_no_router_to_replay(tmp_path: Path) -> None:
    tiny_model(family="qwen3_moe", experts=Experts(5, 2, 24, dense_layers=(0, 1))).save(
        tmp_path / "model"
    )
    config = load_config(
        write_config(tmp_path, tmp_path / "model"), ["algorithm.router_replay=true"]
    )
    with pytest.raises(IsobitError, match="it has no router"):
        train(config)
