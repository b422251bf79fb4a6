from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vbm_ptm.building import build
from vbm_ptm.config.run_config import compose
from vbm_ptm.engine.acceleration import build_accelerator
from vbm_ptm.runs.banner import banner

Tree = dict[str, Any]


def test_banner__says_how_to_get_the_baseline(toy_tree: Callable[..., Tree]) -> None:
    tree = toy_tree("nearest_mean")
    lines = "\n".join(banner(build(compose(tree=tree).validate()), build_accelerator(device="cpu")))
    assert "view batch: 2 views (baseline: view_batch.num_views=1)" in lines
    assert "a step has 8 images = 4 groups x 2 views" in lines
    assert "1 rank on 1 node, device cpu, precision no" in lines
    assert "72 training and 48 test images, 12 classes in 3 tasks of 4" in lines
    assert f"data toy (settings of Python): split folder '{tree['dataset']['path']}'" in lines
    tree["view_batch"]["num_views"] = 1
    tree["scenario"] = {"task_sizes": [5, 4, 3]}
    lines = "\n".join(banner(build(compose(tree=tree).validate()), build_accelerator(device="cpu")))
    assert "view batch: 1 view (the plain baseline), from Python" in lines
    assert "a step has 8 images\n" in lines
    assert "12 classes in 3 tasks of 5, 4, 3" in lines
