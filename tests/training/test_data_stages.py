"""A run whose data changes where its rate begins to decay: the same batches on any ranks, workers and stops."""

import pytest

from llmfoundry_lite.checkpoint.store import open_checkpoint
from llmfoundry_lite.report.batch import read_batch, read_batches
from tests.helpers.runs import attempt, metrics, run, saves
from tests.helpers.tiny import tiny_config, values, write_data

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def config(tmp_path_factory, data):
    anneal = write_data(tmp_path_factory.mktemp("anneal"), 60)
    stage = {"web": {"proportion": 0.3}, "anneal": {"local": str(anneal), "split": "train", "proportion": 0.7}}
    schedule = {"name": "warmup_stable_decay", "t_warmup": "1ba", "t_decay": "0.4dur"}
    made = tiny_config(data, autoresume=True, max_duration="10ba", scheduler=schedule, save_interval="100ba")
    made["train_loader"]["dataset"] = {
        "streams": {"web": {"local": str(data)}},
        "split": "train",
        "shuffle": True,
        "shuffle_seed": 3,
        "stages": [{"until": "0.6dur", "streams": {"web": {}}}, {"streams": stage}],
    }
    return made


@pytest.fixture(scope="module")
def whole(tmp_path_factory, config):
    folder = tmp_path_factory.mktemp("whole")
    run(folder, config, "whole")
    return metrics(folder, "whole")


def digests(records):
    return values(records, "data/digest")


def test_the_stage_begins_where_the_rate_begins_to_decay(whole, tmp_path, config, data):
    rates = values(whole, "lr")
    assert rates[1] == rates[6] > rates[7] > rates[9] > 0, "batch 7, the first of the decay, still has the whole rate"
    plain = {**config, "train_loader": {"dataset": {**config["train_loader"]["dataset"], "stages": []}}}
    run(tmp_path, plain, "plain")
    there = digests(metrics(tmp_path, "plain"))
    assert len(set(digests(whole))) == 10
    assert digests(whole)[:6] == there[:6] and not set(digests(whole)[6:]) & set(there)


@pytest.mark.parametrize(
    ("launches", "num_workers"), [([(3, 2), (10, 1)], 0), ([(6, 1), (10, 2)], 2), ([(8, 4), (10, 2)], 1)]
)
def test_other_ranks_workers_and_stops_read_the_same_batches(whole, tmp_path, config, launches, num_workers):
    moved = {**config, "train_loader": {**config["train_loader"], "num_workers": num_workers}}
    begin = 0
    for end, num_ranks in launches:
        run(tmp_path, moved, "moved", num_ranks, stop_after=f"{end - begin}ba")
        begin = end
    assert digests(metrics(tmp_path, "moved")) == digests(whole)


def test_an_epoch_ends_with_its_stage_for_intervals_too(tmp_path, config):
    run(tmp_path, config, "epochs", eval_interval="1ep", save_interval="1ep", stop_after="1ep")
    assert [one["batch"] for one in metrics(tmp_path, "epochs") if "eval/loss" in one] == [6]
    carried_on = run(tmp_path, config, "epochs", eval_interval="1ep", save_interval="1ep")
    assert "No batches were trained" not in carried_on.output, "Composer's words where nothing of an epoch is left"
    assert [one["batch"] for one in metrics(tmp_path, "epochs") if "eval/loss" in one] == [6, 10]
    assert sorted(one.name for one in saves(tmp_path, "epochs").glob("ba*")) == ["ba10", "ba6"]


def test_a_stage_is_added_in_mid_run_by_being_said(whole, tmp_path, config):
    dataset = config["train_loader"]["dataset"]
    plain = {**config, "train_loader": {"dataset": {**dataset, "stages": []}}}
    run(tmp_path, plain, "added", stop_after="4ba")
    refused = attempt(tmp_path, {**config, "train_loader": {"dataset": {**dataset, "shuffle_block_size": 64}}}, "added")
    assert refused.exit_codes == [2] and "train_loader.dataset.shuffle_block_size" in refused.output
    result = run(tmp_path, config, "added", 2)
    assert "train_loader.dataset.stages [] -> [" in result.output
    assert digests(metrics(tmp_path, "added")) == digests(whole)
    manifest = open_checkpoint(saves(tmp_path, "added") / "ba10").manifest
    assert list(manifest.segments[-1].changes) == ["train_loader.dataset.stages"]
    where = str(tmp_path / "runs/added")
    assert [batch.digest for batch in read_batches(where, 4, 9)] == digests(whole)[3:9]
    assert {row.stream for row in read_batch(where, 3).rows} == {"web"}
    assert {row.stream for row in read_batch(where, 7).rows} == {"web", "anneal"}
    late = {**dataset, "stages": [{"until": "8ba", "streams": {"web": {}}}, dataset["stages"][1]]}
    refused = attempt(tmp_path, config, "added", max_duration="12ba", train_loader={"dataset": late})
    assert refused.exit_codes == [2], refused.output
    assert "trained with beginnings after batch 0 and 6; only stages that begin after 10 may be added" in refused.output
