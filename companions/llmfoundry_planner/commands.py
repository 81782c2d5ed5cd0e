"""Command lines of `llmfoundry-lite plan`, `fabric` and `rehearse`.

This file has the options and their help, and refuses options that contradict each other. Each command imports the
module that does the work when it runs, so that `llmfoundry-lite --help` stays quick: `plan/plan.py` and
`plan/report.py`, `plan/fabric.py`, and `rehearse/rehearse.py`.
"""

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from llmfoundry_lite.cli.options import expand_home, refuse_conflicting
from llmfoundry_lite.errors import printable

if TYPE_CHECKING:
    from llmfoundry_planner.plan.plan import Plan

DEFAULT_WAN_GIGABITS = 10.0
"""Bandwidth between two clusters in Gbit/s, if `--wan` does not say it."""


@dataclass(slots=True)
class PlanOptions:
    """Values of the options of `plan`. Each field is one option, and its annotation has the help."""

    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN.yaml", help="YAML files or names, the run first, then key=value settings."),
    ] = None
    hardware: Annotated[
        str, typer.Option(help="Device, such as h100, a100-40gb or mi250. Several, as in h100,mi300x, make one table.")
    ] = ""
    devices: Annotated[
        str, typer.Option(help="Number of devices in all nodes. Several, as in 64,128, make one table.")
    ] = ""
    check: Annotated[
        str | None, typer.Option(metavar="RUN", help="Compare the rates of a finished run with the predicted ones.")
    ] = None
    per_node: Annotated[
        int | None, typer.Option(min=1, help="Number of devices in a node [default: as the hardware is sold].")
    ] = None
    link: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Bandwidth of a device within its node, in GB/s [default: as the hardware is sold]."
        ),
    ] = None
    adapter: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Bandwidth of a node to other nodes, in Gbit/s [default: as the hardware is sold]."
        ),
    ] = None
    efficiency: Annotated[
        float | None,
        typer.Option(min=0.01, max=1, help="Share of the peak rate that matrix products reach [default: fitted]."),
    ] = None
    calibrate: Annotated[
        str,
        typer.Option(metavar="FILE", help="Reports of bench or doctor --json from such devices, separated by commas."),
    ] = ""
    pipeline: Annotated[
        int | None, typer.Option(min=1, help="Number of pipeline stages [default: the run's, or else the best found].")
    ] = None
    schedule: Annotated[
        str | None,
        typer.Option(help="Schedule, with --pipeline: gpipe, 1f1b, interleaved, zero_bubble or zbv [default: 1f1b]."),
    ] = None
    virtual: Annotated[int | None, typer.Option(min=1, help="Virtual stages on each device, with --pipeline.")] = None
    tokens: Annotated[float | None, typer.Option(min=1, help="Tokens of the run [default: its max_duration].")] = None
    price: Annotated[
        float | None, typer.Option(min=0, help="Price of a device-hour in dollars, to print the cost.")
    ] = None
    mtbf: Annotated[float | None, typer.Option(min=1, help="Device-hours between failures [default: 50000].")] = None
    stall: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds for which a save stalls training, as report measures it.")
    ] = None
    join: Annotated[
        str | None, typer.Option(metavar="HARDWARE:DEVICES", help="Second cluster that trains the same run.")
    ] = None
    wan: Annotated[
        float | None,
        typer.Option(min=0.001, help="Bandwidth between the clusters in Gbit/s, with --join [default: 10]."),
    ] = None
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Samples per device and batch [default: the run's batch, divided among the devices]."),
    ] = None
    top: Annotated[int, typer.Option(min=1, help="Number of layouts to show.")] = 5
    write: Annotated[
        Path | None,
        typer.Option(
            help="Write the first layout to this file, a YAML that overrides the run's.", callback=expand_home
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False


def command_with_options(
    options_class: type,
) -> Callable[[Callable[[typer.Context, Any], None]], Callable[..., None]]:
    """Decorate a function of `(context, options)` so that typer sees each field of a dataclass as an option.

    Typer reads a command's options from the signature of its function. Twenty options are easier to pass on as one
    object, so the decorated function takes an instance of `options_class`, and the command that typer sees has a
    keyword parameter for each of its fields, with the field's annotation and default.
    """

    def decorate(function: Callable[[typer.Context, Any], None]) -> Callable[..., None]:
        def command(context: typer.Context, **option_values: Any) -> None:
            function(context, options_class(**option_values))

        annotations = {"context": typer.Context, **get_type_hints(options_class, include_extras=True)}
        parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
        for parameter in inspect.signature(options_class).parameters.values():
            parameters.append(
                parameter.replace(annotation=annotations[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
            )

        command.__doc__ = function.__doc__  # typer prints it as the command's help
        command.__annotations__ = annotations
        command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        return command

    return decorate


@command_with_options(PlanOptions)
def plan_command(context: typer.Context, options: PlanOptions) -> None:
    """Predict memory, speed, days and cost of a run. Starts nothing and needs none of the hardware.

    Tries every way to divide the devices. Layout 1 takes the least memory among those within 1 % of the fastest; the
    others follow, fastest first. Exits with 2 if no layout fits.
    """
    from llmfoundry_lite.cli.options import parse_counts
    from llmfoundry_lite.errors import EXIT_DONE, EXIT_USER, ConfigError
    from llmfoundry_planner.plan.plan import parse_cluster, write_overlay
    from llmfoundry_planner.plan.report import describe_plans, plan_facts

    if options.check is not None:
        from llmfoundry_planner.plan.check import check_run

        refuse_conflicting(context, "--check", "a finished run says all of it itself")
        print(printable(check_run(options.check), keep="\n"))
        return

    if "cpu" in options.hardware.lower().split(","):
        raise ConfigError("--hardware: cpu given, which no table has; `init DATA --hours 8` measures this machine")
    if not (options.arguments and options.hardware and options.devices):
        raise ConfigError("plan: expected RUN.yaml, --hardware and --devices, or --check RUN; see plan --help")
    check_options(options)

    # Several devices and several counts mean every combination of them.
    device_counts = parse_counts(options.devices)
    clusters = [(name, num_devices) for name in options.hardware.split(",") for num_devices in device_counts]
    joined_cluster = parse_cluster(options.join) if options.join else None
    if options.join and options.as_json:
        raise ConfigError("--join prints a sentence, not JSON; leave out --json")

    if len(clusters) == 1:
        plan = plan_cluster(options, *clusters[0])
        plans = [plan]
        joined_plan = plan_joined_cluster(options, plan, joined_cluster) if joined_cluster else None
        # A file that cannot be written is an error before the plan is printed.
        if options.write is not None and plan.candidates:
            write_overlay(plan, options.write)
        print_plan(options, plan, joined_plan)
        # If there is nothing to write, the error follows the plan, which gives the reasons.
        if options.write is not None and not plan.candidates:
            hardware_name = plan.hardware.accelerator.name
            raise ConfigError(f"--write: no layout of {plan.num_devices} {hardware_name} fits, nothing to write")
    else:
        if options.join or options.write:
            raise ConfigError("--join and --write need one --hardware and one number of --devices")
        plans = [plan_cluster(options, name, num_devices) for name, num_devices in clusters]
        if options.as_json:
            print(json.dumps([plan_facts(plan) for plan in plans], indent=1))
        else:
            print(describe_plans(plans))

    has_fitting_layout = any(plan.candidates for plan in plans)
    raise typer.Exit(EXIT_DONE if has_fitting_layout else EXIT_USER)


def check_options(options: PlanOptions) -> None:
    """Raise ConfigError if an option lacks another one that gives it a meaning, or if a number is infinite or NaN."""
    from llmfoundry_lite.errors import ConfigError

    for option, value, needed_option, needed_value in (
        ("--schedule", options.schedule, "--pipeline", options.pipeline),
        ("--virtual", options.virtual, "--pipeline", options.pipeline),
        ("--wan", options.wan, "--join", options.join),
    ):
        if value is not None and needed_value is None:
            raise ConfigError(f"{option}: {value} given, which needs {needed_option}")

    # Typer checks the smallest value of these, which inf and nan pass.
    for option in ("link", "adapter", "price", "mtbf", "stall", "wan"):
        value = getattr(options, option)
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"--{option}: {value} given, expected a finite number")


def plan_cluster(options: PlanOptions, hardware_name: str, num_devices: int) -> "Plan":
    """Plan the run of the command line on a number of devices of the hardware table, with the user's own numbers.

    `options.arguments` must have been given. Raises ConfigError and DataError for whatever cannot be planned.
    """
    from llmfoundry_lite.config.sharding_schema import PipelineConfig
    from llmfoundry_planner.plan.plan import DEVICE_HOURS_BETWEEN_FAILURES, hardware_named, make_plan

    assert options.arguments is not None
    arguments = list(options.arguments)
    if options.samples is not None:
        arguments.append(f"global_train_batch_size={options.samples * num_devices}")

    pipeline = None
    if options.pipeline:
        pipeline = PipelineConfig(
            pipeline_parallel_degree=options.pipeline,
            schedule=options.schedule or "1f1b",
            virtual_stages=options.virtual,
        )

    hardware = hardware_named(
        hardware_name,
        per_node=options.per_node,
        link_gigabytes=options.link,
        adapter_gigabits=options.adapter,
        products_efficiency=options.efficiency,
        measured=[Path(report) for report in options.calibrate.split(",") if report],
    )
    return make_plan(
        arguments,
        hardware,
        num_devices,
        pipeline=pipeline,
        num_tokens=options.tokens,
        dollars_per_device_hour=options.price,
        device_hours_between_failures=options.mtbf or DEVICE_HOURS_BETWEEN_FAILURES,
        stall_seconds=options.stall,
    )


def plan_joined_cluster(options: PlanOptions, plan: "Plan", joined_cluster: tuple[str, int]) -> "Plan":
    """Plan the run of `plan` on the cluster of `--join`, given as (name of the hardware, number of devices).

    Raises ConfigError if it cannot be planned there.
    """
    from llmfoundry_planner.plan.plan import hardware_named, make_plan

    assert options.arguments is not None
    hardware_name, num_devices = joined_cluster
    # The clusters share each batch, so the second one plans the same batch, whatever --samples made of it.
    same_batch = f"global_train_batch_size={plan.config.global_train_batch_size}"
    return make_plan([*options.arguments, same_batch], hardware_named(hardware_name), num_devices)


def print_plan(options: PlanOptions, plan: "Plan", joined_plan: "Plan | None") -> None:
    """Print one plan as text or JSON. `joined_plan`, of the cluster of `--join`, adds how fast both are together.

    Raises ConfigError, after the plan, if no layout fits on one of the two clusters.
    """
    from llmfoundry_planner.plan.join import describe_joined, join
    from llmfoundry_planner.plan.report import describe_plan, plan_facts

    if options.as_json:
        print(json.dumps(plan_facts(plan), indent=1))
    else:
        print(describe_plan(plan, options.top))
    if joined_plan is not None:
        link_gigabits = options.wan or DEFAULT_WAN_GIGABITS
        print(describe_joined(joined_plan, join(plan, joined_plan), link_gigabits))


def fabric_command(
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes with devices.")],
    storage: Annotated[
        int, typer.Option(min=0, help="Number of storage servers, each with an adapter in every zone.")
    ] = 0,
    per_node: Annotated[int, typer.Option(min=1, help="Number of devices in a node.")] = 8,
    ports: Annotated[int, typer.Option(min=4, help="Number of ports of a switch.")] = 40,
    zones: Annotated[
        int, typer.Option(min=1, help="Number of zones: fat trees, each with one switch that joins it to the others.")
    ] = 2,
    switch_price: Annotated[float | None, typer.Option(min=0, help="Price of a switch in dollars.")] = None,
    switch_watts: Annotated[float | None, typer.Option(min=0, help="Power of a switch in watts.")] = None,
    message: Annotated[float, typer.Option(min=1, help="Size of the all-reduce in MiB.")] = 186,
) -> None:
    """Count the switches of a network, with price and power. Also computes how fast an all-reduce can be."""
    from llmfoundry_lite.errors import ConfigError
    from llmfoundry_lite.hardware import MIB
    from llmfoundry_planner.plan.fabric import describe

    if not math.isfinite(message):
        raise ConfigError(f"--message: {message} given, expected MiB, such as 186")
    has_one_device = nodes * per_node == 1
    if has_one_device:
        raise ConfigError("--nodes: 1 device has nothing to exchange, expected 2 or more in all nodes")
    if ports % 2:
        raise ConfigError(f"--ports: {ports} given, expected an even number: half of a switch's ports go up")
    description = describe(
        nodes,
        storage,
        per_node=per_node,
        radix=ports,
        num_zones=zones,
        switch_dollars=switch_price,
        switch_watts=switch_watts,
        message_bytes=message * MIB,
    )
    print(description)


def rehearse_command(
    context: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN.yaml",
            help="YAML files or names, the run first, then a hardware overlay, then key=value settings.",
        ),
    ],
    devices: Annotated[int, typer.Option(min=1, help="Number of devices of the run, in all nodes.")],
    per_node: Annotated[int, typer.Option(min=1, help="Number of devices in a node.")] = 8,
    rank: Annotated[
        int | None,
        typer.Option(help="Rehearse only this rank [default: the first one of each pipeline stage, in turn]."),
    ] = None,
    all_kinds: Annotated[
        bool, typer.Option("--all-kinds", help="Rehearse the first and the last rank of each pipeline stage, in turn.")
    ] = False,
    batches: Annotated[
        int, typer.Option(min=2, help="Batches to measure. The optimizer has state only from the second one on.")
    ] = 2,
    searches: Annotated[
        bool, typer.Option("--search", help="Find the largest microbatch that fits, by rehearsing several.")
    ] = False,
    hardware: Annotated[str | None, typer.Option(help="Device, such as h100, if no overlay is named after it.")] = None,
) -> None:
    """Run the real training code of one rank without its hardware. Measures memory, FLOPs and collectives.

    Exits with 2 if the run would be refused or would run out of memory.
    """
    from llmfoundry_planner.rehearse.rehearse import rehearse

    if searches:
        refuse_conflicting(context, "--search", "it rehearses one rank, for two batches", only=("all_kinds", "batches"))
    if rank is not None:
        refuse_conflicting(context, "--rank", "it is the only one that is rehearsed", only=("all_kinds",))
    exit_code = rehearse(
        arguments,
        num_devices=devices,
        per_node=per_node,
        rank=rank,
        all_kinds=all_kinds,
        num_batches=batches,
        hardware=hardware,
        searches=searches,
    )
    raise typer.Exit(exit_code)
