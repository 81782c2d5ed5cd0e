"""`llmfoundry-lite checkpoint`: look at checkpoints, verify, compare, export, import and remove them.

`ls`, `inspect`, `verify` and `prune` import no torch and answer on a login node.
"""

import contextlib
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from llmfoundry_lite.checkpoint.manifest import DCP_STATE
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.paths import check_outside_checkpoints, folder_of_checkpoints
from llmfoundry_lite.checkpoint.store import (
    READS_AT_ONCE,
    Candidate,
    Checkpoint,
    CheckpointStore,
    condition_of,
    is_checkpoint,
    open_checkpoint,
)
from llmfoundry_lite.errors import CheckpointError, printable
from llmfoundry_lite.ranks.output import ignore_output_errors

checkpoint = typer.Typer(
    help="List, verify, compare, convert and prune portable checkpoints.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Where = Annotated[
    str, typer.Argument(metavar="PATH", help="A checkpoint (…/ba200), a folder of checkpoints, or a run folder.")
]
First = Annotated[str, typer.Argument(metavar="A", help="A checkpoint, a folder of checkpoints, or a run folder.")]
Second = Annotated[str, typer.Argument(metavar="B", help="What to compare it with.")]
PROGRESS_BYTES = 1 << 28
"""Size below which a checkpoint is verified without a bar."""


# ----------------------------------------------------------------------------------- paths -> checkpoints


def find(where: str) -> Checkpoint:
    """Return the checkpoint at `where`, or the newest intact one of a folder or run."""
    from llmfoundry_lite.checkpoint.verify import check_structure

    if is_checkpoint(where):
        return open_checkpoint(where)
    store, _ = find_some(where)
    search = store.newest_intact(check_structure)
    if search.checkpoint is None:
        raise CheckpointError(f"{store.root.url}: none of its checkpoints is intact ({'; '.join(search.notes)})")
    for note in search.notes:
        say(note, file=sys.stderr)
    return search.checkpoint


def find_some(where: str) -> tuple[CheckpointStore, list[Candidate]]:
    """Return the checkpoints of a folder or run, newest first, at least one."""
    folder = open_folder(where)
    if folder.path_here is not None and not folder.exists():
        raise CheckpointError(f"{where}: no such folder; expected a checkpoint, a folder of them, or a run directory")
    store = CheckpointStore(folder_of_checkpoints(where))
    candidates = store.candidates()
    if not candidates:
        others = [f"{name}, set aside as damaged" for name in store.set_aside_saves()]
        others += [f"{name}, which is no batch's name" for name in store.renamed_saves()]
        but = f" but {'; '.join(others)}" if others else ""
        raise CheckpointError(
            f"{store.root.url}: no checkpoints here{but}; expected one (…/ba200), a folder of them, or a run directory"
        )
    return store, candidates


# ---------------------------------------------------------------------------------------------- commands


@checkpoint.command("ls")
def list_checkpoints(where: Where) -> None:
    """List the checkpoints of a run, newest first.

    Incomplete checkpoints come last: those whose manifest cannot be read, and those with a file that is missing or has
    another size. `verify` also checks the hash of every byte.
    """
    store, candidates = find_some(where)
    with ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="checkpoint-look") as pool:
        faults = list(pool.map(find_fault, candidates))
    say(store.root.url)
    rows = []
    for candidate, fault in zip(candidates, faults, strict=True):
        row = describe_row(candidate)
        if fault is None and row is not None:
            rows.append((candidate.name, *row))
    if rows:
        print_columns(("checkpoint", "batch", "tokens", "size", "written"), rows, right=(1, 2, 3))
    for candidate, fault in zip(candidates, faults, strict=True):
        if fault is not None:
            say(f"{candidate.name} is {condition_of(fault)}: {fault}")
    for name in store.set_aside_saves():
        say(f"{name} was set aside as damaged; `checkpoint prune` removes it once all saves that it keeps are newer")
    for name in store.renamed_saves():
        say(f"{name} is a checkpoint by another name: runs pass it over; give its own path, or rename it to ba<batch>")


def find_fault(candidate: Candidate) -> CheckpointError | None:
    """Return what is wrong with a checkpoint, by its manifest and one listing of its files."""
    from llmfoundry_lite.checkpoint.verify import check_present

    try:
        check_present(candidate.open())
    except CheckpointError as error:
        return error
    return None


def describe_row(candidate: Candidate) -> tuple[str, str, str, str] | None:
    """Return batch, tokens, size and date; None for one that cannot be read."""
    head = candidate.head
    if head is None:
        return None
    written = (head.written_at or "").replace("+00:00", "Z")
    return f"{head.batch:,}", f"{head.num_tokens:,}", megabytes(head.num_bytes), written


@checkpoint.command("inspect")
def inspect(where: Where, tensors: Annotated[bool, typer.Option(help="List every tensor.")] = False) -> None:
    """Show a checkpoint's contents and where its run has trained."""
    found = find(where)
    manifest, stamp = found.manifest, found.manifest.timestamp
    dtypes = Counter(tensor.dtype for tensor in manifest.tensors.values())
    kinds, num_files = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.items()), len(manifest.files)
    model = [tensor for name, tensor in manifest.tensors.items() if name.startswith("model/")]
    slots = sum(tensor.num_bytes for name, tensor in manifest.tensors.items() if name.startswith("optim/"))
    lines = {
        "run": manifest.run_name,
        "position": f"epoch {stamp.epoch}, batch {stamp.batch:,}, {stamp.sample:,} samples, {stamp.token:,} tokens",
        "parameters": f"{sum(math.prod(tensor.shape) for tensor in model):,}",
        "model": megabytes(sum(tensor.num_bytes for tensor in model)),
        "optimizer": megabytes(slots) if manifest.optimizer is not None else "none",
        "tensors": f"{kinds}; in {num_files} file{'' if num_files == 1 else 's'}",
        "state digest": manifest.state_digest,
        "written": manifest.written_at,
        "save": manifest.save_id,
        "after": manifest.parent_save_id,
    }
    origin = manifest.scalars.get("imported_from")
    if isinstance(origin, dict):
        lines = {"imported from": f"{origin.get('source')} ({origin.get('kind')})"} | lines
        del lines["position"]
    if state := manifest.dcp_state:
        size = megabytes(sum(tensor.num_bytes for tensor in manifest.tensors.values()))
        lines["model"] = f"{len(manifest.tensors)} tensors ({size}) and {len(state['values'])} values of {DCP_STATE}"
        del lines["parameters"], lines["optimizer"]
    say(found.url)
    print_lines(lines)
    if manifest.segments:
        say()
        say("where it ran")
        columns = ("batches", "device", "ranks", "sharding", "precision", "tokens/s")
        print_columns(columns, [segment_row(segment) for segment in manifest.segments], right=(2, 5))
        print_lines({segment.span: ", ".join(segment.computed_with) for segment in manifest.segments})
    if tensors:
        say()
        rows = [
            (name, tensor.dtype, str(list(tensor.shape)), str(tensor.num_chunks))
            for name, tensor in manifest.tensors.items()
        ]
        print_columns(("tensor", "dtype", "shape", "chunks"), rows, right=(3,))


def segment_row(segment: Any) -> tuple[str, ...]:
    rate = "" if segment.tokens_per_second is None else f"{segment.tokens_per_second:,.0f}"
    ranks = "" if segment.world_size is None else str(segment.world_size)
    words = (segment.device or "", ranks, segment.sharding_in_words or "", segment.precision or "")
    return segment.span, *words, rate


@checkpoint.command("verify")
def verify(where: Where) -> None:
    """Check the hash of every byte. Exits with 2 if one differs from what was written, and names file and tensor.

    Verifies every checkpoint of a folder or a run, newest first. To verify only one, give its own path (…/ba200).
    """
    if is_checkpoint(where):
        verify_and_say(open_checkpoint(where))
        return
    store, candidates = find_some(where)
    faults: dict[str, CheckpointError] = {}
    for candidate in candidates:
        try:
            verify_and_say(candidate.open())
        except CheckpointError as error:
            if is_gone(candidate):
                say(f"{candidate.name}: removed meanwhile")
                continue
            faults[candidate.name] = error
            say(f"{candidate.name} is {condition_of(error)}: {error}", file=sys.stderr)
    if faults:
        # The exit code is that of a fault that stays, if there is one, and not of a disk that does not answer now.
        first = min(faults.values(), key=lambda error: error.is_transient)
        text = f"{len(faults)} of {len(candidates)} checkpoints did not pass: {', '.join(faults)}"
        raise CheckpointError(f"{store.root.url}: {text}") from first.__cause__


def is_gone(candidate: Candidate) -> bool:
    """Return whether a checkpoint has been removed since it was listed."""
    try:
        return not candidate.folder.names()
    except OSError:
        return False


def verify_and_say(found: Checkpoint) -> None:
    verify_visibly(found)
    manifest = found.manifest
    say(f"{found.url}: intact, {len(manifest.tensors)} tensors, {megabytes(manifest.num_bytes)}")


@checkpoint.command("diff")
def diff_checkpoints(a: First, b: Second) -> None:
    """Show which tensors and numbers differ, and by how much."""
    first, second = find(a), find(b)

    from llmfoundry_lite.checkpoint.full_tensors import diff, diff_scalars

    rows, num_tensors = [], 0
    for name, note, num_different, absolute, relative in diff(first.url, second.url):
        num_tensors += 1
        if note.startswith("dtype"):
            rows.append((f"{name} ({note})", f"{num_different:,}", f"{absolute:.3e}", f"{relative:.3e}"))
        elif note:  # not compared
            rows.append((name, note, "", ""))
        elif num_different:
            rows.append((name, f"{num_different:,}", f"{absolute:.3e}", f"{relative:.3e}"))
    scalars = [(path, str(x), str(y)) for path, x, y in diff_scalars(first.manifest, second.manifest)]
    say(f"a  {first.url}")
    say(f"b  {second.url}")
    here, there = first.manifest.state_digest, second.manifest.state_digest
    if here is not None and there is not None:
        say(
            f"the state's digests are equal: {here}"
            if here == there
            else f"the state's digests differ: {here}, {there}"
        )
    if rows:
        print_columns(("tensor", "values", "absolute", "relative"), rows, right=(1, 2, 3))
    if scalars:
        print_columns(("number", "a", "b"), scalars)
    say(f"{len(rows)} of {num_tensors} tensors and {len(scalars)} numbers differ")


@checkpoint.command("export")
def export(
    where: Where,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    dtype: Annotated[str, typer.Option(help="Precision of the weights: fp32 or bf16.")] = "fp32",
    tokenizer: Annotated[
        str | None, typer.Option(help="Where the run's tokenizer is, if not beside the checkpoint; none leaves it out.")
    ] = None,
) -> None:
    """Write safetensors weights that plain transformers loads.

    Also writes the tokenizer that the model was trained with, which is identified by its fingerprint in the manifest.
    """
    ignore_output_errors()
    found = find(where)
    check_outside_checkpoints(out)
    config = found.manifest.config
    if not isinstance(config, dict) or "model" not in config:
        raise CheckpointError(f"{found.url}: does not say what model it is; `consolidate` writes its bare weights")

    from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors
    from llmfoundry_lite.convert.huggingface import export_model
    from llmfoundry_lite.evaluation.models import model_config_of

    model = model_config_of(found)
    with tokenizer_of(found, tokenizer) as folder:
        note = export_model(load_full_tensors(found.url), model, out, dtype=dtype, tokenizer_folder=folder)
    say(f"exported {found.url} to {out}" + ("" if folder else ", without a tokenizer"))
    if note is not None:
        say(note)


@contextlib.contextmanager
def tokenizer_of(found: Checkpoint, wish: str | None) -> Iterator[Path | None]:
    """Yield a folder with the files of a checkpoint's tokenizer: the one it names, or the copy beside it. Raises
    DataError for another tokenizer than the model was trained with."""
    from llmfoundry_lite.convert.tokenizer import find_tokenizer

    tokenizer = None if wish == "none" else find_tokenizer(found.manifest.config, found, found.url, wish)
    if tokenizer is None or Path(tokenizer.name).is_dir():
        yield Path(tokenizer.name) if tokenizer else None
        return
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        yield Path(folder)


@checkpoint.command("import")
def import_weights(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A Hugging Face folder, hf:NAME, or a checkpoint of Composer or DCP."),
    ],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="A folder without checkpoints; the import becomes its ba0.")
    ],
    trust_pickle: Annotated[
        bool,
        typer.Option(
            "--trust-pickle", help="Allow reading pickles: checkpoints of Composer or DCP, and pytorch_model.bin."
        ),
    ] = False,
    config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="YAML", help="YAML that the model was trained with, if the checkpoint does not describe the model."
        ),
    ] = None,
) -> None:
    """Convert weights from elsewhere into a portable checkpoint.

    From Hugging Face, LLM Foundry or Composer it takes the weights, the model's configuration and the tokenizer, but
    not the optimizer's state or the position in the data. To train from the result, set load_path=OUT
    load_weights_only=true. From torch.distributed.checkpoint (DCP, used by torchtitan) it takes everything, and keeps
    all names.
    """
    ignore_output_errors()
    with status(f"importing {source}"):
        from llmfoundry_lite.convert.to_checkpoint import import_checkpoint

        imported = import_checkpoint(source, out, trust_pickle=trust_pickle, config=config or ())
    manifest, url = imported.checkpoint.manifest, imported.checkpoint.url
    lines: dict[str, str | None] = {"from": imported.kind}
    if imported.kind == DCP_STATE:
        num_values = len((manifest.dcp_state or {})["values"])
        lines |= {
            "state": f"{len(manifest.tensors)} tensors, {megabytes(manifest.num_bytes)}, and {num_values} values",
            "load it": f'storage_reader=PortableStorageReader("{url}")',
        }
    else:
        tokenizer = "none"
        if manifest.fingerprints:
            tokenizer = f"{manifest.config['tokenizer']['name']} ({manifest.fingerprints['tokenizer']})"
        lines |= {
            "weights": f"{imported.num_parameters:,} parameters, fp32, {megabytes(manifest.num_bytes)}",
            "tokenizer": tokenizer,
            "not carried": "optimizer state, position in the data",
            "train from it": f"load_path={url} load_weights_only=true",
        }
    say(f"imported {source} as {url}")
    print_lines(lines)
    for note in imported.notes:
        say(f"note: {note}")


@checkpoint.command("consolidate")
def consolidate_checkpoint(
    where: Where,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The .safetensors file to write.")],
    everything: Annotated[bool, typer.Option(help="Also write the optimizer's state.")] = False,
) -> None:
    """Write the weights of all shards into one safetensors file."""
    ignore_output_errors()
    found = find(where)

    from llmfoundry_lite.checkpoint.full_tensors import consolidate

    with status(f"writing {out}"):
        path = consolidate(found.url, out, everything=everything)
    say(f"wrote {path}")


@checkpoint.command("prune")
def prune(
    where: Where,
    keep: Annotated[int, typer.Option(min=1, help="Number of newest checkpoints to keep.")],
    keep_every: Annotated[
        int | None, typer.Option(min=1, help="Also keep checkpoints whose batch is a multiple of this number.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed, without removing it.")
    ] = False,
) -> None:
    """Remove old checkpoints, but never the newest intact one. Verifies that one by its hashes first.

    Checkpoints that were set aside as damaged do not count towards --keep. They are removed once all checkpoints that
    stay are newer. Parts of the log that no checkpoint needs any more are removed too.
    """
    if not dry_run:
        ignore_output_errors()
    store, candidates = find_some(where)
    unsound: dict[str, CheckpointError] = {}
    doomed = store.prune(
        None,
        keep_newest=keep,
        keep_every_batches=keep_every,
        verify=verify_visibly,
        on_unsound=unsound.__setitem__,
        dry_run=dry_run,
    )
    unsound |= {
        candidate.name: candidate.error for candidate in candidates if candidate.head is None and candidate.error
    }
    for name, error in unsound.items():
        say(f"{name} is {condition_of(error)}: {error}", file=sys.stderr)
    if len(unsound) == len(candidates):
        raise CheckpointError(f"{store.root.url}: none of its checkpoints is whole, so none is removed")

    kept = []
    for candidate in reversed(candidates):
        if candidate.name not in doomed:
            fault = unsound.get(candidate.name)
            kept.append(candidate.name if fault is None else f"{candidate.name} ({condition_of(fault)})")
    kept += [f"{name} (set aside)" for name in store.set_aside_saves() if name not in doomed]
    verb = "would remove" if dry_run else "removed"
    say(f"{verb} {', '.join(doomed) or 'nothing'}; kept {', '.join(kept)}")


# ------------------------------------------------------------------------------------------- how answers look


def say(text: str = "", file: TextIO | None = None) -> None:
    """Print a line of an answer, which may quote what others have written."""
    print(printable(text), file=file)


def verify_visibly(found: Checkpoint) -> None:
    """Hash every byte; with a bar on a terminal when there are many. Raises DamagedCheckpointError."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from llmfoundry_lite.checkpoint.verify import verify_checkpoint

    console, num_bytes = Console(stderr=True), found.manifest.num_bytes
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    is_quiet = not console.is_terminal or num_bytes < PROGRESS_BYTES
    with Progress(*columns, console=console, transient=True, disable=is_quiet) as progress:
        task = progress.add_task(printable(found.name), total=num_bytes)
        verify_checkpoint(found, lambda count: progress.advance(task, count))
        progress.update(task, completed=num_bytes)


def print_columns(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    from llmfoundry_lite.tables import Table, console

    Table("", columns, rows, right).print(console())


def print_lines(lines: dict[str, str | None]) -> None:
    for name, value in lines.items():
        if value is not None:
            say(f"  {name:<14}{value}")


def status(text: str) -> Any:
    """Show a spinner on a terminal, until the work is done."""
    from rich.console import Console

    return Console(stderr=True).status(printable(text).replace("[", r"\["))


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
