"""Proofs, and races beside peers: `python -m benchmarks NAME --help`. Not part of the wheel.

docs/claims.md says which claim rests on which benchmark. Reports of what was measured lie in benchmarks/results. The
options of a benchmark are the parameters of its `run`; lists are given with commas.
"""

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from llmfoundry_lite.errors import EXIT_DONE, EXIT_FAILURE, EXIT_USER, UserError, printable
from llmfoundry_lite.files import check_result_replaceable
from llmfoundry_lite.ranks.output import prepare_output

BENCHMARKS = {
    "train": ("train.train", "A training step beside LLM Foundry's."),
    "growth": ("train.growth", "How a step grows with parameters, sequence and batch."),
    "prepare": ("prepare", "`data prepare` beside LLM Foundry's converter."),
    "order": ("order", "How well batches are mixed; what opening a data set of any size takes."),
    "checkpoint": ("checkpoint.checkpoint", "Saves and loads beside torch's and Composer's."),
    "checkpoint-plan": (
        "checkpoint.plan",
        "Checkpoints of a run on thousands of ranks, planned in one process.",
    ),
    "memory": ("memory", "Memory of all that ships: the estimate beside the rehearsal."),
    "layouts": ("layouts", "The layouts that ship, chosen by the planner."),
    "frontier": ("papers.frontier", "Frontier's runs, predicted, beside what was published."),
    "published": ("papers.published", "The planner beside published throughput: hits and misses."),
    "start": ("start", "Seconds from the command to the first batch."),
    "eval": ("eval.eval", "Evaluation in context beside lm-evaluation-harness."),
    "eval-parity": ("eval.parity", "The same answers as lm-evaluation-harness, item by item."),
    "eval-within": ("eval.within", "Our model inside lm-evaluation-harness, beside its own."),
    "intervals": ("intervals", "How often `compare`'s intervals cover, by simulation."),
    "ladder": ("ladder.ladder", "A scaling law of small models, the next size predicted, comparisons."),
    "switch": ("switch.switch", "Is a run that switches between clusters the same run?"),
    "islands": ("islands.islands", "Is a run of two islands, one of which dies, one run?"),
    "join": ("islands.join", "Which way two clusters train one run over a link, predicted."),
    "islands-overlap": ("islands.overlap", "What overlap hides of the exchange; bytes of 2, 3 and 4 islands."),
    "islands-local": ("islands.local", "Local steps over slow links: loss, bytes and time."),
    "islands-faults": ("islands.faults", "Random faults of ranks, islands, links and the coordinator."),
}
FREE = ("results", "overrides")
"""Parameters given without an option's name."""


def run_benchmark(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code: 1 if what was to be shown does not hold."""
    name = arguments[0] if arguments else ""
    if name not in BENCHMARKS:
        print("Usage: python -m benchmarks NAME [OPTIONS]\n")
        print("\n".join(f"  {name:<17}{text}" for name, (_, text) in BENCHMARKS.items()))
        return EXIT_DONE if name in ("", "--help") else EXIT_USER
    module = import_module(f"benchmarks.{BENCHMARKS[name][0]}")
    try:
        options = vars(build_parser(name, module.run).parse_args(arguments[1:]))
        if options.get("out") is not None:
            check_result_replaceable(options["out"], name)
        found = module.run(**options)
        if options.get("out") is not None:
            print(f"written: {printable(str(options['out']))}")
    except UserError as error:
        print(f"error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        return error.exit_code
    if isinstance(found, int):
        return found
    holds = found.get("passed", found.get("is_same", True)) if isinstance(found, dict) else True
    return EXIT_DONE if holds else EXIT_FAILURE


def build_parser(name: str, run: Callable[..., Any]) -> argparse.ArgumentParser:
    """Make an option of each parameter that a command line can give."""
    parser = argparse.ArgumentParser(f"python -m benchmarks {name}", description=run.__doc__)
    hints = get_type_hints(run)
    for parameter in inspect.signature(run).parameters.values():
        kind, is_list = innermost(hints[parameter.name])
        if kind not in (str, int, float, bool, Path):
            continue
        options: dict[str, Any] = {"default": parameter.default, "help": "[%(default)s]"}
        if parameter.name in FREE:
            parser.add_argument(parameter.name, nargs="*", type=kind, **options)
            continue
        if kind is bool:
            options["action"] = "store_true"
        else:
            options["type"] = (lambda text, kind=kind: [kind(part) for part in text.split(",")]) if is_list else kind
        options["required"] = parameter.default is parameter.empty
        parser.add_argument(f"--{parameter.name.replace('_', '-')}", **options)
    return parser


def innermost(hint: Any) -> tuple[Any, bool]:
    """Return int and True for Sequence[int], and the first part of a union."""
    if get_origin(hint) in (Union, type(int | None)):
        return innermost(get_args(hint)[0])
    if get_origin(hint) is not None:
        return get_args(hint)[0], True
    return hint, False


if __name__ == "__main__":
    prepare_output()
    sys.exit(run_benchmark(sys.argv[1:]))
