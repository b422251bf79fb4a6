"""Learner names: found from file names without importing them, resolved when one is needed."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from vbm_ptm.errors import UsageError, some_names, unknown_name

if TYPE_CHECKING:
    from vbm_ptm.backbones import Backbone
    from vbm_ptm.learners.base import Learner

NOT_LEARNERS = {
    "alignment",
    "base",
    "clusters",
    "config",
    "drift",
    "first_session",
    "fusion",
    "logit_memory",
    "plain_head",
    "prototypes",
    "registry",
    "rehearsing",
    "teacher",
}
# Names under which more than one method is known.
AMBIGUOUS = {
    "der": "dark experience replay (Buzzega et al.), here 'dark_er' and, with labels, 'der_pp'; and dynamically "
    "expandable representation (Yan et al.), here 'expandable'",
}


def list_learners() -> list[str]:
    """Return the names of all built-in learners, sorted; imports none of them."""
    return list(_built_in())


@cache
def _built_in() -> tuple[str, ...]:
    names = {module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])}
    return tuple(sorted(names - NOT_LEARNERS))


def learner_class(name: str) -> type[Learner]:
    """Return the class of a built-in learner or of a dotted ``package.module:Class``.

    Raises:
        UsageError: The name is unknown, or it does not name a Learner with a ``config_class``.
    """
    from vbm_ptm.learners.base import Learner, LearnerConfig

    if ":" in name:
        module_name, _, class_name = name.partition(":")
        try:
            found = getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f"learner '{name}' cannot be imported ({error}); "
                "a dotted name is 'package.module:Class', looked for on the Python path and in the current directory."
            ) from error
        if not (inspect.isclass(found) and issubclass(found, Learner)):
            raise UsageError(f"learner '{name}' is not a subclass of vbm_ptm.learners.base.Learner.")
    else:
        if name in AMBIGUOUS:
            raise UsageError(f"learner '{name}' is the name of two methods: {AMBIGUOUS[name]}.")
        if name not in list_learners():
            raise UsageError(unknown_name("learner", name, list_learners()))
        module = importlib.import_module(f"vbm_ptm.learners.{name}")
        found = _only_learner(module)
    config_class = getattr(found, "config_class", None)
    if not (inspect.isclass(config_class) and issubclass(config_class, LearnerConfig)):
        raise UsageError(
            f"learner '{name}' needs a class attribute config_class, a subclass of LearnerConfig."
        )
    return found


class LearnerFacts(NamedTuple):
    """What a learner needs, and what it trains.

    Attributes:
        backbone: "any", or the kind that it needs.
        buffer: What it keeps of earlier images with its default settings; "none" without any.
        trains: Its trained parts.
        domains: Whether tasks may share their classes.
    """

    backbone: str
    buffer: str
    trains: str
    domains: bool


def learner_facts(name: str) -> LearnerFacts:
    """Return what a learner's class says of it."""
    from vbm_ptm.backbones import PromptableViT

    found = learner_class(name)
    needs_vit = issubclass(found.backbone_class, PromptableViT)
    rehearsal = found.config_class(name=name).rehearsal
    return LearnerFacts(
        "vision transformer" if needs_vit else "any",
        "none" if rehearsal is None else rehearsal.buffer,
        found.trained_parts,
        found.takes_domains,
    )


def _only_learner(module: ModuleType) -> type[Learner]:
    """Return the learner class that a built-in file defines.

    Raises:
        UsageError: It defines none, or more than one.
    """
    from vbm_ptm.learners.base import Learner

    members = [member for member in vars(module).values() if inspect.isclass(member)]
    own = [
        member for member in members if issubclass(member, Learner) and member.__module__ == module.__name__
    ]
    if len(own) != 1:
        names = f": {some_names(each.__name__ for each in own)}" if own else ""
        raise UsageError(
            f"{module.__file__} defines {len(own)} Learner classes{names}. A learner's file defines one, which its "
            "name stands for; what two learners share goes into a module outside of vbm_ptm.learners."
        )
    return own[0]


def create_learner(
    name: str, *, backbone: Backbone, num_tasks: int, settings: dict[str, Any] | None = None
) -> Learner:
    """Build a learner.

    Args:
        name: A built-in name or ``package.module:Class``.
        backbone: Of the method's ``backbone_class``, owned by the learner from now on.
        num_tasks: Tasks planned.
        settings: The method's hyper-parameters where they differ from the defaults of its config class.
    """
    found = learner_class(name)
    config = found.config_class.model_validate({"name": name, **(settings or {})})
    return found(backbone, config, num_tasks=num_tasks)
