from __future__ import annotations

import pytest

from vbm_ptm.data.view_batch_config import ViewBatchConfig


@pytest.mark.parametrize(
    "settings", [{}, {"views_for": "buffer"}, {"views_for": "current"}], ids=["all", "buffer", "current"]
)
def test_strong_share__is_for_single_views(settings: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"strong_share is 0\.75, but 4 views"):
        ViewBatchConfig(num_views=4, strong_share=0.75, **settings)
    assert ViewBatchConfig(num_views=4, strong_share=0.75, order="class").views_per_group == 1


def test_is_baseline__is_one_weak_view_an_epoch() -> None:
    assert ViewBatchConfig(num_views=1).is_baseline
    for other in (
        {"num_views": 4},
        {"num_views": 1, "strong_share": 0.5},
        {"num_views": 4, "order": "class"},
    ):
        assert not ViewBatchConfig(**other).is_baseline
