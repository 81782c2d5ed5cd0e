"""`llmfoundry-lite plan --check RUN`: a finished run's rates beside those that `plan` predicts. No torch."""

from dataclasses import replace

from llmfoundry_lite.checkpoint.manifest import Segment
from llmfoundry_lite.config.layout import divide_devices
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.sharding_schema import ContextParallelConfig, PipelineConfig
from llmfoundry_lite.hardware import Accelerator, find_accelerator
from llmfoundry_lite.report.reading import config_of, read_run
from llmfoundry_lite.report.segments import accelerator_of, measure_segment
from llmfoundry_planner.plan.step import find_hardware, step_time


def check_run(where: str) -> str:
    """Return a line for each span of the run's batches, and one for each that has no prediction.

    Raises DataError and ConfigError.
    """
    run = read_run(where)
    config = config_of(run)
    lines = [f"{config.run_name}: tokens/s of each device", "   batches  devices             measured  predicted"]
    left_out, sources = [], dict[str, str]()
    for segment in run.segments:
        row = accelerator_of(run.log, segment)
        rate = measure_segment(run.log, segment, {})["tokens_per_second_per_device"]
        if row is None:
            left_out.append(f"{segment.span}: {describe_unknown(segment.device)}, no prediction")
            continue
        if not rate or not segment.num_devices:
            left_out.append(f"{segment.span}: the log does not tell how fast it was, nothing to compare")
            continue
        try:
            predicted = predict(config, segment, row, segment.num_devices)
        except (ValueError, ArithmeticError) as error:  # a layout that cannot be, or words that no run of ours records
            lines.append(f"{segment.span}: no prediction: {error}")
            continue
        devices = f"{segment.num_devices} x {row.name}"
        sources[row.name] = f"predicted {row.name}: {find_hardware(row).origin(segment.num_devices)}"
        lines.append(f"{segment.span:>10}  {devices:<18}{rate:>10,.0f}{predicted:>11,.0f}  {predicted / rate - 1:+.1%}")
    if not run.segments:
        left_out.append("no checkpoint of this run says where it ran: nothing to compare")
    return "\n".join([*lines, *left_out, *sources.values()])


def predict(config: TrainConfig, segment: Segment, row: Accelerator, num_devices: int) -> float:
    """Predict tokens per second of each device in a span, as `plan` would. Raises ConfigError."""
    strategy = segment.sharding or config.sharding.sharding_strategy
    fsdp = replace(config.sharding, sharding_strategy=strategy, data_parallel_shard_degree=segment.shard_degree)
    pipeline = context = None
    if segment.pipeline is not None:  # "4 stages, 1f1b"
        degree, schedule = segment.pipeline.split(" stages, ")
        pipeline = PipelineConfig(pipeline_parallel_degree=int(degree), schedule=schedule)
        own = config.pipeline
        if (own.pipeline_parallel_degree, own.schedule) == (int(degree), schedule):
            pipeline = own
    if segment.context is not None:  # "2, heads"
        degree, kind = segment.context.split(", ")
        context = ContextParallelConfig(context_parallel_degree=int(degree), kind=kind)
    size = segment.device_train_microbatch_size or config.global_train_batch_size // num_devices
    config = replace(config, pp_config=pipeline, cp_config=context, fsdp_config=fsdp, device_train_microbatch_size=size)
    hardware = find_hardware(row)
    layout = divide_devices(
        *(fsdp, num_devices, hardware.node.num_devices, segment.tensor_parallel_degree or 1),
        pipeline=config.pipeline.pipeline_parallel_degree,
        context=config.context.context_parallel_degree,
    )
    return step_time(config, layout, hardware).tokens_per_second / num_devices


def describe_unknown(device: str | None) -> str:
    """Say why the device's row is unknown: the run's own MFU tells by which peak it was computed."""
    if device is None:
        return "the checkpoint does not name the device"
    return f"{device} {'has no MFU in the log' if find_accelerator(device) else 'is not in the table'}"
