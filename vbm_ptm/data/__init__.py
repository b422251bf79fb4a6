"""Data sets, their splits, transforms, scenarios and view batches.

Nothing is imported here: learners read ``data.scenario`` and must not pay for the data set libraries.
"""
