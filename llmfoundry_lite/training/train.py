"""Train a model from a configuration: build, fit, export. Composer owns the loop, and this package the parts in it.

`train` is the story of one launch. `training/builders.py` builds the parts, `docs/one-batch.md` lists what happens in a
batch, and `docs/how-a-launch-ends.md` what happens at the end.
"""

import contextlib
import datetime
import os
import shlex
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from composer.core import State
from torch._inductor import config as inductor_config

from llmfoundry_lite import devices
from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors
from llmfoundry_lite.checkpoint.start import publish_early_end
from llmfoundry_lite.config.fields import as_yaml
from llmfoundry_lite.config.layout import layout_here
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.convert.huggingface import describe_export_problem, export_model
from llmfoundry_lite.data.tokenizer import load_configured_tokenizer
from llmfoundry_lite.data.tokenizer_files import is_local_or_cached
from llmfoundry_lite.errors import (
    EXIT_PREEMPTED,
    ConfigError,
    DivergedError,
    OutOfMemoryError,
    UserError,
    join_with_or,
    one_line,
)
from llmfoundry_lite.ranks.ending import (
    EXIT_RETRY,
    Preempted,
    all_ranks_fail,
    announced_preemption,
    describe_cause,
    exit_code_of,
    ignore_leaving_signals,
    is_lost_peer,
    raise_when_interrupted,
)
from llmfoundry_lite.ranks.exchange import broadcast_json, user_errors_on_all_ranks
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_lite.ranks.signals import describe_reason_to_leave
from llmfoundry_lite.ranks.start import choose_device, start_process_group
from llmfoundry_lite.ranks.status import has_lost_batches, read_status, refusals_recorded, status_of_early_end
from llmfoundry_lite.training.builders import build_and_restore
from llmfoundry_lite.training.checkpointing import Checkpointing
from llmfoundry_lite.training.launch_role import LaunchRole, find_role
from llmfoundry_lite.training.memory import choose_microbatch, explain_out_of_memory, is_out_of_memory
from llmfoundry_lite.training.preemption import REASONS, Preemption
from llmfoundry_lite.training.run_folder import RunFolder
from llmfoundry_lite.training.run_handle import RunHandle
from llmfoundry_lite.training.save_texts import describe_preemption
from llmfoundry_lite.training.schedule import is_evaluation_due, progress_of
from llmfoundry_lite.training.start import build_own_tokenizer, find_start
from llmfoundry_lite.training.trainer import ParallelTrainer

DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
"""Values of CUBLAS_WORKSPACE_CONFIG with which cuBLAS adds in a fixed order. torch refuses deterministic kernels with
others."""
MAX_EXPORT_WAIT = datetime.timedelta(days=7)
"""Time for which ranks wait for rank 0 to export. A large model takes minutes; the store needs some limit."""


@dataclass(kw_only=True, eq=False)
class Launch:
    """The objects of this launch on this rank, which its end needs whatever it fails at."""

    config: TrainConfig
    """The configuration, with `deterministic` as this machine needs it."""
    run_folder: RunFolder
    preemption: Preemption
    role: LaunchRole
    trainer: ParallelTrainer | None = None
    """None until `train` has built the run, as `checkpointing` is."""
    checkpointing: Checkpointing | None = None


def train(config: TrainConfig, role: LaunchRole | None = None) -> None:
    """Train as `config` says, from the run's newest checkpoint or from batch 1. Then export the model.

    Collective: every rank of a launch calls this once, in a process of its own. `role` is the role of the launch in the
    run; None selects the one that the configuration names. `docs/getting-started.md` lists the files in the run folder.

    Returns when the run is done, or when this launch has reached `stop_at` or `stop_after`. Raises UserError for an
    error that the user can fix, Preempted if this launch has to leave before the run is done, and torch's communication
    errors if another rank has failed. All of them are recorded in status.json first.
    """
    launch = start_launch(config, role)
    preemption, run_folder = launch.preemption, launch.run_folder
    try:
        # Build the run and restore it. From here on, an error may find batches that can still be saved.
        launch.role.connect()
        build_own_tokenizer(launch.config)
        start = find_start(launch.config, takes_lease=launch.role.takes_lease_at_start)
        trainer, checkpointing = build_and_restore(launch.config, run_folder, preemption, start, launch.role)
        launch.trainer = trainer
        launch.checkpointing = checkpointing
        preemption.listen()  # after Composer, whose signal handlers it replaces

        # Prepare to train, if the restored run is not at its end already.
        set_microbatch_size(launch.config, trainer, checkpointing)
        checkpointing.was_stopped = announce_stop(checkpointing, trainer.state)
        is_run_done = progress_of(trainer.state, launch.config.max_duration) >= 1
        has_batches_to_train = not is_run_done and not checkpointing.was_stopped
        if has_batches_to_train:
            launch.role.join_run(RunHandle(trainer, checkpointing, run_folder.leave))
        with user_errors_on_all_ranks():  # only rank 0 opens the log and the loggers
            run_folder.start(trainer, checkpointing.wandb_run_id, checkpointing.history)

        # Train. Composer's loop calls the callbacks; docs/one-batch.md lists them.
        run_missed_evaluation(trainer, run_folder, checkpointing)
        if has_batches_to_train:
            evaluate_first(launch.config, trainer, run_folder, checkpointing)
            trainer.fit()
        else:
            checkpointing.finish_copies()
        if checkpointing.was_preempted_by:
            raise Preempted(describe_preemption(checkpointing, trainer.state), orderly=True)

        # Record the end before the export, which may fail without failing the run.
        run_folder.finish("stopped" if checkpointing.was_stopped else "done")
        if launch.config.export_at_end and not checkpointing.was_stopped:
            export(launch.config, run_folder, checkpointing)
        launch.role.close(has_finished=not checkpointing.was_stopped)
    except BaseException as error:
        reported = end_with_error(error, launch)
        if isinstance(reported, Preempted):
            raise reported from None
        if reported is error:
            raise
        raise reported from error
    preemption.remove_stop_file()
    trainer.close()
    preemption.stop_polling_store()
    preemption.note_end()


def start_launch(config: TrainConfig, role: LaunchRole | None) -> Launch:
    """Choose this rank's device and kernels, connect it to the other ranks, and create the objects of a launch.

    Collective. `role` is the role of the launch in the run; None selects the one that `config` names. The returned
    `Launch` has no trainer yet: `train` sets `trainer` and `checkpointing` when it has built them. An error is recorded
    in status.json, and raised as UserError if the user can fix it.
    """
    # Composer installed its own signal handlers while it was imported. Until `Preemption.listen`, when there is a run
    # to save, a signal to leave raises Preempted.
    raise_when_interrupted()
    devices.keep_freed_memory()
    with refusals_recorded(lambda: Path(config.run_folder), partial(publish_early_end, config)):
        config = choose_kernels(config, devices.device_type())
        choose_device(devices.device_type())
        start_process_group(devices.device_type(), config.dist_timeout)

    # `RunFolder` and `Preemption` need the rank, so the process group comes first.
    run_folder = RunFolder(config)
    if role is None:
        role = find_role(config)
    max_wall_seconds = None
    if config.max_wall_time is not None:
        max_wall_seconds = config.max_wall_time.seconds
    preemption = Preemption(
        run_folder.folder,
        config.preemption_grace_seconds,
        max_wall_seconds,
        on_reason=run_folder.note_leave_reason,
        on_leave=run_folder.leave,
    )
    return Launch(config=config, run_folder=run_folder, preemption=preemption, role=role)


def choose_kernels(config: TrainConfig, device_type: str) -> TrainConfig:
    """Switch torch to deterministic kernels if the configuration asks for them.

    With deterministic kernels, a repetition on the same devices computes the same bits. `device_type` is "cuda" or
    "cpu". Sets CUBLAS_WORKSPACE_CONFIG in the environment, and options of torch for the whole process.

    Returns the configuration with `deterministic` set to true, or unchanged if the run does not need such kernels.
    Raises ConfigError if CUBLAS_WORKSPACE_CONFIG has a value that torch refuses with deterministic kernels.
    """
    if not config.is_deterministic_on(device_type):
        return config

    # cuBLAS adds in a fixed order only with these workspaces. The user may have chosen one of them.
    workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", DETERMINISTIC_WORKSPACES[0])
    uses_cublas = device_type == "cuda" and bool(torch.version.cuda)
    if uses_cublas and workspace not in DETERMINISTIC_WORKSPACES:
        raise ConfigError(
            f"CUBLAS_WORKSPACE_CONFIG: {workspace} given, but deterministic kernels need "
            f"{join_with_or(DETERMINISTIC_WORKSPACES)}; unset it"
        )

    torch.use_deterministic_algorithms(True)
    # torch 2.11 does not pass that on to its compiler, which would choose the kernel that was fastest in a measurement.
    inductor_config.deterministic = True
    # Filling new memory finds reads of uninitialised values. It takes time and changes no result.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - a property of a module

    is_implied_by_exact_sums = config.deterministic is None
    if is_implied_by_exact_sums and this_rank().rank == 0:
        print(
            f"deterministic: true, as exact_sums needs on {devices.device_name()}; its kernels are slower", flush=True
        )
    return replace(config, deterministic=True)


def set_microbatch_size(config: TrainConfig, trainer: ParallelTrainer, checkpointing: Checkpointing) -> None:
    """Set the number of samples that a device computes at once. Collective.

    It is the checkpoint's if exact sums need that, else the configured one, or with `auto` the largest that fits.
    Raises ConfigError if a single sample does not fit.
    """
    size = checkpointing.microbatch_of_run
    if size is None:
        size = choose_microbatch(config, checkpointing.model, trainer.state.optimizers[0])
    trainer.state.device_train_microbatch_size = size


def announce_stop(checkpointing: Checkpointing, state: State) -> bool:
    """Print on rank 0 why this launch has nothing to train, if that is so, right after the restore.

    Returns whether the launch ends before the run does, because `stop_at` is reached. If the run itself is done,
    that is printed too, but returns False. The ranks exchange nothing.
    """
    batch = int(state.timestamp.batch)
    if checkpointing.policy.is_last(state):  # the run is done, which comes first
        max_duration = checkpointing.config.max_duration.written
        checkpointing.print_on_rank_0(
            f"nothing is trained: the run is done at batch {batch}, with max_duration={max_duration}"
        )
        return False

    is_launch_over = checkpointing.policy.is_launch_over(state)
    if is_launch_over:
        stop_at = as_yaml(checkpointing.config.stop_at)
        reason = checkpointing.policy.stop_reason or f"the run has reached stop_at, {stop_at}"
        checkpointing.print_on_rank_0(f"{reason}: it is at batch {batch}")
    return is_launch_over


# ------------------------------------------------------------------------------------------------------- evaluations


def run_missed_evaluation(trainer: ParallelTrainer, run_folder: RunFolder, checkpointing: Checkpointing) -> None:
    """Run the evaluation that the previous launch left midway, or did not start, because it was preempted.

    Collective. Does nothing unless the restored state has `owes_evaluation`, which this function clears. Rank 0 adds
    the metrics to the record that the log already has of that batch.
    """
    if not checkpointing.run_state.owes_evaluation:
        return

    # The checkpoint of a finished run keeps `owes_evaluation`, also after a later launch has run the evaluation. So
    # look into the log: if it has the metric that an evaluation logs last, nothing is missing.
    evaluators = trainer.state.evaluators
    last_metric = "eval/icl/"
    if evaluators:
        last_metric = f"{evaluators[-1].label}/loss"
    is_logged = False
    if run_folder.is_main:
        record = run_folder.record_of(run_folder.batch)
        is_logged = any(key.startswith(last_metric) for key in record)

    # Only rank 0 has the log.
    if not broadcast_json(is_logged):
        has_evaluated = evaluate(trainer, checkpointing)
        if has_evaluated and run_folder.is_main:
            run_folder.add_to(run_folder.batch)
    checkpointing.run_state.owes_evaluation = False


def evaluate_first(
    config: TrainConfig, trainer: ParallelTrainer, run_folder: RunFolder, checkpointing: Checkpointing
) -> None:
    """Evaluate before batch 1 if `eval_first` is set, and let rank 0 log the metrics as those of batch 0.

    Collective.
    """
    if not config.eval_first or run_folder.batch != 0:
        return
    has_evaluated = evaluate(trainer, checkpointing)
    if has_evaluated and run_folder.is_main:
        run_folder.write(trainer.state)


def evaluate(trainer: ParallelTrainer, checkpointing: Checkpointing) -> bool:
    """Run the in-context tasks and the validation sets outside of the training loop.

    Collective. Returns whether the run has any; their metrics wait in the logger for the next record.
    """
    checkpointing.evaluate_tasks(trainer.state, trainer.logger)
    if trainer.state.evaluators:
        trainer.eval()
    return bool(checkpointing.tasks or trainer.state.evaluators)


# ------------------------------------------------------------------------------------------------ how a launch ends


def end_with_error(error: BaseException, launch: Launch) -> BaseException:
    """Save what can be saved, record in status.json how the launch ends, and release the lease and the role.

    `error` is what has interrupted `train` on this rank. Returns the error to raise instead, which may be the same one.
    Every rank that meets an error calls this, but perhaps not all ranks do. So it waits for other ranks only where they
    are known to be there, and only for a limited time. Signals are ignored from here on.
    """
    ignore_leaving_signals()
    trainer, checkpointing = launch.trainer, launch.checkpointing
    if trainer is not None and checkpointing is not None and isinstance(error, Exception):
        save_unsaved_batches(error, trainer, launch.run_folder, checkpointing)
    launch.role.close()
    reported = record_end(error, launch)
    if not isinstance(reported, Preempted):
        launch.preemption.note_end(has_failed=True)
        launch.preemption.release_lease()
        publish_if_early(reported, launch)
        return reported

    # A preempted launch is continued by another one, which must not find this one's STOP file. The trainer is closed
    # only if all ranks leave together, because callbacks may use collectives in their `close`.
    launch.preemption.remove_stop_file()
    if reported.is_orderly and trainer is not None:
        trainer.close()
    launch.preemption.release_lease()
    launch.preemption.stop_polling_store()
    launch.preemption.note_end()
    return reported


def save_unsaved_batches(
    error: Exception, trainer: ParallelTrainer, run_folder: RunFolder, checkpointing: Checkpointing
) -> None:
    """Record and save the batches that no save holds yet, before the launch ends with `error`, if that is possible.

    It is possible if every rank has met an error while the state was that of a whole batch: a task's file has
    changed, validation data or the next shard are missing, a callback has failed. A rank that fails alone saves
    nothing, because the other ranks wait for it in a collective. Nothing is saved if the weights may be the cause.

    A failure of the save is printed, and not raised, so that the launch ends with its original error.
    """
    state = trainer.state
    batch = int(state.timestamp.batch)
    is_unsaved = checkpointing.first_batch <= batch and checkpointing.published_batch < batch
    is_between_batches = trainer.last_stepped_batch <= batch and checkpointing.config.trains_alone
    is_possible = not (checkpointing.has_failed_save or isinstance(error, DivergedError) or is_lost_peer(error))
    if not (is_unsaved and is_between_batches and is_possible):
        return
    if not all_ranks_fail(batch):
        return

    # All ranks are here, so they can save together.
    try:
        with contextlib.suppress(UserError):  # the log may be the cause, or its disk
            run_folder.write_unless_written(state)
        checkpointing.run_state.owes_evaluation = is_evaluation_due(checkpointing.config, state)
        checkpointing.save_now(state, trainer.logger)
        with contextlib.suppress(UserError):
            run_folder.fit_end(state, trainer.logger)
    except Exception as failure:
        checkpointing.print_on_rank_0(f"warning: batch {batch} was not saved: {one_line(failure)}")


def record_end(error: BaseException, launch: Launch) -> BaseException:
    """Decide what `error` means for the user, and let rank 0 write it to status.json. Returns the error to raise.

    A connection that breaks while other ranks leave becomes Preempted. Running out of memory becomes an
    OutOfMemoryError with advice. A UserError keeps its text, and its `has_lost` is set to whether trained batches are
    lost. Any other error is returned unchanged.
    """
    reported = error
    preempted_by = find_preemption_elsewhere(error, launch)
    if preempted_by:
        reported = Preempted(
            f"{describe_reason_to_leave(preempted_by)} while another rank was leaving; "
            f"{launch.preemption.describe_saves()}"
        )
    elif is_out_of_memory(error):
        reported = out_of_memory_error_of(error, launch)

    if isinstance(reported, Preempted):
        launch.run_folder.fail("preempted", str(reported))
        return reported

    # Everything else is a failure of this launch.
    is_transient = False
    if isinstance(reported, UserError):
        reported.has_lost = has_lost_work(launch)
        is_transient = reported.is_transient
    # The launcher starts a rank again that ends with one of these codes, so the run is not lost yet.
    may_come_back = exit_code_of(reported) in (EXIT_PREEMPTED, EXIT_RETRY)
    status = "preempted" if may_come_back else "failed"
    launch.run_folder.fail(status, describe_cause(reported), may_pass=is_transient)
    return reported


def publish_if_early(error: BaseException, launch: Launch) -> None:
    """Let rank 0 record beside the checkpoints how a launch has failed that has not begun to train.

    One that has begun has a record of its own. Called once the lease is released, because the record holds until the
    lease changes.
    """
    run_folder = launch.run_folder
    if run_folder.is_main and run_folder.trainer is None:
        is_transient = isinstance(error, UserError) and error.is_transient
        status = "preempted" if is_transient else "failed"
        run_status = read_status(run_folder.folder) or {}
        publish_early_end(launch.config, status_of_early_end(status, run_status), describe_cause(error))


def has_lost_work(launch: Launch) -> bool:
    """Return whether the run has trained batches that no save holds, as this rank knows. Not collective.

    Once this launch has restored the run, its own batches count. Before that, the answer is what status.json says of
    the previous launch.
    """
    is_restored = launch.run_folder.trainer is not None
    if not is_restored:
        return has_lost_batches(read_status(launch.run_folder.folder) or {})
    if launch.trainer is None or launch.checkpointing is None:
        return False
    return launch.checkpointing.has_unsaved_batches(launch.trainer.state)


def find_preemption_elsewhere(error: BaseException, launch: Launch) -> str:
    """Return why another rank was leaving when this rank lost its connection to it; empty if that is not the case.

    Ranks that leave early may close their connections while this rank is still in a collective. The collective then
    fails with `error`, although the launch is preempted and has not failed. The returned reason is one of `REASONS`,
    such as "SIGTERM".

    Returns an empty text for any other kind of error, and also if a rank has failed or if saves fail, because the
    launch then ends with that failure.
    """
    has_rank_failed = launch.preemption.failure is not None
    if has_rank_failed or not is_lost_peer(error):
        return ""
    if launch.checkpointing is not None and launch.checkpointing.failed_saves.count > 0:
        return ""
    return REASONS[launch.preemption.reason] or announced_preemption()


def out_of_memory_error_of(error: BaseException, launch: Launch) -> OutOfMemoryError:
    """Return an error that says when this rank ran out of memory, and which settings take less. Not collective.

    `error` is torch's, NumPy's or Python's own out-of-memory error. The time is "in batch 12" while the run trains,
    and otherwise "while the run was built".
    """
    config = launch.config
    trainer = launch.trainer

    # The size to begin with, until the trainer has chosen one, which it does in the first batch with `auto`.
    device_batch_size = config.global_train_batch_size // layout_here(config).num_data_ranks
    microbatch_size = config.first_microbatch_size(device_batch_size)
    if trainer is None:
        when = "while the run was built"
    else:
        when = f"in batch {int(trainer.state.timestamp.batch) + 1}"
        chosen_size = trainer.state.device_train_microbatch_size
        if isinstance(chosen_size, int):
            microbatch_size = chosen_size
    return explain_out_of_memory(error, config, when, microbatch_size)


# -------------------------------------------------------------------------------------------------------------- export


def export(config: TrainConfig, run_folder: RunFolder, checkpointing: Checkpointing) -> None:
    """Write the last checkpoint's weights for plain transformers into the run folder, on rank 0. Every rank calls this.

    The run is done by then, so a failure prints one line and does not raise; `checkpoint export` can repeat it. Ranks
    other than 0 return when rank 0 has finished, or after `MAX_EXPORT_WAIT`.
    """
    checkpoint_url = checkpointing.newest_url
    if checkpoint_url is not None:  # a signal that comes during the export finds the run saved
        checkpointing.preemption.saved = checkpoint_url.rsplit("/", 1)[-1]
    if run_folder.is_main:
        refusal = describe_export_problem(config.model)
        if refusal is None and not checkpointing.role.writes_checkpoints:
            refusal = "another launch of this run has its last save"
        export_on_rank_0(config, run_folder, checkpoint_url, refusal)

    # The other ranks wait at torch's store. They would time out in a collective, because exporting a large model takes
    # longer than `dist_timeout`.
    key = "llmfoundry_lite/exported"
    store = dist.distributed_c10d._get_default_store()
    with contextlib.suppress(RuntimeError):  # rank 0, which keeps the store, is gone and has printed why
        if run_folder.is_main:
            store.set(key, "")
        else:
            store.wait([key], MAX_EXPORT_WAIT)


def export_on_rank_0(
    config: TrainConfig, run_folder: RunFolder, checkpoint_url: str | None, refusal: str | None
) -> None:
    """Export the checkpoint at `checkpoint_url` to `huggingface` in the run folder, and print the outcome.

    `refusal` says why the run cannot be exported; None if it can. A run without a checkpoint exports nothing. An error
    of the export is printed with the command that repeats it, and not raised.
    """
    folder = run_folder.folder / "huggingface"
    note = None  # what the exported model lacks or does differently, if anything
    if refusal is None and checkpoint_url is not None:
        try:
            with tempfile.TemporaryDirectory() as tokenizer_folder:
                # Without a copy at hand, the model is exported without tokenizer rather than downloading one.
                if is_local_or_cached(config.tokenizer.name):
                    load_configured_tokenizer(config.tokenizer).save(tokenizer_folder)
                tensors = load_full_tensors(checkpoint_url)
                note = export_model(tensors, config.model, folder, tokenizer_folder=tokenizer_folder)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            command = shlex.join(["llmfoundry-lite", "checkpoint", "export", str(run_folder.folder), str(folder)])
            refusal = f"{reason}; `{command}` makes up for it"

    outcome = f"exported to {folder}" if refusal is None else f"not exported to {folder}: {refusal}"
    print(outcome, flush=True)
    if note is not None:
        print(note, flush=True)
