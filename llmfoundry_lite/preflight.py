"""Check a training configuration against this machine and its files, before a process group exists.

`check` is the top function. A launch and every dry run call it, and `check_here` is the further check of this machine
for `--dry-run=here`. `config/check.py` has compared the keys with each other before, and `dry_run.py` prints what is
found here. Data sets are checked by their index files and JSON, never by a shard, and neither Composer nor streaming is
imported, so that an error is reported within a second or two.
"""

import importlib.util
import mmap
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmfoundry_lite import companions
from llmfoundry_lite.bounded import parse_json, read_json
from llmfoundry_lite.config.blocks import given_blocks
from llmfoundry_lite.config.check import check_batch
from llmfoundry_lite.config.counted_model import describe_unknown_parts
from llmfoundry_lite.config.data_schema import LoaderConfig, TextDatasetConfig
from llmfoundry_lite.config.data_stages import distinct_streams
from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.config.layout import DEGREE_KEYS, Layout
from llmfoundry_lite.config.load_tasks import load_tasks
from llmfoundry_lite.config.parameter_groups import check_groups, describe_overlaps, divide_parameters
from llmfoundry_lite.config.schema import TrainConfig, data_label
from llmfoundry_lite.config.wandb_init import RUN_ID, check_wandb, describe_unused_variables, init_arguments
from llmfoundry_lite.data.index_files import find_first_index
from llmfoundry_lite.data.rows import check_length, percent_truncated, tokens_per_sample
from llmfoundry_lite.data.tokenizer import Tokenizer, load_configured_tokenizer
from llmfoundry_lite.data.tokenizer_files import TOKENIZER_FILE, is_local_or_cached
from llmfoundry_lite.errors import (
    SECOND_STEP,
    ConfigError,
    DataError,
    join_with_or,
    list_names,
)
from llmfoundry_lite.estimate.memory import estimate_training_memory, with_cpu_attention
from llmfoundry_lite.evaluation.items import SEPARATE
from llmfoundry_lite.evaluation.tasks import check_task
from llmfoundry_lite.files import exists, is_file, open_regular
from llmfoundry_lite.hardware import GIB, Device
from llmfoundry_lite.models.names import list_parameters
from llmfoundry_lite.own_code import PREFIX, is_own, is_trusted
from llmfoundry_lite.own_facts import find_module

C_COMPILERS = ("gcc", "clang", "g++")
FAST_MULTIPLE = 128
"""A vocabulary is suggested as a multiple of this, for which matrix products are fast on accelerators."""


@dataclass(kw_only=True)
class Preflight:
    """Findings of the checks of a configuration, for a launch and for the output of a dry run.

    The checks below add to it while they run. Errors are not collected here: the first one is raised.
    """

    num_samples: dict[str, int] = field(default_factory=dict)
    """Data set (`train`, `eval` or `eval/<label>`) -> its number of samples, if all its folders are on this disk."""
    text_keys: list[str] = field(default_factory=list)
    """Keys of data sets that hold text rather than tokens, so that reading them needs the tokenizer."""
    not_checked: list[str] = field(default_factory=list)
    """A line for each thing that could not be checked, and why."""
    notes: list[str] = field(default_factory=list)
    """A line for each setting that is allowed but may not do what it seems to."""


def check(config: TrainConfig, layout: Layout, *, must_exist: bool) -> Preflight:
    """Check the configuration against this machine and its files, and return what a launch or a dry run prints of it.

    With `must_exist` (a launch, or `--dry-run=here`) missing data are an error, and so is a missing compiler. Without
    it (other dry runs) missing data are noted as not checked.

    Raises ConfigError or DataError, in one line.
    """
    # Check what the configuration asks for by itself, before any file is read.
    _check_companions(config, layout)
    check_batch(config, layout)
    if must_exist:
        for block in given_blocks(config.blocks).values():
            block.check_here(config)
        if config.compiles_kernels:
            check_compiler()
    _check_import_paths(config)

    # Check the files that the configuration names. Data comes first, because text needs the tokenizer.
    findings = Preflight()
    _check_parameter_groups(config, findings)
    for key, loader in config.loaders.items():
        if loader.name == "text":  # a user's own loader is not checked
            _check_data(key, loader, config, findings, must_exist=must_exist)
    _check_tokenizer(config, findings, must_exist=must_exist)
    _check_tasks(config, findings, must_exist=must_exist)
    _check_loggers(config, findings, must_exist=must_exist)
    _check_alerts(config, findings, must_exist=must_exist)

    # With drop_last, an epoch of less than one batch would train nothing.
    num_samples = count_epoch_samples(config, findings)
    batch_size = config.largest_batch_size
    has_no_batch = num_samples is not None and num_samples < batch_size and config.train_loader.drop_last
    if has_no_batch:
        is_scheduled = batch_size > config.global_train_batch_size
        size_key = "batch_size_schedule" if is_scheduled else "global_train_batch_size"
        raise DataError(
            f"train_loader.dataset: {num_samples} samples do not make one batch of {batch_size} "
            f"({size_key}); use more data or a smaller batch"
        )
    return findings


def _check_parameter_groups(config: TrainConfig, findings: Preflight) -> None:
    """Raise ConfigError for a group of `optimizer.param_groups` without parameters, and note groups that overlap.

    A model with parts of the user's own has parameters that only a launch knows, which checks its groups then.
    """
    if not config.optimizer.param_groups:
        return
    groups = divide_parameters(list_parameters(config.model), config.optimizer)
    findings.notes += describe_overlaps(groups)
    if not config.model.own_parts:
        check_groups(groups)


def _check_companions(config: TrainConfig, layout: Layout) -> None:
    """Raise ConfigError, which names the key, if the run needs a companion that is not installed.

    Companions are optional packages (`companions.py`): one has the layouts that divide a model or a sample between
    devices, another has callbacks.
    """
    for dimension, key in DEGREE_KEYS.items():
        if getattr(layout, dimension) > 1:
            companions.require("llmfoundry_layouts", key)
    if config.sharding.sharding_strategy == "ZERO_1":
        companions.require("llmfoundry_layouts", "fsdp_config.sharding_strategy: ZERO_1")
    for key in config.keys_of_ops:
        companions.require("llmfoundry_ops", key)


def check_installed(*packages: str) -> None:
    """Raise ConfigError unless all packages can be imported. Nothing is imported.

    The packages are `composer` and `streaming`, which training needs and a plain `pip install` leaves out.
    """
    missing = [name for name in packages if not is_installed(name)]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} not installed, which training needs; `pip install 'llmfoundry-lite[train]'`, "
            f"then `{SECOND_STEP}`"
        )


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def check_compiler() -> None:
    """Raise ConfigError if torch.compile would fail at the first batch, because Triton cannot build a C program.

    Triton needs a C compiler, which the environment variable CC may name, and the header files of Python.
    """
    missing = []  # each with the way to install it

    # CC takes precedence over the compilers on PATH, even if it names one that does not exist.
    chosen_compiler = os.environ.get("CC")
    if chosen_compiler:
        if not shutil.which(chosen_compiler):
            missing.append(f"a C compiler (CC: {chosen_compiler} is none)")
    elif not any(map(shutil.which, C_COMPILERS)):
        missing.append(f"a C compiler on PATH ({join_with_or(C_COMPILERS)}; `apt-get install gcc`)")

    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        missing.append(f"{header} (`apt-get install python3-dev`)")

    if missing:
        raise ConfigError(
            f"compile_config: torch.compile needs {' and '.join(missing)}; install it, or leave compiling out: "
            "compile_config=null"
        )


def check_here(config: TrainConfig, layout: Layout, devices: Sequence[Device]) -> None:
    """Check that this machine has the tokenizer, the devices and the memory that a launch needs. Raises ConfigError.

    `devices` are this machine's, in order. Each rank of this machine takes one. Without accelerators there is a single
    device, the RAM, which all of its ranks share.

    The memory needed is an estimate, and is compared with the memory that is free now on the fullest device.
    """
    name = config.tokenizer.name
    is_missing = not is_own(name) and not is_local_or_cached(name)
    if is_missing:
        raise ConfigError(f"{_describe_missing_tokenizer(name)}; {_fetch_advice(name)}")

    # Estimate how many bytes a device needs. Ranks on CPUs share the RAM, so their needs add up.
    is_cpu = devices[0].is_shared
    num_ranks_here = layout.node_size
    if is_cpu:
        needed_by_rank = estimate_training_memory(with_cpu_attention(config), layout).total_bytes
        needed_bytes = needed_by_rank * num_ranks_here
        subject = "one rank needs" if num_ranks_here == 1 else f"{num_ranks_here} ranks need"
    else:
        needed_bytes = estimate_training_memory(config, layout).total_bytes
        subject = "each rank needs"
        if len(devices) < num_ranks_here:
            raise ConfigError(
                f"{num_ranks_here} ranks given, and this machine has {len(devices)} devices; start that many"
            )

    # If one device runs out of memory, the whole run ends, so the one with the least free memory decides.
    fullest = min(devices[:num_ranks_here], key=lambda device: device.free_bytes)
    if needed_bytes > fullest.free_bytes:
        unknown_parts = describe_unknown_parts(config.model)
        not_counted = f", without what {unknown_parts} takes" if unknown_parts else ""
        raise ConfigError(
            f"memory: {subject} about {needed_bytes / GIB:,.1f} GiB by the estimate{not_counted}, and "
            f"{fullest.name} has {fullest.free_bytes / GIB:,.1f} GiB free; use more devices, "
            "a smaller device_train_microbatch_size or model, or fsdp_config with FULL_SHARD or "
            "activation_checkpointing"
        )


def count_epoch_samples(config: TrainConfig, findings: Preflight) -> int | None:
    """Return the number of training samples of an epoch, or None if counting the samples on disk does not tell it.

    That is so if a part of the data is not on this disk. It is also so with streams, stages or an epoch_size, which
    choose or repeat samples: then only the opened data set knows the number.
    """
    dataset = config.train_loader.dataset
    is_whole_dataset = not (dataset.streams or dataset.stages) and dataset.epoch_size is None
    return findings.num_samples.get("train") if is_whole_dataset else None


def _check_tasks(config: TrainConfig, findings: Preflight, *, must_exist: bool) -> None:
    """Check that every in-context task can be evaluated, because otherwise the run would fail at its first evaluation.

    With `must_exist`, a missing tokenizer or task file is an error: ConfigError or DataError. Otherwise the task is
    added to `findings.not_checked`. Rows of a task are read only if the run evaluates (`config.evaluates`).
    """
    tasks = load_tasks(config.icl_tasks, config.icl_task_folder, notes=findings.notes)
    has_tokenizer = is_local_or_cached(config.tokenizer.name)
    is_missing = not has_tokenizer and not is_own(config.tokenizer.name)
    if tasks and must_exist and is_missing:
        raise ConfigError(f"icl_tasks: need the tokenizer, and {config.tokenizer.name} is not on this machine")

    tokenizer: Tokenizer | None = None  # loaded once, because a large one takes a second
    for task in tasks:
        # A data set on the Hub is downloaded by a companion when the task is read. Others are files of this machine.
        is_on_hub = task.dataset_uri.startswith("hf://")
        if is_on_hub:
            companions.require("llmfoundry_formats", f"icl_tasks: {task.label}: {task.dataset_uri}")
        has_file = not is_on_hub and exists(task.dataset_uri)
        if must_exist and not is_on_hub and not has_file:
            raise DataError(
                f"icl_tasks: {task.label}: {task.dataset_uri} does not exist; "
                "`python scripts/fetch_tasks.py` fetches it"
            )

        # Code of the user's own is not imported here. The launch checks such a task when it builds the run.
        for key, name in task.own_code:
            _check_import_path(key, name)
        if is_own(task.icl_task_type):
            findings.not_checked.append(f"icl_tasks: {task.label}: whether it can be asked, without its own code")
            continue

        can_be_checked = has_tokenizer and (has_file or must_exist)
        if not can_be_checked:
            missing = task.dataset_uri if has_tokenizer else "the tokenizer"
            findings.not_checked.append(f"icl_tasks: {task.label}: whether it can be asked, without {missing}")
        elif config.evaluates:
            tokenizer = tokenizer or load_configured_tokenizer(config.tokenizer)
            _check_task(task, config, tokenizer)


def _check_task(task: TaskConfig, config: TrainConfig, tokenizer: Tokenizer) -> None:
    """Check that a task's rows can be read and turned into prompts. Raises DataError.

    A perplexity task may read an MDS split, a folder of shards of tokens. Of that, only the index is checked.
    """
    index = Path(task.dataset_uri, "index.json")
    if task.task_type.answer == "text" and is_file(index):
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
    """Check by the index of an MDS split that it has samples of tokens. No shard is read.

    `task` is the perplexity task that reads the split. Raises DataError.
    """
    try:
        num_samples, columns = _count_samples(index)
    except ValueError as error:
        raise DataError(f"icl_tasks: {task.label}: {index} is not an MDS index ({error}); make it again") from None
    if num_samples == 0 or "tokens" not in columns:
        contents = f"{num_samples} samples of {list_names(columns)}"
        raise DataError(f"icl_tasks: {task.label}: {index.parent} has {contents}; expected samples of tokens")


def _check_alerts(config: TrainConfig, findings: Preflight, *, must_exist: bool) -> None:
    """Raise ConfigError if alerts go to addresses of apprise, and it is not installed.

    Without `must_exist`, that is noted as not checked.
    """
    is_missing = config.alerts is not None and bool(config.alerts.apprise) and not is_installed("apprise")
    if not is_missing:
        return
    if must_exist:
        raise ConfigError("alerts.apprise: apprise is not installed; `pip install 'llmfoundry-lite[alerts]'`")
    findings.not_checked.append("alerts.apprise: apprise is not installed")


def _check_loggers(config: TrainConfig, findings: Preflight, *, must_exist: bool) -> None:
    """Check the arguments of wandb, if the run logs to it, and note its environment variables that have no effect.

    Raises ConfigError for arguments that wandb would refuse, and with `must_exist` if it is not installed. Otherwise a
    missing wandb is noted as not checked.
    """
    wandb = config.loggers.wandb
    if wandb is None:
        return
    arguments = init_arguments(wandb, config.run_name, config.run_folder, known_id=None)
    for variable, note in describe_unused_variables(arguments):
        # The id is left to the launch, because a launch that carries on uses the id of the first one.
        if variable != RUN_ID:
            findings.notes.append(note)
    if must_exist or is_installed("wandb"):
        check_wandb(wandb)
    else:
        findings.not_checked.append("loggers.wandb: wandb is not installed")


def _check_import_paths(config: TrainConfig) -> None:
    """Raise ConfigError if the module of a `python:module:Thing` cannot be found. Nothing is imported.

    Such a name may stand for an optimizer, a loader, a callback or a part of the model that the user has written.
    """
    for key, name in config.own_code:
        _check_import_path(key, name)


def _check_import_path(key: str, name: str) -> None:
    """Raise ConfigError if the module of an import path cannot be found. `key` is the key that names it, for errors."""
    module, _, _ = name.removeprefix(PREFIX).partition(":")
    missing_module = "" if module in sys.modules else find_module(module).missing
    if missing_module:
        raise ConfigError(f"{key}: {name}: No module named {missing_module!r}; is its folder on PYTHONPATH?")


# ---------------------------------------------------------------------------------------- data, tokenizer


def _check_data(
    block: str, loader: LoaderConfig, config: TrainConfig, findings: Preflight, *, must_exist: bool
) -> None:
    """Check the index of each folder that a loader's data set reads, and count its samples.

    `block` is the loader's key, such as `eval_loaders.wiki`. The number of samples goes into `findings.num_samples`, if
    all folders are on this disk. A folder that will be filled from a remote is noted as not checked. So is a missing
    one, unless `must_exist`: then it raises DataError.
    """
    dataset = loader.dataset
    streams = distinct_streams(dataset)
    num_samples_by_stream = []
    for stream_key, stream in streams.items():
        key = f"{block}.dataset{stream_key}"
        folder = Path(stream.local or "") / (stream.split or dataset.split or "")
        remote = stream.remote or dataset.remote
        index = folder / "index.json"
        first_index = index if is_file(index) else find_first_index(folder)  # a folder of folders has several
        if first_index == index:
            num_samples_by_stream.append(_check_index(index, key, dataset, config, findings))
        elif first_index is not None:
            _check_index(first_index, key, dataset, config, findings)
            findings.not_checked.append(f"{key}: the folders in {folder}, except that of {first_index}")
        elif remote and remote != stream.local:
            findings.not_checked.append(f"{key}: {folder} will be filled from {remote}")
        elif must_exist:
            raise DataError(f"{key}: {index} does not exist; make it with `llmfoundry-lite data prepare`")
        else:
            findings.not_checked.append(f"{key}: {index} is not there")

    are_all_counted = len(num_samples_by_stream) == len(streams)
    if are_all_counted:
        findings.num_samples[data_label(block)] = sum(num_samples_by_stream)


def _check_index(index: Path, key: str, dataset: TextDatasetConfig, config: TrainConfig, findings: Preflight) -> int:
    """Check an MDS split by its index.json and by the summary that `data prepare` wrote beside the split.

    Compares the length of samples with max_seq_len, and the tokenizer with the configured one. Returns the number of
    samples, and adds to `findings` if the split holds text, or samples of which a part is left out.

    `key` names the data set in messages. Raises DataError, or ConfigError if the vocabulary is too small.
    """
    # The columns say whether the samples are tokens, which need no tokenizer, or text.
    max_seq_len = dataset.max_seq_len or config.max_seq_len
    try:
        num_samples, columns = _count_samples(index)
    except ValueError as error:
        raise DataError(f"{key}: {index} is not an MDS index ({error}); make it again") from None
    if "tokens" not in columns and "text" not in columns:
        raise DataError(f"{key}: {index} has columns {list_names(columns)}; expected tokens or text")
    if "tokens" not in columns:
        findings.text_keys.append(key)
        findings.notes.append(
            f"{key}: a text of more than {max_seq_len} tokens is cut there; `data prepare` keeps it whole"
        )

    # The length of samples is in the type of their column, as in `ndarray:uint16:2048`, or else in the summary.
    summary = _read_summary(index.parent.parent / "summary.json")
    length = tokens_per_sample(columns.get("tokens", "")) or summary.get("max_seq_len")
    if length is not None:
        subject = f"{key}: samples of {index.parent} have"
        check_length(length, max_seq_len, subject, allow_truncation=dataset.allow_truncation)
        if length > max_seq_len:
            left_out = percent_truncated(length, max_seq_len)
            findings.notes.append(
                f"{subject} {length} tokens; max_seq_len {max_seq_len} leaves {left_out} of the text out"
            )

    if summary:
        _check_fingerprint(summary["tokenizer"], key, config)
    return num_samples


def _read_summary(path: Path) -> dict[str, Any]:
    """Read the summary.json that `data prepare` wrote beside its splits.

    A result that is not empty has `max_seq_len`, an int, and a dictionary `tokenizer` with its `vocab_size`,
    `fingerprint` and `name`. Returns {} if the file does not exist, cannot be read, or was written by another tool.
    """
    try:
        summary = read_json(path, "a summary")
    except (OSError, ValueError):
        return {}
    if not isinstance(summary, dict) or type(summary.get("max_seq_len")) is not int:
        return {}

    tokenizer = summary.get("tokenizer")
    if not isinstance(tokenizer, dict):
        return {}
    types = {"vocab_size": int, "fingerprint": str, "name": str}
    is_ours = all(type(tokenizer.get(key)) is expected for key, expected in types.items())
    return summary if is_ours else {}


def _count_samples(index: Path) -> tuple[int, dict[str, str]]:
    """Return the number of samples of all shards of an MDS split, and name -> type of the columns of its first shard.

    For two shards of 100 samples that is `(200, {"tokens": "ndarray:uint16:2048"})`.

    The index is searched by regular expressions instead of being parsed, because every rank does this, and as Python
    objects the index takes eight times its size. Raises ValueError if it is not an MDS index.
    """
    with (
        open(index, "rb", opener=open_regular) as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        # Each shard repeats the columns, so the first match is enough.
        names = re.search(rb'"column_names":\s*(\[[^\]]*\])', content)
        encodings = re.search(rb'"column_encodings":\s*(\[[^\]]*\])', content)
        if names is None or encodings is None:
            raise ValueError("it names no columns")
        num_samples = 0
        for shard_samples in re.finditer(rb'"samples":\s*(\d{1,18})', content):
            num_samples += int(shard_samples[1])
        columns = zip(map(str, parse_json(names[1])), map(str, parse_json(encodings[1])), strict=True)
        return num_samples, dict(columns)


def _check_fingerprint(recorded: dict[str, Any], key: str, config: TrainConfig) -> None:
    """Check that the configured tokenizer is the one that made a data set. No network is needed.

    `recorded` has the `vocab_size`, `fingerprint` and `name` of the tokenizer that made the data set, from its summary.
    `key` names the data set in messages. If the configured tokenizer is not on this machine, only the size of the
    vocabulary is checked.

    Raises ConfigError if the model's vocabulary is too small, and DataError for another tokenizer.
    """
    name = config.tokenizer.name
    _check_vocabulary(config, recorded["vocab_size"], f"the {recorded['vocab_size']} of the tokenizer that made {key}")
    if not is_local_or_cached(name):
        return
    fingerprint = load_configured_tokenizer(config.tokenizer).fingerprint
    if fingerprint != recorded["fingerprint"]:
        raise DataError(
            f"tokenizer.name: {name} is not the tokenizer that made {key} ({fingerprint}, not "
            f"{recorded['fingerprint']}, {recorded['name']}); prepare the data again"
        )


def _check_vocabulary(config: TrainConfig, num_tokens: int, description: str) -> None:
    """Raise ConfigError if the model has embeddings for fewer than `num_tokens` tokens.

    `description` says in the message where the tokens come from.
    """
    if num_tokens > config.model.vocab_size:
        rounded = -(-num_tokens // FAST_MULTIPLE) * FAST_MULTIPLE  # rounded up
        raise ConfigError(
            f"model.vocab_size: {config.model.vocab_size} is less than {description}; set it to {rounded}"
        )


def _check_tokenizer(config: TrainConfig, findings: Preflight, *, must_exist: bool) -> None:
    """Compare the tokenizer with the model's vocabulary and with the data set's special tokens.

    Raises ConfigError if they differ. A tokenizer that is not on this machine is noted as not checked, unless the run
    needs it and `must_exist`: then it is a ConfigError too.
    """
    name = config.tokenizer.name
    if is_own(name) and not is_trusted(name):
        findings.not_checked.append(
            f"tokenizer.name: {name} is code of your own, which only a launch imports and compares with data and model"
        )
        return
    if not is_local_or_cached(name):
        _handle_missing_tokenizer(config, findings, must_exist=must_exist)
        return

    # The YAML may repeat the ids of special tokens, which then must be the tokenizer's, unless a key overrides that.
    tokenizer = load_configured_tokenizer(config.tokenizer)
    dataset = config.train_loader.dataset
    for token, configured_id, tokenizer_id in (
        ("eos", dataset.eos_token_id, tokenizer.eos_token_id),
        ("bos", dataset.bos_token_id, tokenizer.bos_token_id),
    ):
        override = f"override_{token}_token_id_mismatch_error"
        differs = configured_id is not None and configured_id != tokenizer_id
        if differs and not getattr(dataset, override):
            raise ConfigError(
                f"train_loader.dataset.{token}_token_id: {configured_id} is not the tokenizer's, {tokenizer_id} "
                f"({name}); change it, or set train_loader.dataset.{override}: true"
            )
    _check_vocabulary(config, tokenizer.vocab_size, f"the tokenizer's {tokenizer.vocab_size} ({name})")

    # LLM Foundry computes no loss on the padding token, so a run there does not learn where texts end.
    padding = config.tokenizer.kwargs.get("pad_token", tokenizer.pad_token)
    if padding == tokenizer.eos_token:
        findings.notes.append(
            f"tokenizer.name: {name} pads with its end of text, {tokenizer.eos_token}; it is learned here like any "
            "token, and LLM Foundry computes no loss on it"
        )


def check_own_tokenizer(config: TrainConfig) -> list[str]:
    """Check a tokenizer that is code of the user's own, once this process trusts it. `check` has left that out.

    It is compared with the data sets, the model and the tasks, like any other tokenizer. Returns notes to print. Raises
    ConfigError and DataError, also if the code builds no tokenizer.
    """
    findings = Preflight()
    _check_tokenizer(config, findings, must_exist=True)

    # `check` has these findings already.
    known_findings = Preflight()
    for key, loader in config.loaders.items():
        if loader.name == "text":
            _check_data(key, loader, config, known_findings, must_exist=True)
    _check_tasks(config, known_findings, must_exist=True)
    return findings.notes


def _handle_missing_tokenizer(config: TrainConfig, findings: Preflight, *, must_exist: bool) -> None:
    """Note in `findings.not_checked` that the tokenizer is not on this machine, or raise ConfigError if it is needed.

    With `must_exist` it is an error if the run needs the tokenizer. Data sets of text (`findings.text_keys`) need it to
    be tokenized. `attn_uses_sequence_id` needs its end-of-text token, which separates the texts of a sample, unless the
    data set gives the id of one.
    """
    name = config.tokenizer.name
    dataset = config.train_loader.dataset
    has_given_tokens = dataset.eos_token_id is not None or dataset.bos_token_id is not None
    needs_end_of_text = config.model.attn_config.attn_uses_sequence_id and not has_given_tokens
    if must_exist and needs_end_of_text:
        raise ConfigError(
            f"tokenizer.name: {name} is not on this machine, and model.attn_config.attn_uses_sequence_id needs its "
            f"end of text; {_fetch_advice(name)}"
        )

    # Text cannot be read without a tokenizer.
    message = _describe_missing_tokenizer(name)
    if findings.text_keys:
        if os.path.isdir(name):
            # transformers may be able to convert a folder without tokenizer.json, which the companion uses.
            needed_for = f"tokenizer.name: {name}: tokenizers without {TOKENIZER_FILE}"
            companions.require("llmfoundry_formats", needed_for)
        else:
            message += f", and {findings.text_keys[0]} is text that needs it"
            if must_exist:
                raise ConfigError(f"{message}; {_fetch_advice(name)}")
    findings.not_checked.append(message)


def _describe_missing_tokenizer(name: str) -> str:
    """Say that a tokenizer is not on this machine, for a message."""
    return f"tokenizer.name: {name} is neither a local folder nor in the Hub's cache"


def _fetch_advice(name: str) -> str:
    """Say how to get a tokenizer that is not on this machine, for the end of a message."""
    return f"fetch it first (`hf download {name}`) or name a local folder"
