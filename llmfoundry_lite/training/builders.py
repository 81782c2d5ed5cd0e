"""One `build_<thing>(config)` for each block of the YAML."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from composer.core import Callback, DataSpec, Evaluator, Event, State
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from llmfoundry_lite import devices
from llmfoundry_lite.checkpoint.state import row_orders
from llmfoundry_lite.config.layout import DataRanks, Layout, layout_here
from llmfoundry_lite.config.load_eval import load_tasks
from llmfoundry_lite.config.schema import (
    Duration,
    LoaderConfig,
    OptimizerConfig,
    TrainConfig,
    as_dict,
    data_label,
    parse_seconds,
)
from llmfoundry_lite.data.dataset import build_text_dataset
from llmfoundry_lite.data.loader import build_text_loader
from llmfoundry_lite.data.tokenizer import Tokenizer, load_tokenizer
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.hardware import MIB
from llmfoundry_lite.models.attention import choose_implementation
from llmfoundry_lite.models.flops import count_flops_per_token
from llmfoundry_lite.parallel.context import build_context
from llmfoundry_lite.parallel.fsdp import build_parallel_model, build_pipeline
from llmfoundry_lite.parallel.mesh import build_mesh, build_stage_group
from llmfoundry_lite.parallel.precision import PRECISIONS
from llmfoundry_lite.parallel.zero import rows_of, step_together
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_lite.training.adapter import LanguageModel, PipelinedLanguageModel
from llmfoundry_lite.training.agreement import Agreement, count_tokens
from llmfoundry_lite.training.checkpointing import Checkpointing
from llmfoundry_lite.training.gradients import GradientStep, LossScaler
from llmfoundry_lite.training.in_context import InContext
from llmfoundry_lite.training.islands import Islands
from llmfoundry_lite.training.loggers import ConsoleLine, Mirror, ProgressBar, TensorboardMirror, WandbMirror
from llmfoundry_lite.training.loss import cross_entropy_sum
from llmfoundry_lite.training.monitor import DataDigest, DropoutSeed, RunMonitor
from llmfoundry_lite.training.muon import build_muon
from llmfoundry_lite.training.optimizers import build_adamw, build_lion
from llmfoundry_lite.training.preemption import Preemption
from llmfoundry_lite.training.profiler import Profiler
from llmfoundry_lite.training.schedule import LearningRate, is_evaluation_due
from llmfoundry_lite.training.start import Start


def build_model(config: TrainConfig, layout: Layout) -> LanguageModel:
    fsdp = config.sharding
    precision = PRECISIONS[config.precision, fsdp.mixed_precision]
    mesh = build_mesh(layout, devices.device_type())
    attn_impl, why = choose_implementation(
        config.model, devices.device_type(), precision.autocast or precision.parameters
    )
    if dist.get_rank() == 0:
        print(f"attention: {attn_impl}: {why}", flush=True)
        if devices.computed_precision(config.precision) != config.precision:
            print(f"precision: tf32: {devices.device_name()} has none; computing in fp32", flush=True)
    separator, begins = find_separator(config)
    options: Any = {"separator_begins": begins, "by_rows": not config.accumulate_train_batch_on_tokens}
    context = build_context(config.context, layout, devices.device_type()) if layout.context > 1 else None
    loss = partial(cross_entropy_sum, chunk_bytes=config.loss_chunk_mib * MIB)
    if layout.pipeline > 1:
        loss = partial(loss, backward_runs_once=not config.pipeline.splits_backward)
        pipeline = build_pipeline(
            *(config.model, fsdp, precision, mesh, config.seed, config.pipeline, loss),
            compile_config=config.compile_config,
            attn_impl=attn_impl,
            context=context,
            sequence_parallel=config.sequence_parallel,
        )
        return PipelinedLanguageModel(pipeline, precision, separator, context, **options)
    model = build_parallel_model(
        *(config.model, fsdp, precision, mesh, config.seed, config.compile_config, attn_impl),
        sequence_parallel=config.sequence_parallel,
    )
    language_model: Any = LanguageModel(model, precision, separator, context, loss, **options)
    if fsdp.offload_optimizer:  # Composer moves every model to the device, and FSDP wants these parameters on the host
        language_model.to = lambda *args, **kwargs: language_model
    return language_model


def find_separator(config: TrainConfig) -> tuple[int | None, bool]:
    """The token between documents that do not see each other, and whether it begins one."""
    dataset = config.train_loader.dataset
    if not config.model.attn_config.attn_uses_sequence_id:
        return None, False
    if dataset.bos_token_id is not None:
        return dataset.bos_token_id, True
    if dataset.eos_token_id is not None:
        return dataset.eos_token_id, False
    return load_tokenizer(config.tokenizer.name).eos_token_id, False


def build_optimizer(config: TrainConfig, model: torch.nn.Module, layout: Layout) -> Optimizer:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    shares_state = config.sharding.sharding_strategy == "ZERO_1"
    if shares_state:
        named = dict(zip(named, rows_of(list(named.values())), strict=True))
    if config.optimizer.name == "muon":
        group = build_stage_group(layout, devices.device_type())
        orders = row_orders(model, {f"model/{name}": parameter for name, parameter in named.items()})
        orders = {name.removeprefix("model/"): runs for name, runs in orders.items()}
        optimizer = build_muon(named, config.optimizer, config.model, group, orders)
    else:
        optimizer = build_optimizer_of(config.optimizer, list(named.values()))
    if shares_state:
        step_together(optimizer)
    return optimizer


def build_optimizer_of(config: OptimizerConfig, parameters: Sequence[torch.nn.Parameter]) -> Optimizer:
    if config.name in ("decoupled_adamw", "adamw"):
        return build_adamw(parameters, config)
    if config.name in ("lion", "decoupled_lionw"):
        return build_lion(parameters, config)
    return call_object(config.name, "optimizer", parameters, lr=config.lr, **config.kwargs)


def build_train_data(config: TrainConfig, layout: Layout) -> DataSpec:
    return build_data(
        "train_loader", config.train_loader, config, config.global_train_batch_size, layout, evaluation=False
    )


def build_evaluators(config: TrainConfig, layout: Layout) -> list[Evaluator]:
    """One for each block of validation data, with its label; none where nothing is ever evaluated."""
    batch_size = config.eval_batch_size * layout.num_data_ranks
    return [
        Evaluator(
            label=data_label(key),
            dataloader=build_data(key, loader, config, batch_size, layout, evaluation=True),
            metric_names=["loss"],
        )
        for key, loader in config.validation.items()
        if config.eval_interval != 0
    ]


def build_data(
    key: str, loader: LoaderConfig, config: TrainConfig, global_batch_size: int, layout: Layout, *, evaluation: bool
) -> DataSpec:
    """The batches of the loader whose block stands at `key`."""
    if loader.name.startswith("python:"):
        batches = call_object(
            loader.name,
            key,
            device_batch_size=global_batch_size // layout.num_data_ranks,
            num_workers=loader.num_workers,
            drop_last=loader.drop_last,
            **loader.kwargs,
        )
    else:
        batches = build_text_batches(loader, config, global_batch_size, layout, evaluation=evaluation)
    return DataSpec(batches, get_num_tokens_in_batch=count_tokens)


def build_text_batches(
    loader: LoaderConfig, config: TrainConfig, global_batch_size: int, layout: Layout, *, evaluation: bool
) -> DataLoader:
    options, ranks = asdict(loader.dataset), layout.data_ranks(this_rank().rank)
    # What a stream does not say is said by the data set around it.
    options["streams"] = {
        name: {key: value for key, value in stream.items() if value is not None}
        for name, stream in options["streams"].items()
    }
    options["max_seq_len"] = loader.dataset.max_seq_len or config.max_seq_len
    for key in [key for key in options if "_token_id" in key]:
        del options[key]  # the model's: which documents see each other
    dataset = build_text_dataset(
        **options,
        global_batch_size=global_batch_size,
        drop_last=loader.drop_last and not evaluation,
        evaluation=evaluation,
        vocab_size=config.model.vocab_size,
        tokenizer=LazyTokenizer(config.tokenizer.name),
        share=(ranks.rank, ranks.size),
    )
    return build_text_loader(
        dataset,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory and devices.device_type() == "cuda",
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        timeout=loader.timeout,
    )


class LazyTokenizer:
    """Loaded when the first text is met: shards of token ids never need it, and may be trained on without it."""

    def __init__(self, name: str):
        self.name = name

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.name)


def build_callbacks(
    config: TrainConfig,
    ranks: DataRanks,
    model: LanguageModel,
    preemption: Preemption,
    agreement: Agreement,
    start: Start,
    islands: Islands | None,
) -> list[Callback]:
    guard = GradientStep(
        model,
        config.algorithms.gradient_clipping,
        config.on_non_finite,
        config.max_skipped_batches,
        LossScaler() if model.precision.loss_scaling else None,
        config.reduces_every_microbatch,
    )
    monitor = RunMonitor(
        config.callbacks.speed_monitor.window_size,
        count_flops_per_token(config.model, config.max_seq_len),
        Duration.parse(config.max_duration),
        devices.computed_precision(config.precision).removeprefix("amp_"),
        (lambda: islands.tokens_elsewhere) if islands is not None else lambda: 0,
    )
    rate = LearningRate(config.scheduler, Duration.parse(config.max_duration))
    callbacks: list[Callback] = [DataDigest(guard, agreement), rate, guard, monitor]
    if any((config.model.resid_pdrop, config.model.emb_pdrop, config.model.attn_config.attn_pdrop)):
        place = layout_here(config).coordinates(this_rank().rank)
        callbacks.append(DropoutSeed(config.seed, model, ranks, place, has_runs=config.sequence_parallel))
    for name, arguments in config.callbacks.extra.items():
        callbacks.append(call_object(name, "callbacks", **arguments))
    if config.callbacks.profiler is not None:
        callbacks.append(Profiler(config.callbacks.profiler, Path(config.run_folder)))
    callbacks.append(agreement)  # before what a reason to leave may make needless
    checkpointing = Checkpointing(config, model, guard, preemption, agreement, start, islands)
    if config.icl_tasks and config.eval_interval != 0:
        callbacks.append(build_in_context(config, ranks, model, preemption, checkpointing))
    return [*callbacks, checkpointing]


def build_mirrors(config: TrainConfig, state_progress: Any) -> list[Mirror]:
    folder, max_duration = Path(config.run_folder), Duration.parse(config.max_duration)
    mirrors: list[Mirror] = []
    if config.progress_bar:
        mirrors.append(ProgressBar(max_duration, state_progress))
    elif config.log_to_console:
        mirrors.append(ConsoleLine(max_duration, Duration.parse(config.console_log_interval)))
    if config.loggers.wandb is not None:
        mirrors.append(WandbMirror(config.loggers.wandb, config.run_name, folder, as_dict(config)))
    if config.loggers.tensorboard is not None:
        mirrors.append(TensorboardMirror(config.loggers.tensorboard, folder))
    return mirrors


def build_in_context(
    config: TrainConfig,
    ranks: DataRanks,
    model: LanguageModel,
    preemption: Preemption,
    checkpointing: Checkpointing,
) -> InContext:
    return InContext(
        model,
        load_tokenizer(config.tokenizer.name),
        load_tasks(config.icl_tasks, config.icl_task_folder),
        build_eval_interval(config, preemption),
        checkpointing.leave_if_asked,
        max_batch_tokens=max(config.eval_batch_size * config.max_seq_len, 2048),
        limit=config.icl_limit,
        ranks=ranks,
    )


def build_preemption(
    config: TrainConfig,
    on_timeout: Callable[[str], None],
    on_request: Callable[[str], None],
    on_second_press: Callable[[str], None],
) -> Preemption:
    wall = parse_seconds(config.max_wall_time) if config.max_wall_time is not None else None
    folder, grace_seconds = Path(config.run_folder), config.preemption_grace_seconds
    return Preemption(folder, grace_seconds, wall, on_timeout, on_request, on_second_press)


def build_eval_interval(config: TrainConfig, preemption: Preemption) -> Callable[[State, Event], bool]:
    """Evaluate right after a batch, so that its numbers stand in that batch's record; and after the last batch.
    Not when the ranks have agreed to leave after this batch: then the next launch does."""
    return lambda state, event: event == Event.BATCH_END and not preemption.agreed and is_evaluation_due(config, state)


def call_object(name: str, key: str, /, *arguments: Any, **options: Any) -> Any:
    """The user's own object made from what the YAML gives it. Raises ConfigError."""
    thing = load_object(name, f"{key}.name" if key != "callbacks" else key)
    try:
        return thing(*arguments, **options)
    except TypeError as error:
        raise ConfigError(f"{key}: {name} does not take these keys: {error}") from error


def load_object(name: str, key: str) -> Any:
    """`python:package.module:Thing` -> Thing. Raises ConfigError."""
    module_name, _, attribute = name.removeprefix("python:").partition(":")
    if not attribute:
        raise ConfigError(f"{key}: {name!r} given, expected python:package.module:Thing")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{key}: {name}: {error}; is its folder on PYTHONPATH?") from None
    except AttributeError:
        raise ConfigError(f"{key}: {name}: module {module_name} has no {attribute}") from None
