from __future__ import annotations

import io
import json
import logging
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import yaml
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from huggingface_hub import HfApi
from images import noise, png, write_pictures, write_split
from PIL import Image
from pydantic import ValidationError
from sklearn.datasets import load_digits

from vbm_ptm.data.image_split import ImageDatasets
from vbm_ptm.data.reading.datasets import DatasetSpec, load_image_dataset
from vbm_ptm.data.reading.opening import open_digits
from vbm_ptm.data.record import DataRecord, SomeNames
from vbm_ptm.errors import UsageError

CONFIGS = Path(__file__).parents[3] / "configs" / "datasets"


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def load(path: Path, **fields: Any) -> ImageDatasets:
    return load_image_dataset(DatasetSpec(name="toy", path=path, **fields))


def table(labels: list[Any], feature: Any = None, **columns: list[Any]) -> Dataset:
    """Return rows of images with a column ``label`` and whatever else is given."""
    rows = {
        "image": [{"bytes": png(n), "path": None} for n in range(len(labels))],
        "label": labels,
        **columns,
    }
    made = Dataset.from_dict(rows).cast_column("image", datasets.Image())
    return made if feature is None else made.cast_column("label", feature)


def sources(split: Any) -> list[str]:
    return [split.source_name(index) for index in range(len(split))]


# Sources


@pytest.mark.slow
def test_open_digits__do_not_import_scikit_learn() -> None:
    program = "import sys; from vbm_ptm.data.reading.opening import open_digits; open_digits();"
    done = subprocess.run(
        [sys.executable, "-c", f"{program} print('sklearn' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"


def test_open_digits__are_scikit_learns() -> None:
    expected, source = load_digits(), open_digits()
    assert source.test is not None
    for split, rows in ((source.train, np.arange(1797) % 5 != 0), (source.test, np.arange(1797) % 5 == 0)):
        assert split.labels.tolist() == expected.target[rows].tolist()
        pixels = np.asarray(Image.open(io.BytesIO(split.rows[7]["image"]["bytes"])))
        assert np.array_equal(pixels, np.rint(expected.images[rows][7] * 255 / 16).astype(np.uint8))


def test_load_image_dataset__digits_need_nothing() -> None:
    digits = load_image_dataset(DatasetSpec(name="digits", source="builtin:digits", num_classes=10))
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    assert digits.class_names == tuple("0123456789")
    assert sources(digits.test)[:3] == ["row 0", "row 5", "row 10"]
    image = digits.test.image(0)
    assert (image.mode, image.size) == ("RGB", (8, 8))
    # The first digit of scikit-learn is a 0 whose first row is 0 0 5 13 9 1 0 0 of 16.
    assert np.asarray(image)[0, :, 0].tolist() == [0, 0, 80, 207, 143, 16, 0, 0]
    assert digits.test.labels[:3].tolist() == [0, 5, 0]
    with pytest.raises(UsageError, match="Did you mean 'builtin:digits'"):
        load_image_dataset(DatasetSpec(name="digits", source="builtin:digit"))


def test_load_image_dataset__reads_class_folders_by_name(tmp_path: Path) -> None:
    names = [str(number) for number in range(12)]
    found = load(write_split(tmp_path, names))
    assert found.class_names == tuple(sorted(names))
    for split, count in ((found.train, 6), (found.test, 4)):
        assert len(split) == 12 * count
        for index in range(len(split)):
            source = split.source_name(index)
            assert source.split("/")[1] == found.class_names[split.labels[index]]
            assert np.array_equal(np.asarray(split.image(index)), np.asarray(Image.open(tmp_path / source)))
    assert found.record.layout == "split"
    assert found.record.train.images_per_class == dict.fromkeys(sorted(names), 6)
    assert found.record.test.images_per_class == dict.fromkeys(sorted(names), 4)
    stored = json.loads(json.dumps(found.record.to_json()))
    assert DataRecord.model_validate(stored) == found.record


def test_load_image_dataset__takes_class_names_as_written(tmp_path: Path) -> None:
    names = ["10", "no", "train", "test tube", "12:30", "010"]
    assert load(write_split(tmp_path, names)).class_names == tuple(sorted(names))


def test_load_image_dataset__announces_layout_and_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    load(write_split(tmp_path, ["a", "b"]))
    assert "toy (split): train split: 12 images, 2 classes, 6 images per class." in caplog.text
    assert "toy (split): test split: 8 images, 2 classes" in caplog.text


def parquet_forms(folder: Path, train: Dataset, test: Dataset) -> list[Path]:
    """Write the same splits in every form of table; return the paths."""
    plain, shards, hub, saved = (folder / name for name in ("plain", "shards", "hub", "saved"))
    for path in (plain, shards, hub / "data"):
        path.mkdir(parents=True)
    train.to_parquet(plain / "train.parquet")
    test.to_parquet(plain / "test.parquet")
    half = len(train) // 2
    train.select(range(half)).to_parquet(shards / "train-00000-of-00002.parquet")
    train.select(range(half, len(train))).to_parquet(shards / "train-00001-of-00002.parquet")
    test.to_parquet(shards / "validation-00000-of-00001.parquet")
    train.to_parquet(hub / "data" / "train-00000-of-00001-abc.parquet")
    test.to_parquet(hub / "data" / "test-00000-of-00001-abc.parquet")
    DatasetDict(train=train, test=test).save_to_disk(saved)
    return [plain, shards, hub, saved]


def test_load_image_dataset__every_table_form_gives_the_same(tmp_path: Path) -> None:
    feature = ClassLabel(names=["cat", "ant", "bee"])
    train, test = table([0, 1, 2, 2, 1, 0], feature), table([2, 0], feature)
    found = [load(path) for path in parquet_forms(tmp_path, train, test)]
    for each in found:
        assert each.class_names == ("cat", "ant", "bee")
        assert each.train.labels.tolist() == [0, 1, 2, 2, 1, 0]
        assert each.test.labels.tolist() == [2, 0]
        assert each.split_sha256 == found[0].split_sha256
        assert np.array_equal(np.asarray(each.train.image(4)), np.asarray(noise(4)))


def test_load_image_dataset__one_table_is_divided(tmp_path: Path) -> None:
    rows = table(["a"] * 10 + ["b"] * 5)
    rows.to_parquet(tmp_path / "all.parquet")
    rows.save_to_disk(tmp_path / "saved")
    (tmp_path / "folder").mkdir()
    rows.to_parquet(tmp_path / "folder" / "0000.parquet")
    found = [load(tmp_path / name) for name in ("all.parquet", "saved", "folder")]
    for each in found:
        assert Counter(each.test.labels.tolist()) == {0: 2, 1: 1}
        assert sorted(sources(each.train) + sources(each.test)) == sorted(f"train row {n}" for n in range(15))
        assert each.split_sha256 == found[0].split_sha256


def test_load_image_dataset__path_wins_over_source(tmp_path: Path) -> None:
    spec = DatasetSpec(name="toy", path=write_split(tmp_path, ["a"]), source="nobody/nothing")
    assert load_image_dataset(spec).class_names == ("a",)


@pytest.mark.parametrize(
    ("labels", "feature", "names", "ids"),
    [
        (["b", "a", "b"], None, ("a", "b"), [1, 0, 1]),
        ([10, 2, 10], None, ("2", "10"), [1, 0, 1]),
        ([3, 1, 2], Value("uint8"), ("1", "2", "3"), [2, 0, 1]),
        ([1, 0, 1], ClassLabel(names=["no", "010"]), ("no", "010"), [1, 0, 1]),
    ],
)
def test_load_image_dataset__reads_labels_of_every_kind(
    labels: list[Any], feature: Any, names: tuple[str, ...], ids: list[int], tmp_path: Path
) -> None:
    table(labels, feature).to_parquet(tmp_path / "train.parquet")
    table(labels, feature).to_parquet(tmp_path / "test.parquet")
    found = load(tmp_path)
    assert found.class_names == names
    assert found.train.labels.dtype == np.int64
    assert found.train.labels.tolist() == found.test.labels.tolist() == ids


def test_load_image_dataset__says_that_integer_labels_are_renumbered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for name in ("train", "test"):
        table([1, 2, 3]).to_parquet(tmp_path / f"{name}.parquet")
    load(tmp_path)
    assert "the 3 labels from 1 to 3 are numbered from 0; names stay as given" in caplog.text


@pytest.mark.parametrize(
    ("labels", "feature", "problem"),
    [
        ([0.5, 1.5], None, "name no class"),
        ([True, False], None, "holds bool; allowed"),
        (["a", None], None, "1 of 2 rows without a value"),
        ([0, -1], ClassLabel(names=["a"]), "1 of 2 rows without a value"),
    ],
)
def test_load_image_dataset__refuses_labels_that_are_none(
    labels: list[Any], feature: Any, problem: str, tmp_path: Path
) -> None:
    table(labels, feature).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(UsageError, match=problem):
        load(tmp_path)


def test_load_image_dataset__holds_out_of_every_domain_of_a_class(tmp_path: Path) -> None:
    domains = [f"domain {number // 3}" for number in range(24)]
    table(["a"] * 24, domain=domains).to_parquet(tmp_path / "train.parquet")
    found = load(tmp_path, domain_column="domain")
    assert found.train.domains is not None
    assert found.test.domains is not None
    assert Counter(found.train.domains.tolist()) == dict.fromkeys(domains, 2)
    assert Counter(found.test.domains.tolist()) == dict.fromkeys(domains, 1)
    assert all(
        str(domain) == domains[int(found.test.source_name(index).split()[-1])]
        for index, domain in enumerate(found.test.domains)
    )
    assert load(tmp_path).train.domains is None


def test_load_image_dataset__names_the_columns_that_are_there(tmp_path: Path) -> None:
    table(["a", "b"], extra=[1, 2]).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(UsageError, match=r"no column 'img', 'fine'\. The columns are: image, label, extra"):
        load(tmp_path, image_column="img", label_column="fine")
    table(["a", "b"]).save_to_disk(tmp_path / "saved")
    with pytest.raises(UsageError, match=r"no column 'kind'\. The columns are: image, label"):
        load(tmp_path / "saved", label_column="kind")
    with pytest.raises(UsageError, match="not images"):
        load(tmp_path, image_column="extra")
    write_split(tmp_path / "folder", ["a"])
    with pytest.raises(UsageError, match="an image folder, which has none"):
        load(tmp_path / "folder", domain_column="domain")


@pytest.mark.parametrize(
    "column", [[png(0), png(1)], [{"bytes": png(n), "path": f"{n}.png"} for n in range(2)]]
)
def test_load_image_dataset__takes_image_columns_without_a_feature(column: list[Any], tmp_path: Path) -> None:
    Dataset.from_dict({"image": column, "label": ["a", "a"]}).to_parquet(tmp_path / "train.parquet")
    assert np.array_equal(np.asarray(load(tmp_path).train.image(0)).shape, (8, 8, 3))


def test_load_image_dataset__names_splits_that_are_there(tmp_path: Path) -> None:
    DatasetDict(fit=table(["a", "a"]), judge=table(["a"])).save_to_disk(tmp_path / "saved")
    with pytest.raises(UsageError, match=r"unknown dataset.train_split 'train'.*Allowed: fit, judge"):
        load(tmp_path / "saved")
    with pytest.raises(UsageError, match=r"unknown dataset.test_split 'jugde'.*'judge'"):
        load(tmp_path / "saved", train_split="fit", test_split="jugde")
    assert len(load(tmp_path / "saved", train_split="fit", test_split="judge").test) == 1
    (tmp_path / "files").mkdir()
    table(["a"]).to_parquet(tmp_path / "files" / "test.parquet")
    with pytest.raises(UsageError, match=r"unknown dataset.train_split 'train'"):
        load(tmp_path / "files")


def one_split(folder: Path, form: str, name: str) -> Path:
    """Write ten images of two classes whose only split has this name; return the path."""
    rows = table(["a", "b"] * 5)
    if form == "folder":
        return write_pictures(folder, *(f"{name}/{label}/{n}.png" for label in "ab" for n in range(5)))
    if form == "saved":
        rows.save_to_disk(folder)
    elif form == "saved splits":
        DatasetDict({name: rows}).save_to_disk(folder)
    else:
        folder.mkdir()
        rows.to_parquet(folder / f"{name}.parquet")
    return folder


@pytest.mark.parametrize("form", ["folder", "parquet", "saved", "saved splits"])
@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("validation", {}),
        ("val", {}),
        ("test", {"test_split": None}),
        ("train", {"test_split": None}),
    ],
)
def test_load_image_dataset__never_tests_on_the_training_split(
    form: str, name: str, splits: dict[str, Any], tmp_path: Path
) -> None:
    found = load(one_split(tmp_path / "set", form, name), train_split=name, **splits)
    assert (len(found.train), len(found.test)) == (8, 2)
    assert not {*sources(found.train)} & {*sources(found.test)}
    assert found.record.held_out is not None


def test_load_image_dataset__one_file_is_one_split_whatever_its_case(tmp_path: Path) -> None:
    found = load(one_split(tmp_path / "set", "parquet", "validation"), train_split="Validation")
    assert (len(found.train), len(found.test)) == (8, 2)


@pytest.mark.parametrize("form", ["folder", "parquet", "saved splits", "digits"])
def test_load_image_dataset__leaves_a_test_split_unused_if_asked(form: str, tmp_path: Path) -> None:
    rows = {"train": table(["a", "b"] * 5), "test": table(["a", "b"])}
    if form == "folder":
        write_split(tmp_path, ["a", "b"], num_train=5, num_test=1)
    elif form == "parquet":
        for name, split in rows.items():
            split.to_parquet(tmp_path / f"{name}.parquet")
    elif form == "saved splits":
        DatasetDict(rows).save_to_disk(tmp_path)
    where: dict[str, Any] = {"source": "builtin:digits"} if form == "digits" else {"path": tmp_path}
    found = load_image_dataset(DatasetSpec(name="toy", test_split=None, **where))
    assert len(found.train) + len(found.test) == (1437 if form == "digits" else 10)
    assert found.record.held_out == "0.2 of every class, as dataset.test_split is null"


def test_load_image_dataset__names_an_unreadable_parquet_file(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"no parquet")
    with pytest.raises(UsageError, match=r"cannot read the parquet file '.*train\.parquet'"):
        load(tmp_path)


@pytest.mark.slow
def test_load_image_dataset__local_data_need_no_hub(tmp_path: Path) -> None:
    write_pictures(tmp_path / "flat", *(f"{name}/{n}.png" for name in "ab" for n in range(3)))
    rows = table(["a", "a", "b", "b"])
    rows.to_parquet(tmp_path / "all.parquet")
    rows.save_to_disk(tmp_path / "saved")
    program = (
        "import socket, sys\n"
        "def refuse(*arguments): raise AssertionError('the network was asked')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from vbm_ptm.data.reading.datasets import DatasetSpec, load_image_dataset\n"
        "for path in sys.argv[1:]:\n"
        "    print(len(load_image_dataset(DatasetSpec(name='toy', path=path)).train))\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    paths = [str(tmp_path / name) for name in ("flat", "all.parquet", "saved")]
    done = subprocess.run(
        [sys.executable, "-c", program, *paths], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["4", "2", "2"], done.stderr


def test_load_image_dataset__takes_a_hub_data_set_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The cache is laid out by hand: what `datasets` leaves there after a download."""
    table(["a", "b"] * 5).to_parquet(tmp_path / "all.parquet")
    rows = datasets.load_dataset("parquet", data_files=str(tmp_path / "all.parquet"), split="train")
    made = Path(rows.cache_files[0]["filename"])
    cached = datasets.config.HF_DATASETS_CACHE / "nobody___toy" / "default" / "0.0.0" / ("0" * 40)
    cached.mkdir(parents=True)
    shutil.copy(made, cached / "toy-train.arrow")
    information = (made.parent / "dataset_info.json").read_text()
    (cached / "dataset_info.json").write_text(
        information.replace('"dataset_name": "parquet"', '"dataset_name": "toy"')
    )
    asked: list[str] = []

    def unreachable(self: HfApi, name: str, **_: Any) -> None:
        asked.append(name)
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(HfApi, "dataset_info", unreachable)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    found = load_image_dataset(DatasetSpec(name="toy", source="nobody/toy"))
    assert (found.class_names, len(found.train), len(found.test)) == (("a", "b"), 8, 2)
    assert asked == []
    with pytest.raises(UsageError, match=r"cannot load .* from the hub: no route to the hub\. Download it"):
        load_image_dataset(DatasetSpec(name="toy", source="nobody/other"))
    assert asked == ["nobody/other"]
    assert datasets.config.HF_HUB_OFFLINE is False


def test_load_image_dataset__says_at_once_that_a_hub_data_set_is_not_there() -> None:
    with pytest.raises(
        UsageError, match=r"not in the cache and HF_HUB_OFFLINE is set.*dataset\.path"
    ) as caught:
        load_image_dataset(DatasetSpec(name="c", source="nobody/nothing"))
    assert "\n" not in str(caught.value)
    assert datasets.config.HF_HUB_OFFLINE is True


def test_load_image_dataset__asks_for_a_path_where_there_is_no_source() -> None:
    with pytest.raises(UsageError, match=r"set dataset\.path.*train/<class>/"):
        load_image_dataset(DatasetSpec(name="imagenet_r"))


# What can be wrong with a path


def test_load_image_dataset__says_what_is_wrong_with_a_path(tmp_path: Path) -> None:
    write_split(tmp_path / "flowers", ["a"])
    with pytest.raises(UsageError, match=r"'.*flovers' does not exist\. Did you mean '.*flowers'\? Expected"):
        load(tmp_path / "flovers")
    with pytest.raises(UsageError, match="does not exist"):
        load(tmp_path / "not" / "there")
    with pytest.raises(
        UsageError, match=r"'.*x\.parquet' does not exist\. Give a parquet file, or a folder with"
    ):
        load(tmp_path / "x.parquet")
    (tmp_path / "flowers.zip").touch()
    with pytest.raises(UsageError, match=r"is a file\. Give an image folder"):
        load(tmp_path / "flowers.zip")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no images below .*train/<class>/"):
        load(tmp_path / "empty")


def test_load_image_dataset__reports_empty_class_folders_and_other_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_split(tmp_path, ["a", "b"])
    (tmp_path / "train" / "c").mkdir()
    (tmp_path / "train" / "a" / "notes.txt").touch()
    found = load(tmp_path)
    assert found.class_names == ("a", "b")
    assert found.record.empty_class_folders == ("train/c",)
    assert found.record.ignored_files == SomeNames(count=1, first=("train/a/notes.txt",))
    assert "train/c" in caplog.text
    assert "notes.txt" in caplog.text


def test_load_image_dataset__calls_an_empty_folder_of_a_class_what_it_is(tmp_path: Path) -> None:
    write_split(tmp_path / "split", ["a", "b"])
    shutil.rmtree(tmp_path / "split/test/b")
    for folder in ("test/b", "train/none"):
        (tmp_path / "split" / folder).mkdir()
    write_pictures(tmp_path / "domains", "photo/a/1.png", "photo/a/2.png", "photo/b/1.png", "sketch/a/1.png")
    (tmp_path / "domains/sketch/b").mkdir()
    split = load(tmp_path / "split").record.warnings
    domains = load(tmp_path / "domains", layout="domains").record.warnings
    assert "1 class folders without images, which are not classes: 'train/none'" in split
    assert "1 empty folders of classes that have images elsewhere: 'test/b'" in split
    assert "1 classes without test images: 'b'" in split
    assert "1 empty folders of classes that have images elsewhere: 'sketch/b'" in domains
    assert not any("not classes" in warning for warning in domains)


def test_load_image_dataset__works_with_one_class(tmp_path: Path) -> None:
    for path in (
        write_split(tmp_path / "split", ["only"]),
        write_pictures(tmp_path / "flat", "only/1.png", "only/2.png"),
    ):
        found = load(path)
        assert found.class_names == ("only",)
        assert set(found.train.labels) == set(found.test.labels) == {0}


# One mapping


def test_load_image_dataset__a_missing_test_class_shifts_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["a", "b", "c", "d", "e"]
    whole = load(write_split(tmp_path, names))
    shutil.rmtree(tmp_path / "test" / "d")
    found = load(tmp_path)
    assert found.class_names == whole.class_names
    assert found.record.test.classes_without_images == ("d",)
    assert "1 classes without test images: 'd'" in caplog.text
    before = dict(zip(sources(whole.test), whole.test.labels.tolist(), strict=True))
    assert all(
        before[name] == label for name, label in zip(sources(found.test), found.test.labels, strict=True)
    )


def test_load_image_dataset__names_a_test_class_that_training_does_not_know(tmp_path: Path) -> None:
    write_pictures(write_split(tmp_path, ["a", "b"]), "test/zzz/1.png")
    with pytest.raises(UsageError, match="'zzz'"):
        load(tmp_path)


def test_load_image_dataset__maps_test_labels_by_name(tmp_path: Path) -> None:
    table([0, 1], ClassLabel(names=["a", "b"])).to_parquet(tmp_path / "train.parquet")
    table([0, 1, 1], ClassLabel(names=["b", "a"])).to_parquet(tmp_path / "test.parquet")
    assert load(tmp_path).test.labels.tolist() == [1, 0, 0]


def test_load_image_dataset__checks_the_number_of_classes(tmp_path: Path) -> None:
    write_split(tmp_path, ["a", "b"])
    assert load(tmp_path, num_classes=2).record.num_classes == 2
    with pytest.raises(UsageError, match=r"num_classes=3, but 2 classes were found: 'a', 'b'"):
        load(tmp_path, num_classes=3)


# Splits


@pytest.mark.parametrize("sizes", [{"one": 1, "two": 2, "three": 3, "fifty": 50}])
def test_load_image_dataset__holds_out_per_class(sizes: dict[str, int], tmp_path: Path) -> None:
    found = load(
        write_pictures(tmp_path, *(f"{name}/{n}.png" for name, count in sizes.items() for n in range(count)))
    )
    assert found.record.train.images_per_class == {"fifty": 40, "one": 1, "three": 2, "two": 1}
    assert found.record.test.images_per_class == {"fifty": 10, "one": 0, "three": 1, "two": 1}
    assert found.record.test.classes_without_images == ("one",)
    assert "0.2 of every class" in found.record.held_out
    assert not set(sources(found.train)) & set(sources(found.test))
    assert len(found.train) + len(found.test) == 56


def test_load_image_dataset__announces_a_hold_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    load(write_pictures(tmp_path, *(f"train/a/{n}.png" for n in range(10))))
    assert "held out: 2 images, 0.2 of every class, as there is no test split" in caplog.text


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"on_unlabelled": "skip"}, "dataset.on_unlabelled=skip"),
        ({"on_bad_image": "skip"}, "dataset.on_bad_image=skip"),
        ({"domain_column": "domain", "domains": ["b"]}, "dataset.domains"),
        ({"domain_column": "domain", "domains": ["only tested"], "on_unlabelled": "skip"}, "dataset.domains"),
    ],
)
def test_load_image_dataset__refuses_a_split_that_is_left_without_images(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    feature = ClassLabel(names=["a"])
    table([0] * 4, feature, domain=["a", "a", "b", "b"]).to_parquet(tmp_path / "train.parquet")
    test = table([0 if "domains" in fields or "on_bad_image" in fields else -1] * 2, feature)
    if "on_bad_image" in fields:
        bad = [{"bytes": png()[:50], "path": None}] * 2
        test = test.remove_columns("image").add_column("image", bad).cast_column("image", datasets.Image())
    test.add_column("domain", ["a", "only tested"]).to_parquet(tmp_path / "test.parquet")
    split = "training" if fields.get("domains") == ["only tested"] else "test"
    with pytest.raises(UsageError, match=f"the {split} split has no image left.*{reason}") as caught:
        load(tmp_path, **fields)
    assert ("test_split=null" in str(caught.value)) == (split == "test")


@pytest.mark.parametrize("kind", ["folder", "table", "list"])
def test_load_image_dataset__knows_the_classes_of_the_chosen_domains_alone(kind: str, tmp_path: Path) -> None:
    images = [(domain, name, n) for domain in "xy" for name in "abc" for n in range(2)]
    images = [image for image in images if image[:2] != ("x", "b")]
    fields: dict[str, Any] = {"path": tmp_path}
    if kind == "folder":
        write_pictures(tmp_path, *(f"{domain}/{name}/{n}.png" for domain, name, n in images))
        fields["layout"] = "domains"
    elif kind == "table":
        rows = table([name for _, name, _ in images], domain=[domain for domain, *_ in images])
        rows.to_parquet(tmp_path / "train.parquet")
        fields["domain_column"] = "domain"
    else:  # domains that only the list names
        write_pictures(tmp_path, *(f"{name}/{domain}{n}.png" for domain, name, n in images))
        lines = [f"{name}/{domain}{n}.png,{('train', 'test')[n]},{domain}" for domain, name, n in images]
        (tmp_path / "split.csv").write_text("\n".join(["path,split,domain", *lines]))
        fields["split_file"] = tmp_path / "split.csv"
    for domain, names in (("x", ("a", "c")), ("y", ("a", "b", "c"))):
        found = load(domains=[domain], **fields)
        assert found.class_names == names
        assert found.record.train.images_per_class == dict.fromkeys(names, 1)
        assert found.record.test.images_per_class == dict.fromkeys(names, 1)


def test_load_image_dataset__warns_of_domains_that_are_spelled_differently_in_testing(tmp_path: Path) -> None:
    table(["a", "a"], domain=["Photo", "Photo"]).to_parquet(tmp_path / "train.parquet")
    table(["a", "a"], domain=["photo", "photo"]).to_parquet(tmp_path / "test.parquet")
    warnings = load(tmp_path, domain_column="domain").record.warnings
    assert "domains whose names differ only in case or white space: 'Photo' and 'photo'" in warnings


def test_load_image_dataset__refuses_a_data_set_without_an_image_to_spare(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no class has an image to spare"):
        load(write_pictures(tmp_path, "a/1.png", "b/1.png"))


def test_load_image_dataset__split_depends_on_names_alone(tmp_path: Path) -> None:
    files = [f"{name}/{number}.png" for name in ("a", "cafz", "caf\u00e9") for number in range(10)]
    first = load(write_pictures(tmp_path / "one", *files))
    second = load(write_pictures(tmp_path / "two" / "elsewhere", *reversed(files)))
    assert first.split_sha256 == second.split_sha256
    assert sources(first.test) == sources(second.test)
    decomposed = load(
        write_pictures(tmp_path / "three", *(file.replace("\u00e9", "e\u0301") for file in files))
    )
    assert decomposed.split_sha256 == first.split_sha256
    assert load(tmp_path / "one", test_fraction=0.3).split_sha256 != first.split_sha256
    write_pictures(tmp_path / "one", "a/10.png")
    assert load(tmp_path / "one").split_sha256 != first.split_sha256


def test_load_image_dataset__validation_leaves_the_test_split_alone(tmp_path: Path) -> None:
    write_split(tmp_path, ["a", "b"], num_train=10)
    whole, tuning = load(tmp_path), load(tmp_path, validation_fraction=0.3)
    assert (len(tuning.train), len(tuning.test)) == (14, 6)
    assert sorted(sources(tuning.train) + sources(tuning.test)) == sorted(sources(whole.train))
    assert tuning.test.name == "test"
    assert "test split is not used" in tuning.record.held_out
    assert tuning.split_sha256 != whole.split_sha256


def test_load_image_dataset__validation_of_a_flat_folder_never_sees_a_test_image(tmp_path: Path) -> None:
    write_pictures(tmp_path, *(f"{name}/{number}.png" for name in "ab" for number in range(20)))
    (tmp_path / "a" / "3.png").write_bytes(b"")
    for number in range(5):
        (tmp_path / "b" / f"{number}.png").write_text("no image")
    whole = load(tmp_path, on_bad_image="skip")
    tuning = load(tmp_path, on_bad_image="skip", validation_fraction=0.25)
    assert sorted(sources(tuning.train) + sources(tuning.test)) == sorted(sources(whole.train))
    assert not set(sources(tuning.test)) & set(sources(whole.test))
    assert "held out for testing are not used" in tuning.record.held_out


def test_load_image_dataset__few_training_images_are_the_same_ones_everywhere(tmp_path: Path) -> None:
    write_split(tmp_path, ["a", "b"], num_train=10)
    whole, few, fewer = load(tmp_path), *(load(tmp_path, train_images_per_class=count) for count in (4, 2))
    assert few.train.labels.tolist() == [0] * 4 + [1] * 4
    assert set(sources(fewer.train)) < set(sources(few.train)) < set(sources(whole.train))
    assert sources(few.test) == sources(whole.test)
    assert len({found.split_sha256 for found in (whole, few, fewer)}) == 3
    assert load(tmp_path, train_images_per_class=99).split_sha256 == whole.split_sha256
    expected = {"published": {"train": 20, "test": len(whole.test)}}
    assert load(tmp_path, train_images_per_class=4, expected=expected).record.expected is None
    write_split(tmp_path / "elsewhere", ["b", "a"], num_train=10)  # the same names, made in another order
    assert load(tmp_path / "elsewhere", train_images_per_class=4).split_sha256 == few.split_sha256


# Bad images


def spoil(root: Path) -> list[str]:
    """Make three training files bad, each in its own way; return their names."""
    (root / "train/a/0.png").write_bytes(png()[:90])
    (root / "train/a/1.png").write_bytes(b"")
    (root / "train/b/2.png").write_text("text")
    return ["train/a/0.png", "train/a/1.png", "train/b/2.png"]


def test_load_image_dataset__names_all_bad_images_before_training(tmp_path: Path) -> None:
    bad = spoil(write_split(tmp_path, ["a", "b"]))
    with pytest.raises(UsageError, match=r"3 of 20 images are bad.*on_bad_image=skip") as caught:
        load(tmp_path)
    assert len(caught.value.problems) == 4
    for name, problem in zip(bad, caught.value.problems[1:], strict=True):
        assert name in problem


def test_load_image_dataset__skips_bad_images_and_lists_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = spoil(write_split(tmp_path, ["a", "b"]))
    found = load(tmp_path, on_bad_image="skip")
    assert found.record.skipped_images == tuple(bad)
    assert all(name in caplog.text for name in bad)
    assert len(found.train) == 9
    assert not set(bad) & set(sources(found.train))
    for index in range(9):
        name = found.train.source_name(index)
        assert found.class_names[found.train.labels[index]] == name.split("/")[1]
        assert np.array_equal(np.asarray(found.train.image(index)), np.asarray(Image.open(tmp_path / name)))
    for name in bad:
        (tmp_path / name).unlink()
    assert load(tmp_path).split_sha256 == found.split_sha256


def test_load_image_dataset__refuses_to_skip_a_whole_class(tmp_path: Path) -> None:
    write_split(tmp_path, ["a", "b"], num_train=1)
    (tmp_path / "train" / "b" / "0.png").write_bytes(b"")
    with pytest.raises(UsageError, match="these classes have no training image: 'b'"):
        load(tmp_path, on_bad_image="skip")


def test_load_image_dataset__skips_bad_rows_of_a_table(tmp_path: Path) -> None:
    contents = [{"bytes": png(n) if n != 2 else b"", "path": None} for n in range(5)] + [None]
    rows = Dataset.from_dict(
        {"image": contents, "label": list("aabbaa")},
        features=Features({"image": datasets.Image(), "label": Value("string")}),
    )
    rows.to_parquet(tmp_path / "train.parquet")
    rows.select([0, 3]).to_parquet(tmp_path / "test.parquet")
    found = load(tmp_path, on_bad_image="skip")
    assert found.record.skipped_images == ("train row 2", "train row 5")
    assert found.train.labels.tolist() == [0, 0, 1, 0]
    assert sources(found.train) == [f"train row {n}" for n in (0, 1, 3, 4)]
    with pytest.raises(UsageError, match="2 of 8 images are bad"):
        load(tmp_path)


def test_load_image_dataset__large_sets_are_checked_for_empty_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("vbm_ptm.data.reading.integrity._MAX_IMAGES_FOR_FULL_CHECK", 10)
    write_split(tmp_path, ["a", "b"])
    (tmp_path / "train/b/2.png").write_text("text")
    assert load(tmp_path).record.verified == "no empty or missing files"
    assert "dataset.verify=full decodes every image" in caplog.text
    with pytest.raises(UsageError, match=r"train/b/2\.png"):
        load(tmp_path, verify="full")
    assert load(tmp_path, on_bad_image="skip").record.skipped_images == ("train/b/2.png",)
    (tmp_path / "train/a/1.png").write_bytes(b"")
    (tmp_path / "train/a/2.png").unlink()
    (tmp_path / "train/a/2.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(UsageError, match=r"2 of 20 images are bad") as caught:
        load(tmp_path)
    assert "train/a/1.png': the file is empty" in caught.value.problems[1]
    assert "train/a/2.png': there is no such file" in caught.value.problems[2]
    rows = Dataset.from_dict({"image": [png(0), b"", png(2)] * 5, "label": ["a"] * 15})
    rows.to_parquet(tmp_path / "all.parquet")
    with pytest.raises(UsageError, match=r"5 of 15 images are bad"):
        load(tmp_path / "all.parquet")


def test_load_image_dataset__verify_none_leaves_errors_to_the_row(tmp_path: Path) -> None:
    spoil(write_split(tmp_path, ["a", "b"]))
    found = load(tmp_path, verify="none")
    assert found.record.verified == "nothing"
    assert found.train.image(2).size == (8, 8)
    with pytest.raises(UsageError, match=r"train/a/0\.png"):
        found.train.image(0)


# Use


def test_image_split__rows_stay_undecoded_and_labels_need_no_image(tmp_path: Path) -> None:
    spoil(write_split(tmp_path, ["a", "b"]))
    found = load(tmp_path, verify="none")
    assert found.train.rows[0]["image"] == {"bytes": None, "path": str(tmp_path / "train/a/0.png")}
    assert found.train.labels.tolist() == [0] * 6 + [1] * 6


@pytest.mark.parametrize("kind", ["digits", "folder", "parquet", "saved"])
def test_image_datasets__pickle(kind: str, tmp_path: Path) -> None:
    if kind == "digits":
        found = load_image_dataset(DatasetSpec(name="digits", source="builtin:digits"))
    elif kind == "folder":
        found = load(write_split(tmp_path, ["a", "b"]))
    else:
        rows = table(["a", "b"] * 5)
        rows.to_parquet(tmp_path / "parquet") if kind == "parquet" else rows.save_to_disk(tmp_path / "saved")
        if kind == "parquet":
            (tmp_path / "parquet").rename(tmp_path / "all.parquet")
        found = load(tmp_path / ("all.parquet" if kind == "parquet" else "saved"))
    copy = pickle.loads(pickle.dumps(found))
    assert copy.split_sha256 == found.split_sha256
    assert np.array_equal(copy.train.labels, found.train.labels)
    assert np.array_equal(np.asarray(copy.train.image(1)), np.asarray(found.train.image(1)))
    assert copy.test.source_name(0) == found.test.source_name(0)


@pytest.mark.slow
def test_image_split__many_images_do_not_use_up_file_handles(tmp_path: Path) -> None:
    content = png()
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for number in range(1000):
            (tmp_path / "train" / name / f"{number}.png").write_bytes(content)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, limits[1]))
    try:
        found = load(tmp_path)
        kept = [found.train.image(index) for index in range(len(found.train))]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(kept) == 1600


# Configuration


@pytest.mark.parametrize(
    "wrong",
    [
        {"test_fraction": 0},
        {"validation_fraction": 1},
        {"layout": "nested"},
        {"on_bad_image": "ignore"},
        {"on_bad_image": "skip", "verify": "none"},
        {"train_split": "test"},
        {"lable_column": "label"},
        {"num_classes": 0},
    ],
)
def test_dataset_spec__refuses_wrong_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DatasetSpec(name="toy", **wrong)


def shipped_spec(name: str, **fields: Any) -> DatasetSpec:
    tree = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    if "base" in tree:
        return shipped_spec(tree["base"], **fields)
    section = tree["dataset"]
    return DatasetSpec(**{**section, **fields})


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs__are_valid(path: Path) -> None:
    base = yaml.safe_load(path.read_text(encoding="utf-8")).get("base", path.stem)  # the same images
    assert shipped_spec(path.stem).name == base


def test_shipped_configs__digits_are_not_mirrored() -> None:
    transforms = shipped_spec("digits").transforms
    assert transforms.horizontal_flip == 0
    assert transforms.crop_scale[0] >= 0.6
    assert transforms.strong == "affine"
    assert len(load_image_dataset(shipped_spec("digits")).class_names) == 10


def cifar100(folder: Path, *columns: str) -> Path:
    """Write a miniature parquet with the schema of CIFAR-100 and 6 of its images."""
    folder.mkdir()
    whole = Dataset.from_dict(
        {
            "img": [{"bytes": png(n), "path": None} for n in range(6)],
            "fine_label": [99, 0, 50, 99, 0, 50],
            "coarse_label": [0, 1, 2, 0, 1, 2],
        },
        features=Features(
            {
                "img": datasets.Image(),
                "fine_label": ClassLabel(names=[f"fine {n}" for n in range(100)]),
                "coarse_label": ClassLabel(names=[f"coarse {n}" for n in range(20)]),
            }
        ),
    ).select_columns(list(columns))
    for split in ("train", "test"):
        whole.to_parquet(folder / f"{split}.parquet")
    return folder


def test_shipped_configs__cifar100_reads_fine_labels(tmp_path: Path) -> None:
    path = cifar100(tmp_path / "whole", "img", "fine_label", "coarse_label")
    found = load_image_dataset(shipped_spec("cifar100", path=path))
    assert len(found.class_names) == 100
    assert found.train.labels.tolist() == [99, 0, 50, 99, 0, 50]
    assert found.class_names[99] == "fine 99"
    assert len(found.record.train.classes_without_images) == 97
    coarse = cifar100(tmp_path / "coarse", "img", "coarse_label")
    with pytest.raises(UsageError, match=r"no column 'fine_label'\. The columns are: img, coarse_label"):
        load_image_dataset(shipped_spec("cifar100", path=coarse))
    with pytest.raises(UsageError, match=r"num_classes=100, but 20 classes"):
        load_image_dataset(shipped_spec("cifar100", path=path, label_column="coarse_label"))


@pytest.mark.parametrize("kind", ["one", "several"])
@pytest.mark.parametrize("harm", ["table", "state", "folder"])
def test_load_image_dataset__names_a_saved_data_set_that_is_damaged(
    kind: str, harm: str, tmp_path: Path
) -> None:
    rows = table(["a", "b", "a", "b"])
    saved = rows if kind == "one" else DatasetDict({"train": rows})
    saved.save_to_disk(tmp_path / "saved")
    part = tmp_path / "saved" / ("" if kind == "one" else "train")
    if harm == "table":
        for file in part.glob("*.arrow"):
            file.write_bytes(file.read_bytes()[:100])
    elif harm == "state":
        (part / "state.json").write_text("{")
    else:
        (part / "dataset_info.json").unlink()
    with pytest.raises(UsageError, match=rf"cannot read the saved data set '{tmp_path / 'saved'}'"):
        load(tmp_path / "saved")


def test_load_image_dataset__names_a_parquet_file_without_rows(tmp_path: Path) -> None:
    table(["a"]).select([]).to_parquet(tmp_path / "none.parquet")
    with pytest.raises(UsageError, match=r"none\.parquet"):
        load(tmp_path / "none.parquet")


@pytest.mark.parametrize("field", ["train_split", "test_split"])
def test_load_image_dataset__refuses_split_names_that_a_flat_folder_lacks(field: str, tmp_path: Path) -> None:
    write_pictures(tmp_path, "a/0.png", "a/1.png", "b/0.png", "b/1.png")
    with pytest.raises(UsageError, match=f"unknown dataset.{field} 'learning'"):
        load(tmp_path, **{field: "learning"})


def test_load_image_dataset__compares_names_in_one_unicode_form(tmp_path: Path) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    write_pictures(
        tmp_path / "one", *(f"train/{decomposed}/{n}.png" for n in range(4)), f"test/{composed}/9.png"
    )
    write_pictures(tmp_path / "one", *(f"train/bar/{n}.png" for n in range(4)), "test/bar/9.png")
    found = load(tmp_path / "one")
    assert found.class_names == ("bar", decomposed)
    assert sorted(found.test.labels.tolist()) == [0, 1]
    lines = [
        f"train/{name}/{n}.png,train,{label}"
        for name, label in ((composed, composed), ("bar", "bar"))
        for n in range(3)
    ]
    rows = [*lines, f"train/{decomposed}/3.png,test,{composed}", "train/bar/3.png,test,bar"]
    (tmp_path / "split.csv").write_text("\n".join(["path,split,label", *rows]), encoding="utf-8")
    listed = load(tmp_path / "one", split_file=tmp_path / "split.csv")
    assert (len(listed.train), len(listed.test)) == (6, 2)
    for domain, name in (("a", composed), ("b", decomposed), (composed, composed)):
        write_pictures(tmp_path / "two", *(f"{domain}/{name}/{n}.png" for n in range(4)))
    domains = load(tmp_path / "two", layout="domains", domains=[decomposed, "a"])
    assert domains.class_names == (decomposed,)
    assert domains.record.train.images_per_domain == {"a": 3, composed: 3}


def test_load_image_dataset__lists_below_a_folder_that_looks_like_a_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for root in ("set[1]", "set1"):
        write_pictures(tmp_path / root, *(f"{root[-1] if root == 'set1' else 'a'}/{n}.png" for n in range(4)))
        for split, numbers in (("train", (0, 1, 2)), ("test", (3,))):
            (tmp_path / root / f"my[{split}].txt").write_text("".join(f"a/{n}.png\n" for n in numbers))
            (tmp_path / root / f"x_{split}.txt").write_text("".join(f"a/{n}.png\n" for n in numbers))
    for train_list, test_list in (("my[train].txt", "my[test].txt"), ("*_train.txt", "*_test.txt")):
        found = load(tmp_path / "set[1]", train_list=train_list, test_list=test_list)
        assert (len(found.train), len(found.test)) == (3, 1)
        monkeypatch.chdir(tmp_path / "set[1]")
        spec = DatasetSpec(name="toy", path=tmp_path / "set[1]", train_list=train_list, test_list=test_list)
        monkeypatch.chdir(tmp_path)
        assert len(load_image_dataset(spec).train) == 3


def test_load_image_dataset__a_label_of_minus_one_in_a_list_is_none(tmp_path: Path) -> None:
    write_pictures(tmp_path, "a.png", "b.png", "c.png")
    (tmp_path / "train.txt").write_text("a.png 0\nb.png 1\n")
    (tmp_path / "test.txt").write_text("c.png -1\n")
    with pytest.raises(UsageError, match="1 images are listed without a label"):
        load(tmp_path, layout="listed", train_list="train.txt", test_list="test.txt")
