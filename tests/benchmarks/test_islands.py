"""the islands benchmark: what it makes of runs, links that are held to a rate, and a whole run of it."""

import asyncio
import json
import random
import time

import pytest

from benchmarks.islands import faults, islands
from benchmarks.islands.links import Links, set_links
from llmfoundry_lite.errors import UserError
from tests.helpers.tiny import write_data

COUNT = 60
CONDITIONS = {"date": "2026-11-23", "machine": "one", "torch": "2.13.0", "load_average": 0.0}
CLUSTER = {"sharding": "NO_SHARD", "instructions": "SSE", "words": "1 rank", "device": "x", "torch": "2.11.0"}


def series(offset=0.0, count=COUNT, other_from=None):
    def digest(batch):
        return f"other{batch}" if other_from and batch >= other_from else str(batch)

    batches = range(1, count + 1)
    losses = [5 + 1 / batch + offset for batch in batches]
    return {"losses": losses, "digests": [digest(b) for b in batches], "learning_rates": [0.1] * count}


def report_of(**changes):
    controls = {"sound": series(1e-6, 40), "weights": series(0.01, 40), "lost": series(0, 40, other_from=21)}
    story = {"killed_after": 20, "back_from": 41, "seconds_to_go_on": 0.5, "seconds_to_come_back": 9.0, "drifts": 1}
    report = CONDITIONS | {
        "num_batches": COUNT,
        "kill_at": 20,
        "seed": 17,
        "clusters": [{"letter": letter, "num_ranks": 1, **CLUSTER} for letter in "ABC"],
        "worlds": {"A": series(), "B": series(2e-6), "C": series(-2e-6)},
        "islands": series(1e-6) | story,
        "controls": {**controls, "stale": series(0.02, 40)},
        "rows": [8] * 20 + [16] * 20 + [8] * 20,
        "differing": 0,
    } | changes  # fmt: skip
    islands.evaluate(report)
    return report


def test_a_sound_run_passes_and_what_is_wrong_is_caught(tmp_path):
    report = report_of()
    assert report["passed"]
    islands.write(report, tmp_path)
    told = (tmp_path / "islands.md").read_text()
    assert "caught by digest, batch 21" in told and "caught by loss, batch 1" in told
    assert "B was killed after batch 20, and trained again from batch 41" in told
    assert (tmp_path / "islands.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "changes",
    [
        {"differing": 1},
        {"islands": report_of()["islands"] | series(0.01)},
        {"islands": report_of()["islands"] | series(other_from=30)},
        {"controls": report_of()["controls"] | {"stale": series(1e-6, 40)}},
        {"controls": report_of()["controls"] | {"sound": series(0.01, 40)}},
    ],
)
def test_it_fails_when_the_run_is_another_or_a_control_is_not_caught(changes):
    assert not report_of(**changes)["passed"]


def test_a_run_without_room_for_the_kill_is_refused(tmp_path):
    with pytest.raises(UserError, match="controls take 40 batches; use more batches"):
        islands.run(data=tmp_path, num_batches=39)


def test_a_link_passes_bytes_on_no_faster_than_its_rate(tmp_path):
    size, megabits = 1 << 18, 10
    path = tmp_path / "links.json"
    set_links(path, bits_per_second=megabits * 1e6)

    async def pass_through():
        arrived = asyncio.get_running_loop().create_future()

        async def attend(reader, writer):
            arrived.set_result(await reader.readexactly(size))
            writer.close()

        server = await asyncio.start_server(attend, "127.0.0.1", 0)
        address = await Links(path).through(*server.sockets[0].getsockname())
        started = time.monotonic()
        _, writer = await asyncio.open_connection(*address)
        writer.write(bytes(range(256)) * (size // 256))
        assert await arrived == bytes(range(256)) * (size // 256)
        writer.close()
        return time.monotonic() - started

    assert asyncio.run(pass_through()) >= 8 * size / (megabits * 1e6)


@pytest.mark.parametrize("state", ["half", "frozen"])
def test_a_link_that_is_dead_passes_nothing_back_until_it_is_open(tmp_path, state):
    path = tmp_path / "links.json"
    set_links(path, state)

    async def pass_through():
        asked = asyncio.get_running_loop().create_future()

        async def attend(reader, writer):
            asked.set_result(await reader.readexactly(5))
            writer.write(b"answer")
            writer.close()

        server = await asyncio.start_server(attend, "127.0.0.1", 0)
        links = Links(path)
        links.begin(links.watch())
        reader, writer = await asyncio.open_connection(*await links.through(*server.sockets[0].getsockname()))
        writer.write(b"asked")
        if state == "half":
            assert await asked == b"asked"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(6), 0.3)
        set_links(path, "open")
        assert await reader.readexactly(6) == b"answer"
        writer.close()

    asyncio.run(pass_through())


def test_faults_are_dealt_of_every_kind_and_by_their_shares():
    assert set(faults.deal(len(faults.SHARES), random.Random(0))) == set(faults.SHARES)
    dealt = faults.deal(50, random.Random(0))
    assert {kind: dealt.count(kind) for kind in faults.SHARES} == faults.SHARES and sum(faults.SHARES.values()) == 50
    assert len(faults.deal(70, random.Random(0))) == 70


def test_what_hangs_is_what_goes_on_or_leaves_late_and_not_what_is_launched_anew():
    assert faults.Fault(faults.KILL, "a", None, 2.5, others_left=True).hung == 2.5
    assert faults.Fault(faults.KILL, "a", None, 40.0, others_left=False).hung == 0
    assert faults.Fault(faults.FREEZE_COORDINATOR, "", 4.5, 40.0, others_left=False).hung == 4.5


def records_of(batches, **changes):
    return [
        {"batch": b, "data/digest": f"d{b}", "loss/train/total": 5.0 - b / 10, "lr": 0.1, **changes} for b in batches
    ]


def test_a_batch_that_is_missing_or_has_other_data_or_another_loss_is_found():
    worlds = [records_of(range(1, 9)) for _ in range(3)]
    sound = {"a": records_of([*range(1, 6), 4, 5]), "b": records_of(range(4, 9))}
    none = {"missing": [], "other_data": [], "other_bits": []}
    assert faults.check(sound, worlds) == {**none, "bands": 0.0, "deviation": 0.0}
    assert faults.check({**sound, "b": records_of(range(7, 9))}, worlds)["missing"] == [6]
    mixed = {**sound, "b": [*records_of(range(4, 8)), *records_of([8], **{"data/digest": "d9"})]}
    assert faults.check(mixed, worlds)["other_data"] == [8]
    other = {**sound, "b": [*records_of(range(4, 8)), *records_of([8], **{"loss/train/total": 4.3})]}
    found = faults.check(other, worlds)
    assert found["bands"] > faults.MAX_BANDS and found["other_bits"] == [8]


def test_faults_are_told_by_kind(tmp_path):
    found = [
        faults.Fault(faults.KILL, "a", None, 2.0, others_left=True),
        faults.Fault(faults.KILL, "b", None, 4.0, others_left=True),
        faults.Fault(faults.FREEZE_COORDINATOR, "", 4.5, 9.0, others_left=False),
    ]
    assert faults.table_of(found).rows == [
        (faults.KILL, "2", "3.00 (2.00 to 4.00)", "", ""),
        (faults.FREEZE_COORDINATOR, "1", "", "4.50", "9.00"),
    ]


@pytest.mark.long
@pytest.mark.multiprocess
def test_the_bench_passes_two_islands_of_which_one_dies_and_catches_every_control(tmp_path):
    data = write_data(tmp_path / "data", num_train=600, seq_len=islands.SEQ_LEN)
    (data / "summary.json").write_text("{}")
    out = tmp_path / "out"
    report = islands.run(data=data, num_batches=160, kill_at=10, out=out)
    assert report["passed"], report["verdicts"]
    assert report["verdicts"]["lost"]["first_other_digest"] == 21
    assert report["verdicts"]["weights"]["first_other_digest"] is None
    again = json.loads((out / "islands.json").read_text())
    islands.evaluate(again)
    assert again["verdicts"] == json.loads(json.dumps(report["verdicts"]))
