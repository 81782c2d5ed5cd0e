"""Scores in LLM Foundry's Eval Gauntlet: categories of tasks, and averages of categories.

`run_gauntlet` computes a model's scores, and `divide_gauntlet` tells how much each task adds to them. `tables.py` makes
a table of them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llmfoundry_lite.config.eval_schema import Benchmark, Category, GauntletConfig
from llmfoundry_lite.evaluation.means import error_of_sum
from llmfoundry_lite.evaluation.records import Record, is_accuracy, score_of


class Composite(NamedTuple):
    """The score of a category or an average in a gauntlet, with its standard error."""

    score: float
    error: float


class Gauntlet(NamedTuple):
    """A model's scores in a gauntlet."""

    scores: dict[str, Composite]
    """Name of a category or an average -> its score. Categories come first."""
    missing: dict[str, list[str]]
    """Category that is left out -> the tasks that the model lacks."""


class Part(NamedTuple):
    """A task's part in the score of its category."""

    task: str
    weight: float
    """Weights of a category's parts add up to 1."""
    baseline: float
    """Accuracy whose score is 0."""
    scale: float
    """Number that an accuracy of 1 above the baseline adds to the score."""


class DividedGauntlet(NamedTuple):
    """A gauntlet's categories and averages, divided into the parts of a model's tasks."""

    categories_of_score: dict[str, list[list[Part]]]
    """Name of a category or an average -> the parts of each of its categories. Categories come first, each as an
    average of itself alone."""
    missing: dict[str, list[str]]
    """Category that is left out -> the tasks that the model lacks."""


def run_gauntlet(config: GauntletConfig, tasks: Mapping[str, Record]) -> Gauntlet:
    """Compute a model's scores in a gauntlet.

    config: the categories with their tasks, the averages, and how tasks are weighted and rescaled.
    tasks: the model's records by task, such as "arc_easy/3-shot".

    A task's score is its accuracy a above the baseline b of guessing, relative to the best possible: (a - b) / (1 - b).
    With baseline 0.25, accuracy 0.7 has the score 0.6. A category is the weighted mean of its tasks, and an average is
    the mean of its categories. As in LLM Foundry, a category is left out if the model lacks one of its tasks, and an
    average if none of its categories is left.
    """
    divided = divide_gauntlet(config, tasks)
    scores = {name: _mean_of_categories(categories, tasks) for name, categories in divided.categories_of_score.items()}
    return Gauntlet(scores, divided.missing)


def divide_gauntlet(config: GauntletConfig, tasks: Mapping[str, Record]) -> DividedGauntlet:
    """Divide a gauntlet's categories and averages into the parts of a model's tasks. See `run_gauntlet`."""
    # Collect the tasks' parts in the score of each category that the model has.
    parts_of_category: dict[str, list[Part]] = {}
    missing: dict[str, list[str]] = {}
    for category in config.categories:
        missing_tasks = _missing_tasks(category, tasks)
        if missing_tasks:
            missing[category.name] = missing_tasks
        else:
            parts_of_category[category.name] = _parts_of(config, category, tasks)

    # A category is treated as an average of itself alone.
    names_of_score = {category: [category] for category in parts_of_category} | averages_of(config)
    categories_of_score: dict[str, list[list[Part]]] = {}
    for name, categories in names_of_score.items():
        present_parts = [parts for category, parts in parts_of_category.items() if category in categories]
        if present_parts:
            categories_of_score[name] = present_parts
    return DividedGauntlet(categories_of_score, missing)


def averages_of(config: GauntletConfig) -> dict[str, list[str]]:
    """Return the averages of a gauntlet, each with the names of its categories. The default is one over all."""
    if config.averages is None:
        return {"default_average": [category.name for category in config.categories]}
    return config.averages


def _missing_tasks(category: Category, tasks: Mapping[str, Record]) -> list[str]:
    """Return the tasks of a category for which a model has no accuracy. `tasks` has the model's records."""
    missing: list[str] = []
    for benchmark in category.benchmarks:
        record = tasks.get(benchmark.task)
        if record is None or not is_accuracy(record):
            missing.append(benchmark.task)
    return missing


def _parts_of(config: GauntletConfig, category: Category, tasks: Mapping[str, Record]) -> list[Part]:
    """Return the part of each task in a category's score, with weights that add up to 1."""
    parts = [_part_of(config, benchmark, tasks[benchmark.task]) for benchmark in category.benchmarks]
    total_weight = sum(part.weight for part in parts)
    return [part._replace(weight=part.weight / total_weight) for part in parts]


def _part_of(config: GauntletConfig, benchmark: Benchmark, record: Record) -> Part:
    """Return a task's part in its category's score, with a weight that is not normalised yet.

    The score is the task's accuracy, less the baseline of guessing and rescaled, as far as the configuration asks for
    it. The weight is 1, the number of items, or its logarithm.
    """
    # Subtracting the baseline makes guessing 0, and rescaling makes a perfect score 1.
    baseline = benchmark.random_baseline if config.subtract_random_baseline else 0.0
    scale = 1.0 / (1.0 - benchmark.random_baseline) if config.rescale_accuracy else 1.0

    # The names are LLM Foundry's.
    num_items = record["n"]
    weights = {"EQUAL": 1.0, "SAMPLE_SZ": num_items, "LOG_SAMPLE_SZ": max(math.log2(num_items), 1.0)}
    return Part(benchmark.task, weights[config.weighting], baseline, scale)


def _mean_of_categories(categories: Sequence[Sequence[Part]], tasks: Mapping[str, Record]) -> Composite:
    """Return the mean of several categories' scores, with its standard error.

    Each category is given as the parts of its tasks, whose weights add up to 1. Categories count equally.
    """
    total = 0.0
    errors: list[tuple[str, float]] = []
    for part in (part for category in categories for part in category):
        record = tasks[part.task]
        score, error = score_of(record)
        total += part.weight * ((score - part.baseline) * part.scale)
        errors.append((record["data_fingerprint"], part.weight * ((error or 0.0) * part.scale)))

    # The errors of tasks on the same data add up, also between categories.
    return Composite(total / len(categories), error_of_sum(errors) / len(categories))
