"""A study file: several runs, and the data sets, seeds and values that they are repeated for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from vbm_ptm.config.problems import problem_messages
from vbm_ptm.config.tree import read_yaml
from vbm_ptm.errors import UsageError
from vbm_ptm.settings import Settings

Grid = dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]]


class StudyRun(Settings):
    """One line of a study: a learner and what is special about it.

    Attributes:
        learner: Name of the learner.
        dataset: Data set in place of the study's.
        name: Label in tables and directories; made from learner and grid values without it.
        preset: Preset in place of the study's.
        settings: A partial run configuration.
        settings_on: Data set -> settings of the line's runs on it alone.
        grid: Dotted setting -> values, as in the study, for this line alone.
    """

    learner: str
    dataset: str | None = None
    name: str | None = Field(default=None, pattern="[^.]")  # "." and ".." are other folders
    preset: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    settings_on: dict[str, dict[str, Any]] = Field(default_factory=dict)
    grid: Grid = Field(default_factory=dict)

    @property
    def line(self) -> str:
        """Its name, given or made."""
        return self.name or self.learner


class StudyConfig(Settings):
    """A study file.

    Attributes:
        dataset: Name, YAML file or folder, as for ``vbm-ptm train``; for all runs that name none.
        datasets: Several of them: each run that names none is planned on each, and is called after it.
        preset: Preset of every run that names none.
        settings: A partial run configuration for all runs.
        runs: The lines of the study.
        grid: Dotted setting -> values; every run is planned with every combination, one seed after the other.
        seeds: Training seeds.
        class_order_seeds: Seeds of the class order; together with ``seeds`` they are zipped.
    """

    dataset: str | None = None
    datasets: tuple[str, ...] = ()
    preset: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    runs: tuple[StudyRun, ...] = Field(min_length=1)
    grid: Grid = Field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    class_order_seeds: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _check_datasets(self) -> StudyConfig:
        if self.dataset is not None and self.datasets:
            raise ValueError("'dataset' and 'datasets' are both given: name all in 'datasets'.")
        unnamed = [entry.line for entry in self.runs if not self.datasets_of(entry)]
        if unnamed:
            raise ValueError(
                f"no data set is given for {', '.join(unnamed)}: set 'dataset' of the study, or of each run."
            )
        for entry in self.runs:
            elsewhere = [name for name in entry.settings_on if name not in self.datasets_of(entry)]
            if elsewhere:
                raise ValueError(
                    f"{entry.line} has settings_on {', '.join(elsewhere)}, but is run on "
                    f"{', '.join(self.datasets_of(entry))}: name one of these."
                )
        return self

    def datasets_of(self, entry: StudyRun) -> tuple[str, ...]:
        """Return the data sets that a line is run on."""
        several = self.datasets or ((self.dataset,) if self.dataset else ())
        return (entry.dataset,) if entry.dataset else several


def read_study(file: Path | None) -> StudyConfig:
    """Read a study file.

    Raises:
        UsageError: A setting of the study itself is wrong.
    """
    try:
        return StudyConfig.model_validate(read_yaml(file))
    except ValidationError as error:
        problems = problem_messages(StudyConfig, error, origin=lambda _: str(file))
        raise UsageError(*(f"study: {problem}" for problem in problems)) from error
