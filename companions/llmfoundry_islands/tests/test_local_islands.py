"""Local steps: islands that train alone between outer steps, in real processes."""

import signal
from dataclasses import dataclass

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
from llmfoundry_lite.errors import EXIT_PREEMPTED
from tests.helpers.launch import train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

BATCH_ROWS = 8
NUM_BATCHES = 10
"""Of `tiny_config`. With outer steps every 4 batches its rounds are 1 to 4, 5 to 8, and 9 to 10."""
ALL_ROWS = BATCH_ROWS * NUM_BATCHES
EVERY_4 = {"every": "4ba"}
TWO_FRAGMENTS = {"every": "4ba", "fragments": 2, "delay": "1ba"}
"""One of two fragments leaves after batches 1, 3, 5, … and its outer step is taken after the next batch."""
NEVER = "100ba"
"""An interval of saves that is longer than the run."""
LR = 0.7
MOMENTUM = 0.9
"""Of outer steps, where a run sets no others."""


# ------------------------------------------------------------------------------------------- set-up


def local_settings(sync=EVERY_4, weight=None, **changes):
    """Settings of an island whose weights are compared with the others' at every outer step.

    weight: the island's share of the rows, relative to the others', if it is not measured.
    """
    block = {"sync": sync, "check_weights_every": 1}
    if weight is not None:
        block["weight"] = weight
    return {"islands": block, "save_interval": "4ba", **changes}


def fault(name, **arguments):
    """A callback of faults.py, as in a run's YAML."""
    return {f"python:llmfoundry_islands.tests.faults:{name}": arguments}


def signal_in_batch(batch, number=signal.SIGKILL):
    return fault("Signal", batch=batch, number=int(number))


def hold_in_batch(batch, gate):
    """Begin this batch only when there is a file `gate`."""
    return fault("Hold", batch=batch, until=str(gate))


def train_one_world(folder, data, **changes):
    """Train on one rank without islands. Return the folder of the run."""
    config = tiny_config(data, run_name="alone", **changes)
    train([write_config(folder / "alone.yaml", config)], folder, 1).check()
    return folder / "runs/alone"


def train_islands(folder, data, **layouts):
    """Train islands, `name=(ranks, settings)`, to their end. Return their launches."""
    with coordination(folder) as running:
        launches = islands(folder, data, running, **layouts)
    for launch in launches:
        launch.check()
    return launches


# ------------------------------------------------------------------------------------------- what is left


def batches_of_outer_steps(records):
    return [record["batch"] for record in records if "islands/outer_norm" in record]


def names_of_saves(folder):
    return sorted(path.name for path in (folder / "saves").glob("ba*"))


def digests(records):
    """The data digest of each batch. The digest of several islands' rows is the sum modulo 2^64."""
    return [int(text, 16) for text in values(records, "data/digest")]


# ------------------------------------------------------------------------------------------- outer steps


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_islands_have_the_same_bits_after_each_outer_step(tmp_path, data, dtype):
    settings = local_settings({**EVERY_4, "dtype": dtype})
    for launch in train_islands(tmp_path, data, a=(2, settings), b=(1, settings)):
        assert "local steps, every 4: another algorithm than one world's" in launch.output

    for name in ("a", "b"):
        records = metrics(tmp_path, name)
        assert values(records, "islands/drifts") == [0] * NUM_BATCHES
        assert values(records, "islands/local_steps") == [4] * NUM_BATCHES
        assert batches_of_outer_steps(records) == [4, 8, 10]
        samples_after = {record["batch"]: record["time/sample"] for record in records}
        assert samples_after[4] == 4 * BATCH_ROWS
        assert samples_after[8] == 8 * BATCH_ROWS
        assert samples_after[10] == ALL_ROWS
    losses_of_a = values(metrics(tmp_path, "a"), "loss/train/total")
    losses_of_b = values(metrics(tmp_path, "b"), "loss/train/total")
    assert losses_of_a != losses_of_b, "each logs the loss of its own rows"

    manifest = open_checkpoint(str(tmp_path / "saves/ba10")).manifest
    assert manifest.segments[-1].sync == "local steps, every 4"
    parameter_keys = [key for key in manifest.tensors if key.startswith("model/")]
    assert parameter_keys != []
    for key in parameter_keys:
        parameter = key.removeprefix("model/")
        assert f"optim/{parameter}/outer_momentum" in manifest.tensors


class OuterStepsByHand:
    """Weights after outer steps as DiLoCo's paper defines them, in numpy."""

    def __init__(self, start):
        self.weights = dict(start)
        self.velocity = {key: np.zeros_like(array) for key, array in start.items()}

    def take_step(self, keys, trained, num_rows):
        """Take an outer step of some parameters.

        trained: island -> its weights after local steps. num_rows: island -> the rows that it has trained since these
        parameters' last outer step. They weigh the mean, because all rows have equally many tokens.
        """
        all_rows = sum(num_rows.values())
        for key in keys:
            change = np.zeros_like(self.weights[key])
            for name, rows in num_rows.items():
                change += rows / all_rows * (self.weights[key] - trained[name][key])
            self.velocity[key] = MOMENTUM * self.velocity[key] + change
            self.weights[key] = self.weights[key] - LR * (change + MOMENTUM * self.velocity[key])


def dump_weights(folder, name):
    """A callback with which the island writes what `read_dumped` reads."""
    return fault("Dump", folder=str(folder / name))


def read_dumped(folder, name, when, batch):
    """An island's weights "before" or "after" the outer step at a batch's end, if there is one."""
    tensors = torch.load(folder / name / f"{when}-{batch}.pt")
    return {key: tensor.numpy() for key, tensor in tensors.items()}


def assert_close(arrays, expected):
    assert arrays.keys() == expected.keys()
    for key, array in expected.items():
        largest_error = abs(arrays[key] - array).max()
        assert largest_error < 1e-6, key


def test_outer_steps_are_those_of_the_paper(tmp_path, data):
    """Three rounds of two islands with unequal rows."""
    a = local_settings(weight=3.0, callbacks=dump_weights(tmp_path, "a"))
    b = local_settings(callbacks=dump_weights(tmp_path, "b"))
    train_islands(tmp_path, data, a=(1, a), b=(1, b))
    rows = {name: values(metrics(tmp_path, name), "islands/rows") for name in ("a", "b")}
    assert rows["a"][0] == 6
    assert rows["b"][0] == 2

    by_hand = OuterStepsByHand(read_dumped(tmp_path, "a", "after", 0))
    for batches_before, last_batch in ((0, 4), (4, 8), (8, 10)):
        trained = {name: read_dumped(tmp_path, name, "before", last_batch) for name in ("a", "b")}
        rows_of_round = {name: sum(counts[batches_before:last_batch]) for name, counts in rows.items()}
        by_hand.take_step(list(by_hand.weights), trained, rows_of_round)
        for name in ("a", "b"):
            assert_close(read_dumped(tmp_path, name, "after", last_batch), by_hand.weights)


@dataclass
class FragmentsExchange:
    """An outer step of some fragments."""

    sent_after: int
    """The batch after which the islands' weights leave."""
    batch: int
    """The batch after which the outer step is taken."""
    fragments: tuple[int, ...]

    @property
    def is_delayed(self):
        """Islands have trained while the weights travelled."""
        return self.sent_after < self.batch


BOTH_FRAGMENTS = (0, 1)
FRAGMENTS_EXCHANGES = [
    FragmentsExchange(sent_after=1, batch=2, fragments=(0,)),
    FragmentsExchange(sent_after=3, batch=4, fragments=(1,)),
    FragmentsExchange(sent_after=5, batch=6, fragments=(0,)),
    # The save that is due after batch 5 is asked for with the report of batch 6, and made after batch 8.
    FragmentsExchange(sent_after=8, batch=8, fragments=BOTH_FRAGMENTS),
    FragmentsExchange(sent_after=9, batch=10, fragments=(0,)),
    FragmentsExchange(sent_after=11, batch=12, fragments=(1,)),
    # The last batch of the run.
    FragmentsExchange(sent_after=14, batch=14, fragments=BOTH_FRAGMENTS),
]
ALPHA = 0.25
"""Share of an island's own weights that it keeps where it has trained while they travelled."""


def test_fragments_travel_while_islands_compute_and_are_mixed_in_as_numpy_does(tmp_path, data):
    """Beside Streaming DiLoCo's formulas. Fragments leave after one batch, and arrive after the next."""

    def settings_of(name):
        callbacks = dump_weights(tmp_path, name)
        sync = {**TWO_FRAGMENTS, "alpha": ALPHA}
        return local_settings(sync, save_interval="5ba", max_duration="14ba", callbacks=callbacks)

    launches = train_islands(tmp_path, data, a=(1, settings_of("a")), b=(1, settings_of("b")))
    for launch in launches:
        assert "local steps, every 4, 2 fragments, delay 1: another algorithm" in launch.output
    records_of_a = metrics(tmp_path, "a")
    assert values(records_of_a, "islands/drifts") == [0] * 14
    assert batches_of_outer_steps(records_of_a) == [exchange.batch for exchange in FRAGMENTS_EXCHANGES]

    by_hand = OuterStepsByHand(read_dumped(tmp_path, "a", "after", 0))
    sizes = {key.removeprefix("model."): array.size for key, array in by_hand.weights.items()}
    fragments = divide_into_fragments(sizes, 2)
    rows = {name: values(metrics(tmp_path, name), "islands/rows") for name in ("a", "b")}
    last_sent = [0, 0]  # for each fragment, the batch after which it left last

    for exchange in FRAGMENTS_EXCHANGES:
        sent = {name: read_dumped(tmp_path, name, "before", exchange.sent_after) for name in ("a", "b")}
        exchanged_keys = []
        for fragment in exchange.fragments:
            keys = [f"model.{parameter}" for parameter in fragments[fragment]]
            batches = slice(last_sent[fragment], exchange.sent_after)
            rows_since = {name: sum(counts[batches]) for name, counts in rows.items()}
            by_hand.take_step(keys, sent, rows_since)
            last_sent[fragment] = exchange.sent_after
            exchanged_keys += keys

        # Of the fragments that were exchanged an island keeps a share of its own weights, and of the others all.
        kept_share = ALPHA if exchange.is_delayed else 0.0
        for name in ("a", "b"):
            own_weights = read_dumped(tmp_path, name, "before", exchange.batch)
            expected = dict(own_weights)
            for key in exchanged_keys:
                expected[key] = kept_share * own_weights[key] + (1 - kept_share) * by_hand.weights[key]
            assert_close(read_dumped(tmp_path, name, "after", exchange.batch), expected)

    # A save has the weights that both islands have after the exchange.
    assert names_of_saves(tmp_path) == ["ba14", "ba8"]
    saved = load_full_tensors(str(tmp_path / "saves/ba8"))
    weights_of_b = read_dumped(tmp_path, "b", "after", 8)
    for key, tensor in saved.items():
        assert np.array_equal(tensor.numpy(), weights_of_b[f"model.{key}"]), key


# ------------------------------------------------------------------------------------------- saves and stops


def test_saves_by_the_clock_are_each_made_after_an_exchange_of_all_weights(tmp_path, data):
    """Some exchanges are of one of two fragments; those of both send twice as many bytes."""
    settings = local_settings(
        TWO_FRAGMENTS, save_interval="1s", max_duration="40ba", callbacks=fault("Slow", seconds=0.1)
    )
    train_islands(tmp_path, data, a=(1, settings), b=(1, settings))
    exchanges = [record for record in metrics(tmp_path, "a") if "islands/outer_norm" in record]
    bytes_of_one_fragment = min(values(exchanges, "islands/bytes"))
    of_all_weights = [record for record in exchanges if record["islands/bytes"] > 1.9 * bytes_of_one_fragment]

    assert names_of_saves(tmp_path) == sorted(f"ba{record['batch']}" for record in of_all_weights)
    assert len(of_all_weights) >= 2
    assert len(of_all_weights) < len(exchanges) / 2


@pytest.mark.parametrize("sync", [TWO_FRAGMENTS, EVERY_4])
def test_a_launch_that_stops_does_so_after_an_outer_step_of_all_weights(tmp_path, data, sync):
    settings = local_settings(sync, stop_after="6ba", save_interval=NEVER, max_duration="24ba")
    with coordination(tmp_path) as running:
        launches = islands(tmp_path, data, running, a=(1, settings), b=(1, settings))
    for launch in launches:
        assert "lost" not in launch.output
    assert metrics(tmp_path, "a")[-1]["time/sample"] == 8 * BATCH_ROWS
    assert names_of_saves(tmp_path) == ["ba8"]


def test_a_link_that_is_dead_while_the_last_fragment_travels_is_found(tmp_path, data):
    settings = local_settings({**EVERY_4, "delay": "2ba"}, max_duration="11ba", save_interval=NEVER)
    with_dead_link = {**settings, "callbacks": fault("FreezeLink", batch=10)}
    with coordination(tmp_path, silence=2.0) as running:
        launches = islands(tmp_path, data, running, a=(1, settings), b=(1, with_dead_link))
        assert "a link is dead" in running.lines
    for launch in launches:
        launch.check()
    assert values(metrics(tmp_path, "a"), "islands/drifts")[-1] == 0


# ------------------------------------------------------------------------------------------- beside one world


def test_rows_are_divided_as_among_exact_islands(tmp_path, data):
    """The sum of both islands' digests is that of one world's batch."""
    world_run = train_one_world(tmp_path, data)
    train_islands(tmp_path, data, a=(1, local_settings()), b=(2, local_settings()))

    digests_of_a = digests(metrics(tmp_path, "a"))
    digests_of_b = digests(metrics(tmp_path, "b"))
    sums = [(a + b) % (1 << 64) for a, b in zip(digests_of_a, digests_of_b, strict=True)]
    assert sums == digests(read_metrics(world_run))


def test_a_plain_outer_step_after_each_sgd_step_is_the_run_of_one_world(tmp_path, data):
    """With the rate 1 and no momentum, an outer step gives the islands the mean of their weights."""
    sgd = {"optimizer": {"name": "python:torch.optim:SGD", "lr": 0.05, "kwargs": {}}, "algorithms": {}}
    world_run = train_one_world(tmp_path, data, **sgd)
    settings = local_settings({"every": "1ba", "lr": 1.0, "momentum": 0.0}, **sgd)
    train_islands(tmp_path, data, a=(2, settings), b=(1, settings))

    world_weights = load_full_tensors(str(world_run / "checkpoints/ba10"))
    island_weights = load_full_tensors(str(tmp_path / "saves/ba10"))
    for key, tensor in world_weights.items():
        assert (island_weights[key] - tensor).abs().max() < 1e-6, key
    world_losses = values(read_metrics(world_run), "loss/train/total")
    assert values(metrics(tmp_path, "a"), "islands/loss") == pytest.approx(world_losses, abs=1e-5)


# ------------------------------------------------------------------------------------------- islands that die


def test_an_island_that_dies_in_a_round_loses_its_rows_by_name_and_comes_back_at_an_outer_step(tmp_path, data):
    """b is killed in batch 3. a holds its batch 4, the last of the round, until b is back."""
    gate = tmp_path / "b is back"
    with coordination(tmp_path) as running:

        def launch_b_twice():
            first = island(tmp_path, data, running, "b", 1, **local_settings(callbacks=signal_in_batch(3)))
            assert first.exit_codes == [-signal.SIGKILL]
            return island(tmp_path, data, running, "b", 1, **local_settings(autoresume=True))

        def open_gate():
            running.wait_for("b is here", times=2)
            gate.touch()

        held = local_settings(callbacks=hold_in_batch(4, gate))
        a, b, _ = islands(tmp_path, data, running, launch_b_twice, open_gate, a=(2, held))
    a.check()
    b.check()

    records_of_a = metrics(tmp_path, "a")
    rows_of_a = records_of_a[0]["islands/rows"]
    num_lost = 4 * (BATCH_ROWS - rows_of_a)
    assert f"islands: rows of b in batches 1 to 4 are lost: {num_lost} samples" in a.output
    assert values(records_of_a, "islands/rows")[:4] == [rows_of_a] * 4, (
        "until the round ends rows are divided as before"
    )
    assert values(records_of_a[3:], "islands/lost_samples") == [num_lost] * 7
    assert records_of_a[-1]["time/sample"] == ALL_ROWS - num_lost

    records_of_b = metrics(tmp_path, "b")
    assert [record["batch"] for record in records_of_b][-6:] == [5, 6, 7, 8, 9, 10]
    assert records_of_b[-1]["time/sample"] == records_of_a[-1]["time/sample"]
    for records in (records_of_a, records_of_b):
        assert values(records, "islands/drifts")[-1] == 0


def test_rows_of_an_island_that_dies_are_trained_again_by_the_others(tmp_path, data):
    """b's rows of batches 1 to 4 are trained in batches 5 to 8, so that every row of the run is trained once."""
    world_run = train_one_world(tmp_path, data)
    gate = tmp_path / "b is gone"
    retrain = {**EVERY_4, "lost_rows": "retrain"}
    with coordination(tmp_path, num_islands=3) as running:

        def open_gate():
            running.wait_for("rank 0 of b is gone")
            gate.touch()

        held = local_settings(retrain, callbacks=hold_in_batch(4, gate))
        killed = local_settings(retrain, callbacks=signal_in_batch(3))
        a, _, c, _ = islands(tmp_path, data, running, open_gate, a=(1, held), b=(1, killed), c=(2, held))
    a.check()
    c.check()

    records_of_a = metrics(tmp_path, "a")
    records_of_c = metrics(tmp_path, "c")
    rows_of_a = values(records_of_a, "islands/rows")
    rows_of_c = values(records_of_c, "islands/rows")
    rows_of_b = BATCH_ROWS - rows_of_a[0] - rows_of_c[0]
    rows_of_others = [a_rows + c_rows for a_rows, c_rows in zip(rows_of_a, rows_of_c, strict=True)]
    assert rows_of_others[:4] == [BATCH_ROWS - rows_of_b] * 4
    assert rows_of_others[4:8] == [BATCH_ROWS + rows_of_b] * 4
    assert rows_of_others[8:] == [BATCH_ROWS] * 2

    assert f"islands: rows of b in batches 1 to 4 are lost: {4 * rows_of_b} samples" in a.output
    assert f"islands: batches 5 to 8 trained lost rows again: {4 * rows_of_b} samples" in c.output
    assert records_of_a[-1]["islands/samples_again"] == 4 * rows_of_b
    assert records_of_a[-1]["time/sample"] == ALL_ROWS
    assert records_of_c[-1]["time/sample"] == ALL_ROWS

    trained = sum(digests(records_of_a)) + sum(digests(records_of_c))
    of_world = sum(digests(read_metrics(world_run)))
    assert trained % (1 << 64) == of_world % (1 << 64)


@pytest.mark.parametrize(
    ("a", "b", "common", "sync"),
    [
        (STAGES, SHARDS, MUON, TWO_FRAGMENTS),
        (LAYERS, ONE, {"model__no_bias": False}, {"every": "2ba", "dtype": "int8"}),
        (SAMPLES, STAGES, {"model__tie_word_embeddings": True}, {**EVERY_4, "dtype": "bf16", "delay": "2ba"}),
    ],
)
def test_unlike_layouts_take_the_same_outer_steps_though_one_dies(tmp_path, data, a, b, common, sync):
    """b comes back with the momentum that a has, and at the weights of the last outer steps."""
    gate = tmp_path / "b is back"
    settings = local_settings(sync, max_duration="8ba", **common)
    ranks_of_a, layout_of_a = a
    ranks_of_b, layout_of_b = b
    with coordination(tmp_path) as running:

        def launch_a():
            callbacks = hold_in_batch(4, gate)
            return island(tmp_path, data, running, "a", ranks_of_a, **settings, **layout_of_a, callbacks=callbacks)

        def launch_b_twice():
            callbacks = signal_in_batch(3)
            first = island(tmp_path, data, running, "b", ranks_of_b, **settings, **layout_of_b, callbacks=callbacks)
            assert -signal.SIGKILL in first.exit_codes
            return island(tmp_path, data, running, "b", ranks_of_b, **settings, **layout_of_b, autoresume=True)

        def open_gate():
            running.wait_for("b is here", times=2)
            gate.touch()

        end_of_a, end_of_b, _ = together(launch_a, launch_b_twice, open_gate)
    end_of_a.check()
    end_of_b.check()
    for name in ("a", "b"):
        records = metrics(tmp_path, name)
        assert [record["batch"] for record in records][-4:] == [5, 6, 7, 8]
        assert values(records, "islands/drifts")[-1] == 0


def test_islands_that_are_asked_to_leave_do_so_at_once_and_the_last_saves(tmp_path, data):
    settings = local_settings(save_interval=NEVER, callbacks=signal_in_batch(6, signal.SIGTERM))
    with coordination(tmp_path) as running:
        a, b = islands(tmp_path, data, running, a=(2, settings), b=(1, settings))
    assert a.exit_codes == [EXIT_PREEMPTED] * 2, a.output
    assert b.exit_codes == [EXIT_PREEMPTED], b.output

    # Either may be the first.
    first, last = (a, b) if "this island leaves" in a.output else (b, a)
    assert "this island leaves" in first.output
    assert "the other islands carry on" in first.output
    assert "are lost" in last.output
    assert "saved as ba" in last.output


# ------------------------------------------------------------------------------------------- other algorithms


def test_a_run_goes_from_local_steps_to_one_world_to_exact_islands_and_back(tmp_path, data):
    local = {"islands": {"sync": EVERY_4}}
    exact = {}  # without `sync`, islands exchange the gradients of every batch

    def train_islands_until(batch, settings):
        settings = {"autoresume": True, "max_duration": f"{batch}ba", "save_interval": NEVER, **settings}
        launches = train_islands(tmp_path, data, a=(1, settings), b=(2, settings))
        return "\n".join(launch.output for launch in launches)

    train_islands_until(6, local)

    save_folder = str(tmp_path / "saves")
    config = tiny_config(data, run_name="run", autoresume=True, max_duration="7ba", save_folder=save_folder)
    one_world = train([write_config(tmp_path / "alone.yaml", config)], tmp_path, 1).check()
    assert "the momentum of outer steps is dropped" in one_world.output
    assert "sync local steps, every 4 -> none" in one_world.output

    assert "carrying on" in train_islands_until(9, exact)

    output = train_islands_until(13, local)
    assert "carrying on" in output
    assert "sync none -> local steps, every 4" in output

    assert "carrying on" in train_islands_until(16, local)

    segments = open_checkpoint(str(tmp_path / "saves/ba16")).manifest.segments
    assert [(segment.span, segment.sync) for segment in segments] == [
        ("1-6", "local steps, every 4"),
        ("7-7", None),
        ("8-9", None),
        ("10-13", "local steps, every 4"),
        ("14-16", "local steps, every 4"),
    ]


# ------------------------------------------------------------------------------------------- no coordinator


def test_without_the_coordinator_after_a_fragment_s_step_one_island_saves(tmp_path, data):
    with coordination(tmp_path) as running:
        end_coordinator = fault("EndCoordinator", pid=running.process.pid, batch=6)
        settings = local_settings(TWO_FRAGMENTS, save_interval=NEVER, callbacks=end_coordinator)
        a, b = islands(tmp_path, data, running, a=(1, settings), b=(1, settings))
    assert a.exit_codes == [EXIT_PREEMPTED]
    assert b.exit_codes == [EXIT_PREEMPTED]
    assert names_of_saves(tmp_path) == ["ba6"]


def test_without_the_coordinator_the_last_round_ends_early_and_one_saves(tmp_path, data):
    """It is killed after batch 2; both islands hold batch 3 until then."""
    gate = tmp_path / "the coordinator is gone"
    with coordination(tmp_path) as running:

        def end_coordinator():
            for name in ("a", "b"):  # else the view may not have left
                running.wait_for_batch(metrics_path(tmp_path, name), 2)
            running.send(signal.SIGKILL)
            gate.touch()

        held = local_settings(callbacks=hold_in_batch(3, gate), save_interval=NEVER)
        a, b, _ = islands(tmp_path, data, running, end_coordinator, a=(2, held), b=(1, held))
    assert a.exit_codes == [EXIT_PREEMPTED] * 2
    assert b.exit_codes == [EXIT_PREEMPTED]
    (save,) = names_of_saves(tmp_path)
    assert f"saved as {save}" in a.output
    assert "islands: rows of b in batches 1 to" in a.output
    assert "are lost" in a.output


# ------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exact_sums": True}, "exact_sums: does not go with islands.sync: local steps are not the run of one world"),
        ({"max_duration": "1000sp"}, "max_duration: 1000sp does not go with islands.sync"),
        ({"sync": {"every": "5tok"}}, "islands.sync.every: '5tok' given, expected a number with a unit, ba"),
        ({"sync": {"every": "5ba", "momentum": 1.0}}, "islands.sync.momentum: 1.0 given"),
        ({"sync": {"every": "5ba", "fragments": 2}}, "islands.sync.fragments: 2 given, expected a divisor"),
        ({"sync": {**TWO_FRAGMENTS, "delay": "2ba"}}, "islands.sync.delay: 2ba given, expected"),
        ({"sync": {"every": "64ba", "fragments": 64}}, "islands.sync.fragments: 64 given, the model has"),
    ],
)
def test_what_local_steps_cannot_do_is_refused_before_anything_starts(tmp_path, data, changes, message):
    with coordination(tmp_path) as running:
        refused = island(tmp_path, data, running, "a", 1, **local_settings(**changes))
    assert refused.exit_codes == [2]
    assert message in " ".join(refused.output.split())
