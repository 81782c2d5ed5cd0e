"""Builds a rank's loaders of training and validation data from their blocks of the YAML, as Composer takes them."""

import math

from composer.core import DataSpec, Evaluator

from llmfoundry_lite import devices
from llmfoundry_lite.config.data_schema import LoaderConfig
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.schema import TrainConfig, data_label
from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.data.loader import build_text_loader
from llmfoundry_lite.data.tokenizer import LazyTokenizer
from llmfoundry_lite.own_code import call_object, is_own
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_lite.training.agreement import count_tokens


def build_evaluators(config: TrainConfig, layout: Layout) -> list[Evaluator]:
    """Build Composer's evaluator for each block of validation data. Returns none if the run never evaluates.

    `eval_subset_num_batches` limits the number of samples, so that the subset is the same on any number of devices. Our
    own loader ends after that many samples itself. A user's loader (`python:`) gets `device_eval_batch_size` as its
    `device_batch_size`, and Composer stops after as many of its batches as hold that number of samples.
    """
    if not config.evaluates:
        return []
    global_batch_size = config.eval_batch_size * layout.num_data_ranks
    evaluators: list[Evaluator] = []
    for key, loader in config.validation.items():
        num_batches = -1  # all that the loader has
        if config.eval_subset_samples is not None and loader.name != "text":
            num_batches = math.ceil(config.eval_subset_samples / global_batch_size)
        evaluators.append(
            Evaluator(
                label=data_label(key),
                dataloader=build_data(key, loader, config, global_batch_size, layout, evaluation=True),
                metric_names=["loss"],
                subset_num_batches=num_batches,
            )
        )
    return evaluators


def build_data(
    key: str,
    loader: LoaderConfig,
    config: TrainConfig,
    global_batch_size: int,
    layout: Layout,
    *,
    evaluation: bool = False,
) -> DataSpec:
    """Build this rank's data loader from a block of the YAML, wrapped as Composer takes it.

    `key` names the block, such as "train_loader", for errors, and `loader` is its content. `global_batch_size` counts
    samples over all ranks. `evaluation` says that these are validation data, which are read in order and may be limited
    to a subset. The wrapper counts the tokens of a batch without padding. Raises UserError.
    """
    # A loader of the user's own.
    if is_own(loader.name):
        batches = call_object(
            loader.name,
            f"{key}.name",
            key,
            loader.kwargs,
            device_batch_size=global_batch_size // layout.num_data_ranks,
            num_workers=loader.num_workers,
            drop_last=loader.drop_last,
        )
        return DataSpec(batches, get_num_tokens_in_batch=count_tokens)

    # Our loader. The ranks of a tensor-parallel, context-parallel or pipeline group have one data rank, and read the
    # same rows.
    ranks = layout.data_ranks(this_rank().rank)
    dataset = TextDataset(
        loader.dataset,
        max_seq_len=config.max_seq_len,
        global_batch_size=global_batch_size,
        drop_last=loader.drop_last,
        evaluation=evaluation,
        vocab_size=config.model.vocab_size,
        tokenizer=LazyTokenizer(config.tokenizer),
        data_rank_and_size=(ranks.rank, ranks.size),
        max_duration=config.max_duration,
        batch_sizes=None if evaluation else config.batch_sizes,
        max_samples=config.eval_subset_samples if evaluation else None,
    )
    batches = build_text_loader(
        dataset,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory and devices.device_type() == "cuda",
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        timeout=loader.timeout,
    )
    return DataSpec(batches, get_num_tokens_in_batch=count_tokens)
