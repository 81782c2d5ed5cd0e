"""Prepared data: shards, summary and tokenizer, of every form of input."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.golden.lab import CASES, Lab, digest, split


def need_forms(lab: Lab) -> None:
    lab.need_data()
    lab.once("forms", lambda: write_forms(lab.folder / "forms", lab.documents))


def write_forms(folder: Path, documents: list[str]) -> None:
    import datasets

    folder.mkdir()
    rows = [{"meta": {"title": f"title {i}"}, "body": document} for i, document in enumerate(documents[:150])]
    (folder / "nested.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "latin.txt").write_bytes(("\n".join(["déjà vu, größer"] * 400)).encode("latin-1"))
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "body"], *enumerate(documents[:150])])
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": documents[:150]}).save_to_disk(str(folder / "saved"))
    lines = [json.dumps({"text": document}) for document in documents[:150]]
    (folder / "bad.jsonl").write_text("\n".join([*lines[:80], "{not json", '{"other": 1}', '{"text": 3}', *lines[80:]]))


def jobs(lab: Lab) -> dict[str, Callable[[], dict[str, Any]]]:
    made = {name: lambda name=name: record_prepared(lab, name) for name in CASES["prepared"]}
    return {**made, "make-tasks": lambda: record_tasks(lab)}


def record_prepared(lab: Lab, name: str) -> dict[str, Any]:
    need_forms(lab)
    said = lab.check("data", "prepare", *split(CASES["prepared"][name]), "--out", f"prepared/{name}")
    folder = lab.folder / "prepared" / name
    summary = json.loads((folder / "summary.json").read_text())
    for passing in ("seconds", "documents_per_second", "text_bytes_per_second"):
        summary.pop(passing, None)
    summary["request"].pop("input", None)  # a digest of paths and times
    return {
        f"{name}/said": without_rates(str(said)),
        f"{name}/summary": json.dumps(summary, indent=1),
        f"{name}/files": digests(folder, leave_out=("summary.json",)),
    }


def without_rates(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if "documents/s" not in line and "━━━━ " not in line) + "\n"


def digests(folder: Path, leave_out: tuple[str, ...] = ()) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in leave_out)
    return {str(path.relative_to(folder)): digest(path.read_bytes()) for path in paths}


def record_tasks(lab: Lab) -> dict[str, Any]:
    said = lab.check("make_tasks.py", "--out", "made-tasks")
    return {"make-tasks/said": str(said), "make-tasks/files": digests(lab.folder / "made-tasks")}
