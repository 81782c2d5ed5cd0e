"""The owner of each recorded key: the core, or the companion that brings the command, block or key that it shows."""

import fnmatch
import json
import re
from pathlib import Path
from typing import Any

from llmfoundry_lite.companions import PACKAGES, TABLES
from tests.golden.lab import CASES, split

RECORD: dict[str, Any] = json.loads(Path(__file__).with_name("record.json").read_text())
CORE = "core"
OWNERS = (CORE, *PACKAGES)
LISTS = {**TABLES["commands"], **TABLES["blocks"]}
"""Command or block -> the companion that brings it. The core's help and its configurations list them."""
SETTINGS = (
    "tp_config.tensor_parallel_degree",
    "cp_config.context_parallel_degree",
    "pp_config.pipeline_parallel_degree",
    "fsdp_config.sharding_strategy: ZERO_1",
)
"""Settings for which a run needs `llmfoundry_layouts`."""
BRINGS = LISTS | dict.fromkeys(SETTINGS, "llmfoundry_layouts")
"""Word of a key -> the companion that the key needs."""
LINES = {"runs": CASES["runs"], "errors/command": CASES["commands"], "errors/resumed": CASES["resumed"]}
"""Beginning of keys -> arguments of the case that comes next in a key."""
BY_HAND = {
    "llmfoundry_formats": (
        *("data/csv*", "data/parquet*", "data/saved*", "data/zstd*", "data/*-worker*"),  # tables
        *("commands/checkpoint/*import*", "errors/command/import-pickle", "errors/command/compare-nowhere"),
    ),
    "llmfoundry_islands": ("errors/file/overlay-trains",),  # it lists the block
    "llmfoundry_layouts": ("commands/dry-run/*gb", "errors/key/pp_config={*"),  # overlays that divide; a degree of 1
    "llmfoundry_ops": ("commands/report/keys",),  # its additions to report.json
}
"""Companion -> patterns of keys that need it by files or words, and not by arguments."""
LISTED = re.compile(rf"^(  ({'|'.join(LISTS)})  .*|({'|'.join(LISTS)}): null)\n", re.M)
"""Lines that list a companion in the core's words: a command in the help, a block that a configuration lacks."""


def owner_of(key: str) -> str:
    """Return the owner of a key, or of a job whose keys have one owner."""
    for owner, patterns in BY_HAND.items():
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns):
            return owner
    return next((BRINGS[name] for name in names_in(key) if name in BRINGS), CORE)


def owners_of(job: str) -> set[str]:
    """Return the owners of a job's keys, by the committed record."""
    part = job.partition("/")[0]
    return {owner_of(f"{part}/{key}") for key in RECORD["jobs"].get(job, ())} or {owner_of(job)}


def names_in(key: str) -> list[str]:
    """Return what may be words of `BRINGS`: words of a key and of its case, settings, and their first keys."""
    words = re.split("[/ ]", key)[1:]  # without the part: `runs` is a command, too
    for beginning, lines in LINES.items():
        if key.startswith(f"{beginning}/"):
            words += split(lines.get(key.removeprefix(f"{beginning}/").partition("/")[0], ""))
    keys = [word.partition("=")[0] for word in words]
    return [*words, *(word.replace("=", ": ") for word in words), *keys, *(key.partition(".")[0] for key in keys)]
