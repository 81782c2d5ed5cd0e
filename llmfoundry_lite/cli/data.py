"""`llmfoundry-lite data`: text and Hub data sets -> shards that training reads; the rows of a batch."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from llmfoundry_lite.errors import EXIT_INTERRUPTED, printable
from llmfoundry_lite.files import check_is_path
from llmfoundry_lite.ranks.output import ignore_output_errors

TEXT_CHARACTERS = 48
"""How much of a row's text stands in the table of rows."""

data = typer.Typer(help="Prepare training data, and show it.", no_args_is_help=True, rich_markup_mode=None)


# A parameter for each option: typer makes the command from them.
@data.command("prepare")
def data_prepare(
    out: Annotated[str, typer.Option(help="Write train, val, tokenizer and summary.json into this folder.")],
    tokenizer: Annotated[
        str, typer.Option(help="Take it from a Hub name or a folder, or train one of so many tokens: train:32768.")
    ],
    max_seq_len: Annotated[int, typer.Option(help="Cut samples of so many tokens, such as 2048.")],
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SOURCES]...",
            help="Files, folders and globs of txt, md, jsonl, csv, tsv or parquet; hf:NAME; python-stdlib.",
        ),
    ] = None,
    source: Annotated[list[str] | None, typer.Option(help="Read a source; repeat for others.")] = None,
    text_key: Annotated[
        list[str] | None,
        typer.Option(help="Take text from this field or column, such as meta.text; repeat to join several [text]."),
    ] = None,
    split: Annotated[str, typer.Option(help="Read this split of a Hub data set, or of a saved one.")] = "train",
    encoding: Annotated[str | None, typer.Option(help="Decode text, JSON lines and CSV so: latin-1, … [utf-8]")] = None,
    val_fraction: Annotated[
        float | None, typer.Option(help="Hold out this share of documents for validation [0.005; python-stdlib: 0.05].")
    ] = None,
    num_workers: Annotated[int | None, typer.Option(min=1, help="Start so many processes [one per core].")] = None,
    on_error: Annotated[
        Literal["stop", "skip"], typer.Option(help="Stop at a document that cannot be read, or skip and count it.")
    ] = "stop",
    max_lost_text: Annotated[
        float, typer.Option(min=0, max=1, help="Let the tokenizer lose this share of the text at most.")
    ] = 0.01,
    size_limit: Annotated[int, typer.Option(help="Write at most so many bytes into a shard.")] = 64 * 1024 * 1024,
    compression: Annotated[str | None, typer.Option(help="Compress shards: zstd, zstd:9, gz, … [none]")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Discard an earlier preparation in --out.")] = False,
) -> None:
    """Turn text into tokenised MDS shards, from which a run trains. Killed and started again, it carries on."""
    ignore_output_errors()
    check_is_path(out)  # as text: a path would join the slashes of gs//bucket
    from llmfoundry_lite.prepare.prepare import prepare
    from llmfoundry_lite.prepare.request import PrepareRequest
    from llmfoundry_lite.prepare.summary import print_summary

    request = PrepareRequest(
        sources=(*(source or ()), *(sources or ())),
        tokenizer=tokenizer,
        max_seq_len=max_seq_len,
        text_key=tuple(text_key) if text_key and len(text_key) > 1 else (text_key or ["text"])[0],
        split=split,
        encoding=encoding,
        on_error=on_error,
        val_fraction=val_fraction,
        size_limit_bytes=size_limit,
        compression=compression,
    )
    try:
        summary = prepare(
            request,
            out,
            num_workers=num_workers,
            max_lost_text=max_lost_text,
            overwrite=overwrite,
            show_progress=True,
            notify=typer.echo,
        )
    except KeyboardInterrupt:
        print("interrupted: the same command carries on where this one stopped", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    print_summary(summary, Path(out))


@data.command("show")
def data_show(
    where: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a folder of checkpoints.")],
    batch: Annotated[int, typer.Option(min=1, help="Show the batch of this number in the log; the first is 1.")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value ...]", help="Where the data is now: train_loader.dataset.local=…"),
    ] = None,
    rows: Annotated[bool, typer.Option("--rows", help="Show the whole text of each row.")] = False,
    loss: Annotated[
        bool, typer.Option("--loss", help="Show the loss of each row, in fp32, by the newest checkpoint.")
    ] = False,
    checkpoint: Annotated[str | None, typer.Option(help="Compute --loss by another checkpoint.")] = None,
) -> None:
    """Show the rows of a batch: their place, text and loss.

    They are read again, in the order that the run had. Their digest must be the one in the log. Folders that the run
    recorded are only read. Name a remote to download from it: train_loader.dataset.remote=…
    """
    from llmfoundry_lite.report.batch import compute_losses, read_batch
    from llmfoundry_lite.tables import Table, console

    found = read_batch(where, batch, changes or ())
    by = "as in the log" if found.logged_digest else "the log has none of this batch"
    print(printable(f"batch {batch:,} of {where}: epoch {found.epoch}, {len(found.rows)} rows"))
    print(f"data/digest {found.digest}, {by}")
    losses = None
    if loss or checkpoint:
        import torch

        from llmfoundry_lite.devices import device_type

        losses = compute_losses(found, checkpoint, torch.device(device_type()))
        print(printable(f"loss {losses.of_batch:.4f} in fp32, by {losses.checkpoint}"))
    if found.tokenizer is None:
        print("its tokenizer is not on this machine: token ids are shown, tokenizer.name=… names another place")
    table = []
    for number, row in enumerate(found.rows):
        documents = found.num_documents(row)
        known = "" if documents is None else str(documents)
        facts = [str(number), row.stream, row.shard, str(row.sample), known, str(len(row.tokens_t))]
        facts += [] if losses is None else [f"{losses.of_rows[number]:.4f}"]
        table.append([*facts, found.text(row)])
    columns = ["row", "stream", "shard", "sample", "documents", "tokens", *(["loss"] if losses is not None else [])]
    if not rows:
        short = [[*facts, " ".join(text.split())[:TEXT_CHARACTERS]] for *facts, text in table]
        right = [0, *range(3, len(columns))]
        Table("", [*columns, "begins"], short, right).print(console())
        return
    for *facts, text in table:
        named = ", ".join(f"{name} {fact}" for name, fact in zip(columns, facts, strict=True) if fact)
        print(printable(f"\n{named}\n{text}", keep="\n\t"))
