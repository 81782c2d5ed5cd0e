"""Messages between islands: length-prefixed JSON, on connections whose two ends have proved a shared token.

The file has four parts: the token and addresses, the framing of messages, the handshake, and the fields of each kind of
message with their checks. `check_message` is the entry to the last part. Nothing here imports torch.

The token itself is never sent. Each end sends a random challenge, and answers the other's with an HMAC-SHA256 of its
role and both challenges (a mutual version of RFC 2195):

    server -> client   {"kind": "challenge", "challenge": S}
    client -> server   {"kind": "answer", "challenge": C, "proof": HMAC(token, "client", S, C)}
    server -> client   {"kind": "proof", "proof": HMAC(token, "server", S, C)}

Nothing that follows is encrypted or signed. On a network that is not yours, run it through WireGuard or ssh.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from llmfoundry_lite.errors import ConfigError

PROTOCOL = "islands/7"
"""Version of the messages. Ends with different versions refuse each other, because proofs contain it."""
TOKEN = "LLMFOUNDRY_LITE_ISLANDS_TOKEN"
"""Environment variable with the token."""
MIN_TOKEN_LENGTH = 16
HEADER = struct.Struct("!I")
"""Precedes each message: its number of bytes."""
MAX_STRANGER_BYTES = 256
"""Limit for a message before its sender has proved the token."""
MAX_BYTES = 1 << 26
"""Limit for any message. A rank's hello has about 60 bytes for each tensor."""
HANDSHAKE_SECONDS = 5.0
CHALLENGE_BYTES = 32
"""Random bytes in a challenge."""
MIN_TIMEOUT_SECONDS = 1e-3
"""Shortest timeout of a socket that is near its deadline. A timeout of 0 would make the socket non-blocking."""

Message = dict[str, Any]


class BadMessageError(ConnectionError):
    """A malformed message. The receiver closes the connection and carries on."""


def find_token(environ: Mapping[str, str] = os.environ) -> bytes:
    """Return the token from the environment. Raises ConfigError if it is missing or too short.

    White space around it is removed, because files and secret stores add some.
    """
    token = environ.get(TOKEN, "").strip()
    if len(token) < MIN_TOKEN_LENGTH:
        given = f"{len(token)} characters given" if token else "not set"
        raise ConfigError(
            f"{TOKEN}: {given}, expected a secret of {MIN_TOKEN_LENGTH} characters or more, the same for the "
            f"coordinator and all islands; export {TOKEN}=$(openssl rand -hex 32)"
        )
    return os.fsencode(token)


def parse_address(text: str, key: str) -> tuple[str, int]:
    """Parse `host:port`. Raises ConfigError, whose message names `key`, the setting or option with the address.

    For example, `[::1]:7070` is ("::1", 7070).
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{key}: {text!r} given, expected host:port, such as 127.0.0.1:7070")
    return host.strip("[]"), int(port)


def format_address(address: tuple[str, int]) -> str:
    """Return `host:port`, as `parse_address` reads it. Addresses of IPv6 are in brackets."""
    host, port = address
    is_ipv6 = ":" in host
    return f"[{host}]:{port}" if is_ipv6 else f"{host}:{port}"


# ------------------------------------------------------------------------------------------------------------ framing


def pack(message: Message, limit: int = MAX_BYTES) -> bytes:
    """Return a message as it is sent: its size, and then JSON. NaN and infinity are written as Python's json does."""
    raw = json.dumps(message, separators=(",", ":"), allow_nan=True).encode()
    assert len(raw) <= limit, f"{message.get('kind')}: {len(raw)} bytes"
    return HEADER.pack(len(raw)) + raw


def size_of(header: bytes, limit: int = MAX_BYTES) -> int:
    """Return the number of bytes of the message that follows a header. Raises BadMessageError if it exceeds `limit`."""
    (size,) = HEADER.unpack(header)
    if size > limit:
        raise BadMessageError(f"a message of {size} bytes, at most {limit} are allowed")
    return size


def unpack(raw: bytes) -> Message:
    """Parse the JSON of a message. Raises BadMessageError for anything but a JSON object with a `kind`."""
    try:
        text = raw.decode()
        message = json.loads(text)
        may_have_surrogates = "\\u" in text
        if may_have_surrogates:  # a lone one cannot be printed or sent on: encoding it fails
            json.dumps(message, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadMessageError(f"not JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise BadMessageError("no JSON object with a kind")
    return message


def receive_exactly(connection: socket.socket, target: memoryview, end_by: float | None = None) -> None:
    """Fill `target` with bytes from a connection. Raises OSError if the other end closes it or times out.

    `end_by` is the monotonic time by which all of them have to be here, however slowly they come. Without it, the
    socket's own timeout applies to each part that arrives.
    """
    num_received = 0
    while num_received < len(target):
        if end_by is not None:
            connection.settimeout(max(end_by - time.monotonic(), MIN_TIMEOUT_SECONDS))
        count = connection.recv_into(target[num_received:])
        if not count:
            raise ConnectionError("closed by the other end")
        num_received += count


def receive(connection: socket.socket, limit: int = MAX_BYTES, end_by: float | None = None) -> Message:
    """Return the next message. `end_by` is a deadline, as for `receive_exactly`.

    Raises BadMessageError if the message is malformed or has more than `limit` bytes, and other OSErrors if the
    connection fails. BadMessageError is an OSError, too.
    """
    header = bytearray(HEADER.size)
    receive_exactly(connection, memoryview(header), end_by)
    raw = bytearray(size_of(bytes(header), limit))
    receive_exactly(connection, memoryview(raw), end_by)
    return unpack(bytes(raw))


# ---------------------------------------------------------------------------------------------------------- handshake


def compute_proof(token: bytes, role: str, server_challenge: str, client_challenge: str) -> str:
    """Return the proof that an end knows the token. `role` is `client` or `server`.

    The role is part of the proof, so that an end cannot be made to compute the proof that it waits for.
    """
    text = f"{PROTOCOL}/{role}/{server_challenge}/{client_challenge}"
    return hmac.new(token, text.encode(), hashlib.sha256).hexdigest()


def check_proof(token: bytes, role: str, server_challenge: str, client_challenge: str, message: Message) -> None:
    """Raise BadMessageError unless a message has the proof of the end with this role."""
    proof = message.get("proof")
    expected = compute_proof(token, role, server_challenge, client_challenge)
    # compare_digest takes the same time wherever the two differ, so that the time tells nothing about the proof.
    if not isinstance(proof, str) or not hmac.compare_digest(expected.encode(), proof.encode()):
        raise BadMessageError("the other end does not know the token")


def get_challenge(message: Message) -> str:
    """Return the challenge in a message. Raises BadMessageError if there is none."""
    challenge = message.get("challenge")
    if not isinstance(challenge, str):
        raise BadMessageError("no challenge")
    return challenge


def handshake_as_client(connection: socket.socket, token: bytes) -> None:
    """Run the handshake as the end that has connected, in HANDSHAKE_SECONDS. Raises OSError."""
    end_by = time.monotonic() + HANDSHAKE_SECONDS
    client_challenge = secrets.token_hex(CHALLENGE_BYTES)
    server_challenge = get_challenge(receive(connection, MAX_STRANGER_BYTES, end_by))
    proof = compute_proof(token, "client", server_challenge, client_challenge)
    connection.sendall(pack({"kind": "answer", "challenge": client_challenge, "proof": proof}, MAX_STRANGER_BYTES))
    reply = receive(connection, MAX_STRANGER_BYTES, end_by)
    check_proof(token, "server", server_challenge, client_challenge, reply)
    connection.settimeout(HANDSHAKE_SECONDS)  # `receive` has set what was left of the time


def handshake_as_server(connection: socket.socket, token: bytes, end_by: float | None = None) -> None:
    """Run the handshake as the end that has listened. Raises OSError.

    `end_by` is the monotonic time at which it fails, by default in HANDSHAKE_SECONDS.
    """
    end_by = end_by or time.monotonic() + HANDSHAKE_SECONDS
    server_challenge, message = make_challenge()
    connection.sendall(message)
    reply = receive(connection, MAX_STRANGER_BYTES, end_by)
    connection.sendall(answer_client(token, server_challenge, reply))


def make_challenge() -> tuple[str, bytes]:
    """Return a server's challenge, and the packed message with it."""
    server_challenge = secrets.token_hex(CHALLENGE_BYTES)
    return server_challenge, pack({"kind": "challenge", "challenge": server_challenge}, MAX_STRANGER_BYTES)


def answer_client(token: bytes, server_challenge: str, message: Message) -> bytes:
    """Check a client's answer to the server's challenge, and return the packed message with the server's proof.

    Raises BadMessageError if the client does not know the token.
    """
    client_challenge = get_challenge(message)
    check_proof(token, "client", server_challenge, client_challenge, message)
    proof = compute_proof(token, "server", server_challenge, client_challenge)
    return pack({"kind": "proof", "proof": proof}, MAX_STRANGER_BYTES)


def dial(address: tuple[str, int], token: bytes) -> socket.socket:
    """Connect to an address and run the handshake as the client. Raises OSError.

    Returns a connection with a timeout of HANDSHAKE_SECONDS, which the caller may change.
    """
    connection = socket.create_connection(address, timeout=HANDSHAKE_SECONDS)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake_as_client(connection, token)
    except ConnectionError as error:
        connection.close()
        raise BadMessageError(f"{error}; does the other end have the same {TOKEN}, and release?") from error
    except BaseException:
        connection.close()
        raise
    return connection


# ----------------------------------------------------------------------------------------------- checks of one value

MAX_COUNT = 1 << 62
"""Counts of a valid message are smaller, so that the sum of two fits in int64."""
MAX_INTEGER = 1 << 96
"""Sums of digests are smaller: a digest has 64 bits, and there are far fewer than 2^32 of them."""
MAX_ROWS = 1 << 31
MAX_RANKS = 1 << 20
MAX_STEPS = 1 << 31
MAX_DIMENSIONS = 16
MAX_DEPTH = 100
"""Limit of a state's nesting. The coordinator passes states on, and json fails beyond Python's recursion limit."""
WEIGHTS = (1e-6, 1e6)
"""Range of `islands.weight`."""

Check = Callable[[Any], bool]
"""A function that returns whether a decoded JSON value is valid."""
Fields = Mapping[str, Check]
"""Field of a message -> the check of its value. A missing field has the value None."""


def integer(least: int, most: int) -> Check:
    """Return a check for integers from `least` to `most`. A bool is not an integer here."""
    return lambda value: type(value) is int and least <= value <= most


def text(pattern: str) -> Check:
    """Return a check for strings that match a regular expression as a whole."""
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def list_of(is_item: Check, max_length: int | None = None) -> Check:
    """Return a check for lists. Tuples pass too, because messages that have not been sent yet contain them."""
    limit = MAX_COUNT if max_length is None else max_length
    return lambda value: isinstance(value, (list, tuple)) and len(value) <= limit and all(map(is_item, value))


def dict_of(is_item: Check) -> Check:
    """Return a check for objects with any keys."""
    return lambda value: isinstance(value, dict) and all(map(is_item, value.values()))


def record(fields: Fields) -> Check:
    """Return a check for objects with these fields. Other fields are ignored."""
    return lambda value: isinstance(value, dict) and all(is_valid(value.get(key)) for key, is_valid in fields.items())


def optional(check: Check) -> Check:
    """Return a check that also accepts null, and a missing field."""
    return lambda value: value is None or check(value)


def is_number(value: Any) -> bool:
    """Return whether a value is a number. It may be infinite or NaN, as a loss may be."""
    return type(value) is float or integer(-MAX_INTEGER, MAX_INTEGER)(value)


def is_flag(value: Any) -> bool:
    """Return whether a value is true or false."""
    return isinstance(value, bool)


def is_host(value: Any) -> bool:
    """Return whether a value is a numeric address. Host names may resolve differently elsewhere."""
    with suppress(ValueError):
        return isinstance(value, str) and bool(ip_address(value))
    return False


def is_address(value: Any) -> bool:
    """Return whether a value is [host, port]."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return False
    host, port = value
    return is_host(host) and integer(0, 65535)(port)


def is_box(value: Any) -> bool:
    """Return whether a value is [offset, lengths] of a part of a tensor, such as [[0, 4], [2, 8]]."""
    is_list_of_shapes = list_of(list_of(is_count, MAX_DIMENSIONS))
    if not is_list_of_shapes(value) or len(value) != 2:
        return False
    offset, lengths = value
    return len(offset) == len(lengths)


def is_tree(value: Any, depth: int = 0) -> bool:
    """Return whether a value at this depth of a message is nested no deeper than MAX_DEPTH."""
    children: Any = ()
    if isinstance(value, dict):
        children = value.values()
    elif isinstance(value, list):
        children = value
    return depth <= MAX_DEPTH and all(is_tree(child, depth + 1) for child in children)


def is_weight(value: Any) -> bool:
    """Return whether a value is allowed for `islands.weight`."""
    least, most = WEIGHTS
    return is_number(value) and least <= value <= most


is_count = integer(0, MAX_COUNT - 1)
is_text = text(r"(?s:.*)")
is_name = text(r"\w[\w.\-]{0,63}")
is_launch = text(r"\w{1,64}")
is_batch_count = integer(1, MAX_STEPS)

# --------------------------------------------------------------------------------------------- fields of each message

FACTS: Fields = {
    "island": is_name,
    "launch": is_launch,
    "size": integer(1, MAX_RANKS),
    "rank": integer(0, MAX_RANKS - 1),
    "data_ranks": integer(1, MAX_RANKS),
    "address": is_address,
    "boxes": dict_of(is_box),
    "machine": dict_of(lambda value: is_text(value) or is_number(value)),
    "fingerprints": dict_of(is_text),
    "batch": is_count,
    **dict.fromkeys(("rows", "microbatch", "unit"), integer(1, MAX_ROWS)),
    "weight": is_weight,
}
"""Fields of a rank's hello, which describes it and its island.

- `launch`: a random word, by which launches of an island are told apart
- `size`: number of the island's ranks
- `data_ranks`: number of shares into which the island divides its rows; one or more ranks train each share
- `unit`: each share is a multiple of it
- `boxes`: the parts of tensors that the rank holds
- `fingerprints`: settings that must be equal on all islands
- `batch`: number of batches in the checkpoint that the launch has restored
- `rows`: rows of a global batch
"""
REPORT: Fields = {
    **dict.fromkeys(("epoch", "batch", "bad", "weight", "samples", "tokens", "losses", "link", "again"), is_count),
    **dict.fromkeys(("ok", "leaving", "out_of_range", "asks_for_whole"), is_flag),
    **dict.fromkeys(("seconds", "loss", "norm"), is_number),
    "steps": is_batch_count,
    "digest": integer(-MAX_INTEGER, MAX_INTEGER),
    "weights": is_text,
}
"""Fields of an island's report after an exchange. Counts are of all batches that it covers, and of its own rows.

- `ok`: the exchange has succeeded
- `steps`: number of batches that it covers; one, except with local steps
- `bad`: number of microbatches whose loss is not finite
- `weight`: tokens or samples with a loss, which `loss` is the mean over; `losses`: tokens with a loss
- `link`: bytes per second that came from other islands; 0 if too few came to tell
- `again`: lost samples that the island has trained again
- `leaving`: the island leaves after the commit
- `asks_for_whole`: the island has to save, so the next exchange should be of all weights
- `weights`: digest of the weights before the batch; empty unless they are compared
"""
TENSORS: Fields = {"kinds": dict_of(list_of(is_text)), "optimizer": is_tree}
SCALARS: Fields = {"scalars": is_tree, "segments": lambda value: isinstance(value, list) and is_tree(value)}
STATE: Fields = {"epoch": is_count, "state": record({**TENSORS, **SCALARS})}
"""Fields of the state that a joining island receives through the coordinator. Its tensors come from rank to rank."""
VIEW: Fields = {
    "epoch": is_count,
    "batch": is_count,
    "members": dict_of(is_launch),
    "row_indices": dict_of(lambda value: list_of(integer(0, MAX_ROWS))(value) and len(value) == 2),
    "leader": is_name,
    "source": lambda value: value == "" or is_name(value),
    "joiners": list_of(is_name),
    "shares": dict_of(is_count),
    "is_whole": is_flag,
}
"""Fields of a view, see `member.View`. `row_indices` has [start, stop] for each island."""
COMMIT: Fields = {
    **dict.fromkeys(("epoch", "batch", "bad", "samples", "tokens", "losses", "again"), is_count),
    **dict.fromkeys(("loss", "loss_sum", "norm"), is_number),
    **dict.fromkeys(("out_of_range", "next_is_whole"), is_flag),
    "digest": integer(-MAX_INTEGER, MAX_INTEGER),
    "rows": dict_of(is_count),
    "drifted": list_of(is_name),
    "next": optional(record(VIEW)),
}
"""Fields of a commit: sums over the islands' reports, and what follows.

- `loss`: mean of the islands' losses by weight; `loss_sum`: their sum, for exact sums
- `rows`: island -> samples that it has trained
- `drifted`: islands whose weights differed from the leader's
- `next`: the view from the next batch on; null if it stays
- `next_is_whole`: with local steps, the next exchange is of all weights
"""
REASON: Fields = {"reason": is_text}

FROM_RANK: Mapping[str, Fields] = {
    "beat": {"phase": text(r"\w{1,32}"), "bytes": is_count},
    "hello": FACTS,
    "prepared": REPORT,
    "state": STATE,
    "leave": {"finished": optional(is_flag), "asks": optional(is_flag)},
}
"""Kinds of messages that a rank sends to the coordinator, and their fields. A `beat` is a heartbeat."""
FROM_COORDINATOR: Mapping[str, Fields] = {
    "beat": {},
    "member": {
        "name": is_name,
        "launch": is_launch,
        **{key: FACTS[key] for key in ("machine", "size", "rank", "address", "boxes", "data_ranks")},
    },
    "view": VIEW,
    "commit": COMMIT,
    "state": STATE,
    "left": {"epoch": is_count, "is_last": is_flag},
    **dict.fromkeys(("waits", "refused", "evicted"), REASON),
}
"""Kinds of messages that the coordinator sends to a rank, and their fields. `member` describes a rank of an island."""
FROM_PEER: Mapping[str, Fields] = {"peer": {"epoch": is_count, "island": is_name, "rank": integer(0, MAX_RANKS - 1)}}
"""The message by which a rank of another island says who it is."""


def check_message(message: Message, kinds: Mapping[str, Fields]) -> None:
    """Check that a message is of one of these kinds, and each field's type, range and size. Raises BadMessageError.

    `kinds` is FROM_RANK, FROM_COORDINATOR, FROM_PEER, or a part of one.
    """
    kind = message["kind"]
    if kind not in kinds:
        raise BadMessageError(f"unknown kind {kind[:40]!r}")
    for key, is_valid in kinds[kind].items():
        value = message.get(key)
        if not is_valid(value):
            raise BadMessageError(f"{kind}: {key} is {str(value)[:40]!r}")
    if kind == "hello" and not message["rank"] < message["size"] >= message["data_ranks"]:
        values = ", ".join(f"{key} {message[key]}" for key in ("rank", "size", "data_ranks"))
        raise BadMessageError(f"hello: {values}; expected rank < size, data_ranks <= size")
