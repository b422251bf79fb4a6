"""What to type where a command was refused: the layers below state facts and settings, and know no options."""

from __future__ import annotations

from collections.abc import Mapping

from vbm_ptm.errors import Advice, UsageError, advice_of

WHAT_TO_TYPE: Mapping[Advice, str] = {
    "learner": "Use --learner NAME ('vbm-ptm list learners' shows them).",
    "dataset": "Use --dataset NAME ('vbm-ptm list datasets' shows them), a folder or a parquet file.",
    "backbone": "'vbm-ptm list backbones' shows the vision transformers that take prompts.",
    "resume": "Repeat its own command with --resume.",
    "resume_or_output": "Continue it with --resume, or give another --output.",
    "stored_settings": "Give the stored settings with --config, or another --output.",
    "skip_damaged": (
        "To continue from the checkpoint before it, give --skip-damaged (to train: --resume --skip-damaged); "
        "to start a new run, give another --output."
    ),
    "more_data": "If these are more images of known classes, give --more-data.",
    "extend": "'vbm-ptm extend' sets both.",
}


def with_advice(problem: str) -> str:
    """Return a message, and behind it what to type, where it asks for that."""
    advice = advice_of(problem)
    return problem if advice is None else f"{problem} {WHAT_TO_TYPE[advice]}"


def messages(error: UsageError) -> list[str]:
    """Return what is wrong, one message each, with what to type."""
    return [with_advice(problem) for problem in error.problems]
