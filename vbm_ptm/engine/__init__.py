"""The training loop of all learners and what it needs; the only layer that uses Accelerate."""
