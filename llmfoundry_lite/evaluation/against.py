"""A stored result that an evaluation is asked against: items come in their random order, and a task ends when its
difference to the stored one is decided.

Owns what such an evaluation refuses, and the loop over the looks. The rule and the order are `sequential`'s, what the
items say is `compare`'s, and how they are asked is the caller's. No torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.comparable import has_other_tokenizer, refuse_if_different
from llmfoundry_lite.evaluation.compare import decide, main_metric
from llmfoundry_lite.evaluation.reading import Loaded, Record, load_results, num_unasked
from llmfoundry_lite.evaluation.results import Outline, Results, differences
from llmfoundry_lite.evaluation.sequential import (
    Plan,
    Rule,
    Stage,
    cut_to,
    in_order,
    noun_of,
    plan_task,
    to_record,
    unit_of,
    unit_of_record,
)
from llmfoundry_lite.evaluation.tasks import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """The stored result, and when a task has been asked enough."""

    reference: Loaded
    rule: Rule

    def refuse(self, task: Prepared, results: Results) -> None:
        """Raises DataError where the stored task was asked otherwise, now that the tokenizer is known."""
        refuse_if_different(task.name, self.reference, _asked_now(task, results), "icl_tasks")
        stored = {item["index"]: item.get("cluster") for item in self.reference.items[task.name]}
        if any(stored.get(item.index, item.cluster) != item.cluster for item in task.items):
            raise DataError(
                f"against: {task.name} of {self.reference.path} does not say which items repeat another: it is of an "
                "earlier release; evaluate it again with redo=true"
            )

    def plan(self, task: Prepared) -> Plan:
        units = [unit_of(item.index, item.cluster) for item in task.items]
        return plan_task(task.name, self._noun(task.name), units, self.rule)

    def plan_stored(self, name: str) -> Plan:
        """From the stored items, before there is a tokenizer."""
        units = [unit_of_record(item) for item in self.reference.items[name]]
        return plan_task(name, self._noun(name), units, self.rule)

    def _noun(self, name: str) -> str:
        return noun_of(self.reference.items[name], self.reference.facts["tasks"][name]["metric"])

    def told(self, name: str, plan: Plan) -> Record:
        """What a finished task must say to be this very comparison's."""
        record = to_record(Stage(plan=plan, look=0, num_asked=0), self.reference, name, "")
        return {key: value for key, value in record.items() if key not in ("against", "look", "decision")}


def load_against(path: Path, rule: Rule, asked: Sequence[Outline], written: Sequence[Path]) -> Against:
    """Checks everything that can be known before a model is loaded. `written` are this evaluation's own files. Raises
    DataError."""
    if path.resolve() in (file.resolve() for file in written):
        raise DataError(
            f"against: {path} is where this evaluation is written to; name the model otherwise, models.NAME=…, or "
            "choose another results_folder"
        )
    (reference,) = load_results([path])
    found = Against(reference=reference, rule=rule)
    for task in asked:
        record = reference.facts["tasks"].get(task.name)
        if record is None:
            raise DataError(
                f"against: {path} has no {task.name}; it has {', '.join(reference.items)}: ask for these in icl_tasks"
            )
        if num_unasked(record):
            raise DataError(
                f"against: {task.name} of {path} is sequential, {record['n']:,} of "
                f"{record['sequential']['num_items']:,} items asked; evaluate it whole first, without against"
            )
        if "items_hash" not in record:
            raise DataError(
                f"against: {task.name} of {path} is of an earlier release; evaluate it again with redo=true"
            )
        if differs := differences(record, task):
            raise DataError(f"against: {path} has {task.name} with {'; '.join(differs)} asked for now")
        found.plan_stored(task.name)  # or there are too few
    return found


def ask_until_decided(
    task: Prepared, against: Against, results: Results, ask: Callable[[Prepared, int], list[Record]]
) -> tuple[Prepared, list[Record], Record]:
    """(the task with the items that were asked, a record for each, what to say under `sequential`)

    `ask(part, num_before)` asks a part of the task, after so many items. Every rank must call this, and decides alike:
    all have all answers.
    """
    plan, reference = against.plan(task), against.reference
    units = in_order([unit_of(item.index, item.cluster) for item in task.items])
    now = _asked_now(task, results)
    metric = main_metric(reference, task.name, has_other_tokenizer(reference, now))
    found: dict[int, Record] = {}
    look, decision = 0, ""
    while not decision and look < len(plan.looks):
        asked = set(units[: plan.looks[look]])
        look += 1
        places = [
            place
            for place, item in enumerate(task.items)
            if place not in found and unit_of(item.index, item.cluster) in asked
        ]
        answers = ask(replace(task, items=tuple(task.items[place] for place in places)), len(found))
        found |= dict(zip(places, answers, strict=True))
        ours = replace(now, items={task.name: [found[place] for place in sorted(found)]})
        stored = cut_to(reference, task.name, list(asked))
        decision = decide(plan, look, task.name, stored, ours, metric, reference)
    places = sorted(found)
    stage = Stage(plan=plan, look=look, num_asked=len(places))
    return (
        replace(task, items=tuple(task.items[place] for place in places)),
        [found[place] for place in places],
        to_record(stage, reference, task.name, decision),
    )


def _asked_now(task: Prepared, results: Results) -> Loaded:
    """The evaluation as a result without answers: what can be compared of it beforehand."""
    record = {
        "type": task.kind,
        "n": len(task.items),
        "num_fewshot": task.num_fewshot,
        "tokenization": task.config.tokenization,
        "metric": task.metric,
        "fingerprint": task.fingerprint,
        "data_fingerprint": task.data_fingerprint,
        "settings": task.settings,
    }
    sizes = [
        {"index": item.index, "log_probability": [0.0], "num_characters": [item.requests[0].num_characters]}
        | ({} if item.cluster is None else {"cluster": item.cluster})
        for item in task.items
    ]
    facts = {"model": results.model, "tokenizer": results.tokenizer, "tasks": {task.name: record}}
    return Loaded(name=results.model, path=Path(results.model), facts=facts, items={task.name: sizes})
