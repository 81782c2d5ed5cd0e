"""Command line of the benchmarks: `python -m benchmarks NAME --help`. Not part of the wheel.

    python -m benchmarks                                    lists the benchmarks
    python -m benchmarks prepare --out benchmarks/results   runs one

Each benchmark is a module with a function `run`, and its options are made from the parameters of `run`: `num_rounds:
int = 3` becomes `--num-rounds`, with 3 as its default, and `sizes: Sequence[str]` becomes `--sizes a,b`. docs/claims.md
says which claim rests on which benchmark. The reports of past measurements are in benchmarks/results.
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

# Name on the command line -> (module below benchmarks/, one line of help).
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
    "watched": ("watched", "A step with alerts, metrics and a second place, beside one without."),
    "eval": ("eval.eval", "Evaluation in context beside lm-evaluation-harness."),
    "eval-parity": ("eval.parity", "The same answers as lm-evaluation-harness, item by item."),
    "eval-prompts": ("eval.prompts", "Prompts of CORE and MMLU beside other programs', as text."),
    "eval-within": ("eval.within", "Our model inside lm-evaluation-harness, beside its own."),
    "intervals": ("intervals", "How often `compare`'s intervals cover, by simulation."),
    "seeds": ("seeds", "How often `compare` of recipes with several runs errs, by simulation."),
    "mup": ("mup", "The best learning rate of three widths, with muP and without."),
    "ladder": ("ladder.ladder", "A scaling law of small models, the next size predicted, comparisons."),
    "averages": ("ladder.averages", "What the mean of a run's last checkpoints gains."),
    "switch": ("switch.switch", "Is a run that switches between clusters the same run?"),
    "islands": ("islands.islands", "Is a run of two islands, one of which dies, one run?"),
    "join": ("islands.join", "Which way two clusters train one run over a link, predicted."),
    "islands-overlap": ("islands.overlap", "What overlap hides of the exchange; bytes of 2, 3 and 4 islands."),
    "islands-local": ("islands.local", "Local steps over slow links: loss, bytes and time."),
    "islands-faults": ("islands.faults", "Random faults of ranks, islands, links and the coordinator."),
}
POSITIONAL_PARAMETERS = ("results", "overrides")
"""Parameters of `run` that the command line takes without an option's name."""


def run_benchmark(arguments: Sequence[str]) -> int:
    """Run the benchmark that a command line names, and return the exit code.

    `arguments` is the command line after `python -m benchmarks`: the benchmark's name, then its options. Without a
    name, or with one that does not exist, the list of benchmarks is printed.

    Returns 0 when the benchmark ends and the claim it tests holds, 1 when the claim does not hold, and the code of a
    UserError otherwise. A benchmark says whether its claim holds with `passed` or `is_same` in its report; one that
    returns an integer has chosen the exit code itself; all others only measure, and return 0.
    """
    name = arguments[0] if arguments else ""
    if name not in BENCHMARKS:
        print("Usage: python -m benchmarks NAME [OPTIONS]\n")
        print("\n".join(f"  {name:<17}{text}" for name, (_, text) in BENCHMARKS.items()))
        return EXIT_DONE if name in ("", "--help") else EXIT_USER

    # Only the benchmark that runs is imported, because some need packages that others do not.
    module = import_module(f"benchmarks.{BENCHMARKS[name][0]}")
    try:
        options = vars(build_parser(name, module.run).parse_args(arguments[1:]))
        if options.get("out") is not None:
            # Refuse to overwrite a report before measuring, not after.
            check_result_replaceable(options["out"], name)
        report = module.run(**options)
        if options.get("out") is not None:
            print(f"written: {printable(str(options['out']))}")
    except UserError as error:
        print(f"error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        return error.exit_code

    # A missing key means that the benchmark makes no claim that could fail.
    if isinstance(report, int):
        return report
    holds = report.get("passed", report.get("is_same", True)) if isinstance(report, dict) else True
    return EXIT_DONE if holds else EXIT_FAILURE


def build_parser(name: str, run: Callable[..., Any]) -> argparse.ArgumentParser:
    """Build the parser of a benchmark: one option for each parameter of `run` whose type can be written as text.

    A parameter of another type, such as a callable that tests pass, gets no option. `run` is then called without it, so
    it needs a default. A parameter without a default becomes a required option.
    """
    parser = argparse.ArgumentParser(f"python -m benchmarks {name}", description=run.__doc__)
    hints = get_type_hints(run)
    for parameter in inspect.signature(run).parameters.values():
        value_type, is_list = value_type_of(hints[parameter.name])
        if value_type not in (str, int, float, bool, Path):
            continue
        options: dict[str, Any] = {"default": parameter.default, "help": "[%(default)s]"}

        if parameter.name in POSITIONAL_PARAMETERS:
            parser.add_argument(parameter.name, nargs="*", type=value_type, **options)
            continue
        if value_type is bool:
            options["action"] = "store_true"
        else:
            options["type"] = value_type
            if is_list:
                # Written with commas. The default binds this parameter's type, because the loop variable will change.
                options["type"] = lambda text, of=value_type: [of(part) for part in text.split(",")]
        options["required"] = parameter.default is parameter.empty
        parser.add_argument(f"--{parameter.name.replace('_', '-')}", **options)
    return parser


def value_type_of(hint: Any) -> tuple[Any, bool]:
    """Return the type of one value of a parameter, and whether the parameter takes a list of them.

    Examples: `int` gives (int, False), `Path | None` gives (Path, False), and `Sequence[int]` gives (int, True).
    """
    if get_origin(hint) in (Union, type(int | None)):
        return value_type_of(get_args(hint)[0])
    if get_origin(hint) is not None:
        return get_args(hint)[0], True
    return hint, False


if __name__ == "__main__":
    prepare_output()
    sys.exit(run_benchmark(sys.argv[1:]))
