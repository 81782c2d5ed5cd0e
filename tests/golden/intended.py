"""What differs from the committed record on purpose."""

_SEQUENTIAL = "sequential tests are deleted, and the number of items needed; a comparison is one table"
INTENDED: dict[str, str] = {
    "commands/help/*": "help says what an option takes; arguments have names; options are deleted",
    "commands/checkpoint/inspect": "a part of a tensor is called chunk everywhere",
    "commands/report/keys": "--to-loss is deleted",
    "errors/resumed/[ms]*": "the message says to resume with the values in the checkpoint",
    "errors/command/plan-hardware": "it names the file of nodes, which has moved",
    "eval/*/items*": "items have the texts of their question and options",
    "eval/*/result": "the hash of the items differs, because items have texts",
    "eval/compare": _SEQUENTIAL,
    "eval/compare/compare.*": _SEQUENTIAL,
    "commands/dry-run/*": "overlays of NVIDIA's devices compile; LLM Foundry's callbacks are keys",
    "commands/config.yaml": "LLM Foundry's callbacks and names, alerts, console_format, ports and stragglers are keys",
    "commands/rehearse": "the overlay compiles",
    "commands/plan/*": "a dimension has one name; days are said to be of steps, saves and failures",
    "commands/init/*": "intervals, the launch and the log follow the length of the run; comments are rewritten",
    "data/*/files": "val/text.jsonl is written",
    "data/*/summary": "the request says how samples are packed, and which readers of one's own there are",
    "errors/command/eval-no*": "a run's own text is a task; fetching is a script",
    "errors/command/init-size": "other sizes are taken",
    "runs/bf16/*": "angles of RoPE stay fp32 where FSDP2 computes in 16 bits, as on one device",
    "errors/damaged/*/ls": "files that are missing or cut off are named",
    "errors/damaged/*/verify": "every checkpoint of a folder is verified",
    "commands/checkpoint/verify": "every checkpoint of a folder is verified",
    "commands/status.json": "status.json says what is saved, and why a save failed",
    "errors/key/overlay=*": "messages are rewritten",
    "errors/key/loggers.neptune*": "a logger of one's own is named by its import path",
    "errors/command/plan-per-node": "messages are rewritten",
}
"""Pattern of keys, as `fnmatch` has them -> why. Emptied when the record is made anew."""
