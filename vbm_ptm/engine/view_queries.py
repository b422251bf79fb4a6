"""Which query chooses an image's prompts in training: the image's own, or that of the weak view of its group.

Shapes: G groups, V views, N = G * V images side by side in groups, D backbone width.
"""

from __future__ import annotations

from torch import Tensor

from vbm_ptm.data.view_batch_config import ViewBatchConfig
from vbm_ptm.learners.base import Learner
from vbm_ptm.prompts.queries import Queries


def view_queries(
    learner: Learner, images: Tensor, *, num_views: int, config: ViewBatchConfig
) -> Queries | None:
    """Return queries (N,D) for a training forward; None if each image has its own, which the learner computes.

    Args:
        learner: Of whose roles of a query at least one may be given to the weak view.
        images: (N,C,H,W) of whole groups, the weak view first; N may be 0.
        num_views: V.
        config: Which view serves for what.
    """
    views = {"query": config.query_view, "pull": config.pull_view}
    asked = {views[role] for role in learner.query_roles}
    if num_views == 1 or "weak" not in asked:
        return None
    features = {"weak": learner.query(images[::num_views]).repeat_interleave(num_views, dim=0)}
    if "own" in asked:
        features["own"] = learner.query(images)
    # A role that the learner does not know is never looked at.
    return Queries(*(features.get(views[role], features["weak"]) for role in ("query", "pull")))
