"""Lengths of rows that change at given batches: what is refused, what may change in mid-run, and what is printed."""

from types import SimpleNamespace
from typing import Any

import pytest

from llmfoundry_lite import preflight
from llmfoundry_lite.config.changes import refuse_another_past
from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import as_dict
from llmfoundry_lite.dry_run import describe_launch
from llmfoundry_lite.errors import CheckpointError, ConfigError
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.training.model_counts import find_flops_of_batches
from tests.helpers.present import needs
from tests.helpers.tiny import tiny_config, write_config, write_data

RUN = ("mpt-125m", "max_duration=100ba", "global_train_batch_size=8", "device_train_microbatch_size=2")
SCHEDULE = "seq_len_schedule={0ba: 256, 30ba: 1024}"
"""In a run whose samples have 2,048 tokens, as the YAML says."""


def load(*arguments):
    return load_train_config([*RUN, *arguments]).config


def test_a_row_is_a_whole_sample_until_the_first_step():
    lengths = load("seq_len_schedule={10ba: 256, 30ba: 2048}").seq_lens
    assert [lengths.of(batch) for batch in (0, 9, 10, 29, 30, 99)] == [2048, 2048, 256, 256, 2048, 2048]
    assert {load().seq_lens.of(batch) for batch in (0, 99)} == {2048}


def test_a_later_file_changes_one_step_and_removes_another():
    config = load(SCHEDULE, "seq_len_schedule.30ba=null", "seq_len_schedule.40ba=2048")
    assert as_dict(config)["seq_len_schedule"] == {"0ba": 256, "40ba": 2048}
    assert load(SCHEDULE, "seq_len_schedule=null").seq_lens == load().seq_lens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["seq_len_schedule={10ba: 300}"],
            "seq_len_schedule: 300 from 10ba on given, expected 2 tokens or more that divide max_seq_len, 2048, such "
            "as 256 or 512",
        ),
        (
            ["seq_len_schedule={10ba: 4096}"],
            "seq_len_schedule: 4096 from 10ba on given, expected 2 tokens or more that divide max_seq_len, 2048, such "
            "as 2048",
        ),
        (
            ["seq_len_schedule={10ba: 1}"],
            "seq_len_schedule: 1 from 10ba on given, expected 2 tokens or more that divide max_seq_len, 2048, such "
            "as 2",
        ),
        (
            ["seq_len_schedule={10ep: 256}"],
            "seq_len_schedule: {'10ep': 256} given, expected numbers by batches, such as {1000ba: 128, 3000ba: 256}",
        ),
        (
            [SCHEDULE, "train_loader={name: 'python:mine:load'}"],
            "seq_len_schedule: does not go with train_loader.name: its rows may be anything; remove one of them",
        ),
        (
            [SCHEDULE, "train_loader.dataset.max_seq_len=1024"],
            "seq_len_schedule: does not go with train_loader.dataset.max_seq_len: samples have max_seq_len tokens; "
            "remove one of them",
        ),
    ],
)
def test_schedules_that_cannot_be_trained_are_refused(arguments, message):
    with pytest.raises(ConfigError) as error:
        load(*arguments)
    assert str(error.value).removeprefix("command line: ") == message


@needs("llmfoundry_layouts")
@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("cp_config.context_parallel_degree=2", "does not go with cp_config: its devices divide samples of one length"),
        (
            "pp_config.pipeline_parallel_degree=2",
            "does not go with pp_config: its stages exchange tensors of one shape",
        ),
        (
            "tp_config={tensor_parallel_degree: 4, sequence_parallel: true}",
            "2 from 10ba on is not divided by tp_config.tensor_parallel_degree, 4, which divides sequences; give "
            "multiples of it, or set tp_config.sequence_parallel=false",
        ),
    ],
)
def test_layouts_that_need_one_length_are_refused(layout, message):
    with pytest.raises(ConfigError) as error:
        load("seq_len_schedule={10ba: 2}", layout)
    assert message in str(error.value)


@needs("llmfoundry_islands")
def test_islands_are_refused():
    with pytest.raises(ConfigError, match="seq_len_schedule: does not go with islands: several launches divide"):
        load(SCHEDULE, "islands={name: a, coordinator: 'http://127.0.0.1:1'}")


def test_a_length_that_begins_after_the_end_is_noted():
    notes = load_train_config([*RUN, "seq_len_schedule={10ba: 256, 100ba: 512}"]).notes
    assert "seq_len_schedule: 512 from 100ba on has no effect: the run ends at 100ba" in str(notes)
    assert "256 from 10ba" not in str(notes)


@pytest.mark.parametrize(
    ("later", "num_batches"),
    [
        (SCHEDULE, 100),
        ("seq_len_schedule={0ba: 256, 30ba: 512}", 30),
        ("seq_len_schedule={0ba: 256}", 30),
        ("seq_len_schedule=null", 0),
    ],
)
def test_lengths_of_later_batches_may_change(later, num_batches):
    refuse_another_past(as_dict(load(SCHEDULE)), load(later), num_batches)


@pytest.mark.parametrize(
    ("later", "num_batches", "begin"),
    [
        ("seq_len_schedule={0ba: 256, 30ba: 512}", 31, "batch 31 has 512 tokens in a row here and 1024"),
        ("seq_len_schedule=null", 1, "batch 1 has 2048 tokens in a row here and 256"),
        ("seq_len_schedule={0ba: 256, 29ba: 1024}", 40, "batch 30 has 1024 tokens in a row here and 256"),
    ],
)
def test_lengths_of_trained_batches_may_not_change(later, num_batches, begin):
    with pytest.raises(CheckpointError) as error:
        refuse_another_past(as_dict(load(SCHEDULE)), load(later), num_batches)
    assert str(error.value) == (
        f"seq_len_schedule: {begin} in the checkpoint, which has trained {num_batches} batches; only later ones may "
        f'change: begin with the checkpoint\'s {{"0ba": 256, "30ba": 1024}}, and add or change entries from '
        f"{num_batches}ba on"
    )


@pytest.mark.parametrize("recorded", [["x"], {"10ba": "16"}, {"10ba": True}, 7])
def test_a_recorded_schedule_that_is_none_is_refused_in_one_line(recorded):
    """A checkpoint may be anybody's."""
    with pytest.raises(CheckpointError, match=r"^seq_len_schedule: .* in the checkpoint, expected "):
        refuse_another_past({"seq_len_schedule": recorded}, load(SCHEDULE), 20)


# -------------------------------------------------------------------------------------------- the dry run, and FLOPs


def dry_run_lines(tmp_path, **changes):
    """Return what `--dry-run` prints for a run of 60 batches on two devices, with samples of 32 tokens."""
    data = write_data(tmp_path / "data", num_train=700)
    values = tiny_config(
        data, device_train_microbatch_size=2, run_folder=str(tmp_path / "run"), max_duration="60ba", **changes
    )
    config = load_train_config([write_config(tmp_path / "run.yaml", values)]).config
    layout = layout_of(config, 2, 2)
    return describe_launch(config, layout, preflight.check(config, layout, must_exist=False)).splitlines()


def described_batches(lines):
    """Return the lines under the heading "batches"."""
    begin = next(number for number, line in enumerate(lines) if line.startswith("batches "))
    end = next(number for number in range(begin + 1, len(lines)) if not lines[number].startswith(" "))
    return [line.removeprefix("batches").strip() for line in lines[begin:end]]


def test_a_dry_run_lists_lengths_and_sizes(tmp_path):
    lengths = {"0ba": 8, "20ba": 16, "30ba": 32, "40ba": 32, "60ba": 8}
    lines = dry_run_lines(tmp_path, seq_len_schedule=lengths, batch_size_schedule={"10ba": 16, "30ba": 32})
    assert described_batches(lines) == [
        "1 to 10: 8 samples in rows of 8 tokens, 256 tokens, 2 microbatch(es)",
        "11 to 20: 16 samples in rows of 8 tokens, 512 tokens, 4 microbatch(es)",
        "21 to 30: 16 samples in rows of 16 tokens, 512 tokens, 4 microbatch(es)",
        "31 to 60: 32 samples in rows of 32 tokens, 1,024 tokens, 8 microbatch(es)",
    ]


def test_a_dry_run_says_nothing_of_rows_that_are_whole_samples(tmp_path):
    lines = dry_run_lines(tmp_path, seq_len_schedule={"10ba": 32})
    assert not [line for line in lines if line.startswith("batches ") or "in rows of" in line]


def test_flops_of_a_token_grow_with_the_rows(tmp_path):
    """Attention needs FLOPs for each token before; all else does not depend on the length."""
    data = write_data(tmp_path / "data", num_train=8)
    values = tiny_config(data, seq_len_schedule={"0ba": 8, "3ba": 16, "7ba": 32})
    config = load_train_config([write_config(tmp_path / "run.yaml", values)]).config
    flops = find_flops_of_batches(config, MPT(config.model))
    assert flops is not None
    of_8, of_16, of_32 = (flops.of(batch) for batch in (2, 3, 7))
    assert of_32 - of_16 == 2 * (of_16 - of_8) > 0
    whole: Any = SimpleNamespace(model=config.model, seq_lens=config.seq_lens.build(32, None))
    assert find_flops_of_batches(whole, MPT(config.model)).of(0) == of_32  # type: ignore[union-attr]
