"""Pictures of strangers, within limits that are checked before anything is decoded.

PNG, JPEG or WebP, one frame, 8 bits a channel (colours of 16 are cut to 8). What is read is RGB:
turned as EXIF says, and on white where it is transparent, as processors of `transformers` put it;
`transformers`' own loader shows the colour that transparency hides. Pillow reads them, of the extra images.
Left out: fetching: an address is no picture.
"""

import io
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobit.data.foreign import read_bytes, reason_of
from isobit.errors import IsobitError

if TYPE_CHECKING:
    from PIL import Image

MOST_BYTES = 20 << 20
MOST_PIXELS = 1 << 25  # 100 MB, as RGB
MOST_ASPECT = 200
_KINDS = ("PNG", "JPEG", "WEBP")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")


def require_pillow() -> None:
    """Raise IsobitError where Pillow is not installed."""
    if find_spec("PIL") is None:
        raise IsobitError("images are read by Pillow, which is not installed: pip install pillow")


def read_picture(picture: Any, where: str = "the image") -> "Image.Image":
    """Return a picture as RGB, from the bytes of a file, its path, or one of Pillow. Raises
    IsobitError for what is above the limits, of another kind, or damaged."""
    require_pillow()
    from PIL import Image

    if isinstance(picture, Image.Image):
        return _as_rgb(_within_limits(picture, where), where)
    if isinstance(picture, str) and "://" in picture[:16]:
        raise IsobitError(f"{where}: an address, {picture:.80}; it is not fetched: give the file")
    if isinstance(picture, (str, Path)):
        path = Path(picture)
        try:
            picture, where = read_bytes(path, MOST_BYTES), f"{where} {path}"
        except OSError as error:
            raise IsobitError(f"{where} {path}: cannot be read: {reason_of(error)}") from None
    if not isinstance(picture, (bytes, bytearray)):
        raise IsobitError(
            f"{where}: expected the bytes of a picture, its path or a PIL.Image, got "
            f"{picture!r:.60}"
        )
    if len(picture) > MOST_BYTES:
        raise IsobitError(f"{where}: has {len(picture):,} bytes; expected at most {MOST_BYTES:,}")
    try:
        with warnings.catch_warnings():  # of sizes, which are compared below
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(io.BytesIO(picture), formats=_KINDS)
    except Image.DecompressionBombError:
        raise IsobitError(f"{where}: has too many pixels; expected at most {_LIMIT}") from None
    except Exception:  # a decoder raises many kinds for the bytes of strangers
        raise IsobitError(f"{where}: expected a PNG, JPEG or WebP picture") from None
    return _as_rgb(_within_limits(opened, where), where)


_LIMIT = f"{MOST_PIXELS:,}"


def _within_limits(image: "Image.Image", where: str) -> "Image.Image":
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise IsobitError(f"{where}: has {width} x {height} pixels; expected at most {_LIMIT}")
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise IsobitError(
            f"{where}: has {width} x {height} pixels; expected one side at most {MOST_ASPECT} times "
            "the other"
        )
    # a JPEG of a phone may have a thumbnail behind its picture, and is an MPO for Pillow
    if image.format != "MPO" and (frames := getattr(image, "n_frames", 1)) > 1:
        raise IsobitError(f"{where}: has {frames} frames; expected one")
    if image.mode not in _MODES:
        raise IsobitError(f"{where}: has pixels of mode {image.mode}; expected 8 bits a channel")
    return image


def _as_rgb(image: "Image.Image", where: str) -> "Image.Image":
    from PIL import Image, ImageOps

    try:
        image.load()
        turned = ImageOps.exif_transpose(image)
        if turned.has_transparency_data:
            turned = turned.convert("RGBA")
            white = Image.new("RGBA", turned.size, "white")
            white.alpha_composite(turned)
            turned = white
        return turned.convert("RGB")
    except Exception as error:  # as above
        reason = " ".join(str(error).split())[:80]
        raise IsobitError(f"{where}: is damaged ({reason or type(error).__name__})") from None
