"""`llmfoundry-lite plan` and `fabric`: what a run and a network would take."""

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from llmfoundry_lite.cli.options import expand_home, refuse_beside
from llmfoundry_lite.errors import printable

if TYPE_CHECKING:
    from llmfoundry_planner.plan.plan import Plan

DEFAULT_WAN_GIGABITS = 10.0


@dataclass(slots=True)
class PlanOptions:
    """Arguments of `plan`."""

    arguments: Annotated[
        list[str] | None, typer.Argument(help="Plan RUN.yaml, or a run by its name [HARDWARE.yaml] [key=value ...].")
    ] = None
    hardware: Annotated[
        str, typer.Option(help="Name the device: h100, a100-40gb, mi250, …; several, h100,mi300x, make one table.")
    ] = ""
    devices: Annotated[str, typer.Option(help="Set the devices of all nodes; several, 64,128, make one table.")] = ""
    check: Annotated[str | None, typer.Option(help="Compare a finished run's rates with the predicted.")] = None
    per_node: Annotated[int | None, typer.Option(min=1, help="Set the devices of a node [as it is sold].")] = None
    link: Annotated[float | None, typer.Option(min=0.001, help="Set a device's GB/s within its node [as sold].")] = None
    adapter: Annotated[float | None, typer.Option(min=0.001, help="Set a node's Gbit/s to others [as sold].")] = None
    efficiency: Annotated[
        float | None, typer.Option(min=0.01, max=1, help="Set the peak's share that matrix products reach [fitted].")
    ] = None
    calibrate: Annotated[
        str,
        typer.Option(help="Use reports from such devices: mfu.json,scaling.json of `bench`, of `doctor --json`."),
    ] = ""
    pipeline: Annotated[int | None, typer.Option(min=1, help="Set the stages [the run's, else searched].")] = None
    schedule: Annotated[
        str | None, typer.Option(help="Choose, with --pipeline, gpipe, 1f1b, interleaved, zero_bubble or zbv [1f1b].")
    ] = None
    virtual: Annotated[int | None, typer.Option(min=1, help="Set a device's runs of blocks, with --pipeline.")] = None
    tokens: Annotated[float | None, typer.Option(min=1, help="Set the tokens of the run [its max_duration].")] = None
    price: Annotated[float | None, typer.Option(min=0, help="Add the cost, at these dollars a device-hour.")] = None
    mtbf: Annotated[float | None, typer.Option(min=1, help="Set the device-hours between failures [50000].")] = None
    stall: Annotated[
        float | None, typer.Option(min=0.001, help="Set the seconds that a save stalls training, as in `report`.")
    ] = None
    join: Annotated[str | None, typer.Option(help="Add a second cluster, HARDWARE:DEVICES.")] = None
    wan: Annotated[float | None, typer.Option(min=0.001, help="Set the clusters' Gbit/s, with --join [10].")] = None
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Set a batch's samples for each device [the run's batch, whatever the devices]."),
    ] = None
    top: Annotated[int, typer.Option(min=1, help="Show this many layouts.")] = 5
    write: Annotated[
        Path | None, typer.Option(help="Write the first layout as a YAML to lay over the run.", callback=expand_home)
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
    """Predict memory, speed, days and cost of a run. Starts nothing, and needs no such hardware.

    Tries every way to divide the devices. Layout 1 takes the least memory among those within 1 % of the fastest; the
    others follow, the fastest first. Exit code 2 when no layout fits.
    """
    from llmfoundry_lite.cli.options import parse_counts
    from llmfoundry_lite.errors import EXIT_DONE, EXIT_USER, ConfigError
    from llmfoundry_planner.plan.plan import parse_cluster
    from llmfoundry_planner.plan.report import describe_plans, plan_facts

    if given.check is not None:
        from llmfoundry_planner.plan.check import check_run

        refuse_beside(context, "--check", "a finished run says all of it itself")
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
        raise ConfigError("--join is told in a line for people; leave out --json")
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
    nodes: Annotated[int, typer.Option(min=1, help="Set the number of machines with devices.")],
    storage: Annotated[int, typer.Option(min=0, help="Add storage servers, with an adapter in every zone.")] = 0,
    per_node: Annotated[int, typer.Option(min=1, help="Set the devices of a node.")] = 8,
    ports: Annotated[int, typer.Option(min=4, help="Set the ports of a switch.")] = 40,
    zones: Annotated[int, typer.Option(min=1, help="Set the number of fat trees, joined by a switch each.")] = 2,
    switch_price: Annotated[float | None, typer.Option(min=0, help="Set the dollars for a switch.")] = None,
    switch_watts: Annotated[float | None, typer.Option(min=0, help="Set the watts that a switch draws.")] = None,
    message: Annotated[float, typer.Option(min=1, help="Set the MiB of an all-reduce.")] = 186,
) -> None:
    """Count switches, price and power of a cluster's network. Computes an all-reduce's limit too."""
    from llmfoundry_lite.errors import ConfigError
    from llmfoundry_lite.hardware import MIB
    from llmfoundry_planner.plan.fabric import describe

    if not math.isfinite(message):
        raise ConfigError(f"--message: {message} given, expected MiB, such as 186")
    if nodes * per_node == 1:
        raise ConfigError("--nodes: 1 device has nobody to exchange with, expected 2 or more in all nodes")
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
    arguments: Annotated[list[str], typer.Argument(help="Rehearse RUN.yaml with HARDWARE.yaml [key=value ...].")],
    devices: Annotated[int, typer.Option(min=1, help="Set the devices of the run, in all nodes.")],
    per_node: Annotated[int, typer.Option(min=1, help="Set the devices of a node.")] = 8,
    rank: Annotated[
        int | None, typer.Option(help="Rehearse only this rank [the first one of each stage, in turn].")
    ] = None,
    all_kinds: Annotated[
        bool, typer.Option("--all-kinds", help="Rehearse the first and the last rank of each stage, in turn.")
    ] = False,
    batches: Annotated[
        int, typer.Option(min=2, help="Measure so many; the optimizer's state is there from the second on.")
    ] = 2,
    searches: Annotated[
        bool, typer.Option("--search", help="Find, by rehearsing, the largest microbatch that fits.")
    ] = False,
    hardware: Annotated[str | None, typer.Option(help="Name the device, if no YAML is named after it.")] = None,
) -> None:
    """Run a rank's real training code on devices that are not there. Memory, FLOPs and collectives are measured.

    Exit code 2 when the run would be refused or run out of memory.
    """
    from llmfoundry_planner.rehearse.rehearse import rehearse

    if searches:
        refuse_beside(context, "--search", "it rehearses one rank, for two batches", only=("all_kinds", "batches"))
    if rank is not None:
        refuse_beside(context, "--rank", "it is the only one that is rehearsed", only=("all_kinds",))
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
