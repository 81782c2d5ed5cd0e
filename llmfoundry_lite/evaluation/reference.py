"""A stored result as reference: an evaluation against it asks a task's items until their difference is decided."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.compare import has_other_tokenizer, look_until_decided, main_metric, refuse_if_different
from llmfoundry_lite.evaluation.records import Record, asked_of, num_unasked
from llmfoundry_lite.evaluation.results import Outline, Results, differences, load_results
from llmfoundry_lite.evaluation.sequential import (
    Plan,
    Rule,
    describe_plan,
    noun_of,
    plan_task,
    to_record,
    unit_of,
    unit_of_record,
)
from llmfoundry_lite.evaluation.tasks import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A stored result, and the rule by which a task has been asked enough."""

    results: Results
    rule: Rule

    def refuse(self, task: Prepared, results: Results) -> None:
        """Raise DataError if the stored task was asked otherwise, now that the tokenizer is known."""
        refuse_if_different(task.name, self.results, _as_asked(task, results), "icl_tasks")

    def plan(self, name: str, units: Sequence[str]) -> Plan:
        noun = noun_of(self.results.items[name], self.results.tasks[name]["metric"])
        return plan_task(name, noun, units, self.rule)

    def describe_plan(self, task: Prepared) -> Record:
        """Return what the record of a task finished against this very reference says."""
        return describe_plan(self.plan(task.name, units_of(task)), self.results, task.name)


def units_of(task: Prepared) -> list[str]:
    return [unit_of(item.index, item.cluster) for item in task.items]


def load_reference(path: Path, rule: Rule, asked: Sequence[Outline], written: Sequence[Path]) -> Reference:
    """Load a reference, and check all that can be known before a model is loaded. Raises DataError.

    `written` are this evaluation's own files.
    """
    if path.resolve() in (file.resolve() for file in written):
        raise DataError(
            f"against: {path} is where this evaluation is written to; name the model otherwise, models.NAME=…, or "
            "choose another results_folder"
        )
    (stored,) = load_results([path])
    reference = Reference(results=stored, rule=rule)
    for task in asked:
        record = stored.tasks.get(task.name)
        if record is None:
            raise DataError(
                f"against: {path} has no {task.name}; it has {', '.join(stored.items)}: ask for these in icl_tasks"
            )
        if num_unasked(record):
            raise DataError(
                f"against: {task.name} of {path} is sequential, {record['n']:,} of "
                f"{record['sequential']['num_items']:,} items asked; evaluate it whole first, without against"
            )
        if differs := differences(record, task):
            raise DataError(f"against: {path} has {task.name} with {'; '.join(differs)} asked for now")
        reference.plan(task.name, list(map(unit_of_record, stored.items[task.name])))  # or there are too few
    return reference


def ask_until_decided(
    task: Prepared, reference: Reference, results: Results, ask: Callable[[Prepared, int], list[Record]]
) -> tuple[Prepared, list[Record], Record]:
    """Return (the task with the items that were asked, a record for each, what to say under `sequential`).

    `ask(part, num_before)` asks a part of the task, after so many items. All ranks must call this, and decide alike.
    """
    stored, found = reference.results, dict[int, Record]()
    units = units_of(task)

    def answer(wanted: Sequence[str]) -> list[Record]:
        chosen = set(wanted)
        places = [place for place, unit in enumerate(units) if unit in chosen and place not in found]
        part = replace(task, items=tuple(task.items[place] for place in places))
        found.update(zip(places, ask(part, len(found)), strict=True))
        return [found[place] for place in sorted(found)]

    now = _as_asked(task, results)
    metric = main_metric(stored, task.name, has_other_tokenizer(stored, now))
    plan = reference.plan(task.name, units)
    stage, decision = look_until_decided(plan, task.name, stored, now, metric, units, answer)
    items = tuple(task.items[place] for place in sorted(found))
    answers = [found[place] for place in sorted(found)]
    return replace(task, items=items), answers, to_record(stage, stored, task.name, decision)


def _as_asked(task: Prepared, results: Results) -> Results:
    """Return the evaluation as a result without answers, to be compared before anything is asked."""
    sizes = [
        {"index": item.index, "log_probability": [0.0], "num_characters": [item.requests[0].num_characters]}
        | ({} if item.cluster is None else {"cluster": item.cluster})
        for item in task.items
    ]
    return replace(results, name=results.model, tasks={task.name: asked_of(task)}, items={task.name: sizes})
