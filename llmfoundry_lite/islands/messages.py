"""What travels between islands: JSON behind its length, on connections whose two ends have proved a shared token.

Owns framing, limits and the handshake. Leaves what messages say to `coordinator` and `member`, and tensors to
`exchange`. No torch.

The token itself is never sent. Each end sends a random challenge and answers the other's with HMAC-SHA256 over its
role and both challenges (a mutual version of RFC 2195). Nothing that follows is encrypted or signed: on a network that
is not yours, run it through WireGuard or ssh.
"""

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
from collections.abc import Mapping
from typing import Any

from llmfoundry_lite.errors import ConfigError

PROTOCOL = "islands/2"
"""What messages say; another number for others."""
TOKEN = "LLMFOUNDRY_LITE_ISLANDS_TOKEN"
SHORTEST_TOKEN = 16
HEADER = struct.Struct("!I")
MAX_STRANGER_BYTES = 256
"""Of a message before its sender has proved the token."""
MAX_BYTES = 1 << 26
"""Of any message: the boxes of a rank are some 60 bytes for each tensor."""
HANDSHAKE_SECONDS = 5.0

Message = dict[str, Any]


class BadMessageError(ConnectionError):
    """Not a message of ours: the connection is closed, and nothing else happens."""


def find_token(environ: Mapping[str, str] = os.environ) -> bytes:
    """Without white space at its ends, which a file or a secret store adds. Raises ConfigError."""
    token = environ.get(TOKEN, "").strip()
    if len(token) < SHORTEST_TOKEN:
        given = f"{len(token)} characters given" if token else "not set"
        raise ConfigError(
            f"{TOKEN}: {given}, expected a secret of {SHORTEST_TOKEN} characters or more, the same for the coordinator "
            f"and all islands; export {TOKEN}=$(openssl rand -hex 32)"
        )
    return os.fsencode(token)


def parse_address(text: str, key: str) -> tuple[str, int]:
    """`host:port`. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{key}: {text!r} given, expected host:port, such as 127.0.0.1:7070")
    return host.strip("[]"), int(port)


def format_address(address: tuple[str, int]) -> str:
    """`host:port`, as `parse_address` reads it."""
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
    """Raises BadMessageError for anything but a JSON object that says its kind."""
    try:
        text = raw.decode()
        message = json.loads(text)
        if "\\u" in text:  # half of a pair is text that cannot be printed or sent on
            json.dumps(message, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadMessageError(f"not JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise BadMessageError("no JSON object with a kind")
    return message


def receive_exactly(connection: socket.socket, target: memoryview) -> None:
    """Fill `target`. Raises OSError when the other end is gone, or silent for the connection's timeout."""
    done = 0
    while done < len(target):
        count = connection.recv_into(target[done:])
        if not count:
            raise ConnectionError("closed by the other end")
        done += count


def receive(connection: socket.socket, limit: int = MAX_BYTES) -> Message:
    """The next message. Raises OSError, of which BadMessageError is one."""
    header = bytearray(HEADER.size)
    receive_exactly(connection, memoryview(header))
    raw = bytearray(size_of(bytes(header), limit))
    receive_exactly(connection, memoryview(raw))
    return unpack(bytes(raw))


# ---------------------------------------------------------------------------------------------------------- handshake


def challenge() -> str:
    return secrets.token_hex(32)


def prove(token: bytes, role: str, first: str, second: str) -> str:
    """`role`: client or server, so that neither can be made to answer its own question. Who speaks another protocol
    proves nothing either."""
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
    """The end that has dialled. Raises OSError."""
    connection.settimeout(HANDSHAKE_SECONDS)
    mine = challenge()
    theirs = text_of(receive(connection, MAX_STRANGER_BYTES), "challenge")
    answer = {"kind": "answer", "challenge": mine, "proof": prove(token, "client", theirs, mine)}
    connection.sendall(pack(answer, MAX_STRANGER_BYTES))
    check_proof(token, "server", theirs, mine, receive(connection, MAX_STRANGER_BYTES))


def welcome(connection: socket.socket, token: bytes) -> None:
    """The end that listens. Raises OSError."""
    connection.settimeout(HANDSHAKE_SECONDS)
    mine = challenge()
    connection.sendall(pack({"kind": "challenge", "challenge": mine}, MAX_STRANGER_BYTES))
    answer = receive(connection, MAX_STRANGER_BYTES)
    theirs = text_of(answer, "challenge")
    check_proof(token, "client", mine, theirs, answer)
    connection.sendall(pack({"kind": "proof", "proof": prove(token, "server", mine, theirs)}, MAX_STRANGER_BYTES))


def dial(address: tuple[str, int], token: bytes, timeout: float = HANDSHAKE_SECONDS) -> socket.socket:
    """Raises OSError, also when the other end does not know the token."""
    connection = socket.create_connection(address, timeout=timeout)
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
