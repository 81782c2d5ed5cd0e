"""Cost of reaching a validation loss on the same data: `llmfoundry-lite report A B --to-loss 2.5`.

Each run counts from batch 1 to the first batch after which its evaluation found the loss, or less. Nothing is
interpolated: the batch of the evaluation before, which found more, stands in the table. Time, energy and cost are
those of `segments.py`, so start-up and batches that were lost are not in them.

Runs are comparable whose batches have equal digests up to there, and whose validation differs in nothing that the
configuration says. A log has no digest of the validation data. Other differences, such as the model's, are listed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llmfoundry_lite.checkpoint.manifest import Segment
from llmfoundry_lite.config.changes import Change, find_changes
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.report.reading import Run
from llmfoundry_lite.report.segments import Facts, measure, total

VALIDATION_KEYS = ("eval_loader", "eval_subset_num_batches", "max_seq_len", "tokenizer")
"""Beginnings of keys that a validation loss depends on, besides the model."""


def measure_to_loss(runs: Sequence[Run], names: Sequence[str], loss: float, prices: Mapping[str, float]) -> Facts:
    """Return `loss`, facts of each run, and keys in which others differ from the first.

    Raises DataError for runs that are not comparable, and for a loss that none has reached.
    """
    for run, name in zip(runs, names, strict=True):
        check_whole(run, name, loss)
    facts = [reach(run, name, loss, prices) for run, name in zip(runs, names, strict=True)]
    if all(fact["batch"] is None for fact in facts):
        lowest = ", ".join(f"{fact['lowest']:.4f} in {fact['name']}" for fact in facts)
        raise DataError(f"--to-loss {loss:g}: no run has reached it; the lowest validation loss is {lowest}")
    differences = []
    for run, fact in zip(runs[1:], facts[1:], strict=True):
        until = min(one["batch"] or one["last_batch"] for one in (facts[0], fact))
        pair = f"--to-loss {loss:g}: {facts[0]['name']} and {fact['name']}"
        check_same_data(runs[0], run, until, pair)
        changes = find_differences(runs[0], run)
        check_same_validation(changes, pair)
        differences.append({"name": fact["name"], "keys": [str(change) for change in changes]})
    return {"loss": loss, "runs": facts, "differences": differences}


def reach(run: Run, name: str, loss: float, prices: Mapping[str, float]) -> Facts:
    """Return when a run reached the loss, and what it took; None for what is not known, or was not reached."""
    log, found = run.log, run.log.validation
    evaluated = np.flatnonzero(np.isfinite(found) & (log.batch > 0))
    reached = evaluated[found[evaluated] <= loss]
    at = int(reached[0]) if len(reached) else None
    before = evaluated[evaluated < at] if at is not None else evaluated
    batch = None if at is None else int(log.batch[at])
    parts = [measure(log, part, prices) for part in segments_until(run, batch)] if batch else []
    devices = [f"{part['num_devices'] or '?'} x {part['device'] or 'not known'}" for part in parts]
    return {
        "run": run.where,
        "name": name,
        "batch": batch,
        "last_batch": int(log.batch[-1]),
        "validation_loss": None if at is None else float(found[at]),
        "lowest": float(found[evaluated].min()),
        "batch_before": int(log.batch[before[-1]]) if len(before) else None,
        "devices": list(dict.fromkeys(devices)),
        **total(parts),
    }


def segments_until(run: Run, batch: int) -> list[Segment]:
    """Return where batches 1 to `batch` ran. Those since the newest save have no device."""
    parts = [
        replace(part, last_batch=min(part.last_batch, batch)) for part in run.segments if part.first_batch <= batch
    ]
    known = parts[-1].last_batch if parts else 0
    return parts if known == batch else [*parts, Segment(first_batch=known + 1, last_batch=batch)]


# ------------------------------------------------------------------------------------------------ what is refused


def check_whole(run: Run, name: str, loss: float) -> None:
    """Raise DataError unless the log has every batch from the first on, evaluations, and all devices."""
    batches, why = run.log.batch[run.log.batch > 0], None
    if not np.isfinite(run.log.validation[run.log.batch > 0]).any():
        why = "its log has no validation loss; train with eval_loader and eval_interval"
    elif batches[0] != 1 or len(batches) != batches[-1]:
        first = 1 + int(np.argmax(np.append(batches, 0) != np.arange(1, len(batches) + 2)))
        why = f"its log lacks batch {first:,}, and with it what the loss took"
    elif any(segment.islands for segment in run.segments):
        why = "islands trained it, and the log has the time of one island alone"
    if why is not None:
        raise DataError(f"--to-loss {loss:g}: {name}: {why}")


def check_same_data(first: Run, other: Run, until: int, pair: str) -> None:
    """Raise DataError unless batches 1 to `until` have digests, and equal ones."""
    logs = [(run.log.digest, run.log.within(1, until)) for run in (first, other)]
    for batch, digests in enumerate(zip(*(digest[here] for digest, here in logs), strict=True), start=1):
        if digests[0] != digests[1] or digests[0] is None:
            why = "has no data/digest in both" if None in digests else "has other data (data/digest)"
            raise DataError(f"{pair} are not comparable: batch {batch:,} {why}; give runs of the same data and order")


def check_same_validation(changes: Sequence[Change], pair: str) -> None:
    """Raise DataError if the validation losses are of other samples, by the configurations."""
    others = [str(change) for change in changes if change.key.startswith(VALIDATION_KEYS)]
    if others:
        raise DataError(f"{pair} are not comparable: their validation differs in {', '.join(others)}")


def find_differences(first: Run, other: Run) -> list[Change]:
    """Return keys of two configurations that differ and shape a run. Raises DataError if one is not there."""
    configs: list[dict[str, Any]] = []
    for run in (first, other):
        if run.config is None:
            raise DataError(f"--to-loss: {run.where} has no configuration, which says what was evaluated")
        configs.append(run.config)
    found = find_changes(*configs)
    starts = [Change("load_path", *(config.get("load_path") for config in configs))]
    return [*found["never"], *found["logged"], *(change for change in starts if change.there != change.here)]
