"""The documents: every learner has its page, every link leads somewhere, the README stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vbm_ptm.learners.registry import list_learners

REPOSITORY = Path(__file__).parents[1]
PAGES = [
    *REPOSITORY.glob("*.md"),
    *REPOSITORY.glob("docs/**/*.md"),
    REPOSITORY / ".github" / "CONTRIBUTING.md",
]
MAX_README_WORDS = 1500


def anchors(page: Path) -> set[str]:
    """Return the anchors that a page's headings make, as GitHub names them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_links__lead_to_files_and_headings_that_exist(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("learner", list_learners())
def test_learners__have_a_page_that_the_readme_names(learner: str) -> None:
    page = REPOSITORY / "docs" / "learners" / f"{learner}.md"
    text = page.read_text(encoding="utf-8")
    assert {"idea", "view batch"} <= set(re.findall("idea|view batch", text.lower()))
    assert f"](docs/learners/{learner}.md)" in (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert f"]({learner}.md)" in (page.parent / "README.md").read_text(encoding="utf-8")


def test_readme__is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").split()) < MAX_README_WORDS
