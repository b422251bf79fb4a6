"""What ``vbm-ptm check`` says before anything is trained: what is wrong, and what a run will cost."""
