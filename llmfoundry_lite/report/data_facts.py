"""Facts of the data set that a run was trained on: bytes per token, and the losses of simple models on it.

The data set may be written by anybody, or gone. A fact that it cannot tell is None, and a note says why if it cannot be
read.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmfoundry_lite.bounded import read_json
from llmfoundry_lite.report.reading import Run

MAX_BASELINE_TOKENS = 100_000_000
"""Largest training split on which the baselines are counted; they need all of it in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """Statistics of the data set that a run was trained on. A value is None where that set cannot tell it."""

    baselines: dict[str, float] | None = None
    """Validation loss of a bigram and of a unigram model, in nats per token."""
    training_bytes_per_token: float | None = None
    validation_bytes_per_token: float | None = None
    note: str | None = None
    """Why a statistic is missing, if the data set cannot be read."""


def measure_data(run: Run) -> DataFacts:
    """Measure the data set that a run's configuration names, if `data prepare` made it and it is on this disk.

    The configuration and the data set may be written by anybody, so a value of a wrong type or a damaged file becomes
    a note rather than an error.
    """
    try:
        return measure_local_data(run.config or {})
    except (OSError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        note = f"no baselines and no bits per byte: the data that config.yaml names cannot be read ({error!r})"
        return DataFacts(note=note)


def measure_local_data(config: dict[str, Any]) -> DataFacts:
    """Count bytes per token, and fit the baselines if both splits lie in one folder and the training split is small.

    config: the run's recorded configuration. Its `train_loader.dataset` and `eval_loader.dataset` name the two splits
    by `local` (a folder that `data prepare` made) and `split`.

    Raises an error of any of the kinds that `measure_data` catches if the configuration or summary.json is malformed.
    If only the shards cannot be read, the baselines are missing, and the note says so.
    """
    # Bytes per token come from the summary of the preparation, without reading any data.
    train = (config.get("train_loader") or {}).get("dataset")
    validation = (config.get("eval_loader") or {}).get("dataset")
    train_bytes_per_token = bytes_per_token_of(train)
    validation_bytes_per_token = bytes_per_token_of(validation)
    without_baselines = DataFacts(
        training_bytes_per_token=train_bytes_per_token, validation_bytes_per_token=validation_bytes_per_token
    )

    # Baselines are fitted to the training split, and only make sense for validation data with the same tokenizer. That
    # is certain if both splits were prepared together.
    if not train or not validation or train_bytes_per_token is None or validation_bytes_per_token is None:
        return without_baselines
    if train["local"] != validation["local"]:
        return without_baselines
    folder = Path(train["local"])
    if read_summary(folder)["splits"][train["split"]]["tokens"] > MAX_BASELINE_TOKENS:
        return without_baselines

    from llmfoundry_lite.data.baselines import measure_baselines

    vocab_size = config["model"]["vocab_size"]
    try:
        baselines = measure_baselines(folder / train["split"], folder / validation["split"], vocab_size)
    except (OSError, ValueError, LookupError) as error:  # its shards are gone, or damaged
        return replace(without_baselines, note=f"no baselines: {folder} cannot be read ({error})")
    return replace(without_baselines, baselines={"bigram": baselines.bigram, "unigram": baselines.unigram})


def bytes_per_token_of(dataset: dict[str, Any] | None) -> float | None:
    """Return the mean bytes of text per token of a split, from the summary.json that `data prepare` wrote.

    dataset: the configuration's block of the data set, with `local` and `split`.

    Bytes that the tokenizer cannot represent (`lost_bytes`) are not counted, because no token stands for them. Tokens
    that did not fill a sample (`remainder_tokens`) are counted, because `text_bytes` includes their text. A split of
    1,000 bytes of text with 240 tokens in samples, 10 left over, and 1 % lost has 0.99 * 1000 / 250 = 3.96.

    Returns None if there is no summary, or if it does not have the split.
    """
    if not dataset or not dataset.get("local"):
        return None
    summary = read_summary(Path(dataset["local"]))
    split_counts = summary["splits"].get(dataset.get("split") or "")
    lost_text = summary.get("lost_text")
    if not split_counts:
        return None

    # Lost text was counted on a part of the data, for both splits together, so only its fraction is used.
    kept_fraction = 1
    if lost_text:
        kept_fraction = 1 - lost_text["lost_bytes"] / max(lost_text["text_bytes"], 1)
    num_tokens = split_counts["tokens"] + split_counts["remainder_tokens"]
    return kept_fraction * split_counts["text_bytes"] / num_tokens


def read_summary(folder: Path) -> dict[str, Any]:
    """Read the summary.json that `data prepare` writes beside the splits. Without the file, return an empty summary."""
    file = folder / "summary.json"
    if not file.is_file():
        return {"splits": {}}
    return read_json(file, "a summary")
