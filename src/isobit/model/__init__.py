"""One transformer, its Hugging Face directories, its tokenizer, and `Model`, which joins them."""

from isobit.model.families.rope import Rope
from isobit.model.hub.config import Experts, ModelConfig
from isobit.model.model import Model
from isobit.model.reward_model import RewardModel
from isobit.model.text.tokenizer import TextRules, Tokenizer
from isobit.model.transformer import Transformer

__all__ = [
    "Experts",
    "Model",
    "ModelConfig",
    "RewardModel",
    "Rope",
    "TextRules",
    "Tokenizer",
    "Transformer",
]
