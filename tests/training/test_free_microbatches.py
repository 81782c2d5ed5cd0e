"""Microbatches and ranks change no digit that rounding does not: with rows of unlike length, and with dropout."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from llmfoundry_lite.config.layout import Coordinates, DataRanks
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.data.rows import PAD_TOKEN
from llmfoundry_lite.models.initialise import initialise_weights
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.parallel.precision import PRECISIONS
from llmfoundry_lite.training.adapter import LanguageModel
from llmfoundry_lite.training.agreement import count_rows
from llmfoundry_lite.training.loss import next_token_labels
from llmfoundry_lite.training.monitor import DropoutSeed
from tests.helpers.present import needs
from tests.helpers.runs import carry_on, losses, metrics, run
from tests.helpers.tiny import reading_texts, tiny_config, values, write_texts

LENGTHS = [32, 3, 17, 1, 0, 25, 32, 8]
ROWS_BT = torch.randint(96, (8, 32), generator=torch.Generator().manual_seed(1))
for row_t, length in zip(ROWS_BT, LENGTHS, strict=True):
    row_t[length:] = PAD_TOKEN


def language_model(*, by_rows: bool, **changes: Any) -> LanguageModel:
    shape: dict[str, Any] = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 32, "vocab_size": 96}
    model = MPT(ModelConfig(**shape, **changes))
    initialise_weights(model, 1)
    return LanguageModel(model, PRECISIONS["fp32", "DEFAULT"], by_rows=by_rows).train()


def train_in_parts(model: LanguageModel, rows_bt: torch.Tensor, size: int) -> tuple[float, list[torch.Tensor]]:
    """Weigh microbatches by samples, as the Trainer does: returns the batch's loss and its gradient."""
    model.zero_grad()
    total, num_rows = torch.zeros(()), count_rows({"input_ids": rows_bt})
    for part_bt in rows_bt.split(size):
        batch = {"input_ids": part_bt}
        loss = model.loss(model(batch), batch) * count_rows(batch) / num_rows
        loss.backward()
        total += loss.detach()
    return float(total), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_the_loss_by_samples_is_the_mean_over_rows_that_have_one():
    """Neither an empty row nor a row of one token counts."""
    model = language_model(by_rows=True)
    loss, gradient = train_in_parts(model, ROWS_BT, 8)
    logits_btv = model.model(ROWS_BT.clamp(min=0))
    means = [
        F.cross_entropy(x, y) for x, y in zip(logits_btv, next_token_labels(ROWS_BT), strict=True) if (y >= 0).any()
    ]
    assert len(means) == 6
    assert loss == pytest.approx(float(torch.stack(means).mean().detach()), abs=1e-6)
    for size in (1, 2, 3):
        other, its_gradient = train_in_parts(model, ROWS_BT, size)
        assert other == pytest.approx(loss, abs=1e-6)
        for ours, theirs in zip(its_gradient, gradient, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert model.eval()({"input_ids": ROWS_BT})["num_tokens"] == sum(max(0, length - 1) for length in LENGTHS)


def test_what_a_row_drops_does_not_depend_on_microbatch_or_rank():
    model = language_model(by_rows=True, resid_pdrop=0.3, emb_pdrop=0.2)
    found = {}
    for rank, size in ((0, 8), (0, 3), (5, 1)):
        place = Coordinates(pipeline=0, replicate=0, shard=0, context=0, tensor=0)
        seed = DropoutSeed(17, model, DataRanks(rank=rank, size=8, is_counted=True), place, sequence_parallel=False)
        seed.batch_start(SimpleNamespace(timestamp=SimpleNamespace(batch=3)), None)  # type: ignore[arg-type]
        found[rank, size] = train_in_parts(model, ROWS_BT, size)[0]
    assert found[0, 3] == pytest.approx(found[0, 8], abs=1e-6)
    assert found[5, 1] == pytest.approx(found[0, 8], abs=1e-6)
    seed.batch_start(SimpleNamespace(timestamp=SimpleNamespace(batch=4)), None)  # type: ignore[arg-type]
    assert train_in_parts(model, ROWS_BT, 8)[0] != pytest.approx(found[0, 8], abs=1e-4)


# ----------------------------------------------------------------------------------------------------- real launches


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Twenty texts of unlike length: batches of 8 leave 4 over."""
    return write_texts(tmp_path_factory.mktemp("texts"))


def unequal(texts: Path, **changes: Any) -> dict[str, Any]:
    return tiny_config(
        texts,
        **reading_texts(texts),
        train_loader__drop_last=False,
        accumulate_train_batch_on_tokens=False,
        max_duration="2ep",
        scheduler__t_warmup="0.2dur",
        eval_interval="2ep",
        model__resid_pdrop=0.2,
        model__emb_pdrop=0.1,
        **changes,
    )


@needs("llmfoundry_layouts")
@pytest.mark.slow
@pytest.mark.multiprocess
def test_rows_of_unlike_length_and_dropout_give_one_run_on_any_ranks_in_any_microbatch(tmp_path, texts):
    config = unequal(texts)
    stages = {"pp_config": {"pipeline_parallel_degree": 2}, "device_train_microbatch_size": 2}
    runs: dict[str, tuple[int, dict[str, Any]]] = {
        "whole": (1, {}),
        "one by one": (1, {"device_train_microbatch_size": 1}),
        "two ranks": (2, {"device_train_microbatch_size": 3}),
        "recomputed": (1, {"fsdp_config": {"activation_checkpointing": True}, "device_train_microbatch_size": 3}),
        "stages": (2, stages),
        "parts of rows": (2, {"cp_config": {"context_parallel_degree": 2}}),
        "stream": (2, {"tp_config": {"tensor_parallel_degree": 2, "sequence_parallel": True}}),
    }
    for name, (num_ranks, changes) in runs.items():
        run(tmp_path, config, name.replace(" ", "-"), num_ranks, **changes)
    expected = losses(tmp_path, "whole")
    assert len(expected) == 6
    for name in runs:
        assert losses(tmp_path, name.replace(" ", "-")) == pytest.approx(expected, abs=2e-5), name


@pytest.mark.slow
@pytest.mark.multiprocess
def test_rows_that_fill_up_a_batch_are_no_samples_before_and_after_a_save(tmp_path, texts):
    config = unequal(texts, autoresume=True, save_interval="1ba")
    run(tmp_path, config, "whole")
    assert values(metrics(tmp_path, "whole"), "time/sample") == [8, 16, 20, 28, 36, 40]
    for batch in (2, 3, 5):
        carry_on(tmp_path, config, "whole", batch, f"from-{batch}", 2)
        assert values(metrics(tmp_path, f"from-{batch}"), "time/sample") == [8, 16, 20, 28, 36, 40][batch:]
        assert losses(tmp_path, f"from-{batch}") == pytest.approx(losses(tmp_path, "whole")[batch:], abs=2e-5)
