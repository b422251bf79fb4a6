"""Decoding of one image, the same for training, evaluation and prediction, and the search for bad ones."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from vbm_ptm.errors import UsageError

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
    | {".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif"}
)

_EXIF_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_image(
    value: Mapping[str, Any] | str | Path | Image.Image | None, *, name: str | None = None
) -> Image.Image:
    """Return the image upright and in RGB; the file is closed again.

    The EXIF orientation is applied. Transparency is dropped (the stored colour stays, as in
    ``convert("RGB")``, which the reference pipelines use). Grey values of more than 8 bit are scaled to
    0..255, never clipped: 16-bit images by 1/257; 32-bit integers by the smallest of 8 bit, 16 bit or
    their own range that holds them; floats likewise by 0..1, 0..255 or their own range.

    Args:
        value: A file, a row ``{"bytes": ..., "path": ...}`` of an undecoded image column, or an open
            image. None, as in a row without an image, is a bad image.
        name: What an error calls the image; by default its path.

    Raises:
        UsageError: The image is missing, empty, broken or too large, and which one it is.
    """
    if isinstance(value, Image.Image):
        return _named(lambda: _upright_rgb(value), name or getattr(value, "filename", "") or "image")
    content: bytes | None = None
    path: str | Path | None = None
    if isinstance(value, (str, Path)):
        path = value
    elif value is not None:
        content, path = value.get("bytes"), value.get("path")
    if content is None and not path:
        raise UsageError(f"cannot read image {name or '(without a name)'}: it has neither bytes nor a path.")
    return _named(lambda: _read(content, path), name or str(path or "(without a name)"))


def check_images(values: Callable[[int], Any], names: Callable[[int], str], count: int) -> dict[int, str]:
    """Decode every image once, on a few threads; return position -> problem of the bad ones.

    Args:
        values: Position -> what `decode_image` accepts.
        names: Position -> what an error calls the image.
        count: Number of images.
    """

    def problem(index: int) -> str | None:
        try:
            decode_image(values(index), name=names(index))
        except UsageError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        found = enumerate(pool.map(problem, range(count)))
        return {index: text for index, text in found if text is not None}


def _named(decode: Callable[[], Image.Image], name: str) -> Image.Image:
    """Run a decoder; whatever a Pillow plug-in raises becomes one error that names the image."""
    try:
        return decode()
    except FileNotFoundError as error:
        raise UsageError(f"cannot read image '{name}': there is no such file.") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UsageError(f"cannot read image '{name}': too large ({error}); make it smaller.") from error
    except Exception as error:  # plug-ins raise OSError, SyntaxError, ValueError, EOFError, struct.error ...
        raise UsageError(f"cannot read image '{name}': {_reason(error)}.") from error


def _reason(error: Exception) -> str:
    if str(error) == "empty file":
        return "the file is empty"
    if isinstance(error, UnidentifiedImageError):
        return "not an image in any known format"
    return f"broken ({str(error) or type(error).__name__})"


def _read(content: bytes | None, path: str | Path | None) -> Image.Image:
    if content is not None:
        if not content:
            raise ValueError("empty file")
        with Image.open(io.BytesIO(content)) as image:
            return _upright_rgb(image)
    if not os.path.isfile(str(path)) and os.path.exists(str(path)):
        raise ValueError("not a file")  # to open a named pipe would wait for its other end
    with open(str(path), "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise ValueError("empty file")
        with Image.open(file) as image:
            return _upright_rgb(image)


def _upright_rgb(image: Image.Image) -> Image.Image:
    image.load()
    try:
        orientation = image.getexif().get(_EXIF_ORIENTATION)
    except Exception:  # broken EXIF does not make the pixels bad
        orientation = None
    converted = _to_rgb(image)
    return converted.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else converted


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith(("I", "F")):
        return Image.fromarray(_to_8_bit(np.asarray(image), image.mode)).convert("RGB")
    if image.mode == "La":
        image = image.convert("LA")
    elif image.mode in ("PA", "RGBa") or (image.mode == "P" and "transparency" in image.info):
        image = image.convert("RGBA")
    return image.convert("RGB")


def _to_8_bit(values: np.ndarray[Any, Any], mode: str) -> np.ndarray[Any, Any]:
    """Scale the values of a one-channel image of more than 8 bit to uint8."""
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("it holds values that are not finite")
    low, high = float(values.min()), float(values.max())
    ceilings = (65535,) if mode.startswith("I;16") else (255, 65535) if mode == "I" else (1, 255)
    ceiling = next((ceiling for ceiling in ceilings if 0 <= low and high <= ceiling), None)
    scaled = values / ceiling if ceiling else (values - low) / (high - low)
    return np.rint(scaled * 255).astype(np.uint8)
