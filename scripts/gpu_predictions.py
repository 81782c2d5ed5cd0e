"""MFU that the planner predicts for devices, beside what was measured: `python scripts/gpu_check.py predict`.

`predict` is for the proof of a measurement, and `list_predictions` for the page docs/measurements/mfu-predicted.md.
"""

OVERLAYS = {"a100-40gb-8": "A100-40GB", "a100-80gb-8": "A100-80GB", "h100-8": "H100-80GB", "h200-8": "H200"}
"""Overlay of a cluster with CUDA -> the row of the hardware table with its device."""
MEASURED = {("h100-8", "mpt-125m", 1): 0.432, ("h100-8", "mpt-1b", 1): 0.559}
"""(overlay, model, number of devices) -> MFU of the compiled model, from `benchmarks/results/h100/cases.jsonl`."""


def predict(shape: str, row_name: str | None, step: str) -> float | None:
    """Return the MFU that `plan` predicts for one device, or None if the device or the shape is not known to it.

    `row_name` is the device's row of the hardware table. `step` is the name of a row of `bench mfu`, such as
    `sdpa, compiled`, which tells whether the model is compiled.
    """
    if row_name is None or shape not in ("125m", "350m", "1b", "3b", "7b"):
        return None
    compiled = ["compile_config={}"] if step.endswith(", compiled") else []
    return predict_step(f"mpt-{shape}", row_name, 1, *compiled)[0]


def predict_step(
    model: str, row_name: str, num_devices: int, *overlays: str, published: bool = False
) -> tuple[float, dict[str, float]]:
    """Predict the MFU of a step, and each part's share of the step's time: name of the part -> share.

    The step has two microbatches of 8 x 2,048 tokens on each of `num_devices` devices of a hardware table's row, in
    bf16. `model` is a configuration and `overlays` are what is put over it. `published` takes the rates of LLM
    Foundry's software of 2023 in place of those of today.
    """
    from llmfoundry_lite.config.layout import layout_of
    from llmfoundry_lite.config.load_train import load_train_config
    from llmfoundry_lite.hardware import ACCELERATORS
    from llmfoundry_planner.plan.step import find_hardware, step_time

    sizes = ["device_train_microbatch_size=8", f"global_train_batch_size={16 * num_devices}"]
    config = load_train_config([model, *overlays, *sizes, "max_seq_len=2048", "precision=amp_bf16"], {}).config
    device = ACCELERATORS[row_name]
    layout = layout_of(config, num_devices, num_devices)
    step = step_time(config, layout, find_hardware(device, published=published))
    return step.mfu(config, layout, device), step.parts()


def list_predictions() -> list[str]:
    """Return the lines of the page of predictions, with the measurements that were made since."""
    from llmfoundry_lite.hardware import ACCELERATORS
    from llmfoundry_planner.plan.step import find_hardware

    lines = [
        "# MFU, predicted and measured",
        "",
        "Printed by `python scripts/gpu_check.py predict`. Two microbatches of 8 x 2,048 tokens on each device,",
        "bf16, compiled. The parts of a step and their rates are those of [`plan`](../plan.md): matrix products",
        "and attention run at the shares of the peak in the row, and everything else at 85 % of the memory's",
        "bandwidth. The column `MFU of 2023` was predicted before any GPU was measured, without compilation, with",
        "rates fitted to LLM Foundry's throughput of 2023. The rates of the H100 are now fitted to [one that was",
        "measured](h100.md), with 16 and 64 samples per step, so its two rows with one device prove little. The",
        "H200 has the rates of the H100. The A100 has only rates of 2023, with the H100's gain by compiling, which",
        "has not been measured on an A100.",
        "",
        "| overlay | model | devices | products, attention at | MFU of 2023 | MFU predicted | measured | parts |",
        "|---|---|---:|---|---:|---:|---:|---|",
    ]
    for overlay, row_name in OVERLAYS.items():
        efficiency = find_hardware(ACCELERATORS[row_name]).efficiency
        for model in ("mpt-125m", "mpt-1b"):
            for num_devices in (1, 8):
                mfu_of_2023, _ = predict_step(
                    model, row_name, num_devices, overlay, "compile_config=null", published=True
                )
                mfu, shares = predict_step(model, row_name, num_devices, overlay, "compile_config={}")
                measured_mfu = MEASURED.get((overlay, model, num_devices))
                cells = [
                    overlay,
                    model,
                    str(num_devices),
                    f"{efficiency.products:.0%}, {efficiency.attention:.0%}",
                    f"{mfu_of_2023:.1%}",
                    f"{mfu:.1%}",
                    f"{measured_mfu:.1%}" if measured_mfu else "",
                    ", ".join(f"{part} {share:.0%}" for part, share in shares.items() if share >= 0.005),
                ]
                lines.append(f"| {' | '.join(cells)} |")
    return lines
