"""Decoding of one image, the same for training, evaluation and prediction, and the search for bad ones."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from vbm_ptm.errors import UnreachableError, UsageError
from vbm_ptm.stand_ins import STAND_IN_BYTES, describe_stand_in

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
    | {".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif"}
)


def decode_image(
    value: Mapping[str, Any] | str | Path | Image.Image | None,
    *,
    name: str | None = None,
    draft_size: int | None = None,
) -> Image.Image:
    """Return the image, upright and in RGB; the file is closed again.

    The EXIF orientation is applied. Transparency is dropped (the stored colour stays, as in
    ``convert("RGB")``, which the reference pipelines use). Grey values of more than 8 bits are scaled to
    0..255, never clipped: 16-bit images by 1/257; 32-bit integers by the smallest of 8 bits, 16 bits or
    their own range that holds them; floats likewise by 0..1, 0..255 or their own range.

    Args:
        value: A file, a row ``{"bytes": ..., "path": ...}`` of an undecoded image column, or an open
            image. None, as in a row without an image, is a bad image.
        name: What an error calls the image; by default its path.
        draft_size: Decode a JPEG at half, a quarter or an eighth of its size if both sides keep this many pixels;
            None for all pixels.

    Raises:
        UsageError: The image is missing, empty, broken or too large; the message names it.
        UnreachableError: The system cannot deliver it.
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
    return _named(lambda: _read(content, path, draft_size), called(name, path))


def called(name: str | None, path: str | Path | None) -> str:
    """Return what an error calls an image: its name, and the path that was tried if the name does not contain it."""
    if name is None or path is None or str(path).endswith(name):
        return name or str(path or "(without a name)")
    return f"{name}' at '{path}"


def no_such_file(path: str | Path | None) -> str:
    """Say that there is no file at a path, and where a link at that path leads."""
    if path is not None and os.path.islink(path):
        return f"there is no such file: it is a link to '{os.readlink(path)}', which does not exist"
    return "there is no such file"


def is_unreachable(error: OSError) -> bool:
    """Return whether the system cannot deliver a file that may well exist; errors of decoders have no number."""
    return error.errno not in (
        None,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.EINVAL,
    )


def has_flat_shape(value: Mapping[str, Any] | None) -> bool:
    """Return whether an undecoded image is one pixel high or wide, from its header alone; False if unreadable."""
    with suppress(Exception):
        content, path = (value or {}).get("bytes"), str((value or {}).get("path"))
        with Image.open(path if content is None else io.BytesIO(content)) as image:
            return min(image.size) == 1 < max(image.size)
    return False


def check_images(values: Callable[[int], Any], names: Callable[[int], str], count: int) -> dict[int, str]:
    """Decode every image once, on a few threads; return position -> problem for the bad ones.

    Args:
        values: Position -> what `decode_image` accepts.
        names: Position -> what an error calls the image.
        count: Number of images.

    Raises:
        UnreachableError: The system cannot deliver an image, which may be perfectly good.
    """

    def problem(index: int) -> str | None:
        try:
            decode_image(values(index), name=names(index))
        except UnreachableError:
            raise
        except UsageError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        found = enumerate(pool.map(problem, range(count)))
        return {index: text for index, text in found if text is not None}


class _UnreadableError(Exception):
    """An image that was given to no decoder, or that none recognised; the message says why."""


def _named(decode: Callable[[], Image.Image], name: str) -> Image.Image:
    """Run a decoder; whatever a Pillow plug-in raises becomes one error that names the image."""
    try:
        return decode()
    except FileNotFoundError as error:
        raise UsageError(f"cannot read image '{name}': {no_such_file(error.filename)}.") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UsageError(f"cannot read image '{name}': too large ({error}); make it smaller.") from error
    except _UnreadableError as error:
        raise UsageError(f"cannot read image '{name}': {error}.") from error
    except OSError as error:
        if is_unreachable(error):
            raise UnreachableError(f"cannot read image '{name}': {error.strerror}.") from error
        raise UsageError(f"cannot read image '{name}': broken ({error}).") from error
    except Exception as error:  # plug-ins raise SyntaxError, ValueError, EOFError, struct.error ...
        reason = str(error) or type(error).__name__
        raise UsageError(f"cannot read image '{name}': broken ({reason}).") from error


def _read(content: bytes | None, path: str | Path | None, draft_size: int | None) -> Image.Image:
    if content is not None:
        return _decode(io.BytesIO(content), draft_size)
    if not os.path.isfile(str(path)) and os.path.exists(str(path)):
        raise _UnreadableError("not a file")  # opening a named pipe would wait for its other end
    with open(str(path), "rb") as file:
        return _decode(file, draft_size)


def _decode(file: IO[bytes], draft_size: int | None) -> Image.Image:
    start = file.read(STAND_IN_BYTES)
    file.seek(0)
    if not start:
        raise _UnreadableError("the file is empty")
    try:
        with Image.open(file) as image:
            if draft_size is not None:
                image.draft(None, (draft_size, draft_size))
            return _upright_rgb(image)
    except UnidentifiedImageError:
        raise _UnreadableError(describe_stand_in(start) or "not an image in any known format") from None


def _upright_rgb(image: Image.Image) -> Image.Image:
    image.load()
    with suppress(Exception):  # broken EXIF does not make the pixels bad
        image = ImageOps.exif_transpose(image)
    return _to_rgb(image)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith(("I", "F")):
        return Image.fromarray(_to_8_bit(np.asarray(image), image.mode)).convert("RGB")
    if image.mode == "La":
        image = image.convert("LA")
    elif image.mode in ("PA", "RGBa") or (image.mode == "P" and "transparency" in image.info):
        image = image.convert("RGBA")
    return image.convert("RGB")


def _to_8_bit(values: np.ndarray[Any, Any], mode: str) -> np.ndarray[Any, Any]:
    """Scale the values of a one-channel image of more than 8 bits to uint8."""
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("it holds values that are not finite")
    low, high = float(values.min()), float(values.max())
    ceilings = (65535,) if mode.startswith("I;16") else (255, 65535) if mode == "I" else (1, 255)
    ceiling = next((ceiling for ceiling in ceilings if 0 <= low and high <= ceiling), None)
    scaled = values / ceiling if ceiling else (values - low) / (high - low)
    return np.rint(scaled * 255).astype(np.uint8)
