"""From pictures to token ids, and learning from them: the tower's rows are the image's alone, and
what a user wrote stays text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from isobit.engine.image_prompts import Images
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.model.images.tower import Tower

from .helpers import directory
from .seeing import IMAGE, KINDS, seeing
from .test_wrapped import published

PIL = pytest.importorskip("PIL.Image", reason="Pillow is not installed (isobit[images])")
COLOURS = ("red", "green", "blue", "yellow", "black", "purple")
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 8,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 16 * 16, "longest_edge": 256 * 256},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
_PLAIN = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 32},
    "crop_size": {"height": 32, "width": 32},
}
_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<IMAGE>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}="
)


def seeing_folder(path: Path, name: str = "qwen3_vl") -> Path:
    """A model that sees, with its processor and a chat template."""
    seeing(path, name)
    settings = _PLAIN if name == "llava" else _PROCESSOR
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    last = max(tokenizer["model"]["vocab"].values())
    names = {**{id: f"<UNUSED{id}>" for id in range(last + 1, IMAGE)}, IMAGE: "<IMAGE>"}
    tokenizer["added_tokens"] += [
        {"id": id, "content": name, "special": True, **flags} for id, name in names.items()
    ]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "chat_template.jinja").write_text(_TEMPLATE)
    return path


def square(colour: str, seed: int = 0, size: tuple[int, int] = (64, 48)) -> Any:
    image, rng = PIL.new("RGB", size, "white"), np.random.default_rng(seed)
    for place in rng.choice(12, int(rng.integers(1, 5)), replace=False).tolist():
        x, y = 16 * (place % 4), 16 * (place // 4)
        image.paste(PIL.new("RGB", (12, 12), colour), (x + 2, y + 2))
    return image


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_folder(tmp_path_factory.mktemp("seeing"))


def test_ids_of_prompts(folder: Path) -> None:
    """An equal picture is the same image; a text has the tokens around it, which in a chat are the
    template's."""
    model = Model.load(folder, "float32")
    images, red, blue = Images(model), square("red"), square("blue")
    first, second = images.image(red), images.image(blue)
    assert first.count == 4 * 3
    assert Images(model).image(blue).first not in (*first.ids, *second.ids)  # never given out twice
    assert images.image(red.copy()) is first is not second
    encode = model.tokenizer.encode
    begun = encode("1+")
    rest = encode("2", add_special=False)
    wanted = [*begun, 62, *first.ids, 63, *rest, 62, *second.ids, 63]
    assert images.prompt("1+<image>2<image>", [red, blue]) == wanted
    parts = [{"type": "image"}, {"type": "text", "text": "2"}, {"type": "image", "image": red}]
    chat = images.prompt([{"role": "user", "content": parts}], [blue])
    assert chat == [*second.ids, *rest, *first.ids, *encode("=", add_special=False)]
    assert images.prompt("1+2") == encode("1+2")
    for prompt, pictures in (("1<image>", []), ("1", [red]), ("<image>", [red, red])):
        with pytest.raises(IsobitError, match=r"has \d places for images, and \d images are given"):
            images.prompt(prompt, pictures)
    for kind in ("image_url", "video"):
        with pytest.raises(IsobitError, match=f"of type '{kind}'; expected text or image"):
            images.prompt([{"role": "user", "content": [{"type": kind, kind: "x"}]}])
    with pytest.raises(IsobitError, match="image 0: expected a PNG, JPEG or WebP"):
        images.prompt("<image>", [b"no"])
    content = [{"type": "text", "text": "<IMAGE>"}, {"type": "image", "image": red}]
    with pytest.raises(IsobitError, match="the tokenizer cannot encode"):  # as text: it has no "<"
        images.prompt([{"role": "user", "content": content}])
    with pytest.raises(IsobitError, match="is not in the model's vocabulary of 64"):
        Model.load(folder, "float32").logprobs([wanted])


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_those_of_an_image_alone(name: str, tmp_path: Path) -> None:
    """With one thread and two, alone or after others, in one process or another: the same digest;
    and they are those of the whole model of transformers. The control is another picture."""
    path = seeing_folder(tmp_path, name)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(path)
    tower, threads = Tower(path), torch.get_num_threads()
    red, blue = square("red"), square("blue", 1, (80, 48))
    alone = tower.rows(red)
    try:
        torch.set_num_threads(2)
        tower.rows(blue)
        assert tower.rows(red).digest == alone.digest == Tower(path).rows(red).digest
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert tower.rows(blue).digest != alone.digest
    assert tower.identity(red) != tower.identity(blue)
    inputs = tower._processor(red, return_tensors="pt")
    with torch.no_grad():
        features = theirs.model.get_image_features(**inputs, return_dict=True).pooler_output
    assert float((torch.cat(list(features)) - alone.rows[0]).abs().max()) < 1e-5
    rows = tower.rows(red).rows
    assert rows[0].shape[1] == 64
    assert len(rows) == (3 if name.startswith("qwen3_vl") else 1)


def test_what_is_neither_a_prompt_nor_pictures(folder: Path) -> None:
    images = Images(Model.load(folder, "float32"))
    for pictures in ("cat.png", PIL.new("RGB", (8, 8)), 5):
        with pytest.raises(IsobitError, match="expected a list of pictures"):
            images.prompt("<image>", pictures)  # type: ignore[arg-type]
    for prompt in (["hi"], 5, None):
        with pytest.raises(IsobitError, match="expected a text, or messages"):
            images.prompt(prompt)  # type: ignore[arg-type]


def test_what_reads_no_images_is_refused(folder: Path, tmp_path: Path) -> None:
    """A language model alone, and a model around one whose images are not read."""
    _, text = directory(tmp_path / "text", "qwen3")
    with pytest.raises(IsobitError, match="has no tower"):
        Images(Model.load(text, "float32"))
    published(tmp_path / "gemma3", "gemma3")
    with pytest.raises(IsobitError, match="images of a 'gemma3' are not read"):
        Images(Model.load(tmp_path / "gemma3", "float32"))
    seeing(tmp_path / "bare", "qwen3_vl")
    with pytest.raises(IsobitError, match="transformers cannot open its tower"):
        Images(Model.load(tmp_path / "bare", "float32"))
    processor = tmp_path / "bare" / "preprocessor_config.json"
    processor.write_text('{"auto_map": {"AutoImageProcessor": "own.Processor"}}')
    with pytest.raises(IsobitError, match="names code of the directory"):
        Images(Model.load(tmp_path / "bare", "float32"))
    with pytest.raises(IsobitError, match="calibrates its KV cache"):
        Images(Model.load(folder, "fp8[kv_cache=e4m3-calibrated]"))
