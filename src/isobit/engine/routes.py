"""Which experts served every token of every sequence of a `generate` call, for router replay.

A prompt is computed once for its group, so its routes are kept once. A sequence that is computed again after a
preemption chooses again, and the same.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from isobit.engine.scheduler import Plan


class RouteRecord:
    """Routes of `prompt_lengths` prompts with `n` samples each: [tokens, layers, k] of a sequence."""

    def __init__(self, prompt_lengths: Sequence[int], n: int, layers: int, per_token: int) -> None:
        self.n = n
        self.prompts = [np.zeros((length, layers, per_token), np.int32) for length in prompt_lengths]
        self.generated = np.zeros((len(prompt_lengths) * n, 32, layers, per_token), np.int32)

    def write(self, plan: Plan, positions: NDArray[np.int64], routes: NDArray[np.int64]) -> None:
        """Take down a step: row r stands at `positions[r]` and took `routes[r]`; rows in the order of the plan."""
        decode = plan.decode
        sequences = plan.sampled[:decode]
        prompt = np.array([len(self.prompts[s // self.n]) for s in sequences.tolist()], np.int64)
        self._put(sequences, positions[:decode] - prompt, routes[:decode])
        begin = decode
        for chunk in plan.chunks:
            end = begin + chunk.stop - chunk.start
            index = chunk.sequence.index
            known = self.prompts[index // self.n]
            inside = max(0, min(chunk.stop, len(known)) - chunk.start)
            known[chunk.start : chunk.start + inside] = routes[begin : begin + inside]
            rest = positions[begin + inside : end] - len(known)
            self._put(np.full(rest.size, index, np.int64), rest, routes[begin + inside : end])
            begin = end

    def of(self, sequence: int, num_generated: int) -> NDArray[np.int32]:
        """Of the tokens that the model has seen: the prompt, and what was sampled but for the last token."""
        return np.concatenate([self.prompts[sequence // self.n], self.generated[sequence, : num_generated - 1]])

    def _put(self, sequences: NDArray[np.int64], columns: NDArray[np.int64], routes: NDArray[np.int64]) -> None:
        if columns.size and columns.max() >= self.generated.shape[1]:
            width = max(2 * self.generated.shape[1], int(columns.max()) + 1)
            grown = np.zeros((self.generated.shape[0], width, *self.generated.shape[2:]), np.int32)
            grown[:, : self.generated.shape[1]] = self.generated
            self.generated = grown
        self.generated[sequences, columns] = routes
