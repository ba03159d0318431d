"""AdamW with moments in 8 bits: what it saves, how near it stays, and that it repeats."""

import dataclasses
from pathlib import Path

import pytest
import torch

from isobit.config import load_config
from isobit.errors import Corruption, IsobitError
from isobit.rl import OptimizerSettings
from isobit.rl.optim import masters
from isobit.rl.optim.eight_bit import Moment, code_book
from isobit.rl.optim.sharded import ShardedOptimizer
from isobit.training.train import resume, train
from tests.models import tiny_model
from tests.runs import fingerprint, write_config

SHAPES = {"large": (64, 128), "ragged": (63, 65), "norm": (300,)}


def optimizer(state: str, rate: float = 1e-2) -> ShardedOptimizer:
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in SHAPES.items()
    }
    return ShardedOptimizer(
        parameters, OptimizerSettings(learning_rate=rate, weight_decay=0.1, state=state)
    )


def descend(optimizer: ShardedOptimizer, steps: int, first: int = 0) -> float:
    """Steps down a quadratic with some noise; returns the loss without it."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in optimizer.parameters.values():
            parameter.grad = parameter.detach() + 0.1 * torch.randn(
                parameter.shape, generator=generator
            )
        optimizer.step(optimizer.settings.learning_rate, 0.0)
    return sum(float(p.detach().square().sum()) for p in optimizer.parameters.values())


def test_the_first_steps_are_those_of_fp32_up_to_rounding() -> None:
    plain, small = optimizer("fp32"), optimizer("8bit")
    descend(plain, 1)
    descend(small, 1)
    for name, parameter in plain.parameters.items():
        torch.testing.assert_close(small.parameters[name], parameter, rtol=1e-5, atol=1e-6)
    descend(plain, 9, 1)
    descend(small, 9, 1)
    start, end, other = (o.parameters["large"].detach() for o in (optimizer("fp32"), plain, small))
    moved, apart = float((end - start).norm()), float((end - other).norm())
    assert 0 < apart < 0.1 * moved
    assert torch.equal(
        plain.parameters["ragged"], small.parameters["ragged"]
    )  # too ragged for blocks: FP32 on both


def test_it_descends_as_far() -> None:
    assert descend(optimizer("8bit"), 150) == pytest.approx(
        descend(optimizer("fp32"), 150), rel=0.15
    )


def test_a_quarter_of_the_memory() -> None:
    plain, small = optimizer("fp32"), optimizer("8bit")
    large = 64 * 128
    assert plain.nbytes - small.nbytes == 8 * large - 2 * (large + 4 * large // 256)
    descend(small, 1)
    stored = sum(
        t.numel() * t.element_size()
        for name, t in small.state().items()
        if not name.endswith("step")
    )
    assert stored == small.nbytes


def test_state_goes_back_bit_for_bit_and_a_wrong_one_is_refused() -> None:
    whole, cut, again = optimizer("8bit"), optimizer("8bit"), optimizer("8bit")
    descend(whole, 6)
    descend(cut, 3)
    for name, parameter in cut.parameters.items():
        with torch.no_grad():
            again.parameters[name].copy_(parameter)
    again.load_state(cut.state())
    descend(again, 3, 3)
    for name, parameter in whole.parameters.items():
        assert torch.equal(again.parameters[name], parameter)
    plain = optimizer("fp32")
    descend(plain, 1)
    with pytest.raises(
        IsobitError, match=r"of a run with adamw, state fp32, and this run trains .* 8bit"
    ):
        optimizer("8bit").load_state(plain.state())
    with pytest.raises(
        IsobitError, match=r"of a run with adamw, state 8bit, and this run trains .* fp32"
    ):
        optimizer("fp32").load_state(whole.state())


def test_a_run_logs_what_it_saves_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    base_model = tmp_path / "model"
    tiny_model("fp8", hidden_size=64, intermediate_size=128).save(base_model)
    for name in ("whole", "cut", "plain"):
        (tmp_path / name).mkdir()
    settings = {"optimizer": {"state": "8bit"}}
    whole = train(load_config(write_config(tmp_path / "whole", base_model, **settings)))
    plain = train(load_config(write_config(tmp_path / "plain", base_model, steps=1)))
    assert (
        whole.metrics[0]["memory/optimizer_mib"] < 0.35 * plain.metrics[0]["memory/optimizer_mib"]
    )
    train(
        dataclasses.replace(
            load_config(write_config(tmp_path / "cut", base_model, **settings)), steps=2
        )
    )
    resume(tmp_path / "cut/run", ["steps=4"])
    assert fingerprint(tmp_path / "cut/run") == fingerprint(whole.run_dir)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("up", [False, True])
def test_a_moment_is_a_neighbour_among_its_blocks_values(signed: bool, up: bool) -> None:
    """The value below or above, of all 256 in float64, with the distance from the one below as the
    chance."""
    values = torch.tensor([float(value) for value in code_book(signed)], dtype=torch.float64)
    assert len(set(values.tolist())) == 256
    assert (values.min(), values.max()) == (-0.99296875 if signed else 0, 1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 256, generator=generator) * 10.0 ** torch.randint(
        -12, 3, (16, 1), generator=generator
    )
    x = x if signed else x.square()
    x[3] = 0.0
    moment = Moment.zeros(x, signed)
    whole, drawn = slice(0, x.numel()), list[torch.Tensor]()

    def draw(chances: torch.Tensor) -> torch.Tensor:
        drawn.append(chances.clone())
        return torch.full(chances.shape, up)

    assert not moment.read(whole).any()
    moment.write(whole, x.view(-1).clone(), draw)
    scale = x.abs().amax(1, keepdim=True).clamp_min(2.0**-126)
    assert torch.equal(moment.scale, scale.view(-1))
    given = (x / scale).double()
    below = ((given.unsqueeze(-1) >= values).sum(-1) - 1).clamp(0, 254)
    chances = ((given - values[below]) / (values[below + 1] - values[below])).clamp(0, 1 - 2**-16)
    torch.testing.assert_close(drawn[0].view_as(x).double(), chances, atol=1e-3, rtol=0)
    wanted = below + up
    wanted = wanted if signed else torch.where(x > 0, wanted.clamp_min(1), wanted)
    assert (
        moment.codes.long() == wanted
    ).float().mean() > 0.999  # float32 may take a neighbour for the other
    assert torch.equal(moment.read(whole).view_as(x), values.float()[moment.codes.long()] * scale)
    if not up:
        assert not moment.read(whole).view_as(x)[3].any()
    assert (moment.codes[x > 0] > 0).all()


def test_the_values_are_those_of_the_library_that_old_checkpoints_are_from() -> None:
    """To some last places, which its values have from the processor: codes and scales of such a
    checkpoint go on."""
    library = pytest.importorskip("torchao.optim.subclass_8bit", reason="torchao is not installed")
    for signed, theirs in ((True, library.get_qmap_signed()), (False, library.get_qmap_unsigned())):
        mine = torch.tensor([float(value) for value in code_book(signed)])
        torch.testing.assert_close(mine, torch.tensor(theirs), rtol=1e-6, atol=0)


def test_parts_of_a_parameter_have_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = optimizer("8bit")
    descend(whole, 3)
    monkeypatch.setattr(masters, "AT_ONCE", 1024)
    parts = optimizer("8bit")
    descend(parts, 3)
    assert all(torch.equal(value, parts.state()[name]) for name, value in whole.state().items())
    assert torch.equal(whole.parameters["large"], parts.parameters["large"])
    descend(parts, 1, 3)
    assert not torch.equal(whole.parameters["large"], parts.parameters["large"]), (
        "the control: another step"
    )


@pytest.mark.parametrize(
    "key", ["exp_avg.codes", "exp_avg.scale", "exp_avg_sq.codes", "exp_avg_sq.scale"]
)
def test_a_flipped_bit_is_seen(key: str) -> None:
    """In what follows from an update; the control is the update itself, which changes them all."""
    small = optimizer("8bit")
    small.checksums.begin()
    descend(small, 2)
    small.checksums.compare()
    small._tensors()["large"][key].view(torch.uint8).view(-1)[5] ^= 1
    with pytest.raises(Corruption, match=f"{key} of large changed"):
        small.checksums.compare()
