"""The process that rehearses: the run's own `train()`, as one rank of many, on devices that are not there.

Started by `rehearse.py` with the library of `cuda.c` preloaded. Owns what is replaced: the process group is torch's
`fake` one, data are made up, weights are not drawn, nothing is saved. All else is the run's own code.
"""

import dataclasses
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import LoaderConfig, LoggersConfig, TrainConfig
from llmfoundry_lite.ranks.ending import run_and_exit


def main(arguments: Sequence[str]) -> None:
    """`arguments`: a JSON file, `{"arguments", "folder", "num_batches", "per_node", "world_size"}`."""
    request = json.loads(Path(arguments[0]).read_text())
    end_with_parent(request["parent"], request["folder"])
    config = rehearsed(load_train_config(request["arguments"]).config, request)
    for name, value in config.environment.items():
        os.environ.setdefault(name, value)  # before torch looks
    replace_the_world()
    from llmfoundry_lite.rehearse.measure import Measure, record_memory
    from llmfoundry_lite.training.train import train

    record_memory()
    began = time.monotonic()
    train(config)
    found = {**Measure.found, "seconds": time.monotonic() - began}
    Path(request["result"]).write_text(json.dumps(found))


def rehearsed(config: TrainConfig, request: dict[str, Any]) -> TrainConfig:
    """The same model, layout, precision, optimizer and schedule; nothing that reads or writes outside `folder`."""
    num_batches = request["num_batches"]
    loader = LoaderConfig(
        name="python:llmfoundry_lite.rehearse.data:load",
        kwargs={
            "num_tokens": config.max_seq_len,
            "vocab_size": config.model.vocab_size,
            "num_data_ranks": layout_of(config, request["world_size"], request["per_node"]).num_data_ranks,
        },
    )
    measure = {
        "python:llmfoundry_lite.rehearse.measure:Measure": {
            "num_batches": num_batches,
            "devices_per_node": request["per_node"],
        }
    }
    return dataclasses.replace(
        config,
        train_loader=loader,
        eval_loader=None,
        eval_interval=0,
        eval_first=False,
        icl_tasks=[],
        loggers=LoggersConfig(),
        progress_bar=False,
        log_to_console=False,
        export_at_end=False,
        run_folder=f"{request['folder']}/run",
        save_folder=None,
        autoresume=False,
        load_path=None,
        max_wall_time=None,
        stop_after=f"{num_batches + 1}ba",
        callbacks=dataclasses.replace(config.callbacks, extra={**config.callbacks.extra, **measure}),
    )


def replace_the_world() -> None:
    """Before anything of the run is imported: modules keep what they have imported by name."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

    from llmfoundry_lite.parallel import fsdp
    from llmfoundry_lite.ranks import exchange
    from llmfoundry_lite.ranks.rank import this_rank

    here, real_init, real_backend = this_rank(), dist.init_process_group, dist.get_backend

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        real_init("fake", rank=here.rank, world_size=here.world_size, store=dist.HashStore())

    def get_backend(group: Any = None) -> str:
        """Ours and Composer's code asks in order to choose a device: as on the real one."""
        asks = sys._getframe(1).f_globals.get("__name__", "")
        return "nccl" if asks.startswith(("composer", "llmfoundry_lite")) else real_backend(group)

    dist.init_process_group = init_process_group
    dist.get_backend = get_backend
    exchange.open_host_group = lambda timeout: None
    exchange._device = lambda group: torch.device("cpu")
    exchange.tell_all = lambda value, group=None, *, source=0: value  # nobody else is there to tell
    fsdp.initialise_weights = lambda model, seed: None
    # cuDNN's library asks the device for more than a device that is not there can say.
    torch.backends.cuda.enable_cudnn_sdp(False)

    from llmfoundry_lite.training.checkpointing import Checkpointing

    Checkpointing._save = lambda self, state, logger: None


def end_with_parent(parent: int, folder: str) -> None:
    """Should the parent be killed, leave nothing behind."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    run_and_exit(main)
