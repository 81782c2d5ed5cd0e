"""Wrong configurations, files and commands: exit code and words."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.golden.lab import CASES, Lab, split
from tests.golden.runs import need_run


def jobs(lab: Lab) -> dict[str, Callable[[], dict[str, Any]]]:
    keys, half = CASES["keys"], len(CASES["keys"]) // 2
    return {
        "keys-1": lambda: {f"key/{key}": try_key(lab, key) for key in keys[:half]},
        "keys-2": lambda: {f"key/{key}": try_key(lab, key) for key in keys[half:]},
        "files": lambda: {f"file/{name}": try_file(lab, name, text) for name, text in CASES["files"].items()},
        "commands": lambda: try_commands(lab),
        "resumed": lambda: try_to_resume(lab),
        "damaged": lambda: {f"damaged/{key}": text for name in DAMAGE for key, text in try_damaged(lab, name)},
    }


def told(lab: Lab, *arguments: Any) -> str:
    """Exit code and stderr; of what succeeds, the notes alone."""
    said = lab.call(*arguments, timeout_seconds=180)
    return f"exit code {said.code}\n{said.err}" if said.code or said.err else f"exit code 0\n{notes(said.out)}"


def notes(text: str) -> str:
    return f"\n{text}".partition("\nrun  ")[2]


def try_key(lab: Lab, argument: str) -> str:
    lab.need_data()
    lab.need_yaml()
    return told(lab, "train", "base.yaml", argument, "--dry-run")


def try_file(lab: Lab, name: str, text: str) -> str:
    lab.need_yaml()
    (lab.folder / f"{name}.yaml").write_text(text)
    return told(lab, "train", "base.yaml", f"{name}.yaml", "--dry-run")


def try_commands(lab: Lab) -> dict[str, str]:
    need_run(lab, "fp32")
    wrong = lab.folder / "wrong"
    (wrong / "pickled").mkdir(parents=True)
    (wrong / "latin.txt").write_bytes("größer".encode("latin-1") * 9)
    (wrong / "bad.jsonl").write_text('{"text": "a"}\n{not json\n')
    (wrong / "pickled/config.json").write_text('{"model_type": "gpt2"}')
    (wrong / "pickled/pytorch_model.bin").write_bytes(b"PK\3\4")
    return {f"command/{name}": without_progress(told(lab, *split(line))) for name, line in CASES["commands"].items()}


def try_to_resume(lab: Lab) -> dict[str, str]:
    """Carry on `runs/fp32` from batch 4 to batch 5 with other words."""
    need_run(lab, "fp32")
    make_other_data(lab)
    found = {}
    for name, line in CASES["resumed"].items():
        lab.copy("runs/fp32", f"runs/again-{name}")
        found[f"resumed/{name}"] = carry_on(lab, f"runs/again-{name}", *split(line))
    return found


def carry_on(lab: Lab, folder: str, *changes: str) -> str:
    arguments = [f"run_folder={folder}", "fsdp_config.sharding_strategy=NO_SHARD", "save_interval=2ba"]
    arguments += ["autoresume=true", "max_duration=5ba", "run_name=fp32", "eval_interval=0"]
    return without_progress(str(lab.call("train", "base.yaml", *arguments, *changes)))


def make_other_data(lab: Lab) -> None:
    """`data2` lacks a shard of `data`; `data3` has another tokenizer."""
    other = lab.copy("data", "data2")
    index = json.loads((other / "train/index.json").read_text())
    (other / "train" / index["shards"].pop()["raw_data"]["basename"]).unlink()
    (other / "train/index.json").write_text(json.dumps(index))
    lab.check("data", "prepare", "text/a.jsonl", "--out", "data3", "--tokenizer", "train:500", "--max-seq-len", 64)


def without_progress(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("batch ")) + "\n"


# ---------------------------------------------------------------------------------------------- damaged checkpoints


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def newer(manifest: Path) -> None:
    """A format that no release knows yet, with the right checksum."""
    import xxhash

    inner = manifest.read_text().split('"manifest":', 1)[1].rstrip("\n")[:-1].replace('"version":2', '"version":9', 1)
    digest = xxhash.xxh3_128_hexdigest(inner.encode())
    manifest.write_text(f'{{"checksum":"xxh3_128:{digest}","manifest":{inner}}}\n')


DAMAGE: dict[str, Callable[[Path], object]] = {
    "tensor": lambda folder: flip(folder / "ba4/shard-00000.safetensors", -50),
    "header": lambda folder: flip(folder / "ba4/shard-00000.safetensors", 20),
    "manifest": lambda folder: flip(folder / "ba4/manifest.json", 85),
    "cut": lambda folder: os.truncate(folder / "ba4/shard-00000.safetensors", 1000),
    "missing": lambda folder: (folder / "ba4/shard-00000.safetensors").unlink(),
    "newer": lambda folder: newer(folder / "ba4/manifest.json"),
    "all": lambda folder: [flip(folder / f"{name}/manifest.json", 85) for name in ("ba2", "ba4")],
    "gone": lambda folder: shutil.rmtree(folder / "ba2"),
}


def try_damaged(lab: Lab, name: str) -> list[tuple[str, str]]:
    need_run(lab, "fp32")
    folder = lab.copy("runs/fp32", f"runs/damaged-{name}")
    DAMAGE[name](folder / "checkpoints")
    where = f"runs/damaged-{name}"
    found = [(f"{name}/{verb}", str(lab.call("checkpoint", verb, where))) for verb in ("ls", "verify")]
    if name in ("tensor", "newer", "all"):
        found.append((f"{name}/train", carry_on(lab, where)))
    return found
