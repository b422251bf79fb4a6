"""The command line: thin, and without heavy imports until a command needs them.

application   all commands by name, and what a failure looks like
advice        what to type where a command was refused
options       options that several commands share
training      train
studies       study
finished      evaluate, predict, export, extend, diff: what is done with a run
inspection    list, check, split: what is looked up, or settled, before one
printing      tables and JSON on standard output
streams       standard output and error that may be lost
"""

from vbm_ptm.cli.application import main, run_application

__all__ = ["main", "run_application"]
