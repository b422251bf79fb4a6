"""Lists of files as they come from users and from other projects."""

from __future__ import annotations

from pathlib import Path

import pytest

from vbm_ptm.data.reading.list_files import ListEntry, SplitLists, read_lists, write_split_file
from vbm_ptm.errors import UsageError


def read(
    root: Path, *, train: str | None = None, test: str | None = None, split: str | None = None
) -> SplitLists:
    return read_lists(
        root,
        split_file=root / split if split else None,
        train_list=[train] if train else [],
        test_list=[test] if test else [],
    )


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.txt", "x/1.jpg\nx/2.jpg\n", [("x/1.jpg", None), ("x/2.jpg", None)]),
        ("a.txt", "x/1.jpg 0\r\n\r\ny/a b.jpg\t17\r\n", [("x/1.jpg", "0"), ("y/a b.jpg", "17")]),
        ("a.txt", "x/1.jpg cat\n", [("x/1.jpg", "cat")]),
        ("a.txt", "x/photo 1.JPG\n", [("x/photo 1.JPG", None)]),
        ("a.lst", "\ufeffx/1.tga\n", [("x/1.tga", None)]),
        (
            "a.yaml",
            "data:\n- d/x/1.jpg\n- d/y/2.jpg\ntargets:\n- 7\n- 010\n",
            [("d/x/1.jpg", "7"), ("d/y/2.jpg", "010")],
        ),
        ("a.yml", "- no/1.jpg\n- 12:30\n", [("no/1.jpg", None), ("12:30", None)]),
        ("a.csv", 'Path, label\n"x/a, b.jpg",cat\n', [("x/a, b.jpg", "cat")]),
    ],
)
def test_read_lists__reads_text_yaml_and_csv(
    name: str, text: str, expected: list[tuple[str, str | None]], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(text.encode())
    lists = read(tmp_path, test=name)
    assert lists.entries == [ListEntry(path, "test", label, None) for path, label in expected]
    (record,) = lists.record
    assert (record.file, record.split, record.images) == (
        str(tmp_path / name),
        "test",
        len(expected),
    )


def test_read_lists__a_split_file_names_split_label_and_domain(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text("label,path,split,domain\ncat,1.jpg,train,real\ndog,2.jpg,TEST,sketch\n")
    lists = read(tmp_path, split="s.csv")
    assert lists.entries == [("1.jpg", "train", "cat", "real"), ("2.jpg", "test", "dog", "sketch")]
    assert lists.record[0].split == "both"


def test_read_lists__takes_patterns_in_order_and_hashes_every_file(tmp_path: Path) -> None:
    for domain in ("real", "clipart"):
        (tmp_path / f"{domain}_train.txt").write_text(f"{domain}/x/1.jpg 0\n")
    lists = read(tmp_path, train="*_train.txt")
    assert [entry.path for entry in lists.entries] == ["clipart/x/1.jpg", "real/x/1.jpg"]
    assert len({record.sha256 for record in lists.record}) == 2


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("s.csv", b"file,split\n", "no column 'path'"),
        ("s.csv", b"path\n1.jpg\n", "no column 'split'"),
        ("s.csv", b"path,split\n1.jpg,val\n", r"row 2: the split is 'val'; allowed: train, test"),
        ("s.csv", b"path,split\n1.jpg\n", "row 2: 1 values for 2 columns"),
        ("s.csv", b"path,split\n", "names no image"),
        ("s.csv", b'path,split\n"1.jpg,train\n', "is not a CSV file"),
        ("s.csv", b"", "no column 'path', 'split'"),
        ("a.csv", b"path,split\n1.jpg,train\n", r"give it as dataset\.split_file"),
        ("a.txt", b"\n", "names no image"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.yaml", b"data: [a.jpg]\ntargets: [1, 2]\n", "1 paths in 'data', but 2 'targets'"),
        ("a.yaml", b"images: [a.jpg]\n", "must hold a list 'data'"),
        ("a.yaml", b"data: [a.jpg\n", "not valid YAML"),
        ("a.yaml", b"data: [[a.jpg]]\n", "must hold a list 'data'"),
    ],
)
def test_read_lists__says_what_is_wrong(name: str, content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=problem) as caught:
        read(tmp_path, split=name) if name.startswith("s") else read(tmp_path, train=name)
    assert name in str(caught.value)


def test_read_lists__names_every_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("1.jpg\n")
    with pytest.raises(UsageError, match=r"no file 'train_\.txt'.*Did you mean '.*train\.txt'") as caught:
        read(tmp_path, train="train_.txt", test="*_test.txt")
    assert len(caught.value.problems) == 2
    assert caught.value.problems[1].startswith("dataset.test_list: no file '*_test.txt'")


def test_write_split_file__is_read_back_and_replaces_nothing(tmp_path: Path) -> None:
    rows = [("b, c.jpg", "test", "cat", None), ('a"b.jpg', "train", "dog, small", None)]
    write_split_file(tmp_path / "s.csv", rows)
    assert read(tmp_path, split="s.csv").entries == [
        ('a"b.jpg', "train", "dog, small", None),
        ("b, c.jpg", "test", "cat", None),
    ]
    with pytest.raises(UsageError, match="exists already"):
        write_split_file(tmp_path / "s.csv", rows)
    write_split_file(tmp_path / "d.csv", [("a.jpg", "train", "dog", "real")])
    assert read(tmp_path, split="d.csv").entries[0].domain == "real"


def test_write_split_file__makes_its_folder_unless_a_file_is_in_the_way(tmp_path: Path) -> None:
    rows = [("a.jpg", "train", "dog", None)]
    write_split_file(tmp_path / "new/folder/s.csv", rows)
    assert read(tmp_path, split="new/folder/s.csv").entries == [("a.jpg", "train", "dog", None)]
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file/deep/s\.csv lies below .*file, which is a file"):
        write_split_file(tmp_path / "file/deep/s.csv", rows)


def test_read_lists__names_a_pointer_to_a_large_file(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(UsageError, match="git lfs pull"):
        read_lists(tmp_path, split_file=None, train_list=["train.txt"], test_list=[])
