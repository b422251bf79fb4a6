"""The files to read, in order, to follow one thing through the code, and how long they are.

    python scripts/reading_walks.py

prints both walks and writes them into ``.github/CONTRIBUTING.md``. Whole files are counted. What these files import
from elsewhere in the package is printed too, with the reason why it can stay closed.
``tests/test_reading_walks.py`` checks the lists against the imports, the totals against ``ceiling``, and the map.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "vbm_ptm"
MAP = PACKAGE.parent / ".github" / "CONTRIBUTING.md"
HEADING = "## Two walks through the code"


@dataclass(frozen=True)
class Walk:
    """What to read in order to understand one thing.

    Attributes:
        title: What it is.
        summary: What the walk follows, in a sentence.
        goal: Largest number of files and of lines that the walk should have.
        ceiling: Largest number of lines today; lower it whenever the walk gets shorter.
        files: Files below the package, in reading order -> what each is read for.
        beside: Modules that these files import -> why they can stay closed.
    """

    title: str
    summary: str
    goal: tuple[int, int]
    ceiling: int
    files: dict[str, str]
    beside: dict[str, str]

    def lines(self) -> dict[str, int]:
        """Return the number of lines of each file."""
        return {file: len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in self.files}

    def to_markdown(self) -> str:
        """Return the walk as a numbered list with links, for ``MAP``."""
        files = [
            f"{number}. [`{file}`](../vbm_ptm/{file}): {reason}"
            for number, (file, reason) in enumerate(self.files.items(), start=1)
        ]
        return "\n".join([f"**{self.title}.** {self.summary}", "", *files, ""])


_PLUMBING = {
    "errors": "how a message is worded",
    "randomness": "seeds by purpose",
    "settings": "the base class of settings",
}

SLCA = Walk(
    title="SLCA end to end",
    summary="Follow a run of one method from its configuration to its accuracies.",
    goal=(18, 2700),
    ceiling=2700,
    files={
        "experiment.py": "one run: train, evaluate, write the result",
        "building.py": "from the configuration to data, tasks and learner",
        "data/scenario.py": "what a task is",
        "engine/trainer.py": "the loop over tasks",
        "engine/task_training.py": "the loop over the steps of a task",
        "data/view_batch.py": "which samples are in a step",
        "data/loaders.py": "how each rank gets its images",
        "engine/training_step.py": "forward, backward, clipping, optimizer step",
        "engine/objective.py": "the loss of a step",
        "engine/optimization.py": "the optimizer",
        "learners/base.py": "the interface of every method",
        "learners/slca.py": "the method",
        "heads/task_heads.py": "its classifiers, one per task",
        "learners/alignment.py": "its second stage: classifiers trained on drawn features",
        "class_statistics.py": "the Gaussians that these features are drawn from",
        "engine/evaluator.py": "what is counted after a task",
        "metrics.py": "the accuracies that follow from the counts",
    },
    beside=_PLUMBING
    | {
        "backbones": "any network with features of a known width",
        "backbones.compiling": "only where it is asked for",
        "config.run_config": "the settings as a whole",
        "config.tree": "settings by dotted path",
        "data.benchmark": "which rows belong to a task",
        "data.extension": "one more task later on",
        "data.image_split": "rows of a split: image, label, domain",
        "data.loader_config": "workers and batch size of evaluation",
        "data.reading.datasets": "how images are found on disk",
        "data.single_views": "rows in one view each",
        "data.task_division": "how classes are cut into tasks",
        "data.train_loader": "each rank's part of a step",
        "data.transforms": "how a view is drawn",
        "data.view_batch_config": "the settings of the view batch",
        "data.view_transforms": "how a view is drawn",
        "data.views": "how the views of a step are stacked",
        "data.workers": "what happens when a worker fails",
        "engine.acceleration": "devices and ranks",
        "engine.confusion": "which task takes over which images",
        "engine.contract": "what is refused",
        "engine.counting": "when an image is right",
        "engine.features": "features of a task's images, from all ranks",
        "engine.fingerprint": "hashes of tensors",
        "engine.interruption": "signals",
        "engine.measures": "measures that a study may ask for",
        "engine.memory": "peak memory",
        "engine.optimizer_state": "what a resumed optimizer gets",
        "engine.parameters": "how many parameters are trained",
        "engine.passes": "a pass of their own for draws of past samples",
        "engine.readings": "losses on their way to the log",
        "engine.recipe": "settings of training as one object",
        "engine.replay_memory": "only of learners with a buffer",
        "engine.replay_planner": "only of learners with a buffer",
        "engine.run_progress": "what is saved, and where a run continues or stops",
        "engine.schedule": "how the learning rate falls",
        "engine.task_plans": "steps of a task before it begins",
        "engine.task_report": "what is shown and kept of a task",
        "engine.task_resuming": "where a task is resumed",
        "engine.test_images": "test images in batches",
        "engine.tracker_figures": "pictures for trackers",
        "engine.tracking": "log and progress",
        "engine.trainer_config": "settings of the loop",
        "engine.view_queries": "only of prompts",
        "engine.visits": "how often a sample has been seen",
        "heads": "its facade",
        "learners.config": "what the settings of every learner say",
        "learners.drift": "only where Gaussians follow the features",
        "learners.registry": "learner names",
        "learners.rehearsing": "only of learners with a buffer",
        "losses": "formulas of two losses",
        "prompts.queries": "only of prompts",
        "replay": "only of learners with a buffer",
        "runs.agreement": "whether the ranks were started alike",
        "runs.banner": "what is said before a run",
        "runs.directory": "the folder of a run",
        "runs.result": "what result.json holds",
        "runs.resuming": "resuming after a stop",
        "storage.checkpoint": "what is stored",
        "storage.checkpoint_state": "what is stored",
        "storage.durable_files": "what is stored",
        "storage.run_result": "what is stored",
        "storage.save_schedule": "when something is stored",
        "storage.task_record": "what is stored",
    },
)

ONE_BATCH = Walk(
    title="The path of one batch",
    summary="Follow the images of one training step from the file to the update of the weights.",
    goal=(11, 1800),
    ceiling=1650,
    files={
        "data/images.py": "decode the image of a row",
        "data/view_transforms.py": "draw its views",
        "data/views.py": "stack the views of a step",
        "data/train_loader.py": "give each rank its part",
        "engine/training_step.py": "move to the device, forward, backward, clip, step",
        "learners/finetune.py": "the simplest forward, which is also that of SLCA's first stage",
        "backbones/vit.py": "the network",
        "heads/task_heads.py": "the classifier",
        "engine/objective.py": "logits as groups of views again: the loss",
        "losses.py": "the agreement of views",
        "engine/optimization.py": "the optimizer",
    },
    beside=_PLUMBING
    | {
        "backbones.compiling": "only where it is asked for",
        "backbones": "its facade",
        "backbones.adaptations": "only of learners that adapt the backbone",
        "backbones.blocks": "what a block of timm must be",
        "backbones.support": "what every backbone is",
        "data.benchmark": "which rows belong to a task",
        "data.image_split": "rows of a split: image, label, domain",
        "data.record": "what a run says of its data",
        "data.scenario": "what a task is",
        "data.view_batch": "which samples make a step",
        "data.view_batch_config": "the settings of the view batch",
        "data.workers": "what happens when a worker fails",
        "engine.contract": "what is refused",
        "engine.optimizer_state": "what a resumed optimizer gets",
        "engine.passes": "a pass of their own for draws of past samples",
        "engine.recipe": "settings of training as one object",
        "engine.schedule": "how the learning rate falls",
        "engine.view_queries": "only of prompts",
        "heads": "its facade",
        "learners.base": "what every learner is",
        "replay": "only of learners with a buffer",
        "stand_ins": "files that stand in for others",
    },
)

WALKS = (SLCA, ONE_BATCH)


def with_walks(text: str) -> str:
    """Return the text of ``MAP`` with the walks below ``HEADING`` as they are now."""
    before, rest = text.split(f"{HEADING}\n")
    after = rest[rest.index("\n## ") :]
    intro = (
        "To get to know the code, read one of these from top to bottom. What the files import from elsewhere can stay "
        "closed at first; `python scripts/reading_walks.py` says why, and keeps these lists.\n"
    )
    walks = "\n".join(walk.to_markdown() for walk in WALKS)
    return f"{before}{HEADING}\n\n{intro}\n{walks}{after}"


def main() -> None:
    """Print both walks, and write them into the map."""
    MAP.write_text(with_walks(MAP.read_text(encoding="utf-8")), encoding="utf-8")
    for walk in WALKS:
        lines = walk.lines()
        num_files, num_lines = walk.goal
        print(
            f"{walk.title}: {len(lines)} files, {sum(lines.values()):,} lines (goal {num_files}, {num_lines:,})"
        )
        for file, reason in walk.files.items():
            print(f"  {lines[file]:5}  {file:28} {reason}")
        print(f"  can stay closed: {', '.join(walk.beside)}\n")


if __name__ == "__main__":
    main()
