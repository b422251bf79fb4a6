"""The configuration of a run: composed from YAML files, presets and single settings; every error at once.

Every file is a partial run configuration. Later sources win: defaults < data set file < learner file (its base,
the preset, the preset for that data set) < ``--config`` < ``--set``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Field, PrivateAttr, ValidationError, create_model, model_validator

from vbm_ptm.backbones import BackboneConfig
from vbm_ptm.config.dataset_names import dataset_trees, resolve_dataset
from vbm_ptm.config.problems import problem_messages, section_class, setting_paths
from vbm_ptm.config.tree import (
    Tree,
    as_text,
    find_config,
    leaves,
    merge,
    nested,
    parse_override,
    read_yaml,
)
from vbm_ptm.data.loader_config import LoaderConfig
from vbm_ptm.data.reading.datasets import DatasetSpec
from vbm_ptm.data.task_division import ScenarioConfig
from vbm_ptm.data.view_batch import check_batch_arithmetic
from vbm_ptm.data.view_batch_config import ViewBatchConfig
from vbm_ptm.engine.objective import ObjectiveConfig
from vbm_ptm.engine.optimization import OptimizationConfig
from vbm_ptm.engine.trainer_config import TrainerConfig
from vbm_ptm.errors import UsageError, unknown_name
from vbm_ptm.learners.base import LearnerConfig
from vbm_ptm.learners.registry import learner_class
from vbm_ptm.settings import PrecisionSetting, Settings
from vbm_ptm.storage.checkpoint import CheckpointConfig


class RunConfig(Settings):
    """Everything that decides a run; each section is the configuration class of one unit.

    Attributes:
        preset: Preset of the learner's file that the settings came from; "none" if from no preset.
        device: Where to compute; "auto" chooses the best device.
        seed: Training seed. It never decides class order or splits.
    """

    dataset: DatasetSpec
    scenario: ScenarioConfig = ScenarioConfig()
    backbone: BackboneConfig = BackboneConfig()
    learner: LearnerConfig
    view_batch: ViewBatchConfig = ViewBatchConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimization: OptimizationConfig = OptimizationConfig()
    trainer: TrainerConfig = TrainerConfig()
    data: LoaderConfig = LoaderConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    preset: str = "none"
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    seed: int = Field(default=1993, ge=0)
    _composed: ComposedConfig | None = PrivateAttr(default=None)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on how well its sources fit together."""
        return tuple(self._composed.notes) if self._composed else ()

    def origin(self, path: str) -> str:
        """Return what set a setting, by its dotted path."""
        return (self._composed and self._composed.origin(path)) or "the default"

    @property
    def dataset_settings(self) -> str:
        """What the data set's name refers to: the file of its settings, or the place that was given."""
        return self._composed.dataset_settings if self._composed else "the default"

    def with_precision(self, precision: PrecisionSetting) -> RunConfig:
        """Return the configuration with ``trainer.mixed_precision`` set, in place of "auto"."""
        return self.model_copy(
            update={"trainer": self.trainer.model_copy(update={"mixed_precision": precision})}
        )

    @model_validator(mode="after")
    def _check_views(self) -> RunConfig:
        rehearsal, epochs = self.learner.rehearsal, self.optimization.epochs
        is_merged = rehearsal is not None and rehearsal.mode == "merged"
        num_views = self.view_batch.num_views if is_merged else self.view_batch.cycle_length
        views = self.view_batch.views_per_group, self.view_batch.views_per_replay
        check_batch_arithmetic(self.optimization.batch_size, max(views) if is_merged else views[0])
        if epochs < num_views and not self.view_batch.allow_partial_cycle:
            raise ValueError(
                f"optimization.epochs is {epochs} but view_batch.num_views is {num_views}: a cycle over all samples "
                f"takes {num_views} epochs, so some would never be trained on. Take at least {num_views} epochs, "
                "fewer views, or set view_batch.allow_partial_cycle=true."
            )
        if self.view_batch.views_for != "all" and (rehearsal is None or not rehearsal.capacity):
            raise ValueError(
                f"view_batch.views_for is {self.view_batch.views_for}, but '{self.learner.name}' has no buffer: all "
                "its samples are current ones. Set view_batch.views_for=all."
            )
        return self

    @model_validator(mode="after")
    def _check_accumulation(self) -> RunConfig:
        num_parts = self.optimization.gradient_accumulation_steps
        num_groups = self.optimization.batch_size // self.view_batch.views_per_group
        if num_parts > num_groups:
            raise ValueError(
                f"optimization.gradient_accumulation_steps is {num_parts}, but a step has {num_groups} groups "
                f"(batch size {self.optimization.batch_size}, {self.view_batch.views_per_group} views), which are not "
                f"cut: take at most {num_groups}."
            )
        if num_parts > 1 and self.learner.forbids_accumulation:
            raise ValueError(
                f"optimization.gradient_accumulation_steps is {num_parts}, but a step of learner "
                f"'{self.learner.name}' cannot be cut: {self.learner.forbids_accumulation}. Take 1, or change that."
            )
        return self

    @model_validator(mode="after")
    def _check_fused(self) -> RunConfig:
        if self.optimization.fused and self.trainer.mixed_precision == "fp16":
            raise ValueError(
                "optimization.fused is true and trainer.mixed_precision 'fp16': a fused optimizer hides which steps "
                "were skipped because the loss was scaled too far. Set optimization.fused=false, or take 'bf16'."
            )
        return self

    @model_validator(mode="after")
    def _check_consistency(self) -> RunConfig:
        start, epochs = self.objective.start_epoch, self.optimization.epochs
        has_pairs = max(self.view_batch.views_per_group, self.view_batch.views_per_replay) > 1
        if has_pairs and self.objective.consistency_weight and start >= epochs:
            raise ValueError(
                f"objective.start_epoch is {start}, but a task has {epochs} epochs: the consistency term would never "
                "count. Start it earlier, or set objective.consistency_weight=0 to leave it out."
            )
        return self

    @model_validator(mode="after")
    def _check_query_views(self) -> RunConfig:
        given = {"query": self.view_batch.query_view, "pull": self.view_batch.pull_view}
        roles = learner_class(self.learner.name).query_roles
        for role, view in given.items():
            if view == "weak" and role not in roles:
                has = ", ".join(f"view_batch.{each}_view" for each in sorted(roles)) or "neither of them"
                raise ValueError(
                    f"view_batch.{role}_view is 'weak', but it changes nothing in training learner "
                    f"'{self.learner.name}' (it knows {has}); leave it out."
                )
            if view == "weak" and self.view_batch.views_per_group == 1:
                raise ValueError(
                    f"view_batch.{role}_view is 'weak', but a sample has one view in a step: leave it out, or take "
                    "more views (view_batch.num_views, with order sample)."
                )
        return self


@dataclass
class ComposedConfig:
    """A configuration tree, where each of its settings comes from, and what does not fit without being wrong.

    Attributes:
        tree: The settings, section by section.
        origins: Dotted path of a setting -> what set it.
        notes: Notes on settings that do not fit together but are not errors.
        overridden: Dotted paths that were given one by one, ``path.to.setting=value``.
        name_taken_for: The file or the place that a data set's name stands for; "" where no name was given.
    """

    tree: Tree = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    overridden: frozenset[str] = frozenset()
    name_taken_for: str = ""

    @property
    def dataset_settings(self) -> str:
        """What the data set's name refers to, or else what set it."""
        return self.name_taken_for or self.origin("dataset.name") or "the default"

    def merge(self, tree: Mapping[str, Any], origin: str) -> None:
        """Let the settings of a tree win over those that are there."""
        merge(self.tree, tree)
        for key, _ in leaves(tree):
            self.origins = {
                known: source for known, source in self.origins.items() if not known.startswith(f"{key}.")
            }
            self.origins[key] = origin

    def _refusal(self, model: type[BaseModel], error: ValidationError) -> UsageError:
        is_missing = any(each["loc"] == ("dataset",) and each["type"] == "missing" for each in error.errors())
        problems = problem_messages(model, error, origin=self._source)
        return UsageError(*problems, advice="dataset" if is_missing else None)

    def validate(self) -> RunConfig:
        """Read the tree by the annotations.

        Raises:
            UsageError: One message per wrong setting: its path, what was given, what is allowed, the nearest name.
        """
        name = _given(self.tree, "learner", "name")
        if not isinstance(name, str):
            raise UsageError("learner.name: is required but not given.", advice="learner")
        # The learner section gets the method's own class, so that one pass finds the errors of all sections.
        model = _model_of(learner_class(name).config_class)
        try:
            config = model.model_validate(as_text(self.tree))
        except ValidationError as error:
            raise self._refusal(model, error) from error
        self._refuse_idle(config)
        config._composed = self
        return config

    def _refuse_idle(self, config: RunConfig) -> None:
        """Refuse what was asked for item by item and has no effect; what a file sets may serve other runs."""
        sections = {"optimization": config.optimization, "dataset.transforms": config.dataset.transforms}
        problems = [
            f"{section}.{name} has no effect without {remedy} ({self.origin(f'{section}.{name}')}); leave it out."
            for section, settings in sections.items()
            for name, remedy in settings.idle().items()
            if f"{section}.{name}" in self.overridden
        ]
        if problems:
            raise UsageError(*problems)

    def validate_dataset(self) -> DatasetSpec:
        """Read the data set's section alone.

        Raises:
            UsageError: As ``validate``.
        """
        section = {"dataset": self.tree["dataset"]} if "dataset" in self.tree else {}
        model = create_model("DatasetConfig", __base__=Settings, dataset=(DatasetSpec, ...))
        try:
            spec: DatasetSpec = model.model_validate(as_text(section)).dataset  # type: ignore[attr-defined]
        except ValidationError as error:
            raise self._refusal(model, error) from error
        return spec

    def origin(self, path: str) -> str | None:
        """Return what set a setting, or one above it; None for a default."""
        return next((self.origins[key] for key in _prefixes(path) if key in self.origins), None)

    def _source(self, path: str) -> str | None:
        """Return what set a setting, one above it or, for an unknown section, one below it."""
        below = (source for key, source in self.origins.items() if key.startswith(f"{path}."))
        return self.origin(path) or next(below, None)


@cache
def _model_of(section: type[LearnerConfig]) -> type[RunConfig]:
    return create_model("RunConfig", __base__=RunConfig, learner=(section, ...))


def stored_config(tree: Mapping[str, Any], origin: str) -> ComposedConfig:
    """Compose what a run has stored; settings that it does not know yet mean what they meant for it."""
    composed = ComposedConfig()
    before = {"trainer": {"mixed_precision": "no"}, "dataset": {"row_names": "number"}}
    composed.merge(before, "runs before there was a choice")
    composed.merge(tree, origin)
    return composed


def compose(
    *,
    dataset: str | None = None,
    learner: str | None = None,
    preset: str | None = None,
    config_file: Path | None = None,
    overrides: Sequence[str] = (),
    tree: Mapping[str, Any] | None = None,
    tree_origin: str = "Python",
) -> ComposedConfig:
    """Put a configuration together from its sources.

    Args:
        dataset: Name of a file in ``configs/datasets``, a YAML file, or a folder or parquet file with images.
        learner: Name of a built-in learner or ``package.module:Class``.
        preset: Preset of the learner's file; None picks "official" where data set and weights match, else "embedded".
        config_file: A partial run configuration.
        overrides: Items ``path.to.setting=value``.
        tree: A partial run configuration that wins over all files but not over ``overrides``.
        tree_origin: Where the tree comes from, for messages.
    """
    late = ComposedConfig()
    problems: list[str] = []
    if config_file is not None:
        try:
            late.merge(read_yaml(find_config(str(config_file))), str(config_file))
        except UsageError as error:
            problems += error.problems
    if tree:
        late.merge(tree, tree_origin)
    for item in overrides:
        try:
            late.merge(override(item), f"override {item}")
        except UsageError as error:
            problems += error.problems
    _refuse_contradictions(late, dataset=dataset, learner=learner, preset=preset)
    learner = learner or _given(late.tree, "learner", "name")
    named = _given(late.tree, "dataset", "name")
    if dataset is None and named is not None:
        # A configuration that says where its data lies may call it as it likes.
        is_complete = any(_given(late.tree, "dataset", key) for key in ("path", "source"))
        is_known = find_config(f"datasets/{named}", is_optional=True) is not None
        dataset = named if is_known or not is_complete else None

    composed = ComposedConfig()
    if dataset is not None:
        try:
            for dataset_tree, origin in dataset_trees(dataset):
                composed.merge(dataset_tree, origin)
                composed.name_taken_for = origin
        except UsageError as error:
            problems += error.problems
    if learner is not None:
        try:
            _merge_learner(composed, late, learner, preset or late.tree.get("preset"))
        except UsageError as error:
            problems += error.problems
    if problems:
        raise UsageError(*problems)
    for key, value in leaves(late.tree):
        composed.merge(nested(key, value), late.origins[key])
    composed.overridden = frozenset(key for item in overrides for key, _ in leaves(override(item)))
    return composed


def override(item: str) -> Tree:
    """Read ``path.to.setting=value``; values of settings that are paths or names are text.

    Raises:
        UsageError: As ``vbm_ptm.config.tree.parse_override``.
    """
    return parse_override(item, optional_text=_text_settings())


@cache
def _text_settings() -> dict[str, bool]:
    """Return the settings whose values are paths or names -> whether they may be unset."""
    found: dict[str, bool] = {}
    for key in setting_paths(RunConfig):
        *sections, name = key.split(".")
        model: type[BaseModel] = RunConfig
        for section in sections:
            model = section_class(model, section) or model
        kinds = _kinds(model.model_fields[name].annotation)
        if kinds <= {str, Path, type(None)} and kinds != {type(None)}:
            found[key] = type(None) in kinds
    return found


def _kinds(annotation: Any) -> set[Any]:
    """Return the members of an annotation, without what narrows them."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return {kind for member in get_args(annotation) for kind in _kinds(member)}
    return {annotation}


def _refuse_contradictions(
    late: ComposedConfig, *, dataset: str | None, learner: str | None, preset: str | None
) -> None:
    """Raise where an option and a later source choose differently: one of them would be ignored."""
    chosen: dict[str, tuple[Any, Any]] = {
        "preset": (preset, _single(late.tree.get("preset"), "preset")),
        "learner.name": (learner, _given(late.tree, "learner", "name")),
    }
    name, path, source = (_given(late.tree, "dataset", key) for key in ("name", "path", "source"))
    is_file = dataset is not None and dataset.endswith((".yaml", ".yml"))
    place = resolve_dataset(dataset).place if dataset and path else None
    if place:
        chosen["dataset.path"] = (os.path.realpath(place), path and os.path.realpath(path))
    elif (
        path or source
    ):  # the name alone renames the images of the data set given, the place alone is that of a copy
        chosen["dataset.name"] = (None if is_file else dataset, name)
    problems = [
        f"{key.partition('.')[0]} is {option}, but {late.origin(key)} says {key}: {later}; leave one of them out."
        for key, (option, later) in chosen.items()
        if None not in (option, later) and option != later
    ]
    if problems:
        raise UsageError(*problems)


def _merge_learner(composed: ComposedConfig, late: ComposedConfig, learner: str, preset: str | None) -> None:
    """Merge the learner's file: its base, the preset, and the preset's part for the data set."""
    composed.merge({"learner": {"name": learner}}, f"argument learner={learner}")
    learner_class(learner)  # a wrong name is reported before its file is looked for
    file = find_config(
        f"learners/{learner.rpartition(':')[2] if ':' in learner else learner}", is_optional=":" in learner
    )
    contents = read_yaml(file) if file else {}
    presets = {
        name: _mapping(settings, f"{file}: presets.{name}")
        for name, settings in _mapping(contents.pop("presets", {}), f"{file}: presets").items()
    }
    composed.merge(contents, str(file))
    dataset_name = str(_given(late.tree, "dataset", "name") or _given(composed.tree, "dataset", "name"))
    backbone = _given(late.tree, "backbone", "name")
    chosen = preset or _default_preset(presets, dataset_name, backbone)
    composed.merge(
        {"preset": chosen},
        f"argument preset={preset}" if preset else "the default preset for data set and weights",
    )
    if chosen == "none":
        return
    if chosen not in presets:
        where = f" of learner '{learner}'"
        raise UsageError(unknown_name("preset", chosen, [*presets, "none"], where=where))
    settings = dict(presets[chosen])
    per_dataset = _mapping(settings.pop("datasets", {}), f"{file}: presets.{chosen}.datasets")
    composed.merge(settings, f"{file}, preset {chosen}")
    if dataset_name in per_dataset:
        part = _mapping(per_dataset[dataset_name], f"{file}: presets.{chosen}.datasets.{dataset_name}")
        composed.merge(part, f"{file}, preset {chosen} for {dataset_name}")
    elif per_dataset:
        composed.notes.append(
            f"preset '{chosen}' of {learner} has no part for data set '{dataset_name}' (only for "
            f"{', '.join(per_dataset)}): its epochs, rates and crops are those of other images"
        )
    tuned = _given(settings, "backbone", "name")
    if backbone is not None and tuned is not None and backbone != tuned:
        composed.notes.append(
            f"preset '{chosen}' of {learner} was made for {tuned}, not for {backbone}: its rates and crops may not fit"
        )


def _mapping(value: Any, where: str) -> Tree:
    if not isinstance(value, dict):
        raise UsageError(f"{where} must hold settings as 'key: value', not {value!r}.")
    return value


def _default_preset(presets: Mapping[str, Tree], dataset: str, backbone: str | None) -> str:
    official = presets.get("official", {})
    tuned = _given(official, "backbone", "name")
    if dataset in (official.get("datasets") or {}) and backbone in (None, tuned):
        return "official"
    return "embedded" if "embedded" in presets else next(iter(presets), "none")


def dataset_spec(dataset: str, *, overrides: Sequence[str] = ()) -> DatasetSpec:
    """Return what a data set's name, file or folder stands for, by itself.

    Args:
        dataset: As for ``compose``.
        overrides: Items ``dataset.setting=value``.

    Raises:
        UsageError: It is unknown, or its settings are wrong.
    """
    composed = ComposedConfig()
    for tree_and_origin in dataset_trees(dataset):
        composed.merge(*tree_and_origin)
    for item in overrides:
        composed.merge(override(item), f"override {item}")
    try:
        return DatasetSpec.model_validate(as_text(composed.tree.get("dataset", {})))
    except ValidationError as error:
        raise UsageError(
            *problem_messages(DatasetSpec, error, origin=lambda path: composed.origin(f"dataset.{path}"))
        ) from error


def _given(tree: Mapping[str, Any], section: str, key: str) -> Any:
    """Return a setting of a section if it is given.

    Raises:
        UsageError: Something else stands where the section should be.
    """
    settings = tree.get(section) or {}
    if not isinstance(settings, Mapping):
        raise UsageError(
            f"'{section}' is a section of settings, not '{settings}'; write {section}.{key}={settings}."
        )
    return _single(settings.get(key), f"{section}.{key}")


def _single(value: Any, path: str) -> Any:
    if isinstance(value, Mapping | list):
        raise UsageError(f"{path} is a single setting, not {value}.")
    return value


def _prefixes(path: str) -> Iterable[str]:
    parts = path.split(".")
    return (".".join(parts[:length]) for length in range(len(parts), 0, -1))
