"""A game of several turns whose reward is 1 for a win and 0 for everything else: does it learn?

The game is the task `guess`: a number of a range in a few guesses, of which each is answered by
"higher" or "lower". The config `guess.yaml` goes on from a base that has learned how the game is
played, but seldom heeds what it hears (`careless`); it is trained with the sparse reward, and by
another seed. The control begins with a base that always heeds it, and guesses at random among what
is left: what is missing there is to halve it.

Beside the curves stand the chances of players who can be computed exactly: at random in the whole
range, as the base was shown, at random among what is left, and halving. `explained` is the share of
the variance of an episode's reward that the choice of its guesses explains, the rest being luck: it
says how many episodes a step of a given size takes.

`python -m benchmarks.experiments.guess WORK --out FILE --chart PNG` trains all in the folder WORK.
Times are seconds of a processor, of a run and its worker, as one thread. Left out: the dense reward.
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import machine
from benchmarks.experiments.command import command, write
from isobit.run.directory import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
BASES = {"sparse": {}, "rules": {"careless": 0.0}}
"""What a base's demonstrations have otherwise, by the arm that begins with it."""
ARMS = {"sparse": (0, 1), "rules": (0,)}
"""Seeds of each."""
KEPT = ("reward/mean", "accuracy/held_out", "env/turns", "mismatch/differing_tokens")
NAMES = {"sparse": "from a base that seldom heeds hints", "rules": "from one that always does"}


@cache
def game() -> dict[str, Any]:
    """Numbers and guesses of the config's game, and how careless its base was shown to be."""
    base, run = (
        yaml.safe_load((ROOT / f"configs/{name}.yaml").read_text())["task"]["options"]
        for name in ("guess-sft", "guess")
    )
    assert all(base[key] == run[key] for key in ("numbers", "guesses", "largest"))
    return {"numbers": run["numbers"], "guesses": run["guesses"], "careless": base["careless"]}


class Player:
    """Who guesses at random in the whole range in a share of guesses that are `careless`, and
    otherwise among what is left. A state is what is left, from `low` to `high`, and how many
    guesses are."""

    def __init__(self, numbers: int, guesses: int, careless: float) -> None:
        self.numbers, self.guesses, self.careless = numbers, guesses, careless
        self._value = cache(self._value_of)

    @property
    def wins(self) -> float:
        """The chance to win."""
        return self._value(1, self.numbers, self.guesses)

    def explained(self) -> float:
        """The share of the variance of the reward that the guesses' choices explain: the sum over
        guesses of the mean variance of the chance to win by which one it is."""
        total, reached = 0.0, {(1, self.numbers): 1.0}
        for left in range(self.guesses, 0, -1):
            then: dict[tuple[int, int], float] = {}
            for (low, high), chance in reached.items():
                value = self._value(low, high, left)
                for guess in range(1, self.numbers + 1):
                    share = chance * self._chance(low, high, guess)
                    after = self._after(low, high, guess)
                    total += share * (self._of(low, high, left, guess) - value) ** 2
                    for state, part in after:
                        then[state] = then.get(state, 0.0) + share * part
            reached = then
        return total / (self.wins * (1 - self.wins))

    def _value_of(self, low: int, high: int, left: int) -> float:
        if not left:
            return 0.0
        every = range(1, self.numbers + 1)
        return sum(self._chance(low, high, g) * self._of(low, high, left, g) for g in every)

    def _chance(self, low: int, high: int, guess: int) -> float:
        heeding = (1 - self.careless) / (high - low + 1) if low <= guess <= high else 0.0
        return self.careless / self.numbers + heeding

    def _of(self, low: int, high: int, left: int, guess: int) -> float:
        """The chance to win with this guess."""
        found = 1 / (high - low + 1) if low <= guess <= high else 0.0
        after = self._after(low, high, guess)
        return found + sum(part * self._value(*state, left - 1) for state, part in after)

    @staticmethod
    def _after(low: int, high: int, guess: int) -> list[tuple[tuple[int, int], float]]:
        """What may be left behind a guess that is wrong, and with which chance."""
        if not low <= guess <= high:
            return [((low, high), 1.0)]
        parts = [((low, guess - 1), guess - low), ((guess + 1, high), high - guess)]
        return [(state, count / (high - low + 1)) for state, count in parts if count]


def players() -> dict[str, float]:
    """The chances to win, and what the choice of guesses explains for the two bases."""
    numbers, guesses = game()["numbers"], game()["guesses"]
    shown, rules = (Player(numbers, guesses, share) for share in (game()["careless"], 0.0))
    return {
        "at random in the range": Player(numbers, guesses, 1.0).wins,
        "as demonstrated": shown.wins,
        "at random among what is left": rules.wins,
        "halving": min(1.0, (2**guesses - 1) / numbers),
        "explained, as demonstrated": shown.explained(),
        "explained, at random among what is left": rules.explained(),
    }


def run(arm: str, seed: int, work: Path, *changes: str) -> dict[str, Any]:
    """Curves and seconds of a run in WORK, made there unless it is there already."""
    folder = work / "runs" / f"{arm}-{seed}"
    took = work / f"{arm}-{seed}.json"
    if not took.is_file():
        base = work / f"{arm}-sft.yaml"
        values = yaml.safe_load((ROOT / "configs/guess-sft.yaml").read_text())
        values["task"]["options"] |= BASES[arm]
        values["model"]["chat_template"] = str(ROOT / "configs/turns.jinja")
        base.write_text(yaml.safe_dump(values))
        given = [f"model.sft={base}", f"seed={seed}", *changes]
        only = [*given, f"run.dir={work / 'runs' / f'{arm}-{seed}-base'}", "steps=1"]
        spent = {"base and a step": _isobit(work, *only, "evaluation.every=0")}
        spent["run"] = _isobit(work, *given, f"run.dir={folder}")
        took.write_text(json.dumps(spent))
    rows = list(read_jsonl(folder / "metrics.jsonl"))
    curves = {
        name: [[row["step"], row[name]] for row in rows if row.get(name) is not None]
        for name in KEPT
    }
    return {"seconds": json.loads(took.read_text()), **curves}


def _isobit(work: Path, *words: str) -> float:
    """Train by the config; the seconds of a processor that it took, its workers' included."""
    environment = os.environ | {"ISOBIT_CACHE": str(work / "cache"), "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    given = [sys.executable, "-m", "isobit", "train", "configs/guess.yaml", *words, "--quiet"]
    subprocess.run(given, check=True, cwd=ROOT, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1)


def measure(work: Path, *changes: str) -> dict[str, Any]:
    """All runs, and the players beside them."""
    work.mkdir(parents=True, exist_ok=True)
    work = work.resolve()
    runs = {
        arm: {str(seed): run(arm, seed, work, *changes) for seed in seeds}
        for arm, seeds in ARMS.items()
    }
    return {"game": game(), "players": players(), "runs": runs, "machine": machine()}


def table(found: Mapping[str, Any]) -> str:
    """A line for each run, in Markdown: wins before and after, and what it took."""
    lines = [
        "| base | seed | steps | wins held out, greedy, before | after | wins while sampling, first "
        "five steps | last five | differing tokens | seconds of one thread |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, seeds in found["runs"].items():
        for seed, one in seeds.items():
            greedy, sampled = _values(one["accuracy/held_out"]), _values(one["reward/mean"])
            first, last = (sum(part) / len(part) for part in (sampled[:5], sampled[-5:]))
            differing = sum(_values(one["mismatch/differing_tokens"]))
            lines.append(
                f"| {NAMES[arm]} | {seed} | {len(sampled)} | {greedy[0]:.2f} | {greedy[-1]:.2f} "
                f"| {first:.2f} | {last:.2f} | {differing:.0f} | {one['seconds']['run']:.0f} |"
            )
    return "\n".join(lines)


def _values(curve: Sequence[Sequence[float]]) -> list[float]:
    return [value for _, value in curve]


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Wins by step, held out and while sampling, between the players that can be computed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    kinds = (("accuracy/held_out", "held-out ranges, greedy"), ("reward/mean", "while sampling"))
    for axis, (name, title) in zip(axes, kinds):
        for arm, seeds in found["runs"].items():
            for index, (seed, one) in enumerate(seeds.items()):
                style: dict[str, Any] = {"color": "C0" if arm == "sparse" else "C7"}
                style |= {"linestyle": ("-", "--", ":")[index % 3], "linewidth": 1.6}
                if name == "accuracy/held_out":
                    style |= {"marker": "o", "markersize": 3}
                axis.plot(*zip(*one[name]), label=f"{NAMES[arm]}, seed {seed}", **style)
        for player, wins in found["players"].items():
            if not player.startswith("explained"):
                axis.axhline(wins, color="gray", linestyle=":", linewidth=0.8)
                axis.text(0, wins + 0.01, player, fontsize=7, color="dimgray")
        axis.set(title=f"games won: {title}", xlabel="step", ylim=(0, 1.08))
    axes[0].legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = command(__file__, __doc__)
    parser.add_argument("work", type=Path, metavar="WORK", help="a folder for runs")
    parser.add_argument("--chart", type=Path, metavar="PNG", help="also draw it")
    arguments = parser.parse_args()
    found = measure(arguments.work)
    write(arguments.out, found)
    if arguments.chart:
        draw(found, arguments.chart)
    print(table(found))


if __name__ == "__main__":
    main()
