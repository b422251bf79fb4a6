"""Tables of images: what is read is what was given, whatever the files are called and however they hold it."""

from __future__ import annotations

import base64
import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from miniatures import picture, write_table
from PIL import Image

from vbm_ptm.data.image_split import ImageDatasets, ImageSplit
from vbm_ptm.data.reading.datasets import DatasetSpec, load_image_dataset, write_split
from vbm_ptm.errors import UsageError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return folder


def load(path: Path, **fields: Any) -> ImageDatasets:
    return load_image_dataset(DatasetSpec(name="toy", path=path, **fields))


def refusal(path: Path, **fields: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load(path, **fields)
    return str(caught.value)


def named_pixels(split: ImageSplit, names: tuple[str, ...]) -> dict[bytes, str]:
    """Return the class name of every image by its pixels."""
    return {split.image(row).tobytes(): names[split.labels[row]] for row in range(len(split))}


def pixels(number: int) -> bytes:
    """Return the pixels of a picture that ``write_table`` writes."""
    return Image.open(io.BytesIO(picture(0, of=1, number=number, file_format="PNG"))).convert("RGB").tobytes()


# A path is a path


@pytest.mark.parametrize(
    "name", ["pics[2]", "what?", "all*", "a::b", "set #1", "100%41", "{x}", "~x", "split=train"]
)
@pytest.mark.parametrize("kind", ["folder", "file", "saved"])
def test_path__that_exists_is_no_pattern(name: str, kind: str, tmp_path: Path) -> None:
    for folder in (name, "pics2", "what!", "all of it", "set "):
        class_name = "right" if folder == name else "wrong"
        if kind == "saved":
            Dataset.from_parquet(
                str(write_table(tmp_path / "x" / "a.parquet", [class_name] * 5))
            ).save_to_disk(str(tmp_path / "made"))
            (tmp_path / "made").rename(tmp_path / folder)
        else:
            write_table(tmp_path / folder / "train.parquet", [class_name] * 5)
    path = tmp_path / name
    if kind == "file":
        path = write_table(tmp_path / "one" / f"{name}.parquet", ["right"] * 5)
    if (name, kind) == ("a::b", "saved"):
        assert "rename" in refusal(path)
    else:
        assert load(path).class_names == ("right",)


# Which files


def test_parts__must_be_complete(tmp_path: Path) -> None:
    for number in (0, 2):
        write_table(tmp_path / f"train-0000{number}-of-00003.parquet", ["a", "b"], first=2 * number)
    said = refusal(tmp_path)
    assert "part 1 is missing" in said
    assert "'train'" in said
    write_table(tmp_path / "train-00001-of-00003.parquet", ["a", "b"], first=2)
    assert len(load(tmp_path, test_fraction=0.4).train) + 2 == 6
    write_table(tmp_path / "train-00000-of-00002.parquet", ["a", "b"], first=9)
    assert "more than once" in refusal(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ["train-00000-of-00001-0a1b.parquet", "train-00000-of-00001-9f9f.parquet"],
        ["train.parquet", "train-00000-of-00001.parquet"],
        ["train_0.parquet", "train_2.parquet"],
        ["train-00001-of-00002.parquet"],
        ["train/part-0.parquet", "train/part-2.parquet"],
        ["train/part-0.parquet", "train.parquet"],
    ],
)
def test_parts__that_are_there_twice_or_missing_are_refused(names: list[str], tmp_path: Path) -> None:
    for number, name in enumerate(names):
        write_table(tmp_path / name, ["a", "b"], first=2 * number)
    said = refusal(tmp_path)
    assert "more than once" in said or "missing" in said


def test_tables__of_other_names_are_named_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_table(tmp_path / "train.parquet", ["a"] * 3)
    write_table(tmp_path / "test.parquet", ["a"], first=3)
    others = ["train_old.parquet", "train (1).parquet", "trainer.parquet", "validation.parquet"]
    for name in others:
        write_table(tmp_path / name, ["b"] * 3, first=9)
    found = load(tmp_path)
    assert (len(found.train), len(found.test), found.class_names) == (3, 1, ("a",))
    assert found.record.ignored_tables is not None
    assert set(found.record.ignored_tables.first) == set(others)
    assert "train_old.parquet" in caplog.text


@pytest.mark.parametrize(
    "names",
    [
        ("{}/part-0.parquet", "{}/part-1.parquet"),
        ("{}/0000.parquet", "{}/0001.parquet"),
        ("data/{}-00000-of-00002.parquet", "data/{}-00001-of-00002.parquet"),
        ("split={}/part-00000-5e0b-c000.snappy.parquet", "split={}/part-00001-5e0b-c000.snappy.parquet"),
        ("{}_1.parquet", "{}_2.parquet"),
        ("{}.parquet/part-00000-5e0b-c000.snappy.parquet", "{}.parquet/part-00001-5e0b-c000.snappy.parquet"),
    ],
)
def test_tables__in_parts_are_read_in_every_usual_layout(names: tuple[str, str], tmp_path: Path) -> None:
    for split, first in (("train", 0), ("test", 10)):
        for number, name in enumerate(names):
            write_table(tmp_path / name.format(split), ["a", "b"], first=first + 2 * number)
    found = load(tmp_path)
    assert set(named_pixels(found.train, found.class_names)) == {pixels(number) for number in range(4)}
    assert set(named_pixels(found.test, found.class_names)) == {pixels(number) for number in range(10, 14)}


def test_tables__in_other_folders_are_pointed_at(tmp_path: Path) -> None:
    write_table(tmp_path / "fine" / "train.parquet", ["a"] * 3)
    said = refusal(tmp_path)
    assert "'fine'" in said
    assert "dataset.path" in said


def test_tables__cut_by_the_names_of_folders_are_refused_with_the_column(tmp_path: Path) -> None:
    for name in "ab":
        write_table(tmp_path / f"train/label={name}/part-0.parquet", [0] * 3)
    said = refusal(tmp_path)
    assert "'train/label=a'" in said
    assert "the column 'label'" in said


# Names, part by part


def test_labels__are_mapped_by_name_in_every_part(tmp_path: Path) -> None:
    names = ["ant", "bee", "cat"]
    write_table(tmp_path / "train-00000-of-00003.parquet", [0, 1, 2], class_names=names)
    write_table(tmp_path / "train-00001-of-00003.parquet", [0, 1, 2], class_names=names[::-1], first=3)
    write_table(tmp_path / "train-00002-of-00003.parquet", [0, 3], class_names=["dog", *names], first=6)
    write_table(tmp_path / "test.parquet", [0, 0], class_names=["cat"], first=8)
    found = load(tmp_path)
    assert found.class_names == ("ant", "bee", "cat", "dog")
    given = ["ant", "bee", "cat", "cat", "bee", "ant", "dog", "cat"]
    assert named_pixels(found.train, found.class_names) == {pixels(n): name for n, name in enumerate(given)}
    assert set(named_pixels(found.test, found.class_names).values()) == {"cat"}


def test_domains__are_mapped_by_name_in_every_part(tmp_path: Path) -> None:
    for number, names in enumerate((["photo", "sketch"], ["sketch", "photo"])):
        table = pq.read_table(write_table(tmp_path / "x.parquet", ["a"] * 4, first=4 * number))
        table = table.append_column("domain", pa.array([0, 0, 1, 1]))
        features = datasets.Features({"domain": datasets.ClassLabel(names=names)})
        (tmp_path / "set").mkdir(exist_ok=True)
        table = table.replace_schema_metadata(features.arrow_schema.metadata)
        pq.write_table(table, tmp_path / "set" / f"train-0000{number}-of-00002.parquet")
    found = load(tmp_path / "set", domain_column="domain", test_fraction=0.5)
    assert found.train.domains is not None
    assert found.test.domains is not None
    domain_of = {
        split.image(row).tobytes(): str(domains[row])
        for split, domains in ((found.train, found.train.domains), (found.test, found.test.domains))
        for row in range(len(split))
    }
    wanted = ["photo", "photo", "sketch", "sketch", "sketch", "sketch", "photo", "photo"]
    assert domain_of == {pixels(number): name for number, name in enumerate(wanted)}


def test_labels__that_cannot_be_mapped_are_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "train-00000-of-00002.parquet", [0, 1], class_names=["ant", "bee"])
    write_table(tmp_path / "train-00001-of-00002.parquet", [1, 0], first=2)
    said = refusal(tmp_path)
    assert "class labels" in said
    assert "integers" in said
    write_table(tmp_path / "train-00001-of-00002.parquet", ["bee", "ant"], first=2)
    found = load(tmp_path, test_fraction=0.1)
    assert found.class_names == ("ant", "bee")
    every = named_pixels(found.train, found.class_names) | named_pixels(found.test, found.class_names)
    assert [every[pixels(number)] for number in range(4)] == ["ant", "bee", "bee", "ant"]


def test_names__are_compared_in_one_unicode_form(tmp_path: Path) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    write_table(tmp_path / "train.parquet", [decomposed, composed, "bar"])
    write_table(tmp_path / "test.parquet", [composed, decomposed], first=3)
    found = load(tmp_path)
    assert found.class_names == ("bar", decomposed)
    assert found.train.labels.tolist() == [1, 1, 0]
    assert found.test.labels.tolist() == [1, 1]
    write_table(tmp_path / "test.parquet", [0, 1], class_names=[composed, decomposed], first=3)
    said = refusal(tmp_path)
    assert "U+00E9" in said
    assert "U+0301" in said


# Rows without a class


@pytest.mark.parametrize(
    ("labels", "class_names"),
    [
        ([0, 1, -1, -1], None),
        ([0, 1, -1, None], ["a", "b"]),
        (["0", "1", "", None], None),
        ([0, 1, -100, -100], None),
        (["0", "1", " ", "\n"], None),
    ],
)
def test_rows__without_a_class_are_refused_or_left_out(
    labels: list[Any], class_names: list[str] | None, tmp_path: Path
) -> None:
    write_table(tmp_path / "train.parquet", labels, class_names=class_names)
    write_table(tmp_path / "test.parquet", labels[:2], class_names=class_names, first=4)
    assert "2 of 4 rows" in refusal(tmp_path)
    found = load(tmp_path, on_unlabelled="skip")
    assert len(found.class_names) == 2
    assert found.train.labels.tolist() == [0, 1]
    assert set(named_pixels(found.train, found.class_names)) == {pixels(0), pixels(1)}


def test_rows__of_a_part_without_any_class_are_left_out(tmp_path: Path) -> None:
    write_table(tmp_path / "train-0.parquet", ["a", "b"])
    write_table(tmp_path / "train-1.parquet", [None, None], first=2)
    write_table(tmp_path / "test.parquet", ["a", "b"], first=4)
    assert "2 of 4 rows" in refusal(tmp_path)
    assert load(tmp_path, on_unlabelled="skip").train.labels.tolist() == [0, 1]


def test_test_split__that_is_not_used_is_not_judged(tmp_path: Path) -> None:
    write_table(tmp_path / "train.parquet", [0, 1] * 4, class_names=["a", "b"])
    write_table(tmp_path / "test.parquet", [-1, -1], class_names=["a", "b"], first=8)
    assert "2 of 2 rows" in refusal(tmp_path)
    found = load(tmp_path, validation_fraction=0.25)
    assert (len(found.train), len(found.test)) == (6, 2)
    assert "is not used" in (found.record.held_out or "")


# Forms of images


def encoded(number: int) -> bytes:
    return picture(0, of=1, number=number, file_format="PNG")


@pytest.mark.parametrize(
    ("kind", "convert"),
    [
        (pa.binary(), bytes),
        (pa.large_binary(), bytes),
        (pa.list_(pa.uint8()), list),
        (pa.list_(pa.int64()), list),
        (pa.large_list(pa.uint8()), list),
        (pa.struct([("bytes", pa.large_binary())]), lambda content: {"bytes": content}),
        (pa.string(), lambda content: base64.encodebytes(content).decode()),
        (pa.string(), lambda content: f"data:image/png;base64,{base64.b64encode(content).decode()}"),
        (
            pa.struct([("path", pa.string()), ("bytes", pa.list_(pa.uint8()))]),
            lambda content: {"bytes": content},
        ),
    ],
    ids=lambda value: "convert" if callable(value) else str(value),
)
def test_images__encoded_in_any_usual_form_are_decoded(
    kind: pa.DataType, convert: Any, tmp_path: Path
) -> None:
    images = [convert(encoded(number)) for number in range(6)]
    write_table(tmp_path / "all.parquet", ["a", "b"] * 3, images=images, image_type=kind)
    Dataset.from_parquet(str(tmp_path / "all.parquet")).save_to_disk(tmp_path / "saved")
    plain = load(write_table(tmp_path / "plain.parquet", ["a", "b"] * 3))
    for path in (tmp_path / "all.parquet", tmp_path / "saved"):
        found = load(path)
        every = named_pixels(found.train, found.class_names) | named_pixels(found.test, found.class_names)
        assert every == {pixels(number): "ab"[number % 2] for number in range(6)}
        assert found.split_sha256 == plain.split_sha256


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((3072,), pa.list_(pa.uint8())),
        ((3072,), pa.list_(pa.int64())),
        ((3072,), pa.list_(pa.float32())),
        ((3072,), pa.binary(3072)),
        ((16, 48), pa.list_(pa.list_(pa.uint8()))),
        ((3, 16, 16), pa.list_(pa.list_(pa.list_(pa.uint8())))),
    ],
    ids=str,
)
def test_images__that_are_flat_pixels_are_refused_with_the_forms_that_are_read(
    shape: tuple[int, ...], kind: pa.DataType, tmp_path: Path
) -> None:
    values = np.random.default_rng(0).integers(0, 256, (4, *shape)).astype(np.uint8)
    images = [value.tobytes() if kind == pa.binary(3072) else value.tolist() for value in values]
    write_table(tmp_path / "all.parquet", ["a", "b"] * 2, images=images, image_type=kind)
    said = refusal(tmp_path / "all.parquet")
    assert "image" in said
    assert "(height, width, 3)" in said


@pytest.mark.parametrize("shape", [(8, 6), (8, 6, 1), (8, 6, 3)])
def test_images__as_nested_lists_of_pixels_are_read(shape: tuple[int, ...], tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (4, *shape)).astype(np.uint8)
    write_table(tmp_path / "all.parquet", ["a"] * 4, images=values.tolist())
    found = load(tmp_path / "all.parquet")
    wanted = np.broadcast_to(values[0].reshape(8, 6, -1), (8, 6, 3))
    (row,) = [row for row in range(3) if found.train.source_name(row) == "train row 0"] or [None]
    image = found.test.image(0) if row is None else found.train.image(row)
    assert np.array_equal(np.asarray(image), wanted)


def test_images__of_which_a_row_holds_several_are_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "all.parquet", ["a", "b"], images=[[encoded(0), encoded(1)], [encoded(2)]])
    said = refusal(tmp_path / "all.parquet")
    assert "a row must hold one" in said
    assert "PNG\r" not in said


def test_images__one_pixel_high_are_warned_about(tmp_path: Path) -> None:
    for number in range(4):
        file = tmp_path / "a" / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((300, 1, 3), number, np.uint8)).save(file)
    assert any("one pixel" in warning for warning in load(tmp_path).record.warnings)


def test_images__at_relative_paths_lie_beside_their_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, first in (("set", 0), ("elsewhere", 100)):
        (tmp_path / place / "img").mkdir(parents=True)
        for number in range(6):
            (tmp_path / place / "img" / f"{number}.png").write_bytes(encoded(first + number))
    paths = [f"img/{number}.png" for number in range(6)]
    write_table(tmp_path / "set" / "train.parquet", ["a", "b"] * 3, images=paths)
    write_table(tmp_path / "set" / "test.parquet", ["a"], images=[{"bytes": None, "path": paths[0]}])
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = load(tmp_path / "set")
    assert set(named_pixels(found.train, found.class_names)) == {pixels(number) for number in range(6)}
    assert found.test.image(0).tobytes() == pixels(0)
    copy = pickle.loads(pickle.dumps(found.train))
    assert copy.image(3).tobytes() == pixels(3)
    shutil.copytree(tmp_path / "set", tmp_path / "moved")
    assert load(tmp_path / "moved").split_sha256 == found.split_sha256
    (tmp_path / "set" / "img" / "2.png").unlink()
    said = refusal(tmp_path / "set")
    assert str(tmp_path / "set" / "img" / "2.png") in said
    assert "no such file" in said
    assert str(tmp_path / "set" / "img" / "2.png") in refusal(tmp_path / "set", verify="auto")


@pytest.mark.parametrize("form", ["..\\img\\{}.png", "file://{folder}/img/{}.png"])
def test_images__at_paths_of_other_systems_are_found(form: str, tmp_path: Path) -> None:
    (tmp_path / "img").mkdir()
    for number in range(4):
        (tmp_path / "img" / f"{number}.png").write_bytes(encoded(number))
    paths = [form.format(number, folder=tmp_path) for number in range(4)]
    found = load(write_table(tmp_path / "table/train.parquet", ["a", "a", "b", "b"], images=paths))
    every = named_pixels(found.train, found.class_names) | named_pixels(found.test, found.class_names)
    assert every == {pixels(number): "aabb"[number] for number in range(4)}


def test_images__at_addresses_are_not_looked_for_here(tmp_path: Path) -> None:
    addresses = [f"http://nowhere.invalid/{number}.png" for number in range(4)]
    said = refusal(write_table(tmp_path / "train.parquet", ["a", "b"] * 2, images=addresses))
    assert f"{tmp_path}/http" not in said
    assert "'http://nowhere.invalid/0.png'" in said


def test_pointers__of_large_files_are_named(tmp_path: Path) -> None:
    write_table(tmp_path / "train.parquet", ["a"] * 2)
    (tmp_path / "train.parquet").write_bytes(POINTER)
    assert "git lfs pull" in refusal(tmp_path)
    write_table(tmp_path / "x.parquet", ["a"] * 3, images=[POINTER] * 3)
    assert "git lfs pull" in refusal(tmp_path / "x.parquet")
    (tmp_path / "folder" / "a").mkdir(parents=True)
    for number in range(3):
        (tmp_path / "folder" / "a" / f"{number}.jpg").write_bytes(POINTER)
    assert "git lfs pull" in refusal(tmp_path / "folder")
    Dataset.from_dict({"image": [encoded(0)], "label": ["a"]}).save_to_disk(tmp_path / "saved")
    for file in (tmp_path / "saved").glob("*.arrow"):
        file.write_bytes(POINTER)
    assert "git lfs pull" in refusal(tmp_path / "saved")


@pytest.mark.slow
def test_images__of_more_than_2_gib_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = os.urandom(108_000)
    head = encoded(0)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    with pq.ParquetWriter(tmp_path / "train.parquet", pa.schema([("image", kind), ("label", pa.int64())]),
                          compression="zstd", use_dictionary=False) as writer:  # fmt: skip
        for start in range(0, 21_000, 1000):
            rows = [
                {"bytes": head + noise + number.to_bytes(4), "path": None}
                for number in range(start, start + 1000)
            ]
            labels = [number % 2 for number in range(1000)]
            writer.write_table(pa.table({"image": pa.array(rows, kind), "label": labels}))
    found = load(tmp_path)
    assert found.record.verified == "no empty or missing files"
    assert len(found.train) + len(found.test) == 21_000
    assert found.train.image(16_000).size == (16, 16)


# No stale copies


def test_copy__of_a_replaced_file_is_not_used(tmp_path: Path, cache: Path) -> None:
    file = write_table(tmp_path / "train.parquet", ["a", "b"] * 3)
    before = file.stat()
    first = load(file)
    assert len(first.train) + len(first.test) == 6
    write_table(tmp_path / "new.parquet", ["a", "b"] * 5, first=50).replace(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = load(file)
    assert len(second.train) + len(second.test) == 10
    every = named_pixels(second.train, second.class_names) | named_pixels(second.test, second.class_names)
    assert set(every) == {pixels(number) for number in range(50, 60)}
    # A run that reads the former file goes on reading it.
    assert pickle.loads(pickle.dumps(first.train)).image(0).tobytes() in {
        pixels(number) for number in range(6)
    }


def test_copy__of_a_file_of_the_same_size_and_time_is_not_used(tmp_path: Path) -> None:
    images = [encoded(0)] * 2 + [encoded(1)] * 2
    size = max(map(len, images))
    images = [image.ljust(size, b"\0") for image in images]
    file = write_table(tmp_path / "train.parquet", ["a", "a", "b", "b"], images=images)
    before, one = file.stat(), load(file)
    write_table(file, ["a", "a", "b", "b"], images=images[::-1])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    other = load(file)
    assert named_pixels(one.train, one.class_names) != named_pixels(other.train, other.class_names)
    assert one.split_sha256 != other.split_sha256


def test_copy__is_made_once_of_a_file_that_is_touched_or_moved(tmp_path: Path, cache: Path) -> None:
    file = write_table(tmp_path / "train.parquet", ["a", "b"] * 3)
    load(file)
    for number in range(3):
        os.utime(file, ns=(number, number))
        load(file)
    load(shutil.copy(file, tmp_path / "other.parquet"))
    assert len([*cache.rglob("*.arrow")]) == 1


@pytest.mark.parametrize("length", [0, 100, -50])
def test_copy__that_is_damaged_is_made_anew(
    length: int, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_table(tmp_path / "train.parquet", ["a", "b"] * 3)
    load(file)
    (copy,) = (cache / "vbm_ptm").glob("*.arrow")
    whole = copy.read_bytes()
    copy.write_bytes(whole[:length])
    found = load(file)
    assert len(found.train) + len(found.test) == 6
    assert f"'{copy}' is damaged" in caplog.text
    assert copy.read_bytes() == whole


def test_copy__of_a_torn_file_is_not_what_is_blamed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_table(tmp_path / "train.parquet", ["a", "b"] * 3)
    content = bytearray(file.read_bytes())
    content[100:900] = bytes(800)
    file.write_bytes(content)
    assert f"cannot read the parquet file '{file}'" in refusal(file)
    assert "HF_DATASETS_CACHE" not in caplog.text


def test_copy__that_cannot_be_written_is_held_in_memory(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (cache / "vbm_ptm").write_text("in the way")
    found = load(write_table(tmp_path / "train.parquet", ["a", "b"] * 3))
    assert "HF_DATASETS_CACHE" in caplog.text
    assert pickle.loads(pickle.dumps(found.train)).image(0).size == (16, 16)


def test_labels__that_a_missing_one_made_real_are_whole_numbers(tmp_path: Path) -> None:
    """As pandas writes integers beside a missing value."""
    file = write_table(tmp_path / "train.parquet", [2.0, 10.0, float("nan"), 2.0, 10.0])
    assert "1 of 5 rows without a value" in refusal(file)
    found = load(file, on_unlabelled="skip", test_fraction=0.5)
    assert (found.class_names, len(found.train) + len(found.test)) == (("2", "10"), 4)


@pytest.mark.parametrize("label", [0.5, 2**63 + 5], ids=["a fraction", "beyond 64 bits"])
def test_labels__that_are_no_numbers_of_classes_are_refused(label: Any, tmp_path: Path) -> None:
    labels = pa.array([label, label], pa.uint64() if label > 1 else None)
    said = refusal(write_table(tmp_path / "train.parquet", labels))
    assert "column 'label'" in said
    assert "name no class" in said


@pytest.mark.parametrize("on_unlabelled", ["error", "skip"])
def test_domains__are_written_for_every_row(on_unlabelled: str, tmp_path: Path) -> None:
    """Rows without a class can be left out; of domains nothing says so, and no advice may."""
    file = write_table(tmp_path / "train.parquet", ["a", "b"], domain=["x", None])
    said = refusal(file, domain_column="domain", on_unlabelled=on_unlabelled)
    assert "1 of 2 rows without a domain" in said
    assert "on_unlabelled" not in said


@pytest.mark.parametrize("column", ["image", "label"])
def test_columns__that_are_there_twice_are_refused(column: str, tmp_path: Path) -> None:
    table = pq.read_table(write_table(tmp_path / "once.parquet", ["a", "b"]))
    pq.write_table(table.append_column(column, table[column]), tmp_path / "train.parquet")
    assert f"more than one column '{column}'" in refusal(tmp_path / "train.parquet")


def test_labels__that_look_like_one_name_are_pointed_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = load(
        write_table(
            tmp_path / "train.parquet",
            ["cat", "cat ", "Cat", "dog"] * 2,
        ),
        test_fraction=0.5,
    )
    assert len(found.class_names) == 4
    assert "only in case or white space: 'Cat' and 'cat' and 'cat '" in caplog.text


# What tells rows apart


def reordered(file: Path, to: Path) -> Path:
    table = pq.read_table(file)
    to.parent.mkdir(exist_ok=True)
    pq.write_table(table.take(np.random.default_rng(3).permutation(len(table))), to)
    return to


@pytest.mark.parametrize("has_paths", [False, True])
def test_rows__in_another_order_make_the_same_split(has_paths: bool, tmp_path: Path) -> None:
    images = [{"bytes": encoded(n), "path": f"{n}.png" if has_paths else None} for n in range(40)]
    images[7] = images[11] = images[31]  # the same image three times
    file = write_table(tmp_path / "all.parquet", ["a", "b"] * 20, images=images)
    one, other = load(file), load(reordered(file, tmp_path / "two" / "all.parquet"))
    assert one.split_sha256 == other.split_sha256
    for split in ("train", "test"):
        named = [named_pixels(getattr(each, split), each.class_names) for each in (one, other)]
        assert named[0] == named[1]
    assert len(other.test) == 8


def test_rows__with_other_images_of_the_same_paths_make_another_hash(tmp_path: Path) -> None:
    for place, first in (("one", 0), ("two", 50)):
        images = [{"bytes": encoded(first + n), "path": f"{n}.png"} for n in range(10)]
        write_table(tmp_path / place / "all.parquet", ["a", "b"] * 5, images=images)
    assert load(tmp_path / "one").split_sha256 != load(tmp_path / "two").split_sha256


def test_rows__by_number_split_as_earlier_versions_did(tmp_path: Path) -> None:
    write_table(tmp_path / "all.parquet", [0, 1] * 10, class_names=["a", "b"])
    found = load(tmp_path, row_names="number")
    # What the first version said of this table.
    assert found.split_sha256 == "013b258e929b4f71913a93e77e312b78175ccaffca74525e4f00e909fd66a6fb"
    assert any("dataset.row_names" in warning for warning in found.record.warnings)
    assert not load(tmp_path).record.warnings


def test_split_file__finds_rows_in_another_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_table(tmp_path / "all.parquet", ["a", "b"] * 10)
    other = reordered(file, tmp_path / "two" / "all.parquet")
    found = load(file)
    write_split(found, tmp_path / "split.csv")
    again = load(other, split_file=tmp_path / "split.csv")
    assert named_pixels(again.test, again.class_names) == named_pixels(found.test, found.class_names)
    # As earlier versions wrote it.
    lines = [f"train row {row},{'test' if row < 4 else 'train'},{'ab'[row % 2]}" for row in range(20)]
    (tmp_path / "old.csv").write_text("\n".join(["path,split,label", *lines]))
    old = load(file, split_file=tmp_path / "old.csv")
    assert set(named_pixels(old.test, old.class_names)) == {pixels(number) for number in range(4)}
    assert "rows by number" in caplog.text


def test_rows__are_the_same_in_every_form_of_table(tmp_path: Path) -> None:
    train = Dataset.from_parquet(str(write_table(tmp_path / "x" / "train.parquet", ["a", "b"] * 4)))
    test = Dataset.from_parquet(str(write_table(tmp_path / "x" / "test.parquet", ["a", "b"], first=8)))
    DatasetDict(train=train, test=test).save_to_disk(tmp_path / "saved")
    DatasetDict(train=train.select([5, 2, 7, 0, 1, 4, 6, 3]), test=test).save_to_disk(tmp_path / "shuffled")
    hashes = {load(tmp_path / name).split_sha256 for name in ("x", "saved", "shuffled")}
    assert len(hashes) == 1


def test_metadata__beside_the_images_of_a_split_is_no_table(tmp_path: Path) -> None:
    for number in range(4):
        file = tmp_path / ("train", "test")[number % 2] / "a" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(picture(0, of=1, number=number, file_format="PNG"))
    write_table(tmp_path / "train" / "metadata.parquet", ["a"] * 2)
    found = load(tmp_path)
    assert (found.record.kind, len(found.train), len(found.test)) == ("folder", 2, 2)
