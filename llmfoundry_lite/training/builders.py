"""One `build_<thing>` for each block of the YAML, and the trainer that consists of them.

`data_builders.py` builds the loaders of data.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from composer.core import Callback
from composer.loggers import LoggerDestination
from torch.optim import Optimizer

from llmfoundry_lite import companions, devices
from llmfoundry_lite.config.blocks import given_blocks
from llmfoundry_lite.config.layout import DataRanks, Layout, layout_here
from llmfoundry_lite.config.load_tasks import load_tasks, trust_code_of
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.optimizer_schema import OptimizerConfig, SchedulerConfig
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.data.tokenizer import load_configured_tokenizer
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.evaluation.items import SEPARATE
from llmfoundry_lite.evaluation.tasks import check_task
from llmfoundry_lite.hardware import MIB
from llmfoundry_lite.models.attention import choose_implementation
from llmfoundry_lite.models.mpt import Block
from llmfoundry_lite.own_code import PREFIX, call_object, errors_named, is_own, trust_code
from llmfoundry_lite.parallel.exact import ExactSums, round_unembedding_gradient
from llmfoundry_lite.parallel.fsdp import build_parallel_model
from llmfoundry_lite.parallel.mesh import build_mesh
from llmfoundry_lite.parallel.precision import PRECISIONS
from llmfoundry_lite.ranks.exchange import user_errors_on_all_ranks
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_lite.training.adapter import LanguageModel
from llmfoundry_lite.training.agreement import Agreement, Meter
from llmfoundry_lite.training.checkpointing import Checkpointing, Start
from llmfoundry_lite.training.data_builders import build_data, build_evaluators
from llmfoundry_lite.training.gradient_step import GradientStep, LossScaler
from llmfoundry_lite.training.in_context import InContext
from llmfoundry_lite.training.launch_role import LaunchRole
from llmfoundry_lite.training.loss import OwnLoss, cross_entropy_sum, log_p_and_gradient
from llmfoundry_lite.training.model_counts import describe_own_parts, find_flops_of_batches
from llmfoundry_lite.training.monitor import DropoutSeed, Profiler, RunMonitor
from llmfoundry_lite.training.optimizers import OptimizerContext, find_builder
from llmfoundry_lite.training.own_optimizer import CompareOptimizerState
from llmfoundry_lite.training.parameter_groups import group_parameters, own_groups, refuse_unknown_settings
from llmfoundry_lite.training.preemption import Preemption
from llmfoundry_lite.training.rank_times import RankTimes
from llmfoundry_lite.training.run_folder import RunFolder
from llmfoundry_lite.training.schedule import LearningRate, OwnSchedule
from llmfoundry_lite.training.trainer import ParallelTrainer

MIN_TASK_BATCH_TOKENS = 2048
"""Least number of tokens that an evaluation in context puts through the model at once, on each rank."""


def build_and_restore(
    config: TrainConfig, run_folder: RunFolder, preemption: Preemption, start: Start, role: LaunchRole
) -> tuple[ParallelTrainer, Checkpointing]:
    """Build the data, the model, the callbacks and the trainer of a run, and restore it from `start`.

    Collective. Composer's Trainer restores while it is constructed: it fires AFTER_LOAD, which
    `Checkpointing.after_load` answers. So the returned trainer is at the batch of the checkpoint, with its weights and
    optimizer state. `start` is what `find_start` has chosen, and `role` is this launch's role in the run. Raises
    UserError on all ranks.
    """
    trust_code(name for _, name in config.own_code)  # the configuration of a launch is its user's

    # Data and model. All ranks with the same data rank read the same rows of each batch.
    layout = layout_here(config)
    ranks = layout.data_ranks(this_rank().rank)
    device_batch_size = config.global_train_batch_size // ranks.size
    train_data = build_data("train_loader", config.train_loader, config, config.global_train_batch_size, layout)
    evaluators = build_evaluators(config, layout)
    model = build_model(config, layout)

    # The parts of our training step and of what happens between two batches.
    gradient_step = GradientStep(
        model=model,
        clipping=config.algorithms.gradient_clipping,
        on_non_finite=config.on_non_finite,
        max_skipped_batches=config.max_skipped_batches,
        scaler=LossScaler() if model.precision.loss_scaling else None,
        reduces_every_microbatch=config.reduces_every_microbatch,
        exact_sums=model.exact_sums,
    )
    build_meter = companions.load_if_installed("llmfoundry_ops.energy:build_meter") or Meter
    sample_length = config.max_seq_len if config.seq_lens.smallest < config.max_seq_len else None
    agreement = Agreement(ranks, preemption, role.end_batch, sample_length, build_meter())
    tasks = build_in_context(config, ranks, model) if config.icl_tasks and config.evaluates else None
    checkpointing = Checkpointing(config, model, gradient_step, preemption, agreement, start, role, tasks)
    checkpointing.on_saves = run_folder.note_saves
    checkpointing.run_state.callbacks = own_callbacks = build_own_callbacks(config)
    run_folder.on_status = checkpointing.record_launch

    # Loggers of the user's own get what Composer gives a logger, on every rank.
    loggers = [call_object(name, "loggers", "loggers", options) for name, options in config.loggers.extra.items()]
    for name, logger in zip(config.loggers.extra, loggers, strict=True):
        if not isinstance(logger, LoggerDestination):
            raise ConfigError(f"loggers: {name} returns {type(logger).__name__}, expected a Composer LoggerDestination")

    # The trainer, which restores the run. At each event, callbacks are called in the order of the list, and then
    # loggers.
    trainer = ParallelTrainer(
        ranks=ranks,
        agreement=agreement,
        gradient_step=gradient_step,
        role=role,
        batch_sizes=config.batch_sizes,
        seq_lens=config.seq_lens,
        model=model,
        train_dataloader=train_data,
        eval_dataloader=evaluators or None,
        eval_interval=checkpointing.evaluates_now if evaluators else 0,
        optimizers=build_optimizer(config, model, layout),
        max_duration=str(config.max_duration),
        callbacks=[
            *build_rank_times(config, layout, model, agreement, run_folder),
            *build_callbacks(config, layout, ranks, model, role),
            *own_callbacks.values(),
            *build_profiler(config),
            checkpointing,
            *build_foundry_callbacks(config, checkpointing),
        ],
        loggers=[run_folder, *loggers],
        run_name=config.run_name,
        device="gpu" if devices.device_type() == "cuda" else "cpu",
        precision="fp32",  # Composer casts nothing: `parallel/precision.py` has the dtypes
        device_train_microbatch_size=config.first_microbatch_size(device_batch_size),
        accumulate_train_batch_on_tokens=config.accumulate_train_batch_on_tokens,
        seed=config.seed,
        dist_timeout=config.dist_timeout,
        progress_bar=False,
        log_to_console=False,
        python_log_level=config.python_log_level,
    )
    for logger in loggers:
        logger.log_hyperparameters(as_dict(config))  # as the run records it, which masks passwords in URLs
    return trainer, checkpointing


# ---------------------------------------------------------------------------------------------------------- callbacks


def build_callbacks(
    config: TrainConfig, layout: Layout, ranks: DataRanks, model: LanguageModel, role: LaunchRole
) -> list[Callback]:
    """Build the callbacks that Composer calls before `Checkpointing` at each event.

    They set the learning rate, log the speed, and seed dropout. Raises ConfigError if a schedule of the user's own
    cannot be built.
    """
    callbacks: list[Callback] = [
        LearningRate(
            config.scheduler,
            config.max_duration,
            build_own_schedule(config.scheduler),
            logs_groups=bool(config.optimizer.param_groups),
        ),
        RunMonitor(
            config.callbacks.speed_monitor.window_size,
            find_flops_of_batches(config, model),
            config.max_duration,
            devices.computed_precision(config.precision).removeprefix("amp_"),
            role,
            config.batch_sizes,
        ),
    ]
    if is_own(config.optimizer.name):
        callbacks.append(CompareOptimizerState(config.optimizer.name))

    # Dropout needs a seed in each batch, but seeding takes time that a model without dropout does not have to spend.
    has_dropout = any((config.model.resid_pdrop, config.model.emb_pdrop, config.model.attn_config.attn_pdrop))
    if has_dropout:
        coordinates = layout.coordinates(this_rank().rank)
        callbacks.append(
            DropoutSeed(config.seed, model, ranks, coordinates, sequence_parallel=config.sequence_parallel)
        )

    return callbacks


def build_own_callbacks(config: TrainConfig) -> dict[str, Callback]:
    """Build the user's own callbacks, which the YAML names, and those of companions' blocks, in this order.

    Returns them by the names under which checkpoints keep their state (`RunState.callbacks`). Composer calls them
    before `Checkpointing` at each event, so that what they log is in the record of the batch. Raises ConfigError if one
    cannot be built, or is no callback.
    """
    callbacks: dict[str, Any] = {}
    for name, arguments in config.callbacks.extra.items():
        callbacks[name.removeprefix(PREFIX)] = call_object(name, "callbacks", "callbacks", arguments)
    for key, block in given_blocks(config.blocks).items():
        if block.callback:
            with errors_named(f"{key}: {block.callback}"):
                callbacks[key] = companions.import_address(block.callback)(config)

    for name, callback in callbacks.items():
        if not isinstance(callback, Callback):
            key = f"callbacks: {name}" if ":" in name else name
            raise ConfigError(f"{key} returns {type(callback).__name__}, expected a Composer Callback")
    return callbacks


def build_profiler(config: TrainConfig) -> list[Callback]:
    """Build the callback that profiles, if the configuration has one. It is called after those that it may measure."""
    if config.callbacks.profiler is None:
        return []
    return [Profiler(config.callbacks.profiler, Path(config.run_folder))]


def build_rank_times(
    config: TrainConfig, layout: Layout, model: LanguageModel, agreement: Agreement, run_folder: RunFolder
) -> list[Callback]:
    """Build the callback that finds slow ranks, which Composer calls first at each event.

    Returns an empty list if the configuration has none, or if no rank has another one to be compared with.
    """
    ranks_of_a_stage = layout.world_size // layout.pipeline
    if config.stragglers is None or ranks_of_a_stage == 1:
        return []
    blocks: list[Block] = []
    if layout.tensor == 1 and layout.context == 1:  # otherwise ranks wait for each other in every block
        blocks = [module for module in model.modules() if isinstance(module, Block)]
    return [RankTimes(config.stragglers, layout, blocks, agreement, run_folder)]


def build_own_schedule(config: SchedulerConfig) -> OwnSchedule | None:
    """Build the user's own schedule of the learning rate; None for one of ours, which is a function of the keys.

    Raises ConfigError if it cannot be imported, or does not take its keys.
    """
    if not is_own(config.name):
        return None
    return call_object(config.name, "scheduler.name", "scheduler", config.kwargs)


def build_foundry_callbacks(config: TrainConfig, checkpointing: Checkpointing) -> list[Callback]:
    """Build those of LLM Foundry's callbacks that the configuration asks for, such as `early_stopper`.

    Composer calls them after `Checkpointing` at each event, because they need the restored run and its saves. A
    companion implements them. Raises ConfigError if it is not installed.
    """
    wanted = config.callbacks
    builders: list[Any] = []  # each takes the configuration and `checkpointing`, and returns a callback
    if wanted.hf_checkpointer is not None:
        key = "callbacks.hf_checkpointer"
        builders.append(companions.load("llmfoundry_ops.after_saves:build_hf_checkpointer", key))
    if wanted.generate_callback is not None:
        key = "callbacks.generate_callback"
        builders.append(companions.load("llmfoundry_ops.after_saves:build_generate", key))
    if wanted.early_stopper is not None:
        builders.append(companions.load("llmfoundry_ops.stoppers:EarlyStopper", "callbacks.early_stopper"))
    if wanted.kill_loss_spike is not None:
        builders.append(companions.load("llmfoundry_ops.stoppers:KillLossSpike", "callbacks.kill_loss_spike"))
    return [build(config, checkpointing) for build in builders]


def build_in_context(config: TrainConfig, ranks: DataRanks, model: LanguageModel) -> InContext:
    """Build the evaluation of in-context tasks (`icl_tasks`) during training. The data ranks divide their items.

    The checks before the launch import no code of the user's own, so tasks that name some are checked here. Raises
    UserError on all ranks.
    """
    tasks = load_tasks(config.icl_tasks, config.icl_task_folder)
    trust_code_of(tasks)
    tokenizer = load_configured_tokenizer(config.tokenizer)
    with user_errors_on_all_ranks():
        for task in tasks:
            if task.own_code:
                check_task(
                    task,
                    tokenizer,
                    tokenization=SEPARATE,
                    max_seq_len=config.model.max_seq_len,
                    limit=config.icl_limit,
                )
    return InContext(
        model=model,
        tokenizer=tokenizer,
        tasks=tasks,
        max_batch_tokens=max(config.eval_batch_size * config.max_seq_len, MIN_TASK_BATCH_TOKENS),
        limit=config.icl_limit,
        ranks=ranks,
    )


# ----------------------------------------------------------------------------------------------- model and optimizer


def build_model(config: TrainConfig, layout: Layout) -> LanguageModel:
    """Build this rank's part of the model, sharded and with its initial weights, as Composer trains it.

    Collective. `layout` divides the devices. Rank 0 prints which implementation of attention is used and why. Raises
    ConfigError if the layout needs a companion that is not installed.
    """
    # What the model needs to know of this machine and of the run.
    fsdp, device_type = config.sharding, devices.device_type()
    precision = PRECISIONS[config.precision, fsdp.mixed_precision]
    mesh = build_mesh(layout, device_type)
    attn_impl, reason = choose_implementation(config.model, device_type, precision.autocast or precision.parameters)
    if dist.get_rank() == 0:
        print(f"attention: {attn_impl}: {reason}", flush=True)
        if devices.computed_precision(config.precision) != config.precision:
            print(f"precision: tf32: {devices.device_name()} has none; computing in fp32", flush=True)
    exact_sums = ExactSums() if config.exact_sums else None
    model_options: dict[str, Any] = {
        "fsdp": fsdp,
        "precision": precision,
        "mesh": mesh,
        "seed": config.seed,
        "compile_config": config.compile_config,
        "attn_impl": attn_impl,
        "sequence_parallel": config.sequence_parallel,
        "sums": exact_sums,
    }

    # What the loss needs to know.
    separator, separator_begins = find_separator(config)
    loss_options: dict[str, Any] = {
        "separator": separator,
        "separator_begins": separator_begins,
        "by_rows": not config.accumulate_train_batch_on_tokens,
    }
    context = None  # the ranks that divide each sample's tokens among them
    if layout.context > 1:
        key = "cp_config.context_parallel_degree"
        build_context = companions.load("llmfoundry_layouts.context:build_context", key)
        context = build_context(config.context, layout, device_type)

    # A rank of a pipeline builds its stages of the model, any other rank its shards of the whole model.
    sum_loss = build_loss(config, layout)
    if layout.pipeline > 1:
        key = "pp_config.pipeline_parallel_degree"
        build_language_model = companions.load("llmfoundry_layouts.language_model:build_language_model", key)
        language_model: Any = build_language_model(
            config.model, config.pipeline, sum_loss, context, rows=loss_options, **model_options
        )
    else:
        model = build_parallel_model(config.model, **model_options)
        language_model = LanguageModel(model, precision, context=context, sum_loss=sum_loss, **loss_options)
    language_model.exact_sums = exact_sums
    if dist.get_rank() == 0:
        for line in describe_own_parts(config.model, language_model):
            print(line, flush=True)

    # Composer moves every model to the device, but FSDP needs offloaded parameters on the host.
    if fsdp.offload_optimizer and layout.pipeline == 1:
        language_model.to = lambda *args, **kwargs: language_model
    return language_model


def build_loss(config: TrainConfig, layout: Layout) -> Callable[..., torch.Tensor]:
    """Build the function that sums the cross-entropy of tokens, with the arguments of `cross_entropy_sum`.

    Depending on the configuration, its inner step is compiled or the user's own, the vocabulary is divided over the
    ranks of a tensor-parallel group, and the gradient of tied embeddings is rounded for exact sums. Raises ConfigError
    if the vocabulary must be divided and the companion for that is not installed, and for a loss of the user's own that
    cannot be built.
    """
    compiled = None
    if config.fuses_loss:
        compiled = torch.compile(log_p_and_gradient, **(config.compile_config or {}))
    sum_loss: Callable[..., torch.Tensor] = partial(
        cross_entropy_sum, chunk_bytes=config.loss_chunk_mib * MIB, compiled=compiled
    )

    if is_own(config.model.loss_fn):
        sum_loss = partial(sum_loss, own_loss=build_own_loss(config.model))

    if layout.tensor > 1:
        key = "tp_config.tensor_parallel_degree"
        divide_vocabulary = companions.load("llmfoundry_layouts.tensor:divide_vocabulary", key)
        sum_loss = partial(sum_loss, divide_vocabulary=divide_vocabulary)

    # Tied embeddings get a second gradient at the input. Each of the two is rounded before autograd adds them.
    if config.exact_sums and config.model.tie_word_embeddings:
        sum_loss = round_unembedding_gradient(sum_loss)
    return sum_loss


def build_own_loss(model: ModelConfig) -> OwnLoss:
    """Build the loss of the user's own. Raises ConfigError for one that cannot be built, or has parameters."""
    loss = call_object(model.loss_fn, "model.loss_fn", "model.loss_kwargs", model.loss_kwargs)
    if not callable(loss):
        raise ConfigError(
            f"model.loss_fn: {model.loss_fn} returns {type(loss).__name__}, expected a loss that can be called with "
            "logits and targets"
        )
    if isinstance(loss, torch.nn.Module):
        tensors = [*loss.named_parameters(), *loss.named_buffers()]
        if tensors:
            name, tensor = tensors[0]
            raise ConfigError(
                f"model.loss_fn: {model.loss_fn} has a tensor, {name}, of shape {list(tensor.shape)}, which would be "
                "neither trained, moved nor saved; keep a number, or make the tensor in forward"
            )
    return cast(OwnLoss, loss)


def find_separator(config: TrainConfig) -> tuple[int | None, bool]:
    """Return the id of the token between documents that must not see each other, and whether it begins a document.

    Returns None and False if a sample counts as one document. Otherwise the token is the data set's `bos_token_id`,
    which begins documents, or its `eos_token_id`, or the tokenizer's token for the end of a text.
    """
    dataset = config.train_loader.dataset
    if not config.model.attn_config.attn_uses_sequence_id:
        return None, False
    if dataset.bos_token_id is not None:
        return dataset.bos_token_id, True
    if dataset.eos_token_id is not None:
        return dataset.eos_token_id, False
    return load_configured_tokenizer(config.tokenizer).eos_token_id, False


def build_optimizer(config: TrainConfig, model: torch.nn.Module, layout: Layout) -> Optimizer:
    """Build the optimizer that the configuration names, for this rank's part of the model's parameters.

    Call it on every rank after the model is sharded. With `sharding_strategy: ZERO_1`, each rank has whole parameters,
    and its optimizer updates only some rows of each; a companion divides the rows. Raises ConfigError if that is not
    installed, or if the user's own optimizer cannot be built.
    """
    context = OptimizerContext(
        model=model,
        model_config=config.model,
        layout=layout,
        fused=not config.exact_sums,  # the last bits of a fused kernel on a CPU depend on where a shard ends
    )

    def build(parameters: dict[str, torch.nn.Parameter]) -> Optimizer:
        """Build an optimizer for these parameters, which are given by name."""
        return build_optimizer_of(config.optimizer, parameters, context)

    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if config.sharding.sharding_strategy == "ZERO_1":
        # The companion cuts this rank's rows out of the parameters, and calls `build` with them.
        key = "fsdp_config.sharding_strategy: ZERO_1"
        share_optimizer = companions.load("llmfoundry_layouts.zero:share_optimizer", key)
        return share_optimizer(parameters, build)
    return build(parameters)


def build_optimizer_of(
    config: OptimizerConfig, parameters: dict[str, torch.nn.Parameter], context: OptimizerContext
) -> Optimizer:
    """Build the optimizer that `config` names for `parameters`, which are given by name.

    The user's own optimizer is called with the parameters, `lr`, and the other keys of the block `optimizer`. Raises
    ConfigError if it cannot be imported, if it does not take these keys, if a group of `param_groups` is empty, or if
    one has a setting that the user's own optimizer does not have.
    """
    groups = group_parameters(config, parameters, context)
    if is_own(config.name):
        tensors = own_groups(config, groups)
        own = call_object(config.name, "optimizer.name", "optimizer", config.kwargs, tensors, lr=config.lr)
        refuse_unknown_settings(config, own)
        return own
    build = find_builder(config.name)
    return build(groups, context)
