"""Runs: their directories, resuming, results, and what is done with finished ones."""
