from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from vbm_ptm.backbones.weights_file import check_finite, check_match, check_weights_file, read_state_dict
from vbm_ptm.errors import UsageError

LAST, AVERAGED = {"weight": torch.zeros(2)}, {"weight": torch.ones(2)}


def saved(path: Path, content: dict[str, Any]) -> Path:
    torch.save(content, path)
    return path


@pytest.mark.parametrize("average", ["state_dict_ema", "model_ema"])
@pytest.mark.parametrize("last", ["state_dict", "model"])
def test_read_state_dict__takes_averaged_weights_and_says_so(average: str, last: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pth", {"epoch": 3, last: LAST, average: AVERAGED})
    state, (fact,) = read_state_dict(path)
    assert torch.equal(state["weight"], AVERAGED["weight"])
    assert all(word in fact for word in (average, last, "EMA"))


@pytest.mark.parametrize("nothing", [None, {}])
def test_read_state_dict__passes_over_averages_that_were_not_kept(nothing: Any, tmp_path: Path) -> None:
    state, facts = read_state_dict(saved(tmp_path / "w.pth", {"state_dict": LAST, "state_dict_ema": nothing}))
    assert torch.equal(state["weight"], LAST["weight"])
    assert facts == ["unwrapped from 'state_dict'"]


def test_read_state_dict__agrees_with_timm_on_what_it_takes(tmp_path: Path) -> None:
    from timm.models import load_state_dict

    tensors = {name: {"weight": torch.full((2,), float(number))} for number, name in enumerate(
        ("model", "state_dict", "model_ema", "state_dict_ema")
    )}  # fmt: skip
    for names in (list(tensors), list(tensors)[:3], list(tensors)[:2], ["model", "state_dict_ema"]):
        path = saved(tmp_path / "w.pth", {name: tensors[name] for name in names})
        assert torch.equal(read_state_dict(path)[0]["weight"], load_state_dict(str(path))["weight"]), names


def test_read_state_dict__reads_what_timms_training_script_saves(tmp_path: Path) -> None:
    arguments = argparse.Namespace(model="vit_tiny_patch16_224", lr=1e-3, mean=None)
    content = {"epoch": 1, "arch": "vit", "state_dict": LAST, "state_dict_ema": AVERAGED, "args": arguments}
    state, _ = read_state_dict(saved(tmp_path / "w.pth.tar.pth", content))
    assert torch.equal(state["weight"], AVERAGED["weight"])


POINTERS = {
    "Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 343\n",
    "git-annex": b"/annex/objects/SHA256E-s343--00.safetensors\n",
    "git-annex pointer": b"../../.git/annex/objects/Gm/0x/SHA256E-s343--00/SHA256E-s343--00.safetensors",
    "HTML": b"\n<!DOCTYPE html>\n<html><title>Sign in</title></html>",
}


@pytest.mark.parametrize("kind", POINTERS)
@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".npz"])
def test_check_weights_file__names_what_stands_in_place_of_the_file(
    kind: str, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"w{suffix}"
    path.write_bytes(POINTERS[kind])
    with pytest.raises(UsageError, match=kind) as raised:
        check_weights_file(path)
    assert str(path) in str(raised.value)
    assert "weights_only" not in str(raised.value)


def test_check_weights_file__takes_real_files(tmp_path: Path) -> None:
    safetensors.torch.save_file(LAST, tmp_path / "w.safetensors")
    check_weights_file(tmp_path / "w.safetensors")


class _Model(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_buffer("count", torch.tensor(3))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_check_finite__names_tensors_that_hold_no_numbers(number: float) -> None:
    with pytest.raises(UsageError, match=r"weight \(1 of 2\)") as raised:
        check_finite(_Model(torch.tensor([0.0, number])), Path("w.pth"))
    assert "w.pth" in str(raised.value)
    check_finite(_Model(torch.zeros(2)), Path("w.pth"))


def test_check_finite__refuses_matrices_of_zeros_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nn.init.zeros_(model[0].weight)
    check_finite(model, Path("w.pth"))
    nn.init.zeros_(model[1].weight)
    with pytest.raises(UsageError, match=r"'w\.pth' holds only zeros"):
        check_finite(model, Path("w.pth"))
    nn.init.constant_(model[1].weight, 0.5)
    with pytest.raises(UsageError, match="holds a single value in every matrix"):
        check_finite(model, Path("w.pth"))


def test_check_match__refuses_integers_for_real_numbers() -> None:
    own = {"weight": torch.zeros(2), "count": torch.tensor(3)}
    halves = {"weight": torch.zeros(2, dtype=torch.float16), "count": torch.tensor(3, dtype=torch.int32)}
    check_match(halves, own, path=Path("w.pth"), name="model")
    for dtype in (torch.int8, torch.complex64):
        with pytest.raises(UsageError, match=rf"not of real numbers.*: weight \({dtype}\)"):
            check_match(
                halves | {"weight": torch.zeros(2, dtype=dtype)}, own, path=Path("w.pth"), name="model"
            )


@pytest.mark.parametrize("tensor", [torch.ones(2).to_sparse(), torch.ones(2, device="meta")], ids=str)
def test_check_match__refuses_tensors_without_a_value_for_each_element(
    tensor: Tensor, tmp_path: Path
) -> None:
    state, _ = read_state_dict(saved(tmp_path / "w.pth", {"weight": tensor}))
    with pytest.raises(UsageError, match="not plain tensors"):
        check_match(state, LAST, path=Path("w.pth"), name="model")


def test_read_state_dict__goes_by_what_a_file_holds(tmp_path: Path) -> None:
    """Downloads are renamed: a suffix is no content."""
    safetensors.torch.save_file(AVERAGED, tmp_path / "w.pth")
    saved(tmp_path / "w.safetensors", AVERAGED)
    for name in ("w.pth", "w.safetensors"):
        assert torch.equal(read_state_dict(tmp_path / name)[0]["weight"], AVERAGED["weight"])


def test_read_state_dict__says_in_plain_words_that_a_file_holds_code(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one safe way") as caught:
        read_state_dict(saved(tmp_path / "w.pth", {"model": nn.Linear(2, 2)}))
    assert str(caught.value).isprintable()
    assert "options" not in str(caught.value)


def test_check_weights_file__names_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "w.pth").touch()
    with pytest.raises(UsageError, match="is empty"):
        check_weights_file(tmp_path / "w.pth")
