"""A coordinator's process, and what members of it notice: real sockets, one of which may go dead."""

import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llmfoundry_islands.coordination import member, serve
from llmfoundry_islands.coordination.coordinator import Coordinator
from llmfoundry_islands.coordination.member import Disconnection, Member
from llmfoundry_islands.coordination.messages import (
    HEADER,
    TOKEN,
    dial,
    handshake_as_client,
    handshake_as_server,
    pack,
    receive,
    unpack,
)
from llmfoundry_islands.tests.world import HELLO, PREPARED, SECRET, STATE, coordination, line_to, no_more_files
from llmfoundry_lite.errors import ConfigError
from tests.helpers.launch import free_port

in_a_process = pytest.mark.slow


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(member, "SILENCE_SECONDS", 2.0)


def joined(address, name="a", **facts):
    one = Member(tuple(address[:2]), SECRET.encode(), name)
    one.send({"kind": "hello", **HELLO, "island": name, **facts})
    return one


def receive_view(one) -> dict:
    message = one.receive_decision()
    assert isinstance(message, dict) and message["kind"] == "view", message
    return message


def decision_of(one):
    """Return the next decision, within the deadline."""
    found = []
    thread = threading.Thread(target=lambda: found.append(one.receive_decision()), daemon=True)
    thread.start()
    thread.join(60.0)
    assert found, "no decision for 60 s"
    return found[0]


@in_a_process
@pytest.mark.parametrize("dead", [("back",), ("there", "back")])
def test_a_link_that_goes_dead_is_noticed_by_the_rank(tmp_path, impatient, dead):
    with coordination(tmp_path, num_islands=1) as running, line_to(running.port) as line:
        one = joined(line.address)
        receive_view(one)
        for way in dead:
            line.is_dead[way].set()
        assert decision_of(one) == Disconnection("the coordinator is silent", "gone")
        if "there" not in dead:
            running.wait_for("rank 0 of a is gone")
        one.close()


@in_a_process
@pytest.mark.parametrize("sends_hello", [True, False])
def test_a_frozen_coordinator_is_noticed(tmp_path, impatient, sends_hello):
    """Before `hello` too, while ranks build their model."""
    with coordination(tmp_path, num_islands=2) as running:
        one = Member(("127.0.0.1", running.port), SECRET.encode(), "a")
        if sends_hello:
            one.send({"kind": "hello", **HELLO})
        running.freeze()
        try:
            assert decision_of(one) == Disconnection("the coordinator is silent", "gone")
        finally:
            running.thaw()
        one.close()


@in_a_process
def test_a_quiet_coordinator_that_lives_is_not_left(tmp_path, impatient):
    """An island may wait for others for longer than any silence."""
    with coordination(tmp_path, num_islands=2) as running:
        one = joined(("127.0.0.1", running.port))
        running.wait_for("a is here")
        beats = count_beats(running.port, 12)
        assert beats == 12 and one.disconnection is None
        another = joined(("127.0.0.1", running.port), "b")
        assert receive_view(one)["members"] == receive_view(another)["members"]
        for member_ in (one, another):
            member_.close(has_finished=True)
        running.wait_for("the run has ended after batch 0")
        assert "is repeated" not in running.lines


@in_a_process
@pytest.mark.parametrize("log", ["a pipe that nobody reads", "a full disk"])
def test_a_coordinator_whose_log_is_lost_goes_on(log):
    port = free_port()
    command = [sys.executable, "-m", "llmfoundry_lite", "islands", "coordinate", "--islands", "1", "--until-alone"]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            [*command, "--listen", f"127.0.0.1:{port}"],
            env=os.environ | {TOKEN: SECRET},
            stdout=full if log == "a full disk" else subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    if process.stdout is not None:
        process.stdout.close()
    one = joined(("127.0.0.1", port))
    assert receive_view(one)["members"] == {"a": "1"}
    one.close(has_finished=True)
    assert process.wait(60) == 0


def count_beats(port, most):
    """Count the coordinator's heartbeats on a connection of its own; four come in a second."""
    with dial(("127.0.0.1", port), SECRET.encode()) as connection:
        return sum(receive(connection)["kind"] == "beat" for _ in range(most))


def test_who_knows_the_token_and_says_nothing_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "MAX_HEARTBEAT_SECONDS", 0.5)
    with threaded() as (port, _), dial(("127.0.0.1", port), SECRET.encode()) as silent:
        silent.settimeout(10)
        with pytest.raises(ConnectionError, match="closed by the other end"):
            while True:
                assert receive(silent)["kind"] == "beat"


class Hashable(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def attend(server, *heard: bytes) -> list[bytes]:
    """Serve one connection without sockets, which says `heard` and then nothing. Returns what the server writes to
    it."""
    import asyncio

    async def talk():
        reader, written = asyncio.StreamReader(), []
        for raw in heard:
            reader.feed_data(raw)
        transport = SimpleNamespace(abort=lambda: None, get_write_buffer_size=lambda: 0)
        writer: Any = Hashable(
            write=written.append, close=lambda: None, transport=transport, get_extra_info=lambda name: ("there", 1)
        )
        await asyncio.wait_for(server.attend(reader, writer), 60.0)
        return written

    return asyncio.run(talk())


def unstarted(num_founders=1):
    return serve.Server(SECRET.encode(), Coordinator(num_founders, 4.0), handles_signals=False)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"", ""),
        (HEADER.pack(serve.MAX_STRANGER_BYTES + 1), f"at most {serve.MAX_STRANGER_BYTES} are allowed"),
        (
            pack({"kind": "answer", "challenge": "c", "proof": "0" * 64}),
            "the other end does not know the token",
        ),
    ],
)
def test_a_stranger_is_closed_greeted_by_nobody_and_the_coordinator_notes_its_end(said, words, capsys, monkeypatch):
    monkeypatch.setattr(serve, "HANDSHAKE_SECONDS", 0.05)
    server, lost = unstarted(), []
    server.coordinator.note_connection = lambda number: pytest.fail("greeted")  # type: ignore[method-assign]
    server.coordinator.lose = lambda number: lost.append(number)  # type: ignore[method-assign]
    assert len(attend(server, said)) == 1  # its challenge alone
    assert words in capsys.readouterr().out
    assert lost == [0] and not server.attended


@pytest.mark.parametrize(
    ("waiting_bytes", "expected"),
    [(0, ["beat", "view"]), (serve.MAX_BACKLOG_BYTES, ["view"]), (serve.MAX_BACKLOG_BYTES + 1, ["cut off"])],
)
def test_who_does_not_read_gets_no_beat_and_at_last_is_cut_off(waiting_bytes, expected):
    server, said = unstarted(), []
    transport = SimpleNamespace(get_write_buffer_size=lambda: waiting_bytes, abort=lambda: said.append("cut off"))
    write = lambda raw: said.append(unpack(raw[HEADER.size :])["kind"])  # noqa: E731
    server.writers[0] = cast(Any, SimpleNamespace(transport=transport, write=write))
    server.send_heartbeats()
    server.coordinator.outbox = [(0, {"kind": "view"})]
    server.deliver()
    assert said == expected


@contextmanager
def threaded(coordinator=None):
    """A server in this process: its port, and what it raises in the end."""
    import asyncio

    server = serve.Server(SECRET.encode(), coordinator or Coordinator(1, 4.0), handles_signals=False)
    raised, loops = [], []
    port = free_port()

    async def run():
        loops.append(asyncio.get_running_loop())
        await server.run(("127.0.0.1", port))

    def work():
        try:
            asyncio.run(run())
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive():
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
    try:
        yield port, raised
    finally:
        with suppress(RuntimeError):  # it has ended by itself
            loops[0].call_soon_threadsafe(server.stopped.set)
        thread.join(10)
        assert not thread.is_alive()


def test_a_rank_knows_an_island_when_all_its_ranks_have_been_described():
    """And forgets the launches before, of which a long run has many."""
    coordinator = Coordinator(2, 4.0)
    with threaded(coordinator) as (port, _):
        one, *others = joined(("127.0.0.1", port)), joined(("127.0.0.1", port), "b", rank=1, size=2)
        with pytest.raises(ConnectionError, match="nothing is known of island b"):
            one.describe("b", "1", timeout=0.0)
        others.append(joined(("127.0.0.1", port), "b", size=2))
        receive_view(one)
        assert [message["rank"] for message in one.describe("b", "1")] == [0, 1]
        for other in others:
            other.close()
        receive_view(one)
        others.append(joined(("127.0.0.1", port), "b", launch="2"))
        while "b" not in coordinator.islands:  # they speak over two connections, of which either may be heard first
            assert others[-1].disconnection is None
        one.send({**PREPARED, "epoch": 2})
        assert decision_of(one)["next"]["members"] == {"a": "1", "b": "2"}
        assert len(one.describe("b", "2")) == 1
        with pytest.raises(ConnectionError):
            one.describe("b", "1", timeout=0.0)
        for each in (one, *others):
            each.close()


def test_a_coordinator_that_starts_late_is_waited_for_and_one_that_never_does_is_said(monkeypatch):
    monkeypatch.setattr(member, "SECONDS_TO_START", 20.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        address = taken.getsockname()
        said = []
        with ThreadPoolExecutor() as pool:
            reached = pool.submit(Member, address, SECRET.encode(), "a", said.append)
            while not said:
                assert not reached.done()
            taken.listen()
            connection, _ = taken.accept()
            with connection:
                handshake_as_server(connection, SECRET.encode())
                reached.result(10).close()
    assert said == [f"127.0.0.1:{address[1]} does not answer (Connection refused); for 20 s at most"]
    monkeypatch.setattr(member, "SECONDS_TO_START", 0.2)
    with pytest.raises(ConfigError, match=r"\.1:\d+ does not answer \(Connection refused\); start it with `llmfoundry"):
        Member(address, SECRET.encode(), "a")


@pytest.mark.parametrize("host", ["a..b", "no-such-host.invalid"])
def test_a_host_that_cannot_be_is_said(monkeypatch, host):
    monkeypatch.setattr(member, "SECONDS_TO_START", 0.0)
    with pytest.raises(ConfigError, match=rf"islands.coordinator: {host}:7070"):
        Member((host, 7070), SECRET.encode(), "a")
    with pytest.raises(ConfigError, match=rf"--listen: {host}:7070: "):
        serve.serve((host, 7070), SECRET.encode(), 1, 4.0)


def test_islands_that_dial_from_two_hosts_are_told_apart():
    """127.0.0.2 stands for another host: there, who listens on loopback is out of reach."""
    with threaded(Coordinator(2, 4.0)) as (port, _):
        one = joined(("127.0.0.1", port))
        with socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0)) as far:
            handshake_as_client(far, SECRET.encode())
            far.sendall(pack({"kind": "hello", **HELLO, "island": "b", "address": ["10.0.0.2", 1], "host": ""}))
            while (answer := receive(far))["kind"] == "beat":
                pass
        assert answer["kind"] == "refused"
        assert "a listens at 127.0.0.1, where b on another host does not reach it" in answer["reason"]
        one.close()


def test_after_an_error_of_its_own_a_coordinator_ends_and_islands_notice():
    class Broken(Coordinator):
        def _note_report(self, island, message, now):
            raise ZeroDivisionError("ours")

    with threaded(Broken(1, 4.0)) as (port, raised):
        one = joined(("127.0.0.1", port))
        receive_view(one)
        one.send(PREPARED)
        assert decision_of(one) == Disconnection("the coordinator is gone", "gone")
        one.close()
    assert "all islands save and leave" in str(raised[0])


def test_a_message_for_many_ranks_is_packed_once(monkeypatch):
    """For 64 ranks the tensor boxes of two islands would take longer than a coordinator may be silent."""
    packed: list[dict] = []
    written: list[tuple[int, bytes]] = []

    def pack_and_note(message):
        packed.append(message)
        return pack(message)

    monkeypatch.setattr(serve, "pack", pack_and_note)
    server = serve.Server(SECRET.encode(), Coordinator(1, 4.0), handles_signals=False)
    transport = SimpleNamespace(get_write_buffer_size=lambda: 0)
    for number in range(3):
        write = partial(lambda number, raw: written.append((number, raw)), number)
        server.writers[number] = cast(Any, SimpleNamespace(transport=transport, write=write))
    first, second = {"kind": "member", "name": "a"}, {"kind": "member", "name": "b"}
    server.coordinator.outbox = [(number, message) for message in (first, second) for number in range(3)]
    server.deliver()
    assert packed == [first, second]
    assert written == [(number, pack(message)) for message in (first, second) for number in range(3)]


def test_a_crowd_of_strangers_keeps_no_rank_out_and_their_end_is_said_once(capsys):
    with threaded() as (port, raised), ExitStack() as stack:
        for _ in range(serve.MAX_STRANGERS // 8):
            crowd = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            crowd.sendall(HEADER.pack(9) + b"no answer")
        one = joined(("127.0.0.1", port))
        receive_view(one)
        one.close()
    assert capsys.readouterr().out.count("closed a connection from 127.0.0.1: not JSON") == 1 and raised == []


def test_connections_that_are_open_at_the_end_are_closed_without_a_word(caplog):
    with ExitStack() as stack, threaded() as (port, _):
        quiet = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert receive(quiet)["kind"] == "challenge"
    assert not caplog.records


def test_a_coordinator_without_files_left_says_so_once_and_its_ranks_go_on(capsys, caplog):
    with threaded() as (port, raised):
        one, said = joined(("127.0.0.1", port)), ""
        receive_view(one)
        with no_more_files() as refused:
            refused.connect(("127.0.0.1", port))
            while "cannot accept connections: Too many open files" not in said:
                said += capsys.readouterr().out
            one.send(PREPARED)
            assert decision_of(one)["kind"] == "commit"
        one.close()
    assert (said + capsys.readouterr().out).count("cannot accept") == 1 and not caplog.records and raised == []


def changed(chance, message):
    """A message of ours with something in it that should not be."""
    odd = [
        2**69,
        [[[]] * 9],
        "\ud800",
        "",
        None,
        True,
        -1,
        10**400,
        float("nan"),
        float("inf"),
        [],
        {},
        [[]],
        {"w": "x"},
        "\n",
        2**64,
        0,
    ]
    message = dict(message)
    for _ in range(chance.randrange(1, 4)):
        key = chance.choice(list(message))
        if chance.random() < 0.2:
            del message[key]
        else:
            message[key] = chance.choice(odd)
        if not message:
            break
    raw = json.dumps(message).encode()
    if chance.random() < 0.2:
        place = chance.randrange(len(raw))
        raw = raw[:place] + chance.choice([b"\xed\xa0\x80", b"\\ud800", b"\x00", b"[" * 2000]) + raw[place + 1 :]
    return struct.pack("!I", len(raw)) + raw


@pytest.mark.parametrize("seed", range(3))
def test_whatever_an_island_says_the_coordinator_and_the_others_go_on(seed):
    """Those that know the token may be broken. Each of their messages is one of ours with something changed."""
    chance = random.Random(seed)
    with threaded() as (port, raised):
        one = joined(("127.0.0.1", port))
        receive_view(one)
        for number in range(150):
            with dial(("127.0.0.1", port), SECRET.encode()) as other:
                hello = {"kind": "hello", **HELLO, "island": f"x{number % 3}", "launch": str(number)}
                sound = [hello] if chance.random() < 0.7 else []
                said = [pack(message) for message in sound]
                bases = [hello, PREPARED, {"kind": "beat", "phase": "compute", "bytes": 1}]
                bases.append({"kind": "state", "epoch": 1, "state": STATE})
                said += [changed(chance, chance.choice(bases)) for _ in range(chance.randrange(1, 4))]
                with suppress(OSError):
                    other.sendall(b"".join(said))
                    other.shutdown(socket.SHUT_WR)
                    other.settimeout(10)
                    while receive(other)["kind"] != "evicted":
                        pass
        assert one.disconnection is None and raised == []
        one.close()
    assert raised == []
