"""Sizes of batches that change at given batches: arithmetic, what is refused, and what may change in mid-run."""

import random

import pytest

from llmfoundry_lite import preflight
from llmfoundry_lite.config.batch_schedule import PerBatch, Step
from llmfoundry_lite.config.changes import refuse_another_past
from llmfoundry_lite.config.data_schema import StageConfig, TextDatasetConfig
from llmfoundry_lite.config.data_stages import first_batches
from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import as_dict
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.dry_run import describe_launch
from llmfoundry_lite.errors import CheckpointError, ConfigError, DataError
from llmfoundry_lite.estimate.memory import estimate_training_memory
from tests.helpers.present import needs
from tests.helpers.tiny import SEQ_LEN, tiny_config, write_config, write_data

RUN = ("mpt-125m", "max_duration=100ba", "global_train_batch_size=8", "device_train_microbatch_size=2")
SCHEDULE = "batch_size_schedule={10ba: 16, 30ba: 32}"


def load(*arguments):
    return load_train_config([*RUN, *arguments]).config


def draw(generator: random.Random) -> PerBatch:
    """Return numbers of up to five stretches."""
    starts = [0, *sorted(generator.sample(range(1, 20), generator.randrange(5)))]
    return PerBatch(tuple(Step(start, generator.randrange(1, 4)) for start in starts))


@pytest.mark.parametrize("seed", range(20))
def test_the_functions_of_a_schedule_agree_with_its_batches_one_by_one(seed):
    numbers = draw(random.Random(seed))
    one_by_one = []
    for batch in range(25):
        begun = [step.value for step in numbers.steps if step.first_batch <= batch]
        one_by_one.append(begun[-1])

    assert [numbers.of(batch) for batch in range(25)] == one_by_one
    assert [numbers.sum_before(batch) for batch in range(25)] == [sum(one_by_one[:batch]) for batch in range(25)]
    for total in range(sum(one_by_one)):
        count = next(count for count in range(26) if sum(one_by_one[:count]) >= total)
        assert numbers.count_batches(total) == count
    for num_batches in (1, 7, 25):
        stretches = numbers.stretches(num_batches)
        assert [stretch.value for stretch in stretches for _ in range(stretch.num_batches)] == one_by_one[:num_batches]


@pytest.mark.parametrize("seed", range(20))
def test_the_first_difference_of_two_schedules_is_the_first_batch_that_differs(seed):
    generator = random.Random(seed)
    one, other = draw(generator), draw(generator)
    for num_batches in (0, 3, 25):
        differing = [batch for batch in range(num_batches) if one.of(batch) != other.of(batch)]
        assert one.first_difference(other, num_batches) == (differing[0] if differing else None)


def test_a_later_file_changes_one_step_and_removes_another():
    config = load(SCHEDULE, "batch_size_schedule.30ba=null", "batch_size_schedule.40ba=64")
    assert as_dict(config)["batch_size_schedule"] == {"10ba": 16, "40ba": 64}
    assert load(SCHEDULE, "batch_size_schedule=null").batch_sizes == PerBatch.build(8, None)


def test_a_schedule_may_begin_with_another_size_than_the_smallest():
    sizes = load("batch_size_schedule={0ba: 32, 10ba: 8}").batch_sizes
    assert [sizes.of(batch) for batch in (0, 9, 10)] == [32, 32, 8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["batch_size_schedule={10ba: 20}"],
            "batch_size_schedule: 20 from 10ba on given, expected a multiple of global_train_batch_size, 8, such as 16 "
            "or 24; the smallest size belongs there",
        ),
        (
            ["batch_size_schedule={10ba: 4}"],
            "batch_size_schedule: 4 from 10ba on given, expected a multiple of global_train_batch_size, 8, such as 8; "
            "the smallest size belongs there",
        ),
        (
            ["batch_size_schedule={10ep: 16}"],
            "batch_size_schedule: {'10ep': 16} given, expected numbers by batches, such as {1000ba: 128, 3000ba: 256}",
        ),
        (
            ["batch_size_schedule={10ba: 16, 1_0ba: 24}"],
            "batch_size_schedule: {'10ba': 16, '1_0ba': 24} given, expected one number from 10ba on",
        ),
        (
            [SCHEDULE, "max_duration=2ep"],
            "batch_size_schedule: max_duration is 2ep, and a batch may have samples of two epochs; write max_duration "
            "in ba, sp or tok",
        ),
        (
            [SCHEDULE, "scheduler.t_warmup=1ep"],
            "batch_size_schedule: does not go with scheduler.t_warmup, 1ep: epochs have different numbers of batches; "
            "write it in the unit of max_duration or in dur",
        ),
        (
            [SCHEDULE, "train_loader={name: 'python:mine:load'}"],
            "batch_size_schedule: does not go with train_loader.name, python:mine:load: nothing is known of its place "
            "in the data; remove one of them",
        ),
    ],
)
def test_schedules_that_cannot_be_trained_are_refused(arguments, message):
    with pytest.raises(ConfigError) as error:
        load(*arguments)
    assert str(error.value).removeprefix("command line: ") == message


@needs("llmfoundry_islands")
def test_islands_are_refused():
    with pytest.raises(ConfigError, match="batch_size_schedule: does not go with islands: several launches divide"):
        load(SCHEDULE, "islands={name: a, coordinator: 'http://127.0.0.1:1'}")


def test_a_size_that_begins_after_the_end_is_noted():
    notes = load_train_config([*RUN, "batch_size_schedule={10ba: 16, 100ba: 32}"]).notes
    assert "batch_size_schedule: 32 from 100ba on has no effect: the run ends at 100ba" in str(notes)
    assert "16 from 10ba" not in str(notes)


@pytest.mark.parametrize(
    ("until", "first_batch"), [("40ba", 40), ("80sp", 10), ("81sp", 11), ("400sp", 30), ("401sp", 31), ("1e3tok", 8)]
)
def test_a_stage_begins_where_batches_of_several_sizes_have_reached_it(until, first_batch):
    """The first ten batches have 80 samples, and the 20 after them 320; a sample has 16 tokens."""
    dataset = TextDatasetConfig(local="a", stages=[StageConfig(until=Duration.parse(until)), StageConfig()])
    sizes = load(SCHEDULE).batch_sizes
    assert first_batches(dataset, "x", Duration(100, "ba"), sizes, max_seq_len=16) == [0, first_batch]


@pytest.mark.parametrize(
    ("later", "num_batches"),
    [
        (SCHEDULE, 100),
        ("batch_size_schedule={10ba: 16, 30ba: 64}", 30),
        ("batch_size_schedule={10ba: 16}", 30),
        ("batch_size_schedule=null", 10),
        ("batch_size_schedule={10ba: 16, 20ba: 8, 25ba: 16, 30ba: 32}", 20),
    ],
)
def test_sizes_of_later_batches_may_change(later, num_batches):
    refuse_another_past(as_dict(load(SCHEDULE)), load(later), num_batches)


@pytest.mark.parametrize(
    ("later", "num_batches", "begin"),
    [
        ("batch_size_schedule={10ba: 16, 30ba: 64}", 31, "batch 31 has 64 samples here and 32 in the checkpoint"),
        ("batch_size_schedule=null", 11, "batch 11 has 8 samples here and 16 in the checkpoint"),
        ("batch_size_schedule={9ba: 16, 30ba: 32}", 40, "batch 10 has 16 samples here and 8 in the checkpoint"),
    ],
)
def test_sizes_of_trained_batches_may_not_change(later, num_batches, begin):
    with pytest.raises(CheckpointError) as error:
        refuse_another_past(as_dict(load(SCHEDULE)), load(later), num_batches)
    assert str(error.value) == (
        f"batch_size_schedule: {begin}, which has trained {num_batches} batches; only later ones may change: begin "
        f'with the checkpoint\'s {{"10ba": 16, "30ba": 32}}, and add or change entries from {num_batches}ba on'
    )


@pytest.mark.parametrize("recorded", [["x"], {"10ba": "16"}, {"x": 1}, {"10ba": [1]}, {"10ba": True}, 7])
def test_a_recorded_schedule_that_is_none_is_refused_in_one_line(recorded):
    """A checkpoint may be anybody's."""
    with pytest.raises(CheckpointError, match=r"^batch_size_schedule: .* in the checkpoint, expected "):
        refuse_another_past({"batch_size_schedule": recorded}, load(SCHEDULE), 20)


# ------------------------------------------------------------------------------------------ the dry run, and memory


def dry_run_lines(tmp_path, num_train=700, **changes):
    """Return what `--dry-run` prints for a run of 60 batches on two devices."""
    data = write_data(tmp_path / "data", num_train=num_train)
    settings = {"batch_size_schedule": {"10ba": 16, "30ba": 32}, "max_duration": "60ba"}
    values = tiny_config(data, device_train_microbatch_size=2, run_folder=str(tmp_path / "run"), **settings | changes)
    config = load_train_config([write_config(tmp_path / "run.yaml", values)]).config
    layout = layout_of(config, 2, 2)
    return describe_launch(config, layout, preflight.check(config, layout, must_exist=False)).splitlines()


def test_a_dry_run_lists_the_sizes(tmp_path):
    lines = dry_run_lines(tmp_path)
    begin = lines.index("batches        1 to 10: 8 samples, 256 tokens, 2 microbatch(es)")
    assert [line.strip() for line in lines[begin + 1 : begin + 3]] == [
        "11 to 30: 16 samples, 512 tokens, 4 microbatch(es)",
        "31 to 60: 32 samples, 1,024 tokens, 8 microbatch(es)",
    ]
    assert any(line.startswith("model FLOPs") and line.endswith(" per smallest batch") for line in lines)
    assert "duration       60ba = 60 batches, 43.52 k tokens, 1.94 epochs" in lines
    assert not any(line.startswith("batches ") for line in dry_run_lines(tmp_path / "b", batch_size_schedule=None))


def test_a_dry_run_counts_the_batches_of_other_durations(tmp_path):
    """The first 30 batches have 400 samples, so 401 take 31 batches, in any unit."""
    for number, duration in enumerate(("401sp", f"{401 * SEQ_LEN}tok")):
        schedule = {"name": "constant_with_warmup"}
        lines = dry_run_lines(tmp_path / str(number), max_duration=duration, scheduler=schedule)
        assert f"duration       {duration} = 31 batches, 13.82 k tokens, 0.62 epochs" in lines


def test_data_of_less_than_the_largest_batch_that_is_reached_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"31 samples do not make one batch of 32 \(batch_size_schedule\); use more"):
        dry_run_lines(tmp_path / "a", num_train=31)
    assert dry_run_lines(tmp_path / "b", num_train=31, max_duration="30ba")


@pytest.mark.parametrize(
    ("duration", "largest"),
    [
        ("10ba", 8),
        ("11ba", 16),
        ("30ba", 16),
        ("31ba", 32),
        ("400sp", 16),
        ("401sp", 32),
        ("401tok", 8),
        ("1e6tok", 32),
    ],
)
def test_sizes_that_begin_after_the_end_do_not_count(duration, largest):
    """The first 30 batches have 400 samples, of 16 tokens."""
    short = ("max_seq_len=16", "scheduler={name: constant_with_warmup, t_warmup: 0dur}", f"max_duration={duration}")
    assert load(SCHEDULE, *short).largest_batch_size == largest


def test_the_estimate_counts_gradients_that_larger_batches_accumulate():
    """With 8 samples, a batch is one microbatch, and no gradient is there before its backward pass."""
    one = load("device_train_microbatch_size=8")
    several = load("device_train_microbatch_size=8", SCHEDULE)
    layout = layout_of(one, 1, 1)
    estimate_of_one = estimate_training_memory(one, layout)
    more_bytes = estimate_training_memory(several, layout).total_bytes - estimate_of_one.total_bytes
    assert more_bytes > estimate_of_one.parameters_bytes / 2


@needs("llmfoundry_layouts")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_estimate_of_a_pipeline_counts_the_microbatches_of_the_largest_batch(schedule):
    pipeline = ("device_train_microbatch_size=1", f"pp_config={{pipeline_parallel_degree: 2, schedule: {schedule}}}")

    def estimate_bytes(*arguments):
        config = load(*pipeline, *arguments)
        return estimate_training_memory(config, layout_of(config, 2, 2)).total_bytes

    bytes_of_large_batches = estimate_bytes("global_train_batch_size=64")
    assert estimate_bytes("batch_size_schedule={10ba: 64, 100ba: 128}") == bytes_of_large_batches
    assert estimate_bytes("batch_size_schedule={100ba: 64}") == estimate_bytes() < bytes_of_large_batches


def test_a_schedule_without_a_larger_batch_refuses_nothing():
    assert load("batch_size_schedule={10ba: 8}", "max_duration=2ep").parts_of_largest_batch == 1


def test_a_checkpoint_without_a_schedule_asks_to_remove_entries():
    with pytest.raises(CheckpointError, match="remove the entries before 20ba, and add or change them from 20ba on"):
        refuse_another_past({}, load(SCHEDULE), 20)
