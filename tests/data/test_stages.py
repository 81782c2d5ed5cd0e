"""Stages of data: other streams from a batch on, in an order that no layout, worker or stop changes."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmfoundry_lite as lf
from llmfoundry_lite.config.data_schema import StageConfig, StreamConfig, TextDatasetConfig
from llmfoundry_lite.config.data_stages import first_batches, streams_of_stages
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.data.loader import build_text_loader
from llmfoundry_lite.data.order import SampleOrder
from llmfoundry_lite.data.stages import StagedOrder
from llmfoundry_lite.errors import DataError
from tests.helpers.numbered import SEQ_LEN, numbers, open_data, write_shards

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
BATCH = 12


def order_of(num_samples: int, batch_size: int = 2) -> SampleOrder:
    sizes = [[num_samples]]
    return SampleOrder(
        shard_sizes_per_stream=sizes,
        epoch_samples_per_stream=[num_samples],
        batch_size=batch_size,
        seed=1,
        shuffle=True,
    )


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=4), st.integers(1, 40))
def test_epochs_of_all_stages_are_every_batch_once(stages, more):
    """Each stage: batches of a full epoch, and of the stage."""
    begins = [sum(length for _, length in stages[:number]) for number in range(len(stages))]
    staged = StagedOrder([order_of(2 * full) for full, _ in stages], begins)
    batch, epoch = 0, 0
    while batch < begins[-1] + more:
        assert staged.batches_before(epoch, 0) == batch and staged.num_batches(epoch) > 0
        for step in range(staged.num_batches(epoch)):
            assert staged.locate_batch(batch + step) == (epoch, step)
        batch, epoch = batch + staged.num_batches(epoch), epoch + 1
    ends = {staged.batches_before(number, staged.num_batches(number)) for number in range(epoch)}
    assert ends >= {end for _, end in pairwise(begins)}
    assert [begin for begin, _ in staged.describe_begun_stages(begins[-1])] == (begins[:-1] or [0])


@pytest.fixture
def mixture(tmp_path):
    """Three stages of the streams `web` (ids 0 to 99), `code` (1000 to 1099) and `math` (2000 to 2049)."""
    places = {}
    for name, count, first in (("web", 100, 0), ("code", 100, 1000), ("math", 50, 2000)):
        places[name] = {"local": str(write_shards(tmp_path / name, count, first=first))}
    return {
        "max_duration": "40ba",
        "streams": {"web": places["web"], "code": places["code"]},
        "stages": [
            {"until": "12ba"},
            {"until": "0.8dur", "streams": {"code": {"proportion": 0.75}, "web": {"proportion": 0.25}}},
            {"streams": {"math": {**places["math"], "repeat": 2.0}, "code": {"choose": 20}}},
        ],
    }


def state_at(batch: int, settings, *, ends_epoch: bool = False) -> dict:
    """The state between two batches; where an epoch ends there, of its end or of the next one's beginning."""
    dataset = open_data(None, **settings)
    epoch, step = dataset.stages.locate_batch(batch)
    if ends_epoch and step == 0:
        epoch, step = epoch - 1, dataset.stages.num_batches(epoch - 1)
    dataset.set_position(epoch, 0)
    return json.loads(json.dumps(dataset.state_dict(step * BATCH, True)))


def batches_of(settings, num_workers: int = 0, begin: int = 0, ends_epoch: bool = False, **share) -> list[list[int]]:
    """The batches from `begin` to 40."""
    dataset = open_data(None, **settings, **share)
    if begin:
        dataset.load_state_dict(state_at(begin, settings, ends_epoch=ends_epoch))
    loader, found = build_text_loader(dataset, num_workers=num_workers), []
    while begin + len(found) < 40:
        found += numbers(loader)
    return found[: 40 - begin]


def test_each_stage_has_its_streams_by_their_shares(mixture):
    found = batches_of(mixture)
    assert len(found) == 40 and {len(batch) for batch in found} == {BATCH}
    parts = [
        [number // 1000 for batch in found[begin:end] for number in batch]
        for begin, end in ((0, 12), (12, 32), (32, 40))
    ]
    assert set(parts[0]) == {0, 1} and set(parts[1]) == {0, 1} and set(parts[2]) == {1, 2}
    # An epoch of the second stage has 200 samples, 150 of code; of the third 100 of math and 20 of code.
    assert parts[1].count(1) == pytest.approx(0.75 * 20 * BATCH, abs=20)
    assert parts[2].count(2) == pytest.approx(100 / 120 * 8 * BATCH, abs=10)


def test_the_first_stage_is_the_run_without_stages(mixture):
    plain = {key: value for key, value in mixture.items() if key != "stages"}
    assert batches_of(mixture)[:12] == batches_of(plain)[:12]
    assert batches_of(mixture)[12:16] != batches_of(plain)[12:16]


def test_the_same_streams_are_drawn_anew_in_each_stage(mixture):
    again = {**mixture, "stages": [{"until": "16ba"}, {}]}
    first, second = (sorted(map(tuple, batches_of(again)[begin : begin + 16])) for begin in (0, 16))
    assert first != second and sorted(sum(first, ())) != sorted(sum(second, ()))


@pytest.mark.parametrize(("begin", "num_workers"), [(5, 0), (12, 2), (13, 2), (20, 2), (32, 0), (36, 2)])
@pytest.mark.parametrize("ends_epoch", [False, True])
def test_any_place_carries_on_in_the_middle_of_a_stage_and_at_its_border(mixture, begin, num_workers, ends_epoch):
    assert batches_of(mixture, num_workers, begin, ends_epoch) == batches_of(mixture)[begin:]


def test_ranks_share_the_batches_of_every_stage(mixture):
    shares = [batches_of(mixture, data_rank_and_size=(part, 3)) for part in range(3)]
    assert [[*first, *second, *third] for first, second, third in zip(*shares, strict=True)] == batches_of(mixture)


def test_a_stateful_loader_goes_through_stages(mixture):
    words = {
        **mixture,
        "stages": [mixture["stages"][0], {**mixture["stages"][1], "until": "32ba"}, mixture["stages"][2]],
    }
    del words["max_duration"]
    settings = {"global_batch_size": BATCH, "max_seq_len": SEQ_LEN, "shuffle": True, "shuffle_seed": 3}
    loader, found = lf.open_dataset(**words, **settings), []
    while len(found) < 20:
        found += numbers(loader)
    assert found == batches_of(mixture)[: len(found)]
    for batch in loader:
        following = batch["input_ids"][:, 0].tolist()
        break
    assert following == batches_of(mixture)[len(found)]


def test_a_stateful_loader_carries_on_from_every_place_at_the_end_of_an_epoch_too(mixture):
    words = {key: value for key, value in mixture.items() if key not in ("max_duration", "stages")}
    words |= {"global_batch_size": BATCH, "max_seq_len": SEQ_LEN, "shuffle": True, "shuffle_seed": 3}
    words["stages"] = [{"until": "12ba"}, {"until": "32ba"}, mixture["stages"][2]]
    loader, places, found = lf.open_dataset(**words), [], []
    while len(found) < 36:
        for batch in loader:
            found.append(batch["input_ids"][:, 0].tolist())
            places.append(json.loads(json.dumps(loader.state_dict())))
    for begin in (11, 12, 13, 28, 32, 33):  # the first stage ends with 12; an epoch of the second with 28
        other = lf.open_dataset(**words)
        other.load_state_dict(places[begin - 1])
        assert next(iter(other))["input_ids"][:, 0].tolist() == found[begin], begin


# What may change ----------------------------------------------------------------------------------------------------


def test_a_later_stage_is_added_moved_and_removed_while_it_has_not_begun(mixture):
    plain = {key: value for key, value in mixture.items() if key != "stages"}
    for before, after in ((plain, mixture), (mixture, plain)):
        dataset = open_data(None, **after)
        dataset.load_state_dict(state_at(10, before))
        found = numbers(build_text_loader(dataset))
        assert found and found == batches_of(after)[10 : 10 + len(found)]
    moved = {**mixture, "stages": [*mixture["stages"][:2], {"streams": {"web": {}}}]}
    open_data(None, **moved).load_state_dict(state_at(30, mixture))
    assert "stages" not in state_at(10, plain) and state_at(10, plain)["order"] == state_at(10, mixture)["order"]


BEGAN = "train_loader.dataset.stages: here they begin after batch {}; the checkpoint, of batch {}, was trained with "


@pytest.mark.parametrize(
    ("batch", "until", "words"),
    [
        (
            20,
            "15ba",
            BEGAN.format("0 and 15 and 32", 20) + "beginnings after batch 0 and 12; only stages that begin aft",
        ),
        (10, "9ba", BEGAN.format("0 and 9 and 32", 10) + "beginnings after batch 0; only stages that begin after 10"),
    ],
)
def test_a_stage_that_has_begun_stays_where_it_is(mixture, batch, until, words):
    stages = [{"until": until}, *mixture["stages"][1:]]
    with pytest.raises(DataError) as error:
        open_data(None, **{**mixture, "stages": stages}).load_state_dict(state_at(batch, mixture))
    assert str(error.value).startswith(words) and "\n" not in str(error.value)


def test_a_stage_that_has_begun_keeps_its_shares(mixture):
    stages = [mixture["stages"][0], {"until": "0.8dur", "streams": {"code": {}, "web": {}}}, mixture["stages"][2]]
    changed = {**mixture, "stages": stages}
    open_data(None, **changed).load_state_dict(state_at(12, mixture))
    with pytest.raises(DataError, match="is not what the checkpoint was trained with"):
        open_data(None, **changed).load_state_dict(state_at(13, mixture))


def test_other_data_of_a_begun_stage_is_named_though_a_later_one_has_more_streams(mixture):
    state, code = state_at(20, mixture), Path(mixture["streams"]["code"]["local"])
    shutil.rmtree(code)
    write_shards(code, 90, first=5000)
    with pytest.raises(DataError, match=rf"the checkpoint was trained with: {code} holds .*, 'code' in the checkpoint"):
        open_data(None, **mixture).load_state_dict(state)


def test_one_folder_in_two_stages_has_one_remote(mixture, tmp_path):
    mixture["stages"][2]["streams"]["again"] = {"local": str(tmp_path / "web"), "remote": str(tmp_path / "code")}
    with pytest.raises(
        DataError, match=r"stream again: its folder .*web is filled from .*code in one stage and from None"
    ):
        open_data(None, **mixture)


# The configuration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "until", "batch"),
    [
        *[("100ba", "0.8dur", 80), ("100ba", "0.55dur", 55), ("7ba", "0.8dur", 6), ("12800tok", "0.8dur", 80)],
        *[("800sp", "0.8dur", 80), ("100ba", "640sp", 80), ("100ba", "9999tok", 79), ("2e4ba", "80ba", 80)],
    ],
)
def test_a_stage_begins_with_the_batch_at_which_the_one_before_has_ended(run, until, batch):
    dataset = TextDatasetConfig(local="a", stages=[StageConfig(until=Duration.parse(until)), StageConfig()])
    assert first_batches(dataset, "x", Duration.parse(run), batch_size=8, max_seq_len=16) == [0, batch]


def test_tokens_of_a_stage_are_those_of_its_own_samples():
    stages = [StageConfig(until=Duration(6400, "tok")), StageConfig()]
    dataset = TextDatasetConfig(local="a", max_seq_len=32, stages=stages)
    assert first_batches(dataset, "x", Duration(100, "ba"), batch_size=8, max_seq_len=16) == [0, 6400 // 32 // 8]


def test_what_a_stage_leaves_out_is_that_of_the_stream_of_its_name():
    web, code = StreamConfig(local="web", split="train", proportion=2.0), StreamConfig(local="code")
    second = StageConfig(until=Duration(2, "ba"), streams={"web": StreamConfig(), "code": code})
    third = StageConfig(streams={"code": StreamConfig(proportion=1.0, local="moved")})
    dataset = TextDatasetConfig(streams={"web": web}, stages=[StageConfig(until=Duration(1, "ba")), second, third])
    assert streams_of_stages(dataset) == [
        {"web": web},
        {"web": StreamConfig(local="web", split="train"), "code": code},
        {"code": StreamConfig(local="moved", proportion=1.0)},
    ]
