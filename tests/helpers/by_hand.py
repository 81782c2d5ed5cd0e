"""What a run must log, by plain PyTorch: one process, whole batches, none of our training loop.

A test that compares two runs does not see a mistake that both make. Here loss, norm, clipping, rate and optimizer are
PyTorch's, Composer's or a formula. Only the model and the order of rows are ours; `tests/models` and `tests/data`
compare these with others.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import xxhash
from composer.optim import DecoupledAdamW

from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.models.initialise import initialise_weights
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.training.data_builders import build_data
from tests.helpers.tiny import values, write_config

Record = dict[str, Any]


def train_by_hand(
    folder: Path, config: dict[str, Any], num_batches: int, separator: int | None = None, **changes: Any
) -> list[Record]:
    """Train `num_batches` in fp32 and return what each must log, and the validation loss at the end.

    The optimizer must be decoupled_adamw, scheduler and clipping those of `tiny_config`. `separator` ends a document
    where documents of a row do not see each other.
    """
    settings = load_train_config([write_config(folder / "by-hand.yaml", {**config, **changes})]).config
    model = MPT(settings.model)
    initialise_weights(model, settings.seed)
    optimizer = DecoupledAdamW(model.parameters(), lr=settings.optimizer.lr)
    batches = rows_of_batches(settings, num_batches)

    records: list[Record] = []
    for batch, tokens_bt in enumerate(batches):
        rate = settings.optimizer.lr * cosine_after_two_batches(batch, num_batches)
        loss = mean_loss(model, tokens_bt, separator, by_rows=not settings.accumulate_train_batch_on_tokens)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        record = {"batch": batch + 1, "loss/train/total": loss.item(), "grad_norm": norm.item(), "lr": rate}
        records.append({**record, "data/digest": digest_of(tokens_bt)})
    if settings.eval_loader is not None and settings.evaluates:
        records[-1]["eval/loss"] = validation_loss(settings, model, separator)
    return records


def assert_is_by_hand(records: list[Record], expected: list[Record], relative: float = 1e-5) -> None:
    assert [record["batch"] for record in records] == [record["batch"] for record in expected]
    assert values(records, "data/digest") == values(expected, "data/digest")
    for key in ("loss/train/total", "grad_norm", "lr"):
        assert values(records, key) == pytest.approx(values(expected, key), rel=relative), key
    if "eval/loss" in expected[-1]:
        assert records[-1]["eval/loss"] == pytest.approx(expected[-1]["eval/loss"], rel=relative)


def rows_of_batches(settings: TrainConfig, num_batches: int) -> list[torch.Tensor]:
    """Return the token ids of each batch, epoch after epoch: [b, t] each, negative where there is no token."""
    loader = build_data("train_loader", settings.train_loader, settings, settings.global_train_batch_size, Layout())
    batches: list[torch.Tensor] = []
    while len(batches) < num_batches:
        batches += [batch["input_ids"] for batch in loader.dataloader]
    return batches[:num_batches]


def nats_of_rows(model: MPT, tokens_bt: torch.Tensor, separator: int | None) -> list[torch.Tensor]:
    """Return the losses of each row that has any."""
    options = {} if separator is None else {"documents_bt": documents_of(tokens_bt, separator)}
    logits_btv = model(tokens_bt.clamp(min=0), **options)
    nats = []
    for logits_tv, row_t in zip(logits_btv, tokens_bt, strict=True):
        text_t = row_t[row_t >= 0]
        if len(text_t) > 1:
            nats.append(F.cross_entropy(logits_tv[: len(text_t) - 1], text_t[1:], reduction="none"))
    return nats


def mean_loss(model: MPT, tokens_bt: torch.Tensor, separator: int | None, *, by_rows: bool) -> torch.Tensor:
    """Return the mean over all tokens that have a loss, or the mean over rows of each row's mean."""
    nats = nats_of_rows(model, tokens_bt, separator)
    if by_rows:
        return torch.stack([of_row.mean() for of_row in nats]).mean()
    return torch.cat(nats).mean()


@torch.no_grad()
def validation_loss(settings: TrainConfig, model: MPT, separator: int | None) -> float:
    """Return the mean over all tokens of the validation data."""
    [(key, loader)] = settings.validation.items()
    spec = build_data(key, loader, settings, settings.eval_batch_size, Layout(), evaluation=True)
    nats = [of_row for batch in spec.dataloader for of_row in nats_of_rows(model, batch["input_ids"], separator)]
    return torch.cat(nats).double().mean().item()


def documents_of(tokens_bt: torch.Tensor, separator: int) -> torch.Tensor:
    """Number the documents of each row; the separator is the last token of one."""
    numbers = []
    for row in tokens_bt.tolist():
        number, numbers_of_row = 0, []
        for token in row:
            numbers_of_row.append(number)
            number += token == separator
        numbers.append(numbers_of_row)
    return torch.tensor(numbers)


def digest_of(tokens_bt: torch.Tensor) -> str:
    """Sum the hashes of all rows that have a token."""
    rows = [row_t for row_t in tokens_bt if (row_t >= 0).any()]
    return f"{sum(xxhash.xxh3_64_intdigest(row_t.numpy().tobytes()) for row_t in rows) % 2**64:016x}"


def cosine_after_two_batches(batch: int, num_batches: int) -> float:
    """Return the share of the rate that batch `batch` (from 0) has: two batches of warmup, then down to 0.1."""
    if batch < 2:
        return batch / 2
    fraction = min(1.0, (batch - 2) / (num_batches - 2))
    return 0.1 + 0.9 * (1 + math.cos(math.pi * fraction)) / 2
