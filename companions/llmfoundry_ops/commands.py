"""The commands `init`, `watch` and `relay`, and `train_ranks`, which the core's `train -n` calls.

Each command imports what it needs when it runs, because a command line must answer quickly.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from llmfoundry_lite.cli.options import expand_home
from llmfoundry_lite.config.spans import parse_seconds
from llmfoundry_lite.errors import UserError, printable
from llmfoundry_lite.ranks.output import ignore_output_errors
from llmfoundry_lite.ranks.rank import set_environment


def train_ranks(arguments: Sequence[str], num_ranks: int, max_restarts: int, log_dir: Path | None) -> int:
    """Train on ranks of this machine, and return the launch's exit code.

    arguments: the arguments of `train`: YAML files and `key=value`.
    max_restarts: how often ranks are started again after one has died.
    log_dir: folder of the ranks' logs; None for `logs` in the run folder.

    Raises UserError as a rank would, before any is started.
    """
    from llmfoundry_lite.launch_train import (
        check,
        check_access_to_saves,
        observed,
        prepare_environment,
    )
    from llmfoundry_lite.ranks.lean_imports import HEAVY
    from llmfoundry_lite.ranks.status import read_status
    from llmfoundry_ops.faults import FaultRecord
    from llmfoundry_ops.launcher import Launcher, Program

    with observed(arguments, is_launcher=True) as merged:
        config = check(arguments, merged=merged).invocation.config
        prepare_environment(config)
        check_access_to_saves(config, is_launcher=True)
        program = Program("llmfoundry_lite.launch_train", "llmfoundry_lite.training.train", HEAVY)
        logs = log_dir or Path(config.run_folder) / "logs"

        def read_from_status(key: str) -> Any:
            status = read_status(Path(config.run_folder)) or {}
            return status.get(key)

        launcher = Launcher(
            program,
            num_ranks,
            max_restarts,
            logs,
            progress=lambda: read_from_status("last_saved"),  # batches after the newest save are trained again
            begun=lambda: read_from_status("batch") or 0,
            retry_seconds=config.retry_for.seconds,
            faults=FaultRecord(Path(config.run_folder)),
        )
        return launcher.run(arguments)


def watch_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or a save_folder, which may be a URL.")],
    patience: Annotated[
        str, typer.Option(metavar="TIME", help="For a bucket: time without any launch after which watch exits.")
    ] = "30m",
) -> None:
    """Show a run live until it ends.

    Shows batch, loss, rate, remaining time and last checkpoint. Ctrl-C ends the display, not the run.

    Exits as the run did: 0 if it is done or stopped, 75 if it was preempted, 1 if it failed or its process vanished.
    For a run in a bucket that is not done, it first waits whether another launch follows (--patience).
    """
    from llmfoundry_ops.watch import exit_code_of, watch

    try:
        patience_seconds = parse_seconds(patience)
    except ValueError as error:
        raise UserError(f"--patience: {patience} given, expected {error}") from None
    raise typer.Exit(exit_code_of(watch(run, patience_seconds=patience_seconds)))


def relay_command(
    path: Annotated[
        str, typer.Argument(metavar="RELAY.yaml", help="YAML file that names the run, its sites, and when it moves.")
    ],
) -> None:
    """Move a run between sites until it is done. The run moves after a number of batches, or when a site preempts it.

    The relay may be killed and started again at any time. It exits with 75 if you ask it to leave; start it again to
    resume.
    """
    from llmfoundry_ops.relay import run
    from llmfoundry_ops.sites import load_relay

    ignore_output_errors()
    raise typer.Exit(run(load_relay(path)))


def init(
    data: Annotated[
        Path,
        typer.Argument(metavar="DATA", help="A folder that data prepare made; with --hours, also a folder of texts."),
    ],
    size: Annotated[
        str | None, typer.Option(help="Size of the model: quickstart, 3m, 10m, 30m, 125m, 350m, 1b, … [default: 125m].")
    ] = None,
    hours: Annotated[
        float | None,
        typer.Option(min=0.001, help="Measure this machine, and choose a model that it trains in this many hours."),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Model to continue from, a Hugging Face folder or hf:NAME; or a YAML of LLM Foundry."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write [default: mpt-SIZE-DATA.yaml; LIKE-DATA.yaml with --like; DATA.yaml with --hours].",
            callback=expand_home,
        ),
    ] = None,
    trust_pickle: Annotated[
        bool, typer.Option("--trust-pickle", help="Allow reading pytorch_model.bin, which is a pickle, with --like.")
    ] = False,
) -> None:
    """Write a commented YAML for training on a data folder. Choose the model by --size, --hours or --like.

    With --hours, a folder of texts is first prepared as data/NAME. With --like, training continues from a Llama,
    Mistral, Qwen2, Qwen3, GPT-2 or MPT model: its weights become a checkpoint beside the YAML. Prepare the data with
    `--tokenizer FOLDER` for that. With --like RUN.yaml, a training YAML of LLM Foundry or of this package becomes one
    for DATA, and what has to be changed for a launch is listed.
    """
    ignore_output_errors()
    if out is not None and out.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out: {out} given, expected a name that ends in .yaml")
    if hours is not None:
        if size is not None or like is not None:
            raise UserError("--hours: given with --size or --like, which name a model; leave one of them out")
        set_environment({})
        from llmfoundry_ops.hours import prepare_texts, write_for_hours
        from llmfoundry_ops.starter import check_free

        path = out or Path(f"{data.resolve().name}.yaml")
        check_free(path)
        is_folder_of_texts = data.is_dir() and not (data / "summary.json").is_file()
        if is_folder_of_texts:
            data = prepare_texts(data)
        lines = [f"trains for {write_for_hours(data, hours, path)}"]
        written = str(path)
    elif like is not None:
        if size is not None:
            raise UserError(f"--size: {size} given with --like {like}, which has a size; leave one of them out")
        from llmfoundry_lite.config.layers import is_yaml

        if is_yaml(like) and not Path(like).is_dir():
            from llmfoundry_ops.from_yaml import write_from_yaml

            path, lines = write_from_yaml(data, like, out)
            written = str(path)
        else:
            from llmfoundry_ops.like import write_like

            path, checkpoint_folder, note = write_like(data, like, out, trust_pickle=trust_pickle)
            lines = [f"trains for {note}"]
            written = f"{checkpoint_folder} and {path}"
    else:
        from llmfoundry_ops.starter import write_starter

        size = size or "125m"
        path = out or Path(f"mpt-{size}-{data.resolve().name}.yaml")
        lines = [f"trains for {write_starter(data, size, path)}"]
        written = str(path)
    for line in lines:
        print(printable(line))
    print(printable(f"wrote {written}; next: llmfoundry-lite train {shlex.quote(str(path))} --dry-run=here"))
