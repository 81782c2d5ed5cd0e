"""The ComposerModel: how Composer's loop asks an MPT for a loss. No loss, precision or sharding of its own."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from composer.models import ComposerModel
from torchmetrics import Metric

from llmfoundry_lite.models.attention import document_numbers
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.parallel.precision import Precision
from llmfoundry_lite.training.loss import IGNORED, cross_entropy_sum, next_token_labels


class LanguageModel(ComposerModel):
    """Batches are {"input_ids": int64 [b, t]}; a token id below 0 is no token: it is read as 0 and has no loss."""

    def __init__(self, model: MPT, precision: Precision, separator: int | None = None):
        super().__init__()
        self.model = model
        self.precision = precision
        self.separator = separator
        """The token that ends a document, if documents in a sample are not to see each other."""
        self.loss_scale: float = 1.0
        """Multiplies the gradient, never the reported loss (training/gradients.py sets it)."""

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Sum of the loss in nats, and the number of tokens it is the sum over."""
        tokens_bt = batch["input_ids"]
        labels_bt = next_token_labels(tokens_bt)
        documents_bt = None if self.separator is None else document_numbers(tokens_bt, self.separator)
        autocast = self.precision.autocast
        with torch.autocast(tokens_bt.device.type, autocast) if autocast else nullcontext():
            loss_sum = self.model(
                tokens_bt.clamp(min=0),
                documents_bt=documents_bt,
                head=partial(cross_entropy_sum, labels_bt=labels_bt),
            )
        return {"loss_sum": loss_sum, "num_tokens": (labels_bt != IGNORED).sum()}

    def loss(self, outputs: dict[str, torch.Tensor], batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Mean over the microbatch's tokens; Composer weights microbatches and ranks by their tokens."""
        mean = outputs["loss_sum"] / outputs["num_tokens"].clamp(min=1)
        return mean if self.loss_scale == 1.0 else _ScaleGradient.apply(mean, self.loss_scale)  # type: ignore

    def eval_forward(self, batch: Any, outputs: Any | None = None) -> dict[str, torch.Tensor]:
        return outputs if outputs is not None else self(batch)

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:  # type: ignore[override]
        return {} if is_train else {"loss": TokenCrossEntropy()}

    def update_metric(self, batch: Any, outputs: dict[str, torch.Tensor], metric: Metric) -> None:
        metric.update(outputs["loss_sum"], outputs["num_tokens"])


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
        self.loss_sum += loss_sum.double()
        self.num_tokens += num_tokens

    def compute(self) -> torch.Tensor:
        return self.loss_sum / self.num_tokens.clamp(min=1)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, scale):
        ctx.scale = scale
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[override]
        return gradient * ctx.scale, None
