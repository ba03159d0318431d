"""What a config leaves open is written to the run, as it is computed with."""

import json
from pathlib import Path

import pytest

from isobit.config import load_config
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.monitor.report import write_report
from isobit.training.running.resolved import Resolved, resolve
from isobit.training.train import open_run, replay, resume, train
from tests.runs import write_config

CORRECTIONS = {"fp8": "none", "fp8-rollout": "token_tis"}


def written(run: Path) -> dict[str, object]:
    found = json.loads((run / "resolved.json").read_text())
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("precision", CORRECTIONS)
def test_the_run_has_the_correction_that_auto_came_to(
    tmp_path: Path, base_model: Path, precision: str
) -> None:
    """And it is what the learner has; the config says auto in both runs, and the control is the
    other precision."""
    config = load_config(write_config(tmp_path, base_model), ["steps=1", f"precision={precision}"])
    assert config.algorithm.correction == "auto"
    with open_run(config, quiet=True) as session:
        learner, engine, run = session.parts.learner, session.parts.engine, session.run.directory
        found = written(run)
        assert "correction: auto" in (run / "config.yaml").read_text()
        assert found["correction"] == CORRECTIONS[precision] == str(learner.objective.rule)
        assert (
            found["recompute_old_logprobs"]
            == learner.objective.recompute_old
            == (precision != "fp8")
        )
        assert found["expects_equal_bits"] == learner.expects_equal_bits == (precision == "fp8")
        assert found["micro_batch_tokens"] == learner.micro_batch_tokens
        assert found["share_prompts"] == learner.share_prompts
        assert found["page_size"] == engine.page_size
        assert found["order"] == session.model.ops.order


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "correction"),
    [
        ("fp8-rollout-kv-verl", "token_tis"),
        ("fp8-rollout-attention", "token_tis"),
        ("bf16[engines=separate, kv_cache=e4m3-calibrated]", "token_tis"),
        ("fp8-e2e[rollout={weight: bf16, activation: bf16}]", "token_is"),
        ("fp8-e2e[kv_cache=e4m3-calibrated, rollout={bf16_first_layers: 1}]", "token_is"),
    ],
)
def test_the_flows_of_the_papers_learn_under_their_correction(
    tmp_path: Path, base_model: Path, precision: str, correction: str
) -> None:
    """The mismatch is what two engines have, and the weights move; the control is one engine."""
    config = write_config(tmp_path, base_model, precision=precision, steps=3)
    result = train(load_config(config), quiet=True)
    assert written(result.run_dir)["correction"] == correction
    steps = [row for row in result.metrics if row["step"] > 0]
    assert len(steps) == 3
    assert all(row["mismatch/kl_k3"] > 0 for row in steps)
    assert all("correction/mean_weight" in row and row["grad_norm"] > 0 for row in steps)
    (tmp_path / "one").mkdir()
    one = write_config(tmp_path / "one", base_model, precision="fp8-unified", steps=1)
    last = train(load_config(one), quiet=True).metrics[-1]
    assert last["mismatch/kl_k3"] == 0
    assert "correction/mean_weight" not in last


def test_every_field_is_written(base_model: Path, tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, base_model))
    resolved = resolve(config, Model.load(base_model))
    fields = set(Resolved.__dataclass_fields__) - {"objective"}
    assert fields <= resolved.plain().keys()
    assert json.loads(json.dumps(resolved.plain())) == resolved.plain()


def test_a_run_goes_on_with_what_it_began_with(tmp_path: Path, base_model: Path) -> None:
    """One line where it does not; the control goes on, and a run without the file gets one."""
    run = train(load_config(write_config(tmp_path, base_model), ["steps=1"]), quiet=True).run_dir
    before = written(run)
    (run / "resolved.json").write_text(json.dumps(before | {"correction": "token_tis"}))
    with pytest.raises(
        IsobitError, match=r"began with correction token_tis .* go on with none"
    ) as caught:
        resume(run, ["steps=2"], quiet=True)
    assert "\n" not in str(caught.value)
    (run / "resolved.json").write_text(json.dumps(before))
    assert resume(run, ["steps=2"], quiet=True).metrics[-1]["step"] == 2
    (run / "resolved.json").unlink()
    resume(run, ["steps=3"], quiet=True)
    assert written(run) == before


def test_a_run_from_recorded_rollouts_promises_bits_only_where_nothing_differs(
    tmp_path: Path, base_model: Path
) -> None:
    run = train(load_config(write_config(tmp_path, base_model), ["steps=1"]), quiet=True).run_dir
    assert written(replay(run, tmp_path / "same", quiet=True).run_dir)["expects_equal_bits"] is True
    other = replay(run, tmp_path / "other", ["precision=fp8-unified"], quiet=True).run_dir
    assert written(other)["expects_equal_bits"] is False


def test_the_report_shows_it(tmp_path: Path, base_model: Path) -> None:
    """Below the config; of several runs among what differs. The control is a run that has not
    recorded it."""
    runs = []
    for precision in CORRECTIONS:
        (tmp_path / precision).mkdir()
        config = write_config(tmp_path / precision, base_model)
        runs.append(
            train(load_config(config, ["steps=1", f"precision={precision}"]), quiet=True).run_dir
        )
    first, second = runs
    text = write_report([second], tmp_path / "one.html").read_text()
    assert "correction: token_tis" in text
    both = write_report([first, second], tmp_path / "both.html").read_text()
    assert "resolved: correction" in both
    (second / "resolved.json").unlink()
    assert "correction: token_tis" not in write_report([second], tmp_path / "none.html").read_text()
