"""LLM Foundry's Eval Gauntlet: scores of tasks, put together into categories and averages.

A task's score is its accuracy, less what chance gives, over what is left above chance: (a - b) / (1 - b). A category is
the weighted mean of its tasks; an average is the mean of its categories. As in LLM Foundry, a category that lacks a
task is left out, and so is an average without categories.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llmfoundry_lite.config.eval_schema import Benchmark, GauntletConfig
from llmfoundry_lite.evaluation.records import ACCURACIES, Record, error_of_sum, num_unasked


class Composite(NamedTuple):
    score: float
    error: float
    """Standard error; tasks on the same data are taken to err together, others on their own."""


class Gauntlet(NamedTuple):
    scores: dict[str, Composite]
    """Of categories, then of averages."""
    missing: dict[str, list[str]]
    """Category -> the tasks for want of which it is left out."""


class _Part(NamedTuple):
    weight: float
    score: float
    error: float
    data: str


def run_gauntlet(config: GauntletConfig, tasks: Mapping[str, Record]) -> Gauntlet:
    """Score a model's results: `tasks` has `arc_easy/3-shot` -> its record."""
    parts: dict[str, list[_Part]] = {}
    missing: dict[str, list[str]] = {}
    for category in config.categories:
        names = [benchmark.task for benchmark in category.benchmarks]
        if absent := [name for name in names if not _is_accuracy(tasks.get(name))]:
            missing[category.name] = absent
            continue
        found = [_part(config, benchmark, tasks[benchmark.task]) for benchmark in category.benchmarks]
        total = sum(part.weight for part in found)
        parts[category.name] = [part._replace(weight=part.weight / total) for part in found]
    scores = {name: _put_together(found) for name, found in parts.items()}
    for name, categories in averages_of(config).items():
        there = [category for category in parts if category in categories]
        if there:
            scores[name] = _put_together(
                [part._replace(weight=part.weight / len(there)) for category in there for part in parts[category]]
            )
    return Gauntlet(scores, missing)


def averages_of(config: GauntletConfig) -> dict[str, list[str]]:
    return config.averages or {"default_average": [category.name for category in config.categories]}


def _is_accuracy(record: Record | None) -> bool:
    """Exclude a task that stopped when it was decided: its accuracy leans to the verdict."""
    return record is not None and record["metric"] in ACCURACIES and not num_unasked(record)


def _part(config: GauntletConfig, benchmark: Benchmark, record: Record) -> _Part:
    chance = benchmark.random_baseline if config.subtract_random_baseline else 0.0
    scale = 1.0 / (1.0 - benchmark.random_baseline) if config.rescale_accuracy else 1.0
    error = record.get(f"{record['metric']}_stderr", 0.0)
    weight = {"EQUAL": 1.0, "SAMPLE_SZ": record["n"], "LOG_SAMPLE_SZ": max(math.log2(record["n"]), 1.0)}
    score = (record[record["metric"]] - chance) * scale
    return _Part(weight[config.weighting], score, error * scale, record["data_fingerprint"])


def _put_together(parts: Sequence[_Part]) -> Composite:
    error = error_of_sum([(part.data, part.weight * part.error) for part in parts])
    return Composite(sum(part.weight * part.score for part in parts), error)
