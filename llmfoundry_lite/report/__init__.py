"""Reports of runs: what a run leaves behind, turned into tables, figures, report.json and report.md.

Read the files in the order in which a report is made:

1. `log.py` parses metrics.jsonl into columns of numbers, and separates the batches that count from those that a later
   launch trained again. `reading.py` finds a run's files, behind a URL too, and returns a `Run`.
2. `segments.py` computes hardware, speed, energy and cost of each span of batches on one kind of hardware.
3. `report.py` is the command `report`. It reads the runs, computes their facts and comparisons, and writes the files.
   `data_facts.py` measures the data of a run, and `sample_texts.py` lets its model write texts.
4. `page.py` turns the facts into sections of tables and lines, for the terminal and for Markdown. `figure.py` draws
   them. `canvas.py` has the settings of matplotlib, and creates and saves figures.

Two files serve other commands. `difference_figure.py` draws the figure of `compare`. `batch.py` is for `data show`: it
reads the rows of a batch again, and computes their losses.

Only `batch.py` imports torch. `sample_texts.py` imports it only if there is a model to write texts.
"""
