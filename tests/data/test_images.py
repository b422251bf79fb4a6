from __future__ import annotations

import builtins
import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from images import encoded, noise
from PIL import Image, ImageFile

from vbm_ptm.data.images import check_images, decode_image
from vbm_ptm.errors import UnreachableError, UsageError

RED = (200, 40, 10)


def test_decode_image__takes_rows_paths_and_images(tmp_path: Path) -> None:
    image = noise(height=24, width=16)
    path = tmp_path / "a.png"
    image.save(path)
    for value in (
        {"bytes": encoded(image), "path": None},
        {"bytes": None, "path": str(path)},
        path,
        str(path),
        image,
    ):
        decoded = decode_image(value)
        assert decoded.mode == "RGB"
        assert np.array_equal(np.asarray(decoded), np.asarray(image))


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "RGB", "HSV"])
def test_decode_image__gives_three_channels_for_every_mode(mode: str, tmp_path: Path) -> None:
    image = Image.new("RGB", (8, 8), RED).convert(mode)
    path = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    if mode == "HSV":
        decoded = decode_image(image)
    else:
        image.save(path)
        decoded = decode_image(path)
    assert decoded.mode == "RGB"
    pixels = np.asarray(decoded).reshape(-1, 3).astype(int)
    if mode == "1":
        assert set(pixels.ravel()) == {0, 255}
    else:
        grey = round(0.299 * RED[0] + 0.587 * RED[1] + 0.114 * RED[2])
        expected = (grey,) * 3 if mode in ("L", "LA") else RED
        tolerance = {"P": 26, "HSV": 4}.get(mode, 2)  # the palette has steps of 51
        assert np.abs(np.median(pixels, axis=0) - expected).max() <= tolerance


def test_decode_image__drops_transparency_and_keeps_the_stored_colour() -> None:
    assert decode_image(Image.new("RGBA", (2, 2), (*RED, 0))).getpixel((0, 0)) == RED
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([0, 0, 0, *RED])
    content = encoded(palette, transparency=b"\x80\x00")
    assert decode_image({"bytes": content, "path": None}).getpixel((0, 0)) == RED


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_decode_image__scales_16_bit_and_does_not_clip(suffix: str, tmp_path: Path) -> None:
    values = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / f"a.{suffix}")
    decoded = np.asarray(decode_image(tmp_path / f"a.{suffix}"))
    assert decoded[0, :, 0].tolist() == [0, 1, 128, 255]
    assert (decoded == decoded[..., :1]).all()
    Image.fromarray(np.array([[0, 128, 255]], dtype=np.uint16)).save(tmp_path / f"dark.{suffix}")
    assert np.asarray(decode_image(tmp_path / f"dark.{suffix}"))[0, :, 0].tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0, 100, 255]], dtype=np.int32), [0, 100, 255]),
        (np.array([[0, 257, 65535]], dtype=np.int32), [0, 1, 255]),
        (np.array([[-100, 0, 100]], dtype=np.int32), [0, 128, 255]),
        (np.array([[0.0, 0.2, 1.0]], dtype=np.float32), [0, 51, 255]),
        (np.array([[0.0, 51.0, 255.0]], dtype=np.float32), [0, 51, 255]),
        (np.array([[1000.0, 1500.0, 2000.0]], dtype=np.float32), [0, 128, 255]),
    ],
)
def test_decode_image__scales_32_bit_by_the_smallest_range(
    values: np.ndarray[Any, Any], expected: list[int], tmp_path: Path
) -> None:
    Image.fromarray(values).save(tmp_path / "a.tif")
    assert np.asarray(decode_image(tmp_path / "a.tif"))[0, :, 0].tolist() == expected


@pytest.mark.parametrize("orientation", range(1, 9))
def test_decode_image__turns_exif_upright(orientation: int, tmp_path: Path) -> None:
    pixels = np.asarray(noise(height=24, width=16))
    # What the camera stores so that a viewer following the orientation shows `pixels`.
    stored = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }[orientation](pixels)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(np.asarray(decode_image(tmp_path / "a.png")), pixels)


def test_decode_image__in_draft_mode_keeps_as_many_pixels_as_asked_for(tmp_path: Path) -> None:
    pixels = np.tile(np.linspace(0, 255, 640, dtype=np.uint8), (480, 1))
    image = Image.fromarray(pixels).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    image.save(tmp_path / "a.jpg", quality=95)
    image.save(tmp_path / "turned.jpg", quality=95, exif=exif)
    image.save(tmp_path / "a.png")
    for draft_size, size in (
        (None, (640, 480)),
        (241, (640, 480)),
        (240, (320, 240)),
        (60, (80, 60)),
        (9, (80, 60)),
    ):
        draft = decode_image(tmp_path / "a.jpg", draft_size=draft_size)
        assert draft.size == size
        assert decode_image(tmp_path / "turned.jpg", draft_size=draft_size).size == size[::-1]
        assert decode_image(tmp_path / "a.png", draft_size=draft_size).size == (640, 480)
        wanted = image.resize(size, Image.Resampling.BOX)
        assert np.abs(np.asarray(draft, np.int16) - np.asarray(wanted, np.int16)).max() <= 6


def test_decode_image__reads_pixels_under_broken_exif(tmp_path: Path) -> None:
    noise(height=24, width=16).save(tmp_path / "a.jpg", exif=b"Exif\x00\x00" + b"nonsense" * 4)
    assert decode_image(tmp_path / "a.jpg").size == (16, 24)


def bad_files(folder: Path) -> dict[str, str]:
    """Write one bad file of each kind; return name -> part of the problem."""
    noise(height=64, width=64).save(folder / "whole.jpg")
    content = (folder / "whole.jpg").read_bytes()
    (folder / "half.jpg").write_bytes(content[: len(content) // 2])
    (folder / "half.png").write_bytes(encoded(noise(height=24, width=16))[:200])
    (folder / "empty.jpg").touch()
    (folder / "text.jpg").write_text("hello")
    (folder / "link.jpg").symlink_to(folder / "nowhere.jpg")
    return {
        "half.jpg": "broken",
        "half.png": "broken",
        "empty.jpg": "the file is empty",
        "text.jpg": "not an image",
        "link.jpg": "no such file",
    }


def test_decode_image__names_the_bad_file(tmp_path: Path) -> None:
    for name, problem in bad_files(tmp_path).items():
        with pytest.raises(UsageError, match=problem) as caught:
            decode_image(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


@pytest.mark.parametrize("value", [{"bytes": None, "path": None}, None, {"bytes": b"", "path": "a.png"}])
def test_decode_image__refuses_rows_without_an_image(value: Any) -> None:
    with pytest.raises(UsageError, match=r"row 7.*(neither bytes nor a path|empty)"):
        decode_image(value, name="row 7")


def test_decode_image__treats_a_decompression_bomb_as_a_bad_file(tmp_path: Path) -> None:
    Image.new("1", (20000, 20000)).save(tmp_path / "huge.png")
    with pytest.raises(UsageError, match=r"huge\.png.*too large"):
        decode_image(tmp_path / "huge.png")


def test_decode_image__closes_files(tmp_path: Path) -> None:
    noise(height=24, width=16).save(tmp_path / "a.png")
    (tmp_path / "bad.png").write_bytes(encoded(noise(height=24, width=16))[:100])
    before = len(os.listdir("/dev/fd"))
    kept = [decode_image(tmp_path / "a.png") for _ in range(20)]
    for _ in range(20):
        with pytest.raises(UsageError):
            decode_image(tmp_path / "bad.png")
    assert len(os.listdir("/dev/fd")) == before
    assert kept[0].size == (16, 24)


def test_check_images__finds_every_bad_image(tmp_path: Path) -> None:
    expected = bad_files(tmp_path)
    names = ["whole.jpg", *expected]
    found = check_images(
        lambda i: {"bytes": None, "path": str(tmp_path / names[i])}, lambda i: names[i], len(names)
    )
    assert [names[index] for index in found] == list(expected)
    assert all(names[index] in problem for index, problem in found.items())


def test_decode_image__does_not_wait_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(UsageError, match=r"pipe\.png': not a file"):
        decode_image(tmp_path / "pipe.png")


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES], ids=os.strerror)
def test_check_images__does_not_call_an_image_bad_that_the_system_does_not_give(
    code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Left out by on_bad_image=skip, it would be missing in this run and there in the next."""
    noise().save(tmp_path / "a.png")
    real = open

    def fail(file: Any, *arguments: Any, **options: Any) -> Any:
        if str(file).endswith("a.png"):
            raise OSError(code, os.strerror(code), str(file))
        return real(file, *arguments, **options)

    monkeypatch.setattr(builtins, "open", fail)
    with pytest.raises(UnreachableError, match=f"'a.png': {os.strerror(code)}"):
        check_images(lambda _: str(tmp_path / "a.png"), lambda _: "a.png", 1)
