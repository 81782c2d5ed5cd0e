"""The ComposerModel of a pipeline's stages: all microbatches of a batch in one call of the training loop."""

import itertools
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
    """Build this rank's stages, for the training loop. `rows` are options of `LanguageModel` that say how it reads
    rows; `options` are those of `build_pipeline`."""
    loss = partial(loss, backward_runs_once=not pipeline.splits_backward)
    stages = build_pipeline(config, pipeline, loss, context, precision=precision, **options)
    return PipelinedLanguageModel(stages, precision, context=context, **rows)


class PipelinedLanguageModel(LanguageModel):
    """The stages of a pipeline that this rank has. Only the rank of the last stage has losses; others have 0."""

    def __init__(self, model: Any, *arguments: Any, **options: Any):
        super().__init__(model, *arguments, **options)
        self.num_stages = model.num_ranks
        self.has_first_stage = model.has_first

    @property
    def shared_parameters(self) -> list[torch.nn.Parameter]:
        return self.model.shared_parameters

    @property
    def attn_impl(self) -> str:
        return cast(MPT, self.model.stages[0]).transformer.attn_impl

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Evaluate, without a gradient."""
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
        return {"loss_sum": loss_sum * self.context_size, "num_tokens": num_tokens}

    def train_on(self, batch: dict[str, torch.Tensor], num_samples: int, loss_divisor: float) -> torch.Tensor:
        """Add up the gradient of a batch, in m microbatches of so many samples. Returns their weighted losses: [m], or
        [0] without the last stage.

        `loss_divisor`: see `weight_of_loss`. A batch that is too small for a number of microbatches that the schedule
        takes is filled up with rows of padding.
        """
        tokens_bt = batch["input_ids"]
        counts = itertools.count(-(-len(tokens_bt) // num_samples))
        num_microbatches = next(count for count in counts if self.model.pipeline.takes_microbatches(count))
        missing = num_microbatches * num_samples - len(tokens_bt)
        tokens_bt = torch.nn.functional.pad(tokens_bt, (0, 0, 0, missing), value=-1)
        labels_bt = next_token_labels(tokens_bt)
        weights_m = torch.full(
            (num_microbatches,), self.weight_of_loss(tokens_bt, loss_divisor), device=tokens_bt.device
        )
        losses_m = self.model.train_on(
            self.local_tokens(tokens_bt.clamp(min=0)),
            self.local_tokens(labels_bt),
            weights_m * self.loss_scale,
            documents_bt=self.document_numbers(tokens_bt),
            weights_bt=self.local_tokens(row_weights(labels_bt)) if self.by_rows else None,
            dropout_seeds_b=self.dropout_seeds(tokens_bt),
        )
        return losses_m / self.loss_scale
