"""Whole runs: the same bits at every number of ranks, also after a restart on another number, and
errors for all."""

import os
import shutil
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from isobit.distributed import supervisor
from isobit.errors import IsobitError, RunFailed
from isobit.run.heartbeat import beats
from tests.distributed.kills import launched
from tests.distributed.sessions import (
    SMALL,
    bits,
    replayed,
    resumed,
    session,
    started,
    trained,
    written,
)
from tests.distributed.threads import ThreadRanks, run
from tests.models import slow_where
from tests.until import until

VARIANTS: dict[str, tuple[str, Sequence[str]]] = {
    "fp8": ("qwen3", []),
    "fp8-unified": ("qwen3", ["precision=fp8-unified", "optimizer.gradient_sum_group=2"]),
    "bf16": ("qwen3", ["precision=bf16"]),
    "mixture of experts": (
        "qwen3_moe",
        ["algorithm.router_aux_coefficient=0.01", "algorithm.updates_per_batch=2"],
    ),
    "BF16 masters": ("qwen3", ["optimizer.masters=bf16", "optimizer.state=8bit"]),
    "Muon": ("qwen3", ["optimizer.name=muon"]),
    "adapter": ("qwen3", ["adapter={rank: 8, alpha: 32}", "optimizer.learning_rate=0.02"]),
    "adapter of experts": ("gpt_oss", ["adapter.rank=4", "optimizer.learning_rate=0.02"]),
    "calibrated cache": ("qwen3", ["precision=fp8-rollout-kv"]),
    "dynamic sampling": (
        "qwen3",
        ["algorithm.dynamic_sampling=true", "sampling.temperature=0.6", "steps=3"],
    ),
    "ahead, replay": (
        "qwen3",
        ["rollouts_ahead=2", "replay.groups_per_step=1", "replay.capacity=8", "steps=3"],
    ),
    "partial": ("qwen3", ["partial={tokens_per_round: 1, extra_prompts: 3}", "steps=3"]),
    "partial, ahead": (
        "qwen3",
        ["partial={tokens_per_round: 1, extra_prompts: 3}", "rollouts_ahead=1", "steps=3"],
    ),
    "optimal token baseline": (
        "qwen3",
        ["algorithm.advantage=otb", "precision=fp8-rollout", "steps=2"],
    ),
    "top-p": ("qwen3", ["sampling.top_p=0.9", "sampling.top_k=9", "steps=2"]),
    "self-distillation": (
        "qwen3",
        [
            "algorithm={advantage: distillation, kl_coefficient: 1, kl_in_reward: true}",
            "reference={weights: policy, shown: {success: 0.3, template: '{shown}{prompt}'}}",
            "steps=2",
        ],
    ),
    "reference that follows": (
        "qwen3",
        [
            "algorithm.kl_coefficient=0.1",
            "precision=fp8-rollout-kv",
            "reference={sync_every: 1, sync_alpha: 0.5}",
            "steps=2",
        ],
    ),
    "adapter's reference that follows": (
        "qwen3",
        [
            "adapter={rank: 8, alpha: 32}",
            "algorithm.kl_coefficient=0.1",
            "optimizer.learning_rate=0.02",
            "reference={sync_every: 1, sync_alpha: 0.5}",
            "steps=2",
        ],
    ),
    "self-distillation by the vocabulary": (
        "qwen3",
        [
            "algorithm={advantage: distillation, kl_coefficient: 1, kl_in_reward: true}",
            "algorithm.loss=divergence",
            "reference={weights: policy, shown: {success: 0.3, template: '{shown}{prompt}'}}",
            "steps=2",
        ],
    ),
    "curriculum": (
        "qwen3",
        [
            "curriculum={mode: skip, floor: 0.3, solved_at: 0.3}",
            "task.options.train_size=8",
            "steps=5",
        ],
    ),
    "reference, evaluation": (
        "qwen3",
        [
            "algorithm.kl_coefficient=0.01",
            "algorithm.kl_in_reward=true",
            "evaluation.every=2",
            "steps=3",
        ],
    ),
}


QUICK = ("adapter", "partial")
SIZES = {"fp8": (1, 2, 3, 4), "mixture of experts": (2, 3), "fp8-unified": (4,)}
"""Those that are not 3, which divides nothing evenly."""
OTHERS = dict.fromkeys(VARIANTS, (2,)) | {"mixture of experts": (1, 4), "fp8-unified": (3,)}


@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        *slow_where(
            [(name, SIZES.get(name, (3,))) for name in VARIANTS],
            lambda name, _: name not in QUICK,
        ),
        *(
            pytest.param(name, sizes, marks=pytest.mark.slow)
            for name, sizes in OTHERS.items()
            if name != "fp8"
        ),
    ],
)
def test_a_run_has_the_same_bits_at_every_number_of_ranks(
    tmp_path: Path, variant: str, sizes: Sequence[int]
) -> None:
    """Weights, moments, metrics without times, completions, records of quantization, the best
    model."""
    family, overrides = VARIANTS[variant]
    config = written(tmp_path, family)
    alone = trained(config, tmp_path / "alone", 0, overrides)
    for size in sizes:
        assert trained(config, tmp_path / f"of {size}", size, overrides) == alone, size
    if variant == "fp8":  # the control: another seed is another run
        assert trained(config, tmp_path / "control", 2, [*overrides, "seed=1"]) != alone


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """A config, the directory of its run without any code of ranks, and that run's bits."""
    folder = tmp_path_factory.mktemp("one")
    config = written(folder)
    return config, folder / "alone", trained(config, folder / "alone", 0)


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_ranks(
    tmp_path: Path, one: tuple[Path, Path, Any]
) -> None:
    """4, then 3, 1 and 2: the end of a run that was never stopped."""
    config, _, alone = one
    directory = tmp_path / "elastic"
    run(4, lambda ranks: session(config, [f"run.dir={directory}", "steps=1"], ranks))
    for size, steps in ((3, 2), (1, 3), (2, 4)):
        run(size, partial(resumed, directory, [f"steps={steps}"]))
    assert bits(directory) == alone


@pytest.mark.slow
def test_recorded_rollouts_are_learned_from_alike(
    tmp_path: Path, one: tuple[Path, Path, Any]
) -> None:
    """`--from-rollouts` on several ranks: the run that one makes of them, with the weights of the
    run recorded."""
    _, recorded, alone = one

    def again(size: int, *overrides: str) -> dict[str, Any]:
        out = tmp_path / f"of {size} {overrides}"
        run(size, lambda ranks: replayed(recorded, out, overrides, ranks))
        return bits(out)

    replayed(recorded, tmp_path / "again")
    wanted = bits(tmp_path / "again")
    assert wanted["model.safetensors"] == alone["model.safetensors"]
    assert again(2) == again(3) == wanted
    assert (
        again(2, "optimizer.learning_rate=0.002")["model.safetensors"]
        != wanted["model.safetensors"]
    )  # the control


def _joined(directory: Path, size: int, printed: str) -> None:
    """The ranks of a run that has ended were so many, and one of them had the screen."""
    assert [beat["rank"] for beat in beats(directory)] == list(range(size))
    assert f"ranks: {size}\n" in (directory / "config.yaml").read_text()
    assert printed.count("consistency: bitwise") == 1


@pytest.mark.slow
def test_processes_started_here_train_the_same(tmp_path: Path, one: tuple[Path, Path, Any]) -> None:
    """By gloo."""
    config, _, alone = one
    directory = tmp_path / "run"
    process = started(["train", str(config), *SMALL, f"run.dir={directory}", "ranks=2"])
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    assert bits(directory) == alone
    _joined(directory, 2, printed)


@pytest.mark.slow
def test_processes_exchange_whole_matrices(tmp_path: Path) -> None:
    """By gloo, for Muon."""
    config, directory = written(tmp_path), tmp_path / "run"
    alone = trained(config, tmp_path / "alone", 0, ["optimizer.name=muon"])
    given = ["train", str(config), *SMALL, "optimizer.name=muon", f"run.dir={directory}", "ranks=2"]
    process = started(given)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    assert bits(directory) == alone


@pytest.mark.slow
def test_processes_that_torchrun_starts_again_train_the_same(
    tmp_path: Path, one: tuple[Path, Path, Any]
) -> None:
    """One of three dies (SIGKILL) as it learns from the third batch, a step after a checkpoint."""
    config, _, alone = one
    directory = tmp_path / "run"
    dies = ["--rank", "1", "--phase", "learn", "--nth", "3"]
    settings = [*SMALL, f"run.dir={directory}", "run.rank_timeout_s=60"]
    code, printed, _ = launched(3, dies, ["train", str(config), *settings], restarts=1)
    assert code == 0, printed
    first, died, second = printed.partition("exitcode: -9")
    assert died, printed
    assert bits(directory) == alone
    _joined(directory, 3, first)
    _joined(directory, 3, second)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, "launcher"])
def test_a_killed_process_ends_all_in_one_line_and_the_run_goes_on(
    tmp_path: Path, one: tuple[Path, Path, Any], victim: int | str
) -> None:
    config, _, alone = one
    directory = tmp_path / "run"
    process = started(["train", str(config), *SMALL, f"run.dir={directory}", "ranks=2", "steps=40"])
    until(
        lambda: (directory / "checkpoints" / "step-000002").is_dir() and len(beats(directory)) == 2
    )
    pids = [beat["pid"] for beat in beats(directory)]
    os.kill(process.pid if victim == "launcher" else pids[int(victim)], signal.SIGKILL)
    began = time.monotonic()
    printed, _ = process.communicate(timeout=300)
    until(lambda: not any(map(_alive, pids)), 30)
    assert time.monotonic() - began < 30
    if victim != "launcher":
        lines = [line for line in printed.splitlines() if line.startswith("isobit:")]
        assert process.returncode == 1
        assert lines == [line for line in lines if f"isobit train --resume {directory}" in line]
        assert len(lines) == 1, printed
        assert f"rank {victim} " in lines[0]
        assert "ended by SIGKILL" in lines[0]
    assert "Traceback" not in printed
    shutil.rmtree(directory / "checkpoints" / "step-000040", ignore_errors=True)
    newest = max(int(path.name[-6:]) for path in (directory / "checkpoints").glob("step-*"))
    run(3, lambda ranks: resumed(directory, [f"steps={max(4, newest)}"], ranks))
    if newest <= 4:
        assert bits(directory) == alone


@pytest.mark.slow
@pytest.mark.parametrize(("size", "victim"), [(2, 1), (3, 0)])
def test_a_rank_that_stands_still_is_named_and_ended(
    tmp_path: Path, size: int, victim: int
) -> None:
    """At the deadline, in one line, also if it is the one with the screen."""
    config, directory = written(tmp_path, steps=4000), tmp_path / "run"
    process = started(
        [
            "train",
            str(config),
            *SMALL,
            f"run.dir={directory}",
            f"ranks={size}",
            "run.rank_timeout_s=5",
        ]
    )
    until(lambda: len(beats(directory)) == size and beats(directory)[-1]["step"] >= 1)
    pids = [beat["pid"] for beat in beats(directory)]
    os.kill(pids[victim], signal.SIGSTOP)
    began = time.monotonic()
    printed, _ = process.communicate(timeout=300)
    assert (
        time.monotonic() - began < supervisor._ENDS_S
    )  # after which whoever starts ranks ends them
    assert not any(map(_alive, pids))
    assert process.returncode == 1
    (line,) = [line for line in printed.splitlines() if line.startswith("isobit:")]
    assert (
        f"waited 5 s for rank {victim} (last seen in: " in line
        or f", rank {victim} (last seen in: " in line
    )
    assert f"isobit train --resume {directory}" in line
    assert "gloo" not in printed
    assert "Traceback" not in printed


@pytest.mark.slow
def test_sigterm_saves_on_all_ranks(tmp_path: Path) -> None:
    config, directory = written(tmp_path, steps=400), tmp_path / "run"
    process = started(
        ["train", str(config), *SMALL, f"run.dir={directory}", "ranks=2", "run.checkpoint_every=0"]
    )
    until(lambda: any(beat["step"] >= 2 for beat in beats(directory)))
    process.terminate()
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM, printed
    assert f"isobit train --resume {directory}" in printed
    step = max(int(path.name[-6:]) for path in (directory / "checkpoints").glob("step-*"))
    assert step >= 2
    assert bits(directory)["step"] == f"step-{step:06d}"


def test_an_error_of_one_rank_is_every_ranks(tmp_path: Path) -> None:
    """A reward function that fails for one completion: the newest whole step is saved, as on one
    process."""
    config, directory = written(tmp_path), tmp_path / "run"
    reward = tmp_path / "digit_reward.py"
    reward.write_text(
        reward.read_text()
        .replace("return", "assert trainer_state.global_step < 2\n    return")
        .replace("completions, **", "completions, trainer_state, **")
    )
    raised: list[str] = []

    def failing(ranks: ThreadRanks) -> None:
        try:
            session(config, [f"run.dir={directory}", "run.checkpoint_every=0"], ranks)
        except RunFailed as error:
            raised.append(str(error))

    run(3, failing)
    assert len(set(raised)) == 1
    assert len(raised) == 3
    assert "digit_reward.py:digits, sample" in raised[0]
    assert f"step 2 is saved; go on with: isobit train --resume {directory}" in raised[0]


def test_ranks_that_differ_are_refused(tmp_path: Path) -> None:
    config = written(tmp_path)

    def differing(ranks: ThreadRanks) -> None:
        session(config, [f"run.dir={tmp_path / 'run'}", f"seed={ranks.rank // 2}"], ranks)

    with pytest.raises(
        IsobitError, match=r"the ranks differ: seed is 0 on rank 0 .* and 1 on rank 2"
    ):
        run(3, differing)
    assert not (tmp_path / "run").exists()


def test_a_rank_that_does_not_see_the_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, directory = written(tmp_path), tmp_path / "run"
    seen = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda self: self.parent != directory and seen(self))
    with pytest.raises(
        IsobitError, match=r"rank 1 on host \S+ does not see it; the ranks need one file system"
    ):
        run(2, lambda ranks: session(config, [f"run.dir={directory}"], ranks))
