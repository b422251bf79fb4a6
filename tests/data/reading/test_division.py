"""Data sets whose splits are those of lists."""

from __future__ import annotations

import csv
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from datasets import Image as ImageFeature
from images import png, write_pictures
from miniatures import imagenet_r_classes, imagenet_r_miniature
from PIL import Image

from vbm_ptm.data.image_split import ImageDatasets
from vbm_ptm.data.reading.datasets import DatasetSpec, load_image_dataset, write_split
from vbm_ptm.data.record import SomeNames
from vbm_ptm.errors import UsageError

FILES = [f"{name}/{number}.png" for name in ("ant", "bee", "cow") for number in range(4)]
TRAIN = [file for file in FILES if not file.endswith("3.png")]
TEST = [file for file in FILES if file.endswith("3.png")]


def write_images(root: Path, files: Iterable[str] = FILES) -> Path:
    return write_pictures(root, *files)


def write_lists(root: Path, train: Iterable[str], test: Iterable[str]) -> None:
    (root / "train.txt").write_text("\n".join(train))
    (root / "test.txt").write_text("\n".join(test))


def load(root: Path, **fields: Any) -> ImageDatasets:
    lists = {} if "split_file" in fields else {"train_list": "train.txt", "test_list": "test.txt"}
    return load_image_dataset(DatasetSpec(name="toy", path=root, **{**lists, **fields}))


def problems_of(root: Path, **fields: Any) -> list[str]:
    with pytest.raises(UsageError) as caught:
        load(root, **fields)
    return list(caught.value.problems)


def names(split: Any) -> list[str]:
    return sorted(split.source_names.to_pylist())


def test_load_image_dataset__puts_every_image_where_lists_say(tmp_path: Path) -> None:
    write_lists(write_images(tmp_path), TRAIN, TEST)
    found = load(tmp_path)
    assert (names(found.train), names(found.test)) == (TRAIN, TEST)
    assert found.class_names == ("ant", "bee", "cow")
    for split in (found.train, found.test):
        for index in range(len(split)):
            file = split.source_name(index)
            assert file.startswith(found.class_names[split.labels[index]])
            assert np.array_equal(np.asarray(split.image(index)), np.asarray(Image.open(tmp_path / file)))
    assert found.record.held_out is None
    assert [each.images for each in found.record.lists] == [9, 3]
    assert found.record.ignored_files.count == 0  # lists beside the images are known


@pytest.mark.parametrize(
    "spell",
    [
        lambda file: f"/home/other/data/toy/{file}",
        lambda file: f"data/toy/{file}",
        lambda file: f"./{file}",
        lambda file: file.replace("/", "\\"),
        lambda file: f"D:\\data\\toy\\{file}".replace("/", "\\"),
    ],
    ids=["absolute", "prefix", "dot", "backslash", "drive"],
)
def test_load_image_dataset__the_split_is_the_same_however_lists_spell_paths(
    spell: Any, tmp_path: Path
) -> None:
    write_lists(write_images(tmp_path), TRAIN, TEST)
    plain = load(tmp_path).split_sha256
    write_lists(tmp_path, map(spell, reversed(TRAIN)), map(spell, TEST))
    assert load(tmp_path).split_sha256 == plain


def test_load_image_dataset__the_split_is_the_same_in_reversed_file_creation_order(tmp_path: Path) -> None:
    for root, files in ((tmp_path / "one", FILES), (tmp_path / "two", FILES[::-1])):
        write_images(root, files)
    held_out = [load_image_dataset(DatasetSpec(name="toy", path=tmp_path / name)) for name in ("one", "two")]
    assert held_out[0].split_sha256 == held_out[1].split_sha256
    assert names(held_out[0].test) == names(held_out[1].test)


def test_load_image_dataset__finds_accented_names_in_both_spellings(tmp_path: Path) -> None:
    write_images(tmp_path, ["caf\u00e9/1.png", "caf\u00e9/2.png"])
    write_lists(tmp_path, ["cafe\u0301/1.png"], ["cafe\u0301/2.png"])
    assert names(load(tmp_path).test) == ["caf\u00e9/2.png"]


def test_load_image_dataset__class_ids_follow_the_numbers_in_lists(tmp_path: Path) -> None:
    write_images(tmp_path)
    number = {"ant": 7, "bee": 0, "cow": 3}
    write_lists(
        tmp_path,
        [f"{file} {number[file[:3]]}" for file in TRAIN],
        [f"{file} {number[file[:3]]}" for file in TEST],
    )
    found = load(tmp_path)
    assert found.class_names == ("bee", "cow", "ant")
    for split in (found.train, found.test):
        assert [found.class_names[label] for label in split.labels] == [
            n[:3] for n in split.source_names.to_pylist()
        ]
    plain = load(tmp_path, split_file=own_split(tmp_path, found))
    assert plain.class_names == ("ant", "bee", "cow")  # a list of names keeps the order of the folders
    assert plain.split_sha256 == found.split_sha256


def own_split(root: Path, found: ImageDatasets) -> Path:
    file = root / "own.csv"
    write_split(found, file)
    return file


def test_load_image_dataset__class_folders_that_are_numbers_keep_their_order(tmp_path: Path) -> None:
    files = [f"{name}/{number}.png" for name in range(12) for number in range(2)]
    write_images(tmp_path, files)
    order = tuple(sorted(str(name) for name in range(12)))
    held_out = load_image_dataset(DatasetSpec(name="toy", path=tmp_path))
    assert held_out.class_names == order
    again = load(tmp_path, split_file=own_split(tmp_path, held_out))
    assert again.class_names == order
    assert again.split_sha256 == held_out.split_sha256


def test_load_image_dataset__names_all_that_contradicts_at_once(tmp_path: Path) -> None:
    write_images(tmp_path)
    train = [f"{file} 0" if file == "bee/1.png" else f"{file} {'abc'.index(file[0])}" for file in TRAIN]
    write_lists(
        tmp_path, [*train, "cow/9.png 2", "cow/3.png 2"], [f"{file} {'abc'.index(file[0])}" for file in TEST]
    )
    (tmp_path / "ant/0.png").write_bytes(b"")
    text = "\n".join(problems_of(tmp_path))
    assert "1 images are listed both for training and for testing: 'cow/3.png'" in text
    assert "'bee/1.png (listed as 0, other images of 'bee' as 1)'" in text
    assert "'cow/9.png': it is listed, but there is no such file" in text
    assert "'ant/0.png': the file is empty" in text
    assert "2 of 14 images are bad" in text


def test_load_image_dataset__one_number_for_two_classes_is_a_fault(tmp_path: Path) -> None:
    write_images(tmp_path)
    write_lists(tmp_path, [f"{file} {1 if file[0] == 'c' else 0}" for file in TRAIN], TEST)
    assert problems_of(tmp_path) == [
        "data set 'toy': label 0 is listed for images of several classes: 'ant', 'bee'."
    ]


def test_load_image_dataset__names_labels_that_are_not_the_class(tmp_path: Path) -> None:
    write_images(tmp_path)
    write_lists(tmp_path, [f"{file} {'cow' if file == 'ant/1.png' else file[:3]}" for file in TRAIN], TEST)
    (problem,) = problems_of(tmp_path)
    assert "1 listed labels contradict the images' classes: 'ant/1.png (listed as 'cow')'" in problem


def test_load_image_dataset__skips_missing_files_on_demand(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_lists(write_images(tmp_path), [*TRAIN, "cow/8.png"], [*TEST, "cow/9.png"])
    (tmp_path / "bee/0.png").write_bytes(b"")
    found = load(tmp_path, on_bad_image="skip")
    assert found.record.skipped_images == ("cow/8.png", "cow/9.png", "bee/0.png")
    assert (len(found.train), len(found.test)) == (8, 3)
    assert "skipped: cannot read image 'cow/8.png': it is listed, but there is no such file." in caplog.text


def test_load_image_dataset__warns_of_images_in_no_list_and_of_repeated_ones(tmp_path: Path) -> None:
    write_lists(write_images(tmp_path), [*TRAIN[1:], TRAIN[1]], TEST)
    found = load(tmp_path)
    assert found.record.unlisted_images == SomeNames(count=1, first=("ant/0.png",))
    assert found.record.warnings == (
        "1 images in no list, left out: 'ant/0.png'",
        "1 images listed more than once, used once: 'ant/1.png'",
    )
    assert (len(found.train), len(found.test)) == (8, 3)


def test_load_image_dataset__says_that_lists_are_about_another_folder(tmp_path: Path) -> None:
    write_lists(write_images(tmp_path), ["dog/1.png", "dog/2.png"], ["dog/3.png"])
    (problem,) = problems_of(tmp_path)
    assert (
        "none of the 3 listed files is there: the lists say 'dog/1.png', the data set has 'ant/0.png'"
        in problem
    )


def test_load_image_dataset__names_a_class_that_is_for_testing_alone(tmp_path: Path) -> None:
    write_lists(write_images(tmp_path), [file for file in TRAIN if file[0] != "c"], TEST)
    (problem,) = problems_of(tmp_path)
    assert "classes that the training split does not know: 'cow'" in problem


def test_load_image_dataset__a_training_list_alone_is_divided(tmp_path: Path) -> None:
    write_lists(write_images(tmp_path), TRAIN, [])
    found = load(tmp_path, test_list=None)
    assert (len(found.train), len(found.test)) == (6, 3)
    assert set(names(found.test)) < set(TRAIN)
    assert "held out" in str(found.record.held_out) or found.record.held_out.startswith("0.2 of every class")


def test_load_image_dataset__lists_win_over_the_folders_of_splits(tmp_path: Path) -> None:
    files = [f"{'test' if file in TEST else 'train'}/{file}" for file in FILES]
    write_images(tmp_path, files)
    write_lists(tmp_path, files[:-1], files[-1:])
    found = load(tmp_path)
    assert names(found.test) == ["test/cow/3.png"]
    assert len(found.train) == 11


def test_load_image_dataset__validation_leaves_listed_test_images_alone(tmp_path: Path) -> None:
    write_lists(write_images(tmp_path), TRAIN, TEST)
    found = load(tmp_path, validation_fraction=0.34)
    assert len(found.test) == 3
    assert not set(names(found.test)) & set(TEST)


# Folders without meaning


def test_load_image_dataset__takes_classes_from_lists_alone(tmp_path: Path) -> None:
    write_images(tmp_path, ["a.png", "b.png", "sub/c.png", "d.png"])
    (tmp_path / "s.csv").write_text(
        "path,split,label,domain\na.png,train,2,x\nb.png,train,10,y\nsub/c.png,test,10,x\n"
    )
    found = load(tmp_path, split_file=tmp_path / "s.csv", layout="listed")
    assert found.class_names == ("2", "10")
    assert found.test.labels.tolist() == [1]
    assert found.train.domains is not None
    assert found.train.domains.tolist() == ["x", "y"]
    assert found.record.unlisted_images.first == ("d.png",)


def test_load_image_dataset__wants_a_label_and_a_domain_for_all_or_none(tmp_path: Path) -> None:
    write_images(tmp_path, ["a.png", "b.png", "c.png"])
    (tmp_path / "s.csv").write_text(
        "path,split,label,domain\na.png,train,x,\nb.png,train,y,real\nb.png,train,x,real\n"
    )
    (tmp_path / "train.txt").write_text("a.png 0\nb.png\n")
    text = "\n".join(problems_of(tmp_path, split_file=tmp_path / "s.csv", layout="listed"))
    assert "1 images are listed with several labels: 'b.png'" in text
    assert "1 images are listed without a domain: 'a.png'" in text
    assert "without a label" in problems_of(tmp_path, layout="listed", test_list=None)[0]


def test_load_image_dataset__advises_lists_where_folders_name_no_class(tmp_path: Path) -> None:
    write_images(tmp_path, ["a.png", "b.png"])
    with pytest.raises(UsageError, match=r"no class folders.*dataset\.layout=listed"):
        load_image_dataset(DatasetSpec(name="toy", path=tmp_path))


# Domains


def write_domains(root: Path) -> Path:
    return write_images(root, [f"{domain}/{file}" for domain in ("real", "sketch") for file in FILES])


def test_load_image_dataset__reads_folders_of_domains(tmp_path: Path) -> None:
    write_domains(tmp_path)
    with pytest.raises(UsageError, match=r"reads two ways.*Set dataset\.layout=domains"):
        load_image_dataset(DatasetSpec(name="toy", path=tmp_path))
    found = load_image_dataset(DatasetSpec(name="toy", path=tmp_path, layout="domains"))
    assert found.class_names == ("ant", "bee", "cow")
    assert found.record.train.images_per_domain == {"real": 9, "sketch": 9}
    assert found.record.test.images_per_domain == {"real": 3, "sketch": 3}
    flat = load_image_dataset(DatasetSpec(name="toy", path=tmp_path, layout="flat"))
    assert flat.class_names == ("real", "sketch")


def test_load_image_dataset__leaves_other_domains_and_their_lists_out(tmp_path: Path) -> None:
    write_domains(tmp_path)
    for domain in ("real", "sketch", "clipart"):  # clipart is listed, but not there
        for split, files in (("train", TRAIN), ("test", TEST)):
            (tmp_path / f"{domain}_{split}.txt").write_text("\n".join(f"{domain}/{file}" for file in files))
    fields = {"layout": "domains", "train_list": "*_train.txt", "test_list": "*_test.txt"}
    assert "12 of 36 images are bad" in problems_of(tmp_path, **fields)[0]
    both = load(tmp_path, domains=["sketch", "real"], **fields)
    assert both.record.test.images_per_domain == {"real": 3, "sketch": 3}
    one = load(tmp_path, domains=["sketch"], **fields)
    assert one.record.train.images_per_domain == {"sketch": 9}
    assert one.record.warnings == ()
    with pytest.raises(UsageError, match=r"dataset\.domains: unknown domain 'skech'\. Did you mean 'sketch'"):
        load(tmp_path, domains=["skech"], **fields)


def test_load_image_dataset__domains_need_a_source_that_names_them(tmp_path: Path) -> None:
    write_images(tmp_path)
    with pytest.raises(UsageError, match=r"the data set has none: set dataset\.domain_column"):
        load_image_dataset(DatasetSpec(name="toy", path=tmp_path, domains=("real",)))


def test_load_image_dataset__names_domains_that_contradict(tmp_path: Path) -> None:
    write_domains(tmp_path)
    (tmp_path / "s.csv").write_text(
        "path,split,domain\nreal/ant/0.png,train,sketch\nreal/ant/1.png,test,real\n"
    )
    (problem,) = problems_of(tmp_path, layout="domains", split_file=tmp_path / "s.csv")
    assert "1 listed domains contradict the images' own: 'real/ant/0.png (listed as 'sketch')'" in problem


# A split as others get it


def table(root: Path) -> Path:
    rows = {
        "image": [{"bytes": png(number), "path": None} for number in range(30)],
        "label": ["dog", "ant", "cow"] * 10,
        "domain": ["real", "sketch"] * 15,
    }
    root.mkdir(exist_ok=True)
    Dataset.from_dict(rows).cast_column("image", ImageFeature()).to_parquet(root / "train.parquet")
    return root


@pytest.mark.parametrize("kind", ["folder", "split folder", "domains", "parquet", "digits"])
def test_write_split__gives_the_same_split_again(kind: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"name": "toy", "path": tmp_path / "images"}
    if kind == "digits":
        fields = {"name": "toy", "source": "builtin:digits"}
    elif kind == "parquet":
        table(tmp_path / "images")
        fields["domain_column"] = "domain"
    elif kind == "domains":
        write_domains(tmp_path / "images")
        fields["layout"] = "domains"
    else:
        prefix = {"folder": ("", ""), "split folder": ("train/", "test/")}[kind]
        write_images(tmp_path / "images", [prefix[file in TEST] + file for file in FILES])
    found = load_image_dataset(DatasetSpec(**fields))
    write_split(found, tmp_path / "split.csv")
    again = load_image_dataset(DatasetSpec(**fields, split_file=tmp_path / "split.csv"))
    assert again.split_sha256 == found.split_sha256
    assert again.class_names == found.class_names
    assert (names(again.train), names(again.test)) == (names(found.train), names(found.test))
    assert again.record.warnings == ()
    with (tmp_path / "split.csv").open() as file:
        assert ("domain" in next(csv.reader(file))) == (kind in ("domains", "parquet"))


def test_split_sha256__changes_with_split_class_and_name(tmp_path: Path) -> None:
    write_lists(write_images(tmp_path), TRAIN, TEST)
    hashes = {load(tmp_path).split_sha256}
    write_lists(tmp_path, TRAIN[1:], [*TEST, TRAIN[0]])
    hashes.add(load(tmp_path).split_sha256)
    write_lists(tmp_path, TRAIN[1:], TEST)
    hashes.add(load(tmp_path).split_sha256)
    shutil.move(tmp_path / "cow", tmp_path / "cat")
    write_lists(
        tmp_path,
        [file.replace("cow", "cat") for file in TRAIN],
        [file.replace("cow", "cat") for file in TEST],
    )
    hashes.add(load(tmp_path).split_sha256)
    assert len(hashes) == 4


def test_load_image_dataset__takes_the_lists_of_coda_prompt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """YAML lists data and targets, paths below another folder, numbers in an order of their own."""
    caplog.set_level(logging.WARNING)
    imagenet_r_miniature(tmp_path)
    root = tmp_path / "imagenet-r"
    classes = imagenet_r_classes()
    number = {name: (37 * index + 5) % 200 for index, name in enumerate(classes)}
    files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.jpg"))
    test = {next(file for file in files if file.startswith(name)) for name in classes}
    for split, chosen in (("train", [f for f in files if f not in test]), ("test", sorted(test))):
        lines = ["data:", *(f"- data/imagenet-r/{file}" for file in chosen)]
        lines += ["targets:", *(f"- {number[file.partition('/')[0]]}" for file in chosen)]
        (tmp_path / f"imagenet-r_{split}.yaml").write_text("\n".join(lines) + "\n")
    found = load_image_dataset(
        DatasetSpec(
            name="imagenet_r",
            path=root,
            num_classes=200,
            train_list=str(tmp_path / "imagenet-r_train.yaml"),  # type: ignore[arg-type]
            test_list=(str(tmp_path / "imagenet-r_test.yaml"),),
            verify="none",
        )
    )
    assert found.class_names == tuple(sorted(classes, key=number.__getitem__))
    assert set(names(found.test)) == test
    assert len(found.train) + len(found.test) == len(files)
    assert caplog.text == ""
