"""Continual-learning methods, one file each; a learner's name is the name of its file."""

from vbm_ptm.learners.registry import create_learner, learner_class, list_learners

__all__ = ["create_learner", "learner_class", "list_learners"]
