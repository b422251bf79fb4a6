"""What "auto" means on which device."""

from __future__ import annotations

import pytest
import torch

from vbm_ptm.engine import precision
from vbm_ptm.engine.precision import chosen_device_type, cpu_has_bf16_units, has_fast_bf16, resolve_precision


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_f": True, "avx512_vnni": True, "amx_bf16": False}, False),
        ({"amx_bf16": True}, True),
        ({"avx512_bf16": True, "amx_bf16": False}, True),
        ({"neon": True, "bf16": True}, False),
    ],
)
def test_cpu_has_bf16_units__goes_by_the_processors_own_words(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], expected: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert cpu_has_bf16_units() is expected


def test_cpu_has_bf16_units__asks_older_torch_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for amx, avx in ((False, False), (True, False), (False, True)):
        monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda avx=avx: avx)
        assert cpu_has_bf16_units() is (amx or avx)


@pytest.mark.parametrize("has_units", [True, False])
def test_resolve_precision__auto_is_bf16_where_there_are_units(
    monkeypatch: pytest.MonkeyPatch, has_units: bool
) -> None:
    monkeypatch.setattr(
        precision, "has_fast_bf16", has_fast_bf16
    )  # of which tests/conftest.py makes a constant
    monkeypatch.setattr(precision, "cpu_has_bf16_units", lambda: has_units)
    assert resolve_precision("auto", "cpu") == ("bf16" if has_units else "no")
    assert resolve_precision("auto", "mps") == "no"
    for setting in ("no", "bf16", "fp16"):
        assert resolve_precision(setting, "cpu") == setting


def test_chosen_device_type__is_accelerates_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert chosen_device_type("auto") == "cuda"
    assert chosen_device_type("cpu") == "cpu"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    assert chosen_device_type("auto") == "cpu"
