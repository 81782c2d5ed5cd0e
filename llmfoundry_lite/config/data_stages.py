"""Derive from a data set's block which streams each stage of training reads, and with which batch the stage begins.

A data set without `stages` has one stage, with the streams of the data set. `data/stages.py` makes the order of samples
from stages and first batches. Nothing here imports torch.
"""

import math
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path

from llmfoundry_lite.config.batch_schedule import PerBatch
from llmfoundry_lite.config.data_schema import StreamConfig, TextDatasetConfig
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.errors import ConfigError

SHARES = ("proportion", "repeat", "choose")
"""Keys of a stream that say how much of it an epoch has."""

Streams = dict[str, StreamConfig]
"""Name -> stream. A data set without named streams is a single one, without a name."""


def own_streams(dataset: TextDatasetConfig) -> Streams:
    """Return name -> stream of a data set, apart from those of its stages.

    A data set without named streams is one stream without a name.
    """
    return dataset.streams or {"": StreamConfig(local=dataset.local, remote=dataset.remote)}


def streams_of_stages(dataset: TextDatasetConfig) -> list[Streams]:
    """Return name -> stream for each stage of a data set. A data set without stages has one stage.

    A stream of a stage need not repeat its folders. Keys that it leaves out come from the stream of the same name in
    the latest stage before it that has one, or in the data set itself. The keys in SHARES are not taken over, because
    each stage says how much of a stream it reads:

        streams: {code: {local: /data/code}}
        stages:
        - {until: 0.8dur, streams: {code: {proportion: 0.1}, web: {local: /data/web, proportion: 0.9}}}
        - {streams: {code: {proportion: 1}}}           # also reads /data/code
    """
    if not dataset.stages:
        return [own_streams(dataset)]

    latest_by_name = own_streams(dataset)
    streams_by_stage = []
    for stage in dataset.stages:
        streams = {}
        for name, stream in stage.streams.items():
            streams[name] = _fill_missing_keys(stream, latest_by_name.get(name))
        latest_by_name = {**latest_by_name, **streams}
        streams_by_stage.append(streams or own_streams(dataset))
    return streams_by_stage


def _fill_missing_keys(stream: StreamConfig, earlier: StreamConfig | None) -> StreamConfig:
    """Return a stream with the keys that it leaves out taken from an earlier stream, if there is one.

    The keys in SHARES, which say how much of a stream is read, are not taken.
    """
    if earlier is None:
        return stream
    missing_values = {}
    for field in fields(stream):
        if getattr(stream, field.name) is None and field.name not in SHARES:
            missing_values[field.name] = getattr(earlier, field.name)
    return replace(stream, **missing_values)


def distinct_streams(dataset: TextDatasetConfig) -> dict[str, StreamConfig]:
    """Return key -> stream, one for each folder that any stage reads. It is the first stream that reads the folder.

    A key is relative to the data set's block: `.streams.web` or `.stages[0].streams.code`. It is empty for a data set
    without named streams.
    """
    first_by_folder: dict[Path, tuple[str, StreamConfig]] = {}
    for stage_index, streams in enumerate(streams_of_stages(dataset)):
        has_own_streams = bool(dataset.stages) and bool(dataset.stages[stage_index].streams)
        block = f".stages[{stage_index}].streams" if has_own_streams else ".streams"
        for name, stream in streams.items():
            key = f"{block}.{name}" if name else ""
            root = stream.local or stream.remote or ""
            split = stream.split or dataset.split or ""
            first_by_folder.setdefault(Path(root, split), (key, stream))
    return dict(first_by_folder.values())


def first_batches(
    dataset: TextDatasetConfig, path: str, max_duration: Duration | None, batch_sizes: PerBatch, max_seq_len: int
) -> list[int]:
    """Return, for each stage of a data set, the number of batches that come before it. The first is 0.

    A stage ends with the batch in which its `until` is reached, and the next stage begins with the batch after that.
    `until` counts from the start of the run, and may be a fraction of it. The last stage lasts to the end of the run.
    With `max_duration: 1000ba` and stages until 0.8dur, until 900ba, and to the end, the result is [0, 800, 900].

    path: the data set's block in the YAML, for errors.
    max_duration: the length of the run; None if the data set is opened without a run. A fraction has no meaning then.
    batch_sizes: samples of each batch.

    Raises ConfigError if the spans do not increase, or do not end before the run does.
    """
    if dataset.stages and max_duration is not None and max_duration.unit == "ep":
        raise ConfigError(
            f"{path}.stages: max_duration is {max_duration}, and a stage may end within an epoch; write it in ba"
        )

    samples_per_unit = {"sp": 1, "tok": Fraction(1, dataset.max_seq_len or max_seq_len)}

    def batches_in(duration: Duration) -> int:
        """Return the number of batches that a duration lasts, rounded up."""
        amount = Fraction(str(duration.value))
        if duration.unit == "ba":
            return math.ceil(amount)
        return batch_sizes.count_batches(math.ceil(amount * samples_per_unit[duration.unit]))

    last_batch = batches_in(max_duration) if dataset.stages and max_duration is not None else None
    batches_before = [0]
    for stage_index, stage in enumerate(dataset.stages):
        key = f"{path}.stages[{stage_index}].until"
        is_last = stage_index == len(dataset.stages) - 1
        if stage.until is None:
            if is_last:
                continue
            raise ConfigError(f"{key}: missing; expected where this stage ends and the next begins, such as 0.8dur")

        end_batch = batches_in(_resolve_fraction(stage.until, max_duration, key))
        until = stage.until.written
        if is_last:
            # An `until` at or after the end of the run has no effect, and is accepted.
            if last_batch is None or end_batch < last_batch:
                raise ConfigError(f"{key}: {until} given for the last stage, which lasts to the end; remove it")
            continue
        if end_batch <= batches_before[-1]:
            raise ConfigError(f"{key}: {until} is batch {end_batch}, and the stage begins there or later; give more")
        if max_duration is not None and last_batch is not None and end_batch >= last_batch:
            raise ConfigError(f"{key}: {until} is not before the end of the run, {max_duration.written}; give less")
        batches_before.append(end_batch)
    return batches_before


def _resolve_fraction(duration: Duration, run: Duration | None, key: str) -> Duration:
    """Return a fraction of the run in the unit of `run`, its max_duration: 0.8dur of 1000ba is 800ba.

    Other durations are returned unchanged. Raises ConfigError, which names the key, for a fraction without a run.
    """
    if duration.unit != "dur":
        return duration
    if run is None:
        raise ConfigError(f"{key}: {duration} given, and there is no run to take a part of; write it in ba")
    exact_value = Fraction(str(duration.value)) * int(run.value)
    return Duration(float(exact_value), run.unit)
