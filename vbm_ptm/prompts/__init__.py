"""Prompt modules: from a query and a task to tokens or prefixes; they know neither backbones nor learners."""
