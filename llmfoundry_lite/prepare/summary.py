"""The summary at the end of a preparation: the file `summary.json`, and a table for the terminal."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from llmfoundry_lite.bounded import read_json
from llmfoundry_lite.data.spelling import describe_lost_text
from llmfoundry_lite.errors import DataError, printable
from llmfoundry_lite.tables import Table

FORMAT_VERSION = 1
"""Version of `summary.json` and of the shards. A preparation with another version is not taken for the same one."""
SPLITS = ("train", "val")
SUMMARY_FILE = "summary.json"
MAX_SHOWN = 5
"""Number of sentences about files or documents that are printed at most; the others are only counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSummary:
    """Counts of one split. Tokens include the end-of-text token of each document."""

    documents: int
    samples: int
    """Samples of `max_seq_len` tokens."""
    tokens: int
    """Number of tokens in all samples, without padding."""
    remainder_tokens: int
    """Number of tokens at the end that are too few for a sample. Only these are not in the shards. 0 with best fit."""
    text_bytes: int
    """UTF-8 bytes of the documents, which became `tokens + remainder_tokens` tokens."""
    shards: int
    cut_fraction: float | None = None
    """Share of the documents that are not whole in one sample. None in older summaries."""
    padding_fraction: float | None = None
    """Share of the samples that is padding. None in older summaries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSummary:
    """The tokenizer that made the tokens."""

    name: str
    """The value of `--tokenizer`."""
    fingerprint: str
    vocab_size: int
    """The largest id plus one. For a trained tokenizer, it may be smaller than requested."""
    eos_token_id: int
    eos_token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The content of `summary.json`; `load_summary` reads it."""

    format_version: int
    request: dict[str, Any]
    """The request, its input's state, and the tokenizer's fingerprint. A launch with an equal record does nothing."""
    max_seq_len: int
    token_dtype: str
    """`uint16` or `uint32`."""
    tokenizer: TokenizerSummary
    splits: dict[str, SplitSummary]
    """`train`, and `val` unless nothing could be held out."""
    skipped: dict[str, int]
    """Reason in `documents.SKIP_REASONS` -> number of skipped documents."""
    ignored_files: int
    """Number of files that are of an unsupported kind, or beside a saved data set without being part of it."""
    seconds: float
    """Duration of the launch that finished the work. The two rates count only the work of that launch."""
    documents_per_second: float
    text_bytes_per_second: float
    skipped_examples: tuple[str, ...] = ()
    """A sentence for each of the first skipped documents. Empty documents have none."""
    unreadable: tuple[str, ...] = ()
    """A sentence for each file or folder that was skipped because it could not be read."""
    repeated: tuple[str, ...] = ()
    """A sentence for each further name of a file or folder that was read under another name."""
    lost_text: dict[str, Any] = field(default_factory=dict)
    """Counts of characters that the tokenizer loses at the beginning of every unit, as `LostText.as_json` returns them.
    Empty in older summaries."""
    text_digest: str = ""
    """Digest of the texts of all documents, equal for two preparations that have read the same texts, in whatever order
    and from whatever files. Empty in older summaries."""


def load_summary(folder: str | Path) -> Summary:
    """Read `summary.json` of a prepared folder. Raises DataError if it is missing or not valid."""
    path = Path(folder) / SUMMARY_FILE
    try:
        content = read_json(path, "a summary")
        # JSON has objects for the inner dataclasses, and lists for tuples. Older summaries lack some of the tuples.
        content["tokenizer"] = TokenizerSummary(**content["tokenizer"])
        content["splits"] = {split: SplitSummary(**counts) for split, counts in content["splits"].items()}
        for name in ("skipped_examples", "unreadable", "repeated"):
            content[name] = tuple(content.get(name, ()))
        return Summary(**content)
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist: nothing was prepared in {folder}, or not to the end") from error
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is not a summary that this version of `data prepare` wrote ({error})") from error


def print_summary(summary: Summary, out: str | Path, console: Console | None = None) -> None:
    """Print a table of the splits, and lines about the tokenizer, skipped documents, files and speed."""
    console = console or Console()
    table = _table_of_splits(summary, title=f"prepared in {printable(str(out))}")
    console.print(table.title, highlight=False, markup=False)
    table.print(console)
    console.print("\n".join(_describe_summary(summary)), highlight=False, markup=False)


def _table_of_splits(summary: Summary, title: str) -> Table:
    """Build the table with the counts of each split."""
    columns = ["split", "documents", "samples", "tokens", "left over", "text", "shards"]
    rows = []
    for name, split in summary.splits.items():
        rows.append(
            [
                name,
                f"{split.documents:,}",
                f"{split.samples:,}",
                f"{split.tokens:,}",
                f"{split.remainder_tokens:,}",
                f"{split.text_bytes / 1e6:.2f} MB",
                f"{split.shards}",
            ]
        )
    return Table(title, columns, rows)


def _describe_summary(summary: Summary) -> list[str]:
    """Return the lines that are printed below the table of splits: tokenizer, documents and files left out, and speed.

    Names of files and texts may be untrusted, so control characters in them are escaped.
    """
    tokenizer = summary.tokenizer
    lines = [f"tokenizer {printable(tokenizer.name)}: {tokenizer.vocab_size:,} ids, {tokenizer.fingerprint}"]

    # How documents became samples.
    for name, split in summary.splits.items():
        if split.cut_fraction is not None and split.padding_fraction is not None:
            lines.append(
                f"{name}: {100 * split.cut_fraction:.1f} % of the documents are divided between samples, "
                f"{100 * split.padding_fraction:.2f} % of the tokens are padding"
            )

    # Documents and files that are not in the result.
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in summary.skipped.items() if count)
    if skipped:
        lines.append(f"documents skipped: {skipped}")
        num_not_empty = sum(summary.skipped.values()) - summary.skipped["empty"]  # empty ones have no sentence
        lines += first_sentences(summary.skipped_examples, num_not_empty)
    if summary.ignored_files:
        lines.append(f"files ignored, of no kind we read or no part of a saved data set: {summary.ignored_files:,}")
    if summary.unreadable:
        lines.append(f"files and folders left out because they cannot be read: {len(summary.unreadable):,}")
        lines += first_sentences(summary.unreadable, len(summary.unreadable))

    # Text that the tokenizer loses, and a missing split.
    if summary.lost_text:
        sentence = describe_lost_text(summary.lost_text)
        if sentence:
            lines.append(f"text: {printable(sentence)}")
    if "val" not in summary.splits:
        lines.append("no validation split: none was asked for, or too little text to hold out a sample")
    lines.append(
        f"{summary.seconds:.1f} s, {summary.documents_per_second:,.0f} documents/s, "
        f"{summary.text_bytes_per_second / 1e6:.2f} MB/s"
    )
    return lines


def first_sentences(sentences: tuple[str, ...], count: int) -> list[str]:
    """Return the first MAX_SHOWN sentences as indented lines, and a line with the number of others.

    `count` is the number of all things that the sentences are about, which may be more than there are sentences: with 2
    sentences and a count of 9, the third line is "  and 7 more".
    """
    lines = [f"  {printable(sentence)}" for sentence in sentences[:MAX_SHOWN]]
    num_more = count - len(lines)
    if num_more > 0:
        lines.append(f"  and {num_more:,} more")
    return lines
