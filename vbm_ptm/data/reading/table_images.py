"""The forms in which tables hold images, which are read as structures with the fields bytes and path.

Shapes: N rows.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image, UnidentifiedImageError

from vbm_ptm.errors import UsageError
from vbm_ptm.stand_ins import describe_stand_in

FORMS = (
    "encoded images (JPEG, PNG, ...) as binary, as lists of their bytes, or as structures with bytes or path; paths or "
    "base64 as text; or pixels of 0 to 255 as nested lists (height, width) or (height, width, 3)"
)
STRUCTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])

_NUM_SAMPLES = 8
_MAX_PATH = 4096


def image_structures(column: pa.Array, *, where: str) -> pa.StructArray:
    """Return a column of images as structures with the fields bytes and path.

    Args:
        column: N values in one of the ``FORMS``.
        where: What an error calls the column.

    Raises:
        UsageError: They are in none of these forms.
    """
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    names = [field.name for field in column.type] if pa.types.is_struct(column.type) else []
    try:
        if "bytes" in names or "path" in names:
            return _structures(
                *(pc.struct_field(column, name) if name in names else None for name in ("bytes", "path"))
            )
        if holds_base64(column):
            decoded = [text and _decoded(text) for text in column.to_pylist()]
            return _structures(pa.array(decoded, pa.binary()), None)
        if _is_text(column.type):
            return _structures(None, column)
        return _structures(column, None)
    except (pa.ArrowException, UnicodeDecodeError, TypeError, ValueError) as error:
        raise UsageError(
            f"{where} holds {column.type}, not images ({error}). Accepted are {FORMS}."
        ) from error


def holds_base64(column: pa.Array | pa.ChunkedArray) -> bool:
    """Return whether a column holds images as base64, plain or in ``data:`` URLs, judging by its first value."""
    first = next((value.as_py() for value in column if value.is_valid), "") if _is_text(column.type) else ""
    try:
        return bool(first) and _is_image(_decoded(first))
    except ValueError:
        return False


def is_mapped(kind: pa.DataType) -> bool:
    """Return whether a column holds encoded bytes or paths that need no conversion."""
    kinds = [field.type for field in kind if field.name == "bytes"] if pa.types.is_struct(kind) else [kind]
    return not any(_is_list(each) or isinstance(each, pa.ExtensionType) for each in kinds)


def check_encoded(
    images: Sequence[dict[str, Any] | None] | Callable[[int], Any], count: int, *, where: str
) -> None:
    """Refuse a column whose bytes are not encoded images; a few rows across it are looked at.

    Args:
        images: Row number -> structure with the field bytes.
        count: N.
        where: What an error calls the column.

    Raises:
        UsageError: None of them is in a known format.
    """
    read = images if callable(images) else images.__getitem__
    values = [
        read(int(row)) for row in np.unique(np.linspace(0, count - 1, min(count, _NUM_SAMPLES), dtype=int))
    ]
    contents = [value["bytes"] for value in values if value and value["bytes"]]
    if not contents or any(map(_is_image, contents)):
        return
    stand_in = describe_stand_in(contents[0])
    if stand_in:
        raise UsageError(f"{where} holds {stand_in}.")
    if len(contents) > 1 or len(contents) == count:
        raise UsageError(
            f"{where} holds bytes that are not an image in any known format, {len(contents[0])} in its first row; flat "
            f"pixels have no height and width. Accepted are {FORMS}."
        )


def _structures(contents: Any, paths: Any) -> pa.StructArray:
    count = len(paths if contents is None else contents)
    fields = [
        pa.nulls(count, pa.binary()) if contents is None else _binary(contents),
        pa.nulls(count, pa.string()) if paths is None else _paths(paths),
    ]
    return pa.StructArray.from_arrays(fields, fields=list(STRUCTURE))


def _decoded(text: str) -> bytes:
    content = text.partition(",")[2] if text.startswith("data:") else text
    return base64.b64decode("".join(content.split()), validate=True)


def _paths(column: pa.Array) -> pa.Array:
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), pa.string())
    longest = pc.max(pc.binary_length(column)).as_py() or 0
    if longest > _MAX_PATH:
        raise ValueError(f"text of up to {longest} bytes is not a path")
    return column.cast(pa.string())


def _binary(column: pa.Array) -> pa.Array:
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), pa.binary())
    if not _is_list(column.type):
        if pa.types.is_fixed_size_binary(column.type) or _is_binary(column.type):
            return column.cast(pa.binary())
        raise TypeError("neither bytes nor lists of them")
    if _is_binary(column.type.value_type) or pa.types.is_struct(column.type.value_type):
        raise TypeError("lists of images, but a row must hold one")
    if _is_list(column.type.value_type):
        pixels = [None if not row.is_valid else _png(_pixels(row.values)) for row in column]
        return pa.array(pixels, pa.binary())
    lists = column.cast(pa.list_(pa.uint8()))
    if lists.flatten().null_count:
        raise ValueError("some of their values are missing")
    numbers, starts = lists.values.fill_null(0).to_numpy(), lists.offsets.to_numpy()
    rows = zip(lists.is_valid().to_pylist(), starts[:-1], starts[1:], strict=True)
    return pa.array([numbers[a:b].tobytes() if is_valid else None for is_valid, a, b in rows], pa.binary())


def _pixels(rows: pa.Array) -> np.ndarray[Any, Any]:
    """Return the pixels of one image given as the list of its rows."""
    shape = [len(rows)]
    while _is_list(rows.type):
        lengths = set(pc.list_value_length(rows).to_pylist())
        if len(lengths) != 1 or None in lengths:
            raise ValueError("the rows of an image differ in length")
        shape.append(lengths.pop())
        rows = rows.flatten()
    if rows.null_count:
        raise ValueError("some pixels are missing")
    pixels = rows.cast(pa.uint8()).to_numpy(zero_copy_only=False).reshape(shape)
    is_grey, is_colour = len(shape) == 2, len(shape) == 3 and shape[2] in (1, 3, 4)
    if not (is_grey or is_colour) or (is_grey and shape[1] == 3 * shape[0]):
        raise ValueError(f"of shape {tuple(shape)}")
    return np.squeeze(pixels, 2) if is_colour and shape[2] == 1 else np.asarray(pixels)


def _png(pixels: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def _is_image(content: bytes) -> bool:
    try:
        with Image.open(io.BytesIO(content)):
            return True
    except UnidentifiedImageError:
        return False
    except Exception:  # the format is known, but the image is broken
        return True


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view())


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or kind == pa.binary_view())


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
