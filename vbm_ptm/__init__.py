"""Class- and domain-incremental learning on pre-trained vision transformers, with the view-batch model."""

__version__ = "0.1.0"
