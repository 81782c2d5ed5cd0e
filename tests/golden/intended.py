"""What differs from the committed record on purpose."""

INTENDED: dict[str, str] = {
    "commands/help/*": "each ends with an example and begins with a verb; new: list, replay, data show, init --like",
    "commands/plan/*": "the line on the choice says how the layouts stand",
    "commands/dry-run/mpt-*[0-9][bm]": "lines on start, data, precision, optimizer, saves and logs are new",
    "commands/dry-run/mpt-1t": "a trillion parameters are new",
    "errors/key/--dry*": "a dry run has more lines; --dry-run=full is new",
    "errors/key/max_duration=4": "a dry run has more lines; --dry-run=full is new",
    "errors/key/fsdp_config.limit_all_gathers=true": "a dry run has more lines; --dry-run=full is new",
    "errors/key/save_folder=ftp*": "a dry run has more lines; --dry-run=full is new",
    "errors/key/tokenizer.name=nobody*": "a dry run has more lines; --dry-run=full is new",
    "errors/key/train_loader.dataset.local=nowhere": "a dry run has more lines; --dry-run=full is new",
    "errors/key/train_loader.dataset.split=test": "a dry run has more lines; --dry-run=full is new",
    "commands/of-a-run/config.yaml": "attn_config.head_dim, attn_config.qkv_bias and dataset.stages are new",
    "commands/help/train": "--dry-run=full prints the YAML, --dry-run is short",
    "commands/*/mpt-quickstart*": "its model is Llama-like, by Muon and exact sums, half the tokens",
    "commands/init/*": "precision and ranks are of the machine; the whole shape of a size; the warm-up is 0.05dur",
    "errors/command/init-nowhere": "the folder is named as a source, not as the place to write into",
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
