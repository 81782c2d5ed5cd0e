"""The ComposerModel of a pipeline's stages: all microbatches of a batch in one call of the training loop."""

import math
from functools import partial
from typing import Any, cast

import torch

from llmfoundry_layouts.context import Context
from llmfoundry_layouts.pipeline import Loss, build_pipeline
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.sharding_schema import PipelineConfig
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.parallel.precision import Precision
from llmfoundry_lite.training.adapter import LanguageModel
from llmfoundry_lite.training.loss import IGNORED, next_token_labels, row_weights


def build_language_model(
    config: ModelConfig,
    pipeline: PipelineConfig,
    loss: Loss,
    context: Context | None,
    precision: Precision,
    rows: dict[str, Any],
    **options: Any,
) -> "PipelinedLanguageModel":
    """Build this rank's stages of a model for the training loop. Collective over all ranks of the launch.

    loss: sums the cross-entropy of tokens, in the last stage.
    context: with context parallelism, the ranks that divide the tokens of each sample.
    rows: options of `LanguageModel` for documents within a sample and the weights of samples.
    options: further options of `build_pipeline`.
    """
    # A schedule with a split backward pass reads the loss's saved gradient twice.
    loss = partial(loss, backward_runs_once=not pipeline.splits_backward)
    stages = build_pipeline(config, pipeline, loss, context, precision=precision, **options)
    return PipelinedLanguageModel(stages, precision, context=context, **rows)


class PipelinedLanguageModel(LanguageModel):
    """This rank's stages of a pipeline, as a ComposerModel.

    All ranks of the pipeline call its methods together, with the same batches. Only the rank of the last stage has
    losses; other ranks return zeros or nothing in their place.
    """

    def __init__(self, model: Any, *arguments: Any, **options: Any):
        """Wrap `model`, a Pipeline. The other arguments are those of LanguageModel."""
        super().__init__(model, *arguments, **options)
        self.num_stages = model.num_ranks
        self.has_first_stage = model.has_first

    @property
    def shared_parameters(self) -> list[torch.nn.Parameter]:
        """This rank's parameters that another rank also has: tied embeddings."""
        return self.model.shared_parameters

    @property
    def attn_impl(self) -> str:
        """The implementation of attention, the same in all stages."""
        return cast(MPT, self.model.stages[0]).transformer.attn_impl

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute the loss of a batch for an evaluation, without a gradient.

        Returns the sum of the loss over tokens, and the number of tokens. Both are 0 on all ranks but the last stage's.
        """
        tokens_bt = batch["input_ids"]
        labels_bt = next_token_labels(tokens_bt)
        loss_sum = self.model.run_forward(
            self.local_tokens(tokens_bt.clamp(min=0)),
            labels_bt=self.local_tokens(labels_bt),
            documents_bt=self.document_numbers(tokens_bt),
        )
        num_tokens = (labels_bt != IGNORED).sum()
        if loss_sum is None:
            return {"loss_sum": torch.zeros((), device=tokens_bt.device), "num_tokens": torch.zeros_like(num_tokens)}

        # With context parallelism this is the loss of the rank's own tokens, and `num_tokens` counts whole samples.
        return {"loss_sum": loss_sum * self.context_size, "num_tokens": num_tokens}

    def train_on(self, batch: dict[str, torch.Tensor], num_samples: int, loss_divisor: float) -> torch.Tensor:
        """Add the gradient of a batch to the parameters, in m microbatches of `num_samples` samples.

        If the schedule does not take the number of microbatches that the batch needs, m is the next number that it
        takes, and rows of padding fill the batch up.

        `loss_divisor` turns the sum of the loss into the batch's mean (see `weight_of_loss`).

        Returns the losses of the microbatches, each times its weight: [m] on the rank of the last stage, [0] elsewhere.
        """
        tokens_bt = batch["input_ids"]
        num_microbatches = math.ceil(len(tokens_bt) / num_samples)
        while not self.model.pipeline.takes_microbatches(num_microbatches):
            num_microbatches += 1

        num_padding_rows = num_microbatches * num_samples - len(tokens_bt)
        tokens_bt = torch.nn.functional.pad(tokens_bt, (0, 0, 0, num_padding_rows), value=-1)
        labels_bt = next_token_labels(tokens_bt)
        weight = self.weight_of_loss(tokens_bt, loss_divisor)
        weights_m = torch.full((num_microbatches,), weight, device=tokens_bt.device)
        losses_m = self.model.train_on(
            self.local_tokens(tokens_bt.clamp(min=0)),
            self.local_tokens(labels_bt),
            weights_m * self.loss_scale,
            documents_bt=self.document_numbers(tokens_bt),
            weights_bt=self.local_tokens(row_weights(labels_bt)) if self.by_rows else None,
            dropout_seeds_b=self.dropout_seeds(tokens_bt),
        )
        return losses_m / self.loss_scale
