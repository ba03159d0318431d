"""What the tests share: a tiny base model on disk, the real model beside the checkout, one cache for compiled
kernels."""

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: kernels then run on the CPU, slowly

from isobit.model import Experts, Model, ModelConfig, Tokenizer
from tests.order import longest_first

SHARED = Path(__file__).resolve().parents[2] / "shared"


def tiny_model(
    precision: str = "fp8", family: str = "qwen3", seed: int = 0, alphabet: str = "0123456789+-*=", **sizes: int
) -> Model:
    """A random model of a few thousand parameters over the digits, or another alphabet."""
    tokenizer = Tokenizer.characters(alphabet)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_positions": 64,
    }
    config = ModelConfig(
        family=family,
        vocab_size=tokenizer.vocab_size,
        **{**shape, **sizes},
        qkv_bias=family == "qwen2",
        qk_norm=family.startswith("qwen3"),
        experts=Experts(5, 2, 24) if family == "qwen3_moe" else None,
        tie_embeddings=True,
        eos_ids=tokenizer.eos_ids,
    )
    return Model.init(config, tokenizer, precision, seed)


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny random model."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model().save(path)
    return path


@pytest.fixture(scope="session")
def stories() -> Path:
    """A real pretrained Llama of 260,032 parameters, where it stands beside the checkout."""
    path = SHARED / "models" / "stories260K"
    if not path.is_dir():
        pytest.skip(f"the pretrained model {path} is not here")
    return path


@pytest.fixture(scope="session")
def gsm8k_test() -> Path:
    """The real GSM8K test file, where it stands beside the checkout."""
    path = SHARED / "data" / "gsm8k" / "test.jsonl"
    if not path.is_file():
        pytest.skip(f"the data file {path} is not here")
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under several workers, the long tests first."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        items[:] = longest_first(items, workers, lambda item: str(item.path), _is_slow)


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
"""Of a test: several workers share the cores."""


@pytest.fixture(autouse=True)
def _threads() -> None:
    torch.set_num_threads(THREADS)
