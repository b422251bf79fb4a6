"""The model card where a run is not as usual; tests/test_export.py has the usual one, and runs its code."""

from __future__ import annotations

from typing import Any

from huggingface_hub import ModelCard

from vbm_ptm.metrics import AccuracyCell, AccuracyMatrix
from vbm_ptm.report.model_card import model_card

FACTS: dict[str, Any] = {
    "learner": "slca",
    "dataset": 'odd: "names"',
    "dataset_revision": None,
    "versions": {"vbm_ptm": "1.2.3"},
}


def card_of(matrix: AccuracyMatrix, tasks: list[list[str]], **changes: Any) -> ModelCard:
    given = {"base_model": None, "base_license": None, "hub_dataset": None}
    given |= {"architecture": "vision-transformer", "is_pretrained": True}
    return ModelCard(model_card(FACTS, title="odd by slca", matrix=matrix, tasks=tasks, **(given | changes)))


def test_model_card__keeps_its_table_whole_whatever_classes_are_called() -> None:
    matrix = AccuracyMatrix([[AccuracyCell(3, 2, 3)]])
    card = card_of(matrix, [["a|b", "two\nlines", "- dash"]])
    assert "| 1 | a\\|b, two lines, - dash | 66.67 |" in card.text
    assert card.data.eval_results[0].dataset_name == 'odd: "names"'
    assert "dataset revision" not in card.text
    assert "- versions: vbm_ptm 1.2.3" in card.text


def test_model_card__license_is_an_identifier_or_said_to_be_another() -> None:
    matrix = AccuracyMatrix([[AccuracyCell(3, 2, 3)]])
    assert card_of(matrix, [["a"]], base_license="cc-by-nc-4.0").data.license == "cc-by-nc-4.0"
    for text, shown in (("for research only", "for research only"), (None, "not known")):
        card = card_of(matrix, [["a"]], base_license=text)
        assert (card.data.license, card.data.license_name) == ("other", "as-the-pre-trained-weights")
        assert f"license of the pre-trained weights: {shown}" in card.text


def test_model_card__names_no_license_of_weights_that_were_not_pre_trained() -> None:
    matrix = AccuracyMatrix([[AccuracyCell(3, 2, 3)]])
    card = card_of(matrix, [["a"]], architecture="resnet18_cifar", is_pretrained=False)
    assert card.data.tags == ["continual-learning", "resnet18_cifar", "slca"]
    assert (card.data.license, card.data.license_name) == (None, None)
    assert "pre-trained weights" not in card.text
    assert "It was trained from scratch, and names no license; the training images" in " ".join(
        card.text.split()
    )


def test_model_card__reports_no_number_that_was_not_measured() -> None:
    """An extended run: its own images are measured, nothing is known about all classes."""
    matrix = AccuracyMatrix([[AccuracyCell(4, 3, 4)], [None, AccuracyCell(4, 4, 4)]])
    card = card_of(matrix, [["a"], ["b"]], hub_dataset="somebody/images")
    assert card.data.eval_results is None
    assert card.data.datasets == ["somebody/images"]
    assert "| 1 | a | 75.00 |\n| 2 | b | n/a |" in card.text
