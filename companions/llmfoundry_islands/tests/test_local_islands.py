"""Local steps: islands that train alone between outer steps, in real processes."""

import signal

import numpy as np
import pytest
import torch

from llmfoundry_islands.tests.world import (
    LAYERS,
    MUON,
    ONE,
    SAMPLES,
    SHARDS,
    STAGES,
    coordination,
    island,
    islands,
    metrics,
    metrics_path,
    together,
)
from llmfoundry_islands.training.local_steps import divide_into_fragments
from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors
from llmfoundry_lite.checkpoint.store import open_checkpoint
from tests.helpers.launch import train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SYNC = {"every": "4ba"}


def local(**changes):
    """Settings of an island whose weights are compared at every outer step."""
    sync = {"sync": SYNC, "check_weights_every": 1}
    return {"islands": sync | changes.pop("islands", {}), "save_interval": "4ba", **changes}


def weights(save):
    return load_full_tensors(str(save))


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_islands_have_the_same_bits_after_each_outer_step(tmp_path, data, dtype):
    changes = local(islands={"sync": {**SYNC, "dtype": dtype}})
    with coordination(tmp_path) as running:
        for launch in islands(tmp_path, data, running, a=(2, changes), b=(1, changes)):
            launch.check()
            assert "local steps, every 4: another algorithm than one world's" in launch.output
    for name in ("a", "b"):
        records = metrics(tmp_path, name)
        assert values(records, "islands/drifts") == [0] * 10
        assert values(records, "islands/local_steps") == [4] * 10
        assert [record["batch"] for record in records if "islands/outer_norm" in record] == [4, 8, 10]
        assert values(records, "time/sample")[3:10:4] == [32, 64]
        assert records[-1]["time/sample"] == 80
    assert values(metrics(tmp_path, "a"), "loss/train/total") != values(metrics(tmp_path, "b"), "loss/train/total")
    manifest = open_checkpoint(str(tmp_path / "saves/ba10")).manifest
    assert manifest.segments[-1].sync == "local steps, every 4"
    assert {f"optim/{key[6:]}/outer_momentum" for key in manifest.tensors if key.startswith("model/")} < {
        *manifest.tensors
    }


def test_outer_steps_are_those_of_the_paper(tmp_path, data):
    """Beside numpy: three rounds of two islands with unequal rows."""

    def dump(name):
        return {"callbacks": {"python:llmfoundry_islands.tests.faults:Dump": {"folder": str(tmp_path / name)}}}

    uneven = {"sync": SYNC, "weight": 3.0}
    with coordination(tmp_path) as running:
        for launch in islands(
            tmp_path, data, running, a=(1, local(islands=uneven, **dump("a"))), b=(1, local(**dump("b")))
        ):
            launch.check()
    records = {name: metrics(tmp_path, name) for name in "ab"}
    assert records["a"][0]["islands/rows"] == 6 and records["b"][0]["islands/rows"] == 2

    def read(name, when, batch):
        return {key: w.numpy() for key, w in torch.load(tmp_path / name / f"{when}-{batch}.pt").items()}

    start = read("a", "after", 0)
    velocity = {key: np.zeros_like(w) for key, w in start.items()}
    for first, last in ((1, 4), (5, 8), (9, 10)):
        rows = {
            name: sum(record["islands/rows"] for record in found[first - 1 : last]) for name, found in records.items()
        }
        shares = {name: count / sum(rows.values()) for name, count in rows.items()}  # all rows have equally many tokens
        trained = {name: read(name, "before", last) for name in "ab"}
        for key in start:
            change = sum(share * (start[key] - trained[name][key]) for name, share in shares.items())
            velocity[key] = 0.9 * velocity[key] + change
            start[key] = start[key] - 0.7 * (change + 0.9 * velocity[key])
        for name in "ab":
            found = read(name, "after", last)
            assert max(abs(found[key] - start[key]).max() for key in start) < 1e-6


def test_fragments_travel_while_islands_compute_and_are_mixed_in_as_numpy_does(tmp_path, data):
    """Beside numpy: fragments of a round of two batches leave after the first, and arrive after the second."""

    def dump(name):
        return {"callbacks": {"python:llmfoundry_islands.tests.faults:Dump": {"folder": str(tmp_path / name)}}}

    sync = {"sync": {**SYNC, "fragments": 2, "delay": "1ba", "alpha": 0.25}}
    length = {"save_interval": "5ba", "max_duration": "14ba"}
    with coordination(tmp_path) as running:
        both = {name: (1, local(islands=sync, **length, **dump(name))) for name in "ab"}
        for launch in islands(tmp_path, data, running, **both):
            launch.check()
            assert "local steps, every 4, 2 fragments, delay 1: another algorithm" in launch.output
    assert values(metrics(tmp_path, "a"), "islands/drifts") == [0] * 14
    assert [r["batch"] for r in metrics(tmp_path, "a") if "islands/outer_norm" in r] == [2, 4, 6, 8, 10, 12, 14]

    def read(name, when, batch):
        return {key: w.numpy() for key, w in torch.load(tmp_path / name / f"{when}-{batch}.pt").items()}

    start = read("a", "after", 0)
    velocity = {key: np.zeros_like(w) for key, w in start.items()}
    fragments = divide_into_fragments({key.removeprefix("model."): w.size for key, w in start.items()}, 2)
    rows, left = {name: values(metrics(tmp_path, name), "islands/rows") for name in "ab"}, [0, 0]
    # The save that is due after batch 5 is asked for with the report of batch 6, and made after batch 8.
    for batch, fragment in ((2, 0), (4, 1), (6, 0), (8, None), (10, 0), (12, 1), (14, None)):
        left_at = batch - (fragment is not None)
        trained = {name: read(name, "after" if left_at < batch else "before", left_at) for name in "ab"}
        exchanged = set()
        for i in range(2) if fragment is None else [fragment]:
            weights_of = {name: sum(rows[name][left[i] : left_at]) for name in "ab"}
            left[i] = left_at
            for key in (f"model.{name}" for name in fragments[i]):
                exchanged.add(key)
                change = sum(weights_of[n] / sum(weights_of.values()) * (start[key] - trained[n][key]) for n in "ab")
                velocity[key] = 0.9 * velocity[key] + change
                start[key] = start[key] - 0.7 * (change + 0.9 * velocity[key])
        for name in "ab":
            before, after = read(name, "before", batch), read(name, "after", batch)
            for key in start:
                own = 0.25 * before[key] + 0.75 * start[key] if left_at < batch else start[key]
                assert abs(after[key] - (own if key in exchanged else before[key])).max() < 1e-6, (batch, key)
    saved = weights(tmp_path / "saves/ba8")
    of_b = read("b", "after", 8)
    assert all(np.array_equal(saved[key].numpy(), of_b[f"model.{key}"]) for key in saved)
    assert sorted(path.name for path in (tmp_path / "saves").glob("ba*")) == ["ba14", "ba8"]


STREAMING = {"sync": {**SYNC, "fragments": 2, "delay": "1ba"}}


def names_of_saves(tmp_path):
    return sorted(path.name for path in (tmp_path / "saves").glob("ba*"))


def test_saves_by_the_clock_are_each_made_after_one_exchange_of_all_weights(tmp_path, data):
    slow = {"python:llmfoundry_islands.tests.faults:Slow": {"seconds": 0.1}}
    changes = local(islands=STREAMING, save_interval="1s", max_duration="40ba", callbacks=slow)
    with coordination(tmp_path) as running:
        for launch in islands(tmp_path, data, running, a=(1, changes), b=(1, changes)):
            launch.check()
    sent = {r["batch"]: r["islands/bytes"] for r in metrics(tmp_path, "a") if "islands/outer_norm" in r}
    whole = [batch for batch, count in sent.items() if count > 1.9 * min(sent.values())]
    assert names_of_saves(tmp_path) == sorted(f"ba{batch}" for batch in whole)
    assert 2 <= len(whole) < len(sent) / 2


@pytest.mark.parametrize("sync", [STREAMING, {"sync": SYNC}])
def test_a_launch_that_stops_does_so_after_an_outer_step_of_all_weights(tmp_path, data, sync):
    changes = local(islands=sync, stop_after="6ba", save_interval="100ba", max_duration="24ba")
    with coordination(tmp_path) as running:
        for launch in islands(tmp_path, data, running, a=(1, changes), b=(1, changes)):
            assert "lost" not in launch.output
    assert metrics(tmp_path, "a")[-1]["time/sample"] == 8 * 8
    assert names_of_saves(tmp_path) == ["ba8"]


def test_a_link_that_is_dead_while_the_last_fragment_travels_is_found(tmp_path, data):
    sync = {"sync": {**SYNC, "delay": "2ba"}}
    frozen = {"python:llmfoundry_islands.tests.faults:FreezeLink": {"batch": 10}}
    with coordination(tmp_path, silence=2.0) as running:
        a = local(islands=sync, max_duration="11ba", save_interval="100ba")
        for launch in islands(tmp_path, data, running, a=(1, a), b=(1, {**a, "callbacks": frozen})):
            launch.check()
        assert "a link is dead" in running.lines
    assert values(metrics(tmp_path, "a"), "islands/drifts")[-1] == 0


def test_without_the_coordinator_after_a_fragment_s_step_one_island_saves(tmp_path, data):
    with coordination(tmp_path) as running:
        ends = {"python:llmfoundry_islands.tests.faults:EndCoordinator": {"pid": running.process.pid, "batch": 6}}
        changes = local(islands=STREAMING, save_interval="100ba", callbacks=ends)
        launches = islands(tmp_path, data, running, a=(1, changes), b=(1, changes))
    assert [launch.exit_codes for launch in launches] == [[75], [75]]
    assert names_of_saves(tmp_path) == ["ba6"]


def test_rows_are_divided_as_among_exact_islands(tmp_path, data):
    """The sum of both islands' digests is that of one world's batch."""
    config = tiny_config(data, run_name="alone")
    train([write_config(tmp_path / "alone.yaml", config)], tmp_path, 1).check()
    with coordination(tmp_path) as running:
        for launch in islands(tmp_path, data, running, a=(1, local()), b=(2, local())):
            launch.check()
    digests = [[int(text, 16) for text in values(metrics(tmp_path, name), "data/digest")] for name in "ab"]
    together = [f"{(one + other) % (1 << 64):016x}" for one, other in zip(*digests, strict=True)]
    assert together == values(read_metrics(tmp_path / "runs/alone"), "data/digest")


def test_a_plain_outer_step_after_each_sgd_step_is_the_run_of_one_world(tmp_path, data):
    sgd = {"name": "python:torch.optim:SGD", "lr": 0.05, "kwargs": {}}
    same = {"optimizer": sgd, "algorithms": {}}
    config = tiny_config(data, run_name="alone", **same)
    train([write_config(tmp_path / "alone.yaml", config)], tmp_path, 1).check()
    sync = {"sync": {"every": "1ba", "lr": 1.0, "momentum": 0.0}}
    with coordination(tmp_path) as running:
        changes = local(islands=sync, **same)
        for launch in islands(tmp_path, data, running, a=(2, changes), b=(1, changes)):
            launch.check()
    alone, together = weights(tmp_path / "runs/alone/checkpoints/ba10"), weights(tmp_path / "saves/ba10")
    assert max((alone[key] - together[key]).abs().max() for key in alone) < 1e-6
    losses = values(read_metrics(tmp_path / "runs/alone"), "loss/train/total")
    assert values(metrics(tmp_path, "a"), "islands/loss") == pytest.approx(losses, abs=1e-5)


def kill(batch, number=signal.SIGKILL):
    return {"python:llmfoundry_islands.tests.faults:Signal": {"batch": batch, "number": int(number)}}


def hold(batch, gate):
    return {"python:llmfoundry_islands.tests.faults:Hold": {"batch": batch, "until": str(gate)}}


def test_an_island_that_dies_in_a_round_loses_its_rows_by_name_and_comes_back_at_an_outer_step(tmp_path, data):
    gate = tmp_path / "b is back"
    with coordination(tmp_path) as running:

        def twice():
            assert island(tmp_path, data, running, "b", 1, **local(callbacks=kill(3))).exit_codes == [-9]
            return island(tmp_path, data, running, "b", 1, **local(autoresume=True))

        def open_gate():
            running.wait_for("b is here", times=2)
            gate.touch()

        a, b, _ = islands(tmp_path, data, running, twice, open_gate, a=(2, local(callbacks=hold(4, gate))))
    for launch in (a, b):
        launch.check()
    records = metrics(tmp_path, "a")
    of_b = 8 - records[0]["islands/rows"]
    assert f"islands: rows of b in batches 1 to 4 are lost: {4 * of_b} samples" in a.output
    assert values(records, "islands/rows")[:4] == [8 - of_b] * 4, "until the round ends rows are divided as before"
    assert [record["islands/lost_samples"] for record in records[3:]] == [4 * of_b] * 7
    assert records[-1]["time/sample"] == 80 - 4 * of_b
    back = metrics(tmp_path, "b")
    assert [record["batch"] for record in back][-6:] == [5, 6, 7, 8, 9, 10]
    assert values(back, "islands/drifts")[-1] == values(records, "islands/drifts")[-1] == 0
    assert back[-1]["time/sample"] == records[-1]["time/sample"]


def test_rows_of_an_island_that_dies_are_trained_again_by_the_others(tmp_path, data):
    """Its rows in batches 1 to 4, in batches 5 to 8; every row of the run is trained once."""
    config = tiny_config(data, run_name="alone")
    train([write_config(tmp_path / "alone.yaml", config)], tmp_path, 1).check()
    gate = tmp_path / "b is gone"
    retrain = {"sync": {**SYNC, "lost_rows": "retrain"}}
    with coordination(tmp_path, num_islands=3) as running:

        def end():
            running.wait_for("rank 0 of b is gone")
            gate.touch()

        held = local(islands=retrain, callbacks=hold(4, gate))
        dies = local(islands=retrain, callbacks=kill(3))
        a, _, c, _ = islands(tmp_path, data, running, end, a=(1, held), b=(1, dies), c=(2, held))
    for launch in (a, c):
        launch.check()
    of_b = 8 - sum(metrics(tmp_path, name)[0]["islands/rows"] for name in "ac")
    assert f"islands: rows of b in batches 1 to 4 are lost: {4 * of_b} samples" in a.output
    assert f"islands: batches 5 to 8 trained lost rows again: {4 * of_b} samples" in c.output
    rows = [sum(counts) for counts in zip(*(values(metrics(tmp_path, n), "islands/rows") for n in "ac"), strict=True)]
    assert rows == [8 - of_b] * 4 + [8 + of_b] * 4 + [8] * 2
    assert metrics(tmp_path, "a")[-1]["time/sample"] == metrics(tmp_path, "c")[-1]["time/sample"] == 80
    assert metrics(tmp_path, "a")[-1]["islands/samples_again"] == 4 * of_b
    trained = sum(int(text, 16) for name in "ac" for text in values(metrics(tmp_path, name), "data/digest"))
    expected = sum(int(text, 16) for text in values(read_metrics(tmp_path / "runs/alone"), "data/digest"))
    assert trained % (1 << 64) == expected % (1 << 64)


@pytest.mark.parametrize(
    ("a", "b", "common", "sync"),
    [
        (STAGES, SHARDS, MUON, {"fragments": 2, "delay": "1ba"}),
        (LAYERS, ONE, {"model__no_bias": False}, {"every": "2ba", "dtype": "int8"}),
        (SAMPLES, STAGES, {"model__tie_word_embeddings": True}, {"dtype": "bf16", "delay": "2ba"}),
    ],
)
def test_islands_of_unlike_layouts_take_the_same_outer_steps_though_one_dies(tmp_path, data, a, b, common, sync):
    """b comes back with the momentum that a has, and at the weights of the last outer steps."""
    gate = tmp_path / "b is back"
    sync = {"every": "4ba", **sync}

    def start(running, name, layout, **changes):
        settings = local(islands={"sync": sync}, max_duration="8ba", **common, **layout[1], **changes)
        return island(tmp_path, data, running, name, layout[0], **settings)

    with coordination(tmp_path) as running:

        def twice():
            assert -9 in start(running, "b", b, callbacks=kill(3)).exit_codes
            return start(running, "b", b, autoresume=True)

        def open_gate():
            running.wait_for("b is here", times=2)
            gate.touch()

        both = together(lambda: start(running, "a", a, callbacks=hold(4, gate)), twice, open_gate)
    for launch in both[:2]:
        launch.check()
    for name in "ab":
        assert [record["batch"] for record in metrics(tmp_path, name)][-4:] == [5, 6, 7, 8]
        assert values(metrics(tmp_path, name), "islands/drifts")[-1] == 0


def test_islands_that_are_asked_to_leave_do_so_at_once_and_the_last_one_saves(tmp_path, data):
    with coordination(tmp_path) as running:
        there = {"save_interval": "100ba", "callbacks": kill(6, signal.SIGTERM)}
        launches = islands(tmp_path, data, running, a=(2, local(**there)), b=(1, local(**there)))
        assert [code for launch in launches for code in launch.exit_codes] == [75] * 3, [one.output for one in launches]
        first = next(launch for launch in launches if "this island leaves" in launch.output)
        last = next(launch for launch in launches if launch is not first)
        assert "the other islands carry on" in first.output
        assert "are lost" in last.output and "saved as ba" in last.output


def test_a_run_goes_from_local_steps_to_one_world_to_exact_islands_and_back(tmp_path, data):
    def go_on(until, **changes):
        with coordination(tmp_path) as running:
            settings = {"autoresume": True, "max_duration": f"{until}ba", "save_interval": "100ba", **changes}
            launches = islands(tmp_path, data, running, a=(1, settings), b=(2, settings))
        for launch in launches:
            launch.check()
        return next(launch.output for launch in launches if "carrying on" in launch.output or until == 6)

    config = {"islands": {"sync": SYNC}}
    go_on(6, **config)
    alone = tiny_config(data, run_name="run", autoresume=True, max_duration="7ba", save_folder=str(tmp_path / "saves"))
    one = train([write_config(tmp_path / "alone.yaml", alone)], tmp_path, 1).check()
    assert "the momentum of outer steps is dropped" in one.output
    assert "sync local steps, every 4 -> none" in one.output
    go_on(9)
    output = go_on(13, **config)
    assert "sync none -> local steps, every 4" in output
    go_on(16, **config)
    segments = open_checkpoint(str(tmp_path / "saves/ba16")).manifest.segments
    steps = "local steps, every 4"
    assert [(one.span, one.sync) for one in segments] == [
        ("1-6", steps), ("7-7", None), ("8-9", None), ("10-13", steps), ("14-16", steps)
    ]  # fmt: skip


def test_without_the_coordinator_the_last_round_ends_early_and_one_island_saves(tmp_path, data):
    gate = tmp_path / "the coordinator is gone"
    with coordination(tmp_path) as running:

        def end():
            for name in "ab":  # else the view may not have left
                running.wait_for_batch(metrics_path(tmp_path, name), 2)
            running.send(signal.SIGKILL)
            gate.touch()

        held = local(callbacks=hold(3, gate), save_interval="100ba")
        a, b, _ = islands(tmp_path, data, running, end, a=(2, held), b=(1, held))
    assert {*a.exit_codes, *b.exit_codes} == {75}
    saved = [path.name for path in (tmp_path / "saves").glob("ba*")]
    assert len(saved) == 1 and f"saved as {saved[0]}" in a.output
    assert "islands: rows of b in batches 1 to" in a.output and "are lost" in a.output


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"exact_sums": True}, "exact_sums: does not go with islands.sync: local steps are not the run of one world"),
        ({"max_duration": "1000sp"}, "max_duration: 1000sp does not go with islands.sync"),
        (
            {"islands": {"sync": {"every": "5tok"}}},
            "islands.sync.every: '5tok' given, expected a number with a unit, ba",
        ),
        ({"islands": {"sync": {"every": "5ba", "momentum": 1.0}}}, "islands.sync.momentum: 1.0 given"),
        (
            {"islands": {"sync": {"every": "5ba", "fragments": 2}}},
            "islands.sync.fragments: 2 given, expected a divisor",
        ),
        ({"islands": {"sync": {**SYNC, "fragments": 2, "delay": "2ba"}}}, "islands.sync.delay: 2ba given, expected"),
        ({"islands": {"sync": {"every": "64ba", "fragments": 64}}}, "islands.sync.fragments: 64 given, the model has"),
    ],
)
def test_what_local_steps_cannot_do_is_refused_before_anything_starts(tmp_path, data, changes, words):
    with coordination(tmp_path) as running:
        refused = island(tmp_path, data, running, "a", 1, **local(**changes))
    assert refused.exit_codes == [2]
    assert words in " ".join(refused.output.split())
