"""`llmfoundry-lite plan --check RUN`: compare a finished run's rates with those that `plan` predicts. No torch.

A run may have moved between layouts and devices. Its checkpoints record each span of batches that ran in one place, a
segment, and each segment is compared for itself.
"""

from dataclasses import replace

from llmfoundry_lite.checkpoint.manifest import Segment
from llmfoundry_lite.config.counted_model import counted_model, describe_told_parts
from llmfoundry_lite.config.layout import divide_devices
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.sharding_schema import ContextParallelConfig, PipelineConfig
from llmfoundry_lite.hardware import Accelerator, find_accelerator
from llmfoundry_lite.report.reading import config_of, read_run
from llmfoundry_lite.report.segments import accelerator_of, measure_segment
from llmfoundry_planner.plan.step import find_hardware, refuse_schedules, refuse_unknown_layers, step_time


def check_run(run_location: str) -> str:
    """Return a table of measured and predicted tokens/s of a device, with a row for each segment of a run.

    Segments that cannot be predicted follow with the reason, then the sources of the predictions. `run_location` is a
    run's folder or URL. Raises DataError if it cannot be read, and ConfigError if its configuration is not valid, or
    has a layer that cannot be timed or batches of several sizes or lengths.
    """
    run = read_run(run_location)
    config = config_of(run)
    refuse_unknown_layers(counted_model(config.model), "so there is no prediction to compare this run with")
    refuse_schedules(config, advice="so there is no prediction to compare this run with")
    lines = [f"{config.run_name}: tokens/s of each device", "   batches  devices             measured  predicted"]
    left_out: list[str] = []
    sources: dict[str, str] = {}  # by name of the accelerator
    for segment in run.segments:
        accelerator = accelerator_of(run.log, segment)
        if accelerator is None:
            left_out.append(f"{segment.span}: {describe_unknown(segment.device)}, no prediction")
            continue
        measured_rate = measure_segment(run.log, segment, {})["tokens_per_second_per_device"]
        if not measured_rate or not segment.num_devices:
            left_out.append(f"{segment.span}: the log does not tell how fast it was, nothing to compare")
            continue

        try:
            predicted_rate = predict(config, segment, accelerator, segment.num_devices)
        except (ValueError, ArithmeticError) as error:
            # A layout that is not possible, or a record that this release did not write.
            lines.append(f"{segment.span}: no prediction: {error}")
            continue
        devices = f"{segment.num_devices} x {accelerator.name}"
        lines.append(
            f"{segment.span:>10}  {devices:<18}{measured_rate:>10,.0f}{predicted_rate:>11,.0f}"
            f"  {predicted_rate / measured_rate - 1:+.1%}"
        )
        origin = find_hardware(accelerator).origin(segment.num_devices)
        sources[accelerator.name] = f"predicted {accelerator.name}: {origin}"

    told_parts = describe_told_parts(config.model)
    if told_parts:
        left_out.append(f"predicted with {told_parts}, as the class says")
    if not run.segments:
        left_out.append("no checkpoint of this run says where it ran: nothing to compare")
    return "\n".join([*lines, *left_out, *sources.values()])


def predict(config: TrainConfig, segment: Segment, accelerator: Accelerator, num_devices: int) -> float:
    """Predict tokens per second of each device in a segment, as `plan` would for the layout that it ran with.

    The segment records the layout as text, such as "4 stages, 1f1b" and "2, heads". Raises ConfigError for a layout
    that is not possible, and ValueError for text in another form.
    """
    sharding = replace(
        config.sharding,
        sharding_strategy=segment.sharding or config.sharding.sharding_strategy,
        data_parallel_shard_degree=segment.shard_degree,
    )

    pipeline = None
    if segment.pipeline is not None:
        degree, schedule = segment.pipeline.split(" stages, ")
        pipeline = PipelineConfig(pipeline_parallel_degree=int(degree), schedule=schedule)
        run_pipeline = config.pipeline
        is_pipeline_of_run = (run_pipeline.pipeline_parallel_degree, run_pipeline.schedule) == (int(degree), schedule)
        if is_pipeline_of_run:
            pipeline = run_pipeline  # it also says which blocks each stage has

    context = None
    if segment.context is not None:
        degree, kind = segment.context.split(", ")
        context = ContextParallelConfig(context_parallel_degree=int(degree), kind=kind)

    microbatch_size = segment.device_train_microbatch_size or config.global_train_batch_size // num_devices
    config = replace(
        config,
        pp_config=pipeline,
        cp_config=context,
        fsdp_config=sharding,
        device_train_microbatch_size=microbatch_size,
    )
    hardware = find_hardware(accelerator)
    layout = divide_devices(
        sharding,
        num_devices,
        hardware.node.num_devices,
        segment.tensor_parallel_degree or 1,
        pipeline=config.pipeline.pipeline_parallel_degree,
        context=config.context.context_parallel_degree,
    )
    return step_time(config, layout, hardware).tokens_per_second / num_devices


def describe_unknown(device: str | None) -> str:
    """Return why a segment's accelerator is unknown, from the device name that its checkpoint records.

    The MFU in the log tells which peak it was computed with, and so which accelerator of the table it was.
    """
    if device is None:
        return "the checkpoint does not name the device"
    if find_accelerator(device):
        return f"{device} has no MFU in the log"
    return f"{device} is not in the table"
