"""Evaluation of language models. The files, in the order in which an item passes through them:

items.py        a request, an item, a prepared task
task_files.py   a file -> rows
prompts.py      rows -> prompts
encoding.py     prompts -> token ids
tasks.py        the three above for each item of a task
documents.py    held-out text -> windows of token ids
packing.py      requests -> prefix trees -> batches
scoring.py      a batch -> log-probabilities
records.py      log-probabilities -> an item, items -> a task's record; the schema of both
harness.py      the above for each task, on all ranks, and answers that a model writes; loaded.py: for programs
results.py      records <-> files
suite.py        the above for each model (models.py)
compare.py      two results -> differences, pairs.py; significance.py: tests and intervals
tables.py       records -> tables of results and of the gauntlet
"""
