"""`Model`: weights, tokenizer and precision together; what the engine rolls out and the learner
trains.

Loads and saves Hugging Face directories, starts one from random weights, and computes
log-probabilities of given tokens.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobit.distributed import ALONE, Ranks, Shards
from isobit.distributed.files import Part
from isobit.errors import IsobitError
from isobit.kernels import Layout, Ops, get_ops
from isobit.kernels.sampling.top import top_of_rows
from isobit.model.adapters.low_rank import Adapter
from isobit.model.adapters.multi_lora import MultiLora
from isobit.model.adapters.peft import (
    brings_tokenizer,
    check_served,
    read_peft,
    write_peft,
)
from isobit.model.adapters.targets import NewAdapter, new_adapter
from isobit.model.described import Contents, check_vocabulary, read_directory
from isobit.model.forward.sequences import passes, token_sequences
from isobit.model.hub import names
from isobit.model.hub.checkpoint import (
    SHARD_BYTES,
    model_folder,
    write_json,
    write_weights,
)
from isobit.model.hub.config import ModelConfig
from isobit.model.hub.linear_attention import initial
from isobit.model.hub.shapes import parameter_shapes
from isobit.model.hub.whole import Whole
from isobit.model.images.bank import turns_of
from isobit.model.text.tokenizer import DEFAULT_RULES, TextRules, Tokenizer
from isobit.model.transformer import USES, Transformer
from isobit.model.weights.masters import MASTERS, kept_rows
from isobit.precision import Precision, precision_from


class Model:
    """A language model under one precision flow."""

    def __init__(self, transformer: Transformer, tokenizer: Tokenizer) -> None:
        if not isinstance(transformer, Transformer) or not isinstance(tokenizer, Tokenizer):
            raise IsobitError(
                f"Model: expected a Transformer and a Tokenizer, got {transformer!r:.80}; a model "
                "directory is opened with Model.load(path)"
            )
        config = transformer.config
        check_vocabulary(config, tokenizer)
        self.transformer = transformer
        self.tokenizer = tokenizer
        self.generation: dict[str, object] = {}  # generation_config.json, kept for `save`
        self.beyond: Mapping[str, Tensor] = {}  # rows of unused token ids, kept for `save`
        self.whole: Whole | None = None  # the model around it, kept for `save`
        self.directory: Path | None = (
            None  # where its weights were read; of an adapter, its model's
        )
        self.config = config
        self.precision = transformer.precision
        self.ops = transformer.ops["learner"]

    def __repr__(self) -> str:
        shapes, adapter = parameter_shapes(self.config).values(), self.transformer.adapter
        more = "" if adapter is None else f", {adapter}: {self.transformer.masters.count:,}"
        ops = f"{self.ops.backend}, {self.ops.consistency}"
        count = sum(map(math.prod, shapes))
        return (
            f"Model({self.config.family}, {count:,} parameters{more}, precision "
            f"{self.precision.name}, {ops})"
        )

    @staticmethod
    def load(
        path: str | Path,
        precision: str | Mapping[str, object] | Precision = "fp8",
        backend: str = "auto",
        consistency: str = "bitwise",
        ranks: Ranks = ALONE,
        adapter: str | Path | NewAdapter | None = None,
        masters: str = "fp32",
        rules: TextRules = DEFAULT_RULES,
        vocabulary: int | None = None,
        divided: int = 1,
    ) -> "Model":
        """Return a Hugging Face directory of a supported family (`families/`); `precision` is a
        preset's name, a mapping, or a `Precision`. Several `ranks` share the masters, and all must
        load.

        With an `adapter`, a PEFT folder or a new one, the model is frozen and the adapter's are the
        only masters. A PEFT folder may be the `path`; its config names the model. `masters`: fp32,
        or bf16, to which what is read is rounded. `rules`: for texts of prompts. `vocabulary`: the
        number of token ids that the model has; rows of the directory beyond them are not computed
        with, and `save` writes them as they were. `divided`: how many consecutive ranks hold one copy
        of the working weights together.

        Raises IsobitError, in one line, for whatever is wrong with the directory or the arguments.
        """
        dtype = _dtype_of(masters)
        with ExitStack() as files:

            def read() -> tuple[Precision, Ops, Contents]:
                flow, ops = precision_from(precision), get_ops(backend, consistency)
                folder = model_folder(path)
                given = ranks, ops.device, files, dtype, rules, vocabulary, divided
                read = read_directory(folder, adapter, *given)
                return flow, ops, read

            flow, ops, tensors = ranks.run_on_all(read)
            transformer = Transformer(
                tensors.config,
                flow,
                ops,
                tensors.masters,
                ranks,
                tensors.adapter,
                dtype,
                ranks.group(divided),
            )
        model = Model(transformer, tensors.tokenizer)
        model.generation, model.directory = tensors.generation, tensors.directory
        model.beyond, model.whole = tensors.beyond, tensors.whole
        return model

    @staticmethod
    def init(
        config: ModelConfig,
        tokenizer: Tokenizer,
        precision: str | Mapping[str, object] | Precision = "fp8",
        seed: int = 0,
        backend: str = "auto",
        consistency: str = "bitwise",
        ranks: Ranks = ALONE,
        masters: str = "fp32",
        divided: int = 1,
    ) -> "Model":
        """Random weights: normal with deviation 0.02, projections back into the residual stream
        smaller by sqrt(2 · layers) (GPT-2), norms multiply by 1, biases 0; of linear attention as
        in `initial`. The same seed gives the same weights. `masters` and `divided` as in `load`."""
        flow, ops = precision_from(precision), get_ops(backend, consistency)
        rows = dict(kept_rows(_drawn(config, seed), Shards.of(parameter_shapes(config), ranks)))
        sources = rows, ranks, None, _dtype_of(masters), ranks.group(divided)
        return Model(Transformer(config, flow, ops, *sources), tokenizer)

    def under(self, precision: str | Mapping[str, object] | Precision) -> "Model":
        """Return the same masters, in the same storage, under another precision flow; its working
        weights are its own. Raises IsobitError with an adapter, whose model has no masters."""
        if self.transformer.adapter is not None:
            raise IsobitError(
                "a model with an adapter has no masters to make weights of under another "
                "precision; write the merged model with isobit export --merge"
            )
        masters = {name: parameter.detach() for name, parameter in self.named_parameters().items()}
        dtype = self.transformer.masters.dtype
        flow, group = precision_from(precision), self.transformer.group
        sources = masters, self.ranks, None, dtype, group
        transformer = Transformer(self.config, flow, self.ops, *sources)
        model = Model(transformer, self.tokenizer)
        model.generation, model.beyond, model.whole = self.generation, self.beyond, self.whole
        return model

    def without_adapter(self) -> "Model":
        """Return the frozen model over the same storage, with its adapter switched off."""
        model = Model(self.transformer.without_adapter(), self.tokenizer)
        model.generation = self.generation
        return model

    def adapted(self, adapter: str | Path | NewAdapter | Adapter) -> "Model":
        """Return one more adapter to train over the frozen model: a new one, a PEFT folder, or
        factors, which are copied. Nothing of the frozen model is copied or made again, and many
        such models train and are served side by side. Raises IsobitError as `serving` for an
        adapter."""
        base = "" if self.directory is None else str(self.directory.resolve())
        if isinstance(adapter, NewAdapter):
            factors = new_adapter(self.config, adapter)
        else:
            factors = self.read_adapter(adapter)
        model = Model(self.transformer.adapted(replace(factors, base=base)), self.tokenizer)
        model.generation, model.directory = self.generation, self.directory
        return model

    def serving(self, adapters: Mapping[str, str | Path]) -> "Model":
        """Return the frozen model over the same storage, for an engine whose requests each name one
        of several `adapters`, or none: PEFT folders by name, to which `add_adapter` adds. An
        adapter that this model has itself is not among them. Raises IsobitError for one that is not
        an adapter, is another model's or comes with another tokenizer, and for a precision with a
        calibrated KV cache, or with scales that the rows of a batch share."""
        if not isinstance(adapters, Mapping):
            raise IsobitError(
                f"serving: expected folders of adapters by name, got {adapters!r:.80}"
            )
        adapters_by_name = {
            name: self._served(model_folder(path, "adapter")) for name, path in adapters.items()
        }
        model = Model(self.transformer.serving(adapters_by_name), self.tokenizer)
        model.generation, model.directory = self.generation, self.directory
        return model

    def add_adapter(self, name: str, adapter: str | Path | Adapter) -> None:
        """Serve one more adapter, a PEFT folder or its factors, also while an engine has requests
        open. Raises IsobitError as `serving`, for a name that another adapter had before, and in a
        model that serves none."""
        self._multi_lora()
        self.transformer.add_adapter(name, self.read_adapter(adapter))

    def read_adapter(self, adapter: str | Path | Adapter) -> Adapter:
        """Return the factors of a PEFT folder, if this model can serve them. Raises IsobitError as
        `serving`."""
        if isinstance(adapter, Adapter):
            return adapter
        return self._served(model_folder(adapter, "adapter"))

    def remove_adapter(self, name: str) -> None:
        """Serve an adapter no longer; open requests by it can only be cancelled then. Raises
        IsobitError for one that is not served."""
        self._multi_lora().leave(name)

    def _multi_lora(self) -> MultiLora:
        if self.transformer.served is None:
            raise IsobitError("this model serves no adapters; open it with Model.serving")
        return self.transformer.served

    def _served(self, folder: Path) -> Adapter:
        check_served(folder, self.directory)
        if (
            brings_tokenizer(folder)
            and (difference := self.tokenizer.differs(Tokenizer.load(folder))) is not None
        ):
            raise IsobitError(
                f"adapter {folder}: its {difference} is not the model's; serve it alone, or give both "
                "the same"
            )
        return read_peft(folder, self.config)

    @property
    def num_ids(self) -> int:
        """The number of token ids: those of the vocabulary, and of rows of images."""
        images = self.transformer.images
        return self.config.vocab_size if images is None else images.num_ids

    @property
    def ranks(self) -> Ranks:
        """The processes that share the masters."""
        return self.transformer.masters.shards.ranks

    @property
    def weights_version(self) -> int:
        """Counts syncs: every change of the working weights."""
        return self.transformer.weights_version

    def sync(self, rollout: bool = True) -> None:
        """Make the working weights again from the masters; with `rollout` False, not those of a
        separate engine."""
        self.transformer.sync(rollout)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the masters, in a fixed order: the rows that this rank keeps."""
        return list(self.transformer.parameters.values())

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the masters by name, in a fixed order: the rows that this rank keeps."""
        return self.transformer.parameters

    @torch.no_grad()
    def logprobs(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float = 1.0,
        use: str = "learner",
        adapter: str | None = None,
    ) -> list[Tensor]:
        """For each sequence of n tokens, float32 [n - 1] on the CPU: entry t is log p(token t+1 |
        tokens up to t), 0 for a row of an image. By an `adapter` that this model serves they are the
        rollout's.

        The probabilities are softmax(logits / temperature). Raises IsobitError for a token outside
        the vocabulary, for a sequence longer than the model's context, for a temperature that is
        not above 0 and for another `use`.
        """
        if use not in USES:
            raise IsobitError(f"use: expected one of {', '.join(USES)}, got {use!r}")
        if not (
            isinstance(temperature, (int, float)) and temperature > 0 and math.isfinite(temperature)
        ):
            raise IsobitError(
                f"temperature: log-probabilities need one above 0, got {temperature!r}"
            )
        sequences = token_sequences(sequences, self.num_ids, self.config.max_positions)
        use = use if adapter is None else "rollout"
        return [
            row
            for batch in passes(sequences)
            for row in self._packed_logprobs(batch, temperature, use, adapter)
        ]

    @torch.no_grad()
    def top_logprobs(
        self, sequence: Sequence[int], count: int, first: int = 1, adapter: str | None = None
    ) -> list[list[tuple[int, float]]]:
        """Return, for a sequence of n tokens, the `count` likeliest tokens at temperature 1 at each
        place from `first` (at least 1) on: n - first entries, as `logprobs` of an adapter."""
        chunks = self.top_logprobs_in_parts(sequence, count, len(sequence), first, adapter)
        return [entry for chunk in chunks for entry in chunk]

    @torch.no_grad()
    def top_logprobs_in_parts(
        self, sequence: Sequence[int], count: int, rows: int, first: int, adapter: str | None
    ) -> Iterator[list[list[tuple[int, float]]]]:
        """Yield `top_logprobs`, `rows` places at a time, each in `count` passes."""
        (tokens,) = token_sequences([sequence], self.num_ids, self.config.max_positions)
        hidden = self._packed_hidden([list(tokens[:-1])], "rollout", adapter)[first - 1 :]
        ops = self.transformer.ops["rollout"]
        for chunk in hidden.split(rows):
            weight = self.transformer.head_weight("rollout")
            likeliest = top_of_rows(chunk, weight, count, ops, self.config.logit_cap)
            ops.raise_faults()
            yield likeliest

    def save(
        self,
        directory: str | Path,
        dtype: torch.dtype = torch.float32,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Write config, weights (the masters, as `dtype`) and tokenizer; `transformers` loads the
        directory as it is. A model that reads images too is written whole, what is outside its
        language model as it was. Of a model with an adapter the adapter alone, in FP32, as a PEFT folder.

        Weights above `shard_bytes` are written in several files. Raises IsobitError if `directory`
        is a file or `dtype` is not a floating-point dtype.
        """
        if not isinstance(directory, (str, Path)) or Path(directory).is_file():
            raise IsobitError(f"save: expected the path of a directory, got {str(directory)!r}")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise IsobitError(
                "save: dtype: expected a floating-point dtype, such as torch.bfloat16, got "
                f"{dtype!r}"
            )
        if (adapter := self.transformer.adapter) is not None:
            self.ranks.on_first(lambda: self._write_rest(Path(directory)))
            write_peft(Path(directory), adapter, self.named_parameters(), self.ranks)
            return
        shapes = {} if self.whole is None else self.whole.shapes
        tensors = names.split(self.named_parameters(), self.config, dtype, self.ranks, shapes)
        tensors = names.with_rows(tensors, self.beyond)
        self.write(Path(directory), tensors, {"dtype": _name(dtype)}, shard_bytes)

    def write(
        self,
        directory: Path,
        tensors: Mapping[str, Tensor | Part],
        keys: Mapping[str, Any],
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Write a directory with these tensors and these keys in config.json, added to the
        architecture's. All ranks call this; the first one writes what is not weights."""
        self.ranks.on_first(lambda: self._write_rest(directory, keys))
        if self.whole is not None:
            tensors = self.whole.tensors(tensors, self.ranks)
        write_weights(directory, tensors, shard_bytes, self.ranks)

    def _write_rest(self, directory: Path, keys: Mapping[str, Any] | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        if keys is not None:
            ids = self.config.vocab_size + max(map(len, self.beyond.values()), default=0)
            values = {**replace(self.config, vocab_size=ids).to_hf(), **keys}
            if self.whole is not None:
                values = self.whole.config(keys)
                for name, text in self.whole.texts.items():
                    (directory / name).write_text(text, encoding="utf-8")
            write_json(directory / "config.json", values)
        eos = list(self.tokenizer.eos_ids)
        generation = {
            "bos_token_id": self.config.bos_id,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "pad_token_id": self.config.pad_id,
        }
        settings = {key: value for key, value in generation.items() if value is not None}
        write_json(directory / "generation_config.json", self.generation | settings)
        self.tokenizer.save(directory)

    def memory(self) -> dict[str, int]:
        """Bytes of the masters, of the rollout's working weights, and of the learner's that are not
        shared with it; packs are counted by `Transformer.packed_bytes`."""
        masters = sum(p.numel() * p.element_size() for p in self.named_parameters().values())
        rollout, learner = self.transformer.working_bytes()
        return {"masters": masters, "rollout": rollout, "learner": learner}

    def _packed_logprobs(
        self,
        batch: Sequence[Sequence[int]],
        temperature: float,
        use: str,
        adapter: str | None = None,
    ) -> list[Tensor]:
        inputs = [list(sequence[:-1]) for sequence in batch]
        filled = [row for row in inputs if row]
        targets = [token for sequence in batch for token in sequence[1:]]
        if not filled:
            return [torch.empty(0) for _ in batch]
        hidden = self._packed_hidden(filled, use, adapter)
        ops = self.transformer.ops[use]
        wanted = torch.tensor(targets, dtype=torch.int64, device=ops.device)
        of_text = wanted < self.config.vocab_size  # a row of an image is given, and never sampled
        logprobs = self.transformer.head_logprobs(hidden, wanted * of_text, temperature, use)[0]
        logprobs = torch.where(of_text, logprobs, 0.0).cpu()
        ops.raise_faults()
        return list(logprobs.split([len(row) for row in inputs]))

    def _packed_hidden(self, rows: list[list[int]], use: str, adapter: str | None) -> Tensor:
        """Return the hidden states of sequences, none of which is empty, one after the other."""
        tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
        adapters = None
        if adapter is not None:
            served = self._multi_lora()
            adapters = served.assignment(np.full(len(tokens), served.number(adapter)))
        layout = Layout.packed([len(row) for row in rows])
        layout = replace(layout, turns=turns_of(self.transformer.images, rows))
        return self.transformer.hidden(tokens, layout, use=use, adapters=adapters)


def _drawn(config: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield each master of random weights, by name: one at a time, so that a rank never holds the
    whole model."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in parameter_shapes(config).items():
        if (drawn := initial(name, shape, generator)) is not None:
            yield name, drawn
        elif len(shape) == 1:
            is_one = name.endswith(("norm", "layer_scalar", "expert_scale"))
            yield name, torch.full(shape, 1.0 - config.offset_of(name) if is_one else 0.0)
        else:
            layers = 2 * config.num_layers if name.endswith((".o", ".down")) else 1
            yield name, torch.randn(shape, generator=generator).mul_(0.02 / math.sqrt(layers))


def _dtype_of(masters: str) -> torch.dtype:
    if masters not in MASTERS:
        raise IsobitError(f"masters: expected one of {', '.join(MASTERS)}, got {masters!r}")
    return MASTERS[masters]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
