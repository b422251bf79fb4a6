"""Which blocks of a backbone get prompts."""

from __future__ import annotations

from collections.abc import Sequence

from vbm_ptm.errors import UsageError


def check_blocks(blocks: Sequence[int], *, depth: int, setting: str) -> None:
    """Refuse block numbers that the backbone does not have, or that occur twice.

    Args:
        blocks: Block numbers, counted from 0.
        depth: Blocks of the backbone.
        setting: Where the numbers are set, for the message.

    Raises:
        UsageError: A number is out of range, or occurs twice.
    """
    if len(set(blocks)) < len(blocks) or not all(0 <= block < depth for block in blocks):
        raise UsageError(
            f"{setting}: {list(blocks)} must be different blocks of the backbone, which are 0 to {depth - 1}."
        )
