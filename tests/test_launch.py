from __future__ import annotations

import pytest

from vbm_ptm.launch import is_main_process, num_processes


def test_is_main_process__is_rank_0_or_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert is_main_process()
    monkeypatch.setenv("RANK", "0")
    assert is_main_process()
    monkeypatch.setenv("RANK", "1")
    assert not is_main_process()


def test_num_processes__is_one_without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert num_processes() == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert num_processes() == 4
