"""The blocks of a training run's YAML for the tokenizer and the data loaders, with LLM Foundry's names of keys.

A loader (`LoaderConfig`) has a data set (`TextDatasetConfig`), which reads one folder of MDS shards or mixes several
(`StreamConfig`), perhaps with other mixtures in later parts of the run (`StageConfig`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from llmfoundry_lite.config.fields import (
    NON_NEGATIVE,
    NOT_GIVEN_TO_OWN,
    POSITIVE,
    REQUIRED,
    Check,
    Use,
    check_source_path_or_url,
    duration_setting,
    local_folder,
    not_empty,
    only_with_own,
    setting,
    validator,
)
from llmfoundry_lite.config.spans import Duration

HASHES = (
    "md5 sha1 sha224 sha256 sha384 sha512 sha3_224 sha3_256 sha3_384 sha3_512 blake2b blake2s "
    "xxh32 xxh64 xxh128 xxh3_64 xxh3_128"
)
"""Algorithms that streaming.base.hashing finds in hashlib and xxhash."""

OF_THE_MODEL = {
    *("eos_token_id", "override_eos_token_id_mismatch_error"),
    *("bos_token_id", "override_bos_token_id_mismatch_error"),
}
"""Keys of a data set by which the model divides documents. They have an effect beside a `python:` loader too."""
HELD_OUT_TEXT = "text.jsonl"
"""Text of the validation split that `data prepare` writes beside its shards."""
REMOTES = "s3 gs hf azure azure-dl oci sftp dbfs alipan"
"""Schemes of URLs that streaming.base.storage downloads from."""
COUNTS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
SIZES = {"kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40, "b": 1}
"""Units that streaming.base.util reads."""
_REMOTE = validator(
    f"a folder, or a URL of one of: {REMOTES}", lambda value: urlsplit(value).scheme in ("", "file", *REMOTES.split())
)


def _in_units(units: Mapping[str, int], example: str) -> Check:
    """Return the check of a setting that is a number above 0, or a text of a number and a unit, such as "1gb".

    `units` maps each unit to its size, and `example` is a valid value, for errors. The forms are those that
    mosaicml-streaming reads, in which "b" may follow a whole number.
    """

    def is_above_0(value: int | str) -> bool:
        if not isinstance(value, str):
            return value > 0
        match = re.fullmatch(rf"(\d+)b?|(\d+(?:\.\d+)?)({'|'.join(units)})", value.lower())
        if match is None:
            return False
        if match[1]:
            return int(match[1]) > 0
        return int(float(match[2]) * units[match[3]]) > 0

    return validator(f"a number above 0, such as {example}", is_above_0)


IS_WITHIN = validator(
    "a folder within local and remote, such as train",
    lambda value: not value.startswith("/") and ".." not in value.split("/") and "\0" not in value,
)


@dataclass(kw_only=True, slots=True, frozen=True)
class TokenizerConfig:
    """The tokenizer that the data were made with."""

    name: str = setting(
        REQUIRED,
        not_empty("a local folder, a name on the Hub, or python:package.module:Thing"),
        is_path_or_url=True,
    )
    kwargs: dict[str, Any] = setting(dict)
    """Arguments of a tokenizer that is code of the user's own; otherwise LLM Foundry's options, of which only
    model_max_length is used. It is checked against max_seq_len in any case."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StreamConfig:
    """One of several data sets that are mixed."""

    local: str | None = setting(None, local_folder("remote", is_read=True), is_path_or_url=True, hardware=True)
    remote: str | None = setting(None, check_source_path_or_url, _REMOTE, is_path_or_url=True, hardware=True)
    split: str | None = setting(None, IS_WITHIN)
    proportion: float | None = setting(None, POSITIVE)
    """Share of this stream in an epoch; given for all streams or for none."""
    repeat: float | None = setting(None, POSITIVE)
    """Times this stream is seen in an epoch."""
    choose: int | None = setting(None, POSITIVE)
    """Samples of this stream in an epoch."""
    download_retry: int | None = setting(None, NON_NEGATIVE, hardware=True)
    """Default of this key and the next three: the data set's value."""
    download_timeout: float | None = setting(None, POSITIVE, hardware=True)
    validate_hash: str | None = setting(None, choices=HASHES, change="freely")
    keep_zip: bool | None = setting(None, change="freely")


@dataclass(kw_only=True, slots=True, frozen=True)
class StageConfig:
    """A part of the run with a mixture of its own."""

    until: Duration | None = duration_setting(None, ("ba", "sp", "tok", "dur"), written=str | float)
    """End of the stage; the last one ends with the run."""
    streams: dict[str, StreamConfig] = setting(dict)
    """Default: the data set's own. Keys that a stream leaves out come from the last stream of that name before it. Its
    share does not."""


def _has_remote(dataset: "TextDatasetConfig", _: Any) -> bool:
    """Return whether the data set, or one of its streams in any stage, is downloaded from a remote."""
    sources: list[TextDatasetConfig | StreamConfig] = [dataset, *dataset.streams.values()]
    for stage in dataset.stages:
        sources += stage.streams.values()
    return any(source.remote is not None for source in sources)


DOWNLOADING = (Use(has_effect=_has_remote, reason="nothing is downloaded without a remote"),)
SHUFFLING = (Use(has_effect=lambda dataset, _: dataset.shuffle, reason="{path}.shuffle is false"),)
DIVIDING_DOCUMENTS = (
    Use(
        has_effect=lambda _, run: run.model.attn_config.attn_uses_sequence_id,
        reason="documents see each other without model.attn_config.attn_uses_sequence_id: true",
    ),
)


@dataclass(kw_only=True, slots=True, frozen=True)
class TextDatasetConfig:
    """A data set of MDS shards, or a mixture of several."""

    local: str | None = setting(None, local_folder("remote", is_read=True), is_path_or_url=True, hardware=True)
    """Folder of an MDS data set, or where a remote one is cached."""
    remote: str | None = setting(None, check_source_path_or_url, _REMOTE, is_path_or_url=True, hardware=True)
    split: str | None = setting(None, IS_WITHIN)
    streams: dict[str, StreamConfig] = setting(dict)
    """Several data sets, mixed; keys are names of your choice."""
    stages: list[StageConfig] = setting(list, change="logged")
    """Mixtures, one after another. Stages that have been trained may not change; checkpoints record them."""
    shuffle: bool = False
    shuffle_seed: int = setting(9176, NON_NEGATIVE)
    shuffle_block_size: int | None = setting(None, POSITIVE, uses=SHUFFLING)
    """Samples shuffled together, over the whole world; default 4,000,000."""
    max_seq_len: int | None = setting(None, POSITIVE)
    """Tokens; default: the run's."""
    epoch_size: int | str | None = setting(None, _in_units(COUNTS, "100k"))
    predownload: int | None = setting(None, POSITIVE, hardware=True)
    cache_limit: int | str | None = setting(None, _in_units(SIZES, "100gb"), hardware=True, uses=DOWNLOADING)
    """Bytes, or text such as 100gb. Only copies of a remote are removed."""
    download_retry: int = setting(2, NON_NEGATIVE, hardware=True, uses=DOWNLOADING)
    download_timeout: float = setting(60, POSITIVE, hardware=True, uses=DOWNLOADING)
    """Seconds."""
    validate_hash: str | None = setting(None, choices=HASHES, change="freely")
    """Algorithm that checks shards; default: the fastest of those in index.json."""
    allow_unhashed_shards: bool = setting(False, change="freely")
    """Load shards without a hash where others have one. Damage in them goes unnoticed."""
    allow_truncation: bool = setting(False, change="freely")
    """Read only the first max_seq_len tokens of longer samples, instead of refusing them."""
    keep_zip: bool = setting(False, change="freely", uses=DOWNLOADING)
    token_encoding_type: str = setting("int64", choices="int8 int16 int32 int64 uint8 uint16 uint32 uint64")
    """Number type of a column `tokens` that holds plain bytes. Columns of arrays name theirs."""
    eos_token_id: int | None = setting(None, NON_NEGATIVE, uses=DIVIDING_DOCUMENTS)
    """Token that ends a document, for attn_uses_sequence_id. Default: the tokenizer's end of text."""
    bos_token_id: int | None = setting(None, NON_NEGATIVE, uses=DIVIDING_DOCUMENTS)
    """Token that begins a document, instead of one that ends it."""
    override_eos_token_id_mismatch_error: bool = setting(
        False,
        change="freely",
        uses=(
            Use(
                has_effect=lambda dataset, _: dataset.eos_token_id is not None,
                reason="{path}.eos_token_id is not given",
            ),
        ),
    )
    """Permit an eos_token_id that is not the tokenizer's."""
    override_bos_token_id_mismatch_error: bool = setting(
        False,
        change="freely",
        uses=(
            Use(
                has_effect=lambda dataset, _: dataset.bos_token_id is not None,
                reason="{path}.bos_token_id is not given",
            ),
        ),
    )


FROM_YAML = Use(
    has_effect=lambda loader, _: loader.name == "text",
    reason=f"{{block.name}} is not given it; {NOT_GIVEN_TO_OWN}",
)
BY_WORKERS = Use(
    has_effect=lambda loader, _: loader.num_workers > 0 or loader.name != "text",
    reason="{path}.num_workers is 0",
)
OWN_LOADER = only_with_own("loader")


@dataclass(kw_only=True, slots=True, frozen=True)
class LoaderConfig:
    """A loader of batches: of text, or of a user's own."""

    name: str = setting(
        "text", choices="text python:", instead="expected text or python:; `llmfoundry-lite data prepare` prepares text"
    )
    """text, or python:package.module:function, which is called with device_batch_size, num_workers, drop_last, kwargs
    and the block's keys that are none of ours. It must return a DataLoader of {"input_ids": int64 [device_batch_size,
    tokens]}."""
    dataset: TextDatasetConfig = setting(TextDatasetConfig)
    drop_last: bool = True
    """Evaluation never drops a sample, whatever this says."""
    num_workers: int = setting(0, NON_NEGATIVE, hardware=True)
    """Processes per rank that read and decode."""
    pin_memory: bool = setting(True, hardware=True, uses=(FROM_YAML,))
    prefetch_factor: int | None = setting(None, POSITIVE, hardware=True, uses=(FROM_YAML, BY_WORKERS))
    persistent_workers: bool = setting(True, hardware=True, uses=(FROM_YAML, BY_WORKERS))
    timeout: float = setting(0, NON_NEGATIVE, hardware=True, uses=(FROM_YAML, BY_WORKERS))
    """Seconds to wait for a worker; 0 waits for ever."""
    kwargs: dict[str, Any] = setting(dict, change="logged", uses=(OWN_LOADER,))
    """Arguments of a `python:` loader."""
