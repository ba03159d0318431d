"""Pictures of strangers: what is within the limits is read, all else is refused in a line and in
little memory."""

import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isobit.data.pictures import MOST_BYTES, read_picture
from isobit.errors import IsobitError

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (isobit[images])")
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 64, 3), np.uint8))


def _saved(image: Any, kind: str, **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def _png(width: int, height: int, rows: int | None = None) -> bytes:
    """A white-and-black PNG of this size, that has so many rows."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    packer, row = zlib.compressobj(9), bytes((width + 7) // 8 + 1)
    count = height if rows is None else rows
    body = b"".join(packer.compress(row) for _ in range(count)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def test_kinds_that_are_read() -> None:
    """With the pixels that they have."""
    for kind, more in (("PNG", {}), ("WEBP", {"lossless": True})):
        assert read_picture(_saved(NOISE, kind, **more)).tobytes() == NOISE.tobytes()
    red = np.asarray(read_picture(_saved(Image.new("RGB", (16, 16), (200, 30, 30)), "JPEG")), int)
    assert abs(red - (200, 30, 30)).max() < 5
    assert read_picture(NOISE).tobytes() == NOISE.tobytes()
    for mode in ("1", "L", "LA", "P", "RGBA", "CMYK"):
        kind = "JPEG" if mode == "CMYK" else "PNG"
        assert read_picture(_saved(NOISE.convert(mode), kind)).mode == "RGB"


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "noise.png"
    NOISE.save(path)
    assert read_picture(path).tobytes() == read_picture(str(path)).tobytes() == NOISE.tobytes()
    with pytest.raises(IsobitError, match=r"the image .*none\.png: cannot be read"):
        read_picture(tmp_path / "none.png")


def test_the_first_picture_of_a_phones_file() -> None:
    """Behind which there is a thumbnail."""
    data = io.BytesIO()
    NOISE.save(data, "MPO", save_all=True, append_images=[NOISE.resize((4, 4))])
    assert read_picture(data.getvalue()).size == NOISE.size


def test_turned_and_transparent() -> None:
    """As EXIF says; and on white, not the black that is below."""
    exif = Image.Exif()
    exif[274] = 6
    assert read_picture(_saved(NOISE, "JPEG", exif=exif)).size == (40, 64)
    clear = Image.new("RGBA", (32, 32), (0, 0, 0, 0))
    clear.paste((0, 0, 0, 255), (8, 8, 24, 24))
    pixels = np.asarray(read_picture(_saved(clear, "PNG")))
    assert pixels[0, 0].tolist() == [255] * 3
    assert pixels[16, 16].tolist() == [0] * 3


FRAMES = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue")]
DEEP = Image.fromarray((np.arange(32 * 32).reshape(32, 32) * 60).astype(np.uint16))
SEVERAL: dict[str, Any] = {"save_all": True, "append_images": FRAMES[1:]}
REFUSED = {
    "9000 x 9000 pixels; expected at most": lambda: _png(9000, 9000, 1),
    "too many pixels": lambda: _png(20000, 20000, 1),
    "one side at most 200 times": lambda: _png(1, 40000),
    "has 2 frames": lambda: _saved(FRAMES[0], "PNG", **SEVERAL),
    "has 2 frames; expected one": lambda: _saved(FRAMES[0], "WEBP", **SEVERAL),
    "mode I;16; expected 8 bits": lambda: _saved(DEEP, "PNG"),
    "is damaged": lambda: _saved(NOISE, "PNG")[:-400],
    "is damaged (": lambda: _saved(NOISE, "JPEG")[:-300],
    "expected a PNG, JPEG or WebP": lambda: _saved(FRAMES[0], "GIF"),
    "expected a PNG, JPEG": lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "expected a PNG": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    "expected a": lambda: b"",
    "expected at most 20,971,520": lambda: bytes(MOST_BYTES + 1),
    "not fetched": lambda: "http://127.0.0.1/x.png",
    "it is not fetched": lambda: "file:///etc/passwd",
    "the bytes of a picture, its path or": lambda: 5,
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_is_refused(says: str) -> None:
    with pytest.raises(IsobitError) as error:
        read_picture(REFUSED[says](), "row 3")
    assert str(error.value).startswith("row 3: ")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


_CHILD = """
import resource, sys
from isobit.data.pictures import read_picture
from isobit.errors import IsobitError
data = sys.stdin.buffer.read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_picture(data)
except IsobitError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["png", "webp"])
def test_a_bomb_takes_no_memory(kind: str) -> None:
    """That would take a GB; a webp's decoder is made when it is opened."""
    if kind == "png":
        bomb = _png(13000, 13000)
    else:
        bomb = _saved(Image.new("RGB", (8000, 5000)), "WEBP", lossless=True, method=0)
    assert len(bomb) < 1 << 20
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _CHILD], input=bomb, capture_output=True
    )
    said, grown = done.stdout.decode().splitlines()
    assert "pixels; expected at most" in said
    assert int(grown) < 40_000  # KiB; with what Pillow's modules take


@pytest.mark.slow
def test_damaged_bytes_are_refused_in_a_line() -> None:
    """Of three kinds, thousands of them, cut and changed anywhere: a picture or a refusal."""
    rng, read, lines = np.random.default_rng(1), 0, list[str]()
    small = NOISE.resize((20, 12))
    sources = [_saved(small, "PNG"), _saved(small, "JPEG"), _saved(small, "WEBP")]
    for number in range(3000):
        data = bytearray(sources[number % 3])
        for place in rng.integers(0, len(data), int(rng.integers(1, 6))):
            data[place] = int(rng.integers(0, 256))
        try:
            read += read_picture(bytes(data[: int(rng.integers(1, len(data) + 1))])).mode == "RGB"
        except IsobitError as error:
            lines.append(str(error))
    assert read > 0
    assert len(lines) == 3000 - read > 0
    assert not any("\n" in line for line in lines)
