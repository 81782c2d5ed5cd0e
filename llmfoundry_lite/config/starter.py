"""`llmfoundry-lite init`: a commented YAML for a prepared data folder and a size. No torch."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from llmfoundry_lite.config.auto_hardware import find_devices
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.shipped import shipped_yamls
from llmfoundry_lite.errors import ConfigError, DataError

TOKENS_PER_PARAMETER = 20
"""Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models": about so many for a given budget of FLOPs."""
MAX_EPOCHS = 4
"""Muennighoff et al. 2023, "Scaling Data-Constrained Language Models": about so many are nearly as good as new."""
MIN_VALIDATION = 32
"""Validation samples whose mean loss is worth drawing."""
ADAMW_LR = 3e-3
"""Learning rate for a shape whose own YAML has another optimizer."""
CPU_INFO = Path("/proc/cpuinfo")
BF16_FLAGS = ("avx512_bf16", "amx_bf16")
TEMPLATE = Path(__file__).with_name("starter.template")
EVAL_LOADER = """\
eval_loader:
  name: text
  dataset:
    local: ${{variables.data}}
    split: val
  num_workers: 2
eval_interval: {eval_interval}ba
device_eval_batch_size: 8

"""


def sizes() -> list[str]:
    runs = (name for name, path in shipped_yamls().items() if path.parent.name == "pretrain")
    return [name.removeprefix("mpt-") for name in runs if name.startswith("mpt-")]


def write_starter(data: Path, size: str, out: Path) -> str:
    """Write `out` and return a sentence on how long it trains.

    Raises ConfigError for a size we have no YAML of, DataError without the data.
    """
    if size not in sizes():
        raise ConfigError(f"--size: {size!r} given, expected one of {', '.join(sizes())}")
    if out.exists():
        raise ConfigError(f"{out}: there is one already; choose another name with --out, or remove it")
    summary_file = data / "summary.json"
    if not summary_file.is_file():
        raise DataError(
            f"{summary_file} does not exist; expected a folder that data prepare made: llmfoundry-lite data prepare "
            f"--source {data} --out data/{data.resolve().name} --tokenizer train:32768 --max-seq-len 2048"
        )
    try:
        summary = json.loads(summary_file.read_text())
        splits = summary["splits"]
        facts = (summary["max_seq_len"], summary["tokenizer"]["vocab_size"], splits["train"]["samples"])
        length, tokenizer_size, num_train, num_val = map(int, (*facts, splits.get("val", {}).get("samples", 0)))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{summary_file} is not what `data prepare` writes ({error}); prepare the data again"
        ) from error
    text, duration_note = starter(data, size, out, length, tokenizer_size, num_train, has_val=num_val > 0)
    if num_val < MIN_VALIDATION:
        duration_note += (
            f"; the validation split has {num_val or 'no'} samples, which tell little: prepare with --val-fraction 0.05"
        )
    try:
        out.write_text(text)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror}; name another place with --out") from error
    return duration_note


def starter(
    data: Path, size: str, out: Path, length: int, tokenizer_size: int, samples: int, *, has_val: bool
) -> tuple[str, str]:
    """Return the YAML's text, and a sentence on how long it trains."""
    shape = read_shape(size)
    model, batch_size = shape["model"], shape["global_train_batch_size"]
    vocab_size = -(-tokenizer_size // 128) * 128
    if samples < batch_size:
        batch_size = 1 << max(0, samples.bit_length() - 1)  # a power of two, which most numbers of devices can share
    parameters = count_parameters(model, vocab_size)
    epoch = samples // batch_size
    for_parameters = -(-TOKENS_PER_PARAMETER * parameters // (batch_size * length))
    wanted = min(for_parameters, MAX_EPOCHS * epoch)
    note = (
        f"{wanted / epoch:,.1f} epochs of {epoch:,} batches: {wanted * batch_size * length / parameters:,.1f} tokens "
        f"for each of about {parameters / 1e6:,.0f} M parameters"
    )
    if wanted < for_parameters:
        note += f" ({TOKENS_PER_PARAMETER} would be best; text read more than {MAX_EPOCHS} times teaches little)"
    available = MAX_EPOCHS * samples * length
    if available < parameters:
        fitting = available / TOKENS_PER_PARAMETER
        note += (
            f"; this text is enough for {fitting / 1e6:,.2g} M parameters: --size {fitting_size(fitting, vocab_size)}"
        )
    interval, num_devices = max(1, wanted // 20), count_devices()
    text = TEMPLATE.read_text().format(
        size=size,
        data=data,
        data_word=yaml_word(str(data)),
        out=shlex.quote(str(out)),
        num_ranks=max(1, num_devices),
        run_name=yaml_word(re.sub(r"[^\w.-]+", "-", out.stem).strip(".-_") or "run"),
        max_seq_len=length,
        tokenizer_size=tokenizer_size,
        vocab_size=vocab_size,
        eval_loader=EVAL_LOADER.format(eval_interval=interval) if has_val else "",
        lr=shape["optimizer"]["lr"] if shape["optimizer"]["name"] == "decoupled_adamw" else ADAMW_LR,
        precision="amp_bf16" if num_devices or multiplies_in_bf16() else "fp32",
        duration_note=note,
        num_batches=wanted,
        batch_size=batch_size,
        save_interval=interval,
        **{key: model[key] for key in ("d_model", "n_heads", "n_layers")},
    )
    return text, note


def yaml_word(text: str) -> str:
    """Return `text` as a value in YAML, in quotes where it would be read as something else."""
    try:
        is_plain = yaml.safe_load(f"x: {text}") == {"x": text}
    except yaml.YAMLError:
        is_plain = False
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def read_shape(size: str) -> dict[str, Any]:
    return yaml.safe_load(shipped_yamls()[f"mpt-{size}"].read_text())


def count_parameters(model: dict[str, Any], vocab_size: int) -> int:
    shape = ModelConfig(d_model=model["d_model"], n_layers=model["n_layers"], vocab_size=vocab_size)
    return shape.num_matrix_parameters


def fitting_size(parameters: float, vocab_size: int) -> str:
    """Return the largest size with at most so many parameters, or the smallest."""
    counts = {size: count_parameters(read_shape(size)["model"], vocab_size) for size in sizes()}
    fitting = [size for size in counts if counts[size] <= parameters]
    return max(fitting, key=counts.__getitem__) if fitting else min(counts, key=counts.__getitem__)


def count_devices() -> int:
    """Return the number of this machine's accelerators; 1 where there are two kinds, of which a launch names one."""
    try:
        found = find_devices()
    except ConfigError:
        return 1
    return found.num_devices if found else 0


def multiplies_in_bf16() -> bool:
    """Return whether this machine's CPU has instructions for it, without which bf16 is slower than fp32."""
    flags = CPU_INFO.read_text() if CPU_INFO.exists() else ""
    return any(flag in flags for flag in BF16_FLAGS)
