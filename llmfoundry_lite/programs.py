"""`lf.train`, `lf.evaluate` and `lf.runs`: train, evaluate and list runs from a Python program.

The first two turn their arguments into those of a command line (`_arguments_of_launch`) and then call the launch of the
command in the program's own process (`_call_as_rank`), so that a program and a command do the same.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from llmfoundry_lite import companions
from llmfoundry_lite.config.yaml_text import read_yaml
from llmfoundry_lite.errors import ConfigError, printable
from llmfoundry_lite.ranks.ending import Preempted
from llmfoundry_lite.ranks.output import ignoring_output_errors
from llmfoundry_lite.ranks.rank import adopt_srun, this_rank
from llmfoundry_lite.ranks.signals import signals_given_back
from llmfoundry_lite.report.reading import Run, read_run

if TYPE_CHECKING:
    from llmfoundry_lite.evaluation.results import Results

T = TypeVar("T")
Configuration = str | os.PathLike[str] | Mapping[str, Any] | DictConfig | Sequence[str | os.PathLike[str]]


def train(config: Configuration, **overrides: Any) -> Run:
    """Train with the configuration of a YAML file or a mapping, and return the run.

    `config` is a file, the name of one that comes with the package, a list of them, or a mapping, which needs a
    `run_name`. Overrides replace its values; write a key with dots as `**{"model.d_model": 256}`.

    >>> run = lf.train("runs/tiny/config.yaml", run_folder="runs/again", max_duration="2ba")
    attention: ...
    saved ba2
    >>> run
    <runs/again: batches 1 to 2>

    One process is one rank. Under `composer`, `torchrun` or `srun` every rank calls it, and each gets the run. Call it
    in the main thread, because it handles signals. If the run is asked to stop, it saves and the process exits with 75.

    Raises ConfigError, DataError or CheckpointError with a text of one line, if possible before anything heavy starts.
    """
    from llmfoundry_lite.launch_train import launch
    from llmfoundry_lite.ranks.lean_imports import FULL_IMPORTS

    os.environ.setdefault(FULL_IMPORTS, "1")  # the program may need modules that a launch skips
    given, arguments = _arguments_of_launch(config, overrides)
    if given is not None:
        # The default name of a run is that of its YAML file, and a mapping has none.
        has_name = given.get("run_name") or "run_name" in overrides or os.environ.get("RUN_NAME")
        if not has_name:
            raise ConfigError("the configuration: run_name: none given, and the run's folder is named for it")

    trained = _call_as_rank(lambda: launch(arguments, given))
    assert trained is not None, "no dry run was asked for"
    return read_run(trained.run_folder)


def evaluate(config: Configuration, **overrides: Any) -> "dict[str, Results]":
    """Evaluate models with the configuration of a YAML file or a mapping; return name of a model -> its results.

    `config` and overrides are given as to `train`. A mapping without `icl_tasks` runs every task whose data file
    exists. A model is given as in a YAML, or as what `lf.load` returned. Then its checkpoint is evaluated, without any
    changes to the weights in memory. Each result has `tasks`, by name, with their metrics; the `average` of the tasks'
    accuracies, each by the task's own metric; `items`, with the items of each task; and the `path` of its file.
    `lf.compare` takes two results.

    >>> found = lf.evaluate("words.yaml", models={"tiny": "runs/tiny"}, results_folder="words")
    words, accuracy ± standard error
    ...
    >>> found["tiny"].tasks["words/0-shot"]["n"], found["tiny"].path.name
    (2, 'tiny.json')

    One process is one rank, and evaluates alone; under a launcher every rank calls it.

    Raises ConfigError, DataError or CheckpointError.
    """
    from llmfoundry_lite.evaluation.results import read_with_items
    from llmfoundry_lite.launch_eval import launch

    given, arguments = _arguments_of_launch(config, overrides)
    all_results = _call_as_rank(lambda: launch(arguments, given))
    by_model = {results.model: results for results in all_results}
    for model, results in by_model.items():
        if results.path.exists():  # rank 0 has written it; another node may not see it
            by_model[model] = read_with_items(results.path)
    return by_model


def runs(folder: str | os.PathLike[str] = "runs") -> list[Any]:
    """List the runs in a folder by name, with the state of each. No torch is needed.

    Each run is read as it is now; `look()` reads what has been written since. Functions that take the path of a run's
    folder also take the run itself, as in `lf.load(run)`. `folder` may also be a folder of checkpoints of runs, or a
    URL such as `s3://bucket`; runs there are described by their newest checkpoints and launches. A run's own folder
    gives that run.

    >>> lf.runs("runs")
    [<runs/tiny: done at batch 6, loss ..., saved ba6>]
    >>> run = lf.runs("runs")[0]
    >>> run.batch, run.has_ended, run.progress, run.last_checkpoint(), run.config["global_train_batch_size"]
    (6, True, 1.0, 'ba6', 8)

    Raises DataError if there is no such folder, CheckpointError for a URL that cannot be read, and ConfigError without
    the companion `llmfoundry_ops`.
    """
    return companions.load("llmfoundry_ops.runs:list_runs", "lf.runs")(folder)


def _arguments_of_launch(
    config: Configuration, overrides: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, list[str]]:
    """Turn the arguments of `lf.train` or `lf.evaluate` into `given` and `arguments` of a launch.

    `lf.train("mpt-1b", seed=3)` gives (None, ["mpt-1b", "seed=3"]), and `lf.train({"seed": 17, …}, seed=3)` gives
    ({"seed": 17, …}, ["seed=3"]).

    Raises ConfigError for values that YAML cannot hold.
    """
    try:
        # Values become JSON, which YAML includes. Paths become text.
        settings = [f"{key}={json.dumps(value, default=os.fspath)}" for key, value in overrides.items()]
        if isinstance(config, DictConfig):
            config = dict(OmegaConf.to_container(config))  # type: ignore[arg-type] - a mapping is not a list
        if isinstance(config, Mapping):
            # A mapping becomes text and is read again, so that the rules for a YAML file apply to it.
            text = json.dumps(config, default=os.fspath)
            return read_yaml(text), settings
    except TypeError as error:
        raise ConfigError(f"the configuration: {error}; expected what YAML can hold") from None

    # Otherwise the configuration is one or several YAML files, by path or by name.
    files = [config] if isinstance(config, str | os.PathLike) else config
    paths = [str(os.fspath(file)) for file in files]
    return None, [*paths, *settings]


def _call_as_rank(call: Callable[[], T]) -> T:
    """Call a launch as one rank within the user's program, and return its result.

    Afterwards signals are the program's again. The process group of a single rank is destroyed, unless the program had
    made it. A process group of several ranks is kept for the next call, because the ranks could not make another one on
    the same store.

    Collective, if the program runs under a launcher. Raises SystemExit with code 75 if the run was asked to stop.
    """
    # Remember what the launch will change.
    import torch.distributed as dist

    had_process_group = dist.is_initialized()
    try:
        adopt_srun()
        with signals_given_back(), ignoring_output_errors():
            result = call()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()  # until rank 0 has written the end of the run
    except Preempted as error:
        if this_rank().rank == 0:
            print(printable(str(error)), file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None

    is_single_rank = dist.is_initialized() and dist.get_world_size() == 1
    if is_single_rank and not had_process_group:
        dist.destroy_process_group()
    return result
