"""The summary that a preparation ends with: `summary.json`, and the table that is shown of it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from llmfoundry_lite.bounded import read_json
from llmfoundry_lite.data.spelling import describe_loss
from llmfoundry_lite.errors import DataError, printable
from llmfoundry_lite.report.tables import Table

FORMAT_VERSION = 1
SPLITS = ("train", "val")
SUMMARY_FILE = "summary.json"
MAX_SHOWN = 5
"""Things left out that the table at the end names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSummary:
    """One split. Tokens include the end-of-text token of each document."""

    documents: int
    samples: int
    """Samples of `max_seq_len` tokens."""
    tokens: int
    """Tokens in samples."""
    remainder_tokens: int
    """The last ones, too few to fill a sample: the only tokens of the documents that are not in the shards."""
    text_bytes: int
    """UTF-8 bytes of the documents, which became `tokens + remainder_tokens` tokens."""
    shards: int

    @property
    def tokens_per_byte(self) -> float:
        """Factor from a loss in nats per token to bits per byte: `loss / ln 2 * tokens_per_byte`."""
        return (self.tokens + self.remainder_tokens) / self.text_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSummary:
    """The tokenizer that made the tokens."""

    name: str
    """The value of `--tokenizer`."""
    fingerprint: str
    vocab_size: int
    """The largest id plus one; a trained tokenizer may have fewer than were asked for."""
    eos_token_id: int
    eos_token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The content of `summary.json`; `load_summary` reads it."""

    format_version: int
    request: dict[str, Any]
    """The `Request`, the state of its input, the tokenizer's fingerprint: the same again is no work."""
    max_seq_len: int
    token_dtype: str
    """`uint16` or `uint32`."""
    tokenizer: TokenizerSummary
    splits: dict[str, SplitSummary]
    """`train`, and `val` unless nothing could be held out."""
    skipped: dict[str, int]
    """Documents left out, by reason, as in `documents.SKIP_REASONS`."""
    ignored_files: int
    """Files in the folders given that are of no kind we read, or beside a saved data set and no part of it."""
    seconds: float
    """Seconds of the launch that finished the work; the two rates, too, leave out what earlier launches had done."""
    documents_per_second: float
    text_bytes_per_second: float
    skipped_examples: tuple[str, ...] = ()
    """A sentence for each of the first documents left out, empty ones aside."""
    unreadable: tuple[str, ...] = ()
    """A sentence for each file or folder left out because it could not be read."""
    repeated: tuple[str, ...] = ()
    """A sentence for each name of a file or folder that was read under another name."""
    lost_text: dict[str, Any] = field(default_factory=dict)
    """Characters at the beginning of every unit that do not come back from their tokens: their `share`, and the number
    of each kind in `data/spelling.py`. Empty in older summaries."""


def load_summary(folder: str | Path) -> Summary:
    """Read `summary.json` of a prepared folder. Raises DataError when it is missing or not one of ours."""
    path = Path(folder) / SUMMARY_FILE
    try:
        content = read_json(path, "a summary")
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
    """Print the short table a preparation ends with."""
    rows = []
    for name, split in summary.splits.items():
        counts = (split.documents, split.samples, split.tokens, split.remainder_tokens)
        rows.append([name, *(f"{count:,}" for count in counts), f"{split.text_bytes / 1e6:.2f} MB", f"{split.shards}"])
    columns = ["split", "documents", "samples", "tokens", "left over", "text", "shards"]
    table = Table(f"prepared in {printable(str(out))}", columns, rows)
    tokenizer = summary.tokenizer
    lines = [f"tokenizer {printable(tokenizer.name)}: {tokenizer.vocab_size:,} ids, {tokenizer.fingerprint}"]
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in summary.skipped.items() if count)
    if skipped:
        lines.append(f"documents skipped: {skipped}")
        lines += some_of(summary.skipped_examples, sum(summary.skipped.values()) - summary.skipped["empty"])
    if summary.ignored_files:
        lines.append(f"files ignored, of no kind we read or no part of a saved data set: {summary.ignored_files:,}")
    if summary.unreadable:
        lines.append(f"files and folders left out because they cannot be read: {len(summary.unreadable):,}")
        lines += some_of(summary.unreadable, len(summary.unreadable))
    if summary.lost_text and (sentence := describe_loss(summary.lost_text)):
        lines.append(f"text: {printable(sentence)}")
    if "val" not in summary.splits:
        lines.append("no validation split: none was asked for, or too little text to hold out a sample")
    lines.append(
        f"{summary.seconds:.1f} s, {summary.documents_per_second:,.0f} documents/s, "
        f"{summary.text_bytes_per_second / 1e6:.2f} MB/s"
    )
    console = console or Console()
    console.print(table.title, highlight=False, markup=False)
    table.print(console)
    console.print("\n".join(lines), highlight=False, markup=False)


def some_of(sentences: tuple[str, ...], count: int) -> list[str]:
    """Return indented lines for the first of them, and how many of `count` there are besides."""
    shown = [f"  {printable(sentence)}" for sentence in sentences[:MAX_SHOWN]]
    return shown + ([f"  and {count - len(shown):,} more"] if count > len(shown) else [])
