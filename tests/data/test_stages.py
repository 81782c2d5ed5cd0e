"""Stages of data: other streams from a batch on, in an order that no layout, worker or stop changes."""

import json
import shutil
from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmfoundry_lite as lf
from llmfoundry_lite.config.batch_schedule import PerBatch, Steps
from llmfoundry_lite.config.data_schema import StageConfig, StreamConfig, TextDatasetConfig
from llmfoundry_lite.config.data_stages import first_batches, streams_of_stages
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.data.loader import build_text_loader
from llmfoundry_lite.data.order import SampleOrder
from llmfoundry_lite.data.stages import StagedOrder
from llmfoundry_lite.errors import DataError
from tests.helpers.numbered import SEQ_LEN, numbers, open_data, write_shards

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


# ----------------------------------------------------------------------------------------- epochs of all stages


def order_of(num_batches: int) -> SampleOrder:
    """An order whose epochs have so many batches, of two samples each."""
    return SampleOrder(
        shard_sizes_per_stream=[[2 * num_batches]],
        epoch_samples_per_stream=[2 * num_batches],
        batch_size=2,
        seed=1,
        shuffle=True,
    )


@st.composite
def staged_orders(draw) -> StagedOrder:
    """One to four stages, whose epochs have 1 to 9 batches; all but the last stage end after 1 to 30 batches."""
    orders = [order_of(num_batches) for num_batches in draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))]
    begins = [0]
    for _ in orders[1:]:
        begins.append(begins[-1] + draw(st.integers(1, 30)))
    return StagedOrder(orders, begins)


@given(staged_orders(), st.integers(1, 40))
def test_epochs_of_all_stages_are_every_batch_once(staged_order, batches_of_last_stage):
    batch = 0
    epoch = 0
    while batch < staged_order.first_batches[-1] + batches_of_last_stage:
        assert staged_order.batches_before(epoch, 0) == batch
        assert staged_order.num_batches(epoch) > 0
        for step in range(staged_order.num_batches(epoch)):
            assert staged_order.locate_batch(batch) == (epoch, step)
            batch += 1
        epoch += 1


@given(staged_orders())
def test_an_epoch_ends_where_a_stage_ends(staged_order):
    for begin_of_stage in staged_order.first_batches[1:]:
        first_epoch, step = staged_order.locate_batch(begin_of_stage)
        assert step == 0
        epoch_before = first_epoch - 1
        end_of_epoch = staged_order.batches_before(epoch_before, staged_order.num_batches(epoch_before))
        assert end_of_epoch == begin_of_stage


@given(staged_orders())
def test_a_stage_of_which_nothing_was_read_has_not_begun(staged_order):
    """The run stops where the last stage begins. The first stage always counts as begun."""
    *begins_before, begin_of_last = staged_order.first_batches
    begun = [first_batch for first_batch, _ in staged_order.describe_begun_stages(begin_of_last)]
    assert begun == (begins_before or [0])


# ------------------------------------------------------------------------------------- batches of a run in stages


BATCH_SIZE = 12
NUM_BATCHES = 40
STREAMS = ["web", "code", "math"]
"""The samples of `web` are numbered from 0, those of `code` from 1000, and those of `math` from 2000."""
SIZES = {"web": 100, "code": 100, "math": 50}
"""Number of samples in a stream."""

SECOND_STAGE = 12
THIRD_STAGE = 32
"""The batch with which a stage of `mixture` begins."""
END_OF_EPOCH = 28
"""The batch after the first epoch of the second stage, which has 200 samples, or 16 batches."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name of a stream -> the folder of its samples."""
    root = tmp_path_factory.mktemp("streams")
    return {name: str(write_shards(root / name, SIZES[name], first=1000 * index)) for index, name in enumerate(STREAMS)}


def mixture_of(folders) -> dict:
    """Settings of a run of 40 batches in three stages."""
    first_stage = {"until": "12ba"}
    second_stage = {"until": "0.8dur", "streams": {"code": {"proportion": 0.75}, "web": {"proportion": 0.25}}}
    third_stage = {"streams": {"math": {"local": folders["math"], "repeat": 2.0}, "code": {"choose": 20}}}
    return {
        "max_duration": f"{NUM_BATCHES}ba",
        "streams": {"web": {"local": folders["web"]}, "code": {"local": folders["code"]}},
        "stages": [first_stage, second_stage, third_stage],
    }


@pytest.fixture
def mixture(folders):
    return mixture_of(folders)


@pytest.fixture
def without_stages(mixture):
    """The run that has the streams of the first stage to its end."""
    del mixture["stages"]
    return mixture


def with_stages(settings, *stages) -> dict:
    return {**settings, "stages": list(stages)}


def state_after(num_batches: int, settings, *, at_end_of_epoch: bool = False) -> dict:
    """The state of the data after so many batches of a run.

    Between two epochs there are two: the end of the first, if `at_end_of_epoch`, or the beginning of the second.
    """
    dataset = open_data(None, **settings)
    epoch, step = dataset.stages.locate_batch(num_batches)
    if at_end_of_epoch and step == 0:
        epoch -= 1
        step = dataset.stages.num_batches(epoch)
    dataset.set_position(epoch, 0)
    return json.loads(json.dumps(dataset.state_dict(step * BATCH_SIZE, True)))


def read_run(dataset, *, num_batches: int, num_workers: int = 0) -> list[list[int]]:
    """The sample numbers of the next batches of a data set, through as many epochs as they have."""
    loader = build_text_loader(dataset, num_workers=num_workers)
    batches = []
    while len(batches) < num_batches:
        batches += numbers(loader)
    return batches[:num_batches]


def read_whole_run(settings, **share) -> list[list[int]]:
    return read_run(open_data(None, **settings, **share), num_batches=NUM_BATCHES)


def read_epoch_from(state, settings) -> list[list[int]]:
    """The batches that are left in the epoch of a state."""
    dataset = open_data(None, **settings)
    dataset.load_state_dict(state)
    return numbers(build_text_loader(dataset))


@pytest.fixture(scope="module")
def all_batches(folders):
    """The sample numbers of each batch of the run of `mixture`, read at one go."""
    return read_whole_run(mixture_of(folders))


def flatten(lists) -> list[int]:
    return list(chain.from_iterable(lists))


def count_streams(batches) -> Counter:
    """Name of a stream -> number of its samples in some batches."""
    return Counter(STREAMS[number // 1000] for number in flatten(batches))


def test_every_batch_of_every_stage_is_full(all_batches):
    assert [len(batch) for batch in all_batches] == [BATCH_SIZE] * NUM_BATCHES


def test_each_stage_reads_its_own_streams(all_batches):
    assert count_streams(all_batches[:SECOND_STAGE]).keys() == {"web", "code"}
    assert count_streams(all_batches[SECOND_STAGE:THIRD_STAGE]).keys() == {"web", "code"}
    assert count_streams(all_batches[THIRD_STAGE:]).keys() == {"code", "math"}


def test_each_stage_has_its_streams_by_their_shares(all_batches):
    second_stage = all_batches[SECOND_STAGE:THIRD_STAGE]
    num_samples = len(second_stage) * BATCH_SIZE
    assert count_streams(second_stage)["code"] == pytest.approx(0.75 * num_samples, abs=20)

    # An epoch of the third stage has 100 samples of math (its 50 twice) and 20 of code.
    third_stage = all_batches[THIRD_STAGE:]
    num_samples = len(third_stage) * BATCH_SIZE
    assert count_streams(third_stage)["math"] == pytest.approx(100 / 120 * num_samples, abs=10)


def test_the_first_stage_is_the_run_without_stages(without_stages, all_batches):
    batches = read_whole_run(without_stages)
    assert batches[:SECOND_STAGE] == all_batches[:SECOND_STAGE]
    assert batches[SECOND_STAGE : SECOND_STAGE + 4] != all_batches[SECOND_STAGE : SECOND_STAGE + 4]


def test_the_same_streams_are_drawn_anew_in_each_stage(mixture):
    """Two stages, each of one epoch of 16 batches, which leaves 8 of the 200 samples out."""
    batches = read_whole_run(with_stages(mixture, {"until": "16ba"}, {}))
    first_stage = batches[:16]
    second_stage = batches[16:32]
    assert sorted(first_stage) != sorted(second_stage)
    assert sorted(flatten(first_stage)) != sorted(flatten(second_stage))


@pytest.mark.parametrize(
    ("begin", "num_workers"),
    [(5, 0), (SECOND_STAGE, 2), (SECOND_STAGE + 1, 2), (20, 2), (THIRD_STAGE, 0), (THIRD_STAGE + 4, 2)],
)
@pytest.mark.parametrize("at_end_of_epoch", [False, True])
def test_any_place_carries_on_in_the_middle_of_a_stage_and_at_its_border(
    mixture, all_batches, begin, num_workers, at_end_of_epoch
):
    dataset = open_data(None, **mixture)
    dataset.load_state_dict(state_after(begin, mixture, at_end_of_epoch=at_end_of_epoch))
    batches = read_run(dataset, num_batches=NUM_BATCHES - begin, num_workers=num_workers)
    assert batches == all_batches[begin:]


def test_ranks_share_the_batches_of_every_stage(mixture, all_batches):
    batches_by_rank = [read_whole_run(mixture, data_rank_and_size=(rank, 3)) for rank in range(3)]
    joined = [flatten(parts) for parts in zip(*batches_by_rank, strict=True)]
    assert joined == all_batches


# ------------------------------------------------------------------------------- the loader of somebody's own loop


@pytest.fixture(scope="module")
def open_loader(folders):
    """A function that opens the data of `mixture` without a run, of which a stage could not last a fraction."""
    settings = mixture_of(folders)
    del settings["max_duration"]
    settings["stages"][1]["until"] = f"{THIRD_STAGE}ba"
    settings |= {"global_batch_size": BATCH_SIZE, "max_seq_len": SEQ_LEN, "shuffle": True, "shuffle_seed": 3}
    return lambda: lf.open_dataset(**settings)


@pytest.fixture(scope="module")
def states_of_loader(open_loader):
    """The loader's state after each number of batches; the first is None, as nothing was read."""
    loader = open_loader()
    states = [None]
    while len(states) < NUM_BATCHES:
        for _ in loader:
            states.append(json.loads(json.dumps(loader.state_dict())))
    return states


def read_batch(loader) -> list[int]:
    """The sample numbers of the next batch."""
    return next(iter(loader))["input_ids"][:, 0].tolist()


def test_a_stateful_loader_goes_through_stages(open_loader, all_batches):
    loader = open_loader()
    assert numbers(loader) == all_batches[:SECOND_STAGE]
    assert numbers(loader) == all_batches[SECOND_STAGE:END_OF_EPOCH]
    assert read_batch(loader) == all_batches[END_OF_EPOCH]


@pytest.mark.parametrize(
    "num_batches",
    [SECOND_STAGE - 1, SECOND_STAGE, SECOND_STAGE + 1, END_OF_EPOCH, THIRD_STAGE, THIRD_STAGE + 1],
)
def test_a_stateful_loader_carries_on_from_any_place(open_loader, states_of_loader, all_batches, num_batches):
    loader = open_loader()
    loader.load_state_dict(states_of_loader[num_batches])
    assert read_batch(loader) == all_batches[num_batches]


# ---------------------------------------------------------------------------------------------- what may change


def test_later_stages_may_be_added_before_they_begin(folders, without_stages, all_batches):
    batches = read_epoch_from(state_after(10, without_stages), mixture_of(folders))
    assert batches == all_batches[10:SECOND_STAGE]


def test_later_stages_may_be_removed_before_they_begin(folders, without_stages):
    batches = read_epoch_from(state_after(10, mixture_of(folders)), without_stages)
    assert batches == read_whole_run(without_stages)[10:16], "the rest of an epoch of 16 batches"


def test_a_stage_may_get_other_streams_before_it_begins(mixture):
    first_stage, second_stage, _ = mixture["stages"]
    changed = with_stages(mixture, first_stage, second_stage, {"streams": {"web": {}}})
    open_data(None, **changed).load_state_dict(state_after(30, mixture))


def test_a_state_of_the_first_stage_is_that_of_a_run_without_stages(folders, without_stages):
    state = state_after(10, without_stages)
    assert "stages" not in state
    assert state["order"] == state_after(10, mixture_of(folders))["order"]


@pytest.mark.parametrize(
    ("num_batches", "until", "message"),
    [
        pytest.param(
            20,
            "15ba",
            "train_loader.dataset.stages: here they begin after batch 0 and 15 and 32; the checkpoint, of batch 20, "
            "was trained with beginnings after batch 0 and 12; only stages that begin aft",
            id="the beginning of a stage is moved after the stage has begun",
        ),
        pytest.param(
            10,
            "9ba",
            "train_loader.dataset.stages: here they begin after batch 0 and 9 and 32; the checkpoint, of batch 10, was "
            "trained with beginnings after batch 0; only stages that begin after 10",
            id="the beginning of a stage is moved before the checkpoint",
        ),
    ],
)
def test_a_stage_that_has_begun_stays_where_it_is(mixture, num_batches, until, message):
    state = state_after(num_batches, mixture)
    mixture["stages"][0]["until"] = until
    with pytest.raises(DataError) as error:
        open_data(None, **mixture).load_state_dict(state)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


BATCH_SIZES = PerBatch.build(12, Steps.parse({"10ba": 24}))


def test_stages_that_were_moved_are_named_in_batches_of_the_run(mixture):
    """`until` counts those. From the eleventh on, each has two of the data set's batches."""
    mixture["stages"][1]["until"] = "20ba"
    dataset = open_data(None, **mixture, batch_sizes=BATCH_SIZES)
    epoch, num_samples = dataset.position_after(15)
    state = dataset.state_dict(num_samples, epoch=epoch)
    mixture["stages"][0]["until"] = "13ba"
    with pytest.raises(
        DataError,
        match=r"begin after batch 0 and 13 and 20; the checkpoint, of batch 15, .* after batch 0 and 12; only",
    ):
        open_data(None, **mixture, batch_sizes=BATCH_SIZES).load_state_dict(state)


def test_a_position_that_a_schedule_does_not_have_is_refused(without_stages):
    dataset = open_data(None, **without_stages, batch_sizes=BATCH_SIZES)
    epoch, num_samples = dataset.position_after(12)
    state = dataset.state_dict(num_samples, epoch=epoch)
    dataset.check_position(state, 12)
    with pytest.raises(DataError, match="has read 168 samples, and batch_size_schedule has 144 in the first 11 batch"):
        dataset.check_position(state, 11)


def with_equal_shares(mixture) -> dict:
    """Another second stage: `code` and `web` without their proportions."""
    first_stage, second_stage, third_stage = mixture["stages"]
    return with_stages(mixture, first_stage, {**second_stage, "streams": {"code": {}, "web": {}}}, third_stage)


def test_a_stage_may_get_other_shares_at_its_border(mixture):
    state = state_after(SECOND_STAGE, mixture)
    open_data(None, **with_equal_shares(mixture)).load_state_dict(state)


def test_a_stage_that_has_begun_keeps_its_shares(mixture):
    state = state_after(SECOND_STAGE + 1, mixture)
    with pytest.raises(DataError, match="is not what the checkpoint was trained with"):
        open_data(None, **with_equal_shares(mixture)).load_state_dict(state)


def test_other_data_of_a_begun_stage_is_named_beside_later_streams(mixture, tmp_path):
    """The state is of two streams, and the third stage, which has not begun, has a third."""
    code = tmp_path / "code"
    shutil.copytree(mixture["streams"]["code"]["local"], code)
    mixture["streams"]["code"] = {"local": str(code)}
    state = state_after(20, mixture)

    shutil.rmtree(code)
    write_shards(code, 90, first=5000)
    with pytest.raises(DataError, match=rf"the checkpoint was trained with: {code} holds .*, 'code' in the checkpoint"):
        open_data(None, **mixture).load_state_dict(state)


def test_one_folder_in_two_stages_has_one_remote(mixture, folders):
    mixture["stages"][2]["streams"]["again"] = {"local": folders["web"], "remote": folders["code"]}
    message = r"stream again: its folder .*web is filled from .*code in one stage and from None"
    with pytest.raises(DataError, match=message):
        open_data(None, **mixture)


# ------------------------------------------------------------------------------------------------ configuration


@pytest.mark.parametrize(
    ("max_duration", "until", "first_batch"),
    [
        ("100ba", "0.8dur", 80),
        ("100ba", "0.55dur", 55),
        ("7ba", "0.8dur", 6),
        ("12800tok", "0.8dur", 80),
        ("800sp", "0.8dur", 80),
        ("100ba", "640sp", 80),
        ("100ba", "9999tok", 79),
        ("2e4ba", "80ba", 80),
    ],
)
def test_a_stage_begins_with_the_batch_after_the_one_before(max_duration, until, first_batch):
    """A batch is 8 samples or 128 tokens; the one in which the stage before ends is still of that stage."""
    dataset = TextDatasetConfig(local="a", stages=[StageConfig(until=Duration.parse(until)), StageConfig()])
    batches = first_batches(
        dataset, "x", Duration.parse(max_duration), batch_sizes=PerBatch.build(8, None), max_seq_len=16
    )
    assert batches == [0, first_batch]


def test_tokens_of_a_stage_are_those_of_its_own_samples():
    """The data's samples have 32 tokens, where the model takes 16: 6400 tokens are 200 samples, or 25 batches."""
    stages = [StageConfig(until=Duration(6400, "tok")), StageConfig()]
    dataset = TextDatasetConfig(local="a", max_seq_len=32, stages=stages)
    batches = first_batches(dataset, "x", Duration(100, "ba"), batch_sizes=PerBatch.build(8, None), max_seq_len=16)
    assert batches == [0, 25]


def test_what_a_stage_leaves_out_is_that_of_the_stream_of_its_name():
    """All but the shares, which each stage gives anew."""
    web = StreamConfig(local="web", split="train", proportion=2.0)
    code = StreamConfig(local="code")
    first_stage = StageConfig(until=Duration(1, "ba"))
    second_stage = StageConfig(until=Duration(2, "ba"), streams={"web": StreamConfig(), "code": code})
    third_stage = StageConfig(streams={"code": StreamConfig(proportion=1.0, local="moved")})
    dataset = TextDatasetConfig(streams={"web": web}, stages=[first_stage, second_stage, third_stage])

    first_streams, second_streams, third_streams = streams_of_stages(dataset)
    assert first_streams == {"web": web}
    assert second_streams == {"web": StreamConfig(local="web", split="train"), "code": code}
    assert third_streams == {"code": StreamConfig(local="moved", proportion=1.0)}
