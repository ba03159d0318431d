"""Prompts with images: a picture is read, a tower makes its rows, once, and the ids of these rows
stand in its place.

Rows are kept in memory, by the SHA-256 of the picture and the tower. Left out: rows on disk, and
training by a config.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from isobit.data.pictures import read_picture
from isobit.errors import IsobitError
from isobit.model.images.bank import Bank, Image
from isobit.model.images.tower import Tower
from isobit.model.model import Model

MARK = "<image>"
"""What stands for an image in a text."""


class Images:
    """The images of a model, which turn prompts with pictures into token ids. What is computed with
    the model from then on, by an engine, a learner or itself, takes these ids."""

    def __init__(self, model: Model) -> None:
        """Raises IsobitError for a model that has no tower, whose images are not read or that several
        ranks share, and for a precision that calibrates its KV cache."""
        if model.directory is None or not model.config.wrapped:
            raise IsobitError(
                f"images: {model.directory or 'the model'} has no tower; expected the directory of a "
                "model that reads images"
            )
        if model.ranks.size > 1:
            raise IsobitError("images: a model that several ranks share is not supported")
        if model.precision.calibrated:
            raise IsobitError(
                f"images: precision {model.precision.name} calibrates its KV cache, which is not "
                "supported with images; expected one that does not, such as fp8"
            )
        self._tower, self._tokenizer = Tower(model.directory), model.tokenizer
        self._longest = model.config.max_positions
        bank = model.transformer.images  # whose ids an engine may have pages of
        token, axes = self._tower.marks.token, self._tower.axes
        self.bank = Bank(model.config.vocab_size, token, axes) if bank is None else bank
        self._images: dict[str, Image] = {}
        model.transformer.images = self.bank

    def image(self, picture: Any, where: str = "the image") -> Image:
        """Return a picture's image: of the bytes of a file, its path, or one of Pillow. An equal
        picture is the same image. Raises IsobitError as `read_picture`, and for one with more rows
        than the model has positions."""
        pixels = read_picture(picture, where)
        identity = self._tower.identity(pixels)
        if identity not in self._images:
            rows, grid = self._tower.rows(pixels, where)
            if len(rows[0]) >= self._longest:
                raise IsobitError(
                    f"{where}: has {len(rows[0]):,} tokens; expected fewer than the model's context "
                    f"of {self._longest:,}"
                )
            self._images[identity] = self.bank.add(rows, grid)
        return self._images[identity]

    def prompt(
        self, prompt: str | Sequence[Mapping[str, Any]], pictures: Sequence[Any] = ()
    ) -> list[int]:
        """Return the token ids of a text with `<image>` in the place of each of the pictures; or of
        a chat with a part {"type": "image"} for each, which may have its own as `image`. What a
        user wrote like a special token stays text. Raises IsobitError where there are more or fewer
        places than pictures, or a picture cannot be read."""
        if not isinstance(pictures, (list, tuple)):
            raise IsobitError("the prompt: expected a list of pictures, such as ['cat.png']")
        if isinstance(prompt, str):
            ids, rows = self._text(prompt)
        elif not isinstance(prompt, (list, tuple)) or not all(
            isinstance(message, Mapping) for message in prompt
        ):
            raise IsobitError(f"the prompt: expected a text, or messages, got {prompt!r:.80}")
        else:
            pictures = list(_pictures_of(prompt, pictures))
            ids = self._tokenizer.encode_chat([_without_pictures(message) for message in prompt])
            rows = [row for row, token in enumerate(ids) if token == self._tower.marks.token]
        if len(rows) != len(pictures):
            raise IsobitError(
                f"the prompt: has {len(rows)} places for images, and {len(pictures)} images are "
                "given"
            )
        whole, done = list[int](), 0
        for number, (row, picture) in enumerate(zip(rows, pictures)):
            whole += [*ids[done:row], *self.image(picture, f"image {number}").ids]
            done = row + 1
        return whole + ids[done:]

    def _text(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids of a text, with one for each image, and the places of these."""
        marks, ids, rows = self._tower.marks, list[int](), list[int]()
        for number, piece in enumerate(text.split(MARK)):
            if number:
                rows.append(len(ids) + len(marks.start))
                ids += [*marks.start, marks.token, *marks.end]
            if piece or not number:
                ids += self._tokenizer.encode_text(piece, add_special=not number)
        return ids, rows


def _pictures_of(messages: Sequence[Mapping[str, Any]], pictures: Sequence[Any]) -> Iterator[Any]:
    """Yield the pictures of a chat's parts, those that have none from `pictures` in turn."""
    remaining = iter(pictures)
    for message in messages:
        content = message.get("content")
        for item in content if isinstance(content, (list, tuple)) else ():
            if _is_image(item):
                yield item["image"] if "image" in item else next(remaining, None)
    yield from remaining


def _without_pictures(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message as a template sees it: {"type": "image"} for each picture."""
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return message
    for item in content:
        kind = item.get("type") if isinstance(item, Mapping) else item
        if kind not in ("text", "image"):
            raise IsobitError(
                f"the prompt: a part of a message is of type {kind!r:.60}; expected text or image"
            )
    return {**message, "content": [{"type": "image"} if _is_image(p) else p for p in content]}


def _is_image(item: Any) -> bool:
    return isinstance(item, Mapping) and item.get("type") == "image"
