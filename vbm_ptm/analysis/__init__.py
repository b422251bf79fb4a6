"""Why rest helps, in numbers and pictures: what a run's records say about remembering, forgetting and confusion.

Every module has functions that turn a run's records (``AccuracyMatrix``, ``TaskFacts``) into arrays, and functions that
draw them for several runs, by the label of a line: ``Lines``. Nothing here trains, reads files or writes them.
"""
