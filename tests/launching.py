"""Making a test's process a rank of a group, as a launcher does."""

from __future__ import annotations

import os


def become_rank(rank: int, port: int) -> None:
    """Tell this process that it is one of two ranks on this machine."""
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in names.items()})
