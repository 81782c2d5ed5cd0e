"""Plan a replay, which trains some batches of a run again, and compare its log with what the run recorded.

`llmfoundry-lite replay` (`cli/run.py`) calls these in order:

1. `plan_replay` reads the run's checkpoints and log, and chooses the checkpoint to begin from.
2. `write_replay` writes the configuration of the replay into a new folder, and checks it.
3. `ranks.py` starts `launch_replay.py` on each rank, an ordinary training without saves.
4. `compare_replay` compares its log with the run's.

The run's own files are never changed.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llmfoundry_lite.checkpoint.manifest import Segment
from llmfoundry_lite.checkpoint.manifest_json import encode_record
from llmfoundry_lite.checkpoint.paths import read_tokenizer
from llmfoundry_lite.checkpoint.run_log import Record, number_of, read_lines
from llmfoundry_lite.checkpoint.store import Checkpoint, CheckpointStore
from llmfoundry_lite.config.blocks import find_blocks
from llmfoundry_lite.config.changes import find_changes
from llmfoundry_lite.config.layers import leaf_keys, read_layers
from llmfoundry_lite.config.layout import Layout, divisors, find_data_ranks, layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.parameter_groups import refuse_slow_expressions
from llmfoundry_lite.config.replayed import as_given, refuse_code_in_model, select_recorded
from llmfoundry_lite.config.schema import TrainConfig, as_dict, with_keys
from llmfoundry_lite.config.yaml_text import dump_record
from llmfoundry_lite.convert.checkpoint_model import read_model
from llmfoundry_lite.convert.tokenizer import name_of_tokenizer
from llmfoundry_lite.data.recorded import DataLocations, find_data_locations
from llmfoundry_lite.data.tokenizer import load_configured_tokenizer
from llmfoundry_lite.data.tokenizer_files import FILES, is_local_or_cached
from llmfoundry_lite.errors import ConfigError, DataError, UserError, join_with_or
from llmfoundry_lite.models.names import list_parameters
from llmfoundry_lite.own_code import is_own
from llmfoundry_lite.report.log import LOSS
from llmfoundry_lite.report.reading import METRICS, OBJECT_STORES, Run, explain_unopened_folder, read_recorded

NORM, DATA, STATE, RATE = "grad_norm", "data/digest", "state/digest", "lr"
"""Names of quantities in the log of a run."""
QUANTITIES = (DATA, RATE, LOSS, NORM, STATE)
"""Quantities of a batch that are compared, in the order in which training computes them."""
RECORDED, BEGUN = "recorded-segments.json", "begun.json"
"""Files in the replay's folder: the run's segments, and what rank 0 writes before the first batch."""
DETERMINISTIC = "deterministic"
"""Key that the ranks of a replay set: true on a GPU, and elsewhere the run's value."""
REPLAY_VALUES: dict[str, Any] = {
    "save_folder": None,
    "save_fallback": None,
    "autoresume": False,
    "export_at_end": False,
    "digest_interval": "1ba",
    "eval_interval": 0,
    "load_weights_only": False,
    "load_ignore_keys": [],
    "load_cast": False,
}
"""Keys that a replay sets itself: it saves nothing, evaluates nothing, and digests the state of each batch."""
WITHOUT_EFFECT = ("devices ", "sharding ", "shard degree ", "pipeline ")
"""Beginnings of differences between launches that change no bit of the result with exact_sums."""
MAX_BAND = {"fp32": 1e-4}
"""Precision -> largest relative difference of a loss that other kernels can explain."""
MAX_BAND_16_BITS = 1e-2
"""The same for all other precisions, which compute in 16 bits or in TF32."""
NORM_FACTOR = 10
"""The norm of a gradient may differ this many times as much as a loss, in relative terms."""
MAX_RATE_DIFFERENCE = 1e-9
"""Largest relative difference of a learning rate that counts as rounding."""


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    """Batches to train again, and what the run recorded of them."""

    location: str
    """Path or URL of the run, as the user gave it."""
    config: dict[str, Any]
    """The run's configuration while it trained these batches."""
    start: Checkpoint | None
    """Checkpoint that the replay begins from; None if it begins at batch 1, from the seed."""
    first_batch: int
    last_batch: int
    segments: tuple[Segment, ...]
    """On which devices, and with how many ranks, the run trained these batches."""
    records: dict[int, Record]
    """Batch -> its record in the run's log."""
    tokenizer_files: Mapping[str, bytes]
    """Files of the tokenizer beside the checkpoints, by name, if the run names code for it; otherwise empty. A replay
    takes them, and does not run that code."""
    digests: dict[int, str]
    """Batch -> digest of the state after it, from a manifest or from the log."""


class Mismatch(NamedTuple):
    """A quantity of a batch that is not bit-equal in the run and in its replay."""

    batch: int
    quantity: str
    """One of QUANTITIES."""
    recorded: Any
    """Value in the run's log; None if absent."""
    replayed: Any
    """Value in the replay's log; None if absent."""

    @property
    def relative_difference(self) -> float:
        """The difference of two numbers, divided by the larger one's magnitude; infinite for anything else."""
        recorded = number_of(self.recorded)
        replayed = number_of(self.replayed)
        # Large integers can differ and still be equal as floats.
        if recorded is None or replayed is None or recorded == replayed:
            return float("inf")
        return abs(recorded - replayed) / max(abs(recorded), abs(replayed))

    def __str__(self) -> str:
        return f"batch {self.batch}: {self.quantity} is {self.replayed} here and {self.recorded} in the run"


class Outcome(NamedTuple):
    """Result of comparing a replay with its run."""

    text: str
    """One line to print: `bit-equal: …`, `within a band: …` or `does not fit: …`."""
    is_equal: bool
    """Whether every compared quantity is equal bit for bit."""


# ------------------------------------------------------------------------------------------------------ what to train


def plan_replay(
    location: str, states: str | None, *, trusts_code: bool = False, uses_recorded_remote: bool = False
) -> ReplayPlan:
    """Choose the batches to train again and the checkpoint to begin from, and read what the run recorded of them.

    `location` is the path or URL of a run or of a folder of checkpoints. `states` is such as `ba100..ba110`: from the
    state after batch 100 to the one after batch 110. By default it goes from the last checkpoint but one to the last.
    With `trusts_code`, parts of the run's model may be code that it names. With `uses_recorded_remote`, the run's
    checkpoints may be read from the object store that it recorded.

    Raises ConfigError for states that cannot be replayed and for a model with code that is not trusted, DataError if
    the log or the configuration lacks something, and CheckpointError.
    """
    # Choose the first and the last state. By default these are the last two of: the run's start, each save, the end of
    # the log.
    requested_states = None if states is None else _parse_states(states)
    run = _read_saved_run(location, uses_recorded_remote)
    assert run.saved_in is not None
    readable_saves = [save for save in CheckpointStore(run.saved_in).candidates() if save.head is not None]
    saves = sorted(readable_saves, key=lambda save: save.batch)
    last_logged_batch = int(run.log.batch[-1])
    if requested_states is None:
        first_state, last_state = [0, last_logged_batch, *(save.batch for save in saves)][-2:]
    else:
        first_state, last_state = requested_states

    # The replay begins at the newest save that is not after its first state.
    earlier_saves = [save for save in saves if save.batch <= first_state]
    start = earlier_saves[-1].open() if earlier_saves else None
    first_batch = 1 if start is None else start.manifest.timestamp.batch + 1
    later_checkpoints = [save.open() for save in saves if save.batch >= first_batch]

    # The log must have a loss of each batch, or there is nothing to compare with.
    all_records = {record["batch"]: record for _, record in read_lines(run.log.lines)}
    for batch in range(first_batch, last_state + 1):
        if LOSS not in all_records.get(batch, {}):
            raise DataError(f"{location}: {METRICS} has no loss of batch {batch}; it ends with {last_logged_batch}")

    # A checkpoint's manifest has the configuration of the batches before it.
    config = later_checkpoints[0].manifest.config if later_checkpoints else run.config
    if not isinstance(config, dict):
        raise DataError(f"{location}: the run's configuration is missing")
    if not trusts_code:
        refuse_code_in_model(config)
    start_checkpoints = [] if start is None else [start]
    tokenizer_files: dict[str, bytes] = {}
    if is_own(name_of_tokenizer(config, location)):
        for checkpoint in [*later_checkpoints, *start_checkpoints][:1]:
            tokenizer_files = read_tokenizer(checkpoint, FILES)
    for checkpoint in later_checkpoints or start_checkpoints:
        # Raises for a configuration of a larger model than the checkpoint's tensors belong to, before ranks build it.
        read_model(checkpoint, trusts_code=trusts_code)

    return ReplayPlan(
        location=location,
        config=config,
        start=start,
        first_batch=first_batch,
        last_batch=last_state,
        tokenizer_files=tokenizer_files,
        segments=_find_segments(run, later_checkpoints, first_batch, last_state),
        records={batch: all_records[batch] for batch in range(first_batch, last_state + 1)},
        digests=_collect_state_digests(all_records.values(), [*later_checkpoints, *start_checkpoints]),
    )


def _parse_states(states: str) -> tuple[int, int]:
    """Parse `ba100..ba110` as (100, 110). Raises ConfigError, also if the first state is not the earlier one."""
    match = re.fullmatch(r"ba(\d+)\.\.ba(\d+)", states)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"{states} given, expected two states of the run, the earlier first: ba100..ba110")
    return int(match[1]), int(match[2])


def _read_saved_run(location: str, uses_recorded_remote: bool) -> Run:
    """Read the records of a run whose checkpoints can be opened. Raises ConfigError if they cannot.

    An object store that the run recorded is only read with `uses_recorded_remote`, because the run may be anybody's.
    """
    run = read_recorded(location, OBJECT_STORES if uses_recorded_remote else ())
    if run.saved_in is None:
        recorded_folder = str((run.config or {}).get("save_folder"))
        advice = ""
        if "://" in recorded_folder and not uses_recorded_remote:
            advice = ", or read it with --use-recorded-remote"
        raise ConfigError(f"{location}: {explain_unopened_folder(run.config)}{advice}")
    return run


def _collect_state_digests(records: Iterable[Record], checkpoints: Iterable[Checkpoint]) -> dict[int, str]:
    """Return batch -> digest of the state after it, for batches of which the log or a checkpoint's manifest has one.

    The digest in a manifest takes precedence over the one in the log.
    """
    digests = {}
    for record in records:
        if STATE in record and "state/batch" in record:
            digests[record["state/batch"]] = record[STATE]
    for checkpoint in checkpoints:
        if checkpoint.manifest.state_digest is not None:
            digests[checkpoint.manifest.timestamp.batch] = checkpoint.manifest.state_digest
    return digests


def _find_segments(run: Run, checkpoints: list[Checkpoint], first_batch: int, last_batch: int) -> tuple[Segment, ...]:
    """Return the segments of the run, stretches on the same devices, that trained any of these batches.

    `checkpoints` are those from `first_batch` on, whose manifests list segments. Raises ConfigError if the
    configuration changed within these batches, or if several launches trained them together.
    """
    # A manifest lists the segments up to its own batch. Take the first that covers all batches, or the run's own list.
    known_segments = run.segments
    for checkpoint in checkpoints:
        if checkpoint.manifest.timestamp.batch >= last_batch:
            known_segments = checkpoint.manifest.segments
            break
    segments = []
    for segment in known_segments:
        if segment.first_batch <= last_batch and segment.last_batch >= first_batch:
            segments.append(segment)
    if not segments:
        segments = list(known_segments[-1:])

    # Batches on both sides of a change cannot be replayed with one configuration.
    for segment in segments:
        if segment.sync is not None:
            raise ConfigError(
                f"{run.location}: islands trained batches {segment.span} with {segment.sync}, which one world does not "
                "repeat; replay batches that were trained without islands.sync"
            )
        if segment.changes and segment.first_batch > first_batch:
            last_before = segment.first_batch - 1
            raise ConfigError(
                f"{run.location}: {', '.join(segment.changes)} changed after ba{last_before}; replay "
                f"ba{first_batch - 1}..ba{last_before} and ba{last_before}..ba{last_batch}"
            )
    return tuple(segments)


def write_replay(
    plan: ReplayPlan,
    folder: Path,
    num_ranks: int,
    changes: Sequence[str] = (),
    *,
    trusts_code: bool = False,
    uses_recorded_remote: bool = False,
) -> str:
    """Write the configuration of a replay, and the run's segments, into a new folder that only this user can read.

    Returns the path of the YAML file, which is the only argument that the ranks get. `changes` are `key=value` pairs of
    the command line, such as the folders of data and tokenizer on this machine. With `trusts_code`, the code and the
    environment variables that the run recorded are used. With `uses_recorded_remote`, data may be downloaded from the
    URLs that it recorded.

    Raises ConfigError and DataError for what the ranks would refuse, before any of them starts.
    """
    # Select values: those that the replay sets, those that the run recorded, and those that depend on the ranks.
    given_keys: list[str] = []
    for layer in read_layers(changes, for_training=False):
        given_keys += leaf_keys(layer.values)
    replay_values = _values_of_replay(plan, folder, given_keys)
    folder.mkdir(parents=True)
    recorded = dict(plan.config)
    if plan.tokenizer_files:
        recorded["tokenizer"] = {"name": _write_tokenizer(plan, folder.with_name("tokenizer"))}
    values = select_recorded(recorded, given_keys, trusts_code=trusts_code)
    values |= _layout_for(plan, values, num_ranks)

    # Load them with the user's changes, as a training launch would, and compare the result with the run.
    recorded_yaml = folder / "recorded.yaml"
    recorded_yaml.write_text(dump_record(values, keep_variables=False), encoding="utf-8")
    try:
        config = load_train_config([str(recorded_yaml), *changes]).config
    except ConfigError as error:
        raise ConfigError(str(error).replace(str(recorded_yaml), f"{plan.location}: its configuration")) from None
    refuse_slow_expressions(list_parameters(config.model), config.optimizer)
    _refuse_another_run(plan, as_dict(config), given_keys)
    layout = _check_ranks(plan, config, num_ranks)
    _check_tokenizer(plan, config)

    # Write the resolved configuration, in which references and `~` are replaced by their text, with credentials.
    values = with_keys(config)
    microbatch_size = config.device_train_microbatch_size
    if isinstance(microbatch_size, int):
        samples_per_data_rank = config.global_train_batch_size // layout.num_data_ranks
        values["device_train_microbatch_size"] = min(microbatch_size, samples_per_data_rank)
    if config.train_loader.name == "text":
        locations = DataLocations(
            download_folder=folder.with_name("data"),
            named_by_user=find_data_locations(values, given_keys),
            uses_recorded_remote=uses_recorded_remote,
            advice=", or use what it recorded with --use-recorded-remote",
        )
        values["train_loader"]["dataset"] = asdict(locations.choose_for(config.train_loader.dataset))

    (folder / RECORDED).write_text(json.dumps([encode_record(segment) for segment in plan.segments]))
    path = folder / "replay.yaml"
    path.write_text(dump_record(as_given(values | replay_values), keep_variables=False), encoding="utf-8")
    return str(path)


def _write_tokenizer(plan: ReplayPlan, folder: Path) -> str:
    """Write the tokenizer of a run whose own code has built it into a new folder. Returns the folder's path."""
    folder.mkdir()
    for name, content in plan.tokenizer_files.items():
        (folder / name).write_bytes(content)
    return str(folder)


def _values_of_replay(plan: ReplayPlan, folder: Path, given_keys: Sequence[str]) -> dict[str, Any]:
    """Return key -> value for the keys that a replay sets itself. Raises ConfigError if the command line sets one.

    `given_keys` are the dotted keys on the command line.
    """
    num_batches = plan.last_batch - plan.first_batch + 1
    values = {"run_folder": str(folder), **REPLAY_VALUES, "stop_after": f"{num_batches}ba"}
    if plan.start is not None:
        values["load_path"] = plan.start.url

    reserved_blocks = {*values, "load_path", DETERMINISTIC, *find_blocks()}
    for key in given_keys:
        if key.partition(".")[0] in reserved_blocks:
            raise ConfigError(f"replay: {key} is set by the replay itself; leave it out")
    return values


def _layout_for(plan: ReplayPlan, values: dict[str, Any], num_ranks: int) -> dict[str, Any]:
    """Return key -> value for the keys that depend on the number of ranks, and the size of the run's microbatches.

    `values` is the run's configuration. With the run's own number of ranks, the layout stays. With another number, only
    the data is divided: the recorded degrees of other parallelism, and shard degrees, may not divide the ranks.
    """
    changed: dict[str, Any] = {}
    segment = plan.segments[-1] if plan.segments else None
    if segment is not None:
        changed["device_train_microbatch_size"] = segment.device_train_microbatch_size
        if segment.world_size == num_ranks:
            return changed

    changed |= {"tp_config": None, "cp_config": None, "pp_config": None}
    # These two strategies depend on the number of devices, or on a companion.
    fsdp = values.get("fsdp_config")
    if isinstance(fsdp, dict) and fsdp.get("sharding_strategy") in ("HYBRID_SHARD", "ZERO_1"):
        changed["fsdp_config"] = fsdp | {"sharding_strategy": "FULL_SHARD", "data_parallel_shard_degree": None}
    return changed


def _refuse_another_run(plan: ReplayPlan, config: dict[str, Any], given_keys: Sequence[str]) -> None:
    """Raise ConfigError if a key on the command line changes what is trained, so that results would not be comparable.

    `config` is the configuration of the replay, and `given_keys` are the dotted keys on the command line. A recorded
    value with an unresolved reference `${…}` is not compared.
    """
    changes = find_changes(plan.config, config)
    for change in (*changes["never"], *changes["logged"]):
        has_variable = "${" in str(change.before)
        if has_variable:
            continue
        for key in given_keys:
            is_inside_change = key.startswith(f"{change.key}.")
            is_change_or_around = f"{change.key}.".startswith(f"{key}.")
            if is_inside_change or is_change_or_around:
                raise ConfigError(f"replay: {change} would be another run; leave it out")


def _check_ranks(plan: ReplayPlan, config: TrainConfig, num_ranks: int) -> Layout:
    """Check that the ranks of a replay can divide the run's batches evenly, and return their layout.

    With `exact_sums`, microbatches must be as large as in the run, because the order of sums depends on it.

    Raises ConfigError, which names numbers of ranks that fit, and DataError if the record contradicts itself.
    """
    batch_size = config.global_train_batch_size
    microbatch_size = 1  # number of samples that must stay together; 1 unless the run has exact sums
    if config.exact_sums and plan.segments:
        microbatch_size = plan.segments[-1].device_train_microbatch_size or 1
        given_size = config.device_train_microbatch_size
        if given_size not in (microbatch_size, "auto", None):
            raise ConfigError(
                f"replay: device_train_microbatch_size {microbatch_size} -> {given_size} would be another run, for "
                "exact_sums makes it a part of the run; leave it out"
            )
        if microbatch_size < 1 or batch_size % microbatch_size:
            raise DataError(
                f"{plan.location}: its microbatches of {microbatch_size} samples do not divide its batches of "
                f"{batch_size}"
            )

    layout = layout_of(config, num_ranks, num_ranks)
    is_even = batch_size % (layout.num_data_ranks * microbatch_size) == 0
    if not is_even:
        # Suggest numbers of ranks that fit, if possible such as are not much larger.
        fitting_data_ranks = find_data_ranks(config, microbatch_size if config.exact_sums else None)
        if not fitting_data_ranks:
            fitting_data_ranks = divisors(batch_size // microbatch_size)
        fitting_ranks = [number * layout.ranks_per_data_rank for number in fitting_data_ranks]
        suggested_ranks = [number for number in fitting_ranks if number <= 4 * num_ranks] or fitting_ranks
        parts = "samples"
        if microbatch_size > 1:
            parts = f"microbatches of {microbatch_size} samples, which exact_sums keeps"
        raise ConfigError(
            f"replay: -n {num_ranks}: the run's batches of {batch_size} cannot be shared evenly in {parts}; start "
            f"{join_with_or(suggested_ranks)} ranks"
        )
    return layout


def _check_tokenizer(plan: ReplayPlan, config: TrainConfig) -> None:
    """Raise ConfigError if the tokenizer is not the one that the run was trained with, by its fingerprint.

    The run's fingerprint is in the checkpoint from which the replay begins. If there is none, or if the tokenizer is
    not on this machine, nothing is checked.
    """
    name = config.tokenizer.name
    recorded = None if plan.start is None else plan.start.manifest.fingerprints.get("tokenizer")
    if not recorded or not is_local_or_cached(name):
        return
    fingerprint = load_configured_tokenizer(config.tokenizer).fingerprint
    if fingerprint != recorded:
        raise ConfigError(
            f"replay: {name} is not the run's tokenizer ({fingerprint} here, {recorded} there); give the one that it "
            "was trained with: tokenizer.name=FOLDER"
        )


def adapt_advice(error: UserError) -> UserError:
    """Return an error of the configuration's checks with advice that suits a replay.

    A replay cannot prepare the data again or change the model. So for errors about data, the advice after the last `; `
    is replaced by advice to give the data and the tokenizer with which the run was trained. Other errors are returned
    unchanged.
    """
    text = str(error)
    is_about_data = isinstance(error, DataError) or text.startswith("model.vocab_size")
    if not is_about_data:
        return error
    fault = text.rpartition("; ")[0] or text
    settings = "train_loader.dataset.local=FOLDER tokenizer.name=FOLDER"
    return type(error)(f"replay: {fault}; give the data and the tokenizer that the run was trained with: {settings}")


# --------------------------------------------------------------------------------------------------- the outcome


def compare_replay(plan: ReplayPlan, folder: Path) -> Outcome:
    """Compare the log of a finished replay in `folder` with what its run recorded.

    The outcome is one of three:

    - `bit-equal`: every compared number is.
    - `within a band`: devices, kernels or layout differ from the run's, and the numbers differ by no more than that
      explains.
    - `does not fit`: anything else. The text names the first difference.
    """
    # Differences that the ranks found before the first batch: in the data, in devices, kernels and layout.
    begun = json.loads((folder / BEGUN).read_text())
    other_data = begun.get("other_data")
    if other_data:
        return Outcome(f"does not fit: the data is not what the run was trained with: {other_data}", False)

    differences = begun["differences"]
    if begun[DETERMINISTIC] and not plan.config.get(DETERMINISTIC):
        differences.append("deterministic false -> true")
    suffix = f"; beside the run: {', '.join(differences)}" if differences else ""

    # Differences in the state at the start, and in the log of each batch.
    recorded_start = plan.start.manifest.state_digest if plan.start is not None else None
    has_other_start = recorded_start is not None and recorded_start != begun["digest"]
    mismatches, num_compared = _compare_records(plan, folder)
    if has_other_start:
        mismatches.insert(0, Mismatch(plan.first_batch - 1, STATE, recorded_start, begun["digest"]))
    if not mismatches:
        counts = ", ".join(f"{count} of {quantity}" for quantity, count in num_compared.items())
        return Outcome(f"bit-equal: {counts}{suffix}", True)

    # Only a difference of devices, kernels or layout can explain other numbers, and only within limits.
    has_exact_sums = bool(plan.config.get("exact_sums"))
    explanations = [text for text in differences if not (has_exact_sums and text.startswith(WITHOUT_EFFECT))]
    if has_other_start or not explanations:
        return Outcome(f"does not fit: {mismatches[0]}{suffix}", False)
    max_loss_difference = MAX_BAND.get(plan.config.get("precision", ""), MAX_BAND_16_BITS)
    max_differences = {
        LOSS: max_loss_difference,
        NORM: NORM_FACTOR * max_loss_difference,
        RATE: MAX_RATE_DIFFERENCE,
        DATA: 0.0,
        STATE: float("inf"),
    }
    for mismatch in mismatches:
        is_within = mismatch.relative_difference <= max_differences[mismatch.quantity]
        if not is_within:
            return Outcome(f"does not fit: {mismatch}{suffix}", False)

    # Say how wide the band is: the largest difference of each quantity.
    largest_differences = []
    for quantity in (LOSS, NORM, RATE):
        differences_of_quantity = [
            mismatch.relative_difference for mismatch in mismatches if mismatch.quantity == quantity
        ]
        if differences_of_quantity:
            largest_differences.append(f"{quantity} within {max(differences_of_quantity):.1e}")
    band = ", ".join(largest_differences) or "only state/digest differs"
    return Outcome(f"within a band: {band}; {', '.join(explanations)}", False)


def _compare_records(plan: ReplayPlan, folder: Path) -> tuple[list[Mismatch], dict[str, int]]:
    """Compare the QUANTITIES of each batch in the run's log with those in the replay's log, bit for bit.

    Returns the mismatches, batch by batch in the order of QUANTITIES, and quantity -> number of compared values. A
    quantity that the run did not record for a batch is not compared.
    """
    replayed_records = {record["batch"]: record for _, record in read_lines((folder / METRICS).read_bytes())}
    num_compared: dict[str, int] = dict.fromkeys(QUANTITIES, 0)
    mismatches = []
    for batch, record in plan.records.items():
        recorded_values = {**record, STATE: plan.digests.get(batch)}
        for quantity in QUANTITIES:
            recorded = recorded_values.get(quantity)
            if recorded is None:
                continue
            num_compared[quantity] += 1
            replayed = replayed_records[batch].get(quantity)
            if recorded != replayed:
                mismatches.append(Mismatch(batch, quantity, recorded, replayed))
    return mismatches, num_compared
