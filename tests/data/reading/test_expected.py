from __future__ import annotations

import pytest

from vbm_ptm.data.reading.expected import ExpectedCounts, compare

VARIANTS = {
    "cleaned": ExpectedCounts.model_validate(
        {
            "train": 6,
            "test": 3,
            "domains": {"real": {"train": 4, "test": 2}, "sketch": {"train": 2, "test": 1}},
        }
    ),
    "original": ExpectedCounts.model_validate(
        {
            "train": 8,
            "test": 4,
            "domains": {"real": {"train": 5, "test": 3}, "sketch": {"train": 3, "test": 1}},
        }
    ),
}


@pytest.mark.parametrize(
    ("domains", "variant", "differences", "missing"),
    [
        ({"real": (4, 2), "sketch": (2, 1)}, "cleaned", [], ()),
        ({"real": (5, 3), "sketch": (3, 1)}, "original", [], ()),
        ({"real": (5, 3)}, "original", [], ("sketch",)),
        (
            {"real": (5, 3), "sketch": (2, 1)},
            "original",
            [
                "7 training images where 8 were expected",
                "sketch: 2 training images where 3 were expected",
            ],
            (),
        ),
        ({"real": (4, 2), "sketch": (2, 1), "clay": (0, 1)}, "cleaned", None, ()),
    ],
)
def test_compare__finds_the_variant(
    domains: dict[str, tuple[int, int]], variant: str, differences: list[str] | None, missing: tuple[str, ...]
) -> None:
    found = sum(train for train, _ in domains.values()), sum(test for _, test in domains.values())
    compared = compare(VARIANTS, found, domains, has_own_split=False)
    assert compared.variant == variant
    assert compared.missing_domains == missing
    if differences is None:
        assert compared.differences == ("unexpected domain 'clay'", "4 test images where 3 were expected")
    else:
        assert list(compared.differences) == differences


def test_compare__of_an_own_split_looks_at_totals_alone() -> None:
    assert compare(VARIANTS, (5, 4), {"real": (3, 3), "sketch": (2, 1)}, has_own_split=True).differences == ()
    compared = compare(VARIANTS, (5, 3), {"real": (3, 2), "sketch": (2, 1)}, has_own_split=True)
    assert compared.differences == (
        "8 training and test images where 9 were expected",
        "real: 5 training and test images where 6 were expected",
    )


def test_compare__a_total_is_compared_whatever_the_split() -> None:
    variants = {"all": ExpectedCounts(total=10)}
    assert compare(variants, (9, 1), {}, has_own_split=False).differences == ()
    assert compare(variants, (9, 2), {}, has_own_split=False).differences == (
        "11 training and test images where 10 were expected",
    )


def test_compare__writes_large_numbers_for_people() -> None:
    compared = compare({"c": ExpectedCounts(train=50_000)}, (49_999, 7), {}, has_own_split=False)
    assert compared.differences == ("49,999 training images where 50,000 were expected",)
