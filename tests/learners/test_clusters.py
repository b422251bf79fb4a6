"""k-means that threads do not change."""

from __future__ import annotations

import numpy as np
from threadpoolctl import threadpool_limits

from vbm_ptm.learners.clusters import k_means


def test_k_means__is_the_same_to_the_last_bit_whatever_threads_there_are() -> None:
    points = np.random.default_rng(0).normal(size=(2000, 8))  # eight parts, which threads share
    with threadpool_limits(limits=1, user_api="openmp"):
        centres, numbers = k_means(points, count=5)
    assert (centres.shape, numbers.shape) == ((5, 8), (2000,))
    with threadpool_limits(limits=4, user_api="openmp"):
        again, same = k_means(points, count=5)
    assert centres.tobytes() == again.tobytes()
    assert numbers.tobytes() == same.tobytes()


def test_k_means__finds_no_more_centres_than_points() -> None:
    centres, numbers = k_means(np.array([[1.0, 2.0], [3.0, 4.0]]), count=5)
    assert sorted(map(tuple, centres)) == [(1, 2), (3, 4)]
    assert sorted(numbers) == [0, 1]
