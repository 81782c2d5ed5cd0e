"""`llmfoundry-lite init`: a commented YAML for a prepared data folder. No torch."""

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
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.models.flops import TOKENS_PER_PARAMETER

MAX_EPOCHS = 4
"""Epochs of a text that are nearly as good as new text (Muennighoff et al. 2023, "Scaling Data-Constrained Language
Models")."""
MANY_BATCHES = 2000
"""Batches of a run of a size in between, about. With more, each is too small to be fast; with fewer, steps are few."""
BATCH_TOKENS = (2048, 65536)
"""Fewest and most tokens in a batch of such a run."""
WIDTHS = (*range(96, 384, 32), *range(384, 833, 64))
MILLIONS = (1, 125)
"""Smallest and largest model of a size that no YAML of ours has, in millions of parameters."""
SHARE_OF_HOURS = 0.85
"""Share of the hours for training. The rest is for starting, saving and evaluating."""
NUM_LINES = 400
"""Approximate number of progress lines that a run prints."""
MIN_VALIDATION = 32
"""Validation samples whose mean loss is worth drawing."""
CPU_INFO = Path("/proc/cpuinfo")
BF16_FLAGS = ("avx512_bf16", "amx_bf16")
RATE = """\
  # Measured on this machine by init --hours. A dry run computes the hours from it.
  tokens_per_second: {rate}
"""
TEMPLATE = Path(__file__).with_name("starter.template")
EVAL_LOADER = """\
eval_loader:
  name: text
  dataset:
    local: ${{variables.data}}
    split: val
  num_workers: 2
eval_interval: {eval_interval}ba
# Number of batches, so that the run's evaluations take about a twentieth of its time; -1 for all.
eval_subset_num_batches: {subset}
device_eval_batch_size: 8

"""


class Speed(NamedTuple):
    """Speed of this machine for one shape, and the hours that it may train."""

    tokens_per_second: float
    hours: float

    @property
    def max_tokens(self) -> float:
        return self.hours * 3600 * SHARE_OF_HOURS * self.tokens_per_second

    def describe(self, num_tokens: float) -> str:
        hours = num_tokens / self.tokens_per_second / 3600
        return f"{hours:.2g} hours of training at {self.tokens_per_second:,.0f} tokens per second, measured here"


class Shape(NamedTuple):
    """A model and how it is trained."""

    size: str
    model: dict[str, Any]
    optimizer: dict[str, Any]
    batch_size: int | None
    """Samples; None: chosen by the length of the run."""


def sizes() -> list[str]:
    runs = (name for name, path in shipped_yamls().items() if path.parent.name == "pretrain")
    return [name.removeprefix("mpt-") for name in runs if name.startswith("mpt-")]


class Facts(NamedTuple):
    """Facts about prepared data."""

    max_seq_len: int
    vocab_size: int
    """Ids of its tokenizer."""
    num_train: int
    """Training samples; `num_val` counts validation samples."""
    num_val: int
    fingerprint: str | None
    """Fingerprint of its tokenizer."""

    @property
    def vocab_rounded(self) -> int:
        """Ids, rounded up to a multiple of 128, which is faster."""
        return -(-self.vocab_size // 128) * 128


def write_starter(data: Path, size: str, out: Path) -> str:
    """Write `out` and return a sentence on how long it trains.

    Raises ConfigError for an unknown size, DataError without the data.
    """
    facts = check_places(data, out)
    text, note = starter(data, out, facts, read_shape(size, facts.vocab_rounded))
    write_yaml(out, text)
    return note


def check_places(data: Path, out: Path) -> Facts:
    """Return facts about the data. Raises ConfigError if `out` exists, DataError without prepared data."""
    check_free(out)
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
            f"{summary_file} is not a file that `data prepare` writes ({error}); prepare the data again"
        ) from error


def check_free(out: Path) -> None:
    if out.exists():
        raise ConfigError(f"{out}: already exists; choose another name with --out, or remove it")


def write_yaml(out: Path, text: str) -> None:
    try:
        write_atomically(out, text)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror}; name another place with --out") from error


def starter(data: Path, out: Path, facts: Facts, shape: Shape, speed: Speed | None = None) -> tuple[str, str]:
    """Return the YAML's text, and a sentence on how long it trains: in at most `speed`'s time, if that is given."""
    parameters, batch_size, wanted, for_parameters = length_of_run(facts, shape, speed)
    batch_tokens, samples = batch_size * facts.max_seq_len, facts.num_train
    tokens = wanted * batch_tokens / parameters
    note = (
        f"{wanted * batch_size / samples:,.1f} epochs of {samples // batch_size:,} batches: "
        f"{f'{tokens:,.1f}' if tokens >= 0.05 else f'{tokens:.1g}'} tokens for each of about "
        f"{parameters / 1e6:,.{0 if parameters > 1e7 else 1}f} M parameters"
    )
    available = MAX_EPOCHS * samples * facts.max_seq_len
    if wanted < for_parameters:
        is_read_out = wanted == MAX_EPOCHS * (samples // batch_size)
        why = f"; text read more than {MAX_EPOCHS} times teaches little" if is_read_out else ", in more hours"
        note += f" ({TOKENS_PER_PARAMETER} would be best{why})"
    if speed is not None:
        note += f", {speed.describe(wanted * batch_tokens)}"
    elif available < parameters:
        fitting = available / TOKENS_PER_PARAMETER
        advised = fitting_size(fitting, facts.vocab_rounded)
        note += f"; this text is enough for {fitting / 1e6:,.2g} M parameters: "
        note += f"--size {advised}" if advised != shape.size else "the smallest size will learn it by heart; add text"
    block = as_yaml({**shape.model, "max_seq_len": "${max_seq_len}", "vocab_size": facts.vocab_rounded})
    why = f"# At least the tokenizer's {facts.vocab_size}; a multiple of 128 is faster."
    parts = {"model": block.replace("vocab_size:", f"{why}\nvocab_size:"), "optimizer": as_yaml(shape.optimizer)}
    rate = None if speed is None else round(speed.tokens_per_second)
    text = fill_template(
        data, out, facts, title=f"MPT-{shape.size}", batches=(wanted, batch_size, note), rate=rate, **parts
    )
    return text, note + note_on_validation(facts)


def length_of_run(facts: Facts, shape: Shape, speed: Speed | None = None) -> tuple[int, int, int, int]:
    """Return the parameters, the samples of a batch, the batches, and the batches that would be best."""
    length, parameters = facts.max_seq_len, count_parameters(shape.model, facts.vocab_rounded)
    tokens = min(TOKENS_PER_PARAMETER * parameters, MAX_EPOCHS * facts.num_train * length)
    tokens = tokens if speed is None else min(tokens, speed.max_tokens)
    batch_size = shape.batch_size
    if batch_size is None:
        low, high = BATCH_TOKENS
        batch_size = 1 << max(0, int(min(max(tokens / MANY_BATCHES, low), high) / length).bit_length() - 1)
    batch_size = fitting_batch(batch_size, facts.num_train)
    best = -(-TOKENS_PER_PARAMETER * parameters // (batch_size * length))
    wanted = min(best, MAX_EPOCHS * (facts.num_train // batch_size))
    if speed is not None:
        wanted = max(1, min(wanted, int(speed.max_tokens / (batch_size * length))))
    return parameters, batch_size, wanted, best


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
    rate: int | None = None,
) -> str:
    """Return the YAML. `batches`: their number, their size, and a note; `rate`: tokens per second, if they
    were measured; the others are lines of YAML."""
    num_batches, batch_size, note = batches
    interval, num_devices = max(num_batches // 20, min(num_batches, 10)), count_devices()
    return TEMPLATE.read_text(encoding="utf-8").format(
        title=printable(title),
        data=printable(str(data)),
        data_word=yaml_word(str(data)),
        out=printable(shlex.quote(str(out))),
        ranks=f" -n {num_devices}" if num_devices > 1 else "",
        rate=RATE.format(rate=rate) if rate else "",
        run_name=yaml_word(re.sub(r"[^\w.-]+", "-", out.stem).strip(".-_") or "run"),
        max_seq_len=facts.max_seq_len,
        model=textwrap.indent(model, "  "),
        load=load,
        eval_loader=describe_validation(facts, num_batches, batch_size, interval),
        optimizer=textwrap.indent(optimizer, "  "),
        precision=precision_here(),
        duration_note=note,
        num_batches=num_batches,
        batch_size=batch_size,
        save_interval=interval,
        log_interval=max(1, num_batches // NUM_LINES),
    )


def describe_validation(facts: Facts, num_batches: int, batch_size: int, interval: int) -> str:
    """Return the YAML's lines; empty without validation data. An evaluated batch costs a third of a trained one."""
    if not facts.num_val:
        return ""
    subset = max(1, num_batches * 3 // 400)
    is_all = subset * batch_size >= facts.num_val
    return EVAL_LOADER.format(eval_interval=interval, subset=-1 if is_all else subset)


def note_on_validation(facts: Facts) -> str:
    if facts.num_val >= MIN_VALIDATION:
        return ""
    wanted = max(10, min(20, 200 * MIN_VALIDATION // (facts.num_train + facts.num_val)))
    count = facts.num_val or "no"
    remedy = f"prepare with --val-fraction 0.{wanted:02} or in more files"
    return f"; the validation split has {count} samples, which tell little: {remedy}"


def fitting_batch(wanted: int, samples: int) -> int:
    """Return the batch size. For little data it is a power of two, which most numbers of devices can share."""
    return wanted if samples >= wanted else 1 << max(0, samples.bit_length() - 1)


def yaml_word(text: str) -> str:
    """Return `text` as a YAML value: quoted where YAML would read something else, and with `${…}` escaped."""
    text = text.replace("${", "\\${")
    try:
        is_plain = yaml.safe_load(f"x: {text}") == {"x": text}
    except yaml.YAMLError:
        is_plain = False
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def read_shape(size: str, vocab_size: int) -> Shape:
    """Return the shape of one of our YAMLs, or one in between with about `size` parameters. Raises ConfigError."""
    if size in sizes():
        found = yaml.safe_load(shipped_yamls()[f"mpt-{size}"].read_text())
        return Shape(size, found["model"], found["optimizer"], found["global_train_batch_size"])
    given = re.fullmatch(r"(\d{1,3}(?:\.\d)?)m", size)
    if given is None or not MILLIONS[0] <= float(given[1]) <= MILLIONS[1]:
        raise ConfigError(
            f"--size: {size!r} given, expected one of {', '.join(sizes())}, or one in between such as 3m, 10m or 30m"
        )
    wanted = float(given[1]) * 1e6
    return min(
        map(scaled_shape, WIDTHS), key=lambda one: abs(count_parameters(one.model, vocab_size) - wanted)
    )._replace(size=size)


def scaled_shape(d_model: int) -> Shape:
    """Return the quickstart's model and optimizer at another width, with the depth in proportion.

    The rate of the embedding falls with the width (Yang et al. 2022, "Tensor Programs V"). Muon's stays.
    """
    _, model, optimizer, _ = read_shape("quickstart", 0)
    relative = d_model / model["d_model"]
    changes = {
        "d_model": d_model,
        "n_heads": d_model // (32 if d_model < 384 else 64),
        "n_layers": max(2, round(model["n_layers"] * relative)),
        "ffn_config": {**model["ffn_config"], "ffn_hidden_size": 16 * round(d_model / 6)},
    }
    rate, dtype = float(f"{optimizer['adamw_lr'] / relative:.2g}"), precision_here().removeprefix("amp_")
    optimizer = {**optimizer, "adamw_lr": rate, "ns_dtype": dtype}
    return Shape(f"{d_model}-wide", {**model, **changes}, optimizer, None)


def count_parameters(model: dict[str, Any], vocab_size: int) -> int:
    shape = ModelConfig(d_model=model["d_model"], n_layers=model["n_layers"], vocab_size=vocab_size)
    return shape.num_matrix_parameters


def fitting_size(parameters: float, vocab_size: int) -> str:
    """Return the name of a size with about this number of parameters: one of our YAMLs', or one like `7m`."""
    counts = {size: count_parameters(read_shape(size, 0).model, vocab_size) for size in sizes()}
    low, high = MILLIONS
    if low * 1e6 <= parameters <= high * 1e6:
        return f"{parameters / 1e6:.0f}m"
    fitting = [size for size in counts if counts[size] <= parameters]
    return max(fitting, key=counts.__getitem__) if fitting else min(counts, key=counts.__getitem__)


def precision_here() -> str:
    return "amp_bf16" if count_devices() or multiplies_in_bf16() else "fp32"


def count_devices() -> int:
    """Return the number of this machine's accelerators; 1 where there are two kinds, since a launch must name one."""
    try:
        found = find_devices()
    except ConfigError:
        return 1
    return found.num_devices if found else 0


def multiplies_in_bf16() -> bool:
    """Return whether this machine's CPU has instructions for bf16; without them it is slower than fp32."""
    flags = CPU_INFO.read_text() if CPU_INFO.exists() else ""
    return any(flag in flags for flag in BF16_FLAGS)
