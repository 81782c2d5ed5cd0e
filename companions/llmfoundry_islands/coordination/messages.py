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
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from llmfoundry_lite.errors import ConfigError

PROTOCOL = "islands/7"
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
        said = raw.decode()
        message = json.loads(said)
        if "\\u" in said:  # a lone surrogate cannot be printed or sent on
            json.dumps(message, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadMessageError(f"not JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise BadMessageError("no JSON object with a kind")
    return message


def receive_exactly(connection: socket.socket, target: memoryview, end_by: float | None = None) -> None:
    """Fill `target`. Raises OSError if the other end closes or times out.

    `end_by`: monotonic time at which all of it has to be here; a timeout of the socket is for each part that comes.
    """
    done = 0
    while done < len(target):
        if end_by is not None:
            connection.settimeout(max(end_by - time.monotonic(), 1e-3))
        count = connection.recv_into(target[done:])
        if not count:
            raise ConnectionError("closed by the other end")
        done += count


def receive(connection: socket.socket, limit: int = MAX_BYTES, end_by: float | None = None) -> Message:
    """Return the next message. Raises OSError, of which BadMessageError is one."""
    header = bytearray(HEADER.size)
    receive_exactly(connection, memoryview(header), end_by)
    raw = bytearray(size_of(bytes(header), limit))
    receive_exactly(connection, memoryview(raw), end_by)
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
    """Run the handshake as the client, in HANDSHAKE_SECONDS. Raises OSError."""
    end_by = time.monotonic() + HANDSHAKE_SECONDS
    mine = secrets.token_hex(32)
    theirs = text_of(receive(connection, MAX_STRANGER_BYTES, end_by), "challenge")
    proof = prove(token, "client", theirs, mine)
    connection.sendall(pack({"kind": "answer", "challenge": mine, "proof": proof}, MAX_STRANGER_BYTES))
    check_proof(token, "server", theirs, mine, receive(connection, MAX_STRANGER_BYTES, end_by))
    connection.settimeout(HANDSHAKE_SECONDS)


def welcome(connection: socket.socket, token: bytes, end_by: float | None = None) -> None:
    """Run the handshake as the server, until `end_by`, by default in HANDSHAKE_SECONDS. Raises OSError."""
    end_by = end_by or time.monotonic() + HANDSHAKE_SECONDS
    mine, asking = challenge()
    connection.sendall(asking)
    connection.sendall(answer(token, mine, receive(connection, MAX_STRANGER_BYTES, end_by)))


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

MAX_COUNT = 1 << 62
"""Counts of a valid message are smaller: the sum of two fits in int64."""
MAX_INTEGER = 1 << 96
"""Sums of digests are smaller."""
MAX_ROWS = 1 << 31
MAX_RANKS = 1 << 20
MAX_STEPS = 1 << 31
MAX_DIMENSIONS = 16
MAX_DEPTH = 100
"""Limit of a state's nesting. States are passed on as they came, and json fails beyond Python's recursion limit."""
WEIGHTS = (1e-6, 1e6)
"""Range of `islands.weight`."""

Check = Callable[[Any], bool]
Fields = Mapping[str, Check]


def integer(least: int, most: int) -> Check:
    return lambda value: type(value) is int and least <= value <= most


def text(pattern: str) -> Check:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def list_of(item: Check, most: int | None = None) -> Check:
    """Return a check for lists of `item`. Tuples pass too: messages that have not been sent yet contain them."""
    return lambda value: (
        isinstance(value, (list, tuple)) and (most is None or len(value) <= most) and all(map(item, value))
    )


def dict_of(item: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(item, value.values()))


def record(fields: Fields) -> Check:
    return lambda value: isinstance(value, dict) and all(holds(value.get(key)) for key, holds in fields.items())


def optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def is_number(value: Any) -> bool:
    """Return whether it is a number; a loss may be infinite or NaN."""
    return type(value) is float or integer(-MAX_INTEGER, MAX_INTEGER)(value)


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def is_host(value: Any) -> bool:
    """Return whether it is a numeric address. Host names may resolve differently elsewhere."""
    with suppress(ValueError):
        return isinstance(value, str) and bool(ip_address(value))
    return False


def is_address(value: Any) -> bool:
    return list_of(lambda part: True)(value) and len(value) == 2 and is_host(value[0]) and integer(0, 65535)(value[1])


def is_box(value: Any) -> bool:
    """Return whether it is (offset, lengths) of a part of a tensor."""
    is_pair = list_of(list_of(is_count, MAX_DIMENSIONS))(value) and len(value) == 2
    return is_pair and len(value[0]) == len(value[1])


def is_tree(value: Any, depth: int = 0) -> bool:
    """Return whether it is nested no deeper than MAX_DEPTH."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth <= MAX_DEPTH and all(is_tree(one, depth + 1) for one in inner)


is_count = integer(0, MAX_COUNT - 1)
is_text = text(r"(?s:.*)")
is_name = text(r"\w[\w.\-]{0,63}")
is_launch = text(r"\w{1,64}")
is_batch_count = integer(1, MAX_STEPS)

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
    "weight": lambda value: is_number(value) and WEIGHTS[0] <= value <= WEIGHTS[1],
}
"""Fields of a rank's hello. `data_ranks`: the island's shares of its rows, each for one or more of its `size` ranks.
`unit`: each share is a multiple of it."""
REPORT: Fields = {
    **dict.fromkeys(("epoch", "batch", "bad", "weight", "samples", "tokens", "losses", "link", "again"), is_count),
    **dict.fromkeys(("ok", "leaving", "out_of_range", "asks_for_whole"), is_flag),
    **dict.fromkeys(("seconds", "loss", "norm"), is_number),
    "steps": is_batch_count,
    "digest": integer(-MAX_INTEGER, MAX_INTEGER),
    "weights": is_text,
}
"""Fields of an island's report after an exchange. `ok`: it succeeded. `steps`: batches that it covers, one of a batch's
gradient; counts are of all of them. `link`: bytes a second that came from other islands; 0 if too few came to tell.
`again`: lost samples that it trained. `asks_for_whole`: it has to save, so the next exchange should be of all
weights."""
TENSORS: Fields = {"kinds": dict_of(list_of(is_text)), "optimizer": is_tree}
OTHERS: Fields = {"scalars": is_tree, "segments": lambda value: isinstance(value, list) and is_tree(value)}
STATE: Fields = {"epoch": is_count, "state": record({**TENSORS, **OTHERS})}
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
COMMIT: Fields = {
    **dict.fromkeys(("epoch", "batch", "bad", "samples", "tokens", "losses", "again"), is_count),
    **dict.fromkeys(("loss", "loss_sum", "norm"), is_number),
    **dict.fromkeys(("out_of_range", "next_is_whole"), is_flag),
    "digest": integer(-MAX_INTEGER, MAX_INTEGER),
    "rows": dict_of(is_count),
    "drifted": list_of(is_name),
    "next": optional(record(VIEW)),
}
REASON: Fields = {"reason": is_text}

FROM_RANK: Mapping[str, Fields] = {
    "beat": {"phase": text(r"\w{1,32}"), "bytes": is_count},
    "hello": FACTS,
    "prepared": REPORT,
    "state": STATE,
    "leave": {"finished": optional(is_flag), "asks": optional(is_flag)},
}
"""Kinds of messages that a rank sends to the coordinator, and their fields."""
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
FROM_PEER: Mapping[str, Fields] = {"peer": {"epoch": is_count, "island": is_name, "rank": integer(0, MAX_RANKS - 1)}}


def check_message(message: Message, kinds: Mapping[str, Fields]) -> None:
    """Check that a message is of one of these kinds, and each field's type, range and size. Raises BadMessageError."""
    kind = message["kind"]
    if kind not in kinds:
        raise BadMessageError(f"unknown kind {kind[:40]!r}")
    for key, holds in kinds[kind].items():
        if not holds(message.get(key)):
            raise BadMessageError(f"{kind}: {key} is {str(message.get(key))[:40]!r}")
    if kind == "hello" and not message["rank"] < message["size"] >= message["data_ranks"]:
        places = ", ".join(f"{key} {message[key]}" for key in ("rank", "size", "data_ranks"))
        raise BadMessageError(f"hello: {places}; expected rank < size, data_ranks <= size")
