"""An evaluation of fixed checkpoints on local tasks of every type, and what compares its results."""

import json
import random
from collections.abc import Callable
from typing import Any

import yaml

from tests.golden.lab import CASES, Lab, digest
from tests.golden.runs import need_run


def write_tasks(lab: Lab) -> None:
    chance = random.Random(1)
    words = ["one", "two", "etao", "shrd", "cmf", "wypv", "größer"]

    def some(count: int) -> str:
        return " ".join(chance.choices(words, k=count))

    rows = {
        "choice": [{"query": some(6), "choices": chance.sample(words, 3), "gold": i % 3} for i in range(12)],
        "lm": [{"context": some(6), "continuation": some(1)} for _ in range(8)],
        "schema": [
            {"context_options": chance.sample(words, 2), "continuation": some(3), "gold": i % 2} for i in range(8)
        ],
        "answers": [{"context": some(4), "answer": some(1), "aliases": [some(1)]} for _ in range(4)],
    }
    (lab.folder / "tasks").mkdir()
    for name, items in rows.items():
        (lab.folder / "tasks" / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (lab.folder / "suite.yaml").write_text(yaml.safe_dump(CASES["suite"], sort_keys=False))


def jobs(lab: Lab) -> dict[str, Callable[[], dict[str, Any]]]:
    return {"suite": lambda: record_suite(lab)}


def record_suite(lab: Lab) -> dict[str, Any]:
    models = CASES["models"]
    for name in models.values():
        need_run(lab, name)
    lab.once("tasks", lambda: write_tasks(lab))
    said = lab.check("eval", "suite.yaml", *(f"models.{name}=runs/{run}" for name, run in models.items()))
    results = lab.folder / "results/golden"
    found: dict[str, Any] = {"said": said.out, "table.md": lab.plain((results / "table.md").read_text())}
    found["table.csv"] = lab.plain((results / "table.csv").read_text())
    for name in models:
        result = json.loads((results / f"{name}.json").read_text())
        for task in result["tasks"].values():
            del task["seconds"], task["code"]
        found[f"{name}/result"] = lab.plain(json.dumps(result, indent=1))
        lines = (results / f"{name}.items.jsonl").read_text().splitlines()
        found[f"{name}/items"] = [line for line in lines if not line.startswith('{"task": "text')]
        found[f"{name}/items/digest"] = digest("\n".join(lines).encode())
    pair = [f"results/golden/{name}.json" for name in models]
    found["compare"] = str(lab.call("compare", *pair, "--out", "compared"))
    for path in sorted((lab.folder / "compared").iterdir()):
        if path.suffix in (".md", ".csv", ".json"):
            found[f"compare/{path.name}"] = lab.plain(path.read_text())
    asked = ("--prompt", "1: one", "--max-new-tokens", 12)
    found["generate"] = str(lab.call("generate", "runs/fp32", *asked, "--temperature", 0))
    found["generate/sampled"] = str(lab.call("generate", "runs/bf16", *asked, "--seed", 5))
    found["again"] = str(lab.call("eval", "suite.yaml", "models.ours=runs/bf16"))
    return found
