"""Exchange of encoded changes of weights, from each island to all others. See `encoding`."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from llmfoundry_lite.islands.boxes import Boxes, Tensors
from llmfoundry_lite.islands.encoding import Encoded, pack, packed_bytes, unpack
from llmfoundry_lite.islands.exchange import Exchange, Peer
from llmfoundry_lite.islands.messages import BadMessageError


class Swapped(NamedTuple):
    weights: dict[str, float]
    """Weights of the other islands' changes."""
    tensors: dict[str, Tensors]
    """Island -> name -> that island's change of this rank's piece, in fp32."""


def swap_changes(
    exchange: Exchange, pieces: Boxes, encoded: Mapping[str, Encoded], dtype: str, label: int, weight: float
) -> Swapped:
    """Send pieces to all other islands, and receive theirs. Both ends need the same `label`. Raises OSError."""
    sending = {peer: pack(pieces, encoded, cuts).numpy() for peer, cuts in exchange.cuts.items()}
    arriving = {peer: torch.empty(packed_bytes(cuts, dtype), dtype=torch.uint8) for peer, cuts in exchange.cuts.items()}
    weights: dict[Peer, float] = {}

    def send(peer: Peer) -> None:
        exchange.send(peer, sending[peer], label, weight=weight)

    def receive(peer: Peer) -> None:
        *heading, weights[peer] = exchange.receive_heading(peer)
        if heading != [label, 0, arriving[peer].numel()]:
            raise BadMessageError("the other end sends something else")
        exchange.receive_into(peer, arriving[peer].numpy())

    jobs = [(run, peer) for peer in exchange.cuts for run in (send, receive)]
    exchange.transfer(jobs, lambda job: job[0](job[1]))
    swapped = Swapped({peer.island: weights[peer] for peer in arriving}, {})
    for peer, raw in arriving.items():
        unpack(raw, pieces, exchange.cuts[peer], dtype, swapped.tensors.setdefault(peer.island, {}))
    return swapped
