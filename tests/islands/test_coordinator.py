"""The protocol as a state machine: no sockets, no clock, no tensors."""

import random

import pytest

from llmfoundry_lite.islands.coordinator import BATCHES_BETWEEN_MOVES, Coordinator
from llmfoundry_lite.islands.messages import BadMessageError

ROWS = 8


class Play:
    """A coordinator, and what its messages would make islands do."""

    def __init__(self, num_founders=2, rows=ROWS):
        self.coordinator = Coordinator(num_founders, silence_seconds=4.0)
        self.rows = rows
        self.now = 0.0
        self.numbers = {}
        self.heard = {}

    def come(self, name, size=1, *, batch=0, weight=1.0, launch="1", fingerprints=None, rows=None, ranks=None):
        for rank in range(size) if ranks is None else ranks:
            number = len(self.numbers)
            self.numbers[number] = (name, launch, rank)
            hello = {"kind": "hello", "island": name, "launch": launch, "rank": rank, "size": size}
            hello |= {
                "address": ["127.0.0.1", number],
                "boxes": {},
                "fingerprints": fingerprints or {"seed": "17"},
                "machine": {},
            }
            hello |= {"batch": batch, "rows": rows or self.rows, "microbatch": 1, "weight": weight}
            self.coordinator.hello(number, hello, self.now)
        self.listen()

    def number(self, name, rank=0):
        return max(n for n, (other, _, r) in self.numbers.items() if (other, r) == (name, rank))

    def listen(self):
        for number, message in self.coordinator.outbox:
            name, _, rank = self.numbers[number]
            self.heard.setdefault((name, rank), []).append(message)
        self.coordinator.outbox = []

    def last(self, name, rank=0):
        return self.heard[name, rank][-1]

    def prepare(self, name, *, ok=True, weight=100, seconds=1.0, loss=1.0, digest=1, norm=1.0, **changes):
        report = {"kind": "prepared", "epoch": self.coordinator.epoch, "batch": self.coordinator.batch, "ok": ok}
        report |= {"weight": weight, "samples": len(self.coordinator.lanes[name]), "tokens": weight, "losses": weight}
        report |= {
            "digest": digest,
            "loss": loss,
            "norm": norm,
            "bad": 0,
            "seconds": seconds,
            "leaving": False,
            "weights": "",
        }
        self.coordinator.receive(self.number(name), {**report, **changes}, self.now)
        self.listen()

    def batch(self, **seconds):
        for name in list(self.coordinator.members):
            self.prepare(name, seconds=seconds.get(name, 1.0))

    def lose(self, name, rank=0):
        self.coordinator.lose(self.number(name, rank), self.now)
        self.listen()

    def beat(self, name, rank=0, phase="compute", num_bytes=0):
        self.coordinator.receive(
            self.number(name, rank), {"kind": "beat", "phase": phase, "bytes": num_bytes}, self.now
        )

    def wait(self, seconds):
        self.now += seconds
        self.coordinator.tick(self.now)
        self.listen()


def test_another_island_may_be_whole_before_the_first_rank_of_one_has_come():
    play = Play()
    play.come("a", 2, ranks=[1])
    play.come("b")
    play.come("a", 2, ranks=[0])
    assert play.coordinator.members == ["a", "b"]


def check_division(coordinator):
    """Every row once, in order of names."""
    begin = 0
    for name in coordinator.members:
        lanes = coordinator.lanes[name]
        assert lanes.start == begin and len(lanes) > 0 and len(lanes) % coordinator.islands[name].size == 0
        begin = lanes.stop
    assert begin == ROWS


@pytest.fixture
def play():
    """Islands a of 2 ranks and b of 1, at their first batch."""
    play = Play()
    play.come("a", 2, weight=3.0)
    play.come("b")
    return play


def test_it_begins_when_all_ranks_of_as_many_islands_as_announced_are_here():
    play = Play()
    play.come("a", 2, ranks=[0])
    play.come("b")
    assert not play.coordinator.members and not play.heard
    play.come("a", 2, ranks=[1])
    assert play.coordinator.members == ["a", "b"]
    for who in (("a", 0), ("a", 1), ("b", 0)):
        assert [message["kind"] for message in play.heard[who]] == ["member", "member", "view"]
        assert play.heard[who][-1]["lanes"] == {"a": [0, 4], "b": [4, 8]} and play.heard[who][-1]["scribe"] == "a"


def test_rows_are_divided_by_the_weights_that_islands_bring(play):
    assert {name: len(lanes) for name, lanes in play.coordinator.lanes.items()} == {"a": 6, "b": 2}


def test_a_batch_counts_when_all_have_prepared_it(play):
    play.prepare("a", weight=300, loss=2.0, digest=2**64 - 1, norm=0.5)
    assert play.coordinator.batch == 0
    play.prepare("b", weight=100, loss=4.0, digest=3, norm=0.50001)
    commit = play.last("a")
    assert commit["kind"] == "commit" and commit == play.last("b")
    assert commit["loss"] == 2.5 and commit["losses"] == 400 and commit["samples"] == ROWS
    assert commit["digest"] % 2**64 == 2, "the sum of digests wraps around"
    assert commit["norm"] == 0.5, "the scribe's"
    assert play.coordinator.batch == 1 and commit["next"] is None
    assert play.last("a", 1)["kind"] == "view", "other ranks are told by their own"


def test_an_exchange_that_failed_for_one_fails_for_all(play):
    play.prepare("a", ok=False)
    play.prepare("b")
    for who in (("a", 0), ("a", 1), ("b", 0)):
        view = play.heard[who][-1]
        assert view["kind"] == "view" and view["epoch"] == 2 and view["batch"] == 0
    play.batch()
    assert play.last("b")["kind"] == "commit"


def test_what_belongs_to_an_earlier_epoch_is_not_counted(play):
    play.prepare("a", ok=False)
    play.prepare("b")
    play.prepare("a")
    play.prepare("b", epoch=1)
    assert play.coordinator.batch == 0
    play.prepare("b")
    assert play.coordinator.batch == 1


def test_another_batch_of_this_epoch_is_a_malformed_message(play):
    with pytest.raises(BadMessageError, match="prepares batch 5, not 0"):
        play.prepare("a", batch=5)


def test_rows_of_an_island_that_is_gone_are_divided_among_the_others(play):
    play.batch()
    play.prepare("b")
    play.lose("a", 1)
    assert play.coordinator.members == ["b"] and play.coordinator.batch == 1
    view = play.last("b")
    assert view["kind"] == "view" and view["batch"] == 1 and view["lanes"] == {"b": [0, 8]} and view["scribe"] == "b"
    assert play.last("a")["kind"] == "evicted"
    play.prepare("b")
    assert play.coordinator.batch == 2


def test_an_island_comes_in_between_two_batches_and_gets_the_scribe_s_state(play):
    play.batch()
    play.come("c", batch=0)
    assert play.coordinator.members == ["a", "b"]
    play.batch()
    view = play.last("c")
    assert view["kind"] == "view" and view["batch"] == 2 and view["donor"] == "a" and view["joiners"] == ["c"]
    assert play.last("a")["next"] == view
    assert [m["name"] for m in play.heard["c", 0] if m["kind"] == "member"] == ["a", "b", "c"]
    assert [m["name"] for m in play.heard["b", 0] if m["kind"] == "member"] == ["a", "b", "c"]
    check_division(play.coordinator)


def test_the_state_of_the_scribe_reaches_those_that_join(play):
    play.come("c")
    play.batch()
    play.coordinator.receive(play.number("b"), {"kind": "state", "epoch": 2, "state": {"from": "b"}}, 0.0)
    play.coordinator.receive(play.number("a"), {"kind": "state", "epoch": 2, "state": {"from": "a"}}, 0.0)
    play.listen()
    assert [m["state"]["from"] for m in play.heard["c", 0] if m["kind"] == "state"] == ["a"]


def test_weights_that_differ_from_the_scribe_s_are_replaced_by_them(play):
    play.come("c")
    play.batch()
    for name, weights in (("a", "11"), ("b", "22"), ("c", "")):  # c has just come, and has the scribe's
        play.prepare(name, weights=weights)
    commit = play.last("b")
    assert commit["kind"] == "commit" and commit["drifted"] == ["b"], "the batch counts all the same"
    assert commit["next"]["donor"] == "a" and commit["next"]["joiners"] == ["b"]
    assert play.heard["b", 0][-2]["kind"] != "view", "it hears of it once"


def test_founders_that_are_behind_join_the_furthest():
    play = Play()
    play.come("a", batch=3)
    play.come("b", batch=7)
    assert play.coordinator.batch == 7 and play.coordinator.scribe == "b"
    view = play.last("a")
    assert view["donor"] == "b" and view["joiners"] == ["a"]


def test_an_island_that_leaves_has_trained_its_last_batch(play):
    play.prepare("a", leaving=True)
    play.prepare("b")
    view = play.last("b")["next"]
    assert view["lanes"] == {"b": [0, 8]} and view["scribe"] == "b" and play.last("a")["next"] == view
    play.prepare("b")
    assert play.coordinator.members == ["b"], "it does not come back while it leaves"


def test_a_launch_under_a_name_that_is_here_takes_its_place(play):
    play.come("b", launch="2")
    assert play.coordinator.members == ["a"]
    play.batch()
    assert play.coordinator.members == ["a", "b"]


def test_silence_evicts(play):
    for _ in range(5):
        play.wait(1.0)
        play.beat("a", 0)
        play.beat("b")
    assert play.coordinator.members == ["b"], "rank 1 of a is frozen"
    assert play.last("a", 1)["reason"] == "rank 1 of a is silent"


def test_a_link_that_is_dead_while_both_ends_live_repeats_the_batch_then_evicts_the_smaller(play):
    def seconds(count):
        for _ in range(4 * count):
            play.wait(0.25)
            for who in (("a", 0), ("a", 1), ("b", 0)):
                if who[0] in play.coordinator.members:
                    play.beat(*who, phase="exchange", num_bytes=7)

    seconds(4)
    assert play.coordinator.epoch == 1
    seconds(1)
    assert play.coordinator.epoch == 2 and play.coordinator.members == ["a", "b"]
    seconds(5)
    assert play.coordinator.members == ["a"] and play.now <= 10


def test_a_link_that_is_cut_again_and_again_costs_the_smaller_island_its_place(play):
    for _ in range(30):
        play.wait(0.25)
        for name in list(play.coordinator.members):
            play.beat(name, 0)
            play.beat(name, play.coordinator.islands[name].size - 1)
            play.prepare(name, ok=name != "b")
    assert play.coordinator.members == ["a"] and play.coordinator.batch > 0


def test_slow_links_are_not_dead(play):
    for second in range(20):
        play.wait(1.0)
        for who in (("a", 0), ("a", 1), ("b", 0)):
            play.beat(*who, phase="exchange", num_bytes=second)
    assert play.coordinator.epoch == 1


def test_rows_move_with_what_is_measured_and_not_at_every_batch(play):
    for _ in range(BATCHES_BETWEEN_MOVES):
        play.batch(a=3.0, b=1.0)
    assert {name: len(lanes) for name, lanes in play.coordinator.lanes.items()} == {"a": 4, "b": 4}
    epoch = play.coordinator.epoch
    for _ in range(3 * BATCHES_BETWEEN_MOVES):
        play.batch(a=2.0, b=2.0)
    assert play.coordinator.epoch == epoch


def test_islands_of_two_runs_are_refused(play):
    play.come("c", fingerprints={"seed": "18"})
    assert play.last("c") == {
        "kind": "refused",
        "reason": "c and a differ in seed; islands train one run",
    }
    play.batch()
    assert play.coordinator.members == ["a", "b"]


def test_a_batch_that_no_multiples_make_up_is_refused():
    play = Play(rows=7)
    play.come("a", 2)
    play.come("b", 4)
    assert play.last("a")["kind"] == play.last("b")["kind"] == "refused"
    assert "7 rows are no sum of multiples of the islands' ranks (a 2, b 4)" in play.last("a")["reason"]


@pytest.mark.parametrize("change", [{"rank": 2}, {"rows": 0}, {"weight": -1.0}, {"size": "2"}, {"boxes": []}])
def test_a_malformed_hello_changes_nothing(play, change):
    hello = {"kind": "hello", "island": "c", "launch": "1", "rank": 0, "size": 1, "address": ["h", 1], "boxes": {}}
    hello |= {"fingerprints": {}, "machine": {}, "batch": 0, "rows": ROWS, "microbatch": 1, "weight": 1.0}
    with pytest.raises(BadMessageError):
        play.coordinator.hello(99, hello | change, 0.0)
    play.batch()
    assert play.coordinator.batch == 1 and play.coordinator.members == ["a", "b"]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_every_batch_counts_once_and_all_rows_are_in_it(seed):
    """Islands come, go, fail, freeze and repeat at random; each counts what it was told to have committed."""
    chance, play = random.Random(seed), Play(num_founders=1)
    play.come("i0", 1)
    told = 0
    for step in range(400):
        coordinator = play.coordinator
        present = list(coordinator.members)
        act = chance.random()
        if act < 0.06 and len(coordinator.islands) < 4:
            play.come(f"i{chance.randrange(6)}", chance.choice([1, 2]), launch=str(step))
        elif act < 0.10 and len(present) > 1:
            play.lose(chance.choice(present))
        elif act < 0.14:
            play.prepare(chance.choice(present), ok=False)
        elif act < 0.9:
            name = chance.choice(present)
            if coordinator.islands[name].prepared is None:
                play.prepare(name, leaving=len(present) > 2 and chance.random() < 0.05)
        else:
            for name, island in coordinator.islands.items():
                for rank in island.connections:
                    play.beat(name, rank)
            play.wait(0.5)
        if coordinator.batch > told:
            assert coordinator.batch == told + 1
            told += 1
            commits = [m for (name, _), heard in play.heard.items() for m in heard[-2:] if m["kind"] == "commit"]
            assert {m["samples"] for m in commits if m["batch"] == told - 1} == {ROWS}
        check_division(coordinator)
        assert coordinator.scribe in coordinator.members
    assert told > 20
