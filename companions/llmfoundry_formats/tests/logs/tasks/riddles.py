"""Inspect's part of the logs: README.md has its command."""

# pyright: reportMissingImports=false

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes, match
from inspect_ai.solver import generate

ANIMALS = ["cat", "dog", "cow", "hen", "fox", "owl", "bee", "ant"]


@task
def riddles(shots: int = 0):
    rows = [
        Sample(id=f"riddle {i}", input=f"The {name} said", target="aeious"[i % 6], metadata={"passage": f"p{i // 2}"})
        for i, name in enumerate(ANIMALS)
    ]
    return Task(dataset=rows, solver=generate(), scorer=[includes(), match(location="any")])
