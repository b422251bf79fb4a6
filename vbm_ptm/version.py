"""The version of the package, which results and checkpoints record."""

__version__ = "0.1.0"
