"""The protocol as a state machine: no sockets, no clock, no tensors."""

import random
from contextlib import suppress

import pytest

from llmfoundry_islands.coordination.coordinator import BATCHES_BETWEEN_MOVES, Coordinator
from llmfoundry_islands.coordination.messages import BadMessageError
from llmfoundry_islands.tests.world import HELLO, PREPARED, STATE

ROWS = 8


class Play:
    """A coordinator, and what its messages would make islands do."""

    def __init__(self, num_founders=2, rows=ROWS):
        self.coordinator = Coordinator(num_founders, silence_seconds=4.0)
        self.rows = rows
        self.now = 0.0
        self.numbers = {}
        self.received = {}

    def come(self, name, size=1, *, launch="1", ranks=None, **facts):
        for rank in range(size) if ranks is None else ranks:
            number = self.dial(name, launch, rank)
            self.coordinator.hello(number, self.hello(name, rank=rank, size=size, launch=launch, **facts), self.now)
        self.listen()

    def dial(self, name, launch, rank):
        number = len(self.numbers)
        self.numbers[number] = (name, launch, rank)
        self.coordinator.note_connection(number)
        return number

    def hello(self, name, **facts):
        own = {"island": name, "boxes": {}, "rows": self.rows, "data_ranks": facts.get("size", 1)}
        return {"kind": "hello", **HELLO, **own, **facts}

    def number(self, name, rank=0):
        return max(n for n, (other, _, r) in self.numbers.items() if (other, r) == (name, rank))

    def listen(self):
        for number, message in self.coordinator.outbox:
            name, _, rank = self.numbers[number]
            self.received.setdefault((name, rank), []).append(message)
        self.coordinator.outbox = []

    def last(self, name, rank=0):
        return self.received[name, rank][-1]

    def prepare(self, name, *, weight=100, **changes):
        here = self.coordinator
        report = {**PREPARED, "epoch": here.epoch, "batch": here.batch, "samples": len(here.row_indices[name])}
        report |= {"weight": weight, "tokens": weight, "losses": weight, **changes}
        here.receive(self.number(name), report, self.now)
        self.listen()

    def batch(self, **seconds):
        for name in list(self.coordinator.members):
            self.prepare(name, seconds=seconds.get(name, 1.0))

    def lose(self, name, rank=0):
        self.coordinator.lose(self.number(name, rank))
        self.listen()

    def heartbeat(self, name, rank=0, phase="compute", num_bytes=0):
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
        indices = coordinator.row_indices[name]
        assert indices.start == begin and len(indices) > 0 and len(indices) % coordinator.islands[name].size == 0
        begin = indices.stop
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
    assert not play.coordinator.members and not play.received
    play.come("a", 2, ranks=[1])
    assert play.coordinator.members == ["a", "b"]
    for who in (("a", 0), ("a", 1), ("b", 0)):
        assert (
            play.received[who][-1]["row_indices"] == {"a": [0, 4], "b": [4, 8]}
            and play.received[who][-1]["leader"] == "a"
        )
    for speaker in ("a", "b"):
        described = [(message.get("name"), message.get("rank")) for message in play.received[speaker, 0]]
        assert described == [("a", 0), ("a", 1), ("b", 0), (None, None)]
    assert [message["kind"] for message in play.received["a", 1]] == ["view"], "boxes reach it through its speaker"


def test_rows_are_divided_by_the_weights_that_islands_bring(play):
    assert {name: len(indices) for name, indices in play.coordinator.row_indices.items()} == {"a": 6, "b": 2}


def test_a_batch_counts_when_all_have_prepared_it(play):
    play.prepare("a", weight=100, loss=2.0, digest=2**64 - 1, norm=0.5)  # 6 of 8 rows, and a quarter of the tokens
    assert play.coordinator.batch == 0
    play.prepare("b", weight=300, loss=4.0, digest=3, norm=0.50001)
    commit = play.last("a")
    assert commit["kind"] == "commit" and commit == play.last("b")
    assert commit["loss"] == 3.5 and commit["losses"] == 400 and commit["samples"] == ROWS
    assert commit["digest"] % 2**64 == 2, "the sum of digests wraps around"
    assert commit["norm"] == 0.5, "the leader's"
    assert play.coordinator.batch == 1 and commit["next"] is None
    assert play.last("a", 1)["kind"] == "view", "other ranks are told by their own"


def test_an_exchange_that_failed_for_one_fails_for_all_and_a_batch_that_counts_ends_a_row_of_failures(play):
    """An exchange that fails long after begins another row of failures, and evicts nobody."""
    for number in (1, 2):
        play.prepare("a", ok=False)
        play.prepare("b")
        for who in (("a", 0), ("a", 1), ("b", 0)):
            view = play.received[who][-1]
            assert view["kind"] == "view" and view["epoch"] == number + 1 and view["batch"] == number - 1
        play.batch()
        assert play.last("b")["kind"] == "commit" and play.coordinator.members == ["a", "b"]
        play.now += 1000.0


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
    assert (
        view["kind"] == "view" and view["batch"] == 1 and view["row_indices"] == {"b": [0, 8]} and view["leader"] == "b"
    )
    assert play.last("a")["kind"] == "evicted"
    play.prepare("b")
    assert play.coordinator.batch == 2


def test_an_island_comes_in_between_two_batches_and_gets_the_leader_s_state(play):
    play.batch()
    play.come("c", batch=0)
    assert play.coordinator.members == ["a", "b"]
    play.batch()
    view = play.last("c")
    assert view["kind"] == "view" and view["batch"] == 2 and view["source"] == "a" and view["joiners"] == ["c"]
    assert play.last("a")["next"] == view
    assert [m["name"] for m in play.received["c", 0] if m["kind"] == "member"] == ["a", "a", "b", "c"]
    assert [m["name"] for m in play.received["b", 0] if m["kind"] == "member"] == ["a", "a", "b", "c"]
    check_division(play.coordinator)


def test_the_state_of_the_leader_reaches_those_that_join(play):
    play.come("c")
    play.batch()
    play.coordinator.receive(
        play.number("b"), {"kind": "state", "epoch": 2, "state": STATE | {"kinds": {"b": []}}}, 0.0
    )
    play.coordinator.receive(
        play.number("a"), {"kind": "state", "epoch": 2, "state": STATE | {"kinds": {"a": []}}}, 0.0
    )
    play.listen()
    assert [list(m["state"]["kinds"]) for m in play.received["c", 0] if m["kind"] == "state"] == [["a"]]


def test_weights_that_differ_from_the_leader_s_are_replaced_by_them(play):
    play.come("c")
    play.batch()
    for name, weights in (("a", "11"), ("b", "22"), ("c", "")):  # c has just come, and has the leader's
        play.prepare(name, weights=weights)
    commit = play.last("b")
    assert commit["kind"] == "commit" and commit["drifted"] == ["b"], "the batch counts all the same"
    assert commit["next"]["source"] == "a" and commit["next"]["joiners"] == ["b"]
    assert play.received["b", 0][-2]["kind"] != "view", "it hears of it once"


def test_founders_that_are_behind_join_the_furthest():
    play = Play()
    play.come("a", batch=3)
    play.come("b", batch=7)
    assert play.coordinator.batch == 7 and play.coordinator.leader == "b"
    view = play.last("a")
    assert view["source"] == "b" and view["joiners"] == ["a"]


def test_an_island_that_leaves_has_trained_its_last_batch(play):
    play.prepare("a", leaving=True)
    play.prepare("b")
    view = play.last("b")["next"]
    assert view["row_indices"] == {"b": [0, 8]} and view["leader"] == "b" and play.last("a")["next"] == view
    play.prepare("b")
    assert play.coordinator.members == ["b"], "it does not come back while it leaves"


def test_a_member_becomes_the_source_when_the_leader_leaves_as_another_joins(play):
    """The newcomer has no weights yet, though its name comes first."""
    play.come("aa")
    play.prepare("a", leaving=True)
    play.prepare("b")
    view = play.last("aa")
    assert (view["leader"], view["source"], view["joiners"]) == ("b", "b", ["aa"])


def test_a_launch_under_a_name_that_is_here_takes_its_place(play):
    play.come("b", launch="2")
    assert play.coordinator.members == ["a"]
    play.batch()
    assert play.coordinator.members == ["a", "b"]


def test_silence_evicts(play):
    for _ in range(5):
        play.wait(1.0)
        play.heartbeat("a", 0)
        play.heartbeat("b")
    assert play.coordinator.members == ["b"], "rank 1 of a is frozen"
    assert play.last("a", 1)["reason"] == "rank 1 of a is silent"


def test_a_link_that_is_dead_while_both_ends_live_repeats_the_batch_then_evicts_the_smaller(play):
    def seconds(count):
        for _ in range(4 * count):
            play.wait(0.25)
            for who in (("a", 0), ("a", 1), ("b", 0)):
                if who[0] in play.coordinator.members:
                    play.heartbeat(*who, phase="exchange", num_bytes=7)

    seconds(4)
    assert play.coordinator.epoch == 1
    seconds(1)
    assert play.coordinator.epoch == 2 and play.coordinator.members == ["a", "b"]
    seconds(5)
    assert play.coordinator.members == ["a"] and play.now <= 10


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_link_that_is_cut_again_and_again_costs_the_smaller_island_its_place(play, is_alone):
    """An island alone, whose batches fail, leaves too."""
    if is_alone:
        play.lose("b")
    failing = "a" if is_alone else "b"
    for _ in range(40):
        play.wait(0.25)
        for name in list(play.coordinator.members):
            for rank in range(play.coordinator.islands[name].size):
                play.heartbeat(name, rank)
            play.prepare(name, ok=name != failing)
    assert play.coordinator.members == ([] if is_alone else ["a"])
    assert is_alone or play.coordinator.batch > 0


def test_slow_links_are_not_dead(play):
    for second in range(20):
        play.wait(1.0)
        for who in (("a", 0), ("a", 1), ("b", 0)):
            play.heartbeat(*who, phase="exchange", num_bytes=second)
    assert play.coordinator.epoch == 1


def shares(play):
    return {name: len(indices) for name, indices in play.coordinator.row_indices.items()}


def train(play, num_batches, **rates):
    """Train with islands of so many rows per second."""
    for _ in range(num_batches):
        play.batch(**{name: rows / rates[name] for name, rows in shares(play).items()})


def play_of_64_rows():
    play = Play(rows=64)
    play.come("a", 2, weight=3.0)
    play.come("b")
    return play


def test_rows_follow_a_change_of_speed_within_five_batches():
    play = play_of_64_rows()
    train(play, 20, a=3.0, b=1.0)
    assert shares(play) == {"a": 48, "b": 16}
    train(play, 5, a=1.0, b=1.0)
    assert shares(play) == {"a": 32, "b": 32}
    train(play, 5, a=3.0, b=1.0)
    assert shares(play) == {"a": 48, "b": 16}


def test_one_slow_batch_moves_no_rows_and_small_gains_are_waited_for():
    play = play_of_64_rows()
    train(play, 20, a=3.0, b=1.0)
    epoch = play.coordinator.epoch
    for _ in range(3):
        train(play, 1, a=1.0, b=1.0)
        train(play, BATCHES_BETWEEN_MOVES, a=3.0, b=1.0)
    assert play.coordinator.epoch == epoch
    train(play, BATCHES_BETWEEN_MOVES, a=3.2, b=0.9)
    assert play.coordinator.epoch == epoch + 1


def test_three_islands_own_the_sum_by_the_rates_of_their_links_and_two_swap():
    play = Play(num_founders=3)
    for name in "abc":
        play.come(name)
    assert set(play.last("a")["shares"].values()) == {21, 22}
    for _ in range(BATCHES_BETWEEN_MOVES):
        for name, link in (("a", 50), ("b", 50), ("c", 5)):
            play.prepare(name, link=link)
    assert play.coordinator.shares == {"a": 32, "b": 32, "c": 0}
    assert play.last("a")["next"]["shares"] == {"a": 32, "b": 32, "c": 0}
    epoch = play.coordinator.epoch
    for _ in range(3 * BATCHES_BETWEEN_MOVES):
        for name, link in (("a", 55), ("b", 45), ("c", 5)):
            play.prepare(name, link=link)
    assert play.coordinator.epoch == epoch, "not for a small gain"
    play.lose("c")
    assert play.last("a")["shares"] == {}
    play.lose("b")
    for _ in range(3 * BATCHES_BETWEEN_MOVES):
        play.prepare("a", link=0)
    assert play.coordinator.epoch == epoch + 2, "alone, nothing moves"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"fingerprints": {"seed": "18"}}, "c and a differ in seed; islands train one run"),
        ({"boxes": {"w": [[0, 0], [2, 2]]}}, "c and a differ in their parameters; islands train one run"),
    ],
)
def test_islands_of_two_runs_are_refused(play, facts, reason):
    play.come("c", **facts)
    assert play.last("c") == {"kind": "refused", "reason": reason}
    play.batch()
    assert play.coordinator.members == ["a", "b"]


def come_as_stages(play, name, second):
    """Let an island join in two stages of 6 elements: the first has the embedding, the second that and a block."""
    embedding = {"wte": [[0, 0], [3, 2]]}
    for rank, boxes in enumerate((embedding, {**embedding, "0": [[0], [second]]})):
        play.come(name, 2, ranks=[rank], boxes=boxes, data_ranks=1)


def test_stages_hold_unlike_tensors_and_count_as_one_data_rank():
    play = Play()
    play.come("a", boxes={"wte": [[0, 0], [3, 2]], "0": [[0], [4]]})
    come_as_stages(play, "b", second=4)
    assert play.coordinator.members == ["a", "b"]
    assert play.last("b", 1)["row_indices"] == {"a": [0, 4], "b": [4, 8]}


def test_stages_that_lack_a_part_of_a_tensor_are_refused():
    play = Play()
    play.come("a", boxes={"wte": [[0, 0], [3, 2]], "0": [[0], [4]]})
    come_as_stages(play, "b", second=3)
    assert play.last("b")["reason"] == "b and a differ in their parameters; islands train one run"


def test_a_batch_that_no_multiples_make_up_is_refused():
    play = Play(rows=12)
    play.come("a", 4)
    play.come("b", 6)
    assert play.last("a")["kind"] == play.last("b")["kind"] == "refused"
    assert "12 rows are not a sum of multiples of the islands' data ranks (a 4, b 6)" in play.last("a")["reason"]


def test_an_island_whose_ranks_do_not_divide_the_batch_is_refused_alone():
    play = Play(rows=12)
    play.come("a", 5)
    assert "12 rows are not a sum of multiples of the islands' data ranks (a 5)" in play.last("a")["reason"]
    play.come("b", 4)
    play.come("c", 2)
    assert play.coordinator.members == ["b", "c"]


def of_4_6_and_2():
    """Twelve rows: with the island of 2 ranks they can be divided, without it not."""
    play = Play(num_founders=3, rows=12)
    for name, size in (("a", 4), ("b", 6), ("c", 2)):
        play.come(name, size)
    play.batch()
    return play


@pytest.mark.parametrize("how", ["gone", "silent", "leaving"])
def test_where_those_left_cannot_divide_the_batch_the_fastest_that_can_carry_on(how):
    play = of_4_6_and_2()
    if how == "gone":
        play.lose("c")
    elif how == "silent":
        for _ in range(5):
            for name, size in (("a", 4), ("b", 6)):
                for rank in range(size):
                    play.heartbeat(name, rank)
            play.wait(1.0)
    else:
        for name in ("a", "b", "c"):
            play.prepare(name, leaving=name == "c")
    assert play.coordinator.members == ["b"] and play.coordinator.row_indices == {"b": range(12)}
    evicted = [message for message in play.received["a", 3] if message["kind"] == "evicted"]
    assert "12 rows are not a sum of multiples of the islands' data ranks (a 4, b 6)" in evicted[0]["reason"]
    before = play.coordinator.batch
    play.batch()
    assert play.coordinator.batch == before + 1


def test_an_island_that_does_not_fit_waits_and_comes_in_with_another():
    play = of_4_6_and_2()
    play.lose("c")
    play.come("a", 4, launch="2")
    play.batch()
    play.batch()
    told = [message for message in play.received["a", 0] if message["kind"] == "waits"]
    assert len(told) == 1 and "(a 4, b 6)" in told[0]["reason"]
    play.come("c", 2, launch="2")
    play.batch()
    assert play.coordinator.members == ["a", "b", "c"]


def test_an_island_that_waits_when_the_last_member_goes_leaves_for_the_newest_checkpoint(play):
    play.batch()
    play.come("c", 2, batch=0)
    play.lose("a")
    play.lose("b")
    assert play.last("c")["kind"] == play.last("c", 1)["kind"] == "evicted"
    assert play.last("c")["reason"] == "no island is left" and not play.coordinator.islands


def test_an_island_that_waits_and_has_the_newest_state_begins_when_the_last_member_goes():
    play = Play(num_founders=1)
    play.come("a", batch=3)
    play.come("b", batch=3)
    assert play.coordinator.members == ["a"]
    play.lose("a")
    assert play.coordinator.members == ["b"] and play.last("b")["kind"] == "view"
    play.batch()
    assert play.coordinator.batch == 4


def test_a_rank_that_read_its_checkpoint_before_the_last_member_left_leaves_too():
    play = Play(num_founders=1)
    play.come("a")
    play.batch()
    early = play.dial("b", "1", 0)
    play.lose("a")
    play.coordinator.hello(early, play.hello("b", batch=0), play.now)
    play.listen()
    assert play.last("b")["kind"] == "evicted" and not play.coordinator.members
    play.come("b", launch="2")
    assert play.coordinator.members == ["b"], "it has read the newest checkpoint: nothing was saved"


def test_ranks_that_do_not_come_are_not_waited_for():
    play = Play()
    play.come("a", 2, ranks=[0])
    for _ in range(62):
        play.heartbeat("a")
        play.wait(0.5)
    assert play.last("a") == {"kind": "evicted", "reason": "1 of 2 ranks of a do not come"}


def test_an_island_that_is_late_leaves_with_the_last_member_and_once():
    play = Play(num_founders=1)
    play.come("a")
    play.batch()
    play.come("b", 2, ranks=[0])
    for second in range(31):
        if second <= 26:
            play.heartbeat("a")
        play.heartbeat("b")
        play.wait(1.0)
    assert not play.coordinator.islands
    assert [message["kind"] for message in play.received["b", 0]] == ["evicted"]


def test_at_the_end_of_a_run_nothing_is_repeated_and_who_waits_leaves(play):
    lines = []
    play.coordinator.log = lines.append
    play.batch()
    play.come("c")
    for name in ("b", "a"):
        play.coordinator.receive(play.number(name), {"kind": "leave", "finished": True}, play.now)
        play.lose(name)
    assert lines[-4:-1] == ["b has finished", "a has finished", "the run has ended after batch 1"]
    assert play.last("c")["reason"] == "the run has ended after batch 1"
    assert not [line for line in lines if "repeated" in line or line.startswith("epoch")]


def test_a_coordinator_that_was_stopped_itself_evicts_nobody_for_it(play):
    play.wait(0.25)
    play.wait(7.0)
    for who in (("a", 0), ("a", 1), ("b", 0)):
        play.heartbeat(*who)
    play.wait(0.25)
    assert play.coordinator.members == ["a", "b"] and play.coordinator.epoch == 1


def test_the_rows_of_a_batch_are_the_members_whoever_else_is_here():
    play = Play()
    play.come("x", 2, rows=6, ranks=[0])
    play.come("a", 2)
    play.come("b")
    assert {name: len(indices) for name, indices in play.coordinator.row_indices.items()} == {"a": 4, "b": 4}
    play.lose("b")
    assert play.coordinator.row_indices == {"a": range(8)}
    play.come("x", 2, rows=6, ranks=[1])
    assert play.last("x")["kind"] == "refused"


def test_ranks_of_an_island_that_differ_in_rows_are_refused():
    play = Play()
    play.come("a", 2, ranks=[0])
    play.come("a", 2, rows=6, ranks=[1])
    assert play.last("a")["reason"] == "a: its ranks differ in their configuration"


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_an_island_on_another_host_that_listens_on_loopback_is_refused(order):
    """Loopback is the address of an island that names none."""
    play, host_of = Play(), {"a": "10.0.0.1", "b": "10.0.0.2"}
    address_of = {"a": ["10.0.0.1", 7], "b": ["127.0.0.1", 8]}
    for name in order:
        play.come(name, host=host_of[name], address=address_of[name])
    assert play.last(order[1]) == {
        "kind": "refused",
        "reason": "b listens at 127.0.0.1, where a on another host does not reach it; give islands.address an address "
        "of its host",
    }
    play.come("c", host=host_of[order[0]], address=["127.0.0.1" if order == "ba" else "10.0.0.1", 9])
    assert play.coordinator.members == sorted([order[0], "c"]), "on one host loopback will do"


def test_an_island_of_4096_ranks_comes_in_and_goes():
    """A model of 7B has some 300 tensors: all boxes of all ranks are more than one message holds."""
    play, size = Play(num_founders=1, rows=8192), 4096
    play.come("a", batch=1)
    play.come("b", size)
    play.batch()
    assert play.coordinator.members == ["a", "b"] and len(play.coordinator.row_indices["b"]) == size
    assert [m["rank"] for m in play.received["a", 0] if m.get("name") == "b"] == list(range(size))
    play.lose("b", 17)
    assert play.coordinator.members == ["a"] and len(play.coordinator.dropped) == size
    assert set(play.coordinator.senders) == {play.number("a")}


def test_a_late_rank_of_an_old_launch_does_not_evict_the_new_one():
    play = Play(num_founders=1)
    late = play.dial("a", "1", 1)
    play.come("a", 2, launch="1", ranks=[0])
    play.come("a", 2, launch="2")
    assert play.coordinator.members == ["a"]
    for launch in ("1", "0"):  # one that has been here, and one whose ranks never came
        play.coordinator.hello(late, play.hello("a", rank=1, size=2, launch=launch), play.now)
        play.listen()
        assert play.received["a", 1][-1]["kind"] == "evicted"
        assert play.coordinator.dropped[-1] == late
    assert play.coordinator.members == ["a"] and play.coordinator.islands["a"].launch == "2"


@pytest.mark.parametrize(
    "change",
    [
        *({"rank": 2}, {"rows": 0}, {"size": "2"}, {"size": 10**30}, {"batch": -1}, {"launch": ""}),
        *({"weight": weight} for weight in (-1.0, 0, float("inf"), float("nan"), 1e-300, 10**400)),
        *({"boxes": boxes} for boxes in ([], {"w": [[0], [1, 2]]}, {"w": 3}, {"w": [[0], [1 << 63]]})),
        *({"address": address} for address in (["h"], [7070, "h"], ["a-name", 7070], ["127.0.0.1", 70000])),
        {"island": "c\nbatch 3 is repeated"},
    ],
)
def test_a_malformed_hello_changes_nothing(play, change):
    with pytest.raises(BadMessageError):
        play.coordinator.hello(99, play.hello("c") | change, 0.0)
    play.batch()
    assert play.coordinator.batch == 1 and play.coordinator.members == ["a", "b"]


HUGE = [2**69, -(2**69), 2**40, 0, 1e308, "x" * 300, [1] * 300, {"w": [[0] * 99] * 2}, {"w": {"w": {}}}, None]


@pytest.mark.parametrize("kind", ["hello", "prepared", "beat", "state", "leave"])
def test_no_field_of_a_rank_s_message_ends_the_coordinator(play, kind):
    """It is refused, or the run goes on with it: no other error, and no second of work."""
    beat = {"kind": "beat", "phase": "compute", "bytes": 1}
    leave = {"kind": "leave", "finished": False, "asks": False}
    state = {"kind": "state", "epoch": 1, "state": STATE}
    message = {"hello": play.hello("c"), "prepared": PREPARED, "beat": beat, "state": state, "leave": leave}[kind]
    changes = [(key, value) for key in message if key != "kind" for value in HUGE]
    for number, (key, value) in enumerate(changes):
        changed = {**message, key: value}
        with suppress(BadMessageError):
            if kind == "hello":
                play.coordinator.hello(play.dial(f"c{number}", "1", 0), changed, 0.0)
            else:
                play.coordinator.receive(play.number("a"), changed, 0.0)
        play.coordinator.tick(0.0)
        play.coordinator.outbox = []
        if "a" not in play.coordinator.members:
            play.come("a", launch=f"1{number}")


@pytest.mark.parametrize("key", ["rows", "microbatch", "unit", "rank", "size", "data_ranks", "batch"])
def test_a_number_out_of_range_is_named(play, key):
    with pytest.raises(BadMessageError, match=rf"hello: {key} is '590295810358705651712'"):
        play.coordinator.hello(99, play.hello("c") | {key: 2**69}, 0.0)


def test_a_state_that_is_nested_too_deep_to_be_passed_on_is_refused(play):
    deep: list = []
    for _ in range(300):
        deep = [deep]
    with pytest.raises(BadMessageError, match="state: state is"):
        message = {"kind": "state", "epoch": 1, "state": STATE | {"scalars": deep}}
        play.coordinator.receive(play.number("a"), message, 0.0)


def test_a_round_without_samples_says_nothing_of_a_rate(play):
    for _ in range(2):
        play.prepare("a", samples=0, steps=2)
        play.prepare("b", samples=0, steps=2)
    assert play.coordinator.islands["a"].rate.value is None and play.coordinator.batch == 4


@pytest.mark.parametrize("change", [{"seconds": 10**400}, {"weight": -(2**80)}, {"loss": 10**400}, {"digest": True}])
def test_numbers_that_cannot_be_are_malformed(play, change):
    with pytest.raises(BadMessageError):
        play.prepare("a", **change)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0, 1e-300])
def test_a_time_that_cannot_be_moves_no_rows(play, seconds):
    for _ in range(BATCHES_BETWEEN_MOVES + 1):
        play.batch(a=seconds)
    assert play.coordinator.epoch == 1 and play.coordinator.batch == BATCHES_BETWEEN_MOVES + 1


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
                    play.heartbeat(name, rank)
            play.wait(0.5)
        if coordinator.batch > told:
            assert coordinator.batch == told + 1
            told += 1
            commits = [
                m for (name, _), received in play.received.items() for m in received[-2:] if m["kind"] == "commit"
            ]
            assert {m["samples"] for m in commits if m["batch"] == told - 1} == {ROWS}
        check_division(coordinator)
        assert coordinator.leader in coordinator.members
    assert told > 20


def test_a_commit_counts_all_batches_of_a_round_and_a_joiner_gets_the_state_after_them():
    play = Play(num_founders=1)
    play.come("a")
    play.come("b")
    play.prepare("a", steps=100, samples=800)
    assert play.coordinator.batch == 100
    following = play.last("a")["next"]
    assert (following["batch"], following["joiners"]) == (100, ["b"])
    play.prepare("a", steps=100)
    with pytest.raises(BadMessageError, match=r"prepared: steps is '0'$"):
        play.prepare("b", steps=0)
    with pytest.raises(BadMessageError, match="b prepares 99 batches, others another number"):
        play.prepare("b", steps=99)


def test_an_island_that_has_to_save_makes_the_next_exchange_one_of_all_weights_for_joiners_too():
    play = Play(num_founders=1)
    play.come("a")
    play.come("b")
    play.prepare("a", steps=5, asks_for_whole=True)
    assert play.last("a")["next_is_whole"] and play.last("b")["kind"] == "view" and play.last("b")["is_whole"]
    for name in "ab":
        play.prepare(name, steps=5)
    assert not play.last("a")["next_is_whole"]


def test_an_exchange_that_failed_is_repeated_for_the_same_batches():
    play = Play()
    play.come("a")
    play.come("b")
    play.prepare("a", steps=5)
    play.prepare("b", steps=5, ok=False)
    assert play.coordinator.batch == 0 and play.last("a")["kind"] == "view"
    for name in "ab":
        play.prepare(name, steps=5)
    assert play.coordinator.batch == 5


def test_the_pace_of_local_steps_counts_the_rows_of_the_round_though_a_view_has_changed_in_it():
    play = Play()
    play.come("a")
    play.come("b")
    play.lose("b")
    assert len(play.coordinator.row_indices["a"]) == ROWS
    play.prepare("a", steps=4, samples=4 * ROWS // 2, seconds=1.0)
    assert play.coordinator.islands["a"].rate.value == ROWS / 2


def test_of_islands_that_ask_to_leave_all_may_but_the_last():
    play = Play()
    play.come("a")
    play.come("b")
    ask = {"kind": "leave", "asks": True}
    play.coordinator.receive(play.number("b"), ask, play.now)
    play.listen()
    assert play.last("b") == {"kind": "left", "epoch": 1, "is_last": False}
    assert play.coordinator.members == ["a"] and play.last("a")["kind"] == "view"
    play.coordinator.receive(play.number("a"), ask, play.now)
    play.listen()
    assert play.last("a") == {"kind": "left", "epoch": 2, "is_last": True}
    assert play.coordinator.members == ["a"]
    play.prepare("a", steps=3, leaving=True)
    assert play.coordinator.batch == 3
