"""A launch on another machine keeps its run while it renews its lease, and gives it back when it ends."""

import errno
import json
import os
import threading
import time
from types import SimpleNamespace

import pytest

from llmfoundry_lite.checkpoint import lease as leases
from llmfoundry_lite.checkpoint.lease import Holder, Lease, LeaseRequest, Renewals
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.errors import EXIT_USER, CheckpointError
from llmfoundry_lite.ranks.codec import write_json
from tests.checkpoint.saves import save

DEADLINE_SECONDS = 30.0


def claim_elsewhere(store: CheckpointStore, **changes: object) -> Lease:
    """Take the lease as a launch on another machine would, whose host name and process id may be the same as here."""
    lease = store.acquire(request=LeaseRequest(run_name="mpt-1b"))
    owner = lease.owner | {"boot": "another", "host": "gpu-17", **changes}
    store.leases.folder.put(leases._claim_name(lease.epoch), write_json(owner))
    return Lease(lease.epoch, owner)


def holder_of(store: CheckpointStore) -> Holder:
    holder = store.leases.current_holder()
    assert holder is not None
    return holder


class Clock:
    """A monotonic clock that only moves when somebody sleeps, and then lets the other launch act."""

    def __init__(self, monkeypatch, acts=lambda seconds: None):
        self.now, self.acts = 1000.0, acts
        monkeypatch.setattr(
            leases, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep, time=time.time)
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.acts(self.now - 1000.0)


def test_a_launch_that_renews_its_lease_elsewhere_is_not_pushed_aside(url, monkeypatch):
    store = CheckpointStore(url)
    holder = claim_elsewhere(store)
    store.leases.renew(holder, 7)

    def renews(seconds):
        if seconds > 20:
            store.leases.renew(holder, 8)

    clock = Clock(monkeypatch, renews)
    with pytest.raises(CheckpointError) as caught:
        CheckpointStore(url).acquire()
    assert str(caught.value) == (
        f"{store.root.url}: another launch trains this run now (host gpu-17, process {os.getpid()}, run mpt-1b); stop "
        "it there, or give this run another save_folder; takeover=true ends that launch and carries on here"
    )
    assert caught.value.exit_code == EXIT_USER
    assert clock.now < 1021
    store.check(holder)


@pytest.mark.parametrize("renewals", [None, 7], ids=["never renewed", "renewed before"])
def test_a_launch_that_died_elsewhere_is_waited_out_with_the_seconds_on_the_screen(url, monkeypatch, renewals):
    store = CheckpointStore(url)
    holder = claim_elsewhere(store)
    if renewals is not None:
        store.leases.renew(holder, renewals)
    clock, said = Clock(monkeypatch), []
    assert store.acquire(request=LeaseRequest(note=said.append)).epoch == 2
    assert clock.now == 1030
    held = (
        f"{store.root.url}: host gpu-17, process {os.getpid()}, run mpt-1b held this run and has not renewed its lease"
    )
    assert said == [f"{held} for {seconds} s of 30" for seconds in (0, 5, 10, 15, 20, 25)]


def test_a_launch_that_has_ended_elsewhere_is_not_waited_for(url, monkeypatch):
    store, clock = CheckpointStore(url), Clock(monkeypatch)
    store.release(claim_elsewhere(store))
    assert store.acquire().epoch == 2
    assert clock.now == 1000


def test_a_takeover_does_not_watch_and_says_whose_run_it_takes(url, monkeypatch):
    store, clock, said = CheckpointStore(url), Clock(monkeypatch), []
    holder = claim_elsewhere(store)
    assert store.acquire(request=LeaseRequest(takes_over=True, note=said.append)).epoch == 2
    assert clock.now == 1000
    who = f"host gpu-17, process {os.getpid()}, run mpt-1b"
    assert said == [f"takeover: this launch takes {store.root.url} from {who}"]
    with pytest.raises(CheckpointError, match=r"another launch \(host .*\) has taken this run over; this one may not"):
        store.check(holder)


def test_a_holder_that_was_watched_in_vain_is_not_watched_again_unless_it_comes_back(url, monkeypatch):
    store, clock = CheckpointStore(url), Clock(monkeypatch)
    holder = claim_elsewhere(store)
    watched = store.wait_until_free(LeaseRequest())
    assert clock.now == 1030
    assert store.wait_until_free(LeaseRequest(dead_holder=watched)) == watched
    assert clock.now == 1030
    store.leases.renew(holder, 1)
    clock.acts = lambda seconds: store.leases.renew(holder, 2)
    with pytest.raises(CheckpointError, match="another launch trains this run now"):
        store.wait_until_free(LeaseRequest(dead_holder=watched))


def test_a_third_launch_that_is_faster_is_watched_in_its_turn(url, monkeypatch):
    store, others = CheckpointStore(url), []
    claim_elsewhere(store)

    def claims(seconds):
        if not others:
            lease = Lease(2, {"boot": "a third", "host": "gpu-3", "pid": 1, "claim": "c"})
            others.append(lease)
            store.leases.folder.put(leases._claim_name(2), write_json(lease.owner))
        elif seconds > 10:
            store.leases.renew(others[0], int(seconds))

    Clock(monkeypatch, claims)
    with pytest.raises(CheckpointError, match=r"another launch trains this run now \(host gpu-3, process 1\)"):
        store.acquire()


def test_renewals_of_an_earlier_claim_are_not_taken_for_this_one_s(url, monkeypatch):
    """Such as when the folder of leases was lost, and its numbers are given anew."""
    store, clock = CheckpointStore(url), Clock(monkeypatch)
    store.release(claim_elsewhere(store))
    store.leases.folder.put(
        leases._claim_name(1), write_json({"boot": "another", "host": "gpu-3", "pid": 1, "claim": "new"})
    )
    assert store.acquire().epoch == 2
    assert clock.now == 1030


def test_a_lease_is_renewed_in_the_background_until_it_is_released(url, monkeypatch):
    monkeypatch.setattr(leases, "RENEWAL_SECONDS", 0.001)
    store = CheckpointStore(url)
    lease = store.acquire()
    many, put = threading.Event(), store.leases.folder.put

    def failing(name, data, **options):
        """Every second renewal meets a network that is down."""
        count = json.loads(data)["renewals"]
        if count >= 10:
            many.set()
        if count % 2:
            raise OSError(errno.ENETDOWN, os.strerror(errno.ENETDOWN))
        put(name, data, **options)

    monkeypatch.setattr(store.leases.folder, "put", failing)
    renewals = Renewals(store.leases, lease)
    assert many.wait(DEADLINE_SECONDS)
    assert not holder_of(store).is_released
    monkeypatch.setattr(store.leases.folder, "put", put)
    renewals.release()
    holder = holder_of(store)
    assert holder.is_released and (holder.renewals or 0) >= 10
    store.check(lease)
    save(store, lease, 1)


def test_a_release_that_hangs_holds_no_launch_up(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "RELEASE_SECONDS", 0.05)
    store, goes_on, hangs = CheckpointStore(tmp_path), threading.Event(), threading.Event()
    lease = store.acquire()

    def hang(name, data):
        hangs.set()
        goes_on.wait(DEADLINE_SECONDS)

    monkeypatch.setattr(store.leases.folder, "put", hang)
    renewals = Renewals(store.leases, lease)
    assert hangs.wait(DEADLINE_SECONDS)
    renewals.release()
    assert renewals._thread.is_alive()
    goes_on.set()
    renewals._thread.join(DEADLINE_SECONDS)
