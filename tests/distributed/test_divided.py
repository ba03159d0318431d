"""Whole runs whose working weights a group of ranks holds together: the bits of one process, at any
number of ranks and of those that hold a model."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.config import load_sft_config
from isobit.distributed import ALONE, Ranks
from isobit.distributed.ranks import Alone
from isobit.errors import NonFiniteError, RankLost
from isobit.model.forward import autograd, layers
from isobit.model.weights.divided import DividedWeights
from isobit.rl.learner.gradient import Differentiation
from isobit.training.loop import training_loop
from isobit.training.train import open_run
from tests.dialogues import TEMPLATE
from tests.distributed.kills import launched
from tests.distributed.sessions import bits, resumed, session
from tests.distributed.test_by_rows import SIZES
from tests.distributed.threads import run
from tests.models import ALPHABET, slow_where, tiny_model
from tests.runs import write_config
from tests.training.test_preference_run import pairs
from tests.training.test_sft_run import written as written_answers
from tests.training.test_turns import config_of

SMALL = ["optimizer.micro_batch_tokens=32", "run.quantization_every=2", "engine.kv_pages=32"]
LETTERS = ALPHABET + "*" + "".join(map(chr, range(0x4E00, 0x4E00 + 520)))
LAYOUTS = [(1, 1), (2, 2), (3, 3), (4, 2), (4, 4)]
"""(ranks, how many of them hold a model together)."""
Bits = dict[str, Any]


def written(folder: Path, tied: bool = False, **changes: object) -> Path:
    """A config whose model four ranks can hold together."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {**SIZES, "max_positions": 192, "tie_embeddings": tied}
    model = tiny_model("bf16", "qwen3", 5, LETTERS, "auto", 3.0, **sizes)
    model.save(folder / "base")
    config = write_config(folder, folder / "base", **changes)
    (folder / "base" / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "digit_reward.py").write_text(
        "def digits(prompts, completions, **columns):\n"
        "    return [sum(ord(c) % 5 for c in text) / 9 for text in completions]\n"
    )
    return config


def trained(
    config: Path, out: Path, layout: tuple[int, int], overrides: Sequence[str] = ()
) -> Bits:
    """The bits of a new run in a layout; (0, 0): without any code of ranks."""
    ranks, group = layout
    given = [*SMALL, *overrides, f"run.dir={out}"]
    if ranks == 0:
        session(config, given)
    else:
        run(ranks, lambda each: session(config, [*given, f"divided={group}"], each))
    return bits(out)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Bits]:
    """A config, and the bits of its run in one process."""
    folder = tmp_path_factory.mktemp("one")
    config = written(folder, steps=2)
    return config, trained(config, folder / "alone", (0, 0))


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is closed is NaN instead of without memory, and so is what was not gathered."""

    def close(weights: DividedWeights, part: str) -> None:
        for tensor in weights._parts[part].tensors:
            tensor.whole.view(torch.uint8).fill_(0xFF)

    monkeypatch.setattr(DividedWeights, "_close", close)


@pytest.mark.parametrize(("ranks", "group"), slow_where(LAYOUTS, lambda *layout: layout != (4, 2)))
def test_a_run_has_the_bits_of_one_process(
    tmp_path: Path, one: tuple[Path, Bits], ranks: int, group: int
) -> None:
    """Weights, moments, completions and all metrics but times; what is closed has no memory."""
    config, alone = one
    assert trained(config, tmp_path / "run", (ranks, group)) == alone


def test_nothing_closed_is_read(tmp_path: Path, one: tuple[Path, Bits], poison: None) -> None:
    config, alone = one
    assert trained(config, tmp_path / "run", (2, 2)) == alone


VARIANTS: dict[str, tuple[bool, Sequence[str]]] = {
    "tied, bf16": (True, ["precision=bf16", "optimizer.activation_checkpointing=true"]),
    "tied, fp8": (True, ["optimizer.gradient_sum_group=2", "evaluation.every=2"]),
    "bf16": (False, ["precision=bf16", "algorithm.updates_per_batch=2"]),
    "checked gradients": (False, ["run.check_gradients_every=1", "optimizer.masters=bf16"]),
    "mxfp8": (False, ["precision=mxfp8", "rollouts_ahead=1"]),
    "self-distillation": (
        False,
        [
            "algorithm={advantage: distillation, kl_coefficient: 1, kl_in_reward: true}",
            "algorithm.loss=divergence",
            "reference={weights: policy, shown: {success: 0.3, template: '{shown}{prompt}'}}",
        ],
    ),
    "reference": (False, ["algorithm.kl_coefficient=0.1"]),
    "partial": (True, ["partial={tokens_per_round: 1, extra_prompts: 3}"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(3, 3), (4, 2)], ids=str)
def test_episodes_of_several_turns_have_the_bits_of_one_process(
    tmp_path: Path, layout: tuple[int, int]
) -> None:
    """Environments answer after random times, of which one rank of a group says what has come."""
    written(tmp_path)
    config = config_of(tmp_path, tmp_path / "base", 0.01, steps=2)
    given = ["engine.kv_pages=64", "evaluation.every=1"]
    alone = trained(config, tmp_path / "alone", (0, 0), given)
    assert trained(config, tmp_path / "run", layout, given) == alone


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_runs_of_all_kinds_have_the_bits_of_one_process(
    tmp_path: Path, variant: str, layout: tuple[int, int]
) -> None:
    tied, overrides = VARIANTS[variant]
    config = written(tmp_path, tied, steps=2)
    alone = trained(config, tmp_path / "alone", (0, 0), overrides)
    assert trained(config, tmp_path / "run", layout, overrides) == alone


@pytest.mark.slow
def test_a_run_goes_on_in_other_layouts(tmp_path: Path, one: tuple[Path, Bits]) -> None:
    """Four that hold one model, three that hold one each, two that hold one, and one process alone;
    the control is another seed."""
    config, _ = one
    alone = trained(config, tmp_path / "alone", (0, 0), ["steps=4"])
    directory = tmp_path / "elastic"
    given = [*SMALL, f"run.dir={directory}", "steps=1", "divided=4"]
    run(4, lambda each: session(config, given, each))
    run(3, partial(resumed, directory, ["steps=2", "divided=1"]))
    run(2, partial(resumed, directory, ["steps=3", "divided=2"]))
    resumed(directory, ["steps=4", "divided=1"])
    assert bits(directory) == alone
    assert trained(config, tmp_path / "control", (2, 2), ["seed=1"]) != alone


PLACES = ("forward", "loss", "backward", "check")
QUIET = (
    "run.quantization_every=0"  # which measures the micro-batches that other ranks have computed
)


@pytest.mark.parametrize("place", slow_where(list(PLACES), lambda place: place != "backward"))
def test_a_rank_that_meets_nan_keeps_nobody_waiting(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second micro-batch of each step, in the middle of a pass, or in the first where it is
    computed twice: the step is skipped as on one
    process. The others have opened what it has not."""
    here, micro = threading.local(), Differentiation._micro_batch

    def marked(self: Differentiation, one: Any, index: int, *given: Any) -> Any:
        here.broken, here.layers = index == 1, 0
        try:
            return micro(self, one, index, *given)
        finally:
            here.broken = False

    def breaking(after: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any, **named: Any) -> Any:
            if getattr(here, "broken", False):
                here.layers += 1
                if here.layers > after:
                    raise NonFiniteError("planted")
            return function(*given, **named)

        return called

    def tried(self: Differentiation, one: Any, index: int, *given: Any) -> Any:
        if index == 0:
            raise NonFiniteError("planted")
        return first(self, one, index, *given)

    first = Differentiation._try
    monkeypatch.setattr(Differentiation, "_micro_batch", marked)
    if place == "forward":
        monkeypatch.setattr(layers, "_mlp", breaking(1, layers._mlp))
    elif place == "loss":
        monkeypatch.setattr(Differentiation, "_loss", breaking(0, Differentiation._loss))
    elif place == "check":
        monkeypatch.setattr(Differentiation, "_try", tried)
    else:
        backward = staticmethod(breaking(1, autograd._GatedLinear.backward))
        monkeypatch.setattr(autograd._GatedLinear, "backward", backward)
    config = written(tmp_path, steps=1)
    overrides = [] if place != "check" else ["run.check_gradients_every=1", QUIET]
    alone = trained(config, tmp_path / "alone", (0, 0), overrides)
    assert '"steps/skipped": 1' in repr(alone)
    assert trained(config, tmp_path / "run", (4, 2), overrides) == alone


PROCESS = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
torch.set_num_threads(1)
from isobit.distributed.transport import TorchRanks
from tests.distributed.test_divided import SMALL
from tests.distributed.kills import launched
from tests.distributed.sessions import session

rank, size, group, folder = *map(int, sys.argv[1:4]), Path(sys.argv[4])
ranks = TorchRanks(dist.FileStore(str(folder / "store"), size), rank, size, torch.device("cpu"), 60)
given = [*SMALL, f"run.dir={folder / 'run'}", f"divided={group}"]
session(folder / "config.yaml", given, ranks)
ranks.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "group"), [(2, 2), (4, 2)])
def test_processes_have_the_bits_of_one_process(tmp_path: Path, ranks: int, group: int) -> None:
    """Over gloo."""
    config = written(tmp_path, steps=2)
    alone = trained(config, tmp_path / "alone", (0, 0))
    assert ended(PROCESS, ranks, str(group), str(tmp_path)) == [(0, "")] * ranks
    assert bits(tmp_path / "run") == alone


LATE = """
import os, sys
import torch
import torch.distributed as dist
from isobit.distributed.transport import TorchRanks
from isobit.errors import RankLost

rank, size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
ranks = TorchRanks(dist.FileStore(path, size), rank, size, torch.device("cpu"), 30)
group = ranks.group(2)
assert group.all_gather_json(rank) == [rank // 2 * 2, rank // 2 * 2 + 1]
assert (group.rank, group.size, group.claim("a") < 2) == (rank % 2, 2, True)
for _ in range(3 * (rank < 2)):
    group.all_gather_bytes(b"x" * rank)
if rank == 3:
    os._exit(0)
if rank == 2:
    try:
        group.all_gather_json(None)
    except RankLost as error:
        print(error)
os._exit(0)
"""


def ended(program: str, size: int, *given: str) -> list[tuple[int, str]]:
    """(exit code, what was printed) of each process."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(size), *given],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(size)
    ]
    said = [process.communicate(timeout=200)[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, said)]


@pytest.mark.slow
def test_a_rank_that_its_group_misses_is_named(tmp_path: Path) -> None:
    """And none of another group, which has met more often."""
    said = ended(LATE, 4, str(tmp_path / "store"))
    assert [code for code, _ in said] == [0] * 4
    assert "rank 3 (last seen in: start) did not come" in said[2][1]


def test_control_rows_that_were_not_sent_are_noticed(
    tmp_path: Path, one: tuple[Path, Bits], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one weight of a layer, after the first optimizer step."""
    config, alone = one
    make = DividedWeights.make

    def forgetful(weights: DividedWeights, masters: Any, names: Any, ops: Any) -> None:
        later = len(weights._moves) > 0
        make(weights, masters, [n for n in names if not (later and n == "layers.1.down")], ops)

    monkeypatch.setattr(DividedWeights, "make", forgetful)
    assert trained(config, tmp_path / "run", (2, 2)) != alone


def supervised(config: Path, out: Path, ranks: int, group: int) -> Bits:
    """As `trained`, of a run that learns from given answers."""

    def one(each: Ranks = ALONE) -> None:
        given = [f"run.dir={out}", *([f"divided={group}"] if group else [])]
        with open_run(load_sft_config(config, given), quiet=True, ranks=each) as opened:
            training_loop(opened)
            opened.finish()

    if ranks == 0:
        one()
    else:
        run(ranks, one)
    return bits(out)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_supervised_runs_have_the_bits_of_one_process(tmp_path: Path, kind: str) -> None:
    """With held-out answers, and those of DPO's reference."""
    written(tmp_path)
    given = {"steps": 2, "evaluation": {"every": 1}}
    make = pairs if kind == "dpo" else written_answers
    config = make(tmp_path / kind, tmp_path / "base", **given)
    alone = supervised(config, tmp_path / "alone", 0, 0)
    for ranks, group in ((2, 2), (4, 2)):
        assert supervised(config, tmp_path / f"of {ranks}", ranks, group) == alone


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["rollout", "learn", "sync"])
def test_a_rank_that_is_killed_ends_all_and_the_run_goes_on(tmp_path: Path, phase: str) -> None:
    """As it enters a verb for the second time: within the time limit, with its number; then in another
    layout."""
    config, directory = written(tmp_path, steps=3), tmp_path / "run"
    alone = trained(config, tmp_path / "alone", (0, 0), ["run.checkpoint_every=1"])
    options = ["--rank", "1", "--phase", phase, "--nth", "2", "--after-ms", "0"]
    given = [f"run.dir={directory}", "run.checkpoint_every=1", "run.rank_timeout_s=60"]
    arguments = ["train", str(config), *SMALL, *given, "divided=2"]
    code, printed, seconds = launched(4, options, arguments)
    assert code != 0, printed
    assert seconds < 60, printed
    assert "rank 1 (last seen in: " in printed
    assert not any(f"rank {other} (last seen in: " in printed for other in (0, 2, 3)), printed
    run(3, partial(resumed, directory, ["divided=3"]))
    assert bits(directory) == alone


class _Lost(Alone):
    """A rank whose peer does not come."""

    size = 2  # type: ignore[misc]

    def all_gather_json(self, value: Any) -> Any:
        raise RankLost("waited 5 s for rank 1")


def test_an_error_for_which_others_wait_elsewhere_is_not_lost() -> None:
    """In their group, where this rank does not come: its own error is the reason. The control: a
    rank without one says who did not come."""

    def broken() -> None:
        raise NonFiniteError("planted")

    with pytest.raises(NonFiniteError, match="planted"):
        _Lost().run_on_all(broken)
    with pytest.raises(RankLost, match="rank 1"):
        _Lost().run_on_all(lambda: None)
