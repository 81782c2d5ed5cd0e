"""`llmfoundry-lite init`: a commented YAML for a prepared data folder and a size. No torch."""

import json
from pathlib import Path
from typing import Any

import yaml

from llmfoundry_lite.config.shipped import shipped_yamls
from llmfoundry_lite.errors import ConfigError, DataError

TOKENS_PER_PARAMETER = 20
"""Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models": about so many for a given budget of FLOPs."""

MOST_EPOCHS = 4
"""Muennighoff et al. 2023, "Scaling Data-Constrained Language Models": about so many are nearly as good as new."""

TEMPLATE = """\
# MPT-{size} on {data}. Train it, one rank for each device, here 8:
#   composer -n 8 -m llmfoundry_lite.train {out}
# Everything can be changed on the command line too: optimizer.lr=3e-4

variables:
  data: {data}

run_name: {run_name}
# Tokens of a sample. The data was prepared with {prepared_length}.
max_seq_len: {max_seq_len}
# Initial weights and the order of the data are functions of this number.
seed: 17

model:
  name: mpt_causal_lm
  d_model: {d_model}
  n_heads: {n_heads}
  n_layers: {n_layers}
  max_seq_len: ${{max_seq_len}}
  # At least the tokenizer's {tokenizer_size}; a multiple of 128 is faster.
  vocab_size: {vocab_size}
  no_bias: true

tokenizer:
  name: ${{variables.data}}/tokenizer

train_loader:
  name: text
  dataset:
    local: ${{variables.data}}
    # remote: s3://bucket/data      # where `local` is filled from
    split: train
    shuffle: true
    shuffle_seed: ${{seed}}
  num_workers: 2

{eval_loader}optimizer:
  name: decoupled_adamw
  lr: {lr}
  betas: [0.9, 0.95]
  weight_decay: 0.0

scheduler:
  name: cosine_with_warmup
  t_warmup: {warmup}ba
  alpha_f: 0.1

algorithms:
  gradient_clipping:
    clipping_type: norm
    clipping_threshold: 1.0

# {duration_note}
max_duration: {num_batches}ba
# Samples, over all devices. How many a device takes at a time changes nothing but rounding:
global_train_batch_size: {batch_size}
device_train_microbatch_size: auto
precision: amp_bf16

# Carry on from the newest checkpoint whenever this file is launched again, on any number of devices.
autoresume: true
# save_folder: s3://bucket/{{run_name}}
# Or a time (10m), or auto: as often as costs 2 % of training time.
save_interval: {save_interval}ba
"""

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
            f"{summary_file} does not exist; make the data with `llmfoundry-lite data prepare --out {data}`"
        )
    text, duration_note = starter(data, size, out, json.loads(summary_file.read_text()))
    out.write_text(text)
    return duration_note


def starter(data: Path, size: str, out: Path, summary: dict[str, Any]) -> tuple[str, str]:
    """The YAML's text, and a sentence on how long it trains."""
    shape = yaml.safe_load(shipped_yamls()[f"mpt-{size}"].read_text())
    model, batch_size = shape["model"], shape["global_train_batch_size"]
    length = summary["max_seq_len"]
    vocab_size = -(-summary["tokenizer"]["vocab_size"] // 128) * 128
    samples = summary["splits"]["train"]["samples"]
    if samples < batch_size:
        batch_size = 1 << max(0, samples.bit_length() - 1)  # a power of two, which most numbers of devices can share
    parameters = vocab_size * model["d_model"] + 12 * model["n_layers"] * model["d_model"] ** 2
    epoch = samples // batch_size
    for_parameters = -(-TOKENS_PER_PARAMETER * parameters // (batch_size * length))
    wanted = min(for_parameters, MOST_EPOCHS * epoch)
    note = (
        f"{wanted / epoch:,.1f} epochs of {epoch:,} batches: {wanted * batch_size * length / parameters:,.1f} tokens "
        f"for each of about {parameters / 1e6:,.0f} M parameters"
    )
    if wanted < for_parameters:
        note += f" ({TOKENS_PER_PARAMETER} would be best; text read more than {MOST_EPOCHS} times teaches little)"
    interval = max(1, wanted // 20)
    has_val = summary["splits"].get("val", {}).get("samples", 0) > 0
    text = TEMPLATE.format(
        size=size,
        data=data,
        out=out,
        run_name=out.stem,
        prepared_length=length,
        max_seq_len=length,
        d_model=model["d_model"],
        n_heads=model["n_heads"],
        n_layers=model["n_layers"],
        tokenizer_size=summary["tokenizer"]["vocab_size"],
        vocab_size=vocab_size,
        eval_loader=EVAL_LOADER.format(eval_interval=interval) if has_val else "",
        lr=shape["optimizer"]["lr"],
        warmup=max(1, min(100, wanted // 10)),
        duration_note=note,
        num_batches=wanted,
        batch_size=batch_size,
        save_interval=interval,
    )
    return text, note
