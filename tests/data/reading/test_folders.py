from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vbm_ptm.data.reading.folders import SYSTEM_FOLDERS, ImageFolder, find_images, read_image_folder
from vbm_ptm.errors import UsageError


def touch(root: Path, *files: str) -> Path:
    """Create empty files: reading a folder opens no image."""
    for file in files:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def counts(found: ImageFolder) -> dict[str, dict[str, int]]:
    splits = {"train": found.train} | ({"test": found.test} if found.test else {})
    return {name: dict(Counter(split.classes)) for name, split in splits.items()}


CLASS_NAMES = st.one_of(
    st.sampled_from(
        ["train", "test", "val", "10", "no", "011", "test tube", "a.jpg", "İ", "ß", "Straße", "cafe\u0301"]
    ),
    st.text(
        st.characters(exclude_characters="/\0", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12
    ).filter(
        lambda name: (
            not name.startswith(".") and len(name.encode()) < 200 and name.lower() not in SYSTEM_FOLDERS
        )
    ),
)
CLASSES = st.dictionaries(
    CLASS_NAMES, st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=6
)
SUFFIXES = (".jpg", ".PNG", ".jpeg", ".Tiff")


def image_files(prefix: str, classes: dict[str, tuple[int, int]]) -> list[str]:
    """Return paths of (direct, nested) images for every class."""
    return [
        f"{prefix}{name}/{'sub/deep/' if number >= direct else ''}{number}{SUFFIXES[number % 4]}"
        for name, (direct, nested) in classes.items()
        for number in range(direct + nested)
    ]


def totals(classes: dict[str, tuple[int, int]]) -> dict[str, int]:
    return {name: direct + nested for name, (direct, nested) in classes.items()}


def without_twins(classes: dict[str, tuple[int, int]]) -> bool:
    """Whether all names stay apart on file systems that fold case and compositions."""
    return len({name.casefold() for name in classes}) == len(classes)


@settings(max_examples=60, deadline=None)
@given(train=CLASSES.filter(without_twins), test=CLASSES.filter(without_twins), has_test=st.booleans())
def test_read_image_folder__counts_every_image_of_a_split_layout_once(
    train: dict[str, tuple[int, int]], test: dict[str, tuple[int, int]], has_test: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = image_files("train/", train) + (image_files("test/", test) if has_test else [])
        root = touch(Path(folder), *files, "train/.DS_Store", "README.md")
        found = read_image_folder(root)
    assert found.layout == "split"
    assert counts(found) == {"train": totals(train)} | ({"test": totals(test)} if has_test else {})
    listed = [*found.train.files, *(found.test.files if found.test else ())]
    assert sorted(listed) == sorted(files)
    assert found.ignored_files == ("README.md",)


@settings(max_examples=60, deadline=None)
@given(classes=CLASSES.filter(without_twins))
def test_read_image_folder__counts_every_image_of_a_flat_layout_once(
    classes: dict[str, tuple[int, int]],
) -> None:
    if "train" in classes:
        classes = {**classes, "train": (classes["train"][0], 0)}  # with sub-folders it reads two ways
    with tempfile.TemporaryDirectory() as folder:
        files = image_files("", classes)
        root = touch(Path(folder), *files)
        found = read_image_folder(root)
        assert read_image_folder(root, layout="flat") == found
    assert found.layout == "flat"
    assert found.test is None
    assert counts(found) == {"train": totals(classes)}
    assert sorted(found.train.files) == sorted(files)


@settings(max_examples=20, deadline=None)
@given(classes=CLASSES.filter(without_twins), data=st.data())
def test_read_image_folder__does_not_depend_on_the_order_of_files(
    classes: dict[str, tuple[int, int]], data: st.DataObject
) -> None:
    files = image_files("train/", classes)
    listings = []
    for order in (files, data.draw(st.permutations(files))):
        with tempfile.TemporaryDirectory() as folder:
            listings.append(read_image_folder(touch(Path(folder), *order)))
    assert listings[0] == listings[1]


TOY = [f"{split}/{name}/{number}.png" for split in ("train", "test") for name in "abc" for number in range(3)]


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_read_image_folder__a_validation_folder_tests_where_there_is_no_test_folder(
    name: str, tmp_path: Path
) -> None:
    found = read_image_folder(touch(tmp_path, "train/a/1.png", f"{name}/a/2.png"))
    assert found.test is not None
    assert found.test.folder == name
    found = read_image_folder(touch(tmp_path, "test/a/3.png"))
    assert found.test is not None
    assert found.test.files == ("test/a/3.png",)
    assert found.unused_folders == (name,)


def test_read_image_folder__takes_other_split_names(tmp_path: Path) -> None:
    touch(tmp_path, "fit/a/1.png", "judge/a/2.png")
    found = read_image_folder(tmp_path, train_split="fit", test_split="judge")
    assert found.train.files == ("fit/a/1.png",)
    assert found.test is not None
    assert found.test.files == ("judge/a/2.png",)
    with pytest.raises(UsageError, match=r"unknown dataset.test_split 'jugde'.*Did you mean 'judge'"):
        read_image_folder(tmp_path, train_split="fit", test_split="jugde")


@pytest.mark.parametrize(
    ("files", "layout"),
    [
        (["train/1.png", "test/1.png"], "flat"),
        (["train/1.png", "test/1.png", "cat/1.png"], "flat"),
        (["train/train/1.png"], "split"),
        (["train/test/1.png", "test/train/1.png", "train/train/1.png", "test/test/1.png"], "split"),
        (["only/1.png"], "flat"),
        (["cat/in/here/1.png", "dog/1.png"], "flat"),
        ([*TOY, "notes/about.txt"], "split"),
        ([*TOY, "loose.png"], "split"),
    ],
)
def test_read_image_folder__detects_the_layout(files: list[str], layout: str, tmp_path: Path) -> None:
    assert read_image_folder(touch(tmp_path, *files)).layout == layout


@pytest.mark.parametrize(
    "files",
    [
        [*TOY, "dog/1.png"],  # a class beside a split
        [*TOY, "train/1.png"],  # images and class folders in train/
        ["train/1.png", "train/a/1.png"],
        ["train/a/1.png", "test/1.png"],  # unlabelled test images, or a class "test"
        ["test/a/1.png", "test/b/1.png"],  # a test split alone
        ["Train/a/1.png", "Test/a/1.png"],
        ["training/a/1.png", "testing/a/1.png"],
        ["train/1.png", "test/a/1.png"],
        ["cat/1.png", "validation/a/1.png"],
    ],
)
def test_read_image_folder__refuses_what_reads_two_ways(files: list[str], tmp_path: Path) -> None:
    touch(tmp_path, *files)
    with pytest.raises(UsageError, match=r"dataset\.layout") as caught:
        read_image_folder(tmp_path)
    assert "\n" not in str(caught.value)
    flat = read_image_folder(tmp_path, layout="flat")
    assert len(flat.train.files) == len(files)


def test_read_image_folder__layout_split_settles_a_class_beside_a_split(tmp_path: Path) -> None:
    found = read_image_folder(
        touch(tmp_path, *TOY, "dog/1.png", "dog/a.txt", "train/loose.png"), layout="split"
    )
    assert counts(found) == {"train": dict.fromkeys("abc", 3), "test": dict.fromkeys("abc", 3)}
    assert found.unused_folders == ("dog",)
    assert found.ignored_files == ("train/loose.png",)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (["cat/1.png"], "has no class folders with images in 'train/'"),
        (["train/1.png"], "has no class folders with images in 'train/'"),
        (["train/a/1.png", "test/1.png"], "test images need a class"),
        (["train/a/1.png", "test/a/notes.txt"], "holds no images"),
    ],
)
def test_read_image_folder__layout_split_says_what_is_missing(
    files: list[str], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=problem):
        read_image_folder(touch(tmp_path, *files), layout="split")


@pytest.mark.parametrize(
    "files", [[], ["notes.txt"], ["cat/notes.txt"], ["cat/._1.jpg", "cat/.hidden/1.jpg"]]
)
def test_read_image_folder__shows_the_tree_it_wants_where_there_are_no_images(
    files: Iterable[str], tmp_path: Path
) -> None:
    with pytest.raises(
        UsageError, match=r"no images below .*train/<class>/.*test/<class>/.*/<class>/"
    ) as caught:
        read_image_folder(touch(tmp_path, *files))
    assert "\n" not in str(caught.value)


def test_read_image_folder__lists_what_it_leaves_out(tmp_path: Path) -> None:
    touch(tmp_path, *TOY, "train/a/notes.txt", "train/a/Thumbs.db", "train/b/._1.png", "test/c/.DS_Store")
    (tmp_path / "train" / "d").mkdir()
    (tmp_path / "test" / "e" / "nothing").mkdir(parents=True)
    touch(tmp_path, "train/.f/1.png")
    found = read_image_folder(tmp_path)
    assert found.ignored_files == ("train/.f/", "train/a/notes.txt")
    assert found.empty_class_folders == ("test/e", "train/d")
    assert counts(found) == {"train": dict.fromkeys("abc", 3), "test": dict.fromkeys("abc", 3)}


def test_read_image_folder__lists_empty_class_folders_of_a_flat_layout(tmp_path: Path) -> None:
    touch(tmp_path, "cat/1.png", "dog/notes.txt")
    assert read_image_folder(tmp_path).empty_class_folders == ("dog",)


@pytest.mark.parametrize("layout", ["auto", "flat"])
def test_read_image_folder__refuses_images_without_class_folders(
    layout: Literal["auto", "flat"], tmp_path: Path
) -> None:
    touch(tmp_path, "1.png", "2.png", "empty/notes.txt")
    with pytest.raises(UsageError, match="holds 2 images but no class folders"):
        read_image_folder(tmp_path, layout=layout)


def test_read_image_folder__follows_links_but_not_in_circles(tmp_path: Path) -> None:
    touch(tmp_path / "store", "cats/1.png", "cats/more/2.png")
    root = touch(tmp_path / "data", "dog/1.png")
    (root / "cat").symlink_to(tmp_path / "store" / "cats")
    (root / "dog" / "again").symlink_to(root / "dog")
    (root / "dog" / "up").symlink_to(root)
    (tmp_path / "store" / "cats" / "self").symlink_to(tmp_path / "store" / "cats")
    (root / "dog" / "2.png").symlink_to(root / "dog" / "1.png")
    found = read_image_folder(root)
    assert found.train.files == ("cat/1.png", "cat/more/2.png", "dog/1.png", "dog/2.png")


def test_read_image_folder__refuses_one_folder_in_both_splits(tmp_path: Path) -> None:
    touch(tmp_path, "train/a/1.png")
    (tmp_path / "test").symlink_to(tmp_path / "train")
    with pytest.raises(UsageError, match="are the same folder"):
        read_image_folder(tmp_path)


def test_read_image_folder__names_files_that_are_not_text(tmp_path: Path) -> None:
    touch(tmp_path, "cat/1.png")
    raw = bytes(tmp_path) + b"/cat/\xff.png"
    Path(raw.decode(errors="surrogateescape")).touch()
    with pytest.raises(UsageError, match=r"not UTF-8.*udcff"):
        read_image_folder(tmp_path)


def test_find_images__takes_files_as_given_and_folders_at_any_depth(tmp_path: Path) -> None:
    touch(tmp_path, "one.data", "b/2.png", "b/10.JPG", "b/deep/er/1.webp", "b/notes.txt", "b/.hidden/1.png")
    touch(tmp_path, "b/.4.png", "b/Thumbs.db", "a/1.png")
    found = find_images([tmp_path / "b", tmp_path / "one.data", tmp_path / "a"])
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        *("b/10.JPG", "b/2.png", "b/deep/er/1.webp"),
        "one.data",
        "a/1.png",
    ]


def test_find_images__names_every_path_without_images(tmp_path: Path) -> None:
    touch(tmp_path, "empty/notes.txt", "empty/.1.png", "photo.png")
    wrong = [
        tmp_path / "empty",
        tmp_path / "foto.png",
        tmp_path / "nowhere" / "1.png",
        tmp_path / "photo.png",
    ]
    with pytest.raises(UsageError) as raised:
        find_images(wrong)
    empty, mistyped, nowhere = raised.value.problems
    assert empty == f"no images below '{tmp_path / 'empty'}' (0 folders, 1 file of other kinds: .txt)."
    assert mistyped.endswith(f"Did you mean '{tmp_path / 'photo.png'}'?")
    assert nowhere == f"there is no image file or folder '{tmp_path / 'nowhere' / '1.png'}'."


@pytest.mark.slow
def test_read_image_folder__lists_many_files(tmp_path: Path) -> None:
    touch(tmp_path, *(f"{number % 200}/{number}.jpg" for number in range(20_000)))
    found = read_image_folder(tmp_path)
    assert len(set(found.train.files)) == 20_000
    assert set(Counter(found.train.classes).values()) == {100}
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("beside", [["sketch", "photo"], ["test", "sketch"], ["validation", "sketch"]])
def test_read_image_folder__advises_every_layout_that_fits(beside: list[str], tmp_path: Path) -> None:
    for domain in ("train", *beside):
        for name in ("cat", "dog"):
            file = tmp_path / domain / name / "0.png"
            file.parent.mkdir(parents=True)
            file.touch()
    with pytest.raises(UsageError) as caught:
        read_image_folder(tmp_path)
    for layout in ("split", "flat", "domains"):
        assert f"dataset.layout={layout}" in str(caught.value)
    assert set(read_image_folder(tmp_path, layout="domains").train.domains or ()) == {"train", *beside}


def test_read_image_folder__does_not_advise_what_does_not_fit(tmp_path: Path) -> None:
    for file in ("train/cat/0.png", "sketch/0.png", "photo/dog/0.png"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    with pytest.raises(UsageError) as caught:
        read_image_folder(tmp_path)
    assert "dataset.layout=domains" not in str(caught.value)
    assert "dataset.layout=flat" in str(caught.value)


@pytest.mark.parametrize("name", ["@eaDir", "__MACOSX", "#recycle", "$RECYCLE.BIN", "lost+found"])
def test_read_image_folder__names_and_leaves_out_folders_of_file_managers(name: str, tmp_path: Path) -> None:
    for file in ("cat/0.png", f"cat/{name}/0.png/thumb.jpg", f"{name}/1.png", "dog/0.png"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    found = read_image_folder(tmp_path)
    assert found.train.files == ("cat/0.png", "dog/0.png")
    assert set(found.ignored_files) == {f"cat/{name}/", f"{name}/"}
    assert find_images([tmp_path]) == [tmp_path / "cat" / "0.png", tmp_path / "dog" / "0.png"]


def test_read_image_folder__names_folders_of_one_name_in_two_forms(tmp_path: Path) -> None:
    for name in ("caf\u00e9", "cafe\u0301"):
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / "0.png").touch()
    with pytest.raises(UsageError, match=r"<U\+00E9>.*<U\+0301>|<U\+0301>.*<U\+00E9>"):
        read_image_folder(tmp_path)


def test_read_image_folder__does_not_judge_a_test_folder_that_is_not_used(tmp_path: Path) -> None:
    for file in ("train/cat/0.png", "test/0.png"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    with pytest.raises(UsageError, match="class folders"):
        read_image_folder(tmp_path)
    found = read_image_folder(tmp_path, reads_test=False)
    assert (found.test, found.test_folder) == (None, "test")


@pytest.mark.parametrize(
    ("files", "meant"),
    [
        (["images/train/a/1.png", "images/train/b/1.png", "images/test/a/1.png"], "images"),
        (["new/set/a/1.png", "new/set/b/1.png"], "new/set"),
        (["new/a/1.png", "new/a/2.png"], "new"),
    ],
)
def test_read_image_folder__points_at_the_folder_inside(files: list[str], meant: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"would be the only class") as caught:
        read_image_folder(touch(tmp_path, *files, "labels/1.txt"))
    assert f"dataset.path to '{tmp_path / meant}'," in str(caught.value)
    assert len(read_image_folder(tmp_path, layout="flat").train.files) == len(files)


def test_read_image_folder__names_what_is_there_in_place_of_images(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"3 files of other kinds: \.heic, \.txt"):
        read_image_folder(touch(tmp_path, "train/a/1.HEIC", "train/a/2.heic", "train/a/1.txt"))
