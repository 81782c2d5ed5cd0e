"""Several islands train one run, in real processes."""

import signal
import socket
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from llmfoundry_islands.coordination.messages import format_address
from llmfoundry_islands.tests.world import coordination, island, islands, line_to, metrics, metrics_path, together
from llmfoundry_lite.checkpoint.store import open_checkpoint
from tests.helpers.launch import free_port, train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config, write_data

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, data):
    """The same run as one world."""
    folder = tmp_path_factory.mktemp("alone")
    train([write_config(folder / "alone.yaml", tiny_config(data, run_name="alone"))], folder, 2).check()
    return read_metrics(folder / "runs/alone")


def check_is_one_run(records, alone, tolerance=1e-5):
    assert values(records, "data/digest") == values(alone, "data/digest")
    assert values(records, "loss/train/total") == pytest.approx(values(alone, "loss/train/total"), abs=tolerance)
    assert values(records, "time/token") == values(alone, "time/token")


def test_two_islands_train_one_run_and_one_saves(tmp_path, data, alone):
    """Ranks of a have addresses of their own, as on several hosts."""
    with coordination(tmp_path) as running:
        for launch in islands(tmp_path, data, running, a=(2, {"islands": {"address": "127.0.0.1${oc.env:RANK}"}}), b=1):
            launch.check()
            assert "islands: waiting until as many are here" in launch.output
        running.wait_for("the run has ended after batch 10")
        assert "is repeated" not in running.lines
        again = island(tmp_path, data, running, "a", 2, autoresume=True).check()
        assert "islands: waiting" not in again.output, "the run is done: it waits for nobody"
    for name in ("a", "b"):
        check_is_one_run(metrics(tmp_path, name), alone)
    assert [path.name for path in (tmp_path / "saves").glob("ba*")] == ["ba10"]


def kill(batch, rank=0, where="compute", **more):
    return {"python:llmfoundry_islands.tests.faults:Signal": {"batch": batch, "rank": rank, "where": where, **more}}


def test_an_island_dies_with_half_its_gradient_sent_and_comes_back(tmp_path, data, alone):
    """The other repeats the batch with all its rows, goes on, and gives its state to the one that comes back."""
    gate = tmp_path / "b is back"
    hold = {"python:llmfoundry_islands.tests.faults:Hold": {"batch": 6, "until": str(gate)}}
    with coordination(tmp_path) as running:

        def twice():
            first = island(tmp_path, data, running, "b", 1, callbacks=kill(4, where="exchange"))
            assert first.exit_codes == [-9]
            return island(tmp_path, data, running, "b", 1, autoresume=True)

        def open_gate():
            running.wait_for("b is here", times=2)
            gate.touch()

        first, second, _ = islands(tmp_path, data, running, twice, open_gate, a=(2, {"callbacks": hold}))
        assert "batch 4 is repeated: without b" in running.lines
    first.check()
    second.check()
    check_is_one_run(metrics(tmp_path, "a"), alone)
    back = metrics(tmp_path, "b")
    assert [record["batch"] for record in back] == [1, 2, 3, *range(8, 11)] or back[-1]["batch"] == 10
    by_batch = {record["batch"]: record for record in alone}
    for record in back:
        assert record["data/digest"] == by_batch[record["batch"]]["data/digest"]
        assert record["loss/train/total"] == pytest.approx(by_batch[record["batch"]]["loss/train/total"], abs=1e-5)
    manifest = open_checkpoint(str(tmp_path / "saves/ba10")).manifest
    assert manifest.segments[-1].islands["b"]["rows"] > 0


def test_where_shares_never_change_links_that_were_cut_leave_every_digit_as_it_was(tmp_path, data):
    """Two rows: two islands of one rank can divide them in one way only."""
    cut = {"python:llmfoundry_islands.tests.faults:Cut": {"batches": [3, 4, 8]}}
    found = []
    for callbacks in ({}, cut):
        folder = tmp_path / f"{len(found)}"
        folder.mkdir()
        changes = {"global_train_batch_size": 2, "callbacks": callbacks}
        with coordination(folder) as running:
            for launch in islands(folder, data, running, a=(1, changes), b=(1, changes | {"callbacks": {}})):
                launch.check()
        found.append(metrics(folder, "a"))
    assert found[1][-1]["islands/repeats"] >= 3
    for key in ("loss/train/total", "grad_norm", "data/digest", "islands/rows"):
        assert values(found[0], key) == values(found[1], key), key


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_first_island_starts_the_coordinator_which_ends_when_nobody_is_left(tmp_path, data, host):
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    port = free_port()
    where = format_address((host, port))
    changes = {"islands": {"begin_with": 2, "coordinator": where, "address": host}}
    nobody: Any = SimpleNamespace(port=port)
    for launch in islands(tmp_path, data, nobody, a=(2, changes), b=(1, changes)):
        launch.check()
    said = [tmp_path / f"runs/run/{name}/coordinator.txt" for name in ("a", "b")]
    assert sum("epoch 1, batch 1" in path.read_text() for path in said if path.exists()) == 1
    coordinators = [one for one in psutil.process_iter(["cmdline"]) if where in (one.info["cmdline"] or [])]
    assert psutil.wait_procs(coordinators, timeout=60)[1] == []


def test_a_coordinator_that_cannot_start_here_is_said(tmp_path, data):
    elsewhere = {"coordinator": "192.0.2.1:7070", "begin_with": 1}
    nobody: Any = SimpleNamespace(port=0)
    refused = island(tmp_path, data, nobody, "a", 1, islands=elsewhere)
    assert refused.exit_codes == [2]
    assert "islands.begin_with: no coordinator starts at 192.0.2.1:7070" in refused.output


def test_the_lease_moves_when_the_island_that_saves_dies(tmp_path, data, alone):
    with coordination(tmp_path) as running:
        dead, last = islands(
            tmp_path,
            data,
            running,
            a=(2, {"callbacks": kill(4, rank=1), "save_interval": "2ba"}),
            b=(1, {"save_interval": "2ba"}),
        )
    assert -9 in dead.exit_codes
    last.check()
    check_is_one_run(metrics(tmp_path, "b"), alone)
    assert {"ba4", "ba10"} <= {path.name for path in (tmp_path / "saves").glob("ba*")}


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "the coordinator is gone"), (signal.SIGSTOP, "the coordinator is silent")]
)
def test_without_the_coordinator_one_saves_all_leave_and_the_next_launches_carry_on(
    tmp_path, data, alone, number, words
):
    gate = tmp_path / "the coordinator is gone"
    waits = {name: tmp_path / f"{name} waits" for name in "ab"}

    def hold(name):
        options = {"batch": 5, "until": str(gate), "waits": str(waits[name])}
        return {"python:llmfoundry_islands.tests.faults:Hold": options}

    with coordination(tmp_path) as running:

        def end():
            for path in waits.values():
                running.wait_for_file(path)
            running.send(number)
            gate.touch()

        held = {"a": (2, {"callbacks": hold("a")}), "b": (1, {"callbacks": hold("b")})}
        first, second, _ = islands(tmp_path, data, running, end, **held)
    assert {*first.exit_codes, *second.exit_codes} == {75}
    assert f"{words} after batch 4, saved as ba4; run the same command again" in first.output
    with coordination(tmp_path) as running:
        for launch in islands(tmp_path, data, running, a=(1, {"autoresume": True}), b=(2, {"autoresume": True})):
            launch.check()
    check_is_one_run(metrics(tmp_path, "a"), alone)


@pytest.mark.parametrize(("after", "saves"), [(False, {"ba6", "ba10"}), (True, {"ba12", "ba14"})])
def test_an_island_that_saves_and_alone_loses_the_coordinator_does_not_take_the_others_lease(
    tmp_path, data, after, saves
):
    """It computes for so long, or takes so long between a batch and its save, that another has saved by the time it
    hears of its loss."""
    last_batch = 6 if after else 4
    gates = {"a": tmp_path / "b has saved", "b": tmp_path / "a has left"}
    waits = {name: tmp_path / f"{name} waits" for name in "ab"}

    def changes(name, batch, **more):
        hold = {"python:llmfoundry_islands.tests.faults:Hold": {"batch": batch, "until": str(gates[name]), **more}}
        hold["python:llmfoundry_islands.tests.faults:Hold"]["waits"] = str(waits[name])
        return {"callbacks": hold, "save_interval": "6ba", "max_duration": "14ba" if after else "10ba"}

    with coordination(tmp_path, silence=2.0) as running, line_to(running.port) as line:

        def leave():
            own = {"coordinator": f"127.0.0.1:{line.address[1]}"}
            held = changes("a", 6, after=True) if after else changes("a", 5)
            left = island(tmp_path, data, running, "a", 1, islands=own, **held)
            gates["b"].touch()
            return left

        def cut():
            running.wait_for_file(waits["a"])  # it has heard that the batch counts
            for is_dead in line.is_dead.values():
                is_dead.set()
            running.wait_for_batch(metrics_path(tmp_path, "b"), 13 if after else 7)
            assert line.is_left.wait(60), "a has heard of its loss"
            gates["a"].touch()

        held = changes("b", 14 if after else 8)
        last, left, _ = islands(tmp_path, data, running, leave, cut, b=(1, held))
    assert left.exit_codes == [75]
    assert f"the coordinator is silent after batch {last_batch}, another island saves" in left.output
    last.check()
    assert {path.name for path in (tmp_path / "saves").glob("ba*")} == saves


@pytest.mark.parametrize("way", ["send_pieces", "receive_pieces"])
def test_an_island_dies_with_half_the_state_streamed_and_the_others_carry_on(tmp_path, data, alone, way):
    """a saves, and so gives its state to b, which joins; c is there all the time."""
    gate = tmp_path / "b is here"
    die = {"python:llmfoundry_islands.tests.faults:DieInStream": {"way": way}}

    def hold(batch):
        return {"python:llmfoundry_islands.tests.faults:Hold": {"batch": batch, "until": str(gate)}}

    with coordination(tmp_path) as running:

        def join():
            running.wait_for("epoch 1, batch 1")
            return island(tmp_path, data, running, "b", 1, callbacks=die if way == "receive_pieces" else {})

        def open_gate():
            running.wait_for("b is here")
            gate.touch()

        giving = {**hold(4), **(die if way == "send_pieces" else {})}
        there = {"a": (2, {"callbacks": giving}), "c": (1, {"callbacks": hold(4)})}
        a, c, b, _ = islands(tmp_path, data, running, join, open_gate, **there)
    if way == "send_pieces":
        assert -9 in a.exit_codes and b.exit_codes == [75]
        assert "left the run: a could not give its state; run the same command again" in b.output
    else:
        assert b.exit_codes == [-9]
        a.check()
    c.check()
    check_is_one_run(metrics(tmp_path, "c"), alone)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_island_that_waits_for_others_leaves_as_soon_as_it_is_asked_to(tmp_path, data, number):
    gate = tmp_path / "a waits"
    asked = {"python:llmfoundry_islands.tests.faults:SignalWhen": {"until": str(gate), "number": int(number)}}
    with coordination(tmp_path) as running:

        def ask():
            running.wait_for("a is here")
            gate.touch()
            return time.monotonic()

        def wait():
            launch = island(tmp_path, data, running, "a", 2, callbacks=asked, preemption_grace_seconds=120)
            return launch, time.monotonic()

        asked_at, (launch, left_at) = together(ask, wait)
    assert launch.exit_codes == [75, 75], launch.output
    assert "while waiting for other islands; run the same command again" in launch.output
    assert left_at - asked_at < 60


def test_an_island_that_is_asked_to_leave_does_and_the_other_carries_on(tmp_path, data, alone):
    with coordination(tmp_path) as running:
        asked, last = islands(tmp_path, data, running, a=(2, {"callbacks": kill(4, number=int(signal.SIGTERM))}), b=1)
    assert asked.exit_codes == [75, 75]
    assert "the other islands carry on" in asked.output
    last.check()
    check_is_one_run(metrics(tmp_path, "b"), alone)
    assert "is repeated" not in running.lines


def test_an_evaluation_or_a_save_says_nothing_of_an_island_s_pace(tmp_path, data):
    rest = {"python:llmfoundry_islands.tests.faults:Rest": {"batch": 4, "seconds": 6.0}}
    with coordination(tmp_path) as running:
        for launch in islands(tmp_path, data, running, a=1, b=(1, {"callbacks": rest})):
            launch.check()
    assert "is repeated" not in running.lines, running.lines
    assert metrics(tmp_path, "b")[4]["islands/compute_seconds"] < 5
    assert metrics(tmp_path, "a")[4]["islands/exchange_seconds"] > 3


def test_an_island_whose_rows_are_all_padding_takes_part(tmp_path):
    """Twenty samples: the third batch of an epoch has four rows, and all of them are the first island's."""
    data = write_data(tmp_path / "data", num_train=20)
    changes = {"train_loader__drop_last": False, "train_loader__dataset__shuffle": False, "max_duration": "5ba"}
    train([write_config(tmp_path / "alone.yaml", tiny_config(data, run_name="alone", **changes))], tmp_path, 1).check()
    with coordination(tmp_path) as running:
        for launch in islands(tmp_path, data, running, a=(1, changes), b=(1, changes)):
            launch.check()
    assert "is repeated" not in running.lines, running.lines
    check_is_one_run(metrics(tmp_path, "b"), read_metrics(tmp_path / "runs/alone"))


def test_weights_that_have_drifted_are_found_and_replaced(tmp_path, data, alone):
    drift = {"python:llmfoundry_islands.tests.faults:Drift": {"batch": 3}}
    with coordination(tmp_path) as running:
        for launch in islands(
            tmp_path,
            data,
            running,
            a=(2, {"islands": {"check_weights_every": 1}}),
            b=(1, {"islands": {"check_weights_every": 1}, "callbacks": drift}),
        ):
            launch.check()
        assert "batch 4: other weights than a's on b" in running.lines
    for name in ("a", "b"):
        assert values(metrics(tmp_path, name), "islands/drifts") == [0, 0, 0, *[1] * 7]
        check_is_one_run(metrics(tmp_path, name), alone, tolerance=1e-3)


def test_what_an_island_cannot_do_is_refused_before_anything_starts(tmp_path, data):
    with coordination(tmp_path) as running:
        for changes, words in (
            ({"save_folder": None}, "save_folder: missing; islands take turns to save"),
            ({"env": {"LLMFOUNDRY_LITE_ISLANDS_TOKEN": ""}}, "LLMFOUNDRY_LITE_ISLANDS_TOKEN: not set"),
            (
                {"env": {"LLMFOUNDRY_LITE_ISLANDS_TOKEN": "another-secret-16"}},
                "does the other end have the same LLMFOUNDRY_LITE_ISLANDS_TOKEN, and release?",
            ),
        ):
            refused = island(tmp_path, data, running, "a", 1, **changes)
            assert refused.exit_codes == [2]
            assert words in refused.output, refused.output
            assert "Traceback" not in refused.output


def test_where_those_left_cannot_divide_the_batch_one_carries_on_and_the_other_leaves(tmp_path, data):
    """Six rows: islands of 2, 3 and 1 ranks can divide them, those of 2 and 3 cannot."""
    changes = {"global_train_batch_size": 6}
    with coordination(tmp_path, num_islands=3) as running:
        dies = {"callbacks": kill(4), **changes}
        first, second, dead = islands(tmp_path, data, running, a=(2, changes), b=(3, changes), c=(1, dies))
    assert dead.exit_codes == [-9]
    left, carried_on = (first, second) if 75 in first.exit_codes else (second, first)
    carried_on.check()
    assert set(left.exit_codes) == {75}
    assert "6 rows are not a sum of multiples of the islands' data ranks (a 2, b 3)" in left.output
    assert "the other islands carry on; run the same command again" in left.output
    name = "b" if left is first else "a"
    assert values(metrics(tmp_path, name), "batch") == list(range(1, 11))
