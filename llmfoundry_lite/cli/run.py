"""`llmfoundry-lite train`, `eval`, `generate` and `init`: from a data folder to a model that writes."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from llmfoundry_lite.config.load_train import DRY_RUNS
from llmfoundry_lite.errors import UserError

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""The rest of the line is the program's own, `--help` and `--dry-run` included."""

DEFAULT_RESTARTS = 3
Ranks = Annotated[int, typer.Option("-n", "--num-ranks", min=1, help="Processes on this machine.")]


Restarts = Annotated[
    int | None, typer.Option("--max-restarts", min=0, help="After ranks that died or froze [3 with -n; else none].")
]
LogDir = Annotated[Path | None, typer.Option(help="With -n: for rank1.txt, … [logs in the run's folder].")]


def train(context: typer.Context, num_ranks: Ranks = 1, max_restarts: Restarts = None, log_dir: LogDir = None) -> None:
    """Train a model: YAML files or names, then key=value. --help has more."""
    from llmfoundry_lite.train import check, main, prepare_environment

    if not _is_launch(context.args, num_ranks, is_asked=max_restarts is not None):
        _run_here("llmfoundry_lite.train", main, context.args)
    from llmfoundry_lite.config.spans import parse_seconds
    from llmfoundry_lite.launch.launcher import Launcher, Program
    from llmfoundry_lite.launch.status import read_status
    from llmfoundry_lite.training.lean_imports import HEAVY

    config = check(context.args)[0].config
    prepare_environment(config)
    program = Program("llmfoundry_lite.train", "llmfoundry_lite.training.train", HEAVY)
    logs = log_dir or Path(config.run_folder) / "logs"

    def batch() -> int:
        return (read_status(Path(config.run_folder)) or {}).get("batch", 0)

    restarts = DEFAULT_RESTARTS if max_restarts is None else max_restarts
    launcher = Launcher(program, num_ranks, restarts, logs, batch, parse_seconds(config.retry_for))
    raise typer.Exit(launcher.run(context.args))


def evaluate(context: typer.Context, num_ranks: Ranks = 1, log_dir: LogDir = None) -> None:
    """Evaluate models in context: models.NAME=WHERE. --help has more."""
    from llmfoundry_lite.eval import main, prepare_environment

    if not _is_launch(context.args, num_ranks):
        _run_here("llmfoundry_lite.eval", main, context.args)
    from llmfoundry_lite.config.load_eval import load_eval_config
    from llmfoundry_lite.launch.launcher import Launcher, Program

    config, _, _ = load_eval_config(context.args)
    prepare_environment(config)
    logs = log_dir or Path(config.results_folder) / "logs"
    program = Program("llmfoundry_lite.eval", "llmfoundry_lite.evaluation.suite")
    raise typer.Exit(Launcher(program, num_ranks, 0, logs).run(context.args))


def _is_launch(arguments: Sequence[str], num_ranks: int, *, is_asked: bool = False) -> bool:
    """Return whether there are ranks to start. One runs in this process unless `is_asked`, as do help and dry runs."""
    if num_ranks == 1 and not is_asked:
        return False
    from llmfoundry_lite.launch.launcher import refuse_other_launchers
    from llmfoundry_lite.launch.processes import rank_variables

    refuse_other_launchers()
    os.environ.update(rank_variables(0, num_ranks))
    return not {"-h", "--help", *DRY_RUNS} & set(arguments)


def _run_here(module: str, main: Callable[[Sequence[str]], None], arguments: list[str]) -> NoReturn:
    from llmfoundry_lite.ranks.ending import run_and_exit

    sys.argv = [module, *arguments]
    run_and_exit(main)


def generate(
    where: Annotated[str, typer.Argument(metavar="RUN|CHECKPOINT|FOLDER", help="Also hf:NAME.")],
    prompt: Annotated[str | None, typer.Option(help="What the text starts with [asked for, again and again].")] = None,
    num_tokens: Annotated[int, typer.Option(min=1, help="At most.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Among the k likeliest.")] = 50,
    top_p: Annotated[float | None, typer.Option(min=1e-9, max=1, help="Among the likeliest with this sum.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed writes the same text.")] = 0,
    tokenizer: Annotated[str | None, typer.Option(help="A folder or Hub name [the model's own].")] = None,
) -> None:
    """Write text with a model, token by token."""
    import torch

    from llmfoundry_lite.devices import device_type
    from llmfoundry_lite.evaluation.generation import generate_text, model_of
    from llmfoundry_lite.evaluation.models import load_subject

    device = torch.device(device_type())
    subject = load_subject(where, tokenizer=tokenizer, device=device)
    for note in subject.notes:
        print(note, file=sys.stderr)
    model = model_of(subject)

    def answer(text: str) -> None:
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        print(text, end="", flush=True)
        for piece in generate_text(model, subject.tokenizer, text, num_tokens, device=device, **sampling):
            print(piece, end="", flush=True)
        print(flush=True)

    if prompt is not None:
        answer(prompt)
        return
    if sys.stdin.isatty():
        print("a prompt a line; an empty one or Ctrl-D ends", file=sys.stderr)
    while line := _next_line():
        answer(line)


def _next_line() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return ""


def init(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="A folder that `data prepare` made.")],
    size: Annotated[str, typer.Option(help="quickstart, 125m, 350m, 1b, …: the shape of mpt-SIZE.")] = "125m",
    out: Annotated[Path | None, typer.Option(help="The file to write [mpt-SIZE-DATA.yaml].")] = None,
) -> None:
    """Write a commented YAML for a data folder and a model's size."""
    from llmfoundry_lite.config.starter import write_starter

    if out is not None and out.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out: {out} given, expected a name that ends in .yaml")
    path = out or Path(f"mpt-{size}-{data.resolve().name}.yaml")
    print(f"trains for {write_starter(data, size, path)}")
    print(f"wrote {path}; next: llmfoundry-lite train {path} --dry-run")
