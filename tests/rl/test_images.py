"""Images in what trains step by step, in a teacher and in a reward model: the bits of the learner's
own forward, which tests/engine/test_images.py compares with the rollout's."""

import pytest
import torch

from isobit.errors import IsobitError
from isobit.model import Model
from isobit.model.images.bank import Image
from isobit.model.reward_model import RewardModel
from isobit.rl.algorithm.divergence import Divergence
from isobit.rl.algorithm.samples import Sample
from isobit.rl.learner.forward import Teacher, forward
from isobit.rl.learner.packing import pack
from isobit.rl.stepwise.data import Datum, check
from isobit.rl.stepwise.data import pack as pack_data
from isobit.rl.stepwise.losses import LOSSES
from tests.model.seeing import flat, seeing, with_images, words

ANSWER = words(3, 4)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Image, Image]:
    folder = tmp_path_factory.mktemp("seeing")
    return with_images(folder, "fp8", "native", seeing(folder, "qwen3_vl"), "qwen3_vl")


def _sample(prompt: list[int]) -> Sample:
    return Sample(0, 0, tuple(prompt), tuple(ANSWER), (0.0,) * len(ANSWER), "", False, 1)


def test_step_by_step(seen: tuple[Model, Image, Image]) -> None:
    """Two data that begin with one image share its rows; a target is never a row of an image."""
    model, first, second = seen
    bank, head = model.transformer.images, words(0, 6)
    assert bank is not None
    prompts = [flat(head, first, [5]), flat(head, first, [6]), flat(head, second, [5])]
    wanted = forward(model, pack(list(map(_sample, prompts)), images=bank), 1.0)[0]
    data = []
    for prompt in prompts:
        tokens = [*prompt, *ANSWER[:-1]]
        targets = torch.tensor([*[0] * (len(prompt) - 1), *ANSWER])
        data.append(Datum(tuple(tokens), {"target_tokens": targets, "weights": targets * 0.0}))
        check(data[-1], 0, LOSSES["cross_entropy"], bank.vocabulary, 512, bank)
    packed = pack_data(data, images=bank)
    assert packed.rows_shared >= 6 + first.count
    rows = forward(model, packed, 1.0)[0].split([len(datum.tokens) for datum in data])
    assert torch.equal(torch.cat([row[-len(ANSWER) :] for row in rows]), wanted)
    flat_turns = forward(model, pack_data(data), 1.0)[0]
    assert not torch.equal(flat_turns, torch.cat(rows))
    for tokens, target, images in (
        (data[0].tokens, first.first, bank),
        (data[0].tokens, 0, None),
        ((1, bank.num_ids), 0, bank),
    ):
        ids = torch.full((len(tokens),), target)
        with pytest.raises(IsobitError, match="is not in the vocabulary of 64"):
            check(Datum(tokens, {"target_tokens": ids, "weights": ids * 0.0}), 0,
                  LOSSES["cross_entropy"], bank.vocabulary, 512, images)  # fmt: skip


def test_a_teacher_reads_them(seen: tuple[Model, Image, Image]) -> None:
    """Its rows are those of the policy that has its weights, and others for another image."""
    model, first, second = seen
    samples = [_sample(flat(words(0, 6), image, [5])) for image in (first, second)]
    packed = pack(samples, images=model.transformer.images)
    with torch.no_grad():
        hidden = model.transformer.hidden(packed.tokens, packed.layout, use="learner")
    read = Teacher(model, Divergence(0.5)).reads(samples, False).hidden
    assert torch.equal(read, hidden[packed.rows])
    assert not torch.equal(*read.chunk(2))


def test_a_reward_model_reads_them(seen: tuple[Model, Image, Image]) -> None:
    model, first, second = seen
    sequences = [flat(words(0, 6), image, ANSWER) for image in (first, second)]
    with torch.no_grad():
        hidden = [model._packed_hidden([tokens], "learner", None)[-1] for tokens in sequences]
    weight = torch.randn(1, len(hidden[0]), generator=torch.Generator().manual_seed(0))
    wanted = [float(row.float() @ weight[0]) for row in hidden]
    reward = RewardModel(model.under("fp8").transformer, weight, model.tokenizer)
    reward.transformer.images = model.transformer.images
    scores = reward.score(sequences)
    assert torch.allclose(torch.tensor(scores), torch.tensor(wanted), rtol=1e-4)
    assert abs(scores[0] - scores[1]) > 1e-2
