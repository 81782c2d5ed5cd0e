"""Evaluation of language models: tasks of questions, and held-out text, asked of a model and reduced to scores.

An item is one question, or one window of a text. A request is the token ids of one option of an item, whose
log-probability the model is asked for. Read the files in the order in which an item passes through them:

1. Render. `task_files.py` reads a task's rows, and `prompts.py` turns a row into the texts of its prompt.
2. Tokenise. `encoding.py` turns a prompt into a `Request` of token ids. `tasks.py` does both steps for every row and
   returns a `PreparedTask`. `documents.py` is its counterpart for held-out text. `items.py` defines these classes.
3. Forward. `packing.py` puts the requests of many items into batches, and `scoring.py` runs the model on a batch.
4. Score. `scoring.py` also adds up the log-probabilities of the answer's tokens, for each request.
5. Reduce. `summaries.py` turns the scores of an item into its record, and the items' records into the task's record,
   which has the mean of each metric and its standard error. `means.py` has the formulas, and `records.py` the JSON
   schema of both records. `token_texts.py` adds an item's prompt, token by token, where that is asked for.
6. Record. `results.py` reads the result files of a model, and `result_files.py` writes them.

`harness.py` runs these steps for all tasks of one model, on all ranks, and also generates answers. `models.py` finds
and loads models, and `suite.py` evaluates each model of a configuration. `show.py` prints prompts instead. `loaded.py`
is a model for use in programs.

Results of several models meet in `compare.py`, which computes their differences with the tests of `significance.py`,
after `same_questions.py` has checked that they can be compared, and `common_items.py` has paired their items.
`pairs.py` holds and prints these comparisons, and `changed_items.py` the items behind them. `tables.py` prints a row of
scores for each model, and those of the Eval Gauntlet, which `gauntlet.py` computes.
"""
