"""Batches of a run, trained again somewhere else: what to train, and whether it comes to what the run recorded.

`plan_replay` reads the run's checkpoints and log, `launch_replay.py` trains in a folder of its own, and
`compare_replay` reads what it found. Nothing of the run is changed.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llmfoundry_lite.checkpoint.manifest import Segment, encode_record
from llmfoundry_lite.checkpoint.run_log import Record, number_of, read_lines
from llmfoundry_lite.checkpoint.store import Checkpoint, CheckpointStore
from llmfoundry_lite.config.blocks import find_blocks
from llmfoundry_lite.config.changes import find_changes
from llmfoundry_lite.config.layers import leaf_keys, read_layers
from llmfoundry_lite.config.layout import Layout, divisors, find_data_ranks, layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.replayed import as_given, select_recorded
from llmfoundry_lite.config.schema import TrainConfig, as_dict, with_keys
from llmfoundry_lite.config.yaml_text import dump_record
from llmfoundry_lite.convert.checkpoint_model import read_model
from llmfoundry_lite.data.recorded import DataLocations, locations_at
from llmfoundry_lite.data.tokenizer import is_local_or_cached, load_tokenizer
from llmfoundry_lite.errors import ConfigError, DataError, UserError, either
from llmfoundry_lite.report.reading import LOSS, METRICS, OBJECT_STORES, Run, explain_unopened_folder, read_recorded

NORM, DATA, STATE, RATE = "grad_norm", "data/digest", "state/digest", "lr"
QUANTITIES = (DATA, RATE, LOSS, NORM, STATE)
"""In the order in which a batch makes them."""
RECORDED, BEGUN = "recorded-segments.json", "begun.json"
"""Files in the replay's folder: the run's segments, and what the ranks say before the first batch."""
DETERMINISTIC = "deterministic"
"""Key that a replay's ranks decide: true on a GPU, elsewhere as the run had it."""
OWN: dict[str, Any] = {
    "save_folder": None,
    "autoresume": False,
    "export_at_end": False,
    "digest_interval": "1ba",
    "eval_interval": 0,
    "load_weights_only": False,
    "load_ignore_keys": [],
    "load_cast": False,
}
"""Keys that are the replay's own: it saves nothing, evaluates nothing, and digests the state of each batch."""
WITHOUT_EFFECT = ("devices ", "sharding ", "shard degree ", "pipeline ")
"""Differences that change no bit with exact_sums."""
MAX_BAND = {"fp32": 1e-4}
"""Precision -> largest relative difference of a loss that other kernels explain."""
MAX_BAND_16_BITS = 1e-2
NORM_FACTOR = 10
"""The norm of a gradient may differ this many times as much as a loss."""
MAX_RATE_DIFFERENCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    """Batches to train again, and what the run recorded of them."""

    where: str
    config: dict[str, Any]
    """The run's configuration while it trained these batches."""
    start: Checkpoint | None
    """None: the replay starts at batch 1, from the seed."""
    first_batch: int
    last_batch: int
    segments: tuple[Segment, ...]
    """Where the run trained these batches."""
    records: dict[int, Record]
    """Batch -> its record in the log."""
    digests: dict[int, str]
    """Batch -> the state's digest after it, in a manifest or in the log."""


class Misfit(NamedTuple):
    batch: int
    quantity: str
    there: Any
    here: Any

    @property
    def relative(self) -> float:
        """Return the relative difference of two numbers; infinite for anything else."""
        there, here = number_of(self.there), number_of(self.here)
        if there is None or here is None or there == here:  # the last: equal as fp32
            return float("inf")
        return abs(there - here) / max(abs(there), abs(here))

    def __str__(self) -> str:
        return f"batch {self.batch}: {self.quantity} is {self.here} here and {self.there} in the run"


class Outcome(NamedTuple):
    text: str
    is_equal: bool
    """Bit for bit."""


# ------------------------------------------------------------------------------------------------------ what to train


def plan_replay(where: str, states: str | None, *, uses_recorded_remote: bool = False) -> ReplayPlan:
    """Choose the checkpoint, and read what the run recorded. Raises ConfigError, DataError and CheckpointError.
    `states` is ba100..ba110; None: from the last checkpoint but one to the last."""
    bounds = re.fullmatch(r"ba(\d+)\.\.ba(\d+)", states or "ba0..ba1")
    if bounds is None or int(bounds[1]) >= int(bounds[2]):
        raise ConfigError(f"{states} given, expected two states of the run, the earlier first: ba100..ba110")
    run = read_recorded(where, OBJECT_STORES if uses_recorded_remote else ())
    if run.saved_in is None:
        is_url = "://" in str((run.config or {}).get("save_folder")) and not uses_recorded_remote
        option = ", or read it with --use-recorded-remote" if is_url else ""
        raise ConfigError(f"{where}: {explain_unopened_folder(run.config)}{option}")
    store = CheckpointStore(run.saved_in)
    saves = sorted((one for one in store.candidates() if one.head is not None), key=lambda one: one.batch)
    first, last = int(bounds[1]), int(bounds[2])
    if states is None:
        first, last = [0, int(run.log.batch[-1]), *(one.batch for one in saves)][-2:]
    start = next((one.open() for one in reversed(saves) if one.batch <= first), None)
    begin = start.manifest.timestamp.batch if start is not None else 0
    records = {record["batch"]: record for _, record in read_lines(run.log.lines)}
    missing = next((batch for batch in range(begin + 1, last + 1) if LOSS not in records.get(batch, {})), None)
    if missing is not None:
        raise DataError(f"{where}: {METRICS} has no loss of batch {missing}; it ends with {int(run.log.batch[-1])}")
    later = [one.open() for one in saves if one.batch > begin]
    config = later[0].manifest.config if later else run.config
    if not isinstance(config, dict):
        raise DataError(f"{where}: the run's configuration is not there")
    for checkpoint in later or ([] if start is None else [start]):
        read_model(checkpoint)  # its tensors say how large the model can be that the ranks will build
    logged = [record for record in records.values() if STATE in record and "state/batch" in record]
    digests = {record["state/batch"]: record[STATE] for record in logged}
    saved = {one.manifest.timestamp.batch: one.manifest.state_digest for one in [*later, *([start] if start else [])]}
    digests |= {batch: digest for batch, digest in saved.items() if digest is not None}
    return ReplayPlan(
        where=where,
        config=config,
        start=start,
        first_batch=begin + 1,
        last_batch=last,
        segments=_segments_of(run, later, begin + 1, last),
        records={batch: records[batch] for batch in range(begin + 1, last + 1)},
        digests=digests,
    )


def _segments_of(run: Run, later: list[Checkpoint], first: int, last: int) -> tuple[Segment, ...]:
    """Return where these batches ran. Raises ConfigError if the configuration changed within them."""
    known = next((one.manifest.segments for one in later if one.manifest.timestamp.batch >= last), run.segments)
    found = [one for one in known if one.first_batch <= last and one.last_batch >= first] or list(known[-1:])
    for segment in found:
        if segment.sync is not None:
            raise ConfigError(
                f"{run.location}: islands trained batches {segment.span} with {segment.sync}, which one world does not "
                "repeat; replay batches that were trained without islands.sync"
            )
        if segment.changes and segment.first_batch > first:
            at = segment.first_batch - 1
            raise ConfigError(
                f"{run.location}: {', '.join(segment.changes)} changed after ba{at}; replay ba{first - 1}..ba{at} and "
                f"ba{at}..ba{last}"
            )
    return tuple(found)


def write_replay(
    plan: ReplayPlan,
    folder: Path,
    num_ranks: int,
    changes: Sequence[str] = (),
    *,
    trusts_code: bool = False,
    uses_recorded_remote: bool = False,
) -> str:
    """Write the configuration of a replay, and what its ranks need to know. Returns the path of the YAML, which is all
    that they are given.

    `changes`: `key=value` of the command line. Raises ConfigError and DataError, before anything heavy starts.
    """
    given = [key for layer in read_layers(changes, for_training=False) for key in leaf_keys(layer.values)]
    own = {"run_folder": str(folder), **OWN, "stop_after": f"{plan.last_batch - plan.first_batch + 1}ba"}
    if plan.start is not None:
        own |= {"load_path": plan.start.url}
    if fixed := [key for key in given if key.partition(".")[0] in {*own, "load_path", DETERMINISTIC, *find_blocks()}]:
        raise ConfigError(f"replay: {fixed[0]} is set by the replay itself; leave it out")
    values = select_recorded(plan.config, given, trusts_code=trusts_code)
    values |= _layout_for(plan, values, num_ranks)
    folder.mkdir(parents=True)
    recorded = folder / "recorded.yaml"
    recorded.write_text(dump_record(values, keep_variables=False), encoding="utf-8")
    try:
        config = load_train_config([str(recorded), *changes]).config
    except ConfigError as error:
        raise ConfigError(str(error).replace(str(recorded), f"{plan.where}: its configuration")) from None
    _refuse_another_run(plan, as_dict(config), given)
    layout = _check_ranks(plan, config, num_ranks)
    _check_tokenizer(plan, config)
    values = with_keys(config)  # with the text of variables, and credentials: the folder is this user's alone
    if isinstance(size := config.device_train_microbatch_size, int):
        values["device_train_microbatch_size"] = min(size, config.global_train_batch_size // layout.num_data_ranks)
    if config.train_loader.name == "text":
        locations = DataLocations(
            download_folder=folder.with_name("data"),
            named_by_user=locations_at(values, given),
            uses_recorded_remote=uses_recorded_remote,
            advice=", or use what it recorded with --use-recorded-remote",
        )
        values["train_loader"]["dataset"] = asdict(locations.choose_for(config.train_loader.dataset))
    (folder / RECORDED).write_text(json.dumps([encode_record(segment) for segment in plan.segments]))
    path = folder / "replay.yaml"
    path.write_text(dump_record(as_given(values | own), keep_variables=False), encoding="utf-8")
    return str(path)


def _layout_for(plan: ReplayPlan, values: dict[str, Any], num_ranks: int) -> dict[str, Any]:
    """Return keys that the number of ranks here decides, and the size of the run's microbatches."""
    last = plan.segments[-1] if plan.segments else None
    found: dict[str, Any] = {}
    if last is not None:
        found["device_train_microbatch_size"] = last.device_train_microbatch_size
    if last is None or last.world_size != num_ranks:
        found |= {"tp_config": None, "cp_config": None, "pp_config": None}
        fsdp = values.get("fsdp_config")
        if isinstance(fsdp, dict) and fsdp.get("sharding_strategy") in ("HYBRID_SHARD", "ZERO_1"):
            found["fsdp_config"] = fsdp | {"sharding_strategy": "FULL_SHARD", "data_parallel_shard_degree": None}
    return found


def _refuse_another_run(plan: ReplayPlan, here: dict[str, Any], given: Sequence[str]) -> None:
    """Raise ConfigError for a key of the command line that makes it another run."""
    found = find_changes(plan.config, here)
    for change in (*found["never"], *found["logged"]):
        is_given = any(f"{change.key}.".startswith(f"{key}.") or key.startswith(f"{change.key}.") for key in given)
        if is_given and "${" not in str(change.before):
            raise ConfigError(f"replay: {change} would be another run; leave it out")


def _check_ranks(plan: ReplayPlan, config: TrainConfig, num_ranks: int) -> Layout:
    """Return the layout. Raises ConfigError for ranks that cannot share a batch, or not in the run's microbatches."""
    batch, size = config.global_train_batch_size, 1
    if config.exact_sums and plan.segments:
        size = plan.segments[-1].device_train_microbatch_size or 1
        if (here := config.device_train_microbatch_size) not in (size, "auto", None):
            raise ConfigError(
                f"replay: device_train_microbatch_size {size} -> {here} would be another run, for exact_sums makes it "
                "a part of the run; leave it out"
            )
        if size < 1 or batch % size:
            raise DataError(f"{plan.where}: its microbatches of {size} samples do not divide its batches of {batch}")
    layout = layout_of(config, num_ranks, num_ranks)
    if batch % (layout.num_data_ranks * size):
        parts = f"microbatches of {size} samples, which exact_sums keeps" if size > 1 else "samples"
        fitting = find_data_ranks(config, size if config.exact_sums else None) or divisors(batch // size)
        counts = [number * layout.ranks_per_data_rank for number in fitting]
        raise ConfigError(
            f"replay: -n {num_ranks}: the run's batches of {batch} cannot be shared evenly in {parts}; start "
            f"{either([count for count in counts if count <= 4 * num_ranks] or counts)} ranks"
        )
    return layout


def _check_tokenizer(plan: ReplayPlan, config: TrainConfig) -> None:
    """Raise ConfigError for a tokenizer here that is not the run's."""
    name, there = config.tokenizer.name, plan.start and plan.start.manifest.fingerprints.get("tokenizer")
    if there and is_local_or_cached(name) and (here := load_tokenizer(name).fingerprint) != there:
        raise ConfigError(
            f"replay: {name} is not the run's tokenizer ({here} here, {there} there); give the one that it was trained "
            "with: tokenizer.name=FOLDER"
        )


def for_a_replay(error: UserError) -> UserError:
    """Replace advice to prepare data again or to change the run by advice that a replay can follow."""
    text = str(error)
    if not isinstance(error, DataError) and not text.startswith("model.vocab_size"):
        return error
    found = text.rpartition("; ")[0] or text
    own = "train_loader.dataset.local=FOLDER tokenizer.name=FOLDER"
    return type(error)(f"replay: {found}; give the data and the tokenizer that the run was trained with: {own}")


# --------------------------------------------------------------------------------------------------- what came of it


def compare_replay(plan: ReplayPlan, folder: Path) -> Outcome:
    """Compare the records of a replay that has ended well with the run's."""
    begun = json.loads((folder / BEGUN).read_text())
    if other := begun.get("other_data"):
        return Outcome(f"does not fit: the data is not what the run was trained with: {other}", False)
    differences, is_exact = begun["differences"], bool(plan.config.get("exact_sums"))
    if begun[DETERMINISTIC] and not plan.config.get(DETERMINISTIC):
        differences.append("deterministic false -> true")
    here = {record["batch"]: record for _, record in read_lines((folder / METRICS).read_bytes())}
    start = plan.start.manifest.state_digest if plan.start is not None else None
    is_wrong_start, num_compared = start not in (None, begun["digest"]), dict.fromkeys(QUANTITIES, 0)
    misfits = [Misfit(plan.first_batch - 1, STATE, start, begun["digest"])] if is_wrong_start else []
    for batch, record in plan.records.items():
        there = {**record, STATE: plan.digests.get(batch)}
        for quantity in QUANTITIES:
            if there.get(quantity) is not None:
                num_compared[quantity] += 1
                if there[quantity] != here[batch].get(quantity):
                    misfits.append(Misfit(batch, quantity, there[quantity], here[batch].get(quantity)))
    explained = [text for text in differences if not (is_exact and text.startswith(WITHOUT_EFFECT))]
    beside = f"; beside the run: {', '.join(differences)}" if differences else ""
    if not misfits:
        counts = ", ".join(f"{number} of {quantity}" for quantity, number in num_compared.items())
        return Outcome(f"bit-equal: {counts}{beside}", True)
    limit = MAX_BAND.get(plan.config.get("precision", ""), MAX_BAND_16_BITS)
    if is_wrong_start or not explained:
        return Outcome(f"does not fit: {misfits[0]}{beside}", False)
    limits = {LOSS: limit, NORM: NORM_FACTOR * limit, RATE: MAX_RATE_DIFFERENCE, DATA: 0.0, STATE: float("inf")}
    outside = [misfit for misfit in misfits if not misfit.relative <= limits[misfit.quantity]]
    if outside:
        return Outcome(f"does not fit: {outside[0]}{beside}", False)
    found = {quantity: [one.relative for one in misfits if one.quantity == quantity] for quantity in (LOSS, NORM, RATE)}
    widths = ", ".join(f"{quantity} within {max(band):.1e}" for quantity, band in found.items() if band)
    return Outcome(f"within a band: {widths or 'only state/digest differs'}; {', '.join(explained)}", False)
