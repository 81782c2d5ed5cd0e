"""What ranks may say: fields, their kinds and their ranges. One rank's words reach all islands, and must not stop them.

Whoever knows the token may speak; here is what can be meant. No state, no sockets.
"""

import re
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from llmfoundry_lite.islands.messages import BadMessageError, Message

LARGEST = 1 << 70
"""Above any number that a rank can mean, digests included."""
WEIGHTS = (1e-6, 1e6)
"""As `config.check` allows them."""

FACTS: dict[str, type | tuple[type, ...]] = {
    "island": str,
    "launch": str,
    "address": list,
    "boxes": dict,
    "fingerprints": dict,
    "machine": dict,
    "rank": int,
    "size": int,
    "batch": int,
    "rows": int,
    "microbatch": int,
    "weight": (int, float),
}
"""What a rank says of itself and its island when it comes."""
REPORT: dict[str, type | tuple[type, ...]] = {
    "epoch": int,
    "batch": int,
    "ok": bool,
    "leaving": bool,
    "bad": int,
    "seconds": (int, float),
    "weight": int,
    "samples": int,
    "tokens": int,
    "losses": int,
    "digest": int,
    "loss": (int, float),
    "norm": (int, float),
    "weights": str,
}
"""What an island says when it has, or has not, a batch's whole gradient."""


def check_fields(message: Message, fields: dict[str, type | tuple[type, ...]]) -> None:
    """Raises BadMessageError."""
    for key, kind in fields.items():
        value = message.get(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise BadMessageError(f"{message['kind']}: {key} is {str(value)[:40]!r}")
        if isinstance(value, int) and abs(value) >= LARGEST:
            raise BadMessageError(f"{message['kind']}: {key} has {value.bit_length()} bits")


def check_hello(message: Message) -> None:
    """Raises BadMessageError: what one rank says reaches all islands, and must not stop them."""
    check_fields(message, FACTS)
    rank, size, address = message["rank"], message["size"], message["address"]
    is_sound = {
        "island": re.fullmatch(r"\w[\w.\-]{0,63}", message["island"]),
        "launch": re.fullmatch(r"\w{1,64}", message["launch"]),
        "rank": 0 <= rank < size,
        "rows": message["rows"] >= 1,
        "microbatch": message["microbatch"] >= 1,
        "batch": message["batch"] >= 0,
        "weight": WEIGHTS[0] <= message["weight"] <= WEIGHTS[1],
        "address": len(address) == 2 and _is_host(address[0]) and _is_count(address[1]) and address[1] < 1 << 16,
        "boxes": all(_is_box(box) for box in message["boxes"].values()),
    }
    for key, holds in is_sound.items():
        if not holds:
            raise BadMessageError(f"hello of rank {rank} of {size}: {key} is {str(message[key])[:40]!r}")


def _is_host(value: Any) -> bool:
    """The number that a name stands for: others may have another name server."""
    with suppress(ValueError):
        return isinstance(value, str) and bool(ip_address(value))
    return False


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def _is_box(value: Any) -> bool:
    """Offset and lengths of a part of a tensor."""
    if not (isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(v, (list, tuple)) for v in value)):
        return False
    return len(value[0]) == len(value[1]) and all(_is_count(number) for part in value for number in part)
