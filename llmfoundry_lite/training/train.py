"""Train a model from a configuration: build, fit, export. Composer's loop, our parts."""

import contextlib
import datetime
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from composer import Trainer
from torch._inductor import config as inductor_config

from llmfoundry_lite import devices
from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors
from llmfoundry_lite.config.layout import layout_here
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.convert.huggingface import can_export, export_model
from llmfoundry_lite.data.tokenizer import is_local_or_cached, load_tokenizer
from llmfoundry_lite.errors import EXIT_PREEMPTED, ConfigError, UserError, either
from llmfoundry_lite.ranks.ending import (
    EXIT_RETRY,
    Preempted,
    announced_preemption,
    cause_of,
    exit_code_of,
    ignore_signals,
    is_lost_peer,
    raise_when_interrupted,
)
from llmfoundry_lite.ranks.exchange import broadcast_json, user_errors_on_all_ranks
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_lite.ranks.signals import leaving_because
from llmfoundry_lite.ranks.start import choose_device, start_process_group
from llmfoundry_lite.ranks.status import refusals_recorded
from llmfoundry_lite.training.builders import build_and_restore
from llmfoundry_lite.training.checkpointing import Checkpointing, find_start
from llmfoundry_lite.training.memory import choose_microbatch, explain_out_of_memory, is_out_of_memory
from llmfoundry_lite.training.partners import Partners, find_partners
from llmfoundry_lite.training.preemption import REASONS, Preemption
from llmfoundry_lite.training.run_folder import RunFolder
from llmfoundry_lite.training.run_handle import RunHandle
from llmfoundry_lite.training.schedule import progress_of

WORKSPACES = (":4096:8", ":16:8")
"""Values of CUBLAS_WORKSPACE_CONFIG with which cuBLAS' sums have one order; torch refuses others."""
MAX_WAIT = datetime.timedelta(days=7)


def train(config: TrainConfig, partners: Partners | None = None) -> None:
    """Train as `config` says, with the partners that it names or with these. `docs/getting-started.md` lists the files
    in the run folder.

    Raises UserError for errors that the user can fix. Failures of other ranks appear as torch's communication errors.
    """
    raise_when_interrupted()  # Composer has installed its own handlers when it was imported
    devices.keep_freed_memory()
    with refusals_recorded(lambda: Path(config.run_folder)):
        config = choose_kernels(config, devices.device_type())
        choose_device(devices.device_type())
        start_process_group(devices.device_type(), config.dist_timeout)
    run, partners = RunFolder(config), partners or find_partners(config)
    wall_seconds = config.max_wall_time.seconds if config.max_wall_time is not None else None
    preemption = Preemption(run.folder, config.preemption_grace_seconds, wall_seconds, run.note_request, run.leave)
    trainer, checkpointing = None, None
    try:
        partners.connect()
        start = find_start(config, takes_lease=partners.takes_lease_at_start)
        trainer, checkpointing = build_and_restore(config, run, preemption, start, partners)
        preemption.listen()
        state, max_duration = trainer.state, config.max_duration
        size = checkpointing.microbatch_of_run
        if size is None:
            size = choose_microbatch(config, checkpointing.model, state.optimizers[0])
        state.device_train_microbatch_size = size
        checkpointing.was_stopped = checkpointing.announce_stop(state)
        trains = progress_of(state, max_duration) < 1 and not checkpointing.was_stopped
        if trains:
            partners.enter(RunHandle(trainer, checkpointing, run.leave))
        with user_errors_on_all_ranks():  # of a logger, which rank 0 alone has
            run.start(trainer, checkpointing.wandb_run_id, checkpointing.history)
        run_missed_evaluation(trainer, run, checkpointing)
        if trains:
            if config.eval_first and run.batch == 0 and evaluate(trainer, checkpointing) and run.is_main:
                run.write(state)
            trainer.fit()
        if checkpointing.was_preempted_by:
            raise Preempted(checkpointing.preempted_text(state), orderly=True)
        run.finish("stopped" if checkpointing.was_stopped else "done")
        if config.export_at_end and not checkpointing.was_stopped:
            export(config, run, checkpointing)
        partners.close(has_finished=not checkpointing.was_stopped)
    except BaseException as error:
        ignore_signals()
        if trainer is not None and checkpointing is not None and isinstance(error, Exception):
            checkpointing.keep_batches(error, trainer, run)
        partners.close()
        reported = report(error, config, run, preemption, trainer, checkpointing)
        if not isinstance(reported, Preempted):
            preemption.release_lease()
            if reported is error:
                raise
            raise reported from error
        preemption.consume_stop_file()
        if reported.is_orderly and trainer is not None:
            trainer.close()
        preemption.release_lease()
        preemption.stop_polling_store()
        raise reported from None
    preemption.consume_stop_file()
    trainer.close()
    preemption.stop_polling_store()


def choose_kernels(config: TrainConfig, device_type: str) -> TrainConfig:
    """Let torch compute the same digits every time on the same devices, if the run asks for that. Returns the
    configuration with `deterministic` as it is here. Raises ConfigError for a variable that keeps torch from it."""
    if not config.is_deterministic_on(device_type):
        return config
    workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACES[0])
    if device_type == "cuda" and torch.version.cuda and workspace not in WORKSPACES:
        raise ConfigError(
            f"CUBLAS_WORKSPACE_CONFIG: {workspace} given, but deterministic kernels need {either(WORKSPACES)}; unset it"
        )
    torch.use_deterministic_algorithms(True)
    inductor_config.deterministic = True  # torch 2.11 leaves it; no compiled kernel is chosen by its time then
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - a property of a module
    if config.deterministic is None and this_rank().rank == 0:
        print(
            f"deterministic: true, as exact_sums needs on {devices.device_name()}; its kernels are slower", flush=True
        )
    return replace(config, deterministic=True)


def report(
    error: BaseException,
    config: TrainConfig,
    run: RunFolder,
    preemption: Preemption,
    trainer: Trainer | None,
    checkpointing: Checkpointing | None,
) -> BaseException:
    """Write to status.json how this launch ends. Returns what to raise for `error`."""
    reported, reason = error, REASONS[preemption.reason] or announced_preemption()
    saves_fail = checkpointing is not None and checkpointing.failed_saves.count > 0
    if (
        reason and preemption.failure is None and is_lost_peer(error) and not saves_fail
    ):  # a peer that was asked to leave has left without waiting for us
        reported = Preempted(f"{leaving_because(reason)} while another rank was leaving; {preemption.stands()}")
    elif is_out_of_memory(error):
        size = config.first_microbatch_size(config.global_train_batch_size // layout_here(config).num_data_ranks)
        when = "while the run was built"
        if trainer is not None:
            when = f"in batch {int(trainer.state.timestamp.batch) + 1}"
            if isinstance(trainer.state.device_train_microbatch_size, int):
                size = trainer.state.device_train_microbatch_size
        reported = explain_out_of_memory(error, config, when, size)
    if isinstance(reported, UserError):
        reported.has_lost = (
            checkpointing is not None and trainer is not None and checkpointing.would_lose(trainer.state)
        )
    if isinstance(reported, Preempted):
        run.fail("preempted", str(reported))
    else:
        may_come_back = exit_code_of(reported) in (EXIT_PREEMPTED, EXIT_RETRY)
        may_pass = isinstance(reported, UserError) and reported.is_transient
        run.fail("preempted" if may_come_back else "failed", cause_of(reported), may_pass=may_pass)
    return reported


def run_missed_evaluation(trainer: Trainer, run: RunFolder, checkpointing: Checkpointing) -> None:
    """Evaluate the batch that this launch carries on from, if the launch before left during its evaluation."""
    if not checkpointing.run_state.owes_evaluation:
        return
    evaluators = trainer.state.evaluators
    last_metric = f"{evaluators[-1].label}/loss" if evaluators else "eval/icl/"
    # If a finished run is launched again, its last evaluation is in the log already.
    is_there = run.is_main and any(key.startswith(last_metric) for key in run.record_of(run.batch))
    if not broadcast_json(is_there) and evaluate(trainer, checkpointing) and run.is_main:
        run.add_to(run.batch)
    checkpointing.run_state.owes_evaluation = False


def evaluate(trainer: Trainer, checkpointing: Checkpointing) -> bool:
    """Run all evaluations, outside of the training loop. Returns whether there are any."""
    checkpointing.evaluate_tasks(trainer.state, trainer.logger)
    if trainer.state.evaluators:
        trainer.eval()
    return bool(checkpointing.tasks or trainer.state.evaluators)


def export(config: TrainConfig, run: RunFolder, checkpointing: Checkpointing) -> None:
    """Write the last checkpoint's weights for plain transformers, if its layouts can hold them. On rank 0.

    The run is done by then, so a failure prints one line, and `checkpoint export` can repeat it. The other ranks wait
    for rank 0 without a timeout, in no collective.
    """
    folder, reason, newest = run.folder / "huggingface", can_export(config.model), checkpointing.newest_url
    note = None
    if newest is not None:  # whoever leaves late from here has saved all
        checkpointing.preemption.saved = newest.rsplit("/", 1)[-1]
    if reason is None and not checkpointing.partners.saves_here:
        reason = "another launch of this run has its last save"
    if run.is_main:
        if reason is None and newest is not None:
            try:
                with tempfile.TemporaryDirectory() as tokenizer:
                    if is_local_or_cached(config.tokenizer.name):
                        load_tokenizer(config.tokenizer.name).save(tokenizer)
                    state_dict = load_full_tensors(newest)
                    note = export_model(state_dict, config.model, folder, tokenizer_folder=tokenizer)
            except Exception as error:
                reason = " ".join(str(error).split()) or type(error).__name__
                reason += f"; `llmfoundry-lite checkpoint export {run.folder} {folder}` makes up for it"
        print(f"exported to {folder}" if reason is None else f"not exported to {folder}: {reason}", flush=True)
        if note is not None:
            print(note, flush=True)
    # Wait until rank 0 is here too, or is gone. A collective would time out.
    key, store = "llmfoundry_lite/exported", dist.distributed_c10d._get_default_store()
    with contextlib.suppress(RuntimeError):
        if run.is_main:
            store.set(key, "")
        else:
            store.wait([key], MAX_WAIT)
