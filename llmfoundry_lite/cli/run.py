"""Commands that run a model: `train`, `eval`, `generate`, `replay`."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from llmfoundry_lite import companions
from llmfoundry_lite.cli.options import expand_home
from llmfoundry_lite.config.load_train import DRY_RUNS
from llmfoundry_lite.errors import EXIT_DIFFERS, EXIT_DONE, ConfigError, UserError, printable

DEFAULT_MAX_RESTARTS = 3
"""Restarts of `train -n` after a rank has died or frozen."""
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of typer for `train` and `eval`, which pass all arguments that they do not know, such as --help, on."""

Ranks = Annotated[
    int,
    typer.Option("-n", "--num-ranks", min=1, help="Number of processes to start on this machine, one for each device."),
]
Restarts = Annotated[
    int | None,
    typer.Option(
        "--max-restarts", min=0, help="Maximum number of restarts after a rank has died or frozen [default: 3 with -n]."
    ),
]
LogDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder for the output of the other ranks, with -n [default: logs in the run's folder].",
        callback=expand_home,
    ),
]


def train(context: typer.Context, num_ranks: Ranks = 1, max_restarts: Restarts = None, log_dir: LogDir = None) -> None:
    """Train a model from YAML files and key=value settings."""
    from llmfoundry_lite.launch_train import main

    # A single rank trains in this process, and `_run_in_this_process` does not return.
    if not _starts_ranks(context.args, num_ranks, even_one=max_restarts is not None):
        _run_in_this_process("llmfoundry_lite.launch_train", main, context.args)

    # Several ranks, or one that is to be restarted, are processes that a companion starts and watches.
    try:
        train_ranks = companions.load("llmfoundry_ops.commands:train_ranks", "train -n")
    except ConfigError as error:
        raise ConfigError(f"{error}; or composer -n {num_ranks} -m llmfoundry_lite.launch_train …") from error
    if max_restarts is None:
        max_restarts = DEFAULT_MAX_RESTARTS
    raise typer.Exit(train_ranks(context.args, num_ranks, max_restarts, log_dir))


def evaluate(context: typer.Context, num_ranks: Ranks = 1, log_dir: LogDir = None) -> None:
    """Evaluate models on in-context tasks and held-out text."""
    from llmfoundry_lite.config.load_eval import SHOW, load_eval_config
    from llmfoundry_lite.launch_eval import main

    shows_prompts = any(argument.partition("=")[0] == SHOW for argument in context.args)
    if shows_prompts or not _starts_ranks(context.args, num_ranks):
        _run_in_this_process("llmfoundry_lite.launch_eval", main, context.args)

    from llmfoundry_lite.launch.ranks import run_ranks

    config = load_eval_config(context.args).config
    logs = log_dir or Path(config.results_folder) / "logs"
    raise typer.Exit(run_ranks("llmfoundry_lite.launch_eval", context.args, num_ranks, logs))


def _starts_ranks(arguments: Sequence[str], num_ranks: int, *, even_one: bool = False) -> bool:
    """Return whether `train` or `eval` starts other processes for its ranks, instead of running in this one.

    A single rank runs in this process, unless `even_one` asks for a process that can be restarted. Help and dry runs
    are printed by this process too. Unless a single rank runs here, this also sets the environment variables of rank 0
    of `num_ranks`, so that the checks of the configuration know the number of ranks.

    Raises ConfigError if another launcher has started this process.
    """
    if num_ranks == 1 and not even_one:
        return False
    from llmfoundry_lite.launch.ranks import refuse_other_launchers
    from llmfoundry_lite.ranks.rank import rank_variables

    refuse_other_launchers()
    os.environ.update(rank_variables(0, num_ranks))
    is_only_printed = bool({"-h", "--help", *DRY_RUNS} & set(arguments))
    return not is_only_printed


def _run_in_this_process(module: str, main: Callable[[Sequence[str]], None], arguments: list[str]) -> NoReturn:
    """Run the `main` function of a module as `python -m module` would, and exit with its exit code."""
    from llmfoundry_lite.ranks.ending import run_and_exit

    sys.argv = [module, *arguments]
    run_and_exit(main)


def generate(
    where: Annotated[
        str, typer.Argument(metavar="MODEL", help="A run, a checkpoint, a Hugging Face folder, or hf:NAME.")
    ],
    prompt: Annotated[str | None, typer.Option(help="Text to continue [default: each line of standard input].")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 always takes the most likely token.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample only from the k most likely tokens.")] = 50,
    top_p: Annotated[
        float | None,
        typer.Option(min=1e-9, max=1, help="Sample only from the most likely tokens whose probabilities sum to this."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same text.")] = 0,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer, as a folder or a Hub name [default: the model's own].")
    ] = None,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Run code (python: objects) that a checkpoint names for its model.")
    ] = False,
) -> None:
    """Generate text with a model."""
    import torch

    from llmfoundry_lite.devices import device_type
    from llmfoundry_lite.evaluation.loaded import generate_text, model_of
    from llmfoundry_lite.evaluation.models import locate_and_load_model

    device = torch.device(device_type())
    located = locate_and_load_model(where, tokenizer=tokenizer, device=device, trusts_code=trust_code)
    for note in located.notes:
        print(printable(note), file=sys.stderr)
    model = model_of(located)

    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    prompts = [prompt] if prompt is not None else read_prompts()
    for text in prompts:
        print(text, end="", flush=True)
        for piece in generate_text(model, located.tokenizer, text, max_new_tokens, device=device, **sampling):
            print(printable(piece, keep="\n\t"), end="", flush=True)  # a model may have learned to write escape codes
        print(flush=True)


def read_prompts() -> Iterator[str]:
    """Yield each line of standard input as a prompt.

    At a terminal, an empty line ends the input. Otherwise empty lines are skipped. Raises UserError if the input has no
    prompt, as in a batch job, or if a line is in another encoding.
    """
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    if is_terminal:
        print("enter one prompt per line; an empty line or Ctrl-D ends", file=sys.stderr)

    has_prompt = is_terminal
    while True:
        try:
            line = input("> " if is_terminal else "")
        except (EOFError, RuntimeError):  # RuntimeError: this process was started without standard input
            break
        except UnicodeDecodeError as error:
            advice = f"send text as {error.encoding}, or set PYTHONIOENCODING"
            raise UserError(f"standard input: {error}; {advice}") from None
        if line:
            has_prompt = True
            yield line
        elif is_terminal:
            break
    if not has_prompt:
        raise UserError(
            "standard input: no prompt there; give --prompt TEXT, or write one prompt per line to standard input"
        )


def replay_command(
    where: Annotated[str, typer.Argument(metavar="RUN", help="A run folder or a folder of checkpoints.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="baN..baM key=value", help="The states to replay between, and settings that differ on this machine."
        ),
    ] = None,
    num_ranks: Ranks = 1,
    trust_code: Annotated[
        bool,
        typer.Option(
            "--trust-code",
            help="Run the code (python: objects) and set the environment variables that the run recorded.",
        ),
    ] = False,
    use_recorded_remote: Annotated[
        bool,
        typer.Option(
            "--use-recorded-remote", help="Download data and checkpoints from the URLs that the run recorded."
        ),
    ] = False,
) -> None:
    """Train batches of a run again and compare them with its log.

    Compares data, losses, gradient norms and the state. Replay starts at checkpoint baN, or the newest one before it,
    and ends after batch M. By default it goes from the last checkpoint but one to the last. Nothing is saved. You can
    safely replay a run from somebody else: none of the run's code runs without --trust-code.

    Exits with 0 if the batches are bit-equal. Exits with 3 if they differ, even if other devices or kernels explain the
    difference.
    """
    from llmfoundry_lite.config.replayed import find_callbacks, find_code
    from llmfoundry_lite.config.schema import as_dict
    from llmfoundry_lite.launch.ranks import refuse_other_launchers, run_ranks
    from llmfoundry_lite.launch.replay import adapt_advice, compare_replay, plan_replay, write_replay
    from llmfoundry_lite.launch_train import check, prepare_environment
    from llmfoundry_lite.ranks.rank import rank_variables

    refuse_other_launchers()
    states = [argument for argument in arguments or () if argument.startswith("ba") and "=" not in argument]
    changes = [argument for argument in arguments or () if argument not in states]
    are_settings = all("=" in change for change in changes)
    if len(states) > 1 or not are_settings:
        raise ConfigError(f"replay: {' '.join(arguments or ())} given, expected baN..baM once, and key=value pairs")

    # Plan, and write the configuration of the replay into a folder that is removed at the end.
    options = {"trusts_code": trust_code, "uses_recorded_remote": use_recorded_remote}
    plan = plan_replay(where, states[0] if states else None, **options)
    with tempfile.TemporaryDirectory(prefix="llmfoundry-lite-replay-") as temporary:
        folder = Path(temporary) / "run"
        path = write_replay(plan, folder, num_ranks, changes, **options)

        # Check it as rank 0 would, before any rank starts.
        os.environ.update(rank_variables(0, num_ranks))
        try:
            config = check([path]).invocation.config
        except UserError as error:
            raise adapt_advice(error) from error.__cause__
        prepare_environment(config)

        start = "its seed" if plan.start is None else plan.start.name
        print(printable(f"training batches {plan.first_batch} to {plan.last_batch} of {where} again, from {start}"))
        code_of_run = ", ".join(find_code(as_dict(config)))
        callbacks = ", ".join(map(str, find_callbacks(plan.config)))
        if trust_code and code_of_run:
            print(printable(f"--trust-code lets the run's own code take part: {code_of_run}"))
        if callbacks and not trust_code:
            print(printable(f"without its callbacks {callbacks}, which --trust-code runs"))

        # Train the batches again, and compare.
        logs = Path(temporary) / "logs"
        exit_code = run_ranks("llmfoundry_lite.launch_replay", [path], num_ranks, logs)
        if exit_code != EXIT_DONE:
            raise typer.Exit(exit_code)
        outcome = compare_replay(plan, folder)
    print(printable(outcome.text))
    raise typer.Exit(EXIT_DONE if outcome.is_equal else EXIT_DIFFERS)
