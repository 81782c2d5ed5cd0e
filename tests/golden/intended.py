"""What differs from the committed record on purpose."""

INTENDED: dict[str, str] = {
    "commands/help/bench*": "proofs and races moved to `python -m benchmarks`; each help begins with a verb",
    "commands/help/checkpoint*": "each help begins with a verb",
    "commands/help/top": "bench measures this machine alone; replay is new",
    "commands/help/replay": "new",
    "commands/help/data*": "`data show` is new",
    "commands/help/compare": "it reads logs of other tools, whose clusters --cluster names",
    "commands/help/report": "prompts of samples are words of the validation data",
    "commands/*/mpt-quickstart*": "its model is Llama-like, by Muon and exact sums, half the tokens",
    "commands/init/*": "the starter's precision is one that the machine is fast in; the warm-up is 0.05dur",
    "commands/of-a-run/report*": "texts of several batches stand side by side",
    "commands/doctor/checks": "gone: three checks of the clock, and leftovers in /dev/shm, which the next run removes",
    "errors/command/plan-hardware": "a new device also needs its node in plan/network.py",
    "errors/command/eval-type": "a task's key is named by its place, icl_tasks[0], as other keys of a task are",
    "errors/file/overlay-trains": "the keys of an overlay are listed in the order of the schema, where each now stands",
    "eval/compare": "the heading [interval] is no longer taken for a style and lost",
    "errors/damaged/cut/verify": "a size is said in plain words: has 1,000 bytes, expected 539,152",
    "data/*/said": "`data prepare` shows its table as every other command does",
}
"""Pattern of keys, as `fnmatch` has them -> why. Emptied when the record is made anew."""
