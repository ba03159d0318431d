"""The sequences of token ids that a model is asked about: what they must be, and how many share a
forward. Left out: their forward."""

from collections.abc import Iterable, Iterator, Sequence

from isobit.errors import IsobitError

_PASS_TOKENS = 8192


def passes(sequences: Iterable[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Yield the sequences in order, as many in each forward as stay within `_PASS_TOKENS` rows, but
    at least one."""
    batch: list[Sequence[int]] = []
    for sequence in sequences:
        if batch and sum(map(len, batch)) + len(sequence) > _PASS_TOKENS:
            yield batch
            batch = []
        batch.append(sequence)
    if batch:
        yield batch


def token_sequences(
    sequences: Sequence[Sequence[int]], vocab_size: int, longest: int
) -> list[Sequence[int]]:
    """Return the sequences, with tensors and arrays turned into lists. Raises IsobitError unless
    they are a list of sequences of token ids below `vocab_size`, each at most `longest` long."""
    wanted = "sequences: expected a list of sequences of token ids, such as [[1, 5]]"
    if hasattr(sequences, "tolist"):
        sequences = sequences.tolist()
    if isinstance(sequences, str) or not isinstance(sequences, Sequence):
        raise IsobitError(f"{wanted}, got {sequences!r:.80}")
    checked: list[Sequence[int]] = []
    for index, given in enumerate(sequences):
        if isinstance(given, int):
            raise IsobitError(f"{wanted}, got one sequence; write [ids]")
        sequence = given.tolist() if hasattr(given, "tolist") else given
        if isinstance(sequence, str) or not isinstance(sequence, Sequence):
            raise IsobitError(f"{wanted}, and sequence {index} is {given!r:.80}")
        if len(sequence) > longest:
            raise IsobitError(
                f"sequence {index} has {len(sequence)} tokens, more than the model's context of "
                f"{longest}"
            )
        for token in sequence:
            if not isinstance(token, int) or isinstance(token, bool):
                raise IsobitError(
                    f"sequence {index}: expected token ids, found {token!r:.80} in it"
                )
            if not 0 <= token < vocab_size:
                raise IsobitError(
                    f"sequence {index}: token id {token} is not in the model's vocabulary of "
                    f"{vocab_size}"
                )
        checked.append(sequence)
    return checked
