"""Fingerprints of a learner's tensors: what is frozen stays as it is, and all ranks hold the same."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from vbm_ptm.engine.contract import check_finite
from vbm_ptm.errors import TrainingError, some_names
from vbm_ptm.learners.base import Learner
from vbm_ptm.storage.tensor_prints import combined, fingerprints


class TaskFingerprints:
    """What a task may change in a learner and what not, from its beginning on.

    Args:
        learner: Has begun the task: ``requires_grad`` says what is frozen.
        task_index: Index of the task.
        accelerator: Knows the ranks.

    Raises:
        TrainingError: Ranks begin with different frozen parameters.
    """

    def __init__(self, learner: Learner, task_index: int, accelerator: Accelerator) -> None:
        self._learner = learner
        self._task_index = task_index
        self._accelerator = accelerator
        parameters = dict(learner.named_parameters())
        self._frozen = {name: tensor for name, tensor in parameters.items() if not tensor.requires_grad}
        self._trained = {name: tensor for name, tensor in parameters.items() if tensor.requires_grad}
        self._before = fingerprints(self._frozen)
        # Of earlier tasks: a checkpoint holds them as they were at the end of theirs.
        own = f"statistics.{task_index}."
        self._statistics_before = fingerprints(
            {
                name: tensor
                for name, tensor in learner.state_dict().items()
                if name.startswith("statistics.") and not name.startswith(own)
            }
        )
        self._after: dict[str, str] = {}
        self._compare_ranks(self._before, "at the beginning of")

    @property
    def frozen_sha256(self) -> str:
        """One fingerprint of all parameters that the task does not train."""
        return combined(self._before)

    @property
    def trained_sha256(self) -> str:
        """One fingerprint of all that the task has trained and, once it has ended, made."""
        return combined(self._after)

    def check_resumed(self, frozen_sha256: str) -> None:
        """Raise if what is frozen is not what it was when the task began, before the run was stopped.

        Args:
            frozen_sha256: What this property was then.

        Raises:
            TrainingError: It differs: a run that ``check_training`` stopped must not be resumed.
        """
        if frozen_sha256 != self.frozen_sha256:
            raise TrainingError(
                f"the frozen parameters are not those that task {self._task_index + 1} began with: training changed "
                "them before the run was stopped. Correct the learner and start a new run in another folder."
            )

    def check_training(self) -> None:
        """Raise if training has changed what is frozen, or has left ranks unequal.

        Raises:
            TrainingError: The message names the tensors and the ranks.
            FloatingPointError: What was trained is not finite.
        """
        now = fingerprints(self._frozen)
        changed = [name for name, before in self._before.items() if now[name] != before]
        if changed:
            raise TrainingError(
                f"training on task {self._task_index + 1} has changed {len(changed)} of {len(now)} frozen parameters: "
                f"{some_names(changed, limit=5)}. The learner writes into them; requires_grad alone does not prevent "
                "that."
            )
        self._after = fingerprints(self._trained)
        self._compare_ranks(self._after, "after training on")
        check_finite(self._trained, when=f"after training on task {self._task_index + 1}")

    def check_end(self) -> None:
        """Raise if ranks differ in the tensors that ``end_task`` has made, or if it changed what it must not.

        Raises:
            TrainingError: Ranks differ, or statistics of an earlier task have changed.
            FloatingPointError: What it has made is not finite.
        """
        state = self._learner.state_dict()
        made = {name: tensor for name, tensor in state.items() if name not in self._frozen | self._trained}
        self._after |= fingerprints(made)
        self._compare_ranks(self._after, "after the end of")
        check_finite(made, when=f"after the end of task {self._task_index + 1}")
        changed = [
            name for name, before in self._statistics_before.items() if self._after.get(name) != before
        ]
        if changed:
            raise TrainingError(
                f"the end of task {self._task_index + 1} has changed what earlier tasks left behind: "
                f"{some_names(changed, limit=5)}. Statistics are stored once, at the end of their own task: keep what "
                "changes in buffers outside of Learner.statistics."
            )

    def _compare_ranks(self, prints: Mapping[str, str], when: str) -> None:
        difference = difference_between_ranks(prints, self._accelerator)
        if difference:
            raise TrainingError(
                f"{when} task {self._task_index + 1} {difference}. Do all ranks read the same weights, share their "
                "gradients and run the same versions on the same hardware?"
            )


def difference_between_ranks(prints: Mapping[str, str], accelerator: Accelerator) -> str | None:
    """Return in words which ranks differ from rank 0 and where, the same on all ranks; None where none does.

    Args:
        prints: Fingerprints of this rank, by name.
        accelerator: Knows the ranks.
    """
    if accelerator.num_processes == 1:
        return None
    mine = torch.tensor([list(bytes.fromhex(combined(prints)))], dtype=torch.uint8, device=accelerator.device)
    everywhere = accelerator.gather(mine)
    others = [rank for rank, digest in enumerate(everywhere) if not torch.equal(digest, everywhere[0])]
    if not others:
        return None
    of_rank = gather_object([dict(prints)])  # only now: names are long, and all ranks get here together
    names = [
        name
        for name in of_rank[0] | of_rank[others[0]]
        if of_rank[others[0]].get(name) != of_rank[0].get(name)
    ]
    return f"rank {', '.join(map(str, others))} differs from rank 0 in {some_names(names, limit=5)}"
