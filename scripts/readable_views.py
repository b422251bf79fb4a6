"""How much a small frozen backbone still reads in strong views: what configs/transforms/readable*.yaml rest on.

python scripts/readable_views.py --data caltech100 --set dataset.path=$DATA/caltech100

A logistic regression is fitted to the frozen features of four fifths of the training images, each in its evaluation
view and in a weak one, and judged on the strong views of the last fifth. A strength is readable where its accuracy is
at least 0.8 of that on the evaluation views. No test image is looked at.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from vbm_ptm.backbones import PromptableViT, load_vit
from vbm_ptm.config.run_config import dataset_spec
from vbm_ptm.data.image_split import ImageSplit
from vbm_ptm.data.reading.datasets import load_image_dataset
from vbm_ptm.data.transforms import TransformsConfig, build_transforms
from vbm_ptm.data.view_transforms import Normalization, ViewTransforms
from vbm_ptm.randomness import seed_for, seeded

Integers = npt.NDArray[np.int64]

READABLE = 0.8
CROPS = (0.08, 0.3, 0.5, 0.7)
# For images that must not be mirrored: degrees, shift, change of scale.
AFFINE: tuple[dict[str, Any], ...] = tuple(
    {
        "strong": "affine",
        "affine_degrees": degrees,
        "affine_translate": shift,
        "affine_scale": (1 - zoom, 1 + zoom),
    }
    for degrees, shift, zoom in (
        (15, 0.1, 0.1),
        (10, 0.05, 0.05),
        (5, 0.03, 0.05),
        (10, 0.0, 0.0),
        (5, 0.0, 0.0),
        (4, 0.0, 0.0),
    )
)
STRENGTHS: tuple[dict[str, Any], ...] = (
    {"strong": "none"},
    {"strong": "autoaugment_imagenet"},
    {"strong": "autoaugment_cifar10"},
    *(
        {"strong": "randaugment", "randaugment_operations": operations, "randaugment_magnitude": magnitude}
        for operations, magnitude in ((1, 3), (1, 6), (1, 9), (2, 6), (2, 9))
    ),
)


@torch.no_grad()
def features(
    backbone: PromptableViT,
    split: ImageSplit,
    rows: Integers,
    draw: Callable[[Image.Image], Tensor],
    normalize: Normalization,
) -> npt.NDArray[np.float32]:
    """Return the class-token features (n,D) of one view of each row, drawn under the row's own seed."""
    tables = []
    for part in np.array_split(rows, max(1, len(rows) // 128)):
        views = []
        for row in part.tolist():
            with seeded(seed_for("view", seed=0, sample=row, view=1)):
                views.append(draw(split.image(row)))
        tables.append(backbone.query(normalize(torch.stack(views))).float().numpy())
    return np.concatenate(tables)


def main() -> None:
    """Read the command line and print a line for each strength."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="digits", help="data set, as for vbm-ptm train --dataset")
    parser.add_argument("--set", action="append", default=[], help="dataset.setting=value")
    parser.add_argument("--images", type=int, default=2500, help="training images to look at")
    arguments = parser.parse_args()
    spec = dataset_spec(arguments.data, overrides=arguments.set)
    train = load_image_dataset(spec).train
    backbone = load_vit("vit_tiny_d6_patch8_64.tiny_imagenet").eval()
    order = np.random.default_rng(0).permutation(len(train))[: arguments.images]
    fitted, held_out = np.split(order, [len(order) * 4 // 5])

    def built(**settings: Any) -> ViewTransforms:
        config = TransformsConfig.model_validate({**spec.transforms.model_dump(), **settings})
        return build_transforms(config, **asdict(backbone.preprocessing))

    plain = built()
    seen = [
        features(backbone, train, fitted, view, plain.normalization) for view in (plain.evaluate, plain.weak)
    ]
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=300))
    model.fit(np.concatenate(seen), np.tile(train.labels[fitted], 2))
    clean = model.score(
        features(backbone, train, held_out, plain.evaluate, plain.normalization), train.labels[held_out]
    )
    print(json.dumps({"data": spec.name, "images": len(order), "clean": round(clean, 4)}))
    crops = CROPS if spec.transforms.horizontal_flip else (spec.transforms.crop_scale[0], 0.8)
    strengths = STRENGTHS if spec.transforms.horizontal_flip else (STRENGTHS[0], *AFFINE)
    for crop, strength in itertools.product(crops, strengths):
        strong = built(crop_scale=(crop, 1.0), **strength).strong
        accuracy = model.score(
            features(backbone, train, held_out, strong, plain.normalization), train.labels[held_out]
        )
        share = accuracy / clean
        line = {"crop": crop, **strength, "share": round(share, 3), "readable": bool(share >= READABLE)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
