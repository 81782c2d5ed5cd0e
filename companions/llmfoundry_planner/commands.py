"""`llmfoundry-lite plan` and `fabric`: what a run and a network would take."""

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


@dataclass(slots=True)
class PlanOptions:
    """Arguments of `plan`."""

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
    per_node: Annotated[int | None, typer.Option(min=1, help="Devices in a node [default: as sold].")] = None
    link: Annotated[
        float | None, typer.Option(min=0.001, help="Bandwidth of a device within its node, in GB/s [default: as sold].")
    ] = None
    adapter: Annotated[
        float | None, typer.Option(min=0.001, help="Bandwidth of a node to other nodes, in Gbit/s [default: as sold].")
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


def takes(options: type) -> Callable[[Callable[[typer.Context, Any], None]], Callable[..., None]]:
    """Decorate a function of a context and `options` as a command that has the dataclass's fields as parameters."""

    def decorate(function: Callable[[typer.Context, Any], None]) -> Callable[..., None]:
        def command(context: typer.Context, **values: Any) -> None:
            function(context, options(**values))

        hints = {"context": typer.Context, **get_type_hints(options, include_extras=True)}
        command.__annotations__, command.__doc__ = hints, function.__doc__
        kind = inspect.Parameter.KEYWORD_ONLY
        given = inspect.signature(options).parameters.values()
        parameters = [one.replace(annotation=hints[one.name], kind=kind) for one in given]
        parameters.insert(0, inspect.Parameter("context", kind, annotation=typer.Context))
        command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        return command

    return decorate


@takes(PlanOptions)
def plan_command(context: typer.Context, given: PlanOptions) -> None:
    """Predict memory, speed, days and cost of a run. Starts nothing and needs none of the hardware.

    Tries every way to divide the devices. Layout 1 takes the least memory among those within 1 % of the fastest; the
    others follow, fastest first. Exits with 2 if no layout fits.
    """
    from llmfoundry_lite.cli.options import parse_counts
    from llmfoundry_lite.errors import EXIT_DONE, EXIT_USER, ConfigError
    from llmfoundry_planner.plan.plan import parse_cluster
    from llmfoundry_planner.plan.report import describe_plans, plan_facts

    if given.check is not None:
        from llmfoundry_planner.plan.check import check_run

        refuse_conflicting(context, "--check", "a finished run says all of it itself")
        print(printable(check_run(given.check), keep="\n"))
        return
    if "cpu" in given.hardware.lower().split(","):
        raise ConfigError("--hardware: cpu given, which no table has; `init DATA --hours 8` measures this machine")
    if not (given.arguments and given.hardware and given.devices):
        raise ConfigError("plan: expected RUN.yaml, --hardware and --devices, or --check RUN; see plan --help")
    check_options(given)
    clusters = [(name, number) for name in given.hardware.split(",") for number in parse_counts(given.devices)]
    second = parse_cluster(given.join) if given.join else None
    if given.join and given.as_json:
        raise ConfigError("--join prints a sentence, not JSON; leave out --json")
    if len(clusters) == 1:
        print_plan(given, plan_on(given, *clusters[0]), second)
    if given.join or given.write:
        raise ConfigError("--join and --write need one --hardware and one number of --devices")
    plans = [plan_on(given, name, number) for name, number in clusters]
    print(json.dumps([plan_facts(plan) for plan in plans], indent=1) if given.as_json else describe_plans(plans))
    raise typer.Exit(EXIT_DONE if any(plan.candidates for plan in plans) else EXIT_USER)


def check_options(given: PlanOptions) -> None:
    """Raise ConfigError for an option that needs another, and for numbers that are not finite."""
    from llmfoundry_lite.errors import ConfigError

    for option, value, needs, other in (
        ("--schedule", given.schedule, "--pipeline", given.pipeline),
        ("--virtual", given.virtual, "--pipeline", given.pipeline),
        ("--wan", given.wan, "--join", given.join),
    ):
        if value is not None and other is None:
            raise ConfigError(f"{option}: {value} given, which needs {needs}")
    for option in ("link", "adapter", "price", "mtbf", "stall", "wan"):
        value = getattr(given, option)
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"--{option}: {value} given, expected a finite number")


def plan_on(given: PlanOptions, name: str, num_devices: int) -> "Plan":
    from llmfoundry_lite.config.sharding_schema import PipelineConfig
    from llmfoundry_planner.plan.plan import DEVICE_HOURS_BETWEEN_FAILURES, hardware_named, make_plan

    assert given.arguments is not None
    batch = [] if given.samples is None else [f"global_train_batch_size={given.samples * num_devices}"]
    stages = None
    if given.pipeline:
        stages = PipelineConfig(
            pipeline_parallel_degree=given.pipeline, schedule=given.schedule or "1f1b", virtual_stages=given.virtual
        )
    hardware = hardware_named(
        name,
        per_node=given.per_node,
        link_gigabytes=given.link,
        adapter_gigabits=given.adapter,
        products_efficiency=given.efficiency,
        measured=[Path(name) for name in given.calibrate.split(",") if name],
    )
    return make_plan(
        [*given.arguments, *batch],
        hardware,
        num_devices,
        pipeline=stages,
        num_tokens=given.tokens,
        dollars_per_device_hour=given.price,
        device_hours_between_failures=given.mtbf or DEVICE_HOURS_BETWEEN_FAILURES,
        stall_seconds=given.stall,
    )


def print_plan(given: PlanOptions, plan: "Plan", second_cluster: tuple[str, int] | None) -> None:
    """Print one plan and exit. Refuses what cannot be done before anything is printed."""
    from llmfoundry_lite.errors import EXIT_DONE, EXIT_USER
    from llmfoundry_planner.plan.join import describe_joined, join
    from llmfoundry_planner.plan.plan import hardware_named, make_plan, write_overlay
    from llmfoundry_planner.plan.report import describe_plan, plan_facts

    assert given.arguments is not None
    second = None
    if second_cluster is not None:
        batch = f"global_train_batch_size={plan.config.global_train_batch_size}"
        name, num_devices = second_cluster
        second = make_plan([*given.arguments, batch], hardware_named(name), num_devices)
    if given.write is not None and plan.candidates:
        write_overlay(plan, given.write)
    print(json.dumps(plan_facts(plan), indent=1) if given.as_json else describe_plan(plan, given.top))
    if second is not None:
        print(describe_joined(second, join(plan, second), given.wan or DEFAULT_WAN_GIGABITS))
    if given.write is not None and not plan.candidates:
        write_overlay(plan, given.write)
    raise typer.Exit(EXIT_DONE if plan.candidates else EXIT_USER)


def fabric_command(
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes with devices.")],
    storage: Annotated[
        int, typer.Option(min=0, help="Number of storage servers, each with an adapter in every zone.")
    ] = 0,
    per_node: Annotated[int, typer.Option(min=1, help="Devices in a node.")] = 8,
    ports: Annotated[int, typer.Option(min=4, help="Ports of a switch.")] = 40,
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
    if nodes * per_node == 1:
        raise ConfigError("--nodes: 1 device has nothing to exchange, expected 2 or more in all nodes")
    if ports % 2:
        raise ConfigError(f"--ports: {ports} given, expected an even number: half of a switch's ports go up")
    text = describe(
        nodes,
        storage,
        per_node=per_node,
        radix=ports,
        num_zones=zones,
        switch_dollars=switch_price,
        switch_watts=switch_watts,
        message_bytes=message * MIB,
    )
    print(text)


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
    per_node: Annotated[int, typer.Option(min=1, help="Devices in a node.")] = 8,
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
    code = rehearse(
        arguments,
        num_devices=devices,
        per_node=per_node,
        rank=rank,
        all_kinds=all_kinds,
        num_batches=batches,
        hardware=hardware,
        searches=searches,
    )
    raise typer.Exit(code)
