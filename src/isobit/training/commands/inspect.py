"""`isobit inspect`: load a model, measure, print, and write a page on request."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from isobit.data.dataset import Shaping, read_examples
from isobit.data.readers import Source
from isobit.engine.calibration import calibrate_after
from isobit.engine.prompts import Prompt
from isobit.engine.types import Sampling
from isobit.errors import IsobitError
from isobit.evaluation.inspection.judging import judge
from isobit.evaluation.inspection.mismatch import Gap, decompose, measure_gap, roll_out
from isobit.evaluation.inspection.quantization import Health, activation_health, weight_health
from isobit.model import Model
from isobit.model.described import described
from isobit.monitor.report.inspection import inspection_text, write_inspection
from isobit.precision import precision_from
from isobit.run.directory import RESOLVED, object_in

_PROMPTS_AT_MOST = 32
_DEFAULT_PROMPTS = 16


def inspect_command(
    path: Path,
    presets: Sequence[str],
    prompts_file: Path | None,
    columns: Mapping[str, str],
    sampled: tuple[int, int, float, int],
    taken_apart: bool,
    stale: Path | None,
    reward_model: Path | None,
    backend: str,
    out: Path | None,
) -> None:
    """Print the effects of precision flows on the model; with `out`, write inspection.html and
    inspection.json there.

    `sampled`: how many completions of a prompt, of how many tokens, the temperature and the seed.
    Tensors are shown for the first preset that quantizes anything. Raises IsobitError for a bad
    model, a bad file of prompts or an unknown preset.
    """
    n, new_tokens, temperature, seed = sampled
    sampling = Sampling(n, new_tokens, temperature, seed=seed)
    flows = [precision_from(name) for name in presets]
    if not flows:
        raise IsobitError("--presets: expected at least one, such as fp8,fp8-rollout")
    if columns and prompts_file is None:
        raise IsobitError("--column names a column of the prompts: give --prompts, or leave it out")
    if out is not None and out.exists() and not out.is_dir():
        raise IsobitError(f"--out {out}: a file; give a directory, which may be a new one")
    if stale is not None and not taken_apart:
        raise IsobitError("--stale is a source of the gap: give --decompose too")
    judged = [flow.name for flow in flows if flow.unified]
    if reward_model is not None and not judged:
        raise IsobitError("--reward-model is scored under unified presets: add one, such as fp8")
    model = Model.load(path, flows[0], backend)
    if stale is not None and described(stale).config != model.config:
        raise IsobitError(
            f"--stale {stale}: expected an older checkpoint of {path}, got another architecture"
        )
    prompts = _prompts(model, prompts_file, columns)
    shown = next((flow for flow in flows if flow.rollout.weight is not None), None)
    tensors: list[Health] = []
    if shown is not None:
        watched = model.under(shown)
        completions, _ = roll_out(watched, prompts, sampling)
        sequences = [c.prompt_token_ids + c.token_ids for c in completions]
        one_engine = model.under(replace(shown, learner=shown.rollout, engines="shared"))
        calibrate_after(one_engine, prompts, sequences)
        tensors = weight_health(watched) + activation_health(one_engine, sequences)
    gaps = [measure_gap(model.under(flow), flow.name, prompts, sampling) for flow in flows]
    sources: dict[str, list[tuple[str, Gap, Gap | None]]] = {}
    if taken_apart:
        older = None if stale is None else Model.load(stale, flows[0], backend)
        for flow in flows:
            if not flow.unified:
                sources[flow.name] = decompose(model, flow, prompts, sampling, older)
    values = _plain(str(path), shown.name if shown is not None else "", tensors, gaps, sources)
    values["resolved"] = _resolved(path)
    if reward_model is not None:
        answers, _ = roll_out(model, prompts, sampling)
        values["judgements"] = [
            asdict(j) for j in judge(str(reward_model), judged, prompts, answers, sampling.n)
        ]
    print(inspection_text(values))
    if out is not None:
        print(f"\n{write_inspection(values, out)}")


def _prompts(model: Model, file: Path | None, columns: Mapping[str, str]) -> list[Prompt]:
    if file is not None:
        return [e.prompt for e in read_examples(Source(file), Shaping(columns))[:_PROMPTS_AT_MOST]]
    # without a file: sequences that the model begins, each from another token where it has no
    # token that begins a sequence
    first = model.config.bos_id
    usable = [t for t in range(model.tokenizer.vocab_size) if t not in model.tokenizer.eos_ids]
    if not usable:
        raise IsobitError(
            "the model's vocabulary has nothing to begin a sequence with; give --prompts FILE"
        )
    step = max(1, len(usable) // _DEFAULT_PROMPTS)
    starts = usable[::step][:_DEFAULT_PROMPTS]
    return [[first, token] if first is not None else [token] for token in starts]


def _resolved(path: Path) -> dict[str, Any]:
    """Return the values that the run that saved the model used where its config left them open, for
    a model in a run's `checkpoints` or its best model; empty for other models."""
    candidates = (object_in(folder / RESOLVED) for folder in path.resolve().parents[:2])
    return next((values for values in candidates if values), {})


def _plain(
    model: str,
    preset: str,
    tensors: Sequence[Health],
    gaps: Sequence[Gap],
    sources: dict[str, list[tuple[str, Gap, Gap | None]]],
) -> dict[str, Any]:
    """Return the whole inspection as plain values, which are also those of inspection.json."""
    values = {
        "model": model,
        "preset": preset,
        "tensors": [asdict(health) for health in tensors],
        "gaps": [{"preset": gap.preset, "verdict": gap.verdict, **gap.metrics} for gap in gaps],
        "sources": {
            name: [
                {
                    "source": source,
                    "alone": alone.metrics["kl_k3"],
                    "without": None if without is None else without.metrics["kl_k3"],
                }
                for source, alone, without in rows
            ]
            for name, rows in sources.items()
        },
    }
    return json.loads(json.dumps(values))
