"""The command line `llmfoundry-lite`: one file for each group of commands.

Read `main.py` first, which assembles the commands and turns errors into exit codes. `run.py` has the commands that run
a model, `data.py` and `checkpoint.py` have groups of commands, `results.py` has `report` and `compare`, and
`listing.py` has `list`. `options.py` checks options before any work, and `examples.py` formats the help.
"""
