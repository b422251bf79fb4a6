"""Reading a folder of images: any folder name may be a class name, and nothing is guessed silently."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from vbm_ptm.data.images import IMAGE_SUFFIXES
from vbm_ptm.data.names import same_in_other_form
from vbm_ptm.errors import UsageError, nearest_name, some_names, unknown_name

Layout = Literal["auto", "split", "flat", "domains", "listed"]
FoundLayout = Literal["split", "flat", "domains", "listed"]

TEST_SPLIT_NAMES = ("test", "val", "valid", "validation")
_SPLIT_LIKE = frozenset({"train", "training", "testing", *TEST_SPLIT_NAMES})
_SYSTEM_FILES = frozenset({"thumbs.db", "desktop.ini"})
# Folders with thumbnails or copies that file managers, network drives and archivers leave beside or among images.
SYSTEM_FOLDERS = frozenset(
    {"@eadir", "@tmp", "#recycle", "@recycle", "@recently-snapshot", "#snapshot", "__macosx", "$recycle.bin"}
    | {"system volume information", "lost+found", "thumbnails.tmp"}
)


@dataclass(frozen=True)
class FolderSplit:
    """The images of one split.

    Attributes:
        folder: The split's folder below the root, or "" if the classes lie directly below the root.
        files: Paths relative to the root with "/", sorted by class, then by path; length N.
        classes: Class name of every file; length N. "" if only lists can tell.
        domains: Domain of every file, if folders name domains; length N.
    """

    folder: str
    files: tuple[str, ...]
    classes: tuple[str, ...]
    domains: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ImageFolder:
    """What was found below one folder.

    Attributes:
        layout: "split" (``train/<class>/``, ``test/<class>/``), "flat" (``<class>/``), "domains"
            (``<domain>/<class>/``) or "listed" (folders mean nothing).
        train: The images below the training folder of a split layout, else all.
        test: The images below the test folder, if there is one.
        test_folder: Name of the folder with the test split, read or not.
        empty_class_folders: Class folders without images, which are not classes.
        ignored_files: Files that are not images, images outside every class folder, and folders of file managers.
        unused_folders: Top-level folders that belong to no split.
    """

    layout: FoundLayout
    train: FolderSplit
    test: FolderSplit | None
    test_folder: str | None
    empty_class_folders: tuple[str, ...]
    ignored_files: tuple[str, ...]
    unused_folders: tuple[str, ...]


def expected_tree(root: str | Path, layout: Layout = "auto") -> str:
    """Describe the folder trees that can be read."""
    if layout == "domains":
        return f"Expected {root}/<domain>/<class>/*.jpg."
    if layout == "listed":
        return f"Expected {root} with the images that the lists name."
    return (
        f"Expected {root}/train/<class>/*.jpg with {root}/test/<class>/*.jpg, "
        f"or {root}/<class>/*.jpg (a part is then held out for testing)."
    )


def read_image_folder(
    root: Path,
    *,
    layout: Layout = "auto",
    train_split: str = "train",
    test_split: str | None = "test",
    reads_test: bool = True,
) -> ImageFolder:
    """List the images of a folder by split and class, without opening any.

    Images in sub-folders of a class folder belong to the class; hidden files are skipped, hidden folders are reported.

    Args:
        root: The folder.
        layout: "auto" decides between split and flat by what the training folder contains, and refuses what is
            ambiguous.
        train_split: Name of the training folder.
        test_split: Name of the test folder; for "test", also val, valid and validation are looked for; None for no
            test images.
        reads_test: If false, the content of the test folder is neither listed nor checked.

    Raises:
        UsageError: There are no images, or the folder does not fit the layout, or fits several.
    """
    tree = _walk(root)
    if not tree.images:
        raise UsageError(
            f"no images below '{root}' ({_count(tree.folders, 'folder')}, {_other_kinds(tree)}). "
            f"{expected_tree(root, layout)}"
        )
    if layout == "auto":
        layout = _detect_layout(root, tree, train_split, test_split, reads_test=reads_test)
        if layout == "flat":
            _refuse_unused_split_names(root, tree, train_split, test_split)
    if layout != "split":
        _refuse_missing_folders(root, tree, layout)
        return _arrange(tree, layout, train="", test=None, unused=())
    if tree.nested[train_split] == 0:
        raise UsageError(
            f"'{root}' has no class folders with images in '{train_split}/', which dataset.layout=split "
            f"needs. There are: {', '.join(tree.top_folders) or 'no folders'}. {expected_tree(root)}"
        )
    test = _test_folder(root, tree, train_split, test_split, is_judged=reads_test)
    if test is not None and reads_test:
        if tree.nested[test] == 0:
            raise UsageError(
                f"'{root}/{test}' holds images but no class folders: test images need a class. "
                f"{expected_tree(root)}"
            )
        _refuse_shared_folders(root, tree, train_split, test)
    unused = tuple(name for name in tree.top_folders if name not in (train_split, test))
    arranged = _arrange(tree, "split", train=train_split, test=test if reads_test else None, unused=unused)
    return replace(arranged, test_folder=test)


def find_images(paths: Sequence[Path]) -> list[Path]:
    """List the images that files and folders stand for, without opening any.

    Args:
        paths: Files, taken as given whatever their suffix, and folders, of which every image at any depth is
            taken, sorted by path; hidden files are skipped.

    Raises:
        UsageError: A path is missing or a folder holds no images; one message for each.
    """
    images: list[Path] = []
    problems: list[str] = []
    for path in paths:
        if path.is_dir():
            tree = _walk(path)
            images += (path / image for image in sorted(tree.images))
            if not tree.images:
                problems.append(
                    f"no images below '{path}' ({_count(tree.folders, 'folder')}, {_other_kinds(tree)})."
                )
        elif path.exists():
            images.append(path)
        else:
            nearest = nearest_name(path.name, _names_beside(path))
            hint = f" Did you mean '{path.parent / nearest}'?" if nearest else ""
            problems.append(f"there is no image file or folder '{path}'.{hint}")
    if problems:
        raise UsageError(*problems)
    return images


def _names_beside(path: Path) -> list[str]:
    try:
        return os.listdir(path.parent)
    except OSError:
        return []


@dataclass(frozen=True)
class _Tree:
    """Everything below a root, as relative paths with "/".

    Attributes:
        direct: Top-level folder -> number of images directly inside.
        nested: Top-level folder -> number of images in its sub-folders.
    """

    images: list[str]
    other_files: list[str]
    folders: list[str]
    top_folders: list[str]
    direct: Counter[str]
    nested: Counter[str]


def _walk(root: Path) -> _Tree:
    images: list[str] = []
    other_files: list[str] = []
    folders: list[str] = []
    pending: list[tuple[str, tuple[str, ...]]] = [("", (os.path.realpath(root),))]
    while pending:
        folder, entered = pending.pop()
        try:
            entries = list(os.scandir(root / folder))
        except OSError as error:
            raise UsageError(f"cannot read the folder '{root / folder}': {error.strerror}.") from error
        for entry in entries:
            path = folder + entry.name
            if entry.name.startswith(".") or entry.name.lower() in SYSTEM_FOLDERS:
                if entry.is_dir():  # it may be intended as a class
                    other_files.append(path + "/")
                continue
            if entry.is_dir():
                if entry.is_symlink():
                    target = os.path.realpath(entry.path)
                    inside = (*entered, os.path.realpath(root / folder))
                    if any(f"{real}{os.sep}".startswith(f"{target}{os.sep}") for real in inside):
                        continue  # a link back to a folder on the current path
                    folders.append(path)
                    pending.append((path + "/", (*entered, target)))
                else:
                    folders.append(path)
                    pending.append((path + "/", entered))
            elif entry.name[entry.name.rfind(".") :].lower() in IMAGE_SUFFIXES:
                images.append(path)
            elif entry.name.lower() not in _SYSTEM_FILES:
                other_files.append(path)
    _refuse_undecodable_names(root, images + folders)
    _refuse_two_forms(root, folders)
    direct: Counter[str] = Counter()
    nested: Counter[str] = Counter()
    for path in images:
        top, _, rest = path.partition("/")
        if rest:
            (nested if "/" in rest else direct)[top] += 1
    top_folders = sorted(folder for folder in folders if "/" not in folder)
    return _Tree(images, other_files, folders, top_folders, direct, nested)


def _refuse_undecodable_names(root: Path, names: list[str]) -> None:
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        bad = sorted(ascii(name) for name in names if not _is_text(name))
        raise UsageError(
            f"file names below '{root}' that are not UTF-8: {some_names(bad)}. Rename them."
        ) from None


def _refuse_two_forms(root: Path, folders: list[str]) -> None:
    """Raise if two sibling folders have one name in two Unicode forms."""
    twice = same_in_other_form(sorted(folder for folder in folders if not folder.isascii()))
    if twice:
        raise UsageError(
            f"'{root}' has folders whose names look alike and differ only in their Unicode form: "
            f"{some_names(twice)}. Merge them, or rename one."
        )


def _is_text(name: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _detect_layout(
    root: Path, tree: _Tree, train_split: str, test_split: str | None, *, reads_test: bool
) -> Literal["split", "flat"]:
    advice = _layouts_that_fit(tree, train_split)
    if tree.nested[train_split] and tree.direct[train_split]:
        raise UsageError(
            f"'{root}' reads two ways: '{train_split}/' holds images directly, as a class would, and folders "
            f"of images, as a split would. {advice}"
        )
    if not tree.nested[train_split]:
        for name in tree.top_folders:
            is_split_like = name.lower() in _SPLIT_LIKE or name == test_split
            if is_split_like and tree.nested[name] and not tree.direct[name]:
                raise UsageError(
                    f"'{root}' reads two ways: '{name}/' holds only folders of images, as a split would, but "
                    f"'{train_split}/' does not. {advice} Or set dataset.train_split to the training folder's name."
                )
        _refuse_domains(root, tree)
        _refuse_one_too_high(root, tree)
        return "flat"
    test = _test_folder(root, tree, train_split, test_split, is_judged=False)
    strays = [
        name
        for name in tree.top_folders
        if (tree.direct[name] or tree.nested[name])
        and name not in (train_split, None if reads_test else test)
        and (tree.direct[name] or not (name == test or name.lower() in _SPLIT_LIKE))
    ]
    if strays:
        raise UsageError(
            f"'{root}' reads two ways: '{train_split}/' holds class folders, as a split would, but beside it "
            f"stand other folders with images: {some_names(strays)}. {advice}"
        )
    return "split"


def _layouts_that_fit(tree: _Tree, train_split: str) -> str:
    """Suggest every layout that fits a tree, and say what its folders mean in each."""
    names = [name for name in tree.top_folders if tree.direct[name] or tree.nested[name]]
    fitting = [f"dataset.layout=flat if {some_names(names, limit=3)} are classes"]
    if all(tree.nested[name] and not tree.direct[name] for name in names) and len(names) > 1:
        fitting.append("dataset.layout=domains if they are domains, each with folders of classes")
    if tree.nested[train_split]:
        fitting.append(f"dataset.layout=split if '{train_split}' alone holds what is trained on")
    return f"Set {', '.join(fitting[:-1])}{' or ' * (len(fitting) > 1)}{fitting[-1]}."


def _refuse_domains(root: Path, tree: _Tree) -> None:
    """Raise if every folder holds the same folders of images, as domains would."""
    inside: dict[str, set[str]] = {name: set() for name in tree.nested}
    for path in tree.images:
        top, *below = path.split("/", 2)
        if len(below) == 2:
            inside[top].add(below[0])
    shared = set.intersection(*inside.values()) if len(inside) > 1 else set()
    if len(shared) > 1 and not tree.direct:
        raise UsageError(
            f"'{root}' reads two ways: each of {some_names(sorted(inside))} holds folders of images of the same names "
            f"({some_names(sorted(shared), limit=3)}), as domains would. Set dataset.layout=domains, or "
            f"dataset.layout=flat if they are classes."
        )


def _refuse_one_too_high(root: Path, tree: _Tree) -> None:
    """Raise if all images lie in folders of a single folder, as after unpacking an archive into a new one."""
    below = os.path.commonpath([os.path.dirname(path) for path in tree.images])
    if "/" in below and any(os.path.dirname(path) == below for path in tree.images):
        below = os.path.dirname(below)  # that is a class
    if below and not tree.direct:
        top = below.partition("/")[0]
        raise UsageError(
            f"'{root}' reads two ways: all its images lie in folders of '{top}', which would be the only class. Set "
            f"dataset.path to '{root / below}', or dataset.layout=flat if '{top}' is a class."
        )


def _refuse_missing_folders(root: Path, tree: _Tree, layout: FoundLayout) -> None:
    """Raise if the folders that name classes are missing."""
    if layout == "flat" and not tree.direct and not tree.nested:
        raise UsageError(
            f"'{root}' holds {_count(tree.images, 'image')} but no class folders: images need a class. "
            f"{expected_tree(root)} Or set dataset.layout=listed, and lists that name a class for every image."
        )
    if layout == "domains" and not tree.nested:
        raise UsageError(
            f"'{root}' has no folders <domain>/<class>/ with images, which dataset.layout=domains needs. There "
            f"are: {', '.join(tree.top_folders) or 'no folders'}. {expected_tree(root, layout)}"
        )


def _refuse_unused_split_names(root: Path, tree: _Tree, train_split: str, test_split: str | None) -> None:
    """Raise if a split was named explicitly that a flat folder does not have."""
    for key, name, default in (("train", train_split, "train"), ("test", test_split, "test")):
        if name not in (default, None):
            raise UsageError(f"in '{root}': {unknown_name(f'dataset.{key}_split', name, tree.top_folders)}")


def _test_folder(
    root: Path, tree: _Tree, train_split: str, test_split: str | None, *, is_judged: bool = True
) -> str | None:
    """Return the folder with the test split, or None if images have to be held out."""
    if test_split is None:
        return None
    if test_split != "test" and test_split not in tree.top_folders:
        raise UsageError(
            f"in '{root}': {unknown_name('dataset.test_split', test_split, tree.top_folders)} Null holds images out."
        )
    for name in (test_split,) if test_split != "test" else TEST_SPLIT_NAMES:
        if name in tree.top_folders and name != train_split:
            if tree.direct[name] or tree.nested[name] or not is_judged:
                return name
            raise UsageError(
                f"'{root}/{name}' holds no images. Fill it, or delete it: a part of the training images is "
                f"then held out for testing."
            )
    return None


def _refuse_shared_folders(root: Path, tree: _Tree, train: str, test: str) -> None:
    """Raise if a link makes one folder serve as both splits."""
    targets: dict[str, str] = {}
    for folder in (name for name in tree.folders if name.count("/") == 1 and name.startswith(f"{train}/")):
        targets[os.path.realpath(root / folder)] = folder
    for folder in (name for name in tree.folders if name.count("/") == 1 and name.startswith(f"{test}/")):
        other = targets.get(os.path.realpath(root / folder))
        if other:
            raise UsageError(f"'{root}/{other}' and '{root}/{folder}' are the same folder: no test set.")


def _arrange(
    tree: _Tree, layout: FoundLayout, *, train: str, test: str | None, unused: tuple[str, ...]
) -> ImageFolder:
    """Sort the images of a tree into splits and classes."""
    class_depth = {"listed": -1, "flat": 0, "domains": 1, "split": 1}[layout]
    found: dict[str, list[tuple[str, str, str]]] = {train: [], test or train: []}
    filled: set[str] = set()
    not_read = {*unused} | (
        {name for name in tree.top_folders if name not in found} if layout == "split" else set()
    )
    ignored = [path for path in tree.other_files if path.partition("/")[0] not in not_read]
    for path in tree.images:
        parts = path.split("/", class_depth + 1) if class_depth >= 0 else [path]
        split = parts[0] if layout == "split" else ""
        if split not in found:
            continue
        if len(parts) < class_depth + 2:
            ignored.append(path)
        else:
            name = parts[class_depth] if class_depth >= 0 else ""
            found[split].append((name, path, parts[0]))
            filled.add("/".join(parts[:-1]))
    empty = [
        folder
        for folder in tree.folders
        if folder.count("/") == class_depth
        and folder not in filled
        and (layout != "split" or folder.partition("/")[0] in found)
    ]

    def split_of(folder: str) -> FolderSplit:
        files = sorted(found[folder])
        domains = tuple(domain for *_, domain in files) if layout == "domains" else None
        return FolderSplit(
            folder, tuple(path for _, path, _ in files), tuple(name for name, *_ in files), domains
        )

    return ImageFolder(
        layout=layout,
        train=split_of(train),
        test=None if test is None else split_of(test),
        test_folder=test,
        empty_class_folders=tuple(sorted(empty)),
        ignored_files=tuple(sorted(ignored)),
        unused_folders=unused,
    )


def _count(things: list[str], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def _other_kinds(tree: _Tree) -> str:
    """Count the files that are not images, and name their commonest suffixes."""
    suffixes = Counter(os.path.splitext(path)[1].lower() or "without a suffix" for path in tree.other_files)
    named = ", ".join(suffix for suffix, _ in suffixes.most_common(3))
    return f"{_count(tree.other_files, 'file')} of other kinds" + f": {named}" * bool(named)
