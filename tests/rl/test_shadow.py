"""The BF16 shadow: noise by the sign of the advantage, and bounds that allow for it."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from isobit.config import load_config
from isobit.errors import IsobitError
from isobit.rl.learner.shadow import calibrated_bounds, shadow_metrics
from isobit.training.train import resume, train
from tests.runs import fingerprint, write_config


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor([math.log(ratio) for ratio in ratios])


def test_noise_by_the_sign_of_the_advantage_worked_out_by_hand() -> None:
    noisy, clean = logs(1.3, 1.1, 0.7, 0.9, 0.5), logs(1.1, 1.1, 0.9, 0.9, 0.6)
    found = shadow_metrics(noisy, clean, torch.tensor([1.0, 2.0, -1.0, -3.0, -1.0]), 0.2, 0.2)
    assert found == {
        "shadow/ratio_error_positive": pytest.approx(math.log(1.3 / 1.1) / 2, abs=1e-6),
        "shadow/ratio_bias_positive": pytest.approx(math.log(1.3 / 1.1) / 2, abs=1e-6),
        "shadow/clipped_by_noise_positive": 0.5,
        "shadow/clipped_in_bf16_positive": 0.0,
        "shadow/ratio_error_negative": pytest.approx((math.log(0.9 / 0.7) + math.log(0.6 / 0.5)) / 3, abs=1e-6),
        "shadow/ratio_bias_negative": pytest.approx((math.log(0.7 / 0.9) + math.log(0.5 / 0.6)) / 3, abs=1e-6),
        "shadow/clipped_by_noise_negative": pytest.approx(1 / 3),
        "shadow/clipped_in_bf16_negative": pytest.approx(1 / 3),
    }


def test_a_side_without_tokens_says_nothing() -> None:
    found = shadow_metrics(logs(1.3), logs(1.1), torch.tensor([1.0]), 0.2, 0.2)
    assert {name.rpartition("_")[2] for name in found} == {"positive"}
    assert calibrated_bounds(logs(1.3), logs(1.1), torch.tensor([1.0]), 0.2, 0.2) == (0.2, pytest.approx(0.3))
    assert shadow_metrics(logs(1.3), logs(1.1), torch.tensor([0.0]), 0.2, 0.2) == {}


def test_calibrated_bounds_clip_as_much_as_bf16_does() -> None:
    generator = torch.Generator().manual_seed(0)
    clean = 0.15 * torch.randn(20000, generator=generator)
    noisy = clean + 0.1 * torch.randn(20000, generator=generator)
    advantages = torch.where(torch.arange(20000) % 2 == 0, 1.0, -1.0)
    low, high = calibrated_bounds(noisy, clean, advantages, 0.2, 0.28)
    assert low > 0.2
    assert high > 0.28
    positive, negative = advantages > 0, advantages < 0
    for found, wanted in (
        (noisy[negative].exp() < 1 - low, clean[negative].exp() < 0.8),
        (noisy[positive].exp() > 1 + high, clean[positive].exp() > 1.28),
    ):
        assert float(found.double().mean()) == pytest.approx(float(wanted.double().mean()), abs=1e-3)


def test_without_noise_the_bounds_stay() -> None:
    clean = 0.1 * torch.randn(500, generator=torch.Generator().manual_seed(1))
    advantages = torch.where(torch.arange(500) % 2 == 0, 1.0, -1.0)
    low, high = calibrated_bounds(clean, clean, advantages, 0.05, 0.05)
    assert (low, high) == (pytest.approx(0.05, abs=5e-3), pytest.approx(0.05, abs=5e-3))


def test_shadow_passes_in_a_run_change_nothing_but_what_they_say(tmp_path: Path, base_model: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "watched").mkdir()
    several = {"updates_per_batch": 2, "epochs": 2}
    plain = train(load_config(write_config(tmp_path / "plain", base_model, algorithm=several)))
    watched = train(
        load_config(write_config(tmp_path / "watched", base_model, algorithm={**several, "shadow_every": 2}))
    )
    assert fingerprint(plain.run_dir)["model.safetensors"] == fingerprint(watched.run_dir)["model.safetensors"]
    assert ["shadow/ratio_error_negative" in row for row in watched.metrics] == [True, False, True, False]
    assert all(row["shadow/ratio_error_negative"] > 0 for row in watched.metrics[::2])


def test_the_shadow_of_bf16_is_bf16(tmp_path: Path, base_model: Path) -> None:
    """The control: without low precision there is no noise."""
    settings = {"algorithm": {"shadow_every": 1}, "precision": "bf16", "optimizer": {"learning_rate": 1e-2}}
    result = train(load_config(write_config(tmp_path, base_model, **settings)))
    assert all(row["shadow/ratio_error_negative"] == 0 for row in result.metrics)


def test_calibrated_bounds_are_used_and_resumed(tmp_path: Path, base_model: Path) -> None:
    settings = {
        "algorithm": {"shadow_every": 3, "shadow_calibrates_clip": True, "updates_per_batch": 4, "clip_low": 0.01},
        "optimizer": {"learning_rate": 2e-2},
    }
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = train(load_config(write_config(tmp_path / "whole", base_model, **settings)))
    assert whole.metrics[0]["shadow/clip_low"] > 0.01
    config = load_config(write_config(tmp_path / "cut", base_model, **settings))
    train(dataclasses.replace(config, steps=2))
    resume(tmp_path / "cut/run", ["steps=4"])
    assert fingerprint(tmp_path / "cut/run") == fingerprint(whole.run_dir)


def test_calibration_without_shadow_passes_is_refused(tmp_path: Path, base_model: Path) -> None:
    with pytest.raises(IsobitError, match="needs shadow passes"):
        load_config(write_config(tmp_path, base_model, algorithm={"shadow_calibrates_clip": True}))


def test_weights_that_blew_up_leave_the_clip_as_it_was(tmp_path: Path, base_model: Path) -> None:
    algorithm = {"shadow_every": 1, "shadow_calibrates_clip": True}
    settings = {"algorithm": algorithm, "optimizer": {"learning_rate": 1e30, "max_bad_steps": 9}, "steps": 1}
    result = train(load_config(write_config(tmp_path, base_model, **settings)))
    assert "shadow/clip_low" not in result.metrics[0]


def test_bounds_are_never_tighter_than_given() -> None:
    """A flow whose noise pulls ratios towards 1 clips less than BF16; the bounds stay, and the other way they move."""
    clean, calm = logs(0.5, 0.9, 1.1, 2.0), logs(0.95, 0.97, 1.01, 1.02)
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0])
    assert calibrated_bounds(calm, clean, advantages, 0.2, 0.28) == (0.2, 0.28)
    low, high = calibrated_bounds(logs(0.3, 0.6, 1.4, 3.0), clean, advantages, 0.2, 0.28)
    assert low == pytest.approx(1 - math.sqrt(0.3 * 0.6))
    assert high == pytest.approx(math.sqrt(1.4 * 3.0) - 1)


def test_a_side_without_tokens_does_not_silence_the_other() -> None:
    found = shadow_metrics(logs(0.7), logs(0.9), torch.tensor([-1.0]), 0.2, 0.2)
    assert {name.rpartition("_")[2] for name in found} == {"negative"}
    assert found["shadow/clipped_by_noise_negative"] == 1
