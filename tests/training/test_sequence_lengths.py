"""Runs whose rows grow: the samples and digests of a run with whole ones, on any ranks, through any stop."""

import pytest
import torch
from torch.nn import functional

from llmfoundry_lite.checkpoint.store import open_checkpoint
from llmfoundry_lite.evaluation.models import Placement, load_checkpoint, model_config_of
from llmfoundry_lite.launch.replay import compare_replay, plan_replay, write_replay
from llmfoundry_lite.launch_replay import main
from llmfoundry_lite.report.batch import compute_losses, read_batch, read_batches
from tests.helpers.launch import launch
from tests.helpers.present import needs
from tests.helpers.runs import attempt, losses, metrics, run, saves
from tests.helpers.tiny import SEQ_LEN, reading_texts, tiny_config, values, write_data, write_texts

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

LENGTHS = [8] * 3 + [16] * 4 + [32] * 5
SCHEDULE = {"0ba": 8, "3ba": 16, "7ba": 32}
"""The schedule of these lengths, in a run of 12 batches."""
STOPS = ((2, 1), (5, 2), (9, 1), (12, 4))
"""Launches of a run that stops in each stretch: the batch after which it stops, and the number of ranks."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"), num_train=75)


def build_config(data, **changes):
    """Return a run whose sums are exact, so that its losses are bit-equal on any ranks."""
    return tiny_config(
        data,
        exact_sums=True,
        device_train_microbatch_size=1,
        seq_len_schedule=SCHEDULE,
        max_duration="12ba",
        save_interval="100ba",
        autoresume=True,
        **changes,
    )


@pytest.fixture(scope="module")
def config(data):
    return build_config(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, config):
    """A folder with the runs "whole" and "uncut", which has no schedule, on one rank.

    "whole" has saves of batches 2, 3, 6, 9 and 12.
    """
    folder = tmp_path_factory.mktemp("runs")
    run(folder, config, "whole", save_interval="3ba", stop_at="2ba")
    run(folder, config, "whole", save_interval="3ba")
    run(folder, config, "uncut", seq_len_schedule=None)
    return folder


def digests_of(folder, name):
    return values(metrics(folder, name), "data/digest")


def run_in_launches(folder, config, name, **changes):
    for batch, num_ranks in STOPS:
        run(folder, config, name, num_ranks, stop_at=f"{batch}ba", **changes)


def loss_by_hand(folder, batch, length):
    """Return the mean loss of a batch of "whole" after the batches before it, with samples cut into rows of `length`.

    A row's first token is predicted from nothing, so it has no loss.
    """
    checkpoint = open_checkpoint(saves(folder, "whole") / f"ba{batch - 1}")
    placement = Placement(torch.float32, torch.device("cpu"), None)
    model = load_checkpoint(checkpoint, model_config_of(checkpoint), placement)
    (samples,) = read_batches(folder / "runs" / "whole", batch)
    rows_bt = torch.from_numpy(samples.tokens_bt).reshape(-1, length)
    with torch.no_grad():
        logits_btv = model.model(rows_bt)
    return float(functional.cross_entropy(logits_btv[:, :-1].flatten(0, 1), rows_bt[:, 1:].flatten()))


def test_samples_and_digests_are_those_of_whole_rows(folder):
    assert digests_of(folder, "whole") == digests_of(folder, "uncut")
    whole, uncut = metrics(folder, "whole"), metrics(folder, "uncut")
    assert values(whole, "time/token") == values(uncut, "time/token") == [8 * SEQ_LEN * n for n in range(1, 13)]
    assert values(whole, "time/sample") == values(uncut, "time/sample") == [8 * n for n in range(1, 13)]
    assert losses(folder, "whole")[0] != losses(folder, "uncut")[0]


def test_the_log_has_the_length_of_each_batch(folder):
    assert values(metrics(folder, "whole"), "data/seq_len") == LENGTHS
    assert not values(metrics(folder, "uncut"), "data/seq_len")


@pytest.mark.parametrize("batch", [3, 4, 10])
def test_no_token_is_predicted_across_a_cut(folder, batch):
    length = LENGTHS[batch - 1]
    logged = losses(folder, "whole")[batch - 1]
    assert logged == pytest.approx(loss_by_hand(folder, batch, length), rel=1e-6)
    other_length = 16 if length == 8 else 8
    assert logged != pytest.approx(loss_by_hand(folder, batch, other_length), rel=1e-4)


def test_data_show_computes_the_loss_that_was_trained(folder):
    batch = read_batch(str(folder / "runs" / "whole"), 4)
    assert [len(row.tokens_t) for row in batch.rows] == [SEQ_LEN] * 8
    assert batch.digest == batch.logged_digest
    found = compute_losses(batch, str(saves(folder, "whole") / "ba3"), torch.device("cpu"))
    assert found.of_batch == pytest.approx(losses(folder, "whole")[3], rel=1e-6)
    assert sum(found.of_rows) / 8 == pytest.approx(found.of_batch, rel=1e-6)


# ------------------------------------------------------------------------------------------------- ranks and stops


def test_other_ranks_and_stops_give_the_same_bits(folder, tmp_path, config):
    run_in_launches(tmp_path, config, "moved")
    assert losses(tmp_path, "moved") == losses(folder, "whole")
    assert digests_of(tmp_path, "moved") == digests_of(folder, "whole")


def test_a_launch_may_begin_where_rows_change(folder, tmp_path, config):
    """With a loader that keeps its workers, which have read ahead."""
    loader = {**config["train_loader"], "num_workers": 1, "persistent_workers": True}
    for batch, num_ranks in ((3, 2), (7, 1), (12, 2)):
        run(tmp_path, config, "between", num_ranks, train_loader=loader, stop_at=f"{batch}ba")
    assert losses(tmp_path, "between") == losses(folder, "whole")


def test_means_over_rows_and_a_batch_of_padding_stay_bit_equal(tmp_path, config):
    """The 10th batch has 3 samples, and 5 of padding."""
    loader = {**config["train_loader"], "drop_last": False}
    schedule = {"0ba": 8, "3ba": 16}
    changes = {"train_loader": loader, "accumulate_train_batch_on_tokens": False, "seq_len_schedule": schedule}
    run(tmp_path, config, "padded", **changes)
    run_in_launches(tmp_path, config, "padded-moved", **changes)
    assert losses(tmp_path, "padded-moved") == losses(tmp_path, "padded")
    assert metrics(tmp_path, "padded")[9]["time/token"] == SEQ_LEN * (9 * 8 + 3)
    assert metrics(tmp_path, "padded")[9]["time/sample"] == 9 * 8 + 3


@pytest.mark.parametrize("by_tokens", [True, False], ids=["tokens", "rows"])
def test_texts_of_unlike_length_stay_bit_equal(tmp_path, by_tokens):
    """Rows of padding alone, and rows of a single token, have no loss."""
    texts = write_texts(tmp_path / "texts", num_texts=75)
    config = build_config(texts, **reading_texts(texts), accumulate_train_batch_on_tokens=by_tokens)
    run(tmp_path, config, "texts")
    run(tmp_path, config, "uncut", seq_len_schedule=None)
    run_in_launches(tmp_path, config, "moved")
    assert losses(tmp_path, "moved") == losses(tmp_path, "texts")
    assert all(loss > 0 for loss in losses(tmp_path, "texts"))
    assert digests_of(tmp_path, "texts") == digests_of(tmp_path, "uncut")
    for key in ("time/token", "time/sample"):
        assert values(metrics(tmp_path, "texts"), key) == values(metrics(tmp_path, "uncut"), key)


def test_documents_are_kept_apart_within_rows(folder, tmp_path, config):
    """The token 5 ends a document, which a cut may divide."""
    dataset = {**config["train_loader"]["dataset"], "eos_token_id": 5}
    changes = {
        "model": {**config["model"], "attn_config": {"attn_uses_sequence_id": True}},
        "train_loader": {**config["train_loader"], "dataset": dataset},
    }
    run(tmp_path, config, "documents", **changes)
    run_in_launches(tmp_path, config, "documents-moved", **changes)
    assert losses(tmp_path, "documents-moved") == losses(tmp_path, "documents")
    assert losses(tmp_path, "documents")[0] != losses(folder, "whole")[0]
    assert digests_of(tmp_path, "documents") == digests_of(folder, "whole")


def test_lengths_and_sizes_may_change_in_one_run(tmp_path, config):
    """An epoch of 75 samples ends within a batch."""
    changes = {"batch_size_schedule": {"2ba": 16, "8ba": 32}}
    run(tmp_path, config, "both", **changes)
    run_in_launches(tmp_path, config, "both-moved", **changes)
    assert losses(tmp_path, "both-moved") == losses(tmp_path, "both")
    run(tmp_path, config, "uncut", seq_len_schedule=None, **changes)
    assert digests_of(tmp_path, "both") == digests_of(tmp_path, "uncut")
    assert values(metrics(tmp_path, "both"), "data/seq_len") == LENGTHS
    assert values(metrics(tmp_path, "both"), "data/batch_size") == [8] * 2 + [16] * 6 + [32] * 4


@needs("llmfoundry_layouts")
@pytest.mark.parametrize("divides_sequences", [False, True], ids=["layers", "sequences"])
def test_ranks_that_divide_layers_train_the_same_run(folder, tmp_path, config, divides_sequences):
    layout = {"tensor_parallel_degree": 2, "sequence_parallel": divides_sequences}
    run(tmp_path, config, "divided", 2, exact_sums=False, tp_config=layout)
    assert losses(tmp_path, "divided") == pytest.approx(losses(folder, "whole"), rel=1e-4)
    assert digests_of(tmp_path, "divided") == digests_of(folder, "whole")


# ------------------------------------------------------------------------------------- changes in mid-run, and replay


def test_the_future_of_a_schedule_may_change_and_is_recorded(folder, tmp_path, config):
    run(tmp_path, config, "changed", stop_at="5ba")
    later = {"0ba": 8, "3ba": 16, "6ba": 4, "10ba": 32}
    launched = run(tmp_path, config, "changed", 2, seq_len_schedule=later)
    assert "seq_len_schedule.7ba 32 -> null, seq_len_schedule.6ba null -> 4" in launched.output
    assert values(metrics(tmp_path, "changed"), "data/seq_len") == [8] * 3 + [16] * 3 + [4] * 4 + [32] * 2
    assert losses(tmp_path, "changed")[:6] == losses(folder, "whole")[:6]
    segments = open_checkpoint(saves(tmp_path, "changed") / "ba12").manifest.segments
    assert segments[-1].changes["seq_len_schedule.10ba"] == [None, 32]


def test_the_past_of_a_schedule_may_not_change(tmp_path, config):
    run(tmp_path, config, "refused", stop_at="5ba")
    launched = attempt(tmp_path, config, "refused", seq_len_schedule={"0ba": 8, "4ba": 16})
    assert launched.exit_codes == [2]
    assert (
        "error: seq_len_schedule: batch 4 has 8 tokens in a row here and 16 in the checkpoint, which has trained 5"
        in launched.output
    )


def test_batches_of_several_lengths_are_replayed_bit_for_bit(folder):
    """From the save of batch 6 to that of batch 9, on two ranks: the length changes after batch 7."""
    plan = plan_replay(str(folder / "runs" / "whole"), "ba6..ba9")
    assert plan.start is not None
    replayed = folder / "replayed"
    path = write_replay(plan, replayed, 2)
    launch(main, ([path],), folder, 2).check()
    outcome = compare_replay(plan, replayed)
    assert outcome.is_equal, outcome.text
