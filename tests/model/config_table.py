"""Variants of `config.json`, the families by their keys: is what isobit accepts what `transformers`
computes?

    python -m tests.model.config_table            how many, by family and outcome
    python -m tests.model.config_table --all      every variant

Each variant is a directory as `transformers` saves it, with a config.json of its own: keys changed
and keys left out. `transformers` and isobit (preset `float32`) load it and give log-probabilities
of one sequence, longer than the original length of every rotary scaling. What isobit accepts must
agree; what `transformers` cannot load, isobit must refuse.
"""

import argparse
import hashlib
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from isobit.errors import IsobitError
from isobit.model import Model, Tokenizer
from isobit.model.families import FAMILIES
from tests.models import ALPHABET

from .config_variants import BASES, SHAPES, Variant, variants
from .helpers import randomize, tokens

CLOSE = 1e-4
"""Largest distance of two log-probabilities that are one model's. `transformers` has float32
angles: at position 60 off by up to 2**-19, times the weights. Wrong models are farther off by far
(`test_config_table.py`)."""
RECURRENT = 2e-4
"""The same for Qwen3-Next, whose transformers sums states in chunks: of three layers with linear
attention it is 1.2e-4 from its own result in float64, and isobit 5e-5."""
SEQUENCE = tokens(60, 5)


@dataclass(frozen=True)
class Outcome:
    """What came of a variant. `distance`: the largest of two log-probabilities, where both loaded
    it."""

    variant: Variant
    ours: str  # "" or the refusal
    theirs: str  # "" or the error; "" where it is refused
    distance: float | None

    @property
    def kind(self) -> str:
        """`different` is whatever isobit accepts and transformers does not compute: another number,
        or none."""
        if self.ours:
            return "refused"
        close = RECURRENT if self.variant.family == "qwen3_next" else CLOSE
        return "equal" if self.distance is not None and self.distance <= close else "different"


class Bench:
    """Directories of checkpoints. Variants whose weights have the same shapes have the same
    weights."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._weights: dict[str, Path] = {}
        (root / "tokenizer").mkdir()
        Tokenizer.characters(ALPHABET).save(root / "tokenizer")

    def outcome(self, variant: Variant) -> Outcome:
        """Load a variant here, and if it is not refused, on the other side."""
        directory = self._directory(variant)
        ours, refusal = _attempt(lambda: our_logprobs(directory), IsobitError)
        if refusal:
            return Outcome(variant, refusal, "", None)
        theirs, error = _attempt(
            lambda: their_logprobs(directory), Exception
        )  # KeyError, TypeError, its own
        distance = None if ours is None or theirs is None else float((ours - theirs).abs().max())
        return Outcome(variant, refusal, error, distance)

    def _directory(self, variant: Variant) -> Path:
        values = variant.values()
        directory = self._root / "variant"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(self._root / "tokenizer", directory)
        weights = self._saved(values)
        (directory / "config.json").write_text(json.dumps(values))
        if not variant.head:
            (directory / "model.safetensors").symlink_to(weights)
            return directory
        tensors = load_file(weights)
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = (
            embedding.clone() if variant.head == "same" else embedding.flip(0).clone()
        )
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    def _saved(self, values: dict[str, Any]) -> Path:
        """Weights of these shapes, of all else as in the base; the base's own where transformers
        has no such model."""
        shape = {key: values[key] for key in SHAPES if key in values}
        key = hashlib.sha256(f"{values['model_type']}{shape}".encode()).hexdigest()[:16]
        if key not in self._weights:
            base = {"model_type": values["model_type"], **BASES[values["model_type"]]}
            rest = {key: value for key, value in base.items() if key not in SHAPES}
            self._weights[key], _ = _attempt(lambda: self._save(rest | shape, key), Exception)
            self._weights[key] = self._weights[key] or self._saved(base)
        return self._weights[key]

    def _save(self, values: dict[str, Any], key: str) -> Path:
        model = _build(values)
        randomize(model, 11)
        model.save_pretrained(self._root / key)
        return self._root / key / "model.safetensors"


def _attempt(function: Any, errors: type[Exception]) -> tuple[Any, str]:
    try:
        return function(), ""
    except errors as caught:
        return None, str(caught) if isinstance(
            caught, IsobitError
        ) else f"{type(caught).__name__}: {caught}"


def _build(values: dict[str, Any]) -> Any:
    name = FAMILIES[values["model_type"]].architecture
    config = transformers.CONFIG_MAPPING[values["model_type"]](**json.loads(json.dumps(values)))
    return getattr(transformers, name)(config).float()


@torch.no_grad()
def their_logprobs(directory: Path) -> Tensor:
    """[tokens - 1], float32, of `transformers`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    )
    logits = model(torch.tensor([SEQUENCE[:-1]]), use_cache=False).logits[0]
    return logits.log_softmax(-1).gather(1, torch.tensor(SEQUENCE[1:]).unsqueeze(1)).squeeze(1)


def our_logprobs(directory: Path) -> Tensor:
    """[tokens - 1], float32, of isobit."""
    return Model.load(directory, "float32", "reference", "exact").logprobs([SEQUENCE])[0]


def run(rows: Iterable[Variant]) -> list[Outcome]:
    """The outcome of each, in order."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as root:
        bench = Bench(Path(root))
        return [bench.outcome(row) for row in rows]


def summary(outcomes: list[Outcome]) -> str:
    """Counts by family, and the farthest of the equal ones."""
    kinds = ("equal", "refused", "different")
    counts = Counter((outcome.variant.family, outcome.kind) for outcome in outcomes)
    lines = [f"{'family':<12}{'variants':>10}" + "".join(f"{kind:>11}" for kind in kinds)]
    for family in BASES:
        row = [counts[family, kind] for kind in kinds]
        lines.append(f"{family:<12}{sum(row):>10}" + "".join(f"{count:>11}" for count in row))
    totals = [sum(counts[family, kind] for family in BASES) for kind in kinds]
    lines.append(f"{'all':<12}{sum(totals):>10}" + "".join(f"{count:>11}" for count in totals))
    farthest = max(o.distance or 0.0 for o in outcomes if o.kind == "equal")
    return "\n".join(
        [
            *lines,
            f"farthest of the equal ones: {farthest:.1e} in log-probability (bound {CLOSE:.0e})",
        ]
    )


def _line(outcome: Outcome) -> str:
    told = outcome.ours.replace("\n", " ") or f"{outcome.distance} {outcome.theirs[:60]!r}"
    return f"{outcome.variant.family:<10} {outcome.variant.name:<42} {outcome.kind:<10} {told}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--all", action="store_true", help="every variant, not only those that differ"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    outcomes = run(variants())
    shown = [o for o in outcomes if arguments.all or o.kind == "different"]
    print("\n".join([*map(_line, shown), summary(outcomes)]))


if __name__ == "__main__":
    main()
