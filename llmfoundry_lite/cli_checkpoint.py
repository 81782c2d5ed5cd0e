"""`llmfoundry-lite checkpoint`: look at checkpoints, verify, compare, export and remove them.

`ls`, `inspect`, `verify` and `prune` import no torch and answer on a login node.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from llmfoundry_lite.checkpoint.store import Checkpoint, CheckpointStore, open_checkpoint
from llmfoundry_lite.errors import CheckpointError

checkpoint = typer.Typer(
    help="Portable checkpoints: what is in them, are they whole, what can be made of them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Where = Annotated[str, typer.Argument(help="A checkpoint (…/ba200), a folder of checkpoints, or a run directory.")]


def find(where: str) -> Checkpoint:
    """The checkpoint at `where`, or the newest intact one of the folder or run that it is."""
    from llmfoundry_lite.checkpoint.verify import check_structure

    try:
        return open_checkpoint(where)
    except CheckpointError as error:
        search = find_store(where).newest_intact(check_structure)
        if search.checkpoint is None:
            raise error
        return search.checkpoint


def find_store(where: str) -> CheckpointStore:
    """The checkpoints of a folder; a run directory keeps its own under `checkpoints`."""
    inside = Path(where) / "checkpoints"
    return CheckpointStore(inside if "://" not in where and inside.is_dir() else where)


@checkpoint.command("ls")
def list_checkpoints(where: Where) -> None:
    """The checkpoints of a run, newest first."""
    from rich.console import Console
    from rich.table import Table

    store = find_store(where)
    table = Table(title=store.root.url, title_justify="left")
    for heading in ("checkpoint", "batch", "tokens", "size", "written", ""):
        table.add_column(heading, justify="right" if heading in ("batch", "tokens", "size") else "left")
    for candidate in store.candidates():
        if candidate.checkpoint is None:
            table.add_row(candidate.name, "", "", "", "", f"damaged: {candidate.error}")
            continue
        manifest = candidate.checkpoint.manifest
        stamp = manifest.timestamp
        size = f"{manifest.num_bytes / 1e6:,.1f} MB"
        table.add_row(candidate.name, f"{stamp.batch:,}", f"{stamp.token:,}", size, manifest.written_at or "", "")
    Console().print(table)


@checkpoint.command("inspect")
def inspect(where: Where, tensors: Annotated[bool, typer.Option(help="List every tensor.")] = False) -> None:
    """What a checkpoint holds, and where its run has been."""
    from rich.console import Console
    from rich.table import Table

    from llmfoundry_lite.checkpoint.verify import describe

    found = find(where)
    manifest, sums = found.manifest, describe(found.manifest)
    console = Console()
    stamp = manifest.timestamp
    console.print(f"{found.where}: run {manifest.run_name}, save {manifest.save_id}, after {manifest.parent_save_id}")
    console.print(f"epoch {stamp.epoch}, batch {stamp.batch:,}, {stamp.sample:,} samples, {stamp.token:,} tokens")
    console.print(
        f"{sums.num_parameters:,} parameters; model {sums.model_bytes / 1e6:,.1f} MB, optimizer "
        f"{sums.optimizer_bytes / 1e6:,.1f} MB in {sums.num_files} files; "
        + ", ".join(f"{count} {dtype} tensors" for dtype, count in sums.dtypes.items())
    )
    table = Table(title="where it ran", title_justify="left")
    for heading in ("batches", "device", "ranks", "sharding", "precision", "torch", "tokens/s"):
        table.add_column(heading, overflow="fold")
    for segment in manifest.segments:
        rate = "" if segment.tokens_per_second is None else f"{segment.tokens_per_second:,.0f}"
        batches = f"{segment.first_batch}-{segment.last_batch}"
        ranks = "" if segment.world_size is None else str(segment.world_size)
        table.add_row(batches, segment.device, ranks, segment.sharding, segment.precision, segment.torch, rate)
    console.print(table)
    if tensors:
        table = Table()
        for heading in ("tensor", "dtype", "shape", "slices"):
            table.add_column(heading)
        for name, tensor in manifest.tensors.items():
            table.add_row(name, tensor.dtype, str(list(tensor.shape)), str(len(tensor.slices)))
        console.print(table)


@checkpoint.command("verify")
def verify(where: Where) -> None:
    """Hash every byte; exit code 2 and the file's and tensor's name if one is not what was written."""
    from llmfoundry_lite.checkpoint.verify import verify_checkpoint

    found = find(where)
    verify_checkpoint(found)
    manifest = found.manifest
    print(f"{found.where}: intact, {len(manifest.tensors)} tensors, {manifest.num_bytes / 1e6:,.1f} MB")


@checkpoint.command("diff")
def diff_checkpoints(a: Where, b: Where) -> None:
    """The largest difference of each tensor, and every number that differs."""
    from rich.console import Console
    from rich.table import Table

    from llmfoundry_lite.checkpoint.whole import diff, diff_scalars

    first, second = find(a), find(b)
    table = Table()
    for heading, justify in (("tensor", "left"), ("differing", "right"), ("absolute", "right"), ("relative", "right")):
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    num_tensors = num_different = 0
    for difference in diff(first.where, second.where):
        num_tensors += 1
        if difference.note or difference.num_different:
            num_different += 1
            numbers = (f"{difference.max_absolute:.3e}", f"{difference.max_relative:.3e}")
            table.add_row(f"{difference.name} {difference.note}", f"{difference.num_different:,}", *numbers)
    for path, here, there in diff_scalars(first.manifest, second.manifest):
        table.add_row(path, "", str(here), str(there))
    if table.row_count:
        Console().print(table)
    print(f"{num_different} of {num_tensors} tensors differ")


@checkpoint.command("export")
def export(
    where: Where,
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    dtype: Annotated[str, typer.Option(help="fp32 or bf16")] = "fp32",
) -> None:
    """Write the weights as safetensors in a Hugging Face layout that plain transformers loads."""
    from llmfoundry_lite.checkpoint.whole import load_full_tensors
    from llmfoundry_lite.models.hf import export_model

    found = find(where)
    config = found.manifest.config
    tokenizer = Path(config["tokenizer"]["name"])
    export_model(
        load_full_tensors(found.where),
        model_config(config),
        out,
        dtype=dtype,
        tokenizer_folder=tokenizer if tokenizer.is_dir() else None,
    )
    print(f"exported {found.where} to {out}")


def model_config(config: dict[str, Any]) -> Any:
    """The model of a resolved configuration, as a manifest keeps it."""
    from llmfoundry_lite.config.build import build_block
    from llmfoundry_lite.config.schema import ModelConfig

    return build_block(ModelConfig, config["model"], "model")


@checkpoint.command("consolidate")
def consolidate_checkpoint(
    where: Where,
    out: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
    everything: Annotated[bool, typer.Option(help="The optimizer's state too.")] = False,
) -> None:
    """Write all shards as one safetensors file."""
    from llmfoundry_lite.checkpoint.whole import consolidate

    print(f"wrote {consolidate(find(where).where, out, everything=everything)}")


@checkpoint.command("prune")
def prune(
    where: Where,
    keep: Annotated[int, typer.Option(min=1, help="The newest so many stay.")],
    keep_every: Annotated[int | None, typer.Option(help="And every one whose batch is a multiple of this.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Only say what would go.")] = False,
) -> None:
    """Remove old checkpoints; never the newest one that is whole."""
    from llmfoundry_lite.checkpoint.verify import check_structure

    store = find_store(where)
    doomed = store.prune(None, keep_newest=keep, keep_every_batches=keep_every, verify=check_structure, dry_run=dry_run)
    print(f"{'would remove' if dry_run else 'removed'} {', '.join(doomed) or 'nothing'}")
