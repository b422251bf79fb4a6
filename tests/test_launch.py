from __future__ import annotations

import pytest

from vbm_ptm.launch import is_main_process


def test_is_main_process__is_rank_0_or_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert is_main_process()
    monkeypatch.setenv("RANK", "0")
    assert is_main_process()
    monkeypatch.setenv("RANK", "1")
    assert not is_main_process()
