"""Strangers can do nothing to a coordinator."""

import os
import random
import socket
import struct
import threading
from contextlib import suppress

import pytest

from llmfoundry_islands.coordination import messages
from llmfoundry_islands.coordination.messages import (
    MAX_STRANGER_BYTES,
    TOKEN,
    BadMessageError,
    dial,
    find_token,
    format_address,
    handshake_as_server,
    pack,
    parse_address,
    receive,
    unpack,
)
from llmfoundry_lite.errors import ConfigError

LONE = b'{"kind": "answer", "proof": "\\ud800"}'
"""Half of a surrogate pair: JSON can write it, but it is not valid text."""
SECRET = b"0123456789abcdef"


@pytest.fixture
def listening():
    """Listen, and welcome one connection after the other. Yields what became of each, in order."""
    listener, found = socket.create_server(("127.0.0.1", 0)), []

    def listen():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    handshake_as_server(connection, SECRET)
                    found.append(receive(connection))
                except OSError as error:
                    found.append(error)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    yield listener.getsockname(), found
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def until(found, count):
    done = threading.Event()
    while len(found) < count:
        done.wait(0.01)
    return found


def test_two_that_know_the_token_talk(listening):
    address, found = listening
    with dial(address, SECRET) as connection:
        connection.sendall(pack({"kind": "beat", "bytes": 2**70, "norm": float("nan")}))
        assert until(found, 1)[0]["bytes"] == 2**70


def test_another_token_is_refused_and_never_sent(listening):
    address, found = listening
    with pytest.raises(OSError):
        dial(address, b"another-secret-of-16")
    assert "does not know the token" in str(until(found, 1)[0])


def test_an_end_of_another_protocol_is_refused(listening, monkeypatch):
    address, found = listening
    monkeypatch.setattr(messages, "PROTOCOL", "islands/1")
    with socket.create_connection(address) as connection:
        theirs, mine = receive(connection)["challenge"], "ab" * 32
        proof = messages.compute_proof(SECRET, "client", theirs, mine)
        monkeypatch.undo()
        connection.sendall(pack({"kind": "answer", "challenge": mine, "proof": proof}))
        assert isinstance(until(found, 1)[0], BadMessageError)


def test_an_end_that_only_echoes_proves_nothing(listening):
    """Our own challenge, sent back as if it were the other's, does not make us answer it."""
    address, found = listening
    with socket.create_connection(address) as connection:
        asked = receive(connection)["challenge"]
        connection.sendall(pack({"kind": "answer", "challenge": asked, "proof": "0" * 64}))
        assert isinstance(until(found, 1)[0], BadMessageError)


def test_noise_is_closed_and_the_next_one_is_served(listening):
    address, found = listening
    chance = random.Random(0)
    noises = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(200),
        struct.pack("!I", 2**31) + b"x" * 64,
        struct.pack("!I", MAX_STRANGER_BYTES + 1) + bytes(MAX_STRANGER_BYTES + 1),
        struct.pack("!I", 2) + b"[]",
        struct.pack("!I", 9) + b'{"kind":1',
        struct.pack("!I", 200) + b"[" * 200,
        b"",
        *[chance.randbytes(chance.randrange(1, 300)) for _ in range(40)],
    ]
    for count, noise in enumerate(noises, 1):
        with socket.create_connection(address) as connection:
            with suppress(OSError):  # closed by the other end already
                connection.sendall(noise)
                connection.shutdown(socket.SHUT_WR)
            assert isinstance(until(found, count)[-1], OSError)
    with dial(address, SECRET) as connection:
        connection.sendall(pack({"kind": "beat"}))
        assert until(found, len(noises) + 1)[-1] == {"kind": "beat"}


@pytest.mark.parametrize(
    "raw",
    [b"", b"7", b"null", b"[1]", b"{}", b'{"kind": 3}', b"[" * 100_000, b"\xff\xfe", LONE, b'{"kind": "\xed\xa0\x80"}'],
)
def test_what_is_no_message_is_refused(raw):
    with pytest.raises(BadMessageError):
        unpack(raw)


@pytest.mark.parametrize(("given", "words"), [(None, "not set"), (" \n", "not set"), ("short", "5 characters given")])
def test_a_missing_or_short_token_is_said(given, words):
    with pytest.raises(ConfigError, match=rf"{TOKEN}: {words}, expected a secret of 16 characters or more"):
        find_token({} if given is None else {TOKEN: given})


@pytest.mark.parametrize("end", ["", "\n", "\r\n", " "])
@pytest.mark.parametrize("secret", [SECRET, b"\xff" * 16])
def test_a_token_may_be_any_bytes_without_the_white_space_that_a_file_or_a_secret_store_adds(secret, end):
    assert find_token({TOKEN: os.fsdecode(secret) + end}) == secret


@pytest.mark.parametrize("text", ["127.0.0.1:7070", "[::1]:7070", "host:0"])
def test_an_address_reads_as_it_is_written(text):
    assert format_address(parse_address(text, "--listen")) == text


@pytest.mark.parametrize("text", ["", "host", "host:", ":7070", "host:x", "host:70000"])
def test_an_address_that_is_none_is_said(text):
    with pytest.raises(ConfigError, match=r"--listen: .* given, expected host:port"):
        parse_address(text, "--listen")
