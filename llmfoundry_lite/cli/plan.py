"""`llmfoundry-lite plan`: what a run would take."""

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from llmfoundry_lite.cli.options import refuse_beside

DEFAULT_WAN_GIGABITS = 10.0


def plan_command(
    context: typer.Context,
    arguments: Annotated[list[str] | None, typer.Argument(help="RUN.yaml [HARDWARE.yaml] [key=value ...]")] = None,
    hardware: Annotated[str, typer.Option(help="The device: h100-80gb, mi250 and so on. Several: a,b,c.")] = "",
    devices: Annotated[str, typer.Option(help="Devices in all nodes. Several counts, 64,128, make one table.")] = "",
    check: Annotated[str | None, typer.Option(help="A finished run: its rates beside the predicted ones.")] = None,
    per_node: Annotated[int | None, typer.Option(min=1, help="Devices of a node. Default: as it is sold.")] = None,
    link: Annotated[float | None, typer.Option(min=0.001, help="GB/s of a device within its node.")] = None,
    adapter: Annotated[float | None, typer.Option(min=0.001, help="Gbit/s of a node to others.")] = None,
    efficiency: Annotated[
        float | None, typer.Option(min=0.01, max=1, help="Of the peak that matrix products reach.")
    ] = None,
    calibrate: Annotated[Path | None, typer.Option(help="mfu.json of `bench mfu`, measured on such a device.")] = None,
    pipeline: Annotated[
        int | None, typer.Option(min=1, help="Stages of a pipeline; default: the run's, else searched.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="Of --pipeline: gpipe, 1f1b, interleaved, zero_bubble, zbv [1f1b].")
    ] = None,
    virtual: Annotated[int | None, typer.Option(min=1, help="Runs of blocks on a device.")] = None,
    tokens: Annotated[float | None, typer.Option(min=1, help="Default: the run's max_duration.")] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Dollars for a device and hour.")] = None,
    mtbf: Annotated[float | None, typer.Option(min=1, help="Device-hours between failures.")] = None,
    stall: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds that a save holds training up, as `report` measures it.")
    ] = None,
    join: Annotated[str | None, typer.Option(help="A second cluster, HARDWARE:DEVICES, that trains along.")] = None,
    wan: Annotated[float | None, typer.Option(min=0.001, help="Gbit/s between the two clusters [10].")] = None,
    exchange_every: Annotated[int | None, typer.Option(min=1, help="Steps between their exchanges [1].")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="A batch of so many samples for each device.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Layouts that are shown.")] = 5,
    write: Annotated[Path | None, typer.Option(help="Write the first layout as a YAML to lay over the run.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, for programs.")] = False,
) -> None:
    """Predict memory, speed, days and cost of a run. Tries every way to divide the devices; starts nothing.

    Exit code 2 when no layout fits.
    """
    from llmfoundry_lite.config.schema import PipelineConfig
    from llmfoundry_lite.errors import EXIT_DONE, EXIT_USER, ConfigError
    from llmfoundry_lite.plan.plan import Plan, make_plan, parse_cluster, parse_counts, write_overlay
    from llmfoundry_lite.plan.plan import join as join_plans
    from llmfoundry_lite.plan.report import describe_joined, describe_plan, describe_plans, plan_facts

    if check is not None:
        refuse_beside(context, "--check", "a finished run says all of it itself")
        print(check_run(check))
        return
    if not (arguments and hardware and devices):
        raise ConfigError("plan: expected RUN.yaml, --hardware and --devices, or --check RUN; see plan --help")

    for option, value, needs, given in (
        ("--schedule", schedule, "--pipeline", pipeline),
        ("--virtual", virtual, "--pipeline", pipeline),
        ("--wan", wan, "--join", join),
        ("--exchange-every", exchange_every, "--join", join),
    ):
        if value is not None and given is None:
            raise ConfigError(f"{option}: {value} given, which needs {needs}")
    numbers = {"--link": link, "--adapter": adapter, "--price": price, "--mtbf": mtbf, "--stall": stall, "--wan": wan}
    for option, value in numbers.items():
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"{option}: {value} given, expected a finite number")
    wan, exchange_every = wan or DEFAULT_WAN_GIGABITS, exchange_every or 1
    stages = None
    if pipeline:
        stages = PipelineConfig(pipeline_parallel_degree=pipeline, schedule=schedule or "1f1b", virtual_stages=virtual)

    def plan_on(name: str, number: int) -> Plan:
        batch = [] if samples is None else [f"global_train_batch_size={samples * number}"]
        return make_plan(
            [*arguments, *batch],
            hardware=name,
            num_devices=number,
            per_node=per_node,
            link_gigabytes=link,
            adapter_gigabits=adapter,
            products_share=efficiency,
            measured=calibrate,
            pipeline=stages,
            num_tokens=tokens,
            dollars_per_device_hour=price,
            device_hours_between_failures=mtbf,
            stall_seconds=stall,
        )

    clusters = [(name, number) for name in hardware.split(",") for number in parse_counts(devices)]
    second_cluster = parse_cluster(join) if join else None
    if join and as_json:
        raise ConfigError("--join is told in a line for people; leave out --json")
    if len(clusters) > 1:
        if join or write:
            raise ConfigError("--join and --write need one --hardware and one number of --devices")
        plans = [plan_on(name, number) for name, number in clusters]
        print(json.dumps([plan_facts(plan) for plan in plans], indent=1) if as_json else describe_plans(plans))
        raise typer.Exit(EXIT_DONE if any(plan.candidates for plan in plans) else EXIT_USER)
    # What cannot be done is refused before anything is printed.
    plan, second = plan_on(*clusters[0]), None
    if second_cluster is not None:
        name, number = second_cluster
        batch = f"global_train_batch_size={plan.config.global_train_batch_size}"
        second = make_plan([*arguments, batch], hardware=name, num_devices=number)
    if write is not None and plan.candidates:
        write_overlay(plan, write)
    print(json.dumps(plan_facts(plan), indent=1) if as_json else describe_plan(plan, top))
    if second is not None:
        print(describe_joined(plan, second, join_plans(plan, second, wan, exchange_every), wan, exchange_every))
    if write is not None and not plan.candidates:
        write_overlay(plan, write)
    raise typer.Exit(EXIT_DONE if plan.candidates else EXIT_USER)


def check_run(run: str) -> str:
    """What each span of the run's batches was predicted to reach, beside what it reached. Raises DataError."""
    from llmfoundry_lite.config.load_train import load_train_config
    from llmfoundry_lite.errors import DataError
    from llmfoundry_lite.plan.check import Measured, describe_check, parts_told, stages_told
    from llmfoundry_lite.report.reading import read_run
    from llmfoundry_lite.report.segments import accelerator_of, measure

    found = read_run(run)
    path = Path(run) / "config.yaml"
    if not path.is_file():
        raise DataError(f"--check: {path} is not there; it says what was trained")
    config = load_train_config([str(path)]).config
    spans, left_out = [], []
    for segment in found.segments:
        here = found.log.within(segment.first_batch, segment.last_batch)
        row, facts = accelerator_of(found.log, here, segment), measure(found.log, segment, {})
        if row is None:
            left_out.append(f"{segment.span}: {describe_unknown(segment.device)}, no prediction")
            continue
        if not facts.tokens_per_second_per_device or not segment.num_devices:
            left_out.append(f"{segment.span}: the log does not tell how fast it was, nothing to compare")
            continue
        spans.append(
            Measured(
                batches=segment.span,
                accelerator=row,
                num_devices=segment.num_devices,
                strategy=segment.sharding or config.sharding.sharding_strategy,
                shard_degree=segment.shard_degree,
                tensor=segment.tensor_parallel_degree or 1,
                microbatch_size=segment.device_train_microbatch_size
                or config.global_train_batch_size // segment.num_devices,
                tokens_per_second=facts.tokens_per_second_per_device,
                pipeline=stages_told(segment.pipeline, config),
                context=parts_told(segment.context),
            )
        )
    if not found.segments:
        left_out.append("no checkpoint of this run says where it ran: nothing to compare")
    return describe_check(config, spans, left_out)


def describe_unknown(device: str | None) -> str:
    """Why nobody knows the row of a device: a run's own MFU says by which peak it was reckoned."""
    from llmfoundry_lite.hardware import find_accelerator

    if device is None:
        return "the checkpoint does not name the device"
    return f"{device} {'has no MFU in the log' if find_accelerator(device) else 'is not in the table'}"


def fabric_command(
    nodes: Annotated[int, typer.Option(min=1, help="Machines with devices.")],
    storage: Annotated[int, typer.Option(min=0, help="Storage servers; each has an adapter in every zone.")] = 0,
    per_node: Annotated[int, typer.Option(min=1, help="Devices of a node.")] = 8,
    ports: Annotated[int, typer.Option(min=4, help="Of a switch.")] = 40,
    zones: Annotated[int, typer.Option(min=1, help="Fat trees, joined by a switch each.")] = 2,
    switch_price: Annotated[float | None, typer.Option(min=0, help="Dollars for a switch.")] = None,
    switch_watts: Annotated[float | None, typer.Option(min=0, help="That a switch draws.")] = None,
    message: Annotated[float, typer.Option(min=1, help="MiB of an all-reduce.")] = 186,
) -> None:
    """Count switches, price and power of a cluster's network. Also what an all-reduce can reach; by arithmetic."""
    from llmfoundry_lite.errors import ConfigError
    from llmfoundry_lite.hardware import MIB
    from llmfoundry_lite.plan.fabric import describe

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
