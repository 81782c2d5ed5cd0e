"""Each rank's own time: which batches are measured, what is compared with what, and who is named."""

import re
import socket
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from composer.core import Callback, Timestamp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from llmfoundry_lite.config.callbacks_schema import StragglersConfig
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.mpt import Block
from llmfoundry_lite.ranks.status import read_status
from llmfoundry_lite.training import rank_times
from llmfoundry_lite.training.agreement import Agreement
from llmfoundry_lite.training.builders import build_rank_times
from llmfoundry_lite.training.rank_times import RankTimes
from llmfoundry_lite.training.slow_ranks import MAX_RANKS_LISTED, RECOVERED, SLOW_RANK, OwnTime, SlowRanks, metrics_of
from tests.helpers.launch import train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config

EVEN = OwnTime(0.2, 0.01, 0.01)
SLOW = OwnTime(0.4, 0.01, 0.01)
BATCH_SECONDS = 1.0


def ranks(hosts, *, stages=None, threshold=1.4, num_reports=3):
    return SlowRanks(hosts, stages or [0] * len(hosts), threshold=threshold, num_reports=num_reports)


def report(slow_ranks, batch, *own_times, batch_seconds=BATCH_SECONDS):
    return [text for text, _ in slow_ranks.note_reports(batch, slow_ranks.compare(own_times), batch_seconds)]


# -------------------------------------------------------------------------------------------------------- who is slow


def test_a_rank_is_named_once_after_three_slow_reports_in_a_row():
    slow_ranks = ranks(["a", "a", "b", "b"])
    assert report(slow_ranks, 100, EVEN, EVEN, EVEN, SLOW) == []
    assert report(slow_ranks, 200, EVEN, EVEN, EVEN, EVEN) == []
    for batch in (300, 400):
        assert report(slow_ranks, batch, EVEN, EVEN, EVEN, SLOW) == []
    assert report(slow_ranks, 500, EVEN, EVEN, EVEN, SLOW) == [
        "rank 3 on b is slow: 1.9 times the median (0.420 s, median 0.220 s; forward 0.400 s, data 0.010 s, host 0.010 "
        "s) in 3 reports since batch 300; next: check its device and other programs there (llmfoundry-lite doctor); to "
        "leave the node out, run the same command again without it (srun --exclude=b)"
    ]
    assert report(slow_ranks, 600, EVEN, EVEN, EVEN, SLOW) == []


def test_a_slow_rank_has_recovered_after_as_many_sound_reports_in_a_row():
    slow_ranks = ranks(["a", "a", "a"])
    for batch in range(3):
        report(slow_ranks, batch, EVEN, SLOW, EVEN)
    lines = [report(slow_ranks, batch, EVEN, own, EVEN) for batch, own in enumerate((EVEN, EVEN, SLOW, *[EVEN] * 3), 3)]
    assert lines[:5] == [[]] * 5
    assert lines[5] == ["rank 1 on a is no longer slow: 1.0 times the median (0.220 s, median 0.220 s)"]
    assert slow_ranks.facts(8, slow_ranks.compare([EVEN] * 3))["slow_ranks"] == []


@pytest.mark.parametrize(
    ("own", "advice"),
    [
        (OwnTime(0.2, 0.3, 0.01), "check the disk or network from which it reads the data"),
        (OwnTime(0.2, 0.01, 0.3), "check other programs on its CPUs, and callbacks of your own"),
    ],
)
def test_advice_is_about_the_part_that_is_slow_and_one_node_is_not_left_out(own, advice):
    slow_ranks = ranks(["a", "a"], num_reports=1)
    (line,) = report(slow_ranks, 100, EVEN, own)
    assert line.endswith(f"in 1 report since batch 100; next: {advice}")


def test_a_difference_that_a_batch_does_not_feel_is_none():
    slow_ranks = ranks(["a", "a"], num_reports=1)
    assert report(slow_ranks, 100, EVEN, SLOW, batch_seconds=4.1) == []
    assert len(report(slow_ranks, 200, EVEN, SLOW, batch_seconds=3.9)) == 1


def test_ranks_are_compared_within_their_stage_of_a_pipeline():
    slow_ranks = ranks([*"abcde"], stages=[0, 0, 1, 1, 2], num_reports=1)
    reports = slow_ranks.compare([SLOW, SLOW, EVEN, EVEN, SLOW])
    assert {report.ratio for report in reports} == {1.0}
    assert [report.rank for report in reports] == [0, 1, 2, 3]  # nobody has the same work as rank 4
    described = slow_ranks.facts(100, reports)["rank_times"]["ranks"]
    assert [(rank["stage"], rank["median_seconds"]) for rank in described] == [(0, 0.42)] * 2 + [(1, 0.22)] * 2


def test_of_a_thousand_ranks_the_slowest_are_listed():
    slow_ranks = ranks([f"n{rank // 8}" for rank in range(1000)], num_reports=1)
    own_times = [OwnTime(0.2 + 0.001 * rank, 0, 0) for rank in range(1000)]
    reports = slow_ranks.compare(own_times)
    news = slow_ranks.note_reports(100, reports, BATCH_SECONDS)
    lines = [text for text, _ in news]
    assert {event for _, event in news} == {SLOW_RANK}
    assert lines[0].startswith("rank 999 on n124 is slow: 1.7 times")
    assert len(lines) == MAX_RANKS_LISTED + 1
    facts = slow_ranks.facts(100, reports)
    num_slow = len(facts["all_slow_ranks"])
    assert lines[-1] == f"{num_slow - MAX_RANKS_LISTED} more ranks are slow"
    assert facts["all_slow_ranks"] == [*range(1000 - num_slow, 1000)] and num_slow > 100
    assert len(facts["rank_times"]["ranks"]) == len(facts["slow_ranks"]) == MAX_RANKS_LISTED
    assert facts["rank_times"]["ranks"][0] == {
        "rank": 999,
        "host": "n124",
        "stage": 0,
        "own_seconds": 1.199,
        "median_seconds": 0.699,
        "waiting_seconds": 0.0,
        "ratio": 1.715,
    }
    assert metrics_of(reports[0])["ranks/slowest"] == 999

    sound = slow_ranks.compare([EVEN] * 1000)
    news = slow_ranks.note_reports(200, sound, BATCH_SECONDS)
    assert {event for _, event in news} == {RECOVERED}
    assert news[-1].text == f"{num_slow - MAX_RANKS_LISTED} more ranks are no longer slow"


def test_ranks_that_were_named_last_are_described_first():
    """A reader that has seen the earlier ones finds those that it does not know."""
    slow_ranks = ranks(["a"] * 100, num_reports=1)
    report(slow_ranks, 100, *[SLOW] * 20, *[EVEN] * 80)
    report(slow_ranks, 200, *[SLOW] * 20, *[EVEN] * 79, SLOW)
    facts = slow_ranks.facts(200, slow_ranks.compare([SLOW] * 20 + [EVEN] * 79 + [SLOW]))
    assert [rank["rank"] for rank in facts["slow_ranks"]] == [99, *range(MAX_RANKS_LISTED - 1)]
    assert facts["all_slow_ranks"] == [*range(20), 99]


# --------------------------------------------------------------------------------------------------- what is measured


def state_at(num_batches: int) -> Any:
    return SimpleNamespace(timestamp=Timestamp(batch=num_batches))


def build(monkeypatch, blocks=(), interval="2ba", rank=1):
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(rank_times, "all_gather_distinct", lambda host: [("a", [0, 2]), ("b", [1])])
    agreement = cast(Any, SimpleNamespace(arrived_at=0.0, read_seconds=0.25, own_times=[]))
    config = StragglersConfig(interval=Duration.parse(interval))
    times = RankTimes(config, Layout(shard=3), list(blocks), agreement, cast(Any, None))
    times.fit_start(state_at(0), cast(Any, None))
    return times


def play(times, num_batches, forward=lambda: None):
    """Play a batch by Composer's events, and return what the rank passes to the sum at its end."""
    logger = cast(Any, None)
    times.batch_start(state_at(num_batches), logger)
    times.before_forward(state_at(num_batches), logger)
    forward()
    times.after_train_batch(state_at(num_batches), logger)
    times.batch_end(state_at(num_batches + 1), logger)
    times.agreement.arrived_at = time.perf_counter()
    return times.agreement.take_own_times()


def test_a_rank_fills_its_own_places_on_batches_that_are_due(monkeypatch):
    times = build(monkeypatch)
    passed = [play(times, batch) for batch in range(4)]
    assert [len(microseconds) for microseconds in passed] == [0, 9, 0, 9]
    for microseconds in passed[1::2]:
        assert microseconds[:3] == microseconds[6:] == [0, 0, 0]
        forward, data, host = microseconds[3:6]
        assert (forward, data) == (0, 250_000) and host < 1_000_000


def test_the_first_batch_of_a_launch_is_not_measured(monkeypatch):
    times = build(monkeypatch, interval="1ba")
    times.fit_start(state_at(7), cast(Any, None))
    assert play(times, 7) == [] and play(times, 8) != []


def test_rank_0_knows_every_host(monkeypatch):
    slow_ranks = build(monkeypatch, rank=0).slow_ranks
    assert slow_ranks is not None and slow_ranks.hosts == ["a", "b", "a"]
    assert build(monkeypatch).slow_ranks is None


def test_lines_about_ranks_are_events_of_a_console_of_json(monkeypatch):
    said = []
    monkeypatch.setattr(rank_times, "say", lambda text, event, facts: said.append((text[:16], event, facts["level"])))
    times = build(monkeypatch, rank=0)
    times.run_folder = cast(Any, SimpleNamespace(note_ranks=lambda facts, is_news: None))
    logger = cast(Any, SimpleNamespace(log_metrics=lambda metrics: None))
    for own_seconds in [9.0] * 3 + [1.0] * 3:
        times.agreement.own_times = [1_000_000, 0, 0, round(own_seconds * 1_000_000), 0, 0, 1_000_000, 0, 0]
        times.batch_checkpoint(state_at(2), logger)
    assert said == [("rank 1 on b is s", "slow_rank", "warning"), ("rank 1 on b is n", "ranks_recovered", "info")]


def test_hooks_are_on_blocks_only_while_a_batch_is_measured(monkeypatch):
    block = nn.Linear(2, 2)
    times = build(monkeypatch, [block])

    def forward():
        block(torch.ones(1, 2))
        block(torch.ones(1, 2))

    play(times, 0, forward)
    assert not block._forward_hooks and not times._marks
    forward_microseconds = play(times, 1, forward)[3]
    assert len(times._marks) == 4 and forward_microseconds > 0
    assert not block._forward_hooks and not block._forward_pre_hooks


class FakeEvent:
    """A CUDA event of a device that takes 2 ms between any two."""

    count = 0

    def __init__(self, *, enable_timing):
        assert enable_timing

    def record(self):
        FakeEvent.count += 1
        self.number = FakeEvent.count

    def elapsed_time(self, end):
        return 2.0 * (end.number - self.number)


def test_a_device_has_its_own_clock(monkeypatch):
    monkeypatch.setattr(rank_times.devices, "device_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    block = nn.Linear(2, 2)
    times = build(monkeypatch, [block])
    microseconds = play(times, 1, lambda: [block(torch.ones(1, 2)) for _ in range(3)])
    assert microseconds[3] == 3 * 2_000


@pytest.mark.parametrize(
    ("layout", "num_blocks"),
    [
        (Layout(), None),
        (Layout(pipeline=4), None),
        (Layout(shard=2), 2),
        (Layout(replicate=2, pipeline=2), 2),
        (Layout(tensor=2), 0),
        (Layout(context=2), 0),
    ],
)
def test_blocks_are_measured_where_ranks_do_not_wait_in_them(layout, num_blocks):
    config = load_train_config(["mpt-quickstart"], {}).config
    model = nn.ModuleList([Block(config.model), nn.Linear(2, 2), Block(config.model)])
    agreement = Agreement(cast(Any, None), cast(Any, None), lambda: None)
    callbacks = build_rank_times(config, layout, cast(Any, model), agreement, cast(Any, None))
    if num_blocks is None:
        assert callbacks == [] and agreement.take_own_times() == []
    else:
        assert len(cast(Any, callbacks[0]).blocks) == num_blocks


def test_null_compares_nothing_and_a_wrong_interval_is_refused():
    config = load_train_config(["mpt-quickstart", "stragglers=null"], {}).config
    assert build_rank_times(config, Layout(shard=8), *cast(Any, [None] * 3)) == []
    with pytest.raises(ConfigError, match=r"stragglers.interval: '1ep' given, expected a number with a unit, ba"):
        load_train_config(["mpt-quickstart", "stragglers.interval=1ep"], {})
    with pytest.raises(ConfigError, match=r"stragglers.threshold: 1.0 given, expected a number above 1"):
        load_train_config(["mpt-quickstart", "stragglers.threshold=1.0"], {})


class Double(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * 2


@pytest.mark.slow
def test_compiled_blocks_are_measured_and_not_compiled_again(monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    block = Double()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        block.compile(backend=backend)  # in the order of `shard_model`
        fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
        times = build(monkeypatch, [block], interval="3ba")

        def forward():
            block(torch.ones(1, 4)).sum().backward()

        for batch in range(6):
            play(times, batch, forward)
    finally:
        dist.destroy_process_group()
    assert len(times._marks) == 2 and len(graphs) == 1


# ------------------------------------------------------------------------------------------------------ two real ranks


class Delay(Callback):
    """Delays some ranks by 0.2 s in each batch: in the forward pass of a block, or in reading data."""

    def __init__(self, part, ranks):
        self.part = part
        self.ranks = ranks

    def fit_start(self, state, logger):
        if dist.get_rank() not in self.ranks:
            return
        if self.part == "data":
            read_ahead = Agreement._read_ahead
            cast(Any, Agreement)._read_ahead = lambda agreement: (time.sleep(0.2), read_ahead(agreement))[1]
        else:
            block = next(module for module in state.model.modules() if isinstance(module, Block))
            forward = block.forward
            cast(Any, block).forward = lambda *arguments: (time.sleep(0.2), forward(*arguments))[1]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_rank_that_is_slow_is_named_with_its_host_and_no_bit_changes(tmp_path, data):
    # Other tests share the cores, so that even ranks differ by some time slices of 10 ms.
    stragglers = {"interval": "1ba", "threshold": 1.8}
    cases = {
        "off": {"stragglers": None},
        "even": {"callbacks": {f"python:{__name__}:Delay": {"part": "forward", "ranks": [0, 1]}}},
        "forward": {"callbacks": {f"python:{__name__}:Delay": {"part": "forward", "ranks": [1]}}},
        "data": {"callbacks": {f"python:{__name__}:Delay": {"part": "data", "ranks": [1]}}},
    }
    records, outputs = {}, {}
    for name, changes in cases.items():
        options = {"max_duration": "7ba", "digest_interval": "1ba", "stragglers": stragglers, **changes}
        path = write_config(tmp_path / f"{name}.yaml", tiny_config(data, run_name=name, **options))
        outputs[name] = train([path], tmp_path, 2).check().output
        records[name] = read_metrics(tmp_path / "runs" / name)

    host = socket.gethostname()
    for part in ("forward", "data"):
        (named,) = re.findall(r"^rank .+ is slow: .+$", outputs[part], re.MULTILINE)
        assert named.startswith(f"rank 1 on {host} is slow: ")
        status = read_status(tmp_path / "runs" / part)
        assert status is not None
        (slow_rank,) = status["slow_ranks"]
        assert (slow_rank["rank"], slow_rank["host"], slow_rank["text"]) == (1, host, named)
        assert {report["rank"] for report in status["rank_times"]["ranks"]} == {0, 1}
        # All but the first batch of the launch are measured. The last one reads no data.
        assert values(records[part], "ranks/slowest")[:5] == [1] * 5
        assert min(values(records[part], f"ranks/slowest_{part}_seconds")[:5]) >= 0.2
    for name in ("off", "even"):
        assert "is slow" not in outputs[name]

    for name in ("even", "forward", "data"):
        for key in ("loss/train/total", "grad_norm", "data/digest", "state/digest"):
            assert values(records[name], key) == values(records["off"], key)
