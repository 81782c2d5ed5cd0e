"""Train a model from a configuration: build, fit, export. Composer owns the loop, and this package the parts in it.

`train` is the story of one launch. `training/builders.py` builds the parts, `docs/one-batch.md` lists what happens in a
batch, and `docs/how-a-launch-ends.md` what happens at the end.
"""

import contextlib
import datetime
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch._inductor import config as inductor_config

from llmfoundry_lite import devices
from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors
from llmfoundry_lite.config.layout import layout_here
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.convert.huggingface import describe_export_problem, export_model
from llmfoundry_lite.data.tokenizer import is_local_or_cached, load_tokenizer
from llmfoundry_lite.errors import EXIT_PREEMPTED, ConfigError, OutOfMemoryError, UserError, join_with_or
from llmfoundry_lite.ranks.ending import (
    EXIT_RETRY,
    Preempted,
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
from llmfoundry_lite.ranks.status import has_lost_batches, read_status, refusals_recorded
from llmfoundry_lite.training.builders import build_and_restore
from llmfoundry_lite.training.checkpointing import Checkpointing, find_start
from llmfoundry_lite.training.memory import choose_microbatch, explain_out_of_memory, is_out_of_memory
from llmfoundry_lite.training.partners import Partners, find_partners
from llmfoundry_lite.training.preemption import REASONS, Preemption
from llmfoundry_lite.training.run_folder import RunFolder
from llmfoundry_lite.training.run_handle import RunHandle
from llmfoundry_lite.training.schedule import progress_of
from llmfoundry_lite.training.trainer import ParallelTrainer

DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
"""Values of CUBLAS_WORKSPACE_CONFIG with which cuBLAS adds in a fixed order. torch refuses deterministic kernels with
others."""
MAX_EXPORT_WAIT = datetime.timedelta(days=7)
"""How long ranks wait for rank 0 to export. A large model takes minutes; the store needs some limit."""


@dataclass(kw_only=True, eq=False)
class Launch:
    """The objects of this launch on this rank, which its end needs whatever it fails at."""

    config: TrainConfig
    """The configuration, with `deterministic` as this machine needs it."""
    run_folder: RunFolder
    preemption: Preemption
    partners: Partners
    trainer: ParallelTrainer | None = None
    """None until `train` has built the run, as `checkpointing` is."""
    checkpointing: Checkpointing | None = None


def train(config: TrainConfig, partners: Partners | None = None) -> None:
    """Train as `config` says, from the run's newest checkpoint or from batch 1. Then export the model.

    Every rank of a launch calls this once, in a process of its own. `partners` are the other launches that train the
    same run; None selects those that the configuration names. `docs/getting-started.md` lists the files in the run
    folder.

    Raises UserError for an error that the user can fix, Preempted if this launch has to leave before the run is done,
    and torch's communication errors if another rank has failed. All of them are recorded in status.json first.
    """
    launch = start_launch(config, partners)
    preemption, run_folder = launch.preemption, launch.run_folder
    try:
        launch.partners.connect()
        start = find_start(launch.config, takes_lease=launch.partners.takes_lease_at_start)
        trainer, checkpointing = build_and_restore(launch.config, run_folder, preemption, start, launch.partners)
        launch.trainer = trainer
        launch.checkpointing = checkpointing
        preemption.listen()

        set_microbatch_size(launch.config, trainer, checkpointing)
        checkpointing.was_stopped = checkpointing.announce_stop(trainer.state)
        is_run_done = progress_of(trainer.state, launch.config.max_duration) >= 1
        has_batches_to_train = not is_run_done and not checkpointing.was_stopped
        if has_batches_to_train:
            launch.partners.join_run(RunHandle(trainer, checkpointing, run_folder.leave))
        with user_errors_on_all_ranks():  # only rank 0 opens the log and the loggers
            run_folder.start(trainer, checkpointing.wandb_run_id, checkpointing.history)

        run_missed_evaluation(trainer, run_folder, checkpointing)
        if has_batches_to_train:
            evaluate_first(launch.config, trainer, run_folder, checkpointing)
            trainer.fit()
        if checkpointing.was_preempted_by:
            raise Preempted(checkpointing.preempted_text(trainer.state), orderly=True)

        run_folder.finish("stopped" if checkpointing.was_stopped else "done")
        if launch.config.export_at_end and not checkpointing.was_stopped:
            export(launch.config, run_folder, checkpointing)
        launch.partners.close(has_finished=not checkpointing.was_stopped)
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


def start_launch(config: TrainConfig, partners: Partners | None) -> Launch:
    """Choose this rank's device and kernels, connect it to the other ranks, and prepare to be asked to leave.

    Collective. `partners` None selects those that `config` names. An error is recorded in status.json, and raised as
    UserError if the user can fix it.
    """
    raise_when_interrupted()  # again, because Composer has installed its own signal handlers while it was imported
    devices.keep_freed_memory()
    with refusals_recorded(lambda: Path(config.run_folder)):
        config = choose_kernels(config, devices.device_type())
        choose_device(devices.device_type())
        start_process_group(devices.device_type(), config.dist_timeout)

    run_folder = RunFolder(config)
    if partners is None:
        partners = find_partners(config)
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
    return Launch(config=config, run_folder=run_folder, preemption=preemption, partners=partners)


def choose_kernels(config: TrainConfig, device_type: str) -> TrainConfig:
    """Switch torch to deterministic kernels if the run asks for them.

    With those, a repetition on the same devices computes the same bits. Returns the configuration with `deterministic`
    true then, and else unchanged. `device_type` is "cuda" or "cpu". Raises ConfigError if CUBLAS_WORKSPACE_CONFIG has a
    value that torch refuses with deterministic kernels.
    """
    if not config.is_deterministic_on(device_type):
        return config

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
    if config.deterministic is None and this_rank().rank == 0:
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


# ------------------------------------------------------------------------------------------------------- evaluations


def run_missed_evaluation(trainer: ParallelTrainer, run_folder: RunFolder, checkpointing: Checkpointing) -> None:
    """Evaluate the checkpoint's batch now, if the previous launch was asked to leave during that evaluation.

    Collective. Rank 0 adds the metrics to the record that the log has of that batch.
    """
    if not checkpointing.run_state.owes_evaluation:
        return
    # The state of a finished run says so for ever. If the run is launched again, the log already has the evaluation's
    # last metric.
    evaluators = trainer.state.evaluators
    last_metric = "eval/icl/"
    if evaluators:
        last_metric = f"{evaluators[-1].label}/loss"
    is_logged = False
    if run_folder.is_main:
        record = run_folder.record_of(run_folder.batch)
        is_logged = any(key.startswith(last_metric) for key in record)

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
    """Save what can be saved, record in status.json how the launch ends, and release what it holds.

    Returns what to raise. Every rank that meets an error calls this, but perhaps not all ranks do. So it waits for
    other ranks only where they are known to be there, and only for a limited time. Signals are ignored from here on.
    """
    ignore_leaving_signals()
    trainer, checkpointing = launch.trainer, launch.checkpointing
    if trainer is not None and checkpointing is not None and isinstance(error, Exception):
        checkpointing.save_unsaved_batches(error, trainer, launch.run_folder)
    launch.partners.close()
    reported = record_end(error, launch)
    if not isinstance(reported, Preempted):
        launch.preemption.release_lease()
        return reported

    launch.preemption.remove_stop_file()
    if reported.is_orderly and trainer is not None:
        trainer.close()
    launch.preemption.release_lease()
    launch.preemption.stop_polling_store()
    return reported


def record_end(error: BaseException, launch: Launch) -> BaseException:
    """Decide what `error` means for the user, and let rank 0 write it to status.json. Returns what to raise for it.

    A connection that breaks while ranks leave becomes Preempted. Running out of memory becomes an OutOfMemoryError with
    advice. A UserError learns whether trained batches are lost (`has_lost`).
    """
    reported = error
    preempted_by = find_preemption_elsewhere(error, launch)
    if preempted_by:
        reported = Preempted(
            f"{describe_reason_to_leave(preempted_by)} while another rank was leaving; "
            f"{launch.preemption.describe_saves()}"
        )
    elif is_out_of_memory(error):
        reported = explain_memory(error, launch)

    if isinstance(reported, Preempted):
        launch.run_folder.fail("preempted", str(reported))
        return reported

    is_transient = False
    if isinstance(reported, UserError):
        reported.has_lost = has_lost_work(launch)
        is_transient = reported.is_transient
    # The launcher starts a rank again that ends with one of these codes, so the run is not lost yet.
    may_come_back = exit_code_of(reported) in (EXIT_PREEMPTED, EXIT_RETRY)
    status = "preempted" if may_come_back else "failed"
    launch.run_folder.fail(status, describe_cause(reported), may_pass=is_transient)
    return reported


def has_lost_work(launch: Launch) -> bool:
    """Return whether batches were trained that no save holds.

    They are this launch's, or those of an earlier one that has failed, if this launch has not carried on.
    """
    if launch.run_folder.trainer is None:
        return has_lost_batches(read_status(launch.run_folder.folder) or {})
    if launch.trainer is None or launch.checkpointing is None:
        return False
    return launch.checkpointing.has_unsaved_batches(launch.trainer.state)


def find_preemption_elsewhere(error: BaseException, launch: Launch) -> str:
    """Return why another rank was leaving when this rank lost its connection to it, which is `error`.

    Returns an empty text for any other error, and also if a rank has failed or saves fail: the launch then ends with
    that failure.
    """
    if launch.preemption.failure is not None or not is_lost_peer(error):
        return ""
    if launch.checkpointing is not None and launch.checkpointing.failed_saves.count > 0:
        return ""
    return REASONS[launch.preemption.reason] or announced_preemption()


def explain_memory(error: BaseException, launch: Launch) -> OutOfMemoryError:
    """Return an error that says when this rank ran out of memory, and which settings take less."""
    config, trainer = launch.config, launch.trainer
    when = "while the run was built"
    microbatch_size = config.first_microbatch_size(config.global_train_batch_size // layout_here(config).num_data_ranks)
    if trainer is not None:
        when = f"in batch {int(trainer.state.timestamp.batch) + 1}"
        if isinstance(trainer.state.device_train_microbatch_size, int):
            microbatch_size = trainer.state.device_train_microbatch_size
    return explain_out_of_memory(error, config, when, microbatch_size)


# -------------------------------------------------------------------------------------------------------------- export


def export(config: TrainConfig, run_folder: RunFolder, checkpointing: Checkpointing) -> None:
    """Write the last checkpoint's weights for plain transformers into the run folder, on rank 0. Every rank calls this.

    The run is done by then, so a failure prints one line, and `checkpoint export` can repeat it. The other ranks wait
    for rank 0 at torch's store. They would time out in a collective, because a large model takes longer than
    `dist_timeout`.
    """
    checkpoint_url = checkpointing.newest_url
    if checkpoint_url is not None:  # a signal that comes during the export finds the run saved
        checkpointing.preemption.saved = checkpoint_url.rsplit("/", 1)[-1]
    if run_folder.is_main:
        reason = describe_export_problem(config.model)
        if reason is None and not checkpointing.partners.writes_checkpoints:
            reason = "another launch of this run has its last save"
        export_on_rank_0(config, run_folder, checkpoint_url, reason)

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

    `refusal` says why the run cannot be exported; None if it can. A run without a checkpoint exports nothing.
    """
    folder = run_folder.folder / "huggingface"
    note = None
    if refusal is None and checkpoint_url is not None:
        try:
            with tempfile.TemporaryDirectory() as tokenizer_folder:
                if is_local_or_cached(config.tokenizer.name):
                    load_tokenizer(config.tokenizer.name).save(tokenizer_folder)
                tensors = load_full_tensors(checkpoint_url)
                note = export_model(tensors, config.model, folder, tokenizer_folder=tokenizer_folder)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            refusal = f"{reason}; `llmfoundry-lite checkpoint export {run_folder.folder} {folder}` makes up for it"

    outcome = f"exported to {folder}" if refusal is None else f"not exported to {folder}: {refusal}"
    print(outcome, flush=True)
    if note is not None:
        print(note, flush=True)
