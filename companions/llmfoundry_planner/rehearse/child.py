"""The process that rehearses: the run's own `train()`, as one rank of many, on a device that is not there.

`fork_server.py` starts it with the library of `cuda.c` in place of CUDA. It imports the training code once (`serve`),
and forks for each rehearsal. What is not there is replaced: the process group by torch's `fake` one, which exchanges
nothing, data by made-up samples, and numbers that the host reads from the device by plausible ones. Weights are not
initialised and nothing is saved. Everything else is the run's own code.

Without a server, `python -m llmfoundry_planner.rehearse.child FOLDER` measures on a device that is there.
"""

import dataclasses
import itertools
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llmfoundry_lite.config.callbacks_schema import LoggersConfig
from llmfoundry_lite.config.data_schema import LoaderConfig
from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.data.tokenizer_files import is_local_or_cached
from llmfoundry_lite.errors import OutOfMemoryError
from llmfoundry_lite.ranks.ending import run_and_exit
from llmfoundry_lite.ranks.lean_imports import HEAVY, import_lean
from llmfoundry_planner.rehearse.device import choose_kernels

GRADIENT_NORM = 1000.0
"""The gradient norm that the host reads. It is more than clipping allows, so that gradients are clipped."""
PARENT_POLL_SECONDS = 0.2
"""Time between two checks of a process whether its parent is still there."""


def serve(parent: int, server_folder: str) -> None:
    """Rehearse on request: read the folder of a `request.json` from each line of standard input, answer its exit code.

    parent: process id of the process that asks. server_folder: has the folders of all requests.
    """
    exit_with_parent(parent, server_folder)
    replace_the_world()
    import_lean(*HEAVY)
    import llmfoundry_lite.training.train  # noqa: F401 - takes longer than a small rehearsal

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            rehearse_in_fork(Path(line.strip()), server_folder)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def rehearse_in_fork(folder: Path, server_folder: str) -> None:
    """Rehearse the request in `folder`, and end this process. Its standard error goes to `stderr.txt` there."""
    null = os.open(os.devnull, os.O_RDWR)
    stderr_file = os.open(folder / "stderr.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(null, 0)
    os.dup2(null, 1)  # the server's answers go there
    os.dup2(stderr_file, 2)
    exit_with_parent(os.getppid(), server_folder)
    sys.argv = [sys.argv[0], str(folder)]
    run_and_exit(rehearse)


def rehearse(arguments: Sequence[str]) -> None:
    """Train and measure one rank. Write the measurements to `result.json`, also if training raises an error.

    arguments: the folder with the `request.json` of `fork_server.write_request`.
    """
    import torch

    from llmfoundry_lite.training.checkpointing import Checkpointing
    from llmfoundry_lite.training.train import train
    from llmfoundry_planner.rehearse.measure import Measure, record_history

    folder = Path(arguments[0])
    request = json.loads((folder / "request.json").read_text())
    os.environ.update(request["environment"])
    is_rehearsal = "REHEARSED_NAME" in os.environ  # else the device is real
    if is_rehearsal:
        os.environ.update(choose_kernels(torch._C._cuda_getArchFlags() or "", os.environ))

    config = rehearsed(load_train_config(request["arguments"]).config, request, folder)
    for name, value in config.environment.items():
        os.environ.setdefault(name, value)
    # Torch has read this variable when it was imported, before the run's environment was set.
    torch._C._accelerator_setAllocatorSettings(os.environ.get("PYTORCH_ALLOC_CONF", ""))
    replace_attributes(Checkpointing, _save=lambda self, state, logger, **options: None)
    record_history()

    started_at = time.monotonic()
    result: dict[str, Any] = {}
    try:
        train(config)
    except OutOfMemoryError:
        result["is_out_of_memory"] = True
        raise
    finally:
        result |= Measure.measurements
        result["seconds"] = time.monotonic() - started_at
        (folder / "result.json").write_text(json.dumps(result))


def rehearsed(config: TrainConfig, request: dict[str, Any], folder: Path) -> TrainConfig:
    """Return the configuration that a rehearsal trains with.

    It keeps the run's model, layout, precision, optimizer, schedule and callbacks. Everything that reads or writes
    outside of `folder` is left out: data, evaluation, loggers, checkpoints and blocks of companions.
    """
    num_data_ranks = layout_of(config, request["num_devices"], request["per_node"]).num_data_ranks
    loader = LoaderConfig(
        name="python:llmfoundry_planner.rehearse.data:load",
        kwargs={
            "num_tokens": config.max_seq_len,
            "vocab_size": config.model.vocab_size,
            "num_data_ranks": num_data_ranks,
        },
    )
    measure = {
        "python:llmfoundry_planner.rehearse.measure:Measure": {
            "num_batches": request["num_batches"],
            "devices_per_node": request["per_node"],
        }
    }
    # Operations are counted in one more batch.
    num_batches = request["num_batches"] + request["counts_operations"]
    return dataclasses.replace(
        config,
        train_loader=loader,
        eval_loader=None,
        eval_loaders={},
        eval_interval=Duration(0, "ep"),
        eval_first=False,
        icl_tasks=[],
        loggers=LoggersConfig(),
        progress_bar=False,
        log_to_console=False,
        export_at_end=False,
        run_folder=f"{folder}/run",
        save_folder=None,
        autoresume=False,
        load_path=None,
        max_wall_time=None,
        blocks={},
        stop_at=None,
        stop_after=Duration(num_batches, "ba"),
        callbacks=dataclasses.replace(config.callbacks, extra={**config.callbacks.extra, **measure}, profiler=None),
    )


def replace_attributes(owner: Any, **replacements: Any) -> None:
    """Set attributes of a module or class. Raises AttributeError for one that it does not have.

    Without this check, an attribute that has been renamed would silently stay the real one.
    """
    for name, replacement in replacements.items():
        if not hasattr(owner, name):
            raise AttributeError(f"rehearse: {owner} has no {name} to replace")
        setattr(owner, name, replacement)


def replace_the_world() -> None:
    """Replace the process group, exchanges with other ranks, and numbers that the host reads from the device.

    It changes attributes of modules for this process and all its forks. So it must be called before the run's own
    modules are imported, because they import some of these by name.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

    from llmfoundry_lite.parallel import fsdp
    from llmfoundry_lite.ranks import exchange, start
    from llmfoundry_lite.ranks.rank import this_rank

    real_init = dist.init_process_group
    real_backend = dist.get_backend
    real_all_to_all = dist.all_to_all_single

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        rank = this_rank()
        real_init("fake", rank=rank.rank, world_size=rank.world_size, store=dist.HashStore())

    def get_backend(group: Any = None) -> str:
        """Return the backend of the real device to our code and to Composer, which choose a device by it."""
        calling_module = sys._getframe(1).f_globals.get("__name__", "")
        return "nccl" if calling_module.startswith(("composer", "llmfoundry_lite")) else real_backend(group)

    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any,
        input_split_sizes: Any,
        group: Any = None,
    ) -> Any:
        """Send one element if this rank sends none, because the fake group receives what is sent."""
        if not input.numel():
            input = input.new_zeros(1)
            input_split_sizes = [1, *input_split_sizes[1:]]
        return real_all_to_all(output, input, output_split_sizes, input_split_sizes, group)

    def raise_on_all_ranks(error: Exception | None, group: Any = None) -> None:
        if error is not None:
            raise error

    replace_attributes(
        dist, init_process_group=init_process_group, get_backend=get_backend, all_to_all_single=all_to_all_single
    )
    # There is no other rank to exchange with on the host.
    replace_attributes(
        exchange,
        _device=lambda group: torch.device("cpu"),
        broadcast_json=lambda value, group=None, *, source=0: value,
        raise_on_all_ranks=raise_on_all_ranks,
    )
    replace_attributes(start, loopback_store=lambda timeout: {}, open_host_group=lambda timeout: None)
    replace_attributes(fsdp, initialise_weights=lambda model, seed: None)
    # torch refuses CUDA in a fork, because a real device's state would be lost.
    replace_attributes(torch.cuda, _is_in_bad_fork=lambda: False)
    # cuDNN asks the device for more than the library of `cuda.c` can answer.
    torch.backends.cuda.enable_cudnn_sdp(False)
    replace_numbers()
    replace_stage_votes()


def replace_stage_votes() -> None:
    """Make all stages of a pipeline agree, on the host, where torch asks them for a vote before it sends shapes."""
    import torch
    from torch.distributed.pipelining import PipelineStage

    def make_unanimous(vote: Any) -> Any:
        def agree(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            return torch.ones_like(vote(self, *args, **kwargs), device="cpu").to(self.device)

        return agree

    for name in ("_warmup_forward_vote", "_warmup_backward_result"):
        if hasattr(PipelineStage, name):  # torch before 2.13 has no votes
            setattr(PipelineStage, name, make_unanimous(getattr(PipelineStage, name)))


def replace_numbers() -> None:
    """Replace numbers that the host reads from the device, where nothing is computed. Each read is still made."""
    from llmfoundry_lite.training import builders, data_builders, gradient_step
    from llmfoundry_lite.training.agreement import Agreement
    from llmfoundry_lite.training.gradient_step import Measured
    from llmfoundry_lite.training.trainer import ParallelTrainer

    real_count = data_builders.DataSpec.get_num_tokens_in_batch
    real_load = builders.load_configured_tokenizer
    real_iterate = ParallelTrainer._iter_dataloader
    real_agree = Agreement._agree

    def with_plausible_result(real_measure: Callable[..., Any]) -> Callable[..., Measured]:
        def measure(*args: Any) -> Measured:
            real_measure(*args)
            return Measured(GRADIENT_NORM, 1.0, 0)

        return measure

    def count_tokens(self: Any, batch: Any, token_type: str = "total") -> int:
        real_count(self, batch, token_type)
        return batch["input_ids"].numel()

    def agree(self: Agreement, counted: Any, *args: Any, **options: Any) -> int:
        """Add up counts as if each data rank had counted as much as this one."""
        answer = real_agree(self, counted, *args, **options)
        sums = {}
        for name in counted._fields:
            if name.startswith("num_"):
                sums[name] = self.ranks.size * getattr(counted, name)
        self.upcoming = counted._replace(**sums)
        return answer

    def load_tokenizer(config: Any) -> Any:
        """Return a tokenizer that only knows the token that ends documents, if the real one is not on this machine."""
        return real_load(config) if is_local_or_cached(config.name) else SimpleNamespace(eos_token_id=0)

    def iterate(self: Any, trainer_mode: Any) -> Any:
        """End after the number of batches that the host knows; the real loop ends by a number on the device."""
        num_batches = self.state.dataloader_len
        return itertools.islice(real_iterate(self, trainer_mode), None if num_batches is None else int(num_batches))

    replace_attributes(ParallelTrainer, _iter_dataloader=iterate)
    replace_attributes(Agreement, _agree=agree)
    replace_attributes(builders, load_configured_tokenizer=load_tokenizer)
    replace_attributes(
        gradient_step,
        measure=with_plausible_result(gradient_step.measure),
        measure_exactly=with_plausible_result(gradient_step.measure_exactly),
    )
    replace_attributes(data_builders.DataSpec, get_num_tokens_in_batch=count_tokens)


def exit_with_parent(parent: int, folder: str) -> None:
    """Start a thread that removes `folder` and ends this process as soon as its parent has ended, even by SIGKILL.

    parent: process id. A process whose parent has ended gets another one.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    if len(sys.argv) == 2:  # FOLDER: measure on a device that is there
        run_and_exit(rehearse)
    serve(int(sys.argv[1]), sys.argv[2])
