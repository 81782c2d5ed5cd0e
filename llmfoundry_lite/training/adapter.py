"""The ComposerModel: how Composer's loop asks an MPT for its loss.

Suffixes of tensors are their dimensions: b samples, t tokens of a sample.
"""

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
    """A language model as Composer trains and evaluates it.

    A batch is {"input_ids": int64 [b, t]}. A token id below 0 is padding: the model reads it as 0, and it has no loss.
    """

    num_stages = 1
    """Number of stages of the pipeline, one on each of its ranks. Some schedules divide these further. Above 1, a
    companion's subclass trains all microbatches at once, with its method `train_on`."""
    has_first_stage = True
    """This rank has the first pipeline stage."""

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
        """Wrap `model`, an MPT that is parallel already, for Composer.

        The arguments become attributes, which are explained below. `sum_loss` has the arguments of `cross_entropy_sum`.
        `dropout_seed`, `exact_sums` and `loss_scale` are set by others after construction: by `DropoutSeed` in each
        batch, by `build_model` once, and by `GradientStep.begin` in each batch.
        """
        super().__init__()
        self.model: Any = model
        self.sum_loss = sum_loss
        self.precision = precision

        # How a batch becomes a loss.
        self.context = context
        """The ranks that divide each sample's tokens among them (`cp_config`), as a companion builds it; None if none
        do."""
        self.separator = separator
        """Token id that separates documents in a sample, if they must not see each other; else None."""
        self.separator_begins = separator_begins
        """The separator is the first token of a document. Otherwise it is the last one."""
        self.by_rows = by_rows
        """In training, the loss is a mean over samples. Otherwise it is a mean over tokens."""

        # Set from outside.
        self.dropout_seed: int | None = None
        """Seed of this batch's dropout on the residual stream; None if nothing is dropped."""
        self.exact_sums: ExactSums | None = None
        """Adds up gradients so that they do not depend on the number of ranks; None if that is not asked for."""
        self.loss_scale: float = 1.0
        """Factor of the gradient in fp16. The reported loss is not multiplied by it."""

    @property
    def context_size(self) -> int:
        """Number of ranks that divide each sample's tokens among them."""
        return 1 if self.context is None else self.context.size

    @property
    def shared_parameters(self) -> list[torch.nn.Parameter]:
        """Parameters of this rank that another pipeline stage has as well: tied embeddings."""
        return []

    @property
    def attn_impl(self) -> str:
        """Implementation of attention that computes this model, such as "flash"."""
        return self.model.transformer.attn_impl

    def local_tokens(self, x_bt: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of whole samples [b, t]; all of them, unless ranks divide each sample."""
        return x_bt if self.context is None else self.context.part(x_bt)

    def document_numbers(self, tokens_bt: torch.Tensor) -> torch.Tensor | None:
        """Return the number of the document that each token [b, t] belongs to.

        Returns None if a sample counts as one document.
        """
        if self.separator is None:
            return None
        return number_documents(tokens_bt, self.separator, begins=self.separator_begins)

    def dropout_seeds(self, tokens_bt: torch.Tensor) -> torch.Tensor | None:
        """Return a dropout seed [b] for each sample, a function of its tokens [b, t] and of the batch's seed.

        Returns None if nothing is dropped, as in an evaluation.
        """
        if not self.training or self.dropout_seed is None:
            return None
        return seeds_of_rows(tokens_bt, self.dropout_seed)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute the sum of the losses of a batch, or of a microbatch.

        `batch` has `input_ids`, int64 [b, t], in which ids below 0 are padding. Returns `loss_sum` in nats, and
        `num_tokens`, the number of tokens that it is the sum over. Both are scalars on the device.

        With `by_rows` in training, a short sample counts as much as a full one: its losses get larger weights, and
        `num_tokens` counts it as full. If C ranks divide each sample, each returns C times its part of the sum, because
        gradients and losses are averaged over ranks.
        """
        # Labels are those of whole samples, before ranks divide them: the label of a part's last token is in the next
        # part.
        tokens_bt = batch["input_ids"]
        labels_bt = next_token_labels(tokens_bt)
        has_loss_bt = labels_bt != IGNORED
        num_tokens = has_loss_bt.sum()
        sum_loss = self.sum_loss
        if self.by_rows and self.training:
            tokens_of_full_row = tokens_bt.size(1) - 1  # the last token of a row has no label
            num_tokens = has_loss_bt.any(1).sum() * tokens_of_full_row
            sum_loss = partial(sum_loss, weights_bt=self.local_tokens(row_weights(labels_bt)))

        options: dict[str, Any] = {
            "documents_bt": self.document_numbers(tokens_bt),
            "dropout_seeds_b": self.dropout_seeds(tokens_bt),
        }
        if self.context is not None:
            options |= self.context.options(tokens_bt.size(1), tokens_bt.device)

        # The model calls `head` with its last hidden states and its output embedding, so that no logits of the whole
        # batch are ever in memory.
        head = partial(sum_loss, labels_bt=self.local_tokens(labels_bt))
        with self._autocast(tokens_bt.device):
            loss_sum = self.model(self.local_tokens(tokens_bt.clamp(min=0)), head=head, **options)
        return {"loss_sum": loss_sum * self.context_size, "num_tokens": num_tokens}

    def _autocast(self, device: torch.device) -> Any:
        """Return the context in which torch casts to the run's precision, if that is left to torch."""
        dtype = self.precision.autocast
        return nullcontext() if dtype is None else torch.autocast(device.type, dtype)

    def loss(self, outputs: dict[str, torch.Tensor], batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the mean loss of a microbatch, over its tokens or with `by_rows` over its samples: a scalar in nats.

        `outputs` are what `forward` returns; the other arguments are Composer's, and not used. With fp16, gradients
        that flow through the result are multiplied by `loss_scale`, but the result itself is not, because it is
        logged. The table in `trainer.py` shows how microbatches and ranks are weighted.
        """
        mean = outputs["loss_sum"] / outputs["num_tokens"].clamp(min=1)
        scale = self.loss_scale
        if scale != 1.0 and mean.requires_grad:
            mean.register_hook(lambda gradient: gradient * scale)
        return mean

    def weight_of_loss(self, tokens_bt: torch.Tensor, loss_divisor: float) -> float:
        """Return the factor by which a rank multiplies its sum of nats, before ranks are averaged or summed.

        `tokens_bt` are whole samples [b, t]. `loss_divisor` is the number of tokens or samples that one rank's loss is
        divided by, as in the table in `trainer.py`. With `by_rows` it counts samples, so the factor also divides by the
        tokens of a full sample. For example, with `loss_divisor` 8 and samples of 2,049 tokens, the factor is
        1 / (8 * 2,048).
        """
        tokens_of_full_row = 1
        if self.by_rows:
            tokens_of_full_row = max(tokens_bt.size(1) - 1, 1)
        return self.context_size / (loss_divisor * tokens_of_full_row)

    def eval_forward(self, batch: Any, outputs: Any | None = None) -> dict[str, torch.Tensor]:
        """Return what `forward` returns for a batch of validation data, or `outputs` if Composer has it already."""
        return outputs if outputs is not None else self(batch)

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:  # type: ignore[override]
        """Return the metric of an evaluation by its name. Training needs none: the training step logs its loss."""
        return {} if is_train else {"loss": TokenCrossEntropy()}

    def update_metric(self, batch: Any, outputs: dict[str, torch.Tensor], metric: Metric) -> None:
        """Add the losses of an evaluated batch to the metric. `outputs` are what `eval_forward` returns."""
        metric.update(outputs["loss_sum"], outputs["num_tokens"])


EVAL_LOSS_BITS = 20
"""An evaluation rounds each batch's loss to multiples of 2^-20 nats. Sums of those up to 2^33 nats are exact in
float64, so they are the same on any number of ranks."""


class TokenCrossEntropy(Metric):
    """Mean loss in nats over all tokens of all ranks, each counted once.

    torchmetrics adds up the states of the ranks.
    """

    full_state_update = False
    """`update` does not need the state before it, which lets torchmetrics call it once per batch."""
    loss_sum: torch.Tensor
    num_tokens: torch.Tensor

    def __init__(self) -> None:
        """Begin with a sum of 0 over 0 tokens. Both states are scalars."""
        super().__init__()
        self.add_state("loss_sum", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_tokens", default=torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, loss_sum: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Add a batch's sum of losses in nats, rounded so that the order of additions does not matter."""
        self.loss_sum += round_loss(loss_sum, bits=EVAL_LOSS_BITS)
        self.num_tokens += num_tokens

    def compute(self) -> torch.Tensor:
        """Return the mean loss in nats."""
        return self.loss_sum / self.num_tokens.clamp(min=1)
