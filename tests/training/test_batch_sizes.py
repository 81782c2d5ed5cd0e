"""Runs whose batches grow: the samples of a run with one size in its order, on any ranks, through any stop."""

import pytest

from llmfoundry_lite.checkpoint.store import open_checkpoint
from llmfoundry_lite.launch.replay import compare_replay, plan_replay, write_replay
from llmfoundry_lite.launch_replay import main
from llmfoundry_lite.report.batch import read_batch, read_batches
from tests.helpers.launch import launch
from tests.helpers.present import needs
from tests.helpers.runs import attempt, losses, metrics, run, saves
from tests.helpers.tiny import SEQ_LEN, tiny_config, values, write_data

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SIZES = [8] * 3 + [16] * 4 + [32] * 5
SCHEDULE = {"3ba": 16, "7ba": 32}
"""The schedule of these sizes, in a run of 12 batches."""
NUM_SMALL_BATCHES = sum(SIZES) // 8
EPOCHS_END_IN = (6, 9, 11)
"""An epoch has 75 samples, or 9 batches of 8. The first ends with batch 6, the others within batches 9 and 11."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"), num_train=75)


@pytest.fixture(scope="module")
def config(data):
    """A run whose sums are exact, so that its losses are bit-equal on any ranks."""
    return tiny_config(
        data,
        exact_sums=True,
        device_train_microbatch_size=1,
        batch_size_schedule=SCHEDULE,
        max_duration="12ba",
        save_interval="100ba",
        autoresume=True,
    )


def digests_of(records):
    return values(records, "data/digest")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, config):
    """A folder with the run "whole", in one launch on one rank."""
    folder = tmp_path_factory.mktemp("runs")
    run(folder, config, "whole", save_interval="5ba")
    return folder


@pytest.fixture(scope="module")
def small_batches(tmp_path_factory, config):
    """Digests of a run whose batches all have 8 samples, and which reads as many samples."""
    folder = tmp_path_factory.mktemp("small")
    run(folder, config, "small", batch_size_schedule=None, max_duration=f"{NUM_SMALL_BATCHES}ba")
    return [int(digest, 16) for digest in digests_of(metrics(folder, "small"))]


def test_the_order_of_samples_does_not_depend_on_the_schedule(folder, small_batches):
    digests = digests_of(metrics(folder, "whole"))
    remaining = iter(small_batches)
    for size, digest in zip(SIZES, digests, strict=True):
        parts = [next(remaining) for _ in range(size // 8)]
        assert digest == f"{sum(parts) % 2**64:016x}"


def test_the_log_has_the_size_of_each_batch_and_counts_its_tokens(folder):
    records = metrics(folder, "whole")
    assert values(records, "data/batch_size") == SIZES
    assert [record["time/token"] for record in records] == [
        SEQ_LEN * sum(SIZES[:batch]) for batch in range(1, len(SIZES) + 1)
    ]


def test_a_run_of_one_size_logs_none(tmp_path, config):
    run(tmp_path, config, "one", batch_size_schedule={"9ba": 8}, max_duration="1ba")
    assert "data/batch_size" not in metrics(tmp_path, "one")[0]


@pytest.mark.parametrize(
    ("stops", "num_workers"),
    [
        pytest.param([(2, 2), (5, 1), (9, 2), (12, 1)], 0, id="in each stretch"),
        pytest.param([(6, 1), (9, 4), (11, 2), (12, 1)], 2, id="where epochs end"),
        pytest.param([(3, 4), (7, 1), (10, 2), (12, 4)], 1, id="between stretches"),
    ],
)
def test_other_ranks_and_stops_give_the_same_bits(folder, tmp_path, config, stops, num_workers):
    """1 -> 2 -> 1 ranks, and 4; with a loader that keeps its workers, too."""
    loader = {**config["train_loader"], "num_workers": num_workers, "persistent_workers": num_workers == 1}
    for batch, num_ranks in stops:
        run(tmp_path, config, "moved", num_ranks, train_loader=loader, stop_at=f"{batch}ba")
    assert losses(tmp_path, "moved") == losses(folder, "whole")
    assert digests_of(metrics(tmp_path, "moved")) == digests_of(metrics(folder, "whole"))


@needs("llmfoundry_layouts")
@pytest.mark.parametrize(
    "layout",
    [
        {"tp_config": {"tensor_parallel_degree": 2}},
        {"cp_config": {"context_parallel_degree": 2}},
    ],
    ids=["tensor", "context"],
)
def test_ranks_that_divide_layers_or_samples_train_the_same_run(folder, tmp_path, config, layout):
    run(tmp_path, config, "divided", 2, exact_sums=False, **layout)
    assert losses(tmp_path, "divided") == pytest.approx(losses(folder, "whole"), rel=1e-4)
    assert digests_of(metrics(tmp_path, "divided")) == digests_of(metrics(folder, "whole"))


@needs("llmfoundry_layouts")
def test_a_pipeline_gives_the_same_bits(folder, tmp_path, config):
    run(tmp_path, config, "staged", 2, pp_config={"pipeline_parallel_degree": 2})
    assert losses(tmp_path, "staged") == losses(folder, "whole")


def test_a_last_row_of_padding_and_means_over_rows_stay_bit_equal(tmp_path, config):
    """The 10th small batch of each epoch has 3 samples, and 5 rows of padding."""
    loader = {**config["train_loader"], "drop_last": False}
    changes = {"train_loader": loader, "accumulate_train_batch_on_tokens": False}
    run(tmp_path, config, "padded", **changes)
    for batch, num_ranks in ((6, 2), (12, 4)):
        run(tmp_path, config, "padded-moved", num_ranks, stop_at=f"{batch}ba", **changes)
    assert losses(tmp_path, "padded-moved") == losses(tmp_path, "padded")
    # The padding of an epoch counts no tokens: the first ends within batch 7.
    assert metrics(tmp_path, "padded")[6]["time/token"] == SEQ_LEN * (sum(SIZES[:7]) - 5)


def test_epochs_are_counted_in_the_data(tmp_path, config):
    """An evaluation after each epoch follows the batch in which it ends, also if a launch begins there."""
    for batch in (6, 9, 12):
        run(tmp_path, config, "epochs", eval_interval="1ep", stop_at=f"{batch}ba")
    evaluated = [record["batch"] for record in metrics(tmp_path, "epochs") if "eval/loss" in record]
    assert evaluated == [*EPOCHS_END_IN, 12]


def test_a_launch_that_was_killed_begins_again_at_its_save(folder, tmp_path, config):
    run(tmp_path, config, "killed", save_interval="5ba", stop_at="7ba")
    newest = saves(tmp_path, "killed") / "ba7"
    newest.rename(tmp_path / "lost")  # as if batches 6 and 7 had not been saved
    (saves(tmp_path, "killed") / "latest.json").unlink(missing_ok=True)
    run(tmp_path, config, "killed", 2)
    assert losses(tmp_path, "killed") == losses(folder, "whole")


def test_a_stage_of_data_begins_between_two_batches(tmp_path, config, data):
    """The second stage begins with batch 10, because the ninth is the one in which 130 samples are reached."""
    dataset = {
        **config["train_loader"]["dataset"],
        "stages": [{"until": "130sp"}, {"streams": {"again": {"local": str(data), "repeat": 0.5}}}],
    }
    loader = {**config["train_loader"], "dataset": dataset}
    run(tmp_path, config, "staged", train_loader=loader)
    for batch, num_ranks in ((8, 2), (12, 1)):
        run(tmp_path, config, "staged-moved", num_ranks, train_loader=loader, stop_at=f"{batch}ba")
    assert losses(tmp_path, "staged-moved") == losses(tmp_path, "staged")
    state = open_checkpoint(saves(tmp_path, "staged") / "ba12").manifest.scalars["data"]
    first_batches = [first_batch for first_batch, _ in state["stages"]]
    assert first_batches == [0, sum(SIZES[:9]) // 8]
    assert len({record["data/digest"] for record in metrics(tmp_path, "staged")}) == 12


# ------------------------------------------------------------------------------------------------ changes in mid-run


def test_the_future_of_a_schedule_may_change_and_is_recorded(folder, tmp_path, config):
    run(tmp_path, config, "changed", stop_at="5ba")
    later = {"3ba": 16, "6ba": 8, "10ba": 64}
    launch = run(tmp_path, config, "changed", 2, batch_size_schedule=later)
    assert "batch_size_schedule.7ba 32 -> null, batch_size_schedule.6ba null -> 8" in launch.output

    assert values(metrics(tmp_path, "changed"), "data/batch_size") == [8] * 3 + [16] * 3 + [8] * 4 + [64] * 2
    assert losses(tmp_path, "changed")[:6] == losses(folder, "whole")[:6]
    segments = open_checkpoint(saves(tmp_path, "changed") / "ba12").manifest.segments
    assert segments[-1].changes["batch_size_schedule.10ba"] == [None, 64]


def test_the_past_of_a_schedule_may_not_change(tmp_path, config):
    run(tmp_path, config, "refused", stop_at="5ba")
    launch = attempt(tmp_path, config, "refused", batch_size_schedule={"4ba": 16})
    assert launch.exit_codes == [2]
    assert "error: batch_size_schedule: batch 4 has 8 samples here and 16 in the checkpoint" in launch.output


def test_a_run_of_one_size_may_get_a_schedule_where_an_epoch_has_ended(tmp_path, config):
    run(tmp_path, config, "late", batch_size_schedule=None, stop_at="9ba")  # an epoch has 9 batches of 8
    run(tmp_path, config, "late", batch_size_schedule={"9ba": 16})
    assert values(metrics(tmp_path, "late"), "data/batch_size") == [16] * 3
    run(tmp_path, config, "at-once", batch_size_schedule={"9ba": 16})
    assert losses(tmp_path, "late") == losses(tmp_path, "at-once")


@pytest.mark.parametrize("without", [None, {"20ba": 8}], ids=["removed", "of the smallest size"])
def test_a_schedule_that_has_not_begun_may_go_where_an_epoch_has_ended(tmp_path, config, without):
    """The launch without it counts its samples by Composer's clock, which still stands in the epoch that has ended."""
    run(tmp_path, config, "with", batch_size_schedule={"20ba": 16}, max_duration="30ba", stop_at="9ba")
    for batch in (12, 14):
        run(tmp_path, config, "with", 2, batch_size_schedule=without, max_duration="30ba", stop_at=f"{batch}ba")
    run(tmp_path, config, "never", batch_size_schedule=None, max_duration="30ba", stop_at="14ba")

    places = [
        open_checkpoint(saves(tmp_path, name) / "ba14").manifest.scalars["data"]["sample_in_epoch"]
        for name in ("with", "never")
    ]
    assert places == [5 * 8, 5 * 8]  # an epoch has 9 batches of 8
    assert digests_of(metrics(tmp_path, "with")) == digests_of(metrics(tmp_path, "never"))


# ---------------------------------------------------------------------------------------------------- reading it again


def test_batches_of_several_sizes_are_replayed_bit_for_bit(folder):
    """From the save of batch 5 to that of batch 10, on two ranks: the size changes after batch 7."""
    plan = plan_replay(str(folder / "runs" / "whole"), "ba5..ba10")
    assert plan.start is not None
    replayed = folder / "replayed"
    path = write_replay(plan, replayed, 2)
    launch(main, ([path],), folder, 2).check()
    outcome = compare_replay(plan, replayed)
    assert outcome.is_equal, outcome.text


def test_a_batch_of_a_run_is_found_again_with_all_its_rows(folder):
    location = str(folder / "runs" / "whole")
    for number in (1, 5, 9, 12):
        batch = read_batch(location, number)
        assert len(batch.rows) == SIZES[number - 1]
        assert batch.digest == batch.logged_digest
    assert [len(batch.tokens_bt) for batch in read_batches(location, 2, 14)] == [*SIZES[1:], 32, 32]
