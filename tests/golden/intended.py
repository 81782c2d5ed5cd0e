"""What differs from the committed record on purpose."""

_SEQUENTIAL = "sequential tests are deleted, and the number of items needed; a comparison is one table"
INTENDED: dict[str, str] = {
    "commands/help/compare": "sequential tests and published results are deleted",
    "commands/help/doctor": "--verified is scripts/gpu_check.py's",
    "commands/help/eval": "against= was for sequential tests",
    "commands/help/report": "--to-loss is deleted",
    "commands/help/top": "commands of companions stand after the core's",
    "commands/checkpoint/inspect": "a part of a tensor is called chunk everywhere",
    "commands/report/keys": "--to-loss is deleted",
    "errors/command/plan-hardware": "it names the file of nodes, which has moved",
    "eval/compare": _SEQUENTIAL,
    "eval/compare/compare.*": _SEQUENTIAL,
}
"""Pattern of keys, as `fnmatch` has them -> why. Emptied when the record is made anew."""
