from __future__ import annotations

import pytest
import torch

from vbm_ptm.data.views import ViewBatch


@pytest.mark.parametrize(
    ("num_groups", "sizes"), [(5, [1, 2, 2]), (6, [2, 2, 2]), (2, [0, 1, 1]), (0, [0, 0, 0])]
)
def test_view_batch__is_cut_into_whole_groups(num_groups: int, sizes: list[int]) -> None:
    ids = torch.arange(num_groups)
    batch = ViewBatch(ids[:, None, None, None, None].expand(-1, 4, 3, 2, 2), ids + 10, ids, 9)
    parts = batch.micro_batches(3)
    assert [part.num_groups for part in parts] == sizes
    assert torch.equal(torch.cat([part.images for part in parts]), batch.images)
    assert torch.equal(torch.cat([part.labels for part in parts]), batch.labels)
    assert torch.equal(torch.cat([part.sample_ids for part in parts]), batch.sample_ids)
    assert {part.num_global_groups for part in parts} == {9}
