"""The command: `python -m tests.strangers --cases N --seed S`; a case that fails is printed with
how to repeat it."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.loaders import outcome as outcomes

CASE_SECONDS = 60


def outcome(folder: Path, seed: int) -> tuple[str, str]:
    """(ok, refused, failed or hang; what was found) of one case."""
    from . import cases

    return outcomes.outcome(lambda: cases.run(folder, seed), CASE_SECONDS)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 if anything failed."""
    from tests.models import tiny_model

    from . import cases

    parser = argparse.ArgumentParser("python -m tests.strangers", description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    counts = dict.fromkeys(("ok", "refused", "failed", "hang"), 0)
    with tempfile.TemporaryDirectory(prefix="strangers-") as folder:
        tiny_model().save(Path(folder) / "model")
        cases.write_valid(Path(folder), Path(folder) / "model")
        for seed in range(given.seed, given.seed + given.cases):
            kind, what = outcome(Path(folder), seed)
            counts[kind] += 1
            if kind in ("failed", "hang"):
                print(f"{kind.upper()} seed {seed}: {what}", flush=True)
    print(counts)
    return 1 if counts["failed"] or counts["hang"] else 0


if __name__ == "__main__":
    sys.exit(main())
