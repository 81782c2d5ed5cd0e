"""A run whose data changes where its rate begins to decay: the same batches on any ranks, workers and stops."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmfoundry_lite.checkpoint.store import open_checkpoint
from llmfoundry_lite.report.batch import read_batch, read_batches
from tests.helpers.launch import Launch
from tests.helpers.runs import attempt, metrics, run, saved_names, saves
from tests.helpers.tiny import tiny_config, values, write_data

pytestmark = pytest.mark.multiprocess

NUM_BATCHES = 10
LAST_OF_FIRST_STAGE = 6
"""Number of the batch after which the second stage begins; the first batch is 1."""


@pytest.fixture(scope="module")
def config(tmp_path_factory, data):
    """A run of 10 batches: six of the stream "web", then four of "web" and "anneal" while the learning rate decays."""
    anneal_data = write_data(tmp_path_factory.mktemp("anneal"), num_train=60)
    first_stage = {"until": "0.6dur", "streams": {"web": {}}}
    second_stage = {
        "streams": {
            "web": {"proportion": 0.3},
            "anneal": {"local": str(anneal_data), "split": "train", "proportion": 0.7},
        }
    }
    schedule = {"name": "warmup_stable_decay", "t_warmup": "1ba", "t_decay": "0.4dur"}
    config = tiny_config(
        data, autoresume=True, max_duration=f"{NUM_BATCHES}ba", scheduler=schedule, save_interval="100ba"
    )
    config["train_loader"]["dataset"] = {
        "streams": {"web": {"local": str(data)}},
        "split": "train",
        "shuffle": True,
        "shuffle_seed": 3,
        "stages": [first_stage, second_stage],
    }
    return config


def change_dataset(config, **changes):
    """A copy of a run's config with other values in `train_loader.dataset`."""
    dataset = {**config["train_loader"]["dataset"], **changes}
    return {**config, "train_loader": {**config["train_loader"], "dataset": dataset}}


def digests_of(records):
    """The digest of each batch's tokens, in the order of the batches."""
    return values(records, "data/digest")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, config):
    """The logged records of a run with both stages, in one launch on one rank."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, config, "whole")
    return metrics(folder, "whole")


# ------------------------------------------------------------------------------------------- where a stage begins


@pytest.fixture(scope="module")
def run_without_stages(tmp_path_factory, config):
    """The logged records of a run that reads "web" to its end."""
    folder = tmp_path_factory.mktemp("plain")
    run(folder, change_dataset(config, stages=[]), "plain")
    return metrics(folder, "plain")


def test_the_rate_begins_to_decay_with_the_second_stage(whole_run):
    """Batch 7, the first of the decay, still has the whole rate."""
    rates = {record["batch"]: record["lr"] for record in whole_run}
    assert rates[7] == rates[2]
    assert rates[8] < rates[7]
    assert rates[10] < rates[8]
    assert rates[10] > 0


def test_the_first_stage_reads_what_a_run_without_stages_reads(whole_run, run_without_stages):
    first_stage = digests_of(whole_run)[:LAST_OF_FIRST_STAGE]
    assert first_stage == digests_of(run_without_stages)[:LAST_OF_FIRST_STAGE]


def test_the_second_stage_reads_other_batches(whole_run, run_without_stages):
    second_stage = digests_of(whole_run)[LAST_OF_FIRST_STAGE:]
    assert set(second_stage).isdisjoint(digests_of(run_without_stages))


def test_no_batch_is_read_twice(whole_run):
    assert len(set(digests_of(whole_run))) == NUM_BATCHES


# ----------------------------------------------------------------------------------- other ranks, workers and stops


@dataclass
class Part:
    """A launch that begins where the launch before it stopped."""

    last_batch: int
    num_ranks: int


@pytest.mark.parametrize(
    ("parts", "num_workers"),
    [
        pytest.param([Part(3, num_ranks=2), Part(10, num_ranks=1)], 0, id="stop in the first stage"),
        pytest.param([Part(6, num_ranks=1), Part(10, num_ranks=2)], 2, id="stop between the stages"),
        pytest.param([Part(8, num_ranks=4), Part(10, num_ranks=2)], 1, id="stop in the second stage"),
    ],
)
def test_other_ranks_workers_and_stops_read_the_same_batches(whole_run, tmp_path, config, parts, num_workers):
    loader = {**config["train_loader"], "num_workers": num_workers}
    num_batches_done = 0
    for part in parts:
        stop_after = f"{part.last_batch - num_batches_done}ba"  # counted from where this launch begins
        run(tmp_path, config, "moved", part.num_ranks, train_loader=loader, stop_after=stop_after)
        num_batches_done = part.last_batch
    assert digests_of(metrics(tmp_path, "moved")) == digests_of(whole_run)


# ------------------------------------------------------------------------------------------------ epochs of stages


def evaluated_batches(folder, name):
    return [record["batch"] for record in metrics(folder, name) if "eval/loss" in record]


@dataclass
class RunOfEpochs:
    """A run that evaluates and saves after each epoch. It stopped after the first, and was launched again."""

    folder: Path
    evaluated_by_first_launch: list[int]
    """Numbers of the batches after which it was evaluated."""
    second_launch: Launch


@pytest.fixture(scope="module")
def run_of_epochs(tmp_path_factory, config):
    folder = tmp_path_factory.mktemp("epochs")
    intervals = {"eval_interval": "1ep", "save_interval": "1ep"}
    run(folder, config, "epochs", **intervals, stop_after="1ep")
    evaluated_by_first_launch = evaluated_batches(folder, "epochs")
    second_launch = run(folder, config, "epochs", **intervals)
    return RunOfEpochs(folder, evaluated_by_first_launch, second_launch)


def test_a_run_that_stops_after_an_epoch_stops_where_its_stage_ends(run_of_epochs):
    assert run_of_epochs.evaluated_by_first_launch == [6]


def test_the_end_of_a_stage_is_evaluated_as_the_end_of_an_epoch(run_of_epochs):
    assert evaluated_batches(run_of_epochs.folder, "epochs") == [6, 10]


def test_the_end_of_a_stage_is_saved_as_the_end_of_an_epoch(run_of_epochs):
    assert saved_names(run_of_epochs.folder, "epochs") == {"ba6", "ba10"}


def test_a_run_resumed_where_a_stage_ends_begins_with_the_next_epoch(run_of_epochs):
    """Composer would warn with these words if the launch began in an epoch of which nothing is left."""
    assert "No batches were trained" not in run_of_epochs.second_launch.output


# ------------------------------------------------------------------------------------------ a stage added in mid-run


def copy_runs(folder, new_folder):
    """Copy all runs of a folder, so that a test can go on with them and leave the originals as they are."""
    shutil.copytree(folder / "runs", new_folder / "runs", symlinks=True)


@pytest.fixture(scope="module")
def stopped_folder(tmp_path_factory, config):
    """Where the run "added" has stopped after batch 4, without stages."""
    folder = tmp_path_factory.mktemp("stopped")
    run(folder, change_dataset(config, stages=[]), "added", stop_after="4ba")
    return folder


@dataclass
class ResumedRun:
    """The run "added" from batch 5 to its end, with the two stages in its config."""

    folder: Path
    launch: Launch

    @property
    def run_directory(self):
        return str(self.folder / "runs/added")


@pytest.fixture(scope="module")
def resumed_run(tmp_path_factory, config, stopped_folder):
    folder = tmp_path_factory.mktemp("resumed")
    copy_runs(stopped_folder, folder)
    launch = run(folder, config, "added", num_ranks=2)
    return ResumedRun(folder, launch)


def test_a_stage_is_added_in_mid_run_by_being_said(whole_run, resumed_run):
    """The run reads what a run reads that had the stages from the beginning."""
    assert digests_of(metrics(resumed_run.folder, "added")) == digests_of(whole_run)


def test_the_output_names_an_added_stage(resumed_run):
    assert "train_loader.dataset.stages [] -> [" in resumed_run.launch.output


def test_the_checkpoint_records_an_added_stage_as_the_only_change(resumed_run):
    checkpoint = open_checkpoint(saves(resumed_run.folder, "added") / "ba10")
    last_segment = checkpoint.manifest.segments[-1]
    assert list(last_segment.changes) == ["train_loader.dataset.stages"]


def test_batches_around_an_added_stage_can_be_read_again(whole_run, resumed_run):
    batches = read_batches(resumed_run.run_directory, 4, 9)
    assert [batch.digest for batch in batches] == digests_of(whole_run)[3:9]


@pytest.mark.parametrize(("number", "streams"), [(3, {"web"}), (7, {"web", "anneal"})])
def test_a_batch_read_again_has_the_streams_of_its_stage(resumed_run, number, streams):
    batch = read_batch(resumed_run.run_directory, number)
    assert {row.stream for row in batch.rows} == streams


def test_another_change_of_the_data_in_mid_run_is_refused(tmp_path, config, stopped_folder):
    """Also beside an added stage, which alone would be accepted."""
    copy_runs(stopped_folder, tmp_path)
    refused = attempt(tmp_path, change_dataset(config, shuffle_block_size=64), "added")
    assert refused.exit_codes == [2], refused.output
    assert "train_loader.dataset.shuffle_block_size" in refused.output


def test_a_stage_may_not_begin_at_a_batch_that_is_trained(tmp_path, config, resumed_run):
    """The run is at batch 10. Its second stage began after batch 6, and would now have begun after batch 8."""
    copy_runs(resumed_run.folder, tmp_path)
    _, second_stage = config["train_loader"]["dataset"]["stages"]
    longer_first_stage = {"until": "8ba", "streams": {"web": {}}}
    config_of_moved_stage = change_dataset(config, stages=[longer_first_stage, second_stage])

    refused = attempt(tmp_path, config_of_moved_stage, "added", max_duration="12ba")
    assert refused.exit_codes == [2], refused.output
    assert "trained with beginnings after batch 0 and 6; only stages that begin after 10 may be added" in refused.output
