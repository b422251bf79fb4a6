"""Write docs/settings.md, the reference of all settings: python scripts/settings_reference.py."""

from __future__ import annotations

from pathlib import Path

from vbm_ptm.config.reference import render_reference

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"


def main() -> None:
    """Write the page."""
    PAGE.write_text(render_reference(), encoding="utf-8")
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
