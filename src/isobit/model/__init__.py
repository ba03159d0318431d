"""One transformer, its Hugging Face directories, its tokenizer, and `Model`, which joins them."""

from isobit.model.config import ARCHITECTURES, ModelConfig
from isobit.model.model import Model
from isobit.model.rope import Rope
from isobit.model.tokenizer import Tokenizer
from isobit.model.transformer import Transformer

__all__ = ["ARCHITECTURES", "Model", "ModelConfig", "Rope", "Tokenizer", "Transformer"]
