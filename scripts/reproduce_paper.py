"""The paper's table on pre-trained models: which runs it takes, a part or all of them, and our numbers beside its own.

Usage: python scripts/reproduce_paper.py --dry-run
       python scripts/reproduce_paper.py --data imagenet_r=PATH --data cifar100=PATH --weights FOLDER --shard 1/8
       python scripts/reproduce_paper.py --collect

Only the list of runs is made here; vbm_ptm.study runs them, skips what is finished and goes on with the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from vbm_ptm.cli import run_application
from vbm_ptm.cli.options import (
    DeviceName,
    DryRun,
    ImagesPerSecond,
    Overrides,
    Shard,
    SkipDamaged,
    all_overrides,
    integers,
)
from vbm_ptm.cli.printing import how_to_go_on, show_plan, stdout
from vbm_ptm.errors import UsageError, unknown_name

PRESET = "paper"
# Which images are in which split is recorded by its hash.
WEIGHTS_SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin")

Names = Annotated[str | None, typer.Option(help="Only these, separated by commas.")]
application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@application.command()
def reproduce(
    learners: Names = None,
    datasets: Names = None,
    orders: Annotated[str, typer.Option(help="Seeds of class order and training.")] = "1993,1996,1997",
    views: Annotated[
        str, typer.Option(help="Numbers of views; only SLCA is run with more than one.")
    ] = "1,4",
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=PATH of a data set, or NAME.SETTING=VALUE (imagenet_r.split_file=split.csv)."
        ),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Folder with <timm tag>.safetensors (or .npz, .pth) of each learner.")
    ] = None,
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option(help="Folder of all run directories.")] = Path("runs/paper"),
    device: DeviceName = None,
    shard: Shard = None,
    budget_hours: Annotated[
        float | None, typer.Option(min=0, help="Only what is estimated to fit, most informative runs first.")
    ] = None,
    images_per_second: ImagesPerSecond = 300.0,
    skip_damaged: SkipDamaged = False,
    dry_run: DryRun = False,
    collect: Annotated[bool, typer.Option("--collect", help="Run nothing: make the table.")] = False,
) -> None:
    """Run the table of the paper on pre-trained models, or a part of it, and set it beside the published one."""
    from vbm_ptm.launch import is_main_process
    from vbm_ptm.study import exclusively, execute, finished_runs

    kit = Kit.load(
        data=data_settings(data or ()), weights=weights, overrides=all_overrides(overrides, device=device)
    )
    listed = kit.list_runs(
        learners=chosen("row of the table", learners, kit.table.rows),
        datasets=chosen("data set", datasets, kit.table.benchmarks),
        orders=integers("--orders", orders),
        views=integers("--views", views),
        output=output,
    )
    finished = {planned.output for planned, _ in finished_runs(item.planned for item in listed)}
    part = listed if shard is None else kit.shard(listed, shard)
    estimates = kit.estimates(listed) if dry_run or budget_hours is not None else []
    if budget_hours is not None:
        costs = {item.planned.output: each for item, each in zip(listed, estimates, strict=True)}
        remaining = [item for item in part if item.planned.output not in finished]
        part = fitting(remaining, costs, hours=budget_hours, rate=images_per_second)
    if dry_run:
        kit.show(listed, part=part, estimates=estimates, rate=images_per_second, finished=finished)
        return
    failed = []
    if not collect:
        kit.check_files(item for item in part if item.planned.output not in finished)
        runs = [item.planned for item in part]
        with how_to_go_on("Repeat the command to go on."):
            study = [item.planned for item in listed]
            failed = execute(runs, output=output, study=study, skip_damaged=skip_damaged)["failed"]
    if is_main_process():
        with exclusively(output):
            kit.write(listed, output)
        for item in failed:
            sys.stderr.write(f"failed: {item['directory']}: {item['problem']}\n")
    if failed:
        raise typer.Exit(1)


@dataclass(frozen=True)
class ListedRun:
    """A run of the table: its row, what study.py runs, and the settings that are not the paper preset's."""

    row: str
    benchmark: str
    num_views: int
    order: int
    planned: Any
    changed: tuple[str, ...]


@dataclass(frozen=True)
class Kit:
    """The published table, and where data and weights lie on this machine.

    Attributes:
        table: A ``vbm_ptm.report.paper_table.PaperTable``.
        data: Name of a data set -> its settings on this machine.
        weights: Folder with a file per timm tag.
        overrides: Items ``path.to.setting=value`` for all runs.
    """

    table: Any
    data: Mapping[str, dict[str, Any]]
    weights: Path | None
    overrides: Sequence[str]

    @classmethod
    def load(cls, **attributes: Any) -> Kit:
        """Read the published table."""
        from vbm_ptm.config.tree import find_config, read_yaml
        from vbm_ptm.report.paper_table import PaperTable

        table = PaperTable.model_validate(read_yaml(find_config("published/paper_table")))
        chosen("data set", ",".join(attributes["data"]) or None, table.benchmarks)
        return cls(table=table, **attributes)

    def list_runs(
        self,
        *,
        learners: Sequence[str],
        datasets: Sequence[str],
        orders: Sequence[int],
        views: Sequence[int],
        output: Path,
    ) -> list[ListedRun]:
        """Return all runs, most informative first: rows as in the table's file, pairs of one order side by side."""
        listed = [
            self._listed_run(row, benchmark, num_views=num_views, order=order, output=output)
            for row in learners
            for benchmark in datasets
            for order in orders
            for num_views in views
            if num_views == 1 or self.table.rows[row].with_views
        ]
        if not listed:
            raise UsageError(f"no run is left: of {', '.join(learners)} none is run with {views} views.")
        return listed

    def _listed_run(self, row: str, benchmark: str, *, num_views: int, order: int, output: Path) -> ListedRun:
        from vbm_ptm.config.tree import differences, merge
        from vbm_ptm.runs.directory import FREE_ON_RESUME, LISTS, PLACES
        from vbm_ptm.study import StudyConfig, StudyRun, plan_study

        method = self.table.rows[row]

        def plan(settings: dict[str, Any], overrides: Sequence[str]) -> Any:
            name = f"{benchmark}-{row}-v{num_views}"
            entry = StudyRun(learner=method.learner, dataset=benchmark, name=name, settings=settings)
            study = StudyConfig(preset=PRESET, runs=(entry,), seeds=(order,), class_order_seeds=(order,))
            return plan_study(study, output=output, overrides=overrides)[0]

        protocol = plan(method.settings, ()).config.model_dump(mode="json")
        settings: dict[str, Any] = {"view_batch": {"num_views": num_views}}
        merge(settings, method.settings)
        merge(settings, {"dataset": self.data.get(benchmark, {})})
        planned = plan(settings, self.overrides)
        if self.weights and planned.config.backbone.checkpoint is None:
            file = self._weights_file(planned.config.backbone.name)
            merge(settings, {"backbone": {"checkpoint": str(file)}})
            planned = plan(settings, self.overrides)
        changes = differences(protocol, planned.config.model_dump(mode="json"))
        expected = (*FREE_ON_RESUME, *PLACES, *LISTS, "view_batch.num_views")
        changed = tuple(line for line in changes if not line.startswith(expected))
        return ListedRun(row, benchmark, num_views, order, planned, changed)

    def _weights_file(self, tag: str) -> Path:
        assert self.weights is not None
        files = [self.weights / f"{tag}{suffix}" for suffix in WEIGHTS_SUFFIXES]
        return next((file for file in files if file.is_file()), files[0])

    def check_files(self, items: Iterable[ListedRun]) -> None:
        """Refuse to start where data or weights are not there: hours later would be late.

        Raises:
            UsageError: One message for each missing thing.
        """
        from vbm_ptm.data.reading.datasets import split_lists_of

        problems: list[str] = []
        for config in (item.planned.config for item in items):
            dataset, checkpoint = config.dataset, config.backbone.checkpoint
            if dataset.path is None and dataset.source is None:
                problems.append(f"the images of {dataset.name} are needed: --data {dataset.name}=PATH.")
            if dataset.path is not None and not dataset.path.exists():
                problems.append(f"--data {dataset.name}: there is nothing at {dataset.path}.")
            try:
                split_lists_of(dataset)
            except UsageError as error:
                problems += error.problems
            if checkpoint is not None and not checkpoint.is_file():
                problems.append(
                    f"the weights {config.backbone.name} are needed: there is no {checkpoint.with_suffix('')} with "
                    f"one of {', '.join(WEIGHTS_SUFFIXES)}."
                )
        if problems:
            raise UsageError(*dict.fromkeys(problems))

    def estimates(self, listed: Sequence[ListedRun], *, is_assumed: bool = False) -> list[Any]:
        """Return what each run takes, by the images that are there or the published counts.

        Args:
            listed: Runs.
            is_assumed: Go by the published counts in any case.
        """
        from vbm_ptm.check.estimates import estimate_all, even_outline, read_outline

        def outline_of(spec: Any) -> Any:
            if self.has_data(spec.name) and not is_assumed:
                return read_outline(spec)
            counts = {"num_classes", "num_train", "num_test"}
            return even_outline(**self.table.benchmarks[spec.name].model_dump(include=counts))

        return estimate_all((item.planned.config for item in listed), outline_of=outline_of)

    def has_data(self, benchmark: str) -> bool:
        """Return whether images of a benchmark are at hand; those of the hub are never fetched to be counted."""
        path = self.data.get(benchmark, {}).get("path")
        return path is not None and Path(path).expanduser().exists()

    def shard(self, listed: Sequence[ListedRun], text: str) -> list[ListedRun]:
        """Return one part of the runs; by published counts, since every machine must cut the list alike."""
        from vbm_ptm.study import parse_shard, shard

        index, count = parse_shard(text)
        costs = [estimate.hours(1) for estimate in self.estimates(listed, is_assumed=True)]
        part = shard([item.planned for item in listed], index=index, count=count, costs=costs)
        folders = {planned.output for planned in part}
        return [item for item in listed if item.planned.output in folders]

    def show(
        self,
        listed: Sequence[ListedRun],
        *,
        part: Sequence[ListedRun],
        estimates: Sequence[Any],
        rate: float,
        finished: set[Path],
    ) -> None:
        """Print every run with its costs, what all of them take, and what was assumed."""
        runs, part_of = [item.planned for item in listed], {item.planned.output for item in part}
        show_plan(runs, estimates, images_per_second=rate, part=part_of, finished=finished)
        for benchmark in dict.fromkeys(item.benchmark for item in listed):
            if not self.has_data(benchmark):
                known = self.table.benchmarks[benchmark]
                stdout().print(
                    f"{benchmark}: the images are not at hand (--data {benchmark}=PATH); assumed: {known.origin}, "
                    f"{known.num_train:,} for training, {known.num_test:,} for testing.",
                    soft_wrap=True,
                )

    def write(self, listed: Sequence[ListedRun], output: Path) -> None:
        """Print the comparison with the paper, and keep it as ``paper_table.md`` and ``paper_table.json``."""
        from vbm_ptm.report.paper_table import TableRun, compare_with_paper, markdown
        from vbm_ptm.storage.durable_files import write_json
        from vbm_ptm.study import finished_runs

        results = {
            planned.output: result.to_json() for planned, result in finished_runs(i.planned for i in listed)
        }
        runs = [
            TableRun(
                row=item.row,
                benchmark=item.benchmark,
                num_views=item.num_views,
                order=item.order,
                directory=str(item.planned.output),
                changed=item.changed,
                result=results.get(item.planned.output),
            )
            for item in listed
        ]
        compared = compare_with_paper(self.table, runs)
        page = markdown(compared)
        write_json(output / "paper_table.json", compared)
        (output / "paper_table.md").write_text(page, encoding="utf-8")
        print(page)


def fitting(
    items: Sequence[ListedRun], estimates: Mapping[Path, Any], *, hours: float, rate: float
) -> list[ListedRun]:
    """Return, in order, the runs that still fit into so many hours."""
    left, kept = hours, []
    for item in items:
        needed = estimates[item.planned.output].hours(rate)
        if needed <= left:
            left -= needed
            kept.append(item)
    return kept


def chosen(kind: str, text: str | None, known: Iterable[str]) -> list[str]:
    """Return the names that an option lists, in the order of those that there are; all without it.

    Raises:
        UsageError: A name is not known.
    """
    names = list(known)
    if text is None:
        return names
    given = text.split(",")
    problems = [unknown_name(kind, name, names) for name in given if name not in names]
    if problems:
        raise UsageError(*problems)
    return [name for name in names if name in given]


def data_settings(items: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Read NAME=PATH and NAME.SETTING=VALUE; return the settings of each data set.

    Raises:
        UsageError: An item is of another form.
    """
    from vbm_ptm.config.tree import merge, parse_override

    settings: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not (key and equals and value):
            raise UsageError(f"--data '{item}' is not of the form NAME=PATH or NAME.SETTING=VALUE.")
        merge(settings, parse_override(item) if "." in key else {key: {"path": value}})
    return settings


if __name__ == "__main__":
    sys.exit(run_application(application))
