"""Launches of several ranks by the core's own commands, `eval -n` and `replay -n`.

Read `ranks.py` first, which starts ranks and waits for them, by `composer_launcher.py`. `replay.py` plans a replay, and
compares its outcome with the run.
"""
