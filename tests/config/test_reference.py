"""The reference of all settings: whole, readable, and the page in docs/ is what it renders."""

from __future__ import annotations

from pathlib import Path

import pytest

from vbm_ptm.config.reference import (
    general_settings,
    learner_settings,
    preset_values,
    render_reference,
    settings_of,
)
from vbm_ptm.learners.registry import list_learners
from vbm_ptm.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


class Inner(Settings):
    """An inner section.

    Attributes:
        depth: How deep it
            goes; None for ever.
    """

    depth: int | None = None


class Outer(Settings):
    """An outer section.

    Attributes:
        name: Has to be given.
        rates: Two ``numbers``.
    """

    name: str
    rates: tuple[float, float] = (0.5, 1.0)
    inner: Inner = Inner()
    unsaid: bool = True


def test_settings__have_path_kind_default_and_meaning() -> None:
    name, rates, depth, unsaid = settings_of(Outer)
    assert (name.path, name.kind, name.default, name.meaning) == ("name", "text", "", "Has to be given.")
    assert (rates.kind, rates.default, rates.meaning) == (
        "list of 2 x number",
        "[0.5, 1.0]",
        "Two `numbers`.",
    )
    assert (depth.path, depth.kind, depth.default) == ("inner.depth", "whole number or null", "null")
    assert depth.meaning == "How deep it goes; `null` for ever."
    assert (unsaid.default, unsaid.meaning) == ("true", "")


@pytest.mark.parametrize("learner", list_learners())
def test_every_setting__has_a_meaning(learner: str) -> None:
    unsaid = [each.path for each in [*general_settings(), *learner_settings(learner)] if not each.meaning]
    assert unsaid == []


def test_preset_values__name_the_data_set_of_a_special_part() -> None:
    values = preset_values("slca")["official"]
    assert values["learner.alignment_epochs"] == "5"
    assert values["optimization.epochs"].startswith("20, 50 (")
    assert "imagenet_r" in values["optimization.epochs"]


def test_page__is_what_the_classes_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_reference(), (
        "docs/settings.md is not up to date: run python scripts/settings_reference.py"
    )
