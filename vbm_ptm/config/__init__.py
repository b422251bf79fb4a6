"""The configuration of a run: a validated model, made from YAML files and settings."""
