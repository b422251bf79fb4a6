"""What to type where a command was refused: the layers below state facts and settings, and know no options."""

from __future__ import annotations

from collections.abc import Mapping

from vbm_ptm.errors import Advice, UsageError, advice_of

WHAT_TO_TYPE: Mapping[Advice, str] = {
    "learner": "Use --learner NAME ('vbm-ptm list learners' shows them).",
    "dataset": "Use --dataset NAME ('vbm-ptm list datasets' shows them), a folder or a parquet file.",
    "backbone": "'vbm-ptm list backbones' shows the vision transformers that take prompts.",
    "resume": "Give its own command again, with --resume.",
    "resume_or_output": "Go on with it by --resume, or give another --output.",
    "stored_settings": "Give the stored settings by --config, or another --output.",
    "skip_damaged": (
        "To go on from the checkpoint before it, give --skip-damaged (to train: --resume --skip-damaged); "
        "to start anew, give another --output."
    ),
    "more_data": "If these are more images of what was learned, give --more-data.",
    "extend": "'vbm-ptm extend' sets both.",
}


def with_advice(problem: str) -> str:
    """Return a message, and behind it what to type, where it asks for that."""
    advice = advice_of(problem)
    return problem if advice is None else f"{problem} {WHAT_TO_TYPE[advice]}"


def messages(error: UsageError) -> list[str]:
    """Return what is wrong, one message each, with what to type."""
    return [with_advice(problem) for problem in error.problems]
