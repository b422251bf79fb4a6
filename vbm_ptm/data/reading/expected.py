"""How many images a published data set has, and how what was found differs from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field

from vbm_ptm.settings import Settings

# Numbers of images: for training, for testing.
Counts = tuple[int, int]


class ExpectedImages(Settings):
    """Numbers of images; those that are None are not compared.

    Attributes:
        train: For training.
        test: For testing.
        total: Of both.
    """

    train: int | None = None
    test: int | None = None
    total: int | None = None


class ExpectedCounts(ExpectedImages):
    """Numbers of images in a variant of a data set.

    Attributes:
        domains: Name of a domain -> its numbers.
    """

    domains: dict[str, ExpectedImages] = Field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """The variant that the images match, or come closest to.

    Attributes:
        variant: Its name.
        differences: How they differ from it, in words.
        missing_domains: Those of its domains that were not found.
    """

    variant: str
    differences: tuple[str, ...]
    missing_domains: tuple[str, ...]


def compare(
    variants: Mapping[str, ExpectedCounts],
    found: Counts,
    domains: Mapping[str, Counts],
    *,
    has_own_split: bool,
) -> Comparison:
    """Return how the images differ from the variant that they come closest to.

    Args:
        variants: At least one.
        found: Images of all domains.
        domains: Images of each domain.
        has_own_split: The user has divided the images: only totals are compared.
    """
    comparisons = [
        _differences(name, expected, found, domains, has_own_split=has_own_split)
        for name, expected in variants.items()
    ]
    return min(comparisons, key=lambda each: (len(each.differences), len(each.missing_domains)))


def _differences(
    name: str, expected: ExpectedCounts, found: Counts, domains: Mapping[str, Counts], *, has_own_split: bool
) -> Comparison:
    missing = tuple(domain for domain in expected.domains if domain not in domains) if domains else ()
    differences = [
        f"unexpected domain '{domain}'"
        for domain in domains
        if expected.domains and domain not in expected.domains
    ]
    if not missing:  # with fewer domains the sums cannot agree
        differences += _compare("", expected, found, has_own_split=has_own_split)
    for domain, numbers in expected.domains.items():
        if domain in domains:
            differences += _compare(f"{domain}: ", numbers, domains[domain], has_own_split=has_own_split)
    return Comparison(name, tuple(differences), missing)


def _compare(where: str, expected: ExpectedImages, found: Counts, *, has_own_split: bool) -> list[str]:
    total = expected.total
    if total is None and expected.train is not None and expected.test is not None:
        total = expected.train + expected.test
    wanted = {"training": (expected.train, found[0]), "test": (expected.test, found[1])}
    if has_own_split or expected.total is not None:
        wanted = {"training and test": (total, sum(found))}
    return [
        f"{where}{actual:,} {what} images where {number:,} were expected"
        for what, (number, actual) in wanted.items()
        if number is not None and number != actual
    ]
