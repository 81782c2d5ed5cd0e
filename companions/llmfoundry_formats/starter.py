"""`llmfoundry-lite init --size`: a commented YAML for a prepared data folder. No torch."""

import json
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from llmfoundry_lite.bounded import read_json
from llmfoundry_lite.config.auto_hardware import find_devices
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.shipped import shipped_yamls
from llmfoundry_lite.errors import ConfigError, DataError, printable

TOKENS_PER_PARAMETER = 20
"""Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models": about so many for a given budget of FLOPs."""
MAX_EPOCHS = 4
"""Muennighoff et al. 2023, "Scaling Data-Constrained Language Models": about so many are nearly as good as new."""
MIN_VALIDATION = 32
"""Validation samples whose mean loss is worth drawing."""
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


class Facts(NamedTuple):
    """Facts about prepared data."""

    max_seq_len: int
    vocab_size: int
    """Ids of its tokenizer."""
    num_train: int
    """Samples; the next too."""
    num_val: int
    fingerprint: str | None
    """Fingerprint of its tokenizer."""


def write_starter(data: Path, size: str, out: Path) -> str:
    """Write `out` and return a sentence on how long it trains.

    Raises ConfigError for a size we have no YAML of, DataError without the data.
    """
    if size not in sizes():
        raise ConfigError(f"--size: {size!r} given, expected one of {', '.join(sizes())}")
    text, note = starter(data, size, out, check_places(data, out))
    write_yaml(out, text)
    return note


def check_places(data: Path, out: Path) -> Facts:
    """Return facts about the data. Raises ConfigError if `out` is there, DataError without prepared data."""
    if out.exists():
        raise ConfigError(f"{out}: there is one already; choose another name with --out, or remove it")
    summary_file = data / "summary.json"
    if not summary_file.is_file():
        raise DataError(
            f"{summary_file} does not exist; expected a folder that data prepare made: llmfoundry-lite data prepare "
            f"--source {data} --out data/{data.resolve().name} --tokenizer train:32768 --max-seq-len 2048"
        )
    try:
        summary = read_json(summary_file, "a summary")
        splits, tokenizer = summary["splits"], summary["tokenizer"]
        numbers = (summary["max_seq_len"], tokenizer["vocab_size"], splits["train"]["samples"])
        length, vocab_size, num_train, num_val = map(int, (*numbers, splits.get("val", {}).get("samples", 0)))
        return Facts(length, vocab_size, num_train, num_val, tokenizer.get("fingerprint"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{summary_file} is not what `data prepare` writes ({error}); prepare the data again"
        ) from error


def write_yaml(out: Path, text: str) -> None:
    try:
        out.write_text(text)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror}; name another place with --out") from error


def starter(data: Path, size: str, out: Path, facts: Facts) -> tuple[str, str]:
    """Return the YAML's text, and a sentence on how long it trains."""
    shape = read_shape(size)
    model, length, samples = shape["model"], facts.max_seq_len, facts.num_train
    vocab_size = -(-facts.vocab_size // 128) * 128
    batch_size = fitting_batch(shape["global_train_batch_size"], samples)
    parameters = count_parameters(model, vocab_size)
    epoch = samples // batch_size
    for_parameters = -(-TOKENS_PER_PARAMETER * parameters // (batch_size * length))
    wanted = min(for_parameters, MAX_EPOCHS * epoch)
    tokens = wanted * batch_size * length / parameters
    note = (
        f"{wanted / epoch:,.1f} epochs of {epoch:,} batches: {f'{tokens:,.1f}' if tokens >= 0.05 else f'{tokens:.1g}'} "
        f"tokens for each of about {parameters / 1e6:,.0f} M parameters"
    )
    if wanted < for_parameters:
        note += f" ({TOKENS_PER_PARAMETER} would be best; text read more than {MAX_EPOCHS} times teaches little)"
    available = MAX_EPOCHS * samples * length
    if available < parameters:
        fitting = available / TOKENS_PER_PARAMETER
        best = fitting_size(fitting, vocab_size)
        note += f"; this text is enough for {fitting / 1e6:,.2g} M parameters: "
        note += f"--size {best}" if best != size else "the smallest size will learn it by heart; add text"
    block = as_yaml({**model, "max_seq_len": "${max_seq_len}", "vocab_size": vocab_size})
    why = f"# At least the tokenizer's {facts.vocab_size}; a multiple of 128 is faster."
    parts = {"model": block.replace("vocab_size:", f"{why}\nvocab_size:"), "optimizer": as_yaml(shape["optimizer"])}
    text = fill_template(data, out, facts, title=f"MPT-{size}", batches=(wanted, batch_size, note), **parts)
    return text, note + note_on_validation(facts)


def as_yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False)


def fill_template(
    data: Path,
    out: Path,
    facts: Facts,
    *,
    title: str,
    model: str,
    optimizer: str,
    batches: tuple[int, int, str],
    load: str = "",
) -> str:
    """Return the YAML. `batches`: their number, their size, and a note; the others are lines of YAML."""
    num_batches, batch_size, note = batches
    interval, num_devices = max(1, num_batches // 20), count_devices()
    return TEMPLATE.read_text().format(
        title=printable(title),
        data=printable(str(data)),
        data_word=yaml_word(str(data)),
        out=printable(shlex.quote(str(out))),
        num_ranks=max(1, num_devices),
        run_name=yaml_word(re.sub(r"[^\w.-]+", "-", out.stem).strip(".-_") or "run"),
        max_seq_len=facts.max_seq_len,
        model=textwrap.indent(model, "  "),
        load=load,
        eval_loader=EVAL_LOADER.format(eval_interval=interval) if facts.num_val else "",
        optimizer=textwrap.indent(optimizer, "  "),
        precision="amp_bf16" if num_devices or multiplies_in_bf16() else "fp32",
        duration_note=note,
        num_batches=num_batches,
        batch_size=batch_size,
        save_interval=interval,
    )


def note_on_validation(facts: Facts) -> str:
    if facts.num_val >= MIN_VALIDATION:
        return ""
    wanted = max(10, min(20, 200 * MIN_VALIDATION // (facts.num_train + facts.num_val)))
    count = facts.num_val or "no"
    return f"; the validation split has {count} samples, which tell little: prepare with --val-fraction 0.{wanted:02}"


def fitting_batch(wanted: int, samples: int) -> int:
    """Return the batch size: of little data a power of two, which most numbers of devices can share."""
    return wanted if samples >= wanted else 1 << max(0, samples.bit_length() - 1)


def yaml_word(text: str) -> str:
    """Return `text` as a value in YAML, in quotes where it would be read as something else, and no `${…}` in it."""
    text = text.replace("${", "\\${")
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
