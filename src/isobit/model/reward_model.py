"""A reward model: a frozen sequence-classification checkpoint with one label and its own precision
flow.

The score of prompt and completion is the one label's logit at their last token
(`LlamaForSequenceClassification` and its like in transformers); the linear layers run in the flow's
formats, the score itself in float32. Only the working weights are kept. Left out: training one,
process rewards, several labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isobit.distributed import ALONE, Ranks
from isobit.errors import IsobitError
from isobit.kernels import Layout, Ops, get_ops
from isobit.model.described import check_vocabulary
from isobit.model.forward.sequences import passes
from isobit.model.hub import names
from isobit.model.hub.checkpoint import Shapes, model_folder, open_weights, read_json
from isobit.model.hub.config import ModelConfig
from isobit.model.hub.wrapped import architectures
from isobit.model.images.bank import turns_of
from isobit.model.text.tokenizer import DEFAULT_RULES, TextRules, Tokenizer
from isobit.model.transformer import Transformer
from isobit.precision import Precision, precision_from

_HEADS = ("score.weight", "lm_head.weight")
Prompt = str | Sequence[Mapping[str, str]]


class RewardModel:
    """Scores completions, in batches of packed rows without padding."""

    def __init__(self, transformer: Transformer, score: Tensor, tokenizer: Tokenizer) -> None:
        transformer.freeze()
        self.transformer, self.tokenizer = transformer.by_rows or transformer, tokenizer
        self.score_weight = score.to(transformer.ops["learner"].device)

    @property
    def group(self) -> Ranks:
        """The ranks that hold the model together."""
        return self.transformer.group

    @staticmethod
    def load(
        path: str | Path,
        precision: str | Mapping[str, object] | Precision = "fp8",
        backend: str = "auto",
        consistency: str = "bitwise",
        ranks: Ranks = ALONE,
        rules: TextRules = DEFAULT_RULES,
        divided: int = 1,
    ) -> "RewardModel":
        """Load a Hugging Face directory; several `ranks`, which all must load, read it together,
        and `divided` neighbours among them hold it together. Raises IsobitError unless it is a
        reward model with a single label."""

        def read() -> tuple[ModelConfig, Precision, Ops, Mapping[str, Tensor], Tensor, Tokenizer]:
            directory, flow = model_folder(path, "reward model"), precision_from(precision)
            values = read_json(directory / "config.json")
            # a reward model has no output head, and a tied head needs no tensor
            config = ModelConfig.from_hf(
                values | {"tie_word_embeddings": True}, str(directory / "config.json")
            )
            if flow.learner.calibrated or flow.learner.calibrated_queries:
                raise IsobitError(
                    f"reward model {directory}: precision {flow.name} has a calibrated KV "
                    "cache; use e4m3"
                )
            with open_weights(
                directory, lambda shapes: _check(shapes, config, values, directory)
            ) as weights:
                score = weights.rows("score.weight")
                masters = names.fuse(weights.rows, config, ranks, shapes=weights.shapes)
            tokenizer = Tokenizer.load(directory, rules)
            check_vocabulary(config, tokenizer, f"reward model {directory}: ")
            return config, flow, get_ops(backend, consistency), masters, score, tokenizer

        config, flow, ops, masters, score, tokenizer = ranks.run_on_all(read)
        group = ranks.group(divided)
        transformer = Transformer(config, flow, ops, masters, ranks, group=group)
        return RewardModel(transformer, score, tokenizer)

    def encode(self, prompt: Prompt, completion: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of prompt and completion: a chat through the chat template, or the
        two texts joined. A completion of several turns is the messages that follow the prompt, the
        assistant's first. Raises IsobitError for a conversation that the template refuses."""
        if isinstance(prompt, str):
            assert isinstance(completion, str)
            return self.tokenizer.encode_text(prompt + completion)
        chat, text = list[Mapping[str, Any]](prompt), completion
        first, *rest = [{"content": text}] if isinstance(text, str) else text
        begun = ""
        if prompt and prompt[-1]["role"] == "assistant":  # which the completion goes on with
            begun = chat.pop()["content"]
        chat += [{**first, "role": "assistant", "content": begun + first["content"]}, *rest]
        return self.tokenizer.encode_chat(chat, add_generation_prompt=False)

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each sequence of token ids, float32. Ranks that hold the model
        together must all call this; each has its own sequences, and computes those of all.

        Raises IsobitError for an empty sequence and for one that is longer than the model's
        context.
        """
        group, most = self.group, self.transformer.config.max_positions

        def asked() -> list[list[int]]:
            for index, sequence in enumerate(sequences):
                if not 0 < len(sequence) <= most:
                    raise IsobitError(
                        f"reward model: sequence {index} has {len(sequence)} tokens, expected 1 to "
                        f"{most}"
                    )
            return [list(sequence) for sequence in sequences]

        by_rank = group.all_gather_json(group.run_on_all(asked))
        batches = passes([sequence for of_rank in by_rank for sequence in of_rank])
        scores = [score for batch in batches for score in self._score(batch)]
        first = sum(map(len, by_rank[: group.rank]))
        return scores[first : first + len(sequences)]

    def _score(self, batch: Sequence[Sequence[int]]) -> list[float]:
        lengths = [len(sequence) for sequence in batch]
        tokens = torch.tensor(
            [token for sequence in batch for token in sequence], dtype=torch.int64
        )
        layout = replace(Layout.packed(lengths), turns=turns_of(self.transformer.images, batch))
        hidden = self.transformer.hidden(tokens, layout, use="learner")
        ops = self.transformer.ops["learner"]
        last = hidden[(torch.tensor(lengths).cumsum(0) - 1).to(ops.device)].float()
        scores = ops.product(last, self.score_weight, None, torch.float32)[:, 0].tolist()
        ops.raise_faults()
        return scores

    def nbytes(self) -> int:
        """Return the bytes of all weights that are kept."""
        return sum(self.transformer.working_bytes()) + self.score_weight.numel() * 4


def _check(shapes: Shapes, config: ModelConfig, values: Mapping[str, Any], directory: Path) -> None:
    """Raise IsobitError unless these tensors are a model of this config with one label."""
    body = {name: shape for name, shape in shapes.items() if name not in _HEADS}
    score = shapes.get("score.weight")
    if score is None:
        raise IsobitError(
            f"{directory}: no tensor score.weight: {architectures(values):.80} is no sequence "
            "classification with a linear score"
        )
    if score != (1, config.hidden_size):
        raise IsobitError(
            f"{directory}: score.weight has shape {score}, expected (1, {config.hidden_size}): the "
            "reward is the logit of a single label"
        )
    names.check_shapes(body, config, str(directory))
