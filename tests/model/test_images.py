"""Models that read images, with the rows of a tower in a bank: log-probabilities and gradients of
the language model are those of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from isobit.errors import IsobitError
from isobit.model import Model
from isobit.model.hub import names
from isobit.model.images.bank import Axes, Bank
from isobit.rl.algorithm.samples import Sample
from isobit.rl.learner.forward import forward
from isobit.rl.learner.packing import pack

from .seeing import IMAGE, KINDS, VOCABULARY, bank_of, flat, pixels, put, seeing, words

CLOSE = 1e-5


def sample(prompt: list[int], completion: list[int]) -> Sample:
    return Sample(0, 0, tuple(prompt), tuple(completion), (0.0,) * len(completion), "", False, 1)


def _theirs(
    model: Any, tokens: list[int], pictures: list[dict[str, Tensor]], count: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """The log-probabilities of the last `count` tokens, and their sum's gradients."""
    ids = torch.tensor([[IMAGE if token >= VOCABULARY else token for token in tokens]])
    given = {key: torch.cat([picture[key] for picture in pictures]) for key in pictures[0]}
    if "image_grid_thw" in given:
        given["mm_token_type_ids"] = (ids == IMAGE).int()
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits[0]
    rows = logits.log_softmax(-1)[-count - 1 : -1]
    logprobs = rows.gather(1, ids[0, -count:, None])[:, 0]
    logprobs.sum().backward()
    return logprobs.detach(), {k: p.grad for k, p in model.named_parameters() if p.grad is not None}


def _ours(model: Model, tokens: list[int], count: int) -> tuple[Tensor, dict[str, Tensor]]:
    packed = pack([sample(tokens[:-count], tokens[-count:])], images=model.transformer.images)
    logprobs, _ = forward(model, packed, 1.0)
    logprobs.sum().backward()
    leaves = model.transformer.masters.leaves
    gradients = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad  # an expert may serve none
        for name, leaf in leaves.items()
    }
    for leaf in leaves.values():
        leaf.grad = None
    assert model.whole is not None
    parts = names.split(gradients, model.config, like=model.whole.shapes)
    read = {
        model.whole.name(name): part.data().view(part.dtype).view(part.shape)
        for name, part in parts.items()
    }
    return logprobs.detach(), read


@pytest.mark.parametrize("name", KINDS)
def test_logprobs_and_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """With one image, two, the same one twice, and one at the end of the prompt. The controls:
    another image by the same tokens, rows that are not added, and axes in another order."""
    theirs = seeing(tmp_path, name)
    model, bank = Model.load(tmp_path, "float32", "native"), bank_of(name)
    model.transformer.images = bank
    pictures = [pixels(name, 1, 6, 8), pixels(name, 2, 10, 4)]
    first, second = (put(bank, theirs, picture) for picture in pictures)
    a, b = words(0, 5), words(1, 4)
    close = 3 * CLOSE if name == "qwen3_5" else CLOSE  # states are summed in another order
    for seen, tokens in (
        (pictures[:1], flat(a, first, b, a)),
        (pictures, flat(a, first, b, second, b, a)),
        ([pictures[0]] * 2, flat(a, first, b, first, a)),
        (pictures[1:], flat(b, second, a)),
    ):
        wanted, gradients = _theirs(theirs, tokens, seen, 5)
        logprobs, ours = _ours(model, tokens, 5)
        assert float((logprobs - wanted).abs().max()) <= close
        assert float((model.logprobs([tokens])[0][-5:] - wanted).abs().max()) <= close
        for key, gradient in ours.items():
            inside = "model.language_model." + key.rpartition("model.")[2]
            right = gradients.get("lm_head.weight" if "lm_head" in key else inside)
            assert right is not None, key
            distance = float((gradient - right).abs().max())
            assert distance <= 10 * close * max(float(right.abs().max()), 1.0), key
    tokens = flat(a, first, b, a)
    wanted, _ = _theirs(theirs, tokens, pictures[:1], 5)
    other, _ = _theirs(theirs, tokens, [pixels(name, 3, 6, 8)], 5)
    assert float((other - wanted).abs().max()) > 1e-2
    for changed in _wrong(bank, first.rows):
        model.transformer.images = changed
        assert float((model.logprobs([tokens])[0][-5:] - wanted).abs().max()) > 1e-3


def _wrong(bank: Bank, rows: tuple[Tensor, ...]) -> list[Bank]:
    """Banks with the same ids: of zeros, without what is added, by other axes."""
    kinds = [(bank.axes, [torch.zeros_like(row) for row in rows])]
    if len(rows) > 1:
        kinds.append((bank.axes, list(rows[:1])))
    if bank.axes is not None:
        kinds.append((Axes(bank.axes.sections, not bank.axes.interleaved), list(rows)))
    banks = [Bank(VOCABULARY, IMAGE, axes) for axes, _ in kinds]
    for one, (_, own) in zip(banks, kinds):
        one.add(own, None if bank.axes is None else (3, 4))
    return banks


def test_turns_are_the_positions_of_transformers(tmp_path: Path) -> None:
    """Of random prompts, by `get_rope_index`. The control: without images they are the places."""
    theirs, rng = seeing(tmp_path, "qwen3_vl").model, np.random.default_rng(0)
    for _ in range(20):
        bank, grids, parts = bank_of("qwen3_vl"), [], []
        for _ in range(int(rng.integers(1, 4))):
            grid = tuple(rng.integers(1, 6, 2).tolist())
            grids.append([1, 2 * grid[0], 2 * grid[1]])
            image = bank.add([torch.zeros(grid[0] * grid[1], 4)], grid)
            parts += [words(0, int(rng.integers(1, 7))), image]
        tokens = np.array(flat(*parts, words(2, 3)))
        ids = torch.from_numpy(np.where(tokens >= VOCABULARY, IMAGE, tokens))[None]
        kinds, grid_thw = (ids == IMAGE).int(), torch.tensor(grids)
        wanted, _ = theirs.get_rope_index(ids, kinds, image_grid_thw=grid_thw)
        assert np.array_equal(bank.turns(tokens).T, wanted[:, 0].numpy())
        text = tokens[tokens < VOCABULARY]
        assert np.array_equal(bank.turns(text), np.arange(text.size))


def test_images_that_are_not_whole_are_refused() -> None:
    """The controls are the whole ones, side by side too."""
    bank = bank_of("llava")
    first, second = (bank.add([torch.zeros(count, 4)]) for count in (3, 2))
    bank.check("the prompt", flat([1], first, second, first, [2]))
    for tokens in ([1, *first.ids[1:]], [*first.ids[:2], 1], [*first.ids[:2], *second.ids]):
        with pytest.raises(IsobitError, match=r"the prompt: the image at token [01] is not whole"):
            bank.check("the prompt", tokens)
