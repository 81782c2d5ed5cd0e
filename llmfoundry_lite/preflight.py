"""Checks that are possible before a process group exists, and the output of `--dry-run`.

This reads index files and JSON, never a shard, and imports neither Composer nor streaming, so it answers quickly.
"""

import importlib.util
import mmap
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from llmfoundry_lite import companions
from llmfoundry_lite.bounded import parse_json, read_json
from llmfoundry_lite.checkpoint.manifest import HIDDEN
from llmfoundry_lite.checkpoint.start import Start, choose_start, has_reached
from llmfoundry_lite.config.blocks import given_blocks
from llmfoundry_lite.config.check import check_batch
from llmfoundry_lite.config.data_schema import LoaderConfig, TextDatasetConfig
from llmfoundry_lite.config.data_stages import first_batches, places_of
from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.config.layout import DEGREE_KEYS, Layout, describe_layout
from llmfoundry_lite.config.load_eval import load_tasks
from llmfoundry_lite.config.scalars import FromEnvironment
from llmfoundry_lite.config.schema import TrainConfig, as_dict, data_label
from llmfoundry_lite.config.wandb_init import RUN_ID, check_wandb, describe_unused_variables, init_arguments
from llmfoundry_lite.config.yaml_text import dump_record
from llmfoundry_lite.data.rows import check_length, percent_left_out, tokens_per_sample
from llmfoundry_lite.data.tokenizer import (
    TOKENIZER_FILE,
    Tokenizer,
    find_fingerprints,
    is_local_or_cached,
    load_tokenizer,
)
from llmfoundry_lite.errors import (
    SECOND_STEP,
    CheckpointError,
    ConfigError,
    DataError,
    either,
    is_secret_name,
    list_names,
    printable,
)
from llmfoundry_lite.estimate.memory import estimate_training_memory, with_cpu_attention
from llmfoundry_lite.estimate.model_memory import knows_optimizer
from llmfoundry_lite.evaluation.items import SEPARATE
from llmfoundry_lite.evaluation.tasks import check_task
from llmfoundry_lite.files import open_regular
from llmfoundry_lite.hardware import GIB, Device
from llmfoundry_lite.models.flops import count_flops_per_token, count_parameters

C_COMPILERS = ("gcc", "clang", "g++")
MANY_EPOCHS = 100
"""Number of epochs from which a dry run warns."""
MAX_LISTED = 8
"""Most streams, stages or ranks of a context group that a dry run lists."""


@dataclass(kw_only=True)
class Preflight:
    """Findings of the checks."""

    num_samples: dict[str, int] = field(default_factory=dict)
    """train, eval, eval/<label> -> number of samples on this disk."""
    text_keys: list[str] = field(default_factory=list)
    """Keys of data sets that hold text rather than tokens, so that reading them needs the tokenizer."""
    not_checked: list[str] = field(default_factory=list)
    """A line for each thing that could not be checked, and why."""
    notes: list[str] = field(default_factory=list)
    """A line for each setting that is allowed but may not do what it seems to."""


def check(config: TrainConfig, layout: Layout, *, must_exist: bool) -> Preflight:
    """Check the configuration against this machine and its files. Raises ConfigError or DataError, in one line.

    With `must_exist` (a launch) missing data are an error. Without it (a dry run) they are noted as not checked.
    """
    _check_companions(config, layout)
    check_batch(config, layout)
    for block in given_blocks(config.blocks).values() if must_exist else ():
        block.check_here(config)
    if must_exist and config.fuses_loss:
        check_compiler()
    _check_import_paths(config)
    found = Preflight()
    for key, loader in config.loaders.items():
        if loader.name == "text":
            _check_data(key, loader, config, found, must_exist=must_exist)
    _check_tokenizer(config, found, must_exist=must_exist)
    _check_tasks(config, found, must_exist=must_exist)
    _check_loggers(config, found, must_exist=must_exist)
    num_samples, batch = _samples_per_epoch(config, found), config.global_train_batch_size
    if num_samples is not None and num_samples < batch and config.train_loader.drop_last:
        raise DataError(
            f"train_loader.dataset: {num_samples} samples do not make one batch of {batch} (global_train_batch_size); "
            "use more data or a smaller batch"
        )
    return found


def _check_companions(config: TrainConfig, layout: Layout) -> None:
    """Raise ConfigError, which names the key, if the run needs a companion that is not installed."""
    for dimension, key in DEGREE_KEYS.items():
        if getattr(layout, dimension) > 1:
            companions.require("llmfoundry_layouts", key)
    if config.sharding.sharding_strategy == "ZERO_1":
        companions.require("llmfoundry_layouts", "fsdp_config.sharding_strategy: ZERO_1")
    for key in config.callbacks.of_companions:
        companions.require("llmfoundry_ops", key)


def check_installed(*packages: str) -> None:
    """Raise ConfigError for Composer or mosaicml-streaming, which a plain installation leaves out."""
    missing = [name for name in packages if not is_installed(name)]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} not installed, which training needs; `pip install 'llmfoundry-lite[train]'`, "
            f"then `{SECOND_STEP}`"
        )


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def check_compiler() -> None:
    """Raise ConfigError where torch.compile would fail at the first batch: Triton needs to build a C program."""
    needs, chosen = [], os.environ.get("CC")
    if chosen and not shutil.which(chosen):
        needs.append(f"a C compiler (CC: {chosen} is none)")
    if not chosen and not any(map(shutil.which, C_COMPILERS)):
        needs.append(f"a C compiler on PATH ({either(C_COMPILERS)}; `apt-get install gcc`)")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        needs.append(f"{header} (`apt-get install python3-dev`)")
    if needs:
        raise ConfigError(
            f"compile_config: torch.compile needs {' and '.join(needs)}; install it, or leave compiling out: "
            "compile_config=null"
        )


def check_here(config: TrainConfig, layout: Layout, devices: Sequence[Device]) -> None:
    """Check the tokenizer and the memory that a launch on this machine needs. Raises ConfigError.

    `devices` are this machine's, in order. Each rank takes one, or all ranks share a single one.
    """
    name = config.tokenizer.name
    if not is_local_or_cached(name):
        raise ConfigError(f"{_not_here(name)}; {_fetch(name)}")
    is_cpu, num_here = devices[0].is_shared, layout.node_size
    needed = estimate_training_memory(with_cpu_attention(config) if is_cpu else config, layout).total_bytes
    asking = "each rank needs"
    if is_cpu:
        needed *= num_here
        asking = "one rank needs" if num_here == 1 else f"{num_here} ranks need"
    elif len(devices) < num_here:
        raise ConfigError(f"{num_here} ranks given, and this machine has {len(devices)} devices; start as many")
    least = min(devices[:num_here], key=lambda device: device.free_bytes)
    if needed > least.free_bytes:
        raise ConfigError(
            f"memory: {asking} about {needed / GIB:,.1f} GiB by the estimate, and {least.name} has "
            f"{least.free_bytes / GIB:,.1f} GiB free; use more devices, a smaller device_train_microbatch_size or "
            "model, or fsdp_config with FULL_SHARD or activation_checkpointing"
        )


def _samples_per_epoch(config: TrainConfig, found: Preflight) -> int | None:
    """Return the samples of an epoch; None where only the opened data set can tell: with streams or an epoch_size."""
    dataset = config.train_loader.dataset
    is_plain = not (dataset.streams or dataset.stages) and dataset.epoch_size is None
    return found.num_samples.get("train") if is_plain else None


def _check_tasks(config: TrainConfig, found: Preflight, *, must_exist: bool) -> None:
    """Check that the run can ask all of its tasks. Else an evaluation in mid-run would meet the mistake."""
    tasks = load_tasks(config.icl_tasks, config.icl_task_folder, notes=found.notes)
    has_tokenizer = is_local_or_cached(config.tokenizer.name)
    if tasks and must_exist and not has_tokenizer:
        raise ConfigError(f"icl_tasks: need the tokenizer, and {config.tokenizer.name} is not on this machine")
    tokenizer: Tokenizer | None = None
    for task in tasks:
        is_local = not task.dataset_uri.startswith("hf://")
        if not is_local:
            companions.require("llmfoundry_formats", f"icl_tasks: {task.label}: {task.dataset_uri}")
        is_here = is_local and Path(task.dataset_uri).exists()
        if must_exist and is_local and not is_here:
            raise DataError(
                f"icl_tasks: {task.label}: {task.dataset_uri} does not exist; "
                "`python scripts/fetch_tasks.py` fetches it"
            )
        if not has_tokenizer or not (is_here or must_exist):
            missing = task.dataset_uri if has_tokenizer else "the tokenizer"
            found.not_checked.append(f"icl_tasks: {task.label}: whether it can be asked, without {missing}")
        elif config.evaluates:
            tokenizer = tokenizer or load_tokenizer(config.tokenizer.name)  # once: a large one takes a second
            _check_task(task, config, tokenizer)


def _check_task(task: TaskConfig, config: TrainConfig, tokenizer: Tokenizer) -> None:
    index = Path(task.dataset_uri, "index.json")
    if task.icl_task_type == "perplexity" and index.is_file():
        _check_split(task, index)
        return
    try:
        check_task(
            task,
            tokenizer,
            tokenization=SEPARATE,
            max_seq_len=config.model.max_seq_len,
            limit=config.icl_limit,
        )
    except DataError as error:
        raise DataError(f"icl_tasks: {error}") from error


def _check_split(task: TaskConfig, index: Path) -> None:
    """Check an MDS split by its index alone, because only a launch can read shards."""
    try:
        num_samples, types = _count_samples(index)
    except ValueError as error:
        raise DataError(f"icl_tasks: {task.label}: {index} is not an MDS index ({error}); make it again") from None
    if not num_samples or "tokens" not in types:
        found = f"{num_samples} samples of {list_names(types)}"
        raise DataError(f"icl_tasks: {task.label}: {index.parent} has {found}; expected samples of tokens")


def _check_loggers(config: TrainConfig, found: Preflight, *, must_exist: bool) -> None:
    wandb = config.loggers.wandb
    if wandb is None:
        return
    arguments = init_arguments(wandb, config.run_name, config.run_folder, known_id=None)
    found.notes.extend(line for variable, line in describe_unused_variables(arguments) if variable != RUN_ID)
    if must_exist or is_installed("wandb"):
        check_wandb(wandb)
    else:
        found.not_checked.append("loggers.wandb: wandb is not installed")


def _check_import_paths(config: TrainConfig) -> None:
    names = [("optimizer.name", config.optimizer.name)]
    names += [(f"{key}.name", loader.name) for key, loader in config.loaders.items()]
    for key, name in (*names, *(("callbacks", name) for name in config.callbacks.extra)):
        missing = _find_missing_module(name.removeprefix("python:").partition(":")[0])
        if name.startswith("python:") and missing:
            raise ConfigError(f"{key}: {name}: No module named {missing!r}; is its folder on PYTHONPATH?")


def _find_missing_module(module: str) -> str | None:
    """Return the first package of a dotted name that is missing, also in the working directory, where a module of the
    user's own may lie. Looks at files only; nothing is imported."""
    if module in sys.modules:
        return None
    path, *below = module.split(".")
    try:
        spec = importlib.util.find_spec(path) or PathFinder.find_spec(path, [os.getcwd()])
    except ValueError:  # a module that was put into sys.modules by hand
        return None
    for name in below:
        if spec is None:
            break
        # Only the last part of the name, because a dotted name might import its parents.
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations or ()))
        path += f".{name}"
    return path if spec is None else None


# ---------------------------------------------------------------------------------------- data, tokenizer


def _check_data(block: str, loader: LoaderConfig, config: TrainConfig, found: Preflight, *, must_exist: bool) -> None:
    dataset = loader.dataset
    folders, counts = places_of(dataset), []
    for place, stream in folders.items():
        key = f"{block}.dataset{place}"
        folder = Path(stream.local or "") / (stream.split or dataset.split or "")
        remote = stream.remote or dataset.remote
        index = folder / "index.json"
        if index.is_file():
            counts.append(_check_index(index, key, dataset, config, found))
        elif remote and remote != stream.local:
            found.not_checked.append(f"{key}: {folder} will be filled from {remote}")
        elif must_exist:
            raise DataError(f"{key}: {index} does not exist; make it with `llmfoundry-lite data prepare`")
        else:
            found.not_checked.append(f"{key}: {index} is not there")
    if len(counts) == len(folders):
        found.num_samples[data_label(block)] = sum(counts)


def _check_index(index: Path, key: str, dataset: TextDatasetConfig, config: TrainConfig, found: Preflight) -> int:
    max_seq_len = dataset.max_seq_len or config.max_seq_len
    try:
        total, types = _count_samples(index)
    except ValueError as error:
        raise DataError(f"{key}: {index} is not an MDS index ({error}); make it again") from None
    if not {"tokens", "text"} & types.keys():
        raise DataError(f"{key}: {index} has columns {list_names(types)}; expected tokens or text")
    if "tokens" not in types:
        found.text_keys.append(key)
        found.notes.append(
            f"{key}: a text of more than {max_seq_len} tokens is cut there; `data prepare` keeps it whole"
        )
    recorded = _read_summary(index.parent.parent / "summary.json")
    length = tokens_per_sample(types.get("tokens", "")) or recorded.get("max_seq_len")
    if length is not None:
        what = f"{key}: samples of {index.parent} have"
        check_length(length, max_seq_len, what, allow_truncation=dataset.allow_truncation)
        if length > max_seq_len:
            left_out = percent_left_out(length, max_seq_len)
            found.notes.append(f"{what} {length} tokens; max_seq_len {max_seq_len} leaves {left_out} of the text out")
    if recorded:
        _check_fingerprint(recorded["tokenizer"], key, config)
    return total


def _read_summary(path: Path) -> dict[str, Any]:
    """Return what `data prepare` recorded beside the splits; {} without it, or where another tool wrote the file."""
    try:
        found = read_json(path, "a summary")
    except (OSError, ValueError):
        return {}
    tokenizer = found.get("tokenizer") if isinstance(found, dict) else None
    kinds = {"vocab_size": int, "fingerprint": str, "name": str}
    is_ours = isinstance(tokenizer, dict) and all(type(tokenizer.get(key)) is kind for key, kind in kinds.items())
    return found if is_ours and type(found.get("max_seq_len")) is int else {}


def _count_samples(index: Path) -> tuple[int, dict[str, str]]:
    """Return the samples of all shards, and the columns of the first one with their types. The file is searched, not
    parsed, because every rank does this, and Python's objects take eight times its size."""
    with (
        open(index, "rb", opener=open_regular) as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        names, types = (re.search(rb'"column_%s":\s*(\[[^\]]*\])' % key, content) for key in (b"names", b"encodings"))
        if names is None or types is None:
            raise ValueError("it names no columns")
        total = sum(int(match[1]) for match in re.finditer(rb'"samples":\s*(\d{1,18})', content))
        columns = dict(zip(*(map(str, parse_json(found[1])) for found in (names, types)), strict=True))
        return total, columns


def _check_fingerprint(recorded: dict[str, Any], key: str, config: TrainConfig) -> None:
    """Compare the tokenizer with the data's record of its tokenizer. This never needs a network."""
    name = config.tokenizer.name
    _check_vocabulary(config, recorded["vocab_size"], f"the {recorded['vocab_size']} of the tokenizer that made {key}")
    if is_local_or_cached(name) and (ours := load_tokenizer(name).fingerprint) != recorded["fingerprint"]:
        raise DataError(
            f"tokenizer.name: {name} is not the tokenizer that made {key} ({ours}, not {recorded['fingerprint']}, "
            f"{recorded['name']}); prepare the data again"
        )


def _check_vocabulary(config: TrainConfig, needed: int, what: str) -> None:
    if needed > config.model.vocab_size:
        rounded = -(-needed // 128) * 128  # multiples of 128 are fast
        raise ConfigError(f"model.vocab_size: {config.model.vocab_size} is less than {what}; set it to {rounded}")


def _check_tokenizer(config: TrainConfig, found: Preflight, *, must_exist: bool) -> None:
    name, dataset = config.tokenizer.name, config.train_loader.dataset
    given = {"eos": dataset.eos_token_id, "bos": dataset.bos_token_id}
    if not is_local_or_cached(name):
        if must_exist and config.model.attn_config.attn_uses_sequence_id and set(given.values()) == {None}:
            raise ConfigError(
                f"tokenizer.name: {name} is not on this machine, and model.attn_config.attn_uses_sequence_id needs its "
                f"end of text; {_fetch(name)}"
            )
        message = _not_here(name)
        # transformers may be able to convert a folder without tokenizer.json.
        if found.text_keys and not Path(name).is_dir():
            message += f", and {found.text_keys[0]} is text that needs it"
            if must_exist:
                raise ConfigError(f"{message}; {_fetch(name)}")
        elif found.text_keys:
            needed_for = f"tokenizer.name: {name}: tokenizers without {TOKENIZER_FILE}"
            companions.require("llmfoundry_formats", needed_for)
        found.not_checked.append(message)
        return
    tokenizer = load_tokenizer(name)
    theirs = {"eos": tokenizer.eos_token_id, "bos": tokenizer.bos_token_id}
    for token, token_id in given.items():
        override = f"override_{token}_token_id_mismatch_error"
        if token_id not in (None, theirs[token]) and not getattr(dataset, override):
            raise ConfigError(
                f"train_loader.dataset.{token}_token_id: {token_id} is not the tokenizer's, {theirs[token]} ({name}); "
                f"change it, or set train_loader.dataset.{override}: true"
            )
    _check_vocabulary(config, tokenizer.vocab_size, f"the tokenizer's {tokenizer.vocab_size} ({name})")
    if config.tokenizer.kwargs.get("pad_token", tokenizer.pad_token) == tokenizer.eos_token:
        found.notes.append(
            f"tokenizer.name: {name} pads with its end of text, {tokenizer.eos_token}; it is learned here like any "
            "token, and LLM Foundry computes no loss on it"
        )


def _not_here(name: str) -> str:
    return f"tokenizer.name: {name} is neither a local folder nor in the Hub's cache"


def _fetch(name: str) -> str:
    return f"fetch it first (`hf download {name}`) or name a local folder"


# ----------------------------------------------------------------------------------------------- dry run


def describe(
    config: TrainConfig, layout: Layout, found: Preflight, *, is_for_here: bool = False, with_yaml: bool = False
) -> str:
    """Describe what a launch would do, in lines of a name and a value.

    With `is_for_here` this machine has been checked too. With `with_yaml` the resolved configuration comes first.
    """
    model, length = config.model, config.max_seq_len
    batch_tokens, flops = config.global_train_batch_size * length, count_flops_per_token(model, length)
    start, not_looked_at = _describe_start(config, is_for_here=is_for_here)
    among = "".join(block.describe(config) for block in given_blocks(config.blocks).values())
    lines = [
        f"run            {config.run_name} in {config.run_folder}{among}",
        f"start          {start}",
        f"model          {count_parameters(model):,} parameters, {model.n_layers} blocks of width {model.d_model}",
        f"model FLOPs    {_with_prefix(flops)} per token, {_with_prefix(flops * batch_tokens)} per batch",
        *_under("devices", describe_layout(layout)),
        *_under("batch", _describe_batch(config, layout)),
        *_under("samples", describe_division("samples", config, layout)),
        *_under("stages", describe_division("stages", config, layout)),
        f"duration       {config.max_duration.written}{_describe_duration(config, found)}",
        *_describe_data(config, found),
        f"precision      {_describe_precision(config)}",
        f"optimizer      {_describe_optimizer(config)}",
        *_under("memory", _describe_memory(config, layout)),
        f"saves          {_describe_saves(config)}",
        f"logs           {_describe_logs(config)}",
    ]
    lines += [f"warning        {text}" for text in describe_division("warning", config, layout)]
    lines += [f"environment    {_describe_variable(name, value)}" for name, value in config.environment.items()]
    not_checked = [*found.not_checked, *not_looked_at]
    if not is_for_here:
        not_checked.append("the memory of this machine's devices; --dry-run=here also checks that, data, tokenizer")
    lines += [f"not checked    {note}" for note in not_checked]
    head = [dump_record(as_dict(config))] if with_yaml else []
    return "\n".join([*head, *map(printable, lines)])


def _describe_start(config: TrainConfig, *, is_for_here: bool) -> tuple[str, list[str]]:
    """Describe where a launch begins, with a line for each thing that is not on this machine. Reads no tensor.

    With `is_for_here`, raises CheckpointError where a launch would be refused.
    """
    folder, where = config.checkpoint_folder, config.load_path
    begins = "batch 1, from initial weights"
    if where is not None:
        begins = f"the {'weights' if config.load_weights_only else 'whole state'} of {where}"
    if "://" in folder:
        unseen = [f"{folder}: what it holds, and whether that fits this configuration"]
        return f"the newest save in {folder}, else {begins}" if config.autoresume else begins, unseen
    is_elsewhere = where is not None and not os.path.exists(os.path.expanduser(where.removeprefix("file://")))
    try:
        here = replace(config, load_path=None) if is_elsewhere else config
        start = choose_start(here, find_fingerprints(config.tokenizer.name))
        if start.is_run_folder and not start.checkpoint_name:
            raise CheckpointError(f"{folder}: no checkpoint can be read; `llmfoundry-lite checkpoint ls` says why")
    except CheckpointError as error:
        if is_for_here:
            raise
        return f"refused: {error}", []
    if start.is_run_folder:
        unseen = [f"the tensors and the data of {start.checkpoint_name}: the launch compares them with what is here"]
        return f"carries on from {folder}/{start.checkpoint_name}{_describe_end(config, start)}", unseen
    return begins, [f"load_path: {where}, and whether it fits this configuration"] if is_elsewhere else []


def _describe_end(config: TrainConfig, start: Start) -> str:
    """Say that a launch trains nothing, if the checkpoint is already at the run's end or at `stop_at`; else empty."""
    for key, words in {"max_duration": "where the run is done", "stop_at": "where stop_at ends this launch"}.items():
        span = getattr(config, key)
        if span is not None and has_reached(span, start.training_done):
            return f", {words}: nothing is trained"
    return ""


def _describe_batch(config: TrainConfig, layout: Layout) -> list[str]:
    batch, length = config.global_train_batch_size, config.max_seq_len
    num_ranks, degree = layout.num_data_ranks, layout.ranks_per_data_rank
    device_batch = batch // num_ranks
    groups = f"{num_ranks} group(s) of {degree} devices" if degree > 1 else f"{num_ranks} device(s)"
    microbatch = config.first_microbatch_size(device_batch)
    division = f"{-(-device_batch // microbatch)} microbatch(es) of up to {microbatch}"
    if config.device_train_microbatch_size == "auto":
        division = "microbatches as large as fit"
    total = f"{batch} samples x {length} tokens = {batch * length:,} tokens"
    return [total, f"{groups} x {device_batch} samples in {division}"]


def _describe_data(config: TrainConfig, found: Preflight) -> list[str]:
    lines, batch = [], config.global_train_batch_size
    for key, loader in config.loaders.items():
        dataset, label = loader.dataset, data_label(key)
        streams = places_of(dataset).values()
        facts = ["/".join(filter(None, (s.local or s.remote, s.split or dataset.split))) for s in streams]
        if loader.name != "text" or len(facts) > MAX_LISTED:
            facts = [loader.name if loader.name != "text" else f"{len(facts)} streams"]
        if label in found.num_samples:
            facts.insert(0, f"{found.num_samples[label]:,} samples")
        if label != "train":
            first = f", the first {config.eval_subset_samples:,} samples" if config.eval_subset_samples else ""
            often = f"every {config.eval_interval}{first}"
            facts.append(often if config.evaluates else "never evaluated")
        elif (count := _samples_per_epoch(config, found)) is not None and loader.drop_last:
            facts.append(f"{count % batch} of them left out of each epoch")
        if dataset.stages:
            begins = first_batches(dataset, f"{key}.dataset", config.max_duration, batch, config.max_seq_len)
            facts.append(f"{len(begins)} stages, from batches {' and '.join(f'{begin + 1:,}' for begin in begins)}")
        lines.append(f"{label + ' data':<14} {', '.join(facts)}")
    return lines


def _describe_precision(config: TrainConfig) -> str:
    options = {
        "exact sums": config.exact_sums,
        "deterministic kernels": config.deterministic,
        "compiled blocks": config.compile_config is not None,
    }
    mixed = f"mixed_precision {config.sharding.mixed_precision}"
    return ", ".join([config.precision, mixed, *(name for name, is_on in options.items() if is_on)])


def _describe_optimizer(config: TrainConfig) -> str:
    optimizer, clipping = config.optimizer, config.algorithms.gradient_clipping
    facts = [f"{optimizer.name}, lr {optimizer.lr:g}"]
    facts += [] if optimizer.adamw_lr is None else [f"adamw_lr {optimizer.adamw_lr:g}"]
    if optimizer.name.startswith("python:"):
        given = [f"{key} {value}" for key, value in as_dict(config)["optimizer"]["kwargs"].items()]
        facts += [*given, "its own defaults for all else", config.scheduler.name]
    else:
        facts += [f"weight decay {optimizer.decay:g}", config.scheduler.name]
    facts += [f"warm-up {config.scheduler.t_warmup.written}"] if config.scheduler.t_warmup.value else []
    facts += [f"gradients clipped at {clipping.clipping_threshold:g}"] if clipping else []
    return ", ".join(facts)


def _describe_memory(config: TrainConfig, layout: Layout) -> list[str]:
    estimate = estimate_training_memory(config, layout)
    at = " (microbatches of 1 sample)" if config.device_train_microbatch_size == "auto" else ""
    lines = [f"{estimate}{at}"]
    if not knows_optimizer(config):
        lines.append(
            f"how much {config.optimizer.name} keeps is not known; `optimizer` is assumed to be two numbers for each "
            "parameter, as of AdamW"
        )
    return lines


def _describe_saves(config: TrainConfig) -> str:
    interval, kept = config.save_interval, config.save_num_checkpoints_to_keep
    often = "as often as costs 2 %" if interval.is_auto else f"every {interval.span or interval.written}"
    how_many = "all" if kept == -1 else f"the newest {kept}"
    limit = f"the run ends when saves fail for {config.max_unsaved.written}"
    return f"{config.checkpoint_folder}, {often} and at the end, {how_many} kept; {limit}"


def _describe_logs(config: TrainConfig) -> str:
    names = [f"{config.run_folder}/metrics.jsonl"]
    names += ["progress bar"] if config.progress_bar else ["console"] if config.log_to_console else []
    return ", ".join(names + [name for name in ("wandb", "tensorboard") if getattr(config.loggers, name) is not None])


def _under(heading: str, lines: Sequence[str]) -> list[str]:
    return [f"{'' if i else heading:<15}{line}" for i, line in enumerate(lines)]


def describe_division(heading: str, config: TrainConfig, layout: Layout) -> list[str]:
    """Describe ranks that see the same samples: `samples`, which tokens each has; `stages`, which blocks; `warning`,
    where they exchange across nodes in every block."""
    if layout.ranks_per_data_rank == 1:
        return []
    needed_for = "tp_config, cp_config and pp_config"
    descriptions = companions.load("llmfoundry_layouts.description:DESCRIPTIONS", needed_for)
    return descriptions[heading](config, layout)


def _describe_variable(name: str, value: str) -> str:
    if isinstance(value, FromEnvironment):
        return f"{name}={value.written}"
    found = os.environ.get(name, value)
    if is_secret_name(name):
        return f"{name}={HIDDEN}" + ("" if found == value else ", as the shell has it")
    if found == value:
        return f"{name}={value}"
    return f"{name}={found}, as the shell has it, not {value}"


def _describe_duration(config: TrainConfig, found: Preflight) -> str:
    duration, batch = config.max_duration, config.global_train_batch_size
    batch_tokens = batch * config.max_seq_len
    samples = _samples_per_epoch(config, found) or 0
    num_batches = {
        "ba": duration.value,
        "sp": -(-duration.value // batch),
        "tok": -(-duration.value // batch_tokens),
        "ep": duration.value * (samples // batch if config.train_loader.drop_last else -(-samples // batch)),
    }[duration.unit]
    if not num_batches:
        return ""
    num_epochs = num_batches * batch / samples if samples else 0
    epochs = f", {num_epochs:,.2f} epochs" if samples else ""
    epochs += ", which learn this text by heart: it is too short for the run" if num_epochs > MANY_EPOCHS else ""
    rate = config.variables.get("tokens_per_second")  # `init --hours` has measured it
    if isinstance(rate, int | float) and rate > 0:
        epochs += f", {num_batches * batch_tokens / rate / 3600:,.2g} hours at {rate:,} tokens per second"
    return f" = {int(num_batches):,} batches, {_with_prefix(num_batches * batch_tokens)} tokens{epochs}"


def _with_prefix(number: float) -> str:
    """Write 1234567 as 1.23 M."""
    for prefix, factor in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:,.2f} {prefix}"
    return f"{number:,.0f}"
