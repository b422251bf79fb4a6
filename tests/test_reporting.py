"""A report's page: its numbers are those of the results, it loads nothing, and it stays small and quick."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import miniatures
import numpy as np
import pytest
import yaml
from PIL import Image

from vbm_ptm.cli import main
from vbm_ptm.cli.reporting import page_at
from vbm_ptm.errors import UsageError
from vbm_ptm.experiment import run
from vbm_ptm.report.page_training import readings
from vbm_ptm.report.whole_page import report_page
from vbm_ptm.reporting import find, find_runs, read_run, write_report
from vbm_ptm.runs.stored_learner import predict

STORED = Path(__file__).parent / "storage" / "result.json"


class Shown(HTMLParser):
    """What a page shows: cells with the number's place in a result, all text, and every address."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.cells: list[tuple[str, str]] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()
        self.alternatives: list[str] = []
        self._source: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.add(tag)
        self._source = values.get("data-source")
        self.addresses += [str(values[name]) for name in ("src", "href", "xlink:href") if name in values]
        if tag == "svg":
            self.alternatives.append(str(values.get("aria-label")))

    def handle_data(self, data: str) -> None:
        if self._source is not None:
            self.cells.append((self._source, data))
            self._source = None


def stored_run(folder: Path, *, seed: int = 1993, loss: float = 1.5, **changes: Any) -> dict[str, Any]:
    """Write a run directory with the result of a real run of five tasks."""
    folder.mkdir(parents=True)
    result: dict[str, Any] = json.loads(STORED.read_text()) | {"seed": seed} | changes
    result["config"]["seed"] = seed
    (folder / "config.yaml").write_text(yaml.safe_dump(result["config"]))
    (folder / "result.json").write_text(json.dumps(result))
    step = {"event": "step", "task": 0, "epoch": 0, "step": 0, "learning_rates": {"heads": 0.01}}
    (folder / "log.jsonl").write_text(json.dumps(step | {"loss": loss}) + '\n{"event": "st')
    return result


def at(value: Any, path: str) -> Any:
    for name in path.split("/"):
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[dict[str, Any]]]:
    """The files of a report on two finished runs and one that was stopped, and the results of all three."""
    folder = tmp_path_factory.mktemp("report")
    study = folder / "study"
    results = [stored_run(study / "l2p-v4" / f"seed_{seed}-order_1993", seed=seed) for seed in (1, 2)]
    results.append(stored_run(study / "stopped", status="interrupted"))
    return write_report([study], output=folder / "report.html", pdf=True), results


Written = tuple[list[Path], list[dict[str, Any]]]


def test_report__shows_the_numbers_of_the_results(written: Written) -> None:
    (page, *figures), results = written
    text = page.read_text()
    shown = Shown(text)
    assert len(shown.cells) > 3 * 5 + 2 * 5
    for source, told in shown.cells:
        position, _, path = source.partition("/")
        value = at(results[int(position)], path)
        assert told == (f"{value:.2f}" if isinstance(value, float) else str(value)), source
    assert {int(source.partition("/")[0]) for source, _ in shown.cells} == {0, 1, 2}
    assert "interrupted, 5 of 5 tasks are finished" in text
    assert "7.22 ± 0.00" in text  # equal runs: the interrupted one is in no mean
    assert {figure.suffix for figure in figures} == {".svg", ".pdf"}
    assert all(figure.is_file() and figure.parent == page.parent / "figures" for figure in figures)


def test_report__is_one_file_that_loads_nothing(written: Written) -> None:
    text = written[0][0].read_text()
    shown = Shown(text)
    assert "script" not in shown.tags
    assert all(address.startswith(("#", "data:")) for address in shown.addresses)
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/)", text)
    assert len(shown.alternatives) == text.count("<figure>") > 5
    assert all(len(alternative) > 20 for alternative in shown.alternatives)
    assert text.count("<figure>") == text.count("<summary>Numbers</summary>")
    drawings = " ".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert not re.search(r"#[0-9a-f]{6}\b", drawings)  # colours follow the theme
    focusable = re.findall(r'<div[^>]* tabindex="0"[^>]*>', text)
    names = [re.search(r' role="(?:region|group)" aria-label="[^"]', each) for each in focusable]
    assert len(names) > 10
    assert all(names)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_read_run__tells_what_is_not_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored_run(tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    found = read_run(tmp_path / "run", "a")
    assert (found.measured, found.result, found.state) == (None, None, "no result yet, 0 tasks are finished")
    assert found.log.num_torn == 1
    assert main(["report", str(tmp_path / "run")]) == 0
    page = tmp_path / "run" / "report.html"
    assert f"report: {page}" in capsys.readouterr().out
    assert "The run is not finished yet." in page.read_text()
    assert {figure.suffix for figure in (page.parent / "figures").iterdir()} == {".svg"}
    assert main(["report", str(tmp_path / "run"), "--pdf"]) == 0
    drawings, documents = (sorted((page.parent / "figures").glob(f"*.{kind}")) for kind in ("svg", "pdf"))
    assert [each.stem for each in drawings] == [each.stem for each in documents]
    assert all(each.read_bytes().startswith(b"%PDF") for each in documents)
    assert main(["report", str(tmp_path / "run")]) == 0
    assert not any(document.exists() for document in documents)


def test_report__losses_of_unfinished_runs_are_in_no_mean_of_finished_ones(tmp_path: Path) -> None:
    for seed, status, loss in ((1, "finished", 1.5), (2, "interrupted", 3.5)):
        stored_run(tmp_path / f"mixed/seed_{seed}", seed=seed, status=status, loss=loss)
        stored_run(tmp_path / f"open/seed_{seed}", seed=seed, status="interrupted", loss=loss)
    runs = [read_run(folder, label) for folder, label in find_runs([tmp_path])]
    (table,) = (each for each in readings(runs).figures[0].tables if each.caption.startswith("loss,"))
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["mixed", "1.5000"],
        ["open", "2.5000 ± 1.4142"],
    ]


@pytest.mark.parametrize("name", ["notes.txt", "figures"])
def test_report__says_at_once_where_nothing_can_be_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    (tmp_path / name).write_text("mine")
    monkeypatch.setattr("vbm_ptm.reporting.read_run", lambda *_: pytest.fail("runs were read"))
    output = tmp_path / ("page.html" if name == "figures" else name)
    assert main(["report", str(tmp_path / "run"), "--output", str(output)]) == 2
    assert f"cannot be written: {tmp_path / name} is a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "page"),
    [("more", "more/report.html"), ("more/own.html", "more/own.html"), ("a.b", "a.b/report.html")],
)
def test_page_at__is_a_page_or_in_a_folder(given: str, page: str) -> None:
    assert page_at(Path(given)) == Path(page)


def test_find_runs__are_lines_of_seeds_or_single_runs(tmp_path: Path) -> None:
    def found(*places: str) -> dict[str, str]:
        """Return lines by run, both below the folder of all."""
        runs = find_runs([tmp_path / place for place in places])
        lines = {folder.relative_to(tmp_path).as_posix(): label for folder, label in runs}
        assert len(lines) == len(runs)
        return lines

    for name in (
        "study/one/seed_1-order_2",
        "study/one/seed_2-order_2",
        "study/two",
        "other/one/seed_1-order_2",
    ):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    one, again = "runs/study/one/seed_1-order_2", "runs/study/one/seed_2-order_2"
    two, alien = "runs/study/two", "runs/other/one/seed_1-order_2"
    assert found("runs/study") == {one: "one", again: "one", two: "two"}
    assert found("runs") == {alien: "other/one", one: "study/one", again: "study/one", two: "study/two"}
    assert found(two) == {two: "two"}
    assert found("runs/study/one") == found(again, one) == {one: "one", again: "one"}
    assert found(two, "runs/study", two, "runs/study/../study/two") == {two: "two", one: "one", again: "one"}
    assert found("runs/study", "runs/other") == found("runs")
    with pytest.raises(UsageError, match="nothing"):
        find_runs([tmp_path / "runs", tmp_path / "nothing"])


def test_find__shows_the_test_images_that_are_classified_wrong(
    toy_tree: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    images = miniatures.write_toy_folder(tmp_path / "images", [f"class_{index:02d}" for index in range(6)])
    for number in range(2):  # seen to be wrong once class 5 is known, and from the beginning
        shutil.copyfile(images / f"test/class_05/{number}.png", images / f"test/class_00/{number}.png")
        shutil.copyfile(images / f"test/class_01/{number}.png", images / f"test/class_02/{number}.png")
    tree = toy_tree("nearest_mean") | {"checkpoint": {"keep": "all"}}
    tree["dataset"]["path"] = str(images)
    tree["scenario"]["class_order"] = "natural"
    run(tree, output=tmp_path / "run")
    files = sorted((images / "test").rglob("*.png"))
    guesses = [
        [image.class_names[0] for image in predict(tmp_path / "run", files, top_k=1, task=task)]
        for task in range(3)
    ]
    truth = [file.parent.name for file in files]
    wrong = [row for row, guess in enumerate(guesses[-1]) if guess != truth[row]]
    known = {row: sum(each[row] == truth[row] for each in guesses[:-1]) for row in wrong}
    assert sorted(known.values()) == [0, 0, 2, 2]

    found = find([read_run(tmp_path / "run", "one")])
    assert found.notes == ()
    said = {row: f"{truth[row]}, classified as {guesses[-1][row]}: " for row in wrong}
    assert Counter(picture.caption for picture in found.forgotten) == Counter(
        f"{said[row]}right after {count} earlier evaluations" for row, count in known.items() if count
    )
    assert Counter(picture.caption for picture in found.hardest) == Counter(
        f"{said[row]}wrong in 1 of 1 runs" for row, count in known.items() if not count
    )
    shown = [picture.source.partition("base64,")[2] for picture in (*found.hardest, *found.forgotten)]
    pixels = [np.asarray(Image.open(io.BytesIO(base64.b64decode(text)))).tobytes() for text in shown]
    assert sorted(pixels) == sorted(np.asarray(Image.open(files[row])).tobytes() for row in wrong)

    files[0].unlink()
    (note,) = find([read_run(tmp_path / "run", "one")]).notes
    assert "Images are not shown: the images of 'toy' are not those that" in note


@pytest.mark.slow
def test_report__of_a_dozen_runs_of_twenty_tasks_is_small(
    toy_tree: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """A page of thirty such runs, 5 MB at most, has the same share for each."""
    images = miniatures.write_toy_folder(
        tmp_path / "images", [f"class_{index:02d}" for index in range(40)], num_train=2, num_test=1
    )
    tree = toy_tree("l2p")
    tree["dataset"]["path"] = str(images)
    tree["scenario"]["num_tasks"] = 20
    tree["trainer"] |= {"evaluate_every_epoch": True, "feature_drift": True}
    study = tmp_path / "study"
    run(tree, output=study / "line_0" / "seed_0")
    for number in range(1, 12):
        copy = study / f"line_{number // 3}" / f"seed_{number}"
        ignored = shutil.ignore_patterns("checkpoints", ".lock")
        shutil.copytree(study / "line_0" / "seed_0", copy, ignore=ignored)
    runs = [read_run(folder, label) for folder, label in find_runs([study])]
    page = report_page(runs, title="study", findings=find(runs)).html()
    assert len(page.encode()) < 5_000_000 * 12 / 30
    assert len(re.findall("<img ", page)) > 0
