"""The process that rehearses: the run's own `train()`, as one rank of many, on devices that are not there.

Started by `fork_server.py` with the library of `cuda.c` preloaded; each rehearsal is a fork of it. Replaced are: the
process group by torch's `fake` one, data by made-up samples, and numbers that the host reads by plausible ones. Weights
are not initialised and nothing is saved. All else is the run's own code.
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
from llmfoundry_lite.data.tokenizer import is_local_or_cached
from llmfoundry_lite.errors import OutOfMemoryError
from llmfoundry_lite.ranks.ending import run_and_exit
from llmfoundry_lite.ranks.lean_imports import HEAVY, import_lean
from llmfoundry_planner.rehearse.device import choose_kernels

GRADIENT_NORM = 1000.0
"""The norm that the host reads: more than clipping allows, so that gradients are clipped."""


def main(parent: int, folder: str) -> None:
    """Answer each line of standard input, a folder with a `request.json`, with an exit code."""
    end_with(parent, folder)
    replace_the_world()
    import_lean(*HEAVY)
    import llmfoundry_lite.training.train  # noqa: F401 - takes longer than a small rehearsal

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            rehearse_in_this_process(Path(line.strip()), folder)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def rehearse_in_this_process(place: Path, folder: str) -> None:
    """Train one rank, with `place` as its folder, and end this process."""
    nothing = os.open(os.devnull, os.O_RDWR)
    said = os.open(place / "stderr.txt", os.O_WRONLY | os.O_CREAT)
    for descriptor, target in ((nothing, 0), (nothing, 1), (said, 2)):
        os.dup2(descriptor, target)
    end_with(os.getppid(), folder)
    sys.argv = [sys.argv[0], str(place)]
    run_and_exit(rehearse)


def rehearse(arguments: Sequence[str]) -> None:
    """Train one rank and write result.json. `arguments`: the folder of its request.json, by `fork_server.py`."""
    import torch

    from llmfoundry_lite.training.checkpointing import Checkpointing
    from llmfoundry_lite.training.train import train
    from llmfoundry_planner.rehearse.measure import Measure, record

    folder = Path(arguments[0])
    request = json.loads((folder / "request.json").read_text())
    os.environ.update(request["environment"])
    if "REHEARSED_NAME" in os.environ:  # no device is there
        os.environ.update(choose_kernels(torch._C._cuda_getArchFlags() or "", os.environ))
    config = rehearsed(load_train_config(request["arguments"]).config, request, folder)
    for name, value in config.environment.items():
        os.environ.setdefault(name, value)
    # Torch has looked at its part of the environment when it was imported.
    torch._C._accelerator_setAllocatorSettings(os.environ.get("PYTORCH_ALLOC_CONF", ""))
    replace(Checkpointing, _save=lambda self, state, logger, **options: None)
    record()
    began = time.monotonic()
    found: dict[str, Any] = {}
    try:
        train(config)
    except OutOfMemoryError:
        found["is_out_of_memory"] = True
        raise
    finally:
        found |= {**Measure.found, "seconds": time.monotonic() - began}
        (folder / "result.json").write_text(json.dumps(found))


def rehearsed(config: TrainConfig, request: dict[str, Any], folder: Path) -> TrainConfig:
    """Keep model, layout, precision, optimizer and schedule; drop all that reads or writes outside `folder`."""
    num_batches = request["num_batches"]
    loader = LoaderConfig(
        name="python:llmfoundry_planner.rehearse.data:load",
        kwargs={
            "num_tokens": config.max_seq_len,
            "vocab_size": config.model.vocab_size,
            "num_data_ranks": layout_of(config, request["num_devices"], request["per_node"]).num_data_ranks,
        },
    )
    measure = {
        "python:llmfoundry_planner.rehearse.measure:Measure": {
            "num_batches": num_batches,
            "devices_per_node": request["per_node"],
        }
    }
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
        stop_after=Duration(num_batches + request["counts_operations"], "ba"),
        callbacks=dataclasses.replace(config.callbacks, extra={**config.callbacks.extra, **measure}, profiler=None),
    )


def replace(owner: Any, **new: Any) -> None:
    """Set attributes that must be there already: a renamed one would silently stay the real one."""
    for name, value in new.items():
        if not hasattr(owner, name):
            raise AttributeError(f"rehearse: {owner} has no {name} to replace")
        setattr(owner, name, value)


def replace_the_world() -> None:
    """Replace devices, other ranks and numbers, before the run's own modules import them by name."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

    from llmfoundry_lite.parallel import fsdp
    from llmfoundry_lite.ranks import exchange, start
    from llmfoundry_lite.ranks.rank import this_rank

    real_init, real_backend, real_all_to_all = dist.init_process_group, dist.get_backend, dist.all_to_all_single

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        here = this_rank()
        real_init("fake", rank=here.rank, world_size=here.world_size, store=dist.HashStore())

    def get_backend(group: Any = None) -> str:
        """Answer as on the real device: our code and Composer's choose a device by it."""
        asks = sys._getframe(1).f_globals.get("__name__", "")
        return "nccl" if asks.startswith(("composer", "llmfoundry_lite")) else real_backend(group)

    def all_to_all_single(received: torch.Tensor, sent: torch.Tensor, taken: Any, given: Any, group: Any = None) -> Any:
        """Send a number where this rank sends none: the fake group receives what is sent."""
        if not sent.numel():
            sent, given = sent.new_zeros(1), [1, *given[1:]]
        return real_all_to_all(received, sent, taken, given, group)

    def raise_on_all_ranks(error: Exception | None, group: Any = None) -> None:
        if error is not None:
            raise error

    replace(dist, init_process_group=init_process_group, get_backend=get_backend, all_to_all_single=all_to_all_single)
    replace(
        exchange,  # there is no other rank
        _device=lambda group: torch.device("cpu"),
        broadcast_json=lambda value, group=None, *, source=0: value,
        raise_on_all_ranks=raise_on_all_ranks,
    )
    replace(start, loopback_store=lambda timeout: {}, open_host_group=lambda timeout: None)
    replace(fsdp, initialise_weights=lambda model, seed: None)
    replace(torch.cuda, _is_in_bad_fork=lambda: False)  # nothing of a device that is not there is lost in a fork
    # cuDNN's library asks the device for more than a device that is not there can say.
    torch.backends.cuda.enable_cudnn_sdp(False)
    replace_numbers()
    replace_votes()


def replace_votes() -> None:
    """Tell all stages of a pipeline the shapes that they send, instead of letting them ask each other."""
    import torch
    from torch.distributed.pipelining import PipelineStage

    def agreeing(vote: Any) -> Any:
        def ask(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            return torch.ones_like(vote(self, *args, **kwargs), device="cpu").to(self.device)

        return ask

    for name in ("_warmup_forward_vote", "_warmup_backward_result"):
        if hasattr(PipelineStage, name):  # torch before 2.13 does not ask
            setattr(PipelineStage, name, agreeing(getattr(PipelineStage, name)))


def replace_numbers() -> None:
    """Replace numbers that the host reads: nothing is computed. Each read is still made."""
    from llmfoundry_lite.training import builders, gradient_step
    from llmfoundry_lite.training.agreement import Agreement
    from llmfoundry_lite.training.gradient_step import Measured
    from llmfoundry_lite.training.trainer import ParallelTrainer

    real_count = builders.DataSpec.get_num_tokens_in_batch
    real_load, real_iterate = builders.load_tokenizer, ParallelTrainer._iter_dataloader
    real_agree = Agreement._agree

    def measuring(real: Callable[..., Any]) -> Callable[..., Measured]:
        def measure(*args: Any) -> Measured:
            real(*args)
            return Measured(GRADIENT_NORM, 1.0, 0)

        return measure

    def count(self: Any, batch: Any, token_type: str = "total") -> int:
        real_count(self, batch, token_type)
        return batch["input_ids"].numel()

    def agree(self: Agreement, counted: Any, *more: Any) -> int:
        """Assume that every data rank has counted as much as this one."""
        answer = real_agree(self, counted, *more)
        sums = {name: self.ranks.size * getattr(counted, name) for name in counted._fields if name.startswith("num_")}
        self.upcoming = counted._replace(**sums)
        return answer

    def load_tokenizer(name: str) -> Any:
        """Make up the token that ends documents if the tokenizer is on another machine."""
        return real_load(name) if is_local_or_cached(name) else SimpleNamespace(eos_token_id=0)

    def iterate(self: Any, trainer_mode: Any) -> Any:
        """End the loop by the host's number; its own is on the device."""
        num_batches = self.state.dataloader_len
        return itertools.islice(real_iterate(self, trainer_mode), None if num_batches is None else int(num_batches))

    replace(ParallelTrainer, _iter_dataloader=iterate)
    replace(Agreement, _agree=agree)
    replace(builders, load_tokenizer=load_tokenizer)
    exactly = measuring(gradient_step.measure_exactly)
    replace(gradient_step, measure=measuring(gradient_step.measure), measure_exactly=exactly)
    replace(builders.DataSpec, get_num_tokens_in_batch=count)


def end_with(parent: int, folder: str) -> None:
    """Leave nothing behind if the process that waits for this one is killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    if len(sys.argv) == 2:  # on a device that is there
        run_and_exit(rehearse)
    main(int(sys.argv[1]), sys.argv[2])
