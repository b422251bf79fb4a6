"""What every configuration class inherits."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from vbm_ptm.settings import AbsolutePath, Settings


class Example(Settings):
    rate: float = 0.5
    place: AbsolutePath | None = None


def test_settings__refuse_unknown_names_and_changes() -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Example.model_validate({"rat": 1})
    with pytest.raises(ValidationError, match="frozen"):
        Example().rate = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_settings__refuse_numbers_that_are_not_finite(value: str) -> None:
    with pytest.raises(ValidationError, match="finite"):
        Example.model_validate({"rate": value})


def test_settings__check_their_own_defaults() -> None:
    class Wrong(Settings):
        rate: float = "fast"  # type: ignore[assignment]

    with pytest.raises(ValidationError, match="valid number"):
        Wrong()


def test_absolute_path__means_the_same_file_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    read = [Example.model_validate({"place": given}).place for given in ("a/b", "~/c", "/d", None)]
    assert read == [tmp_path / "a/b", tmp_path / "home/c", Path("/d"), None]
