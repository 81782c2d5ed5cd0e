"""Train a model from a configuration: build, fit, export. Composer's loop, our parts."""

import contextlib
import datetime
import os
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import yaml
from composer import Trainer
from composer.core import Callback, State
from composer.loggers import Logger
from torch.distributed.tensor import DTensor

from llmfoundry_lite import devices
from llmfoundry_lite.checkpoint.state import DTYPE_NAMES, DTYPES, in_row_order, model_tensors, row_orders
from llmfoundry_lite.config.layout import layout_here
from llmfoundry_lite.config.schema import Duration, TrainConfig, as_dict
from llmfoundry_lite.config.stages import takes_microbatches
from llmfoundry_lite.convert.huggingface import can_export, export_model
from llmfoundry_lite.data.tokenizer import is_local_or_cached, load_tokenizer
from llmfoundry_lite.errors import EXIT_PREEMPTED, OutOfMemoryError, UserError
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.launch.status import start_guard, write_ended_early, write_status
from llmfoundry_lite.plan.memory import advise_less_memory, slots_of
from llmfoundry_lite.ranks.ending import (
    EXIT_RETRY,
    Preempted,
    announced_preemption,
    cause_of,
    exit_code_of,
    is_lost_peer,
    leaving_because,
    raise_when_interrupted,
)
from llmfoundry_lite.ranks.exchange import broadcast_json, gather_distinct, receive_from, send_to_main
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_lite.ranks.start import choose_device, start_process_group
from llmfoundry_lite.training.adapter import LanguageModel
from llmfoundry_lite.training.agreement import Agreement
from llmfoundry_lite.training.builders import (
    build_callbacks,
    build_eval_interval,
    build_evaluators,
    build_mirrors,
    build_model,
    build_optimizer,
    build_preemption,
    build_train_data,
)
from llmfoundry_lite.training.checkpointing import Checkpointing
from llmfoundry_lite.training.gradients import GradientStep
from llmfoundry_lite.training.in_context import InContext
from llmfoundry_lite.training.islands import Islands
from llmfoundry_lite.training.loggers import METRICS, WANDB_ID, RunLog, clear_disk_errors
from llmfoundry_lite.training.memory import explain_out_of_memory, is_out_of_memory
from llmfoundry_lite.training.microbatch import choose_microbatch_size
from llmfoundry_lite.training.preemption import REASONS, Preemption
from llmfoundry_lite.training.schedule import progress_of
from llmfoundry_lite.training.start import Start, find_start
from llmfoundry_lite.training.trainer import GroupedTrainer

STATUS_SECONDS = 5.0
"""A run that is running says where it is that often at most."""
LONGEST_WAIT = datetime.timedelta(days=7)


def train(config: TrainConfig) -> None:
    """Run `config` to its end. What it leaves in the run folder: `docs/getting-started.md`.

    Raises UserError for what the user can mend; other ranks' failures surface as torch's communication errors.
    """
    raise_when_interrupted()  # Composer has installed its own handlers when it was imported
    devices.keep_freed_memory()
    if config.deterministic:
        make_deterministic()
    choose_device(devices.device_type())
    start_process_group(devices.device_type(), config.dist_timeout)
    run = RunFolder(config)
    preemption = build_preemption(config, run.leave_late, run.note_request, run.leave_at_once)
    trainer, checkpointing, islands = None, None, None
    try:
        islands = Islands(config) if config.islands is not None else None
        start = find_start(config)
        trainer, checkpointing = build_trainer(config, run, preemption, start, islands)
        preemption.listen()
        choose_microbatch(config, trainer)
        if islands is not None and progress_of(trainer.state, Duration.parse(config.max_duration)) < 1:
            islands.member.on_evicted = run.leave_late
            islands.enter(trainer.state, trainer.logger, checkpointing)
        run.start(trainer, checkpointing)
        run_missed_evaluation(trainer, run, checkpointing)
        if progress_of(trainer.state, Duration.parse(config.max_duration)) < 1:
            if config.eval_first and int(trainer.state.timestamp.batch) == 0 and evaluate(trainer) and run.is_main:
                run.log.write(trainer.state)
            trainer.fit()
        if checkpointing.was_preempted_by:
            raise Preempted(checkpointing.preempted_text(trainer.state), orderly=True)
        run.finish("stopped" if checkpointing.was_stopped else "done", trainer)
        if config.export_at_end and not checkpointing.was_stopped:
            export(config, trainer, run)
        if islands is not None:
            islands.close(has_finished=not checkpointing.was_stopped)
    except BaseException as error:
        if islands is not None:
            islands.close()
        preempted = as_preempted(error, preemption)
        told = preempted or explain_memory(error, config, trainer) or error
        if isinstance(told, UserError):
            told.has_lost = (
                checkpointing is not None and trainer is not None and checkpointing.would_lose(trainer.state)
            )
        may_come_back = preempted is not None or exit_code_of(told) in (EXIT_PREEMPTED, EXIT_RETRY)
        run.fail("preempted" if may_come_back else "failed", str(preempted) if preempted else cause_of(told))
        if preempted is None:
            if told is error:
                raise
            raise told from error
        preemption.consume_stop_file()
        if preempted.is_orderly and trainer is not None:
            trainer.close()
        preemption.stop_polling_store()
        raise preempted from None
    preemption.consume_stop_file()
    trainer.close()
    preemption.stop_polling_store()


def as_preempted(error: BaseException, preemption: Preemption) -> Preempted | None:
    """What to leave as when asked to leave, or when a peer that was asked has left without waiting for us."""
    if isinstance(error, Preempted):
        return error
    reason = REASONS[preemption.reason] or announced_preemption()
    if reason and is_lost_peer(error):
        return Preempted(f"{leaving_because(reason)} while another rank was leaving; the last save stands")
    return None


def explain_memory(error: BaseException, config: TrainConfig, trainer: Trainer | None) -> OutOfMemoryError | None:
    if not is_out_of_memory(error):
        return None
    size = config.first_microbatch_size(config.global_train_batch_size // layout_here(config).num_data_ranks)
    if trainer and isinstance(trainer.state.device_train_microbatch_size, int):
        size = trainer.state.device_train_microbatch_size
    when = f"in batch {batch_of(trainer) + 1}" if trainer else "while the run was built"
    return explain_out_of_memory(error, config, when, size)


def make_deterministic() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it, before its first product
    torch.use_deterministic_algorithms(True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - a property of a module


def build_trainer(
    config: TrainConfig, run: "RunFolder", preemption: Preemption, start: Start, islands: Islands | None = None
) -> tuple[Trainer, Checkpointing]:
    layout = layout_here(config)
    ranks = layout.data_ranks(this_rank().rank)
    train_data = build_train_data(config, layout)
    evaluators = build_evaluators(config, layout)
    model = build_model(config, layout)
    agreement = Agreement(ranks, preemption)
    callbacks = build_callbacks(config, ranks, model, preemption, agreement, start, islands)
    if islands is not None:
        islands.attach(agreement, next(callback for callback in callbacks if isinstance(callback, GradientStep)))
    trainer = GroupedTrainer(
        ranks=ranks,
        agreement=agreement,
        islands=islands,
        device_batch_size=config.global_train_batch_size // ranks.size,
        model=model,
        train_dataloader=train_data,
        eval_dataloader=evaluators or None,
        eval_interval=build_eval_interval(config, preemption) if evaluators else 0,
        eval_subset_num_batches=config.eval_subset_num_batches if evaluators else -1,
        optimizers=build_optimizer(config, model, layout),
        max_duration=str(Duration.parse(config.max_duration)),
        callbacks=[*callbacks, run],
        loggers=[run.log] if run.is_main else [],
        run_name=config.run_name,
        device="gpu" if devices.device_type() == "cuda" else "cpu",
        precision="fp32",  # the policy of parallel/fsdp.py does the casting
        device_train_microbatch_size=config.first_microbatch_size(config.global_train_batch_size // ranks.size),
        accumulate_train_batch_on_tokens=config.accumulate_train_batch_on_tokens,
        seed=config.seed,
        dist_timeout=config.dist_timeout,
        progress_bar=False,
        log_to_console=False,
        python_log_level=config.python_log_level,
    )
    return trainer, next(callback for callback in callbacks if isinstance(callback, Checkpointing))


def choose_microbatch(config: TrainConfig, trainer: Trainer) -> None:
    """With everything in place that takes memory: the model, and the optimizer's state if it has been restored."""
    if config.device_train_microbatch_size is None and dist.get_rank() == 0:
        say_whole_batch(config)
    if config.device_train_microbatch_size != "auto":
        return
    layout = layout_here(config)
    size, measured = choose_microbatch_size(
        cast(LanguageModel, trainer.state.model),
        trainer.state.optimizers[0],
        config.global_train_batch_size // layout.num_data_ranks,
        config.max_seq_len,
        slots_of(config),
        accumulates=not config.reduces_every_microbatch,
        advise=partial(advise_less_memory, config, layout, devices.device_type()),
        takes=partial(takes_microbatches, config.pipeline) if layout.pipeline > 1 else lambda num_microbatches: True,
    )
    if config.compile_config is not None or cast(LanguageModel, trainer.state.model).attn_impl == "flex":
        torch._dynamo.reset()  # what was compiled for other sizes counts towards its limit, and makes sizes dynamic
    trainer.state.device_train_microbatch_size = size
    if dist.get_rank() == 0:
        print(f"device_train_microbatch_size: auto is {size}: {measured}", flush=True)


def say_whole_batch(config: TrainConfig) -> None:
    """LLM Foundry measures what fits, though Composer cannot on a CPU. A pipeline has a default of its own."""
    if devices.device_type() != "cpu" and config.pipeline.pipeline_parallel_degree == 1:
        size = config.first_microbatch_size(config.global_train_batch_size // layout_here(config).num_data_ranks)
        print(
            f"device_train_microbatch_size: not given, so each device computes its {size} samples at once; auto, LLM "
            "Foundry's default, computes as many at a time as fit",
            flush=True,
        )


def run_missed_evaluation(trainer: Trainer, run: "RunFolder", checkpointing: Checkpointing) -> None:
    """Of the batch that the run carries on from, if the launch before had to leave in the middle of it."""
    if not checkpointing.run_state.owes_evaluation:
        return
    batch, evaluators = int(trainer.state.timestamp.batch), trainer.state.evaluators
    last_metric = f"{evaluators[-1].label}/loss" if evaluators else "eval/icl/"
    # A run that is done is launched again at times, and has been evaluated by then.
    is_made_up = run.is_main and any(key.startswith(last_metric) for key in run.log.record_of(batch))
    if not broadcast_json(is_made_up) and evaluate(trainer) and run.is_main:
        run.log.add_to(batch)
    checkpointing.run_state.owes_evaluation = False


def evaluate(trainer: Trainer) -> bool:
    """All evaluations there are, outside of the loop. Whether there are any."""
    tasks = [callback for callback in trainer.state.callbacks if isinstance(callback, InContext)]
    for callback in tasks:
        callback.evaluate(trainer.state, trainer.logger)
    if trainer.state.evaluators:
        trainer.eval()
    return bool(tasks or trainer.state.evaluators)


def export(config: TrainConfig, trainer: Trainer, run: "RunFolder") -> None:
    """Gather the weights on rank 0 and write them for plain transformers, if its layouts can hold them.

    The run is done by then, whatever becomes of this: a failure is said in one line, and `checkpoint export` repeats
    it. The other ranks wait for rank 0 as long as it takes, and in no collective.
    """
    folder, reason = run.folder / "huggingface", can_export(config.model)
    if reason is None:
        try:
            weights = gather_weights(cast(LanguageModel, trainer.state.model).model)
            if run.is_main:
                write_export(config, weights, folder)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            reason += f"; `llmfoundry-lite checkpoint export {run.folder} {folder}` makes up for it"
    if run.is_main:
        print(f"exported to {folder}" if reason is None else f"not exported to {folder}: {reason}", flush=True)
    wait_for_main("exported")


def gather_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All tensors, whole, in rank 0's host memory. The ranks that have a tensor put it together; of a stage that rank 0
    does not have, the first rank then sends it."""
    tensors, aliases = model_tensors(model)
    orders, rank = row_orders(model, tensors), dist.get_rank()
    weights: dict[str, torch.Tensor] = {}
    for held, ranks in gather_distinct([[key, DTYPE_NAMES[t.dtype], *t.shape] for key, t in tensors.items()]):
        for key, dtype, *shape in held:
            if rank in ranks:
                tensor = tensors[key].detach()
                whole = put_together(tensor) if isinstance(tensor, DTensor) else tensor
                if rank == ranks[0]:
                    whole = in_row_order(whole.cpu(), orders[key]) if key in orders else whole.cpu()
                    if rank == 0:
                        weights[key] = whole
                    else:
                        send_to_main(whole)
            elif rank == 0:
                weights[key] = receive_from(ranks[0], torch.empty(shape, dtype=DTYPES[dtype]))
    weights |= {alias: weights[key] for alias, key in aliases.items() if key in weights}
    return {key.removeprefix("model/"): tensor for key, tensor in weights.items()} if rank == 0 else {}


def put_together(tensor: DTensor) -> torch.Tensor:
    """The whole tensor, on the devices: they exchange nothing that lies on their hosts, as offloaded parameters do."""
    return cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()


def write_export(config: TrainConfig, weights: dict[str, torch.Tensor], folder: Path) -> None:
    with tempfile.TemporaryDirectory() as tokenizer_folder:
        if is_local_or_cached(config.tokenizer.name):
            load_tokenizer(config.tokenizer.name).save(tokenizer_folder)
        export_model(weights, config.model, folder, tokenizer_folder=tokenizer_folder)


def wait_for_main(what: str) -> None:
    """Until rank 0 has come here too, or is gone: longer than any collective may take."""
    key, store = f"llmfoundry_lite/{what}", dist.distributed_c10d._get_default_store()
    with contextlib.suppress(RuntimeError):
        if dist.get_rank() == 0:
            store.set(key, "")
        else:
            store.wait([key], LONGEST_WAIT)


class RunFolder(Callback):
    """`runs/<run_name>`: config.yaml, status.json, metrics.jsonl. Rank 0 writes, the others look on.

    Nothing is written before the run has been restored: a launch that is refused leaves the record as it was, but for
    how the last launch ended.
    """

    def __init__(self, config: TrainConfig):
        self.config = config
        self.folder = Path(config.run_folder)
        self.is_main = dist.get_rank() == 0
        self.log = RunLog(self.folder / METRICS)
        self.trainer: Trainer | None = None
        """None until the run has been restored."""
        self.asked_by: str | None = None
        """Why the run has been asked to leave."""
        self.is_running = False
        self.is_done = False
        self._writing = threading.Lock()
        self._noted_at = 0.0
        if self.is_main:
            with clear_disk_errors(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)

    def start(self, trainer: Trainer, checkpointing: Checkpointing) -> None:
        if self.is_main:
            with clear_disk_errors(self.folder):
                if checkpointing.wandb_run_id is not None:
                    (self.folder / WANDB_ID).write_text(checkpointing.wandb_run_id + "\n")
                settings = yaml.safe_dump(as_dict(self.config), sort_keys=False)
                write_atomically(self.folder / "config.yaml", settings)
                write_status(self.folder, "running", batch_of(trainer), self.asked_by)
                start_guard(self.folder)
                duration = Duration.parse(self.config.max_duration)
                mirrors = build_mirrors(self.config, lambda: progress_of(trainer.state, duration))
                self.log.open(mirrors, checkpointing.log.history)
        self.trainer = trainer
        self.is_running = self.is_main

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if self.is_running and time.monotonic() - self._noted_at >= STATUS_SECONDS:
            self._note()

    def note_request(self, reason: str) -> None:
        """From any thread. Should rank 0 be killed or aborted before it has left, that was the reason."""
        self.asked_by = reason
        note = threading.Thread(target=self._note, daemon=True)
        note.start()
        note.join(1.0)  # whoever asks must not hang with the disk

    def _note(self) -> None:
        """Where the run is, for those who watch it; never a reason to fail."""
        with contextlib.suppress(OSError), self._writing:
            if self.is_running and self.trainer is not None:
                write_status(self.folder, "running", batch_of(self.trainer), self.asked_by)
        self._noted_at = time.monotonic()

    def finish(self, status: str, trainer: Trainer) -> None:
        self._stop_noting()
        if self.is_main:
            with clear_disk_errors(self.folder):
                write_status(self.folder, status, batch_of(trainer))
        self.is_done = True

    def fail(self, status: str, reason: str) -> None:
        """Say in status.json why; never instead of the failure itself."""
        self._stop_noting()
        if not self.is_main:
            return
        with contextlib.suppress(OSError):
            self._write_reason(status, reason)
            self.log.post_close()

    def leave_late(self, reason: str) -> None:
        """From another thread, while the main thread hangs; the process ends when this returns."""
        self._stop_noting()
        if self.is_main:
            print(reason, file=sys.stderr, flush=True)
            self._write_reason("preempted", reason)

    def leave_at_once(self, reason: str) -> None:
        """The same, for one who presses Ctrl-C again."""
        self._stop_noting()
        if self.is_main:
            print(reason, file=sys.stderr, flush=True)
            self._write_reason("failed", reason)

    def _stop_noting(self) -> None:
        """What is written from now on is how the launch ended."""
        self.is_running = False
        if self._writing.acquire(timeout=1.0):
            self._writing.release()

    def _write_reason(self, status: str, reason: str) -> None:
        if self.trainer is None:
            write_ended_early(self.folder, status, reason)
        elif not (self.is_done and status == "failed"):  # a run that is done stays so; preempted, it exports again
            write_status(self.folder, status, batch_of(self.trainer), reason)


def batch_of(trainer: Trainer) -> int:
    return int(trainer.state.timestamp.batch)
