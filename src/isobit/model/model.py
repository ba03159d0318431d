"""`Model`: weights, tokenizer and precision together; what the engine rolls out and the learner trains.

Loads and saves Hugging Face directories, starts one from random weights, and computes log-probabilities of given
tokens.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isobit.errors import IsobitError
from isobit.kernels import Layout, get_ops
from isobit.model import names
from isobit.model.checkpoint import SHARD_BYTES, read_json, read_weights, write_json, write_weights
from isobit.model.config import ModelConfig
from isobit.model.tokenizer import Tokenizer
from isobit.model.transformer import USES, Transformer, parameter_shapes
from isobit.precision import Precision, precision_from

_PASS_TOKENS = 8192  # rows of one forward of `logprobs`


class Model:
    """A language model under one precision flow."""

    def __init__(self, transformer: Transformer, tokenizer: Tokenizer) -> None:
        config = transformer.config
        if tokenizer.vocab_size > config.vocab_size:
            raise IsobitError(
                f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, but the model's vocabulary ends at "
                f"{config.vocab_size - 1}"
            )
        if outside := [token for token in tokenizer.eos_ids if not 0 <= token < config.vocab_size]:
            raise IsobitError(
                f"end-of-sequence id {outside[0]} is not in the model's vocabulary of {config.vocab_size}"
            )
        self.transformer = transformer
        self.tokenizer = tokenizer
        self.generation: dict[str, object] = {}  # of generation_config.json: kept for `save`
        self.config = config
        self.precision = transformer.precision
        self.ops = transformer.ops["learner"]

    @staticmethod
    def load(
        path: str | Path,
        precision: str | Mapping[str, object] | Precision = "fp8",
        backend: str = "auto",
        consistency: str = "bitwise",
    ) -> "Model":
        """A Hugging Face directory (Llama, Qwen2, Qwen3) under a preset's name, a mapping, or a `Precision`.

        Raises IsobitError, in one line, for whatever is wrong with the directory or the arguments.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise IsobitError(f"model {directory}: no such directory; expected a Hugging Face model directory")
        flow, ops = precision_from(precision), get_ops(backend, consistency)
        config = ModelConfig.from_hf(read_json(directory / "config.json"), str(directory / "config.json"))
        tokenizer = Tokenizer.load(directory)
        masters = names.fuse(read_weights(directory), config, str(directory))
        model = Model(Transformer(config, flow, ops, masters), tokenizer)
        if (directory / "generation_config.json").is_file():
            model.generation = read_json(directory / "generation_config.json")
        return model

    @staticmethod
    def init(
        config: ModelConfig,
        tokenizer: Tokenizer,
        precision: str | Mapping[str, object] | Precision = "fp8",
        seed: int = 0,
        backend: str = "auto",
        consistency: str = "bitwise",
    ) -> "Model":
        """Random weights: normal with deviation 0.02, projections back into the residual stream smaller by
        sqrt(2 · layers) (GPT-2), norms 1, biases 0. The same seed gives the same weights."""
        generator = torch.Generator().manual_seed(seed)
        masters: dict[str, Tensor] = {}
        for name, shape in parameter_shapes(config).items():
            if len(shape) == 1:
                masters[name] = torch.ones(shape) if name.endswith("norm") else torch.zeros(shape)
                continue
            deviation = 0.02 / math.sqrt(2 * config.num_layers) if name.endswith((".o", ".down")) else 0.02
            masters[name] = torch.randn(shape, generator=generator) * deviation
        ops = get_ops(backend, consistency)
        return Model(Transformer(config, precision_from(precision), ops, masters), tokenizer)

    def under(self, precision: str | Mapping[str, object] | Precision) -> "Model":
        """The same masters, in the same storage, under another precision flow; its working weights are its own."""
        masters = {name: parameter.detach() for name, parameter in self.named_parameters().items()}
        flow = precision_from(precision)
        model = Model(Transformer(self.config, flow, self.ops, masters), self.tokenizer)
        model.generation = self.generation
        return model

    @property
    def weights_version(self) -> int:
        """Counts syncs: every change of the working weights."""
        return self.transformer.weights_version

    def sync(self, rollout: bool = True) -> None:
        """Requantize the working weights from the masters; `rollout` False leaves a separate engine's copy alone."""
        self.transformer.sync(rollout)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The FP32 masters, in a fixed order."""
        return list(self.transformer.parameters.values())

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The FP32 masters by name, in a fixed order."""
        return self.transformer.parameters

    @torch.no_grad()
    def logprobs(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, use: str = "learner"
    ) -> list[Tensor]:
        """For each sequence of n tokens, float32 [n - 1] on the CPU: entry t is log p(token t+1 | tokens up to t).

        The probabilities are of softmax(logits / temperature). Raises IsobitError for a token outside the vocabulary
        for a sequence longer than the model's context, for a temperature that is not above 0 and for another `use`.
        """
        if use not in USES:
            raise IsobitError(f"use: expected one of {', '.join(USES)}, got {use!r}")
        if not (temperature > 0 and math.isfinite(temperature)):
            raise IsobitError(f"temperature: log-probabilities need one above 0, got {temperature}")
        for index, sequence in enumerate(sequences):
            self._check(index, sequence)
        results: list[Tensor] = []
        batch: list[Sequence[int]] = []
        for sequence in sequences:
            if batch and sum(map(len, batch)) + len(sequence) > _PASS_TOKENS:
                results += self._packed_logprobs(batch, temperature, use)
                batch = []
            batch.append(sequence)
        return results + self._packed_logprobs(batch, temperature, use) if batch else results

    def save(self, directory: str | Path, dtype: torch.dtype = torch.float32, shard_bytes: int = SHARD_BYTES) -> None:
        """Write config, weights (the masters, as `dtype`) and tokenizer; `transformers` loads the directory as it is.

        Weights above `shard_bytes` are written in several files.
        """
        tensors = names.split(self.named_parameters(), self.config)
        self.write(
            Path(directory), {name: t.to(dtype) for name, t in tensors.items()}, {"dtype": _name(dtype)}, shard_bytes
        )

    def write(
        self, directory: Path, tensors: Mapping[str, Tensor], keys: Mapping[str, Any], shard_bytes: int = SHARD_BYTES
    ) -> None:
        """Write a directory with these tensors, and these keys in config.json beside those of the architecture."""
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / "config.json", {**self.config.to_hf(), **keys})
        eos = list(self.tokenizer.eos_ids)
        generation = {
            "bos_token_id": self.config.bos_id,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "pad_token_id": self.config.pad_id,
        }
        given = {key: value for key, value in generation.items() if value is not None}
        write_json(directory / "generation_config.json", self.generation | given)
        write_weights(directory, tensors, shard_bytes)
        self.tokenizer.save(directory)

    def memory(self) -> dict[str, int]:
        """Bytes of masters, of the rollout's working weights, and of those that the learner has besides."""
        masters = sum(p.numel() * p.element_size() for p in self.named_parameters().values())
        rollout, learner = self.transformer.working_bytes()
        return {"masters": masters, "rollout": rollout, "learner": learner}

    def _check(self, index: int, sequence: Sequence[int]) -> None:
        if len(sequence) > self.config.max_positions:
            limit = self.config.max_positions
            raise IsobitError(f"sequence {index} has {len(sequence)} tokens, more than the model's context of {limit}")
        size = self.config.vocab_size
        if any(not 0 <= token < size for token in sequence):
            raise IsobitError(f"sequence {index}: a token id is not in the model's vocabulary of {size}")

    def _packed_logprobs(self, batch: Sequence[Sequence[int]], temperature: float, use: str) -> list[Tensor]:
        inputs = [list(sequence[:-1]) for sequence in batch]
        filled = [row for row in inputs if row]
        tokens = torch.tensor([token for row in filled for token in row], dtype=torch.int64)
        targets = [token for sequence in batch for token in sequence[1:]]
        if not filled:
            return [torch.empty(0) for _ in batch]
        hidden = self.transformer.hidden(tokens, Layout.packed([len(row) for row in filled]), use=use)
        ops = self.transformer.ops[use]
        wanted = torch.tensor(targets, dtype=torch.int64, device=ops.device)
        logprobs = self.transformer.head_logprobs(hidden, wanted, temperature, use)[0].cpu()
        ops.raise_faults()
        return list(logprobs.split([len(row) for row in inputs]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
