"""Lookup: questions whose answers take two searches in a small corpus, such as "river of tomaki?".

The corpus says where people live ("tomaki: town belora") and what towns have ("belora: river
sunite"), a line each, with names made of syllables. It is a full-text index (SQLite's FTS5), and
the tool of the environment, `search`, says the line that fits a query best. Who answers has to find
the town first, and then what is asked of it. The reward is 1 where the last answer is the right
name and nothing else.

Held out are people that are never asked about in training. With `demonstrations` the examples are
single turns for supervised training: the first search, the second, and the answer; in a part of
them (`careless`) the first result is taken for the answer.
"""

import re
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

from isobit.data.dataset import Dataset, Example
from isobit.errors import IsobitError
from isobit.options.declare import at_least, at_most
from isobit.tasks.builtin.arithmetic import REWARD
from isobit.tasks.builtin.task import (
    PRINTABLE,
    SEED,
    Task,
    TaskSettings,
    draws_of,
    made_here,
    user_says,
)

DEFAULT_HELD_OUT_SIZE = 96
KINDS = ("river", "tree", "lord")
CALL = '[search(query="{}")]'
"""How demonstrations call the tool (`environment.parser: pythonic`)."""
NOTHING = "nothing found"
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


@dataclass(frozen=True)
class LookupOptions:
    """The size of the corpus, and what the task makes of it: questions or demonstrations."""

    people: Annotated[int, at_least(8), at_most(10_000), "people who live somewhere"] = 400
    towns: Annotated[int, at_least(2), at_most(1_000), "towns they live in"] = 40
    demonstrations: Annotated[
        bool, "examples are single turns to learn from: searches, and answers"
    ] = False
    careless: Annotated[
        float, at_least(0), at_most(1), "part of the demonstrations that answer after one search"
    ] = 0.5
    seed: SEED = 0


@dataclass(frozen=True)
class Corpus:
    """The facts to look up. `homes`: a person's town; `facts`: the name that (town, kind) has."""

    homes: dict[str, str]
    facts: dict[tuple[str, str], str]

    @property
    def lines(self) -> list[str]:
        """Every line of text in the corpus."""
        lives = [f"{person}: town {town}" for person, town in self.homes.items()]
        return lives + [f"{town}: {kind} {name}" for (town, kind), name in self.facts.items()]


def load(settings: TaskSettings) -> Task:
    """Build the task from its options. A prompt is a chat of one message, the question."""
    options, size = made_here(LookupOptions, settings, DEFAULT_HELD_OUT_SIZE)
    corpus = corpus_of(options.people, options.towns, options.seed)
    people = list(corpus.homes)
    barred = -(-size // len(KINDS))  # people, rounded up
    if barred >= len(people):
        raise IsobitError(f"task.held_out_size: {size} questions leave none to train on")
    make = _turns if options.demonstrations else _questions
    train = make(options, corpus, people[barred:])
    return Task(
        "lookup",
        Dataset(train, settings.seed, settings.shuffle),
        Dataset(make(options, corpus, people[:barred])[:size], settings.seed),
        () if options.demonstrations else (REWARD,),
        gold="said" if options.demonstrations else "answer",
        alphabet=PRINTABLE,
    )


@lru_cache(maxsize=4)
def corpus_of(people: int, towns: int, seed: int) -> Corpus:
    """Draw the corpus of this size; the seed decides names, homes and facts."""
    draws = draws_of(seed, 0)
    names = _names(draws, people + towns * (1 + len(KINDS)))
    town_names = [next(names) for _ in range(towns)]
    facts = {(town, kind): next(names) for town in town_names for kind in KINDS}
    homes = {next(names): town_names[next(draws) % towns] for _ in range(people)}
    return Corpus(homes, facts)


def _names(draws: Iterator[int], count: int) -> Iterator[str]:
    """Draw `count` distinct names of three syllables."""
    drawn = dict[str, None]()
    while len(drawn) < count:
        word = next(draws)
        letters = []
        for _ in range(3):
            word, consonant = divmod(word, len(_CONSONANTS))
            word, vowel = divmod(word, len(_VOWELS))
            letters.append(_CONSONANTS[consonant] + _VOWELS[vowel])
        drawn["".join(letters)] = None
    return iter(drawn)


def _questions(options: LookupOptions, corpus: Corpus, people: Sequence[str]) -> list[Example]:
    pairs = [(person, kind) for person in people for kind in KINDS]
    sizes = {"people": options.people, "towns": options.towns, "corpus": options.seed}
    return [
        Example(
            index,
            [user_says(f"{kind} of {person}?")],
            {"answer": corpus.facts[corpus.homes[person], kind], **sizes},
        )
        for index, (person, kind) in enumerate(pairs)
    ]


def _turns(options: LookupOptions, corpus: Corpus, people: Sequence[str]) -> list[Example]:
    """Return every turn of an episode on every question."""
    draws, examples = draws_of(options.seed, 1), list[Example]()
    for person in people:
        town = corpus.homes[person]
        for kind in KINDS:
            chat, name = [user_says(f"{kind} of {person}?")], corpus.facts[town, kind]
            careless = next(draws) % 1000 < 1000 * options.careless
            query = town if careless else CALL.format(f"{town} {kind}")
            for answer, result in (
                (CALL.format(f"{person} town"), f"{person}: town {town}"),
                (query, f"{town}: {kind} {name}"),
                (name, ""),
            ):
                examples.append(Example(len(examples), list(chat), {"said": answer}))
                if answer == town:
                    break
                chat += [
                    {"role": "assistant", "content": answer},
                    {"role": "tool", "name": "search", "content": result},
                ]
    return examples


class Library:
    """The environment: the corpus of a row, and the tool that searches it."""

    def reset(self, people: int, towns: int, corpus: int, **columns: Any) -> None:
        """Open the row's corpus. Adds nothing to the prompt, which holds the question."""
        self._index = _index(people, towns, corpus)

    def search(self, query: str) -> str:
        """Find the line of the corpus that fits a query best.

        Args:
            query: Words to look for.
        """
        words = re.findall(r"\w+", query)
        if not words:
            return NOTHING
        wanted = " OR ".join(f'"{word}"' for word in words)
        row = self._index.execute(
            "SELECT line FROM lines WHERE lines MATCH ? ORDER BY rank, rowid LIMIT 1", (wanted,)
        ).fetchone()
        return NOTHING if row is None else str(row[0])


@lru_cache(maxsize=4)
def _index(people: int, towns: int, seed: int) -> sqlite3.Connection:
    """Build the full-text index of a corpus, in memory. Raises IsobitError where SQLite has no
    FTS5."""
    index = sqlite3.connect(":memory:", check_same_thread=False)
    try:
        index.execute("CREATE VIRTUAL TABLE lines USING fts5(line)")
    except sqlite3.OperationalError as error:
        raise IsobitError(f"task lookup needs SQLite with FTS5: {error}") from None
    lines = [(line,) for line in corpus_of(people, towns, seed).lines]
    index.executemany("INSERT INTO lines VALUES (?)", lines)
    return index
