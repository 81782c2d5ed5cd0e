"""The ComposerModel: how Composer's loop asks an MPT for a loss."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from composer.models import ComposerModel
from torchmetrics import Metric

from llmfoundry_lite.models.attention import number_documents
from llmfoundry_lite.models.dropout import seeds_of_rows
from llmfoundry_lite.parallel.exact import ExactSums, round_loss
from llmfoundry_lite.parallel.precision import Precision
from llmfoundry_lite.training.loss import IGNORED, cross_entropy_sum, next_token_labels, row_weights


class LanguageModel(ComposerModel):
    """A batch is {"input_ids": int64 [b, t]}; a token id below 0 is padding: it is read as 0 and has no loss."""

    num_stages = 1
    """Stages of the pipeline that this rank is part of. Where there are more, `train_on` takes all microbatches."""

    def __init__(
        self,
        model: torch.nn.Module,
        precision: Precision,
        separator: int | None = None,
        context: Any = None,
        sum_loss: Callable[..., torch.Tensor] = cross_entropy_sum,
        *,
        separator_begins: bool = False,
        by_rows: bool = False,
    ):
        super().__init__()
        self.model: Any = model
        self.sum_loss = sum_loss
        self.context = context
        """The ranks that divide each sample's tokens, built by a companion for `cp_config`; None where none do."""
        self.precision = precision
        self.separator = separator
        """The token that ends a document, if documents in a sample are not to see each other."""
        self.separator_begins = separator_begins
        """The separator is a document's first token instead."""
        self.by_rows = by_rows
        """In training, each row that has a loss has the same weight, that of a full row, instead of each token."""
        self.drop_seed: int | None = None
        """Seed of this batch's dropout, where the residual stream is dropped."""
        self.sums: ExactSums | None = None
        """Set where gradients do not depend on the number of ranks."""
        self.loss_scale: float = 1.0
        """Multiplies the gradient, never the reported loss (gradient_step.py sets it)."""

    @property
    def context_size(self) -> int:
        """Ranks that divide each sample."""
        return 1 if self.context is None else self.context.size

    has_first_stage = True

    @property
    def shared_parameters(self) -> list[torch.nn.Parameter]:
        """This rank's parameters that another stage has as well."""
        return []

    @property
    def attn_impl(self) -> str:
        return self.model.transformer.attn_impl

    def part(self, x_bt: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of whole rows."""
        return x_bt if self.context is None else self.context.part(x_bt)

    def documents(self, tokens_bt: torch.Tensor) -> torch.Tensor | None:
        if self.separator is None:
            return None
        return number_documents(tokens_bt, self.separator, begins=self.separator_begins)

    def drop_keys(self, tokens_bt: torch.Tensor) -> torch.Tensor | None:
        """Return each row's key for dropout; None where nothing is dropped."""
        return seeds_of_rows(tokens_bt, self.drop_seed) if self.training and self.drop_seed is not None else None

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the sum of the loss in nats, and the number of tokens it is the sum over. Each of n ranks that divide
        the samples returns n times its part, so that the mean over them is the samples' loss."""
        tokens_bt = batch["input_ids"]
        labels_bt = next_token_labels(tokens_bt)
        num_tokens = (labels_bt != IGNORED).sum()
        options: dict[str, Any] = {
            "documents_bt": self.documents(tokens_bt),
            "dropout_seeds_b": self.drop_keys(tokens_bt),
        }
        sum_loss = self.sum_loss
        if self.by_rows and self.training:
            num_tokens = (labels_bt != IGNORED).any(1).sum() * (tokens_bt.size(1) - 1)
            sum_loss = partial(sum_loss, weights_bt=self.part(row_weights(labels_bt)))
        if self.context is not None:
            options |= self.context.options(tokens_bt.size(1), tokens_bt.device)
        autocast = self.precision.autocast
        with torch.autocast(tokens_bt.device.type, autocast) if autocast else nullcontext():
            loss_sum = self.model(
                self.part(tokens_bt.clamp(min=0)), head=partial(sum_loss, labels_bt=self.part(labels_bt)), **options
            )
        return {"loss_sum": loss_sum * self.context_size, "num_tokens": num_tokens}

    def loss(self, outputs: dict[str, torch.Tensor], batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the mean over the microbatch's tokens, or over its samples with `by_rows`. trainer.py has the weights
        of microbatches and ranks."""
        mean, scale = outputs["loss_sum"] / outputs["num_tokens"].clamp(min=1), self.loss_scale
        if scale != 1.0 and mean.requires_grad:
            mean.register_hook(lambda gradient: gradient * scale)
        return mean

    def weight_of_loss(self, tokens_bt: torch.Tensor, loss_divisor: float) -> float:
        """Return the weight of each nat of a rank's loss, before ranks are averaged or summed. trainer.py has a table
        of `loss_divisor`."""
        full_row = max(tokens_bt.size(1) - 1, 1) if self.by_rows else 1
        return self.context_size / (loss_divisor * full_row)

    def eval_forward(self, batch: Any, outputs: Any | None = None) -> dict[str, torch.Tensor]:
        return outputs if outputs is not None else self(batch)

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:  # type: ignore[override]
        return {} if is_train else {"loss": TokenCrossEntropy()}

    def update_metric(self, batch: Any, outputs: dict[str, torch.Tensor], metric: Metric) -> None:
        metric.update(outputs["loss_sum"], outputs["num_tokens"])


EVAL_LOSS_BITS = 20
"""Sums of an evaluation are multiples of 2^-20 nats, so that they are the same on any number of ranks: up to 2^33."""


class TokenCrossEntropy(Metric):
    """Mean loss in nats over all tokens of all ranks, each counted once."""

    full_state_update = False
    loss_sum: torch.Tensor
    num_tokens: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("loss_sum", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_tokens", default=torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, loss_sum: torch.Tensor, num_tokens: torch.Tensor) -> None:
        self.loss_sum += round_loss(loss_sum, bits=EVAL_LOSS_BITS)
        self.num_tokens += num_tokens

    def compute(self) -> torch.Tensor:
        return self.loss_sum / self.num_tokens.clamp(min=1)
