"""The fixtures of tests/small_runs.py."""

from small_runs import *  # noqa: F403
