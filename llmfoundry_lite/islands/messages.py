"""Messages between islands: length-prefixed JSON, on connections whose two ends have proved a shared token.

The token itself is never sent. Each end sends a random challenge and answers the other's with HMAC-SHA256 over its
role and both challenges (a mutual version of RFC 2195). Nothing that follows is encrypted or signed: on a network that
is not yours, run it through WireGuard or ssh. No torch.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from llmfoundry_lite.errors import ConfigError

PROTOCOL = "islands/5"
"""Version of the messages. A "beat" is a heartbeat; a rank's "hello" describes it."""
TOKEN = "LLMFOUNDRY_LITE_ISLANDS_TOKEN"
MIN_TOKEN_LENGTH = 16
HEADER = struct.Struct("!I")
MAX_STRANGER_BYTES = 256
"""Limit for a message before its sender has proved the token."""
MAX_BYTES = 1 << 26
"""Limit for any message. A rank's hello has some 60 bytes for each tensor."""
HANDSHAKE_SECONDS = 5.0

Message = dict[str, Any]


class BadMessageError(ConnectionError):
    """A malformed message. The receiver closes the connection and carries on."""


def find_token(environ: Mapping[str, str] = os.environ) -> bytes:
    """Return the token, stripped: files and secret stores add white space. Raises ConfigError."""
    token = environ.get(TOKEN, "").strip()
    if len(token) < MIN_TOKEN_LENGTH:
        given = f"{len(token)} characters given" if token else "not set"
        raise ConfigError(
            f"{TOKEN}: {given}, expected a secret of {MIN_TOKEN_LENGTH} characters or more, the same for the "
            f"coordinator and all islands; export {TOKEN}=$(openssl rand -hex 32)"
        )
    return os.fsencode(token)


def parse_address(text: str, key: str) -> tuple[str, int]:
    """Parse `host:port`. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{key}: {text!r} given, expected host:port, such as 127.0.0.1:7070")
    return host.strip("[]"), int(port)


def format_address(address: tuple[str, int]) -> str:
    """Return `host:port`, as `parse_address` reads it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# ------------------------------------------------------------------------------------------------------------ framing


def pack(message: Message, limit: int = MAX_BYTES) -> bytes:
    raw = json.dumps(message, separators=(",", ":"), allow_nan=True).encode()
    assert len(raw) <= limit, f"{message.get('kind')}: {len(raw)} bytes"
    return HEADER.pack(len(raw)) + raw


def size_of(header: bytes, limit: int = MAX_BYTES) -> int:
    (size,) = HEADER.unpack(header)
    if size > limit:
        raise BadMessageError(f"a message of {size} bytes, at most {limit} are allowed")
    return size


def unpack(raw: bytes) -> Message:
    """Parse a message. Raises BadMessageError for anything but a JSON object with a `kind`."""
    try:
        text = raw.decode()
        message = json.loads(text)
        if "\\u" in text:  # a lone surrogate cannot be printed or sent on
            json.dumps(message, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadMessageError(f"not JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise BadMessageError("no JSON object with a kind")
    return message


def receive_exactly(connection: socket.socket, target: memoryview) -> None:
    """Fill `target`. Raises OSError if the other end closes or times out."""
    done = 0
    while done < len(target):
        count = connection.recv_into(target[done:])
        if not count:
            raise ConnectionError("closed by the other end")
        done += count


def receive(connection: socket.socket, limit: int = MAX_BYTES) -> Message:
    """Return the next message. Raises OSError, of which BadMessageError is one."""
    header = bytearray(HEADER.size)
    receive_exactly(connection, memoryview(header))
    raw = bytearray(size_of(bytes(header), limit))
    receive_exactly(connection, memoryview(raw))
    return unpack(bytes(raw))


# ---------------------------------------------------------------------------------------------------------- handshake


def prove(token: bytes, role: str, first: str, second: str) -> str:
    """Return the answer of a `role`, client or server. The role is signed, so no end can be made to answer itself."""
    return hmac.new(token, f"{PROTOCOL}/{role}/{first}/{second}".encode(), hashlib.sha256).hexdigest()


def check_proof(token: bytes, role: str, first: str, second: str, message: Message) -> None:
    proof = message.get("proof")
    if not isinstance(proof, str) or not hmac.compare_digest(
        prove(token, role, first, second).encode(), proof.encode()
    ):
        raise BadMessageError("the other end does not know the token")


def text_of(message: Message, key: str) -> str:
    value = message.get(key)
    if not isinstance(value, str):
        raise BadMessageError(f"no {key}")
    return value


def greet(connection: socket.socket, token: bytes) -> None:
    """Run the handshake as the client. Raises OSError."""
    connection.settimeout(HANDSHAKE_SECONDS)
    mine = secrets.token_hex(32)
    theirs = text_of(receive(connection, MAX_STRANGER_BYTES), "challenge")
    proof = prove(token, "client", theirs, mine)
    connection.sendall(pack({"kind": "answer", "challenge": mine, "proof": proof}, MAX_STRANGER_BYTES))
    check_proof(token, "server", theirs, mine, receive(connection, MAX_STRANGER_BYTES))


def welcome(connection: socket.socket, token: bytes) -> None:
    """Run the handshake as the server. Raises OSError."""
    connection.settimeout(HANDSHAKE_SECONDS)
    mine, asking = challenge()
    connection.sendall(asking)
    connection.sendall(answer(token, mine, receive(connection, MAX_STRANGER_BYTES)))


def challenge() -> tuple[str, bytes]:
    """Return a server's challenge, and the message that has it."""
    mine = secrets.token_hex(32)
    return mine, pack({"kind": "challenge", "challenge": mine}, MAX_STRANGER_BYTES)


def answer(token: bytes, mine: str, message: Message) -> bytes:
    """Check a client's answer to the challenge `mine`, and return the server's. Raises BadMessageError."""
    theirs = text_of(message, "challenge")
    check_proof(token, "client", mine, theirs, message)
    return pack({"kind": "proof", "proof": prove(token, "server", mine, theirs)}, MAX_STRANGER_BYTES)


def dial(address: tuple[str, int], token: bytes) -> socket.socket:
    """Connect and run the handshake. Raises OSError."""
    connection = socket.create_connection(address, timeout=HANDSHAKE_SECONDS)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greet(connection, token)
    except ConnectionError as error:
        connection.close()
        raise BadMessageError(f"{error}; does the other end have the same {TOKEN}, and release?") from error
    except BaseException:
        connection.close()
        raise
    return connection


# ------------------------------------------------------------------------------------------------- fields and ranges

MAX_INTEGER = 1 << 70
"""Integers of a valid message are smaller, digests included."""
WEIGHTS = (1e-6, 1e6)
"""Range of `islands.weight`, the same as in `config.check`."""

Fields = Mapping[str, type | tuple[type, ...]]

FACTS: Fields = {
    **dict.fromkeys(("island", "launch"), str),
    "address": list,
    **dict.fromkeys(("boxes", "fingerprints", "machine"), dict),
    **dict.fromkeys(("rank", "size", "data_ranks", "batch", "rows", "microbatch", "unit"), int),
    "weight": (int, float),
}
"""Fields of a rank's hello. `data_ranks`: the island's shares of its rows, each for one or more of its `size` ranks.
`unit`: each share is a multiple of it."""
REPORT: Fields = {
    **dict.fromkeys(
        ("epoch", "batch", "steps", "bad", "weight", "samples", "tokens", "losses", "digest", "link", "again"), int
    ),
    **dict.fromkeys(("ok", "leaving", "out_of_range", "asks_for_whole"), bool),
    **dict.fromkeys(("seconds", "loss", "norm"), (int, float)),
    "weights": str,
}
"""Fields of an island's report after an exchange. `ok`: it succeeded. `steps`: batches that it covers, one of a batch's
gradient; counts are of all of them. `link`: bytes a second that came from other islands; 0 if too few came to tell.
`again`: samples that had been lost. `asks_for_whole`: it has to save, so the next exchange should be of all weights."""


def check_fields(message: Message, fields: Fields) -> None:
    """Check the types and sizes of a message's fields. Raises BadMessageError."""
    for key, kind in fields.items():
        value = message.get(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise BadMessageError(f"{message['kind']}: {key} is {str(value)[:40]!r}")
        if isinstance(value, int) and abs(value) >= MAX_INTEGER:
            raise BadMessageError(f"{message['kind']}: {key} has {value.bit_length()} bits")


def check_hello(message: Message) -> None:
    """Check a rank's hello, which all islands receive. Raises BadMessageError."""
    check_fields(message, FACTS)
    rank, size, address = message["rank"], message["size"], message["address"]
    is_valid = {
        "island": re.fullmatch(r"\w[\w.\-]{0,63}", message["island"]),
        "launch": re.fullmatch(r"\w{1,64}", message["launch"]),
        "rank": 0 <= rank < size,
        "data_ranks": 1 <= message["data_ranks"] <= size,
        "rows": message["rows"] >= 1,
        "microbatch": message["microbatch"] >= 1,
        "unit": message["unit"] >= 1,
        "batch": message["batch"] >= 0,
        "weight": WEIGHTS[0] <= message["weight"] <= WEIGHTS[1],
        "address": len(address) == 2 and _is_host(address[0]) and _is_count(address[1]) and address[1] < 1 << 16,
        "boxes": all(_is_box(box) for box in message["boxes"].values()),
    }
    for key, holds in is_valid.items():
        if not holds:
            raise BadMessageError(f"hello of rank {rank} of {size}: {key} is {str(message[key])[:40]!r}")


def _is_host(value: Any) -> bool:
    """Return whether it is a numeric address. Host names may resolve differently elsewhere."""
    with suppress(ValueError):
        return isinstance(value, str) and bool(ip_address(value))
    return False


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62  # the sum of two fits in int64


def _is_box(value: Any) -> bool:
    """Return whether it is (offset, lengths) of a part of a tensor."""
    if not (isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(v, (list, tuple)) for v in value)):
        return False
    return len(value[0]) == len(value[1]) and all(_is_count(number) for part in value for number in part)
