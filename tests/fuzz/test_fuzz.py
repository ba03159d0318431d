"""Some seconds of fuzzing, and the controls: with a broken part the fuzzer must say so."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from isobit.engine import runner
from isobit.engine.engine import Engine
from isobit.engine.rows import DecodeRows
from isobit.engine.scheduler import Scheduler
from isobit.engine.types import Sampling
from isobit.kernels.native import available
from isobit.model import Model
from isobit.model.families import FAMILIES
from tests.models import require

from . import cases, check
from .__main__ import fuzz, main
from .weights import KINDS

SEED = 20261101
QUICK = 20261106
"""Five small cases from here on."""
NEWER = 20261135
"""Of these the first has an adapter, drafts that count and several turns."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "seed", "cases"), [("native", SEED, 400), ("reference", 4, 2)]
)  # these two take 9 s
def test_some_seconds_without_a_differing_bit(
    backend: str, seed: int, cases: int, capsys: pytest.CaptureFixture[str]
) -> None:
    require(backend)
    assert (
        main(
            ["--backend", backend, "--seed", str(seed), "--minutes", "0.07", "--cases", str(cases)]
        )
        == 0
    )
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"backend {backend}, cases from seed {seed} on"
    assert " cases, 0 failures, " in printed[-1]
    assert not printed[-1].startswith("0 ")


def _activation_scale_per_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = {"preset": "fp8-unified", "activation_granularity": "tensor"}
    monkeypatch.setattr(cases, "_flow", lambda *_: flow)
    monkeypatch.setattr(cases, "KINDS", ("normal",))


def _stale_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = Engine.generate

    @torch.no_grad()
    def then_change(self: Engine, *arguments: Any) -> Any:
        groups = generate(self, *arguments)
        for parameter in self.model.parameters():
            parameter.mul_(1.5)
        self.model.sync()
        return groups

    monkeypatch.setattr(Engine, "generate", then_change)
    monkeypatch.setattr(cases, "_flow", lambda *_: {"preset": "bf16"})


def _tokens_by_place_in_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Scheduler,
        "key",
        lambda self, s: (s.owner.request.sampling.seed, s.owner.number, s.number - s.owner.number),
    )


def _settings_of_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = DecodeRows.advance

    def spread(self: DecodeRows, tokens: object) -> None:
        advance(self, tokens)  # type: ignore[arg-type]
        self.settings[: self.count] = self.settings[self.count - 1 : self.count].copy()

    monkeypatch.setattr(DecodeRows, "advance", spread)


def _every_draft_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "counts", lambda draft, sampled: True)


def _turns_by_the_size_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = Engine.continue_from

    def other(self: Engine, completion: Any, tokens: Any, sampling: Sampling) -> Any:
        return go_on(self, completion, tokens, replace(sampling, seed=self.page_size))

    monkeypatch.setattr(Engine, "continue_from", other)


def _an_adapter_that_only_the_learner_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(model: Model, *arguments: Any, **given: Any) -> Engine:
        adapter = model.transformer.adapter
        return Engine(model if adapter is None else model.without_adapter(), *arguments, **given)

    monkeypatch.setattr(check, "Engine", without)


@pytest.mark.parametrize(
    ("break_it", "seed", "least", "said"),
    [
        pytest.param(
            _every_draft_counts, NEWER, 1, "have other tokens under", marks=pytest.mark.slow
        ),
        pytest.param(_turns_by_the_size_of_pages, NEWER, 1, "schedule in ", marks=pytest.mark.slow),
        pytest.param(
            *(_an_adapter_that_only_the_learner_has, NEWER, 1, "are not the learner's"),
            marks=pytest.mark.slow,
        ),
        (_activation_scale_per_tensor, QUICK, 3, "log-probabilities are not the learner's"),
        (_stale_weights, QUICK, 3, "log-probabilities are not the learner's"),
        (_tokens_by_place_in_the_call, QUICK, 1, "have other tokens under the second schedule"),
        pytest.param(
            _settings_of_the_last_row, 20261114, 1, "beside other requests", marks=pytest.mark.slow
        ),
    ],
)
def test_negative_control_a_broken_part_is_found(
    break_it: Callable[[pytest.MonkeyPatch], None],
    seed: int,
    least: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    backend = "native" if available()[0] else "reference"
    break_it(monkeypatch)
    assert main(["--backend", backend, "--seed", str(seed), "--cases", "5"]) == 1
    failures = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED seed ")
    ]
    assert len(failures) >= least
    assert any(said in line for line in failures)
    # each line carries what repeats it alone
    command = failures[0].rpartition("python -m tests.fuzz ")[2].split()
    assert command[:2] == ["--backend", backend]
    assert main(command) == 1
    assert failures[0] in capsys.readouterr().out.splitlines()


def test_a_crash_is_a_failure_and_the_next_case_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("of no use")

    monkeypatch.setattr("tests.fuzz.__main__.check", fail)
    said: list[str] = []
    totals = fuzz("reference", 7, cases=2, say=said.append)
    assert str(totals) == "2 cases, 2 failures, 0 tokens compared"
    assert [line.partition(" (")[0] for line in said] == [
        f"FAILED seed {seed}: ZeroDivisionError: of no use" for seed in (7, 8)
    ]


def test_cases_repeat_and_cover_what_they_should() -> None:
    drawn = [cases.draw(seed) for seed in range(800)]
    assert drawn == [cases.draw(seed) for seed in range(800)]
    assert all(case.flow.unified and case.flow.varies_with_batch() is None for case in drawn)
    assert {case.config.family for case in drawn} == set(FAMILIES)
    assert {case.weights for case in drawn} == set(KINDS)
    assert {kind for case in drawn for kind in case.config.kinds} == {*cases.PARTS}
    kinds = {"default", "linear", "llama3", "longrope", "proportional", "yarn"}
    assert {case.config.rope.kind for case in drawn} == kinds
    assert {case.flow.name.partition("[")[0] for case in drawn} == {
        "bf16",
        "float32",
        "fp8",
        "fp8-unified",
        "mxfp8",
        "nvfp4",
    }
    for what in (
        [case.flow.calibrated for case in drawn],
        [case.flow.learner.query is not None for case in drawn],
        [case.flow.learner.probabilities is not None for case in drawn],
        [bool(case.flow.bf16_layers) for case in drawn],
        [case.flow.learner.bf16_first_layers > 0 for case in drawn],
        [case.config.hidden_size > 128 for case in drawn],
        [case.config.tie_embeddings for case in drawn],
        [case.sampling.top_k > 0 for case in drawn],
        [case.sampling.repetition_penalty != 1 for case in drawn],
        [any(case.config.windows) for case in drawn],
        [bool(case.config.unrotated) for case in drawn],
        [case.config.sliding_rope is not None for case in drawn],
        [case.updates > 0 for case in drawn],
        [case.learning.recompute for case in drawn],
        [case.learning.share_prompts for case in drawn],
        [any(len(set(prompt)) == 1 < len(prompt) for prompt in case.prompts) for case in drawn],
        [max(map(len, case.prompts)) > 256 for case in drawn],
        [case.adapter is not None for case in drawn],
        [len(case.turns) == 2 for case in drawn],
        [any(s.num_speculative_tokens == "auto" for s in case.schedules) for case in drawn],
        [all(s.num_speculative_tokens != 0 for s in case.schedules) for case in drawn],
        [all(s.prefix_cache for s in case.schedules) for case in drawn],
        [case.config.global_heads is not None for case in drawn],
        [bool(case.config.global_heads and case.config.global_heads.joint) for case in drawn],
        [case.config.logit_cap is not None for case in drawn],
        [case.config.inputs.embedded > 0 for case in drawn],
        [case.config.inputs.reading > 0 for case in drawn],
    ):  # fmt: skip
        assert 10 < sum(what) < 790
