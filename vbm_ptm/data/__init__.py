"""Data sets, their splits, transforms, scenarios and view batches.

Nothing is imported here: learners import ``data.scenario`` and must not pay for loading the data set libraries.
"""
