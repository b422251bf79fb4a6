"""A run: its directory, going on, its result, and what is done with a finished one."""
