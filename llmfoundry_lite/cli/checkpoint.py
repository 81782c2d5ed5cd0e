"""The commands `llmfoundry-lite checkpoint`: list, inspect, verify, compare, export, import and remove checkpoints.

Each command has a function, whose docstring is its help. `checkpoint_output.py` prints results. `ls`, `inspect`,
`verify` and `prune` do not import torch, so they are fast on a login node.
"""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from llmfoundry_lite import companions
from llmfoundry_lite.checkpoint import retention
from llmfoundry_lite.checkpoint.manifest import DCP_STATE
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.paths import check_outside_checkpoints, folder_of_checkpoints
from llmfoundry_lite.checkpoint.store import (
    Candidate,
    Checkpoint,
    CheckpointStore,
    condition_of,
    is_checkpoint,
    open_checkpoint,
)
from llmfoundry_lite.cli.checkpoint_output import (
    count_parameters,
    describe_manifest,
    describe_segment,
    format_megabytes,
    print_candidates,
    print_columns,
    print_facts,
    print_line,
    print_second_place,
    show_spinner,
    verify_with_progress,
)
from llmfoundry_lite.errors import CheckpointError, ConfigError, ExportError
from llmfoundry_lite.ranks.output import ignore_output_errors

checkpoint = typer.Typer(
    help="List, verify, compare, convert and prune portable checkpoints.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Location = Annotated[
    str, typer.Argument(metavar="PATH", help="A checkpoint (…/ba200), a folder of checkpoints, or a run folder.")
]
First = Annotated[str, typer.Argument(metavar="A", help="A checkpoint, a folder of checkpoints, or a run folder.")]
Second = Annotated[
    str,
    typer.Argument(metavar="B", help="What to compare A with: a checkpoint, a folder of checkpoints, or a run folder."),
]


# ----------------------------------------------------------------------------------- paths -> checkpoints


def find_checkpoint(location: str) -> Checkpoint:
    """Open the checkpoint at a path or URL, or the newest intact one of a run or of a folder of checkpoints.

    Checkpoints that are passed over because they are not intact are named on standard error. Raises CheckpointError if
    none is intact.
    """
    from llmfoundry_lite.checkpoint.verify import check_structure

    if is_checkpoint(location):
        return open_checkpoint(location)
    store, candidates = list_candidates(location)
    search = store.newest_intact(check_structure, candidates=candidates)
    if search.checkpoint is None:
        raise CheckpointError(f"{store.root.url}: none of its checkpoints is intact ({'; '.join(search.notes)})")
    for note in search.notes:
        print_line(note, file=sys.stderr)
    return search.checkpoint


def list_candidates(location: str, *, to_remove: bool = False) -> tuple[CheckpointStore, list[Candidate]]:
    """Return the store of a run or a folder of checkpoints, and its checkpoints, newest first.

    If none are in the run folder, those in the save_folder that the run has recorded are returned, and standard error
    says so. Anybody may have written that record, so it is followed as for a report, and not if saves are `to_remove`.

    Candidates are not verified, and some may not be readable. Raises CheckpointError if there are none.
    """
    folder = open_folder(location)
    is_local = folder.path_here is not None
    if is_local and not folder.exists():
        raise CheckpointError(
            f"{location}: no such folder; expected a checkpoint, a folder of them, or a run directory"
        )
    store = CheckpointStore(folder_of_checkpoints(location))
    candidates = store.candidates()
    if candidates:
        return store, candidates

    # The run may save elsewhere.
    from llmfoundry_lite.report.reading import CONFIG, find_recorded_folder

    place, advice = store.root.url, "; expected one (…/ba200), a folder of them, or a run directory"
    recorded_folder = find_recorded_folder(location)
    if recorded_folder is not None:
        store = CheckpointStore(recorded_folder)
        candidates = store.candidates()
        place, advice = f"{location} saves in {store.root.url}", "; if that is on another disk, mount it"
    if candidates and to_remove:
        raise CheckpointError(
            f"{place} by its {CONFIG}, and nothing is removed by a recorded path; give that folder instead"
        )
    if candidates:
        print_line(f"{place} by its {CONFIG}", file=sys.stderr)
        return store, candidates

    others = [f"{name}, set aside as damaged" for name in store.set_aside_saves()]
    others += [f"{name}, which is no batch's name" for name in store.renamed_saves()]
    exceptions = f" but {'; '.join(others)}" if others else ""
    raise CheckpointError(f"{place}: no checkpoints here{exceptions}{advice}")


# ---------------------------------------------------------------------------------------------- commands


@checkpoint.command("ls")
def list_checkpoints(location: Location) -> None:
    """List the checkpoints of a run, newest first.

    Incomplete checkpoints come last: those whose manifest cannot be read, and those with a file that is missing or has
    another size. `verify` also checks the hash of every byte. If the run has a save_fallback that this machine can
    read, the saves there follow.
    """
    store: CheckpointStore | None = None
    candidates: list[Candidate] = []
    error: CheckpointError | None = None
    try:
        store, candidates = list_candidates(location)
    except CheckpointError as first_error:
        if "://" in location:
            raise
        error = first_error  # of a run folder, which may name a second place
    if store is not None:
        print_candidates(store, candidates)

    has_second_saves = print_second_place(location, candidates)
    if error is not None and not has_second_saves:
        raise error
    if error is not None:
        print_line(str(error), file=sys.stderr)


@checkpoint.command("inspect")
def inspect(location: Location, tensors: Annotated[bool, typer.Option(help="List every tensor.")] = False) -> None:
    """Show a checkpoint's contents and where its run has trained."""
    opened = find_checkpoint(location)
    manifest = opened.manifest
    print_line(opened.url)
    print_facts(describe_manifest(manifest))
    if manifest.segments:
        print_line()
        print_line("where it ran")
        columns = ("batches", "device", "ranks", "sharding", "precision", "tokens/s")
        print_columns(columns, [describe_segment(segment) for segment in manifest.segments], right=(2, 5))
        print_facts({segment.span: ", ".join(segment.computed_with) for segment in manifest.segments})
    if tensors:
        print_line()
        rows = [
            (name, tensor.dtype, str(list(tensor.shape)), str(tensor.num_chunks))
            for name, tensor in manifest.tensors.items()
        ]
        print_columns(("tensor", "dtype", "shape", "chunks"), rows, right=(3,))


@checkpoint.command("verify")
def verify(location: Location) -> None:
    """Check the hash of every byte. Exits with 2 if one differs from what was written, and names file and tensor.

    Verifies every checkpoint of a folder or a run, newest first. To verify only one, give its own path (…/ba200).
    """
    if is_checkpoint(location):
        verify_and_report(open_checkpoint(location))
        return
    store, candidates = list_candidates(location)
    faults: dict[str, CheckpointError] = {}
    for candidate in candidates:
        try:
            verify_and_report(candidate.open())
        except CheckpointError as error:
            if was_removed(candidate):
                print_line(f"{candidate.name}: removed meanwhile")
                continue
            faults[candidate.name] = error
            print_line(f"{candidate.name} is {condition_of(error)}: {error}", file=sys.stderr)
    if faults:
        # The exit code depends on the cause. A permanent fault takes precedence over one that may pass.
        first = min(faults.values(), key=lambda error: error.is_transient)
        text = f"{len(faults)} of {len(candidates)} checkpoints did not pass: {', '.join(faults)}"
        raise CheckpointError(f"{store.root.url}: {text}") from first.__cause__


def was_removed(candidate: Candidate) -> bool:
    """Return whether a checkpoint has been removed since it was listed, so that an error about it means nothing."""
    try:
        return not candidate.folder.names()
    except OSError:
        return False


def verify_and_report(opened: Checkpoint) -> None:
    """Hash every byte of a checkpoint, and print that it is intact. Raises CheckpointError if it is not."""
    verify_with_progress(opened)
    manifest = opened.manifest
    print_line(f"{opened.url}: intact, {len(manifest.tensors)} tensors, {format_megabytes(manifest.num_bytes)}")


@checkpoint.command("diff")
def diff_checkpoints(a: First, b: Second) -> None:
    """Show which tensors and numbers differ, and by how much."""
    first, second = find_checkpoint(a), find_checkpoint(b)

    from llmfoundry_lite.checkpoint.full_tensors import diff, diff_scalars

    # One row for each tensor that differs, or that cannot be compared.
    rows = []
    num_tensors = 0
    for name, note, num_different, absolute, relative in diff(first.url, second.url):
        num_tensors += 1
        differences = (f"{num_different:,}", f"{absolute:.3e}", f"{relative:.3e}")
        if note.startswith("dtype"):
            rows.append((f"{name} ({note})", *differences))
        elif note:  # not compared, for the reason in the note
            rows.append((name, note, "", ""))
        elif num_different:
            rows.append((name, *differences))
    scalars = [(path, str(x), str(y)) for path, x, y in diff_scalars(first.manifest, second.manifest)]

    print_line(f"a  {first.url}")
    print_line(f"b  {second.url}")
    first_digest = first.manifest.state_digest
    second_digest = second.manifest.state_digest
    if first_digest is not None and second_digest is not None:
        if first_digest == second_digest:
            print_line(f"the state's digests are equal: {first_digest}")
        else:
            print_line(f"the state's digests differ: {first_digest}, {second_digest}")
    if rows:
        print_columns(("tensor", "values", "absolute", "relative"), rows, right=(1, 2, 3))
    if scalars:
        print_columns(("number", "a", "b"), scalars)
    print_line(f"{len(rows)} of {num_tensors} tensors and {len(scalars)} numbers differ")


@checkpoint.command("export")
def export(
    location: Location,
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
    opened = find_checkpoint(location)
    check_outside_checkpoints(out)
    config = opened.manifest.config
    if not isinstance(config, dict) or "model" not in config:
        raise CheckpointError(f"{opened.url}: does not say what model it is; `consolidate` writes its bare weights")

    from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors
    from llmfoundry_lite.convert.huggingface import export_model
    from llmfoundry_lite.evaluation.models import model_config_of

    _refuse_own_parts(opened.url, config["model"])
    model = model_config_of(opened)
    with tokenizer_folder(opened, tokenizer) as folder:
        note = export_model(load_full_tensors(opened.url), model, out, dtype=dtype, tokenizer_folder=folder)
    print_line(f"exported {opened.url} to {out}" + ("" if folder else ", without a tokenizer"))
    if note is not None:
        print_line(note)


def _refuse_own_parts(url: str, recorded_model: Any) -> None:
    """Raise ExportError if the recorded block `model` names code, since no trust in it would make an export possible.

    Nothing is imported. A block that describes no model is left to `model_config_of`.
    """
    from llmfoundry_lite.config.build import build_block
    from llmfoundry_lite.config.model_schema import ModelConfig
    from llmfoundry_lite.convert.huggingface import describe_export_problem

    try:
        model = build_block(ModelConfig, recorded_model, "model")
    except (ConfigError, ArithmeticError):
        return
    if model.own_parts:
        raise ExportError(f"{url}: {describe_export_problem(model)}")


@contextlib.contextmanager
def tokenizer_folder(opened: Checkpoint, given: str | None) -> Iterator[Path | None]:
    """Provide, inside a `with` block, a folder with the files of the tokenizer with which a model was trained.

    `given` is the user's option `--tokenizer`: a folder or a Hub name, None to look where the checkpoint says and
    beside it, or `none` to go without. Yields None if there is no tokenizer. Raises DataError for another tokenizer
    than the model was trained with.
    """
    from llmfoundry_lite.convert.tokenizer import find_tokenizer

    tokenizer = None
    if given != "none":
        tokenizer = find_tokenizer(opened.manifest.config, opened, opened.url, given)
    if tokenizer is None:
        yield None
        return
    if Path(tokenizer.name).is_dir():
        yield Path(tokenizer.name)
        return
    # A tokenizer of the Hub is written into a folder first.
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
    with show_spinner(f"importing {source}"):
        from llmfoundry_lite.convert.to_checkpoint import import_checkpoint

        imported = import_checkpoint(source, out, trust_pickle=trust_pickle, config=config or ())
    manifest, url = imported.checkpoint.manifest, imported.checkpoint.url
    lines: dict[str, str | None] = {"from": imported.kind}
    if imported.kind == DCP_STATE:
        num_values = len((manifest.dcp_state or {})["values"])
        lines |= {
            "state": f"{len(manifest.tensors)} tensors, {format_megabytes(manifest.num_bytes)}, and "
            f"{num_values} values",
            "load it": f'storage_reader=PortableStorageReader("{url}")',
        }
    else:
        tokenizer = "none"
        if manifest.fingerprints:
            tokenizer = f"{manifest.config['tokenizer']['name']} ({manifest.fingerprints['tokenizer']})"
        lines |= {
            "weights": f"{imported.num_parameters:,} parameters, fp32, {format_megabytes(manifest.num_bytes)}",
            "tokenizer": tokenizer,
            "not carried": "optimizer state, position in the data",
            "train from it": f"load_path={url} load_weights_only=true",
        }
    print_line(f"imported {source} as {url}")
    print_facts(lines)
    for note in imported.notes:
        print_line(f"note: {note}")


@checkpoint.command("average")
def average(
    location: Annotated[
        str, typer.Argument(metavar="RUN", help="A run folder, or a folder of checkpoints, which may be a URL.")
    ],
    out: Annotated[str, typer.Option(help="Folder or URL without checkpoints, for the result.")],
    last: Annotated[int | None, typer.Option(min=2, help="Number of newest checkpoints to average.")] = None,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="SPAN", help="Average the checkpoints of the last stretch of training, such as 2e9tok or 500ba."
        ),
    ] = None,
) -> None:
    """Average the weights of a run's last checkpoints.

    The result is a new checkpoint, which often has a lower loss than the newest one, as if the learning rate had
    decayed. It is evaluated and exported like any checkpoint. It has no optimizer state, so a run begins with it by
    load_path=OUT load_weights_only=true, but cannot resume from it. Its manifest names the checkpoints that were
    averaged.
    """
    ignore_output_errors()
    average_checkpoints = companions.load("llmfoundry_studies.average:average_checkpoints", "checkpoint average")
    store, candidates = list_candidates(location)
    averaged = average_checkpoints(store.root.url, out, last=last, window=window, candidates=candidates)
    manifest = averaged.checkpoint.manifest
    print_line(f"averaged {len(averaged.parents)} checkpoints as {averaged.checkpoint.url}")
    print_facts(
        {
            "of": ", ".join(parent.name for parent in reversed(averaged.parents)),
            "weights": f"{count_parameters(manifest):,} parameters, fp32, {format_megabytes(manifest.num_bytes)}",
            "state digest": manifest.state_digest,
            "not carried": "optimizer state, position in the data",
        }
    )


@checkpoint.command("consolidate")
def consolidate_checkpoint(
    location: Location,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The .safetensors file to write.")],
    everything: Annotated[bool, typer.Option(help="Also write the optimizer's state.")] = False,
) -> None:
    """Write the weights of all shards into one safetensors file."""
    ignore_output_errors()
    opened = find_checkpoint(location)

    from llmfoundry_lite.checkpoint.full_tensors import consolidate

    with show_spinner(f"writing {out}"):
        path = consolidate(opened.url, out, everything=everything)
    print_line(f"wrote {path}")


@checkpoint.command("copy")
def copy(
    location: Location,
    out: Annotated[str, typer.Argument(metavar="FOLDER", help="A run's folder of checkpoints, or its save_folder.")],
) -> None:
    """Copy a checkpoint to another folder of the same run.

    If the first folder has several, the newest intact one is copied. Use this for a save in save_fallback that no
    launch has copied to save_folder. The log and the tokenizer go with it. All bytes are verified. Nothing is copied if
    the other folder has a newer checkpoint, by lease and batch, because the run has gone on from another one.
    """
    ignore_output_errors()
    original = find_checkpoint(location)

    from llmfoundry_lite.checkpoint.fallback import copy_checkpoint

    target = CheckpointStore(folder_of_checkpoints(out))
    head = original.manifest.head
    readable = [candidate for candidate in target.candidates() if candidate.head is not None]
    for candidate in readable:
        if candidate.head is not None and candidate.head.save_id == head.save_id:
            print_line(f"{candidate.folder.url} is this checkpoint already")
            return
    for candidate in readable:
        if candidate.recency > (head.lease_epoch, head.batch):
            raise CheckpointError(
                f"{candidate.folder.url}: saved by a later launch than {original.url}, or after it, so the run has "
                "gone on; to begin another run from the older one, use load_path"
            )
    target.root.make(with_parents=True)
    with show_spinner(f"copying {original.url}"):
        copied = copy_checkpoint(original, target)
    print_line(f"copied {original.url} to {copied.url}")


@checkpoint.command("prune")
def prune(
    location: Location,
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
    store, candidates = list_candidates(location, to_remove=True)
    unsound: dict[str, CheckpointError] = {}  # name of a checkpoint that is not intact -> why
    removed_names = retention.prune(
        store,
        None,
        keep_newest=keep,
        keep_every_batches=keep_every,
        verify=verify_with_progress,
        on_unsound=unsound.__setitem__,
        dry_run=dry_run,
    )
    # Checkpoints whose manifest cannot be read are not intact, either.
    for candidate in candidates:
        if candidate.head is None and candidate.error:
            unsound[candidate.name] = candidate.error
    for name, error in unsound.items():
        print_line(f"{name} is {condition_of(error)}: {error}", file=sys.stderr)
    if len(unsound) == len(candidates):
        raise CheckpointError(f"{store.root.url}: none of its checkpoints is whole, so none is removed")

    # Say what was removed and what was kept, oldest first.
    kept = []
    for candidate in reversed(candidates):
        if candidate.name not in removed_names:
            fault = unsound.get(candidate.name)
            kept.append(candidate.name if fault is None else f"{candidate.name} ({condition_of(fault)})")
    kept += [f"{name} (set aside)" for name in store.set_aside_saves() if name not in removed_names]
    verb = "would remove" if dry_run else "removed"
    print_line(f"{verb} {', '.join(removed_names) or 'nothing'}; kept {', '.join(kept)}")
