"""k-means with the same result, to the last bit, on every rank and at every repetition."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits

Numbers = NDArray[np.float64]


def k_means(points: Numbers, *, count: int) -> tuple[Numbers, NDArray[np.int32]]:
    """Return the centres (k,D) of points (n,D) and the number (n,) of each point's centre, k = min(count, n).

    It runs on one thread: several add their sums in the order in which they end, and ranks would come to differ.

    Args:
        points: At least one.
        count: Centres to look for.
    """
    with threadpool_limits(limits=1, user_api="openmp"):
        found = KMeans(min(count, len(points)), n_init=10, random_state=0).fit(points)
    return found.cluster_centers_, found.labels_
