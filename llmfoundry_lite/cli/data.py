"""The commands `llmfoundry-lite data`: `prepare` turns text into shards, `show` shows a batch, others manage shards.

The docstrings of the functions, and the help of their parameters, are the help of the commands.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from llmfoundry_lite import companions
from llmfoundry_lite.errors import EXIT_INTERRUPTED, printable
from llmfoundry_lite.files import check_is_path, check_url_spelling
from llmfoundry_lite.own_code import trust_code
from llmfoundry_lite.ranks.output import ignore_output_errors

TEXT_CHARACTERS = 48
"""Number of characters of a row's text that the table of rows shows."""

MaxLostText = Annotated[
    float, typer.Option(min=0, max=1, help="Largest share of the text that the tokenizer may lose.")
]
ScratchFolder = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER", help="Local folder for files on their way into a bucket [default: a temporary folder]."
    ),
]
ScratchLimit = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Maximum size of these files, such as 2gb [default: 4gb, or what is needed]."),
]

ReaderOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SUFFIX=python:…", help="A reader of your own for files of a suffix, such as .xml=python:mine:read."
    ),
]

data = typer.Typer(help="Prepare training data and show it.", no_args_is_help=True, rich_markup_mode=None)


def choose_readers(given: list[str] | None, sources: Sequence[str]) -> tuple[str, ...]:
    """Return the values of `--reader`, and the readers of installed companions for other suffixes of the sources.

    The code that they name may be imported from now on, because the user has named or installed it. A line is printed
    for each reader of a companion.
    """
    from llmfoundry_lite.prepare.own_readers import find_readers_for

    given = given or []
    of_companions = find_readers_for(sources, given)
    for reader in of_companions:
        suffix, _, import_path = reader.partition("=")
        typer.echo(f"{suffix} files are read by {import_path}, of a companion; --reader names another")
    readers = (*given, *of_companions)
    trust_code(reader.partition("=")[2] for reader in readers)
    return readers


@contextmanager
def resumable() -> Iterator[None]:
    """Context manager: if the user interrupts the block, say how to resume, and leave with the code of Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted: run the same command again to resume", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def show_status(out: str | None) -> None:
    """Print what the parts of a preparation have done, and leave. Called for the value of `--status`."""
    if out is None:
        return
    ignore_output_errors()
    run_status = companions.load("llmfoundry_engines.commands:run_status", "data prepare --status")
    run_status(out)
    raise typer.Exit


# A parameter for each option: typer makes the command from them.
@data.command("prepare")
def data_prepare(
    out: Annotated[str, typer.Option(help="Folder or s3:// URL for train, val, tokenizer and summary.json.")],
    tokenizer: Annotated[
        str,
        typer.Option(
            help="A Hub name or a folder, train:32768 to train one with 32,768 tokens, or your own: python:mine:build."
        ),
    ],
    max_seq_len: Annotated[int, typer.Option(help="Tokens per sample, such as 2048.")],
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE",
            help="Files, folders or globs of txt, md, jsonl, csv, tsv or parquet; or URLs of them, such as "
            "s3://bucket/folder; or hf:NAME; or python-stdlib.",
        ),
    ] = None,
    source: Annotated[
        list[str] | None, typer.Option(metavar="SOURCE", help="Another way to give SOURCE; repeat for others.")
    ] = None,
    text_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD",
            help="Field or column of the text, such as meta.text; repeat to join several [default: text].",
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Split to read from a Hub data set or from a saved data set.")] = "train",
    encoding: Annotated[
        str | None, typer.Option(help="Encoding of text, JSON lines and CSV, such as latin-1 [default: utf-8].")
    ] = None,
    val_fraction: Annotated[
        float | None,
        typer.Option(help="Share of documents to hold out for validation [default: 0.005; 0.05 for python-stdlib]."),
    ] = None,
    num_workers: Annotated[int | None, typer.Option(min=1, help="Number of processes [default: one per core].")] = None,
    reader: ReaderOption = None,
    on_error: Annotated[
        Literal["stop", "skip"],
        typer.Option(help="What to do with a document that cannot be read: stop, or skip and count it."),
    ] = "stop",
    max_lost_text: MaxLostText = 0.01,
    size_limit: Annotated[int, typer.Option(help="Maximum number of bytes in a shard.")] = 64 * 1024 * 1024,
    compression: Annotated[
        str | None, typer.Option(help="Compress shards: zstd, zstd:9, gz, … [default: none].")
    ] = None,
    pack: Annotated[
        Literal["concat", "best-fit"],
        typer.Option(help="Concatenate documents and cut them into samples, or put whole documents into samples."),
    ] = "concat",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier preparation in --out.")] = False,
    part: Annotated[
        str | None,
        typer.Option(metavar="K/N", help="Tokenize part K of N into an --out that all parts share; see data join."),
    ] = None,
    engine: Annotated[
        Literal["ray"] | None,
        typer.Option(help="Tokenize parts as tasks of a Ray cluster, and join them; see docs/large-data.md."),
    ] = None,
    scratch: ScratchFolder = None,
    scratch_limit: ScratchLimit = None,
    status: Annotated[
        str | None,
        typer.Option(
            metavar="OUT", callback=show_status, is_eager=True, help="Show how far the parts in OUT are, and leave."
        ),
    ] = None,
) -> None:
    """Turn text into tokenized MDS shards to train on. If it is interrupted, the same command resumes it."""
    ignore_output_errors()
    check_url_spelling(out)  # as text: a path would join the slashes of gs//bucket
    from llmfoundry_lite.prepare.prepare import prepare
    from llmfoundry_lite.prepare.request import PrepareRequest, WorkOptions
    from llmfoundry_lite.prepare.summary import print_summary

    text_keys: str | tuple[str, ...] = "text"
    if text_key:
        text_keys = text_key[0] if len(text_key) == 1 else tuple(text_key)
    all_sources = (*(source or ()), *(sources or ()))
    trust_code([tokenizer])  # code that it may name is the user's
    request = PrepareRequest(
        sources=all_sources,
        tokenizer=tokenizer,
        max_seq_len=max_seq_len,
        text_key=text_keys,
        split=split,
        encoding=encoding,
        readers=choose_readers(reader, all_sources),
        on_error=on_error,
        val_fraction=val_fraction,
        size_limit_bytes=size_limit,
        compression=compression,
        pack=pack,
    )
    work = WorkOptions(
        num_workers=num_workers,
        max_lost_text=max_lost_text,
        overwrite=overwrite,
        notify=typer.echo,
        scratch_folder=scratch,
        scratch_limit=scratch_limit,
    )
    is_bucket = "://" in out
    with resumable():
        if engine is not None:
            run_engine = companions.load("llmfoundry_engines.commands:run_engine", "data prepare --engine")
            run_engine(request, out, engine, part, work)
            return
        if part is not None:
            run_part = companions.load("llmfoundry_engines.commands:run_part", "data prepare --part")
            run_part(request, out, part, work)
            return
        if is_bucket or scratch is not None or scratch_limit is not None:
            run_bucket = companions.load("llmfoundry_engines.commands:run_bucket", f"data prepare --out {out}")
            run_bucket(request, out, work)
            return
        summary = prepare(
            request,
            out,
            num_workers=num_workers,
            max_lost_text=max_lost_text,
            overwrite=overwrite,
            show_progress=True,
            notify=typer.echo,
        )
    print_summary(summary, Path(out))


@data.command("join")
def data_join(
    out: Annotated[str, typer.Argument(metavar="OUT", help="The --out of the parts, a folder or a URL.")],
    part: Annotated[
        str | None,
        typer.Option(metavar="K/N", help="Only write share K of N of the shards; a later join without it publishes."),
    ] = None,
    max_lost_text: MaxLostText = 0.01,
    scratch: ScratchFolder = None,
    scratch_limit: ScratchLimit = None,
) -> None:
    """Make shards of all tokenized parts, and publish them.

    The parts are those of data prepare --part. The result is the one of data prepare on a single machine. If it is
    interrupted, the same command resumes it.
    """
    ignore_output_errors()
    check_url_spelling(out)
    run_join = companions.load("llmfoundry_engines.commands:run_join", "data join")
    with resumable():
        run_join(
            out,
            part,
            max_lost_text=max_lost_text,
            notify=typer.echo,
            scratch_folder=scratch,
            scratch_limit=scratch_limit,
        )


@data.command("append")
def data_append(
    out: Annotated[str, typer.Argument(metavar="OUT", help="A prepared data set: the --out of data prepare.")],
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE", help="What to add; the same kinds as for data prepare.")
    ],
    name: Annotated[
        str | None, typer.Option(help="Name of the new stream [default: that of the first source].")
    ] = None,
    text_key: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD", help="Field or column of the text; repeat to join several [default: as in OUT]."),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split to read of a data set [default: as in OUT].")] = None,
    encoding: Annotated[str | None, typer.Option(help="Encoding of the text [default: as in OUT].")] = None,
    reader: ReaderOption = None,
    on_error: Annotated[
        Literal["stop", "skip"] | None, typer.Option(help="What to do with a bad document [default: as in OUT].")
    ] = None,
    val_fraction: Annotated[
        float | None, typer.Option(help="Share of documents to hold out for validation [default: as in OUT].")
    ] = None,
    num_workers: Annotated[int | None, typer.Option(min=1, help="Number of processes [default: one per core].")] = None,
    max_lost_text: MaxLostText = 0.01,
) -> None:
    """Add sources to a prepared data set as a new stream.

    The stream is prepared into OUT/streams/NAME with the tokenizer, length of samples and shards of OUT. Nothing else
    in OUT changes, so what runs have recorded of it stays true. If it is interrupted, the same command resumes it. At
    the end, it prints the YAML that trains on all streams.
    """
    ignore_output_errors()
    run_append = companions.load("llmfoundry_engines.commands:run_append", "data append")
    text_keys: str | tuple[str, ...] | None = None
    if text_key:
        text_keys = text_key[0] if len(text_key) == 1 else tuple(text_key)
    options = {
        "text_key": text_keys,
        "split": split,
        "encoding": encoding,
        "readers": choose_readers(reader, sources),
        "on_error": on_error,
        "val_fraction": val_fraction,
    }
    with resumable():
        run_append(out, sources, name, options, num_workers=num_workers, max_lost_text=max_lost_text, notify=typer.echo)


@data.command("ls")
def data_list(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder or URL, of one data set or of many.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, with whole digests.")] = False,
) -> None:
    """List the data sets in a folder or bucket.

    Shows samples, tokens, columns, shards, tokenizer and digest of each split, and whether all of its shards are there
    by their sizes. Unfinished preparations and shards without an index.json are listed, too.
    """
    ignore_output_errors()
    run_list = companions.load("llmfoundry_engines.commands:run_list", "data ls")
    run_list(folder, prints_json=as_json)


@data.command("index")
def data_index(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of MDS shards, or of such folders.")],
) -> None:
    """Write the index.json that folders of shards lack.

    A writer that was killed leaves shards without it. Number of samples, columns, sizes and hashes come from the
    shards. An index.json that exists is left as it is.
    """
    ignore_output_errors()
    check_is_path(folder)
    run_index = companions.load("llmfoundry_engines.commands:run_index", "data index")
    run_index(folder, notify=typer.echo)


@data.command("show")
def data_show(
    where: Annotated[str, typer.Argument(metavar="RUN", help="A run folder or a folder of checkpoints.")],
    batch: Annotated[int, typer.Option(min=1, help="Number of the batch in the log; the first one is 1.")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="key=value", help="Where the data is now, if it has moved: train_loader.dataset.local=…"
        ),
    ] = None,
    rows: Annotated[bool, typer.Option("--rows", help="Show the whole text of each row.")] = False,
    loss: Annotated[
        bool, typer.Option("--loss", help="Show the loss of each row, computed in fp32 by the newest checkpoint.")
    ] = False,
    checkpoint: Annotated[
        str | None, typer.Option(help="Compute the losses with this checkpoint, not the newest; implies --loss.")
    ] = None,
) -> None:
    """Show the rows of a batch: their place, text and loss.

    Reads the rows again in the order of the run, and checks that their digest is the one in the log. Nothing is written
    into folders that the run recorded, and nothing is downloaded unless you name the remote:
    train_loader.dataset.remote=…
    """
    from llmfoundry_lite.report.batch import compute_losses, read_batch
    from llmfoundry_lite.tables import Table, console

    shown = read_batch(where, batch, changes or ())
    comparison = "as in the log" if shown.logged_digest else "the log has none of this batch"
    print(printable(f"batch {batch:,} of {where}: epoch {shown.epoch}, {len(shown.rows)} rows"))
    print(f"data/digest {shown.digest}, {comparison}")

    losses = None
    if loss or checkpoint:
        import torch

        from llmfoundry_lite.devices import device_type

        losses = compute_losses(shown, checkpoint, torch.device(device_type()))
        print(printable(f"loss {losses.of_batch:.4f} in fp32, by {losses.checkpoint}"))
    if shown.tokenizer is None:
        print("its tokenizer is not on this machine: token ids are shown, tokenizer.name=… names another place")

    # Collect the facts about each row of the batch, as text, and its text.
    columns = ["row", "stream", "shard", "sample", "documents", "tokens"]
    if losses is not None:
        columns.append("loss")
    facts_of_rows = []
    for number, row in enumerate(shown.rows):
        num_documents = shown.num_documents(row)
        documents = "" if num_documents is None else str(num_documents)
        facts = [str(number), row.stream, row.shard, str(row.sample), documents, str(len(row.tokens_t))]
        if losses is not None:
            facts.append(f"{losses.of_rows[number]:.4f}")
        facts_of_rows.append(facts)
    texts = [shown.text(row) for row in shown.rows]

    # With --rows, print each row's facts and its whole text.
    if rows:
        for facts, text in zip(facts_of_rows, texts, strict=True):
            named_facts = ", ".join(f"{name} {fact}" for name, fact in zip(columns, facts, strict=True) if fact)
            print(printable(f"\n{named_facts}\n{text}", keep="\n\t"))
        return

    # Otherwise, print a table with the beginning of each text.
    table_rows = []
    for facts, text in zip(facts_of_rows, texts, strict=True):
        beginning = " ".join(text.split())[:TEXT_CHARACTERS]
        table_rows.append([*facts, beginning])
    numeric_columns = [0, *range(3, len(columns))]
    Table("", [*columns, "begins"], table_rows, numeric_columns).print(console())


@data.command("overlap")
def data_overlap(
    data_folder: Annotated[
        Path, typer.Argument(metavar="DATA", help="Prepared training data: the folder that data prepare wrote.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for overlap.json, and a file of marked items for each task.")],
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TASK",
            help="Task to check: a name in evals/ or a YAML file; repeat for others [default: all whose data is here].",
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of the data to search.")] = "train",
    num_words: Annotated[int, typer.Option("--ngram", min=8, help="Number of words in a row that make a match.")] = 13,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer of the data [default: the one in DATA/tokenizer].")
    ] = None,
) -> None:
    """Find evaluation items in the training data (contamination).

    An item is marked if 13 words in a row of its question and right answer occur in the data. Capitals and punctuation
    make no difference. `compare --overlap OUT` then shows clean and marked items apart.
    """
    ignore_output_errors()
    run_overlap = companions.load("llmfoundry_studies.commands:run_overlap", "data overlap")
    run_overlap(data_folder, out, task or (), split=split, num_words=num_words, tokenizer_name=tokenizer)
