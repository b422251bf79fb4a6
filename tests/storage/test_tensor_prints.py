"""Fingerprints against hashes written out here."""

from __future__ import annotations

import hashlib

import pytest
import torch

from vbm_ptm.storage.tensor_prints import combined, fingerprints


def test_fingerprints__are_of_type_shape_and_bytes() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    expected = hashlib.sha256(b"torch.float32 (2, 2) " + values.numpy().tobytes()).hexdigest()
    assert fingerprints({"weight": values}) == {"weight": expected}
    transposed = torch.tensor([[1.0, 3.0], [2.0, 4.0]]).T  # the same values, laid out in another way
    assert fingerprints({"weight": transposed}) == {"weight": expected}
    others = [values.double(), values.view(4), values.view(torch.int32), values + 1e-6, values.bfloat16()]
    assert expected not in {fingerprints({"": tensor})[""] for tensor in others}
    assert len({fingerprints({"": tensor})[""] for tensor in others}) == len(others)


@pytest.mark.parametrize("tensor", [torch.tensor(3.0), torch.empty(0, 4), torch.tensor([True, False])])
def test_fingerprints__take_every_shape_and_type(tensor: torch.Tensor) -> None:
    assert fingerprints({"": tensor}) == fingerprints({"": tensor.clone()})


def test_combined__depends_on_names_but_not_on_their_order() -> None:
    assert combined({"a": "1", "b": "2"}) == combined({"b": "2", "a": "1"})
    assert combined({"a": "1", "b": "2"}) != combined({"a": "2", "b": "1"})
    assert combined({"a": "1"}) != combined({"c": "1"})
