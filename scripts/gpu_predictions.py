"""MFU that the planner predicts of devices, beside what was measured: `python scripts/gpu_check.py predict`."""

OVERLAYS = {"a100-40gb-8": "A100-40GB", "a100-80gb-8": "A100-80GB", "h100-8": "H100-80GB", "h200-8": "H200"}
"""Overlay for CUDA -> row of the hardware table."""
MEASURED = {("h100-8", "mpt-125m", 1): 0.432, ("h100-8", "mpt-1b", 1): 0.559}
"""(overlay, model, devices) -> MFU, compiled: `benchmarks/results/h100/cases.jsonl`."""


def predict(shape: str, row_name: str | None, step: str) -> float | None:
    """Return the MFU that `plan` predicts for one of our models, on one device of the hardware table."""
    if row_name is None or shape not in ("125m", "350m", "1b", "3b", "7b"):
        return None
    compiled = ["compile_config={}"] if step.endswith(", compiled") else []
    return predict_step(f"mpt-{shape}", row_name, 1, *compiled)[0]


def predict_step(
    model: str, row_name: str, num_devices: int, *overlays: str, published: bool = False
) -> tuple[float, dict[str, float]]:
    """Return the MFU of a step with two microbatches of 8 samples on each device, and each part's share of the step.

    `published`: by the rates of 2023's software.
    """
    from llmfoundry_lite.config.layout import layout_of
    from llmfoundry_lite.config.load_train import load_train_config
    from llmfoundry_lite.hardware import ACCELERATORS
    from llmfoundry_planner.plan.step import find_hardware, step_time

    sizes = ["device_train_microbatch_size=8", f"global_train_batch_size={16 * num_devices}"]
    config = load_train_config([model, *overlays, *sizes, "max_seq_len=2048", "precision=amp_bf16"], {}).config
    device, layout = ACCELERATORS[row_name], layout_of(config, num_devices, num_devices)
    step = step_time(config, layout, find_hardware(device, published=published))
    return step.mfu(config, layout, device), step.parts()


def list_predictions() -> list[str]:
    """Return the page of predictions, with measurements made since."""
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
                before, _ = predict_step(model, row_name, num_devices, overlay, "compile_config=null", published=True)
                mfu, parts = predict_step(model, row_name, num_devices, overlay, "compile_config={}")
                words = ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if share >= 0.005)
                rates = f"{efficiency.products:.0%}, {efficiency.attention:.0%}"
                measured = MEASURED.get((overlay, model, num_devices))
                cells = [overlay, model, str(num_devices), rates, f"{before:.1%}", f"{mfu:.1%}"]
                lines.append(f"| {' | '.join([*cells, f'{measured:.1%}' if measured else '', words])} |")
    return lines
