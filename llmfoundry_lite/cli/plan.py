"""`llmfoundry-lite plan`: what a run would take."""

import json
from pathlib import Path
from typing import Annotated

import typer


def plan_command(
    arguments: Annotated[list[str], typer.Argument(help="RUN.yaml [HARDWARE.yaml] [key=value ...]")],
    hardware: Annotated[str, typer.Option(help="The device: h100-80gb, mi250 and so on. Several: a,b,c.")],
    devices: Annotated[str, typer.Option(help="Devices, in all nodes. Several counts, 64,128,256, make one table.")],
    per_node: Annotated[int | None, typer.Option(min=1, help="Devices of a node. Default: as it is sold.")] = None,
    link: Annotated[float | None, typer.Option(min=0.001, help="GB/s of a device within its node.")] = None,
    adapter: Annotated[float | None, typer.Option(min=0.001, help="Gbit/s of a node to others.")] = None,
    efficiency: Annotated[
        float | None, typer.Option(min=0.01, max=1, help="Of the peak that matrix products reach.")
    ] = None,
    pipeline: Annotated[int, typer.Option(min=1, help="Stages of a pipeline; predicted only.")] = 1,
    schedule: Annotated[str, typer.Option(help="gpipe, 1f1b, interleaved or zero_bubble.")] = "1f1b",
    virtual: Annotated[int, typer.Option(min=1, help="Runs of blocks on a device (interleaved).")] = 1,
    tokens: Annotated[float | None, typer.Option(min=1, help="Default: the run's max_duration.")] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Dollars for a device and hour.")] = None,
    mtbf: Annotated[float | None, typer.Option(min=1, help="Device-hours between failures.")] = None,
    join: Annotated[str | None, typer.Option(help="A second cluster, HARDWARE:DEVICES, that trains along.")] = None,
    wan: Annotated[float, typer.Option(min=0.001, help="Gbit/s between the two clusters.")] = 10.0,
    exchange_every: Annotated[int, typer.Option(min=1, help="Steps between their exchanges.")] = 1,
    samples: Annotated[int | None, typer.Option(min=1, help="A batch of so many samples for each device.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Layouts that are shown.")] = 5,
    write: Annotated[Path | None, typer.Option(help="Write the first layout as a YAML to lay over the run.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, for programs.")] = False,
) -> None:
    """Predict memory, speed, days and cost of a run for every way of dividing the devices. Nothing is started.

    Exit code 2 when no layout fits.
    """
    from llmfoundry_lite.errors import EXIT_DONE, EXIT_USER, ConfigError
    from llmfoundry_lite.plan.plan import Plan, make_plan, parse_cluster, parse_counts, write_overlay
    from llmfoundry_lite.plan.plan import join as join_plans
    from llmfoundry_lite.plan.report import describe_joined, describe_plan, describe_plans, plan_facts
    from llmfoundry_lite.plan.search import Pipeline

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
            pipeline=Pipeline(num_stages=pipeline, schedule=schedule, virtual_stages=virtual),
            num_tokens=tokens,
            dollars_per_device_hour=price,
            device_hours_between_failures=mtbf,
        )

    clusters = [(name, number) for name in hardware.split(",") for number in parse_counts(devices)]
    if len(clusters) > 1:
        if join or write:
            raise ConfigError("--join and --write need one --hardware and one number of --devices")
        plans = [plan_on(name, number) for name, number in clusters]
        print(json.dumps([plan_facts(plan) for plan in plans], indent=1) if as_json else describe_plans(plans))
        raise typer.Exit(EXIT_DONE if any(plan.candidates for plan in plans) else EXIT_USER)
    plan = plan_on(*clusters[0])
    print(json.dumps(plan_facts(plan), indent=1) if as_json else describe_plan(plan, top))
    if join is not None:
        name, number = parse_cluster(join)
        second = make_plan(arguments, hardware=name, num_devices=number)
        print(describe_joined(plan, second, join_plans(plan, second, wan, exchange_every), wan, exchange_every))
    if write is not None:
        write_overlay(plan, write)
    raise typer.Exit(EXIT_DONE if plan.candidates else EXIT_USER)
