"""Pictures that tests make: noise, a colour, a pattern, a place in every pixel; and their files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def noise(seed: int = 0, *, height: int = 8, width: int = 8) -> Image.Image:
    """Return a picture of independent pixels; another one for another seed."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def tinted(colour: Any, seed: Any, *, spread: float = 20, size: int = 32) -> Image.Image:
    """Return a square of one colour with normal noise.

    Args:
        colour: Three values from 0 to 255, or (size, size, 3) of them.
        seed: Whatever ``numpy.random.default_rng`` takes; from a generator it draws on.
        spread: Standard deviation of the noise.
        size: Length of a side.
    """
    values = np.asarray(colour) + np.random.default_rng(seed).normal(0, spread, (size, size, 3))
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))


def pattern(label: int, number: int, domain: int = 0) -> Image.Image:
    """Return a noisy picture of a class: its own pattern of 4 x 4 patches, brighter from domain to domain."""
    colours = np.random.default_rng(label).integers(30, 225, (4, 4, 3))
    patches = colours.repeat(8, axis=0).repeat(8, axis=1) + 10 * domain
    return tinted(patches, [label, number, domain], spread=12)


def photograph(height: int = 60, width: int = 48) -> Image.Image:
    """Return a picture in which every pixel tells where it is."""
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack([rows * 255 // height, columns * 255 // width, (rows + columns) % 256], axis=-1)
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    """Return the content of a picture's file; ``options`` are those of ``Image.save``."""
    buffer = io.BytesIO()
    image.save(buffer, format=file_format, **options)
    return buffer.getvalue()


def png(seed: int = 0) -> bytes:
    """Return the content of a PNG file of noise."""
    return encoded(noise(seed))


def write_pictures(root: Path, *files: str) -> Path:
    """Write pictures of noise, all different; return the folder."""
    for number, file in enumerate(files):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        noise(number).save(root / file)
    return root


def write_split(root: Path, names: Sequence[str], *, num_train: int = 6, num_test: int = 4) -> Path:
    """Write pictures of noise as ``train/<class>/<number>.png`` and ``test/...``; return the folder."""
    counts = (("train", num_train), ("test", num_test))
    files = [f"{split}/{name}/{n}.png" for split, count in counts for name in names for n in range(count)]
    return write_pictures(root, *files)
