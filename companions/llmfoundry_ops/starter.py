"""`llmfoundry-lite init`: writes a commented YAML for a prepared data folder. No torch.

`write_starter` is the story: `check_places` reads the facts of the data, `read_shape` chooses a model by its size, and
`build_starter` computes how long the run is and fills the template. `hours.py` and `like.py` choose a model in other
ways, and use the same parts.
"""

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
"""Approximate number of batches of a run whose model is between our YAMLs in size. With more, each batch is too small
to be fast; with fewer, the optimizer takes too few steps. This is a choice, not a measurement."""
MIN_BATCH_TOKENS = 2048
MAX_BATCH_TOKENS = 65536
"""Limits of the tokens in a batch of such a run."""
WIDTHS = (*range(96, 384, 32), *range(384, 833, 64))
"""Widths of the models between our YAMLs: multiples of the size of a head, which is 32 or 64."""
MILLIONS = (1, 125)
"""Smallest and largest model of a size that no YAML of ours has, in millions of parameters."""
SHARE_OF_HOURS = 0.85
"""Share of the hours for training. The rest is for starting, saving and evaluating."""
NUM_LINES = 400
"""Approximate number of progress lines that a run prints."""
NUM_SAVES = 20
"""Approximate number of saves in a run, and of evaluations."""
MIN_BATCHES_BETWEEN_SAVES = 10
MIN_VALIDATION = 32
"""Validation samples whose mean loss is worth drawing."""
CPU_INFO = Path("/proc/cpuinfo")
BF16_FLAGS = ("avx512_bf16", "amx_bf16")
"""Flags in CPU_INFO of processors that multiply in bf16."""
RATE = """\
  # Measured on this machine by init --hours. A dry run computes the hours from it.
  tokens_per_second: {rate}
"""
TEMPLATE = Path(__file__).with_name("starter.template")
TRAINING_DATA = {
    "tokenizer": """\
tokenizer:
  name: ${variables.data}/tokenizer
""",
    "train_loader": """\
train_loader:
  name: text
  dataset:
    local: ${variables.data}
    # remote: s3://bucket/data      # shards are downloaded from here into `local`
    split: train
    shuffle: true
    shuffle_seed: ${seed}
  num_workers: 2
""",
}
"""Key of a block that says where the data is -> its lines."""
VALIDATION_DATA = """\
eval_loader:
  name: text
  dataset:
    local: ${variables.data}
    split: val
  num_workers: 2
"""
EVALUATIONS = """\
eval_interval: {eval_interval}ba
# Number of batches, so that the run's evaluations take about a twentieth of its time; -1 for all.
eval_subset_num_batches: {subset}
device_eval_batch_size: 8

"""


class Speed(NamedTuple):
    """Speed at which this machine trains one shape, and the time for which it may."""

    tokens_per_second: float
    hours: float

    @property
    def max_tokens(self) -> float:
        """Number of tokens that can be trained in the time."""
        return self.hours * 3600 * SHARE_OF_HOURS * self.tokens_per_second

    def describe(self, num_tokens: float) -> str:
        """Say how long it takes to train on a number of tokens."""
        hours = num_tokens / self.tokens_per_second / 3600
        return f"{hours:.2g} hours of training at {self.tokens_per_second:,.0f} tokens per second, measured here"


class Shape(NamedTuple):
    """A model and how it is trained."""

    size: str
    """Name of the size, such as 125m."""
    model: dict[str, Any]
    """The block `model` of a YAML."""
    optimizer: dict[str, Any]
    """The block `optimizer` of a YAML."""
    batch_size: int | None
    """Samples in a batch; None if it is chosen by the length of the run."""


class RunLength(NamedTuple):
    """Time for which a run trains."""

    num_parameters: int
    batch_size: int
    """Samples in a batch."""
    num_batches: int
    best_num_batches: int
    """Batches with TOKENS_PER_PARAMETER tokens for each parameter. The text or the time may not suffice for them."""


def sizes() -> list[str]:
    """Return the names of sizes for which we have a YAML: 125m for `pretrain/mpt-125m.yaml`."""
    names = [name for name, path in shipped_yamls().items() if path.parent.name == "pretrain"]
    return [name.removeprefix("mpt-") for name in names if name.startswith("mpt-")]


class Facts(NamedTuple):
    """Facts about prepared data."""

    max_seq_len: int
    """Tokens in a sample."""
    vocab_size: int
    """Number of ids of its tokenizer."""
    num_train: int
    """Number of training samples."""
    num_val: int
    """Number of validation samples."""
    fingerprint: str | None
    """Fingerprint of its tokenizer."""

    @property
    def vocab_rounded(self) -> int:
        """Number of ids, rounded up to a multiple of 128, which is faster."""
        return -(-self.vocab_size // 128) * 128


def write_starter(data: Path, size: str, out: Path) -> str:
    """Write a YAML to `out` that trains a model of a size on prepared data. Returns a sentence on how long it trains.

    Raises ConfigError for an unknown size and if `out` exists, and DataError if `data` is not prepared.
    """
    facts = check_places(data, out)
    text, note = build_starter(data, out, facts, read_shape(size, facts.vocab_rounded))
    write_yaml(out, text)
    return note


def check_places(data: Path, out: Path) -> Facts:
    """Return the facts of prepared data, and check that `out` is free.

    Raises ConfigError if `out` exists, and DataError if `data` is not a folder that `data prepare` has made.
    """
    check_free(out)
    summary_file = data / "summary.json"
    if not summary_file.is_file():
        raise DataError(
            f"{summary_file} does not exist; expected a folder that data prepare made: llmfoundry-lite data prepare "
            f"--source {data} --out data/{data.resolve().name} --tokenizer train:32768 --max-seq-len 2048"
        )
    try:
        summary = read_json(summary_file, "a summary")
        splits = summary["splits"]
        tokenizer = summary["tokenizer"]
        return Facts(
            max_seq_len=int(summary["max_seq_len"]),
            vocab_size=int(tokenizer["vocab_size"]),
            num_train=int(splits["train"]["samples"]),
            num_val=int(splits.get("val", {}).get("samples", 0)),
            fingerprint=tokenizer.get("fingerprint"),
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{summary_file} is not a file that `data prepare` writes ({error}); prepare the data again"
        ) from error


def check_free(out: Path) -> None:
    """Raise ConfigError if there is a file or folder at `out`."""
    if out.exists():
        raise ConfigError(f"{out}: already exists; choose another name with --out, or remove it")


def write_yaml(out: Path, text: str) -> None:
    """Write a YAML at once. Raises ConfigError."""
    try:
        write_atomically(out, text)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror}; name another place with --out") from error


def build_starter(data: Path, out: Path, facts: Facts, shape: Shape, speed: Speed | None = None) -> tuple[str, str]:
    """Return the YAML's text, and a sentence on how long the run is and what would be better.

    data, out: the prepared data and the YAML's path, as the YAML names them.
    speed: how fast this machine trains the shape, if that was measured. Then the run is not longer than its hours.
    """
    run = length_of_run(facts, shape, speed)
    note = describe_length(run, facts, shape, speed)

    model = {**shape.model, "max_seq_len": "${max_seq_len}", "vocab_size": facts.vocab_rounded}
    comment = f"# At least the tokenizer's {facts.vocab_size}; a multiple of 128 is faster."
    text = fill_template(
        data,
        out,
        facts,
        title=f"MPT-{shape.size}",
        model=as_yaml(model).replace("vocab_size:", f"{comment}\nvocab_size:"),
        optimizer=as_yaml(shape.optimizer),
        num_batches=run.num_batches,
        batch_size=run.batch_size,
        note=note,
        tokens_per_second=None if speed is None else round(speed.tokens_per_second),
    )
    return text, note + note_on_validation(facts)


def describe_length(run: RunLength, facts: Facts, shape: Shape, speed: Speed | None) -> str:
    """Say in epochs and in tokens for each parameter how long a run is, and what keeps it from being longer.

    For example: "4.0 epochs of 250 batches: 12.3 tokens for each of about 3.1 M parameters (20 would be best; text read
    more than 4 times teaches little)".
    """
    batch_tokens = run.batch_size * facts.max_seq_len
    batches_per_epoch = facts.num_train // run.batch_size
    num_epochs = run.num_batches * run.batch_size / facts.num_train
    tokens_per_parameter = run.num_batches * batch_tokens / run.num_parameters
    ratio = f"{tokens_per_parameter:,.1f}" if tokens_per_parameter >= 0.05 else f"{tokens_per_parameter:.1g}"
    decimals = 0 if run.num_parameters > 1e7 else 1
    note = (
        f"{num_epochs:,.1f} epochs of {batches_per_epoch:,} batches: {ratio} tokens for each of about "
        f"{run.num_parameters / 1e6:,.{decimals}f} M parameters"
    )

    if run.num_batches < run.best_num_batches:
        is_limited_by_text = run.num_batches == MAX_EPOCHS * batches_per_epoch
        reason = ", in more hours"
        if is_limited_by_text:
            reason = f"; text read more than {MAX_EPOCHS} times teaches little"
        note += f" ({TOKENS_PER_PARAMETER} would be best{reason})"

    if speed is not None:
        return f"{note}, {speed.describe(run.num_batches * batch_tokens)}"

    # Without a measurement, the user has named a size. With less than a token for each parameter, it is far too large.
    available_tokens = MAX_EPOCHS * facts.num_train * facts.max_seq_len
    if available_tokens < run.num_parameters:
        fitting_parameters = available_tokens / TOKENS_PER_PARAMETER
        advised_size = fitting_size(fitting_parameters, facts.vocab_rounded)
        advice = f"--size {advised_size}"
        if advised_size == shape.size:
            advice = "the smallest size will learn it by heart; add text"
        note += f"; this text is enough for {fitting_parameters / 1e6:,.2g} M parameters: {advice}"
    return note


def length_of_run(facts: Facts, shape: Shape, speed: Speed | None = None) -> RunLength:
    """Compute how long a run trains: TOKENS_PER_PARAMETER tokens for each parameter, if text and time suffice.

    The text is read at most MAX_EPOCHS times. The time is that of `speed`, or unlimited.
    """
    num_parameters = count_parameters(shape.model, facts.vocab_rounded)
    batch_size = shape.batch_size
    if batch_size is None:
        # About MANY_BATCHES batches. The number of samples in each is rounded down to a power of two.
        num_tokens: float = min(TOKENS_PER_PARAMETER * num_parameters, MAX_EPOCHS * facts.num_train * facts.max_seq_len)
        if speed is not None:
            num_tokens = min(num_tokens, speed.max_tokens)
        batch_tokens = min(max(num_tokens / MANY_BATCHES, MIN_BATCH_TOKENS), MAX_BATCH_TOKENS)
        num_samples = int(batch_tokens / facts.max_seq_len)
        batch_size = 1 << max(0, num_samples.bit_length() - 1)
    batch_size = fitting_batch(batch_size, facts.num_train)

    batch_tokens = batch_size * facts.max_seq_len
    best_num_batches = -(-TOKENS_PER_PARAMETER * num_parameters // batch_tokens)  # rounded up
    num_batches = min(best_num_batches, MAX_EPOCHS * (facts.num_train // batch_size))
    if speed is not None:
        num_batches = max(1, min(num_batches, int(speed.max_tokens / batch_tokens)))
    return RunLength(num_parameters, batch_size, num_batches, best_num_batches)


def as_yaml(values: dict[str, Any]) -> str:
    """Return a dictionary as lines of YAML, in its order."""
    return yaml.safe_dump(values, sort_keys=False)


def fill_template(
    data: Path,
    out: Path,
    facts: Facts,
    *,
    title: str,
    model: str,
    optimizer: str,
    num_batches: int,
    batch_size: int,
    note: str,
    load: str = "",
    tokens_per_second: int | None = None,
) -> str:
    """Return the text of a YAML.

    title: name of the model, for the first line.
    model, optimizer, load: lines of YAML: the blocks of model and optimizer, and the keys that load weights.
    note: a comment on `num_batches`.
    tokens_per_second: of this machine, if it was measured.
    """
    # Save and evaluate NUM_SAVES times, but not more often than every MIN_BATCHES_BETWEEN_SAVES. A shorter run saves
    # once.
    interval = max(num_batches // NUM_SAVES, min(num_batches, MIN_BATCHES_BETWEEN_SAVES))
    return TEMPLATE.read_text(encoding="utf-8").format(
        title=printable(title),
        data=printable(str(data)),
        data_word=yaml_scalar(str(data)),
        launch=launch_command(out),
        rate=RATE.format(rate=tokens_per_second) if tokens_per_second else "",
        run_name=yaml_scalar(default_run_name(out)),
        max_seq_len=facts.max_seq_len,
        model=textwrap.indent(model, "  "),
        load=load,
        **TRAINING_DATA,
        eval_loader=describe_validation(facts, num_batches, batch_size, interval),
        optimizer=textwrap.indent(optimizer, "  "),
        precision=precision_here(),
        duration_note=note,
        num_batches=num_batches,
        batch_size=batch_size,
        save_interval=interval,
        log_interval=max(1, num_batches // NUM_LINES),
    )


def launch_command(out: Path) -> str:
    """Return the command that trains a YAML on all devices of this machine, for a comment."""
    num_devices = count_devices()
    ranks = f" -n {num_devices}" if num_devices > 1 else ""
    return f"llmfoundry-lite train{ranks} {printable(shlex.quote(str(out)))}"


def default_run_name(out: Path) -> str:
    """Return a run's name that is made from the YAML's name and can be the name of a folder."""
    return re.sub(r"[^\w.-]+", "-", out.stem).strip(".-_") or "run"


def describe_validation(facts: Facts, num_batches: int, batch_size: int, interval: int) -> str:
    """Return the YAML's lines about validation data; empty if there is none.

    Evaluations, one every `interval` batches, get a twentieth of the run's time. Their number is about 20, and a batch
    takes a third of the time of a trained one, so each has 3 / 400 of the run's number of batches.
    """
    if not facts.num_val:
        return ""
    subset = max(1, num_batches * 3 // 400)
    if subset * batch_size >= facts.num_val:
        subset = -1  # all
    return VALIDATION_DATA + EVALUATIONS.format(eval_interval=interval, subset=subset)


def note_on_validation(facts: Facts) -> str:
    """Return a clause that advises to prepare more validation data; empty if there is enough."""
    if facts.num_val >= MIN_VALIDATION:
        return ""
    num_samples = facts.num_train + facts.num_val
    # Twice as many samples as are needed, as a share of the data between 10 % and 20 %.
    percent = max(10, min(20, 200 * MIN_VALIDATION // num_samples))
    remedy = f"prepare with --val-fraction 0.{percent:02} or in more files"
    return f"; the validation split has {facts.num_val or 'no'} samples, which tell little: {remedy}"


def fitting_batch(batch_size: int, num_samples: int) -> int:
    """Return `batch_size`, or less for data that has fewer samples than that.

    It is then the largest power of two that the data fills, because most numbers of devices can divide it.
    """
    if num_samples >= batch_size:
        return batch_size
    return 1 << max(0, num_samples.bit_length() - 1)


def yaml_scalar(text: str) -> str:
    """Return a text as a value in a YAML that the configuration's reader reads as the same text.

    It is quoted if YAML would read something else, such as a number, and `${` is escaped, which begins a reference.
    """
    text = text.replace("${", "\\${")
    try:
        is_plain = yaml.safe_load(f"x: {text}") == {"x": text}
    except yaml.YAMLError:
        is_plain = False
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def read_shape(size: str, vocab_size: int) -> Shape:
    """Return the shape of one of our YAMLs, such as 125m, or of a size between them, such as 30m.

    For a size between them, it is the width of WIDTHS whose number of parameters, with `vocab_size`, is the nearest.
    Raises ConfigError for any other size.
    """
    if size in sizes():
        config = yaml.safe_load(shipped_yamls()[f"mpt-{size}"].read_text())
        return Shape(size, config["model"], config["optimizer"], config["global_train_batch_size"])

    millions = re.fullmatch(r"(\d{1,3}(?:\.\d)?)m", size)
    if millions is None or not MILLIONS[0] <= float(millions[1]) <= MILLIONS[1]:
        raise ConfigError(
            f"--size: {size!r} given, expected one of {', '.join(sizes())}, or one in between such as 3m, 10m or 30m"
        )
    wanted_parameters = float(millions[1]) * 1e6

    def distance(shape: Shape) -> float:
        return abs(count_parameters(shape.model, vocab_size) - wanted_parameters)

    nearest = min(map(scaled_shape, WIDTHS), key=distance)
    return nearest._replace(size=size)


def scaled_shape(d_model: int) -> Shape:
    """Return the quickstart's model and optimizer at another width, with the depth in proportion.

    The learning rate of the embedding, which AdamW updates, falls with the width (Yang et al. 2022, "Tensor Programs
    V"). Muon's rate stays the same.
    """
    quickstart = read_shape("quickstart", 0)
    model = quickstart.model
    relative_width = d_model / model["d_model"]
    head_dim = 32 if d_model < 384 else 64
    changes = {
        "d_model": d_model,
        "n_heads": d_model // head_dim,
        "n_layers": max(2, round(model["n_layers"] * relative_width)),
        # 8/3 of the width, which has as many parameters as 4 times the width in an FFN without a gate, in steps of 16.
        "ffn_config": {**model["ffn_config"], "ffn_hidden_size": 16 * round(d_model / 6)},
    }
    adamw_lr = quickstart.optimizer["adamw_lr"] / relative_width
    optimizer = {
        **quickstart.optimizer,
        "adamw_lr": float(f"{adamw_lr:.2g}"),
        "ns_dtype": precision_here().removeprefix("amp_"),
    }
    return Shape(f"{d_model}-wide", {**model, **changes}, optimizer, None)


def count_parameters(model: dict[str, Any], vocab_size: int) -> int:
    """Return the approximate number of parameters of a YAML's block `model`: the elements of its matrices."""
    config = ModelConfig(d_model=model["d_model"], n_layers=model["n_layers"], vocab_size=vocab_size)
    return config.num_matrix_parameters


def fitting_size(max_parameters: float, vocab_size: int) -> str:
    """Return the name of a size with about this number of parameters: one like `7m`, or one of our YAMLs.

    The latter is the largest with fewer parameters, or the smallest of all.
    """
    low, high = MILLIONS
    if low * 1e6 <= max_parameters <= high * 1e6:
        return f"{max_parameters / 1e6:.0f}m"
    counts = {size: count_parameters(read_shape(size, 0).model, vocab_size) for size in sizes()}
    fitting = [size for size in counts if counts[size] <= max_parameters]
    if not fitting:
        return min(counts, key=counts.__getitem__)
    return max(fitting, key=counts.__getitem__)


def precision_here() -> str:
    """Return the precision in which this machine trains fastest."""
    return "amp_bf16" if count_devices() or multiplies_in_bf16() else "fp32"


def count_devices() -> int:
    """Return the number of this machine's accelerators.

    It is 1 if there are two kinds, because a launch must name one of the devices then.
    """
    try:
        accelerators = find_devices()
    except ConfigError:
        return 1
    return accelerators.num_devices if accelerators else 0


def multiplies_in_bf16() -> bool:
    """Return whether this machine's CPU has instructions for bf16. Without them, bf16 is slower than fp32."""
    flags = CPU_INFO.read_text() if CPU_INFO.exists() else ""
    return any(flag in flags for flag in BF16_FLAGS)
