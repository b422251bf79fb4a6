"""A model card for the Hugging Face Hub: valid metadata, what was measured and how, and how to use the learner."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from vbm_ptm.metrics import AccuracyMatrix
from vbm_ptm.report.tables import percent

# A license identifier of the Hub; anything else is free text.
_LICENSE_ID = re.compile(r"[a-z0-9][a-z0-9.-]*")


def model_card(
    facts: Mapping[str, Any],
    *,
    title: str,
    matrix: AccuracyMatrix,
    tasks: Sequence[Sequence[str]],
    architecture: str,
    is_pretrained: bool,
    base_model: str | None,
    base_license: str | None,
    hub_dataset: str | None,
) -> str:
    """Return the text of ``README.md``.

    Args:
        facts: What training recorded, such as ``learner`` and ``dataset``, shown as it is.
        title: Heading.
        matrix: What was measured after each task, including the last one.
        tasks: Names of each task's new classes.
        architecture: The backbone's kind or name, as a tag.
        is_pretrained: Whether training began with pre-trained weights.
        base_model: Repository of the pre-trained weights on the Hub, if they have one.
        base_license: Their license, if known.
        hub_dataset: The data set's repository on the Hub, if it has one.
    """
    metadata = _metadata(
        facts,
        title=title,
        accuracy=matrix.last(),
        architecture=architecture,
        is_pretrained=is_pretrained,
        base_model=base_model,
        base_license=base_license,
        hub_dataset=hub_dataset,
    )
    shown = dict(facts)
    if is_pretrained:
        shown["license of the pre-trained weights"] = base_license or "not known"
    module, _, own_class = facts["learner"].partition(":")
    own_code = (
        f"import {module}  # the learner's own code, which is not in this folder\n" if own_class else ""
    )
    return f"""---
{metadata.to_yaml()}
---

# {title}

An image classifier that learned {sum(map(len, tasks))} classes in {len(tasks)} tasks, one after another.
It was made with vbm_ptm and is not told which task an image belongs to.

## Use

```python
{own_code}from vbm_ptm.runs.stored_learner import predict

folder, images = ".", ["photo.jpg"]  # this folder; from the Hub: huggingface_hub.snapshot_download(NAME)
for image in predict(folder, images, top_k=3):
    print(image.path, image.class_names, image.scores)
```

or `vbm-ptm predict FOLDER photo.jpg folder/of/photos`. Neither the training data nor other weights are needed.

## Results

Top-1 accuracy in percent over all classes seen so far, on the test images.

{_results(matrix, tasks)}
## Training

{_bullets(shown)}
## Limits

It knows the classes above and nothing else: every image is assigned one of them. {_license_sentence(is_pretrained)};
the training images may have their own terms.
"""


def _license_sentence(is_pretrained: bool) -> str:
    if is_pretrained:
        return "The license named here is that of the pre-trained weights"
    return "It was trained from scratch, and names no license"


def _metadata(
    facts: Mapping[str, Any],
    *,
    title: str,
    accuracy: float | None,
    architecture: str,
    is_pretrained: bool,
    base_model: str | None,
    base_license: str | None,
    hub_dataset: str | None,
) -> ModelCardData:
    is_listed = base_license is not None and _LICENSE_ID.fullmatch(base_license) is not None
    results = [
        EvalResult(
            task_type="image-classification",
            dataset_type=hub_dataset or facts["dataset"],
            dataset_name=facts["dataset"],
            metric_type="accuracy",
            metric_name="top-1 over all seen classes",
            metric_value=accuracy,
        )
    ]
    is_other = is_pretrained and not is_listed
    return ModelCardData(
        license="other" if is_other else base_license,
        license_name="as-the-pre-trained-weights" if is_other else None,
        library_name="vbm_ptm",
        pipeline_tag="image-classification",
        tags=["continual-learning", architecture, facts["learner"].rpartition(":")[2]],
        base_model=base_model,
        datasets=[hub_dataset] if hub_dataset else None,
        metrics=["accuracy"],
        model_name=title,
        eval_results=results if accuracy is not None else None,
    )


def _results(matrix: AccuracyMatrix, tasks: Sequence[Sequence[str]]) -> str:
    lines = ["| after task | new classes | accuracy |", "|---|---|---|"]
    for number, (names, accuracy) in enumerate(zip(tasks, matrix.curve(), strict=False), start=1):
        lines.append(f"| {number} | {_cell(', '.join(names)) or 'none'} | {percent(accuracy)} |")
    average, forgetting = matrix.average_incremental(), matrix.forgetting()
    lines += ["", f"Average over tasks {percent(average)}, forgetting {percent(forgetting)}.", ""]
    return "\n".join(lines)


def _bullets(facts: Mapping[str, Any]) -> str:
    lines = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        if value not in (None, ""):
            lines.append(f"- {name.replace('_', ' ')}: {value}\n")
    return "".join(lines)


def _cell(text: str) -> str:
    """Keep a bar or a line break in a name from breaking its table."""
    return text.replace("\n", " ").replace("|", "\\|")
