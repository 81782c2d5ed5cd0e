"""The exchange of encoded weight changes, from each island to all others, in a background thread.

`ChangeExchange` sends what `encoding.py` has encoded through the connections of `exchange.py`.
`training.outer_weights` computes the changes, and their mean.
"""

import threading
import time
from typing import NamedTuple

import torch

from llmfoundry_islands.coordination.messages import BadMessageError
from llmfoundry_islands.tensors.boxes import Boxes, Tensors
from llmfoundry_islands.tensors.encoding import Encoded, pack, packed_bytes, unpack
from llmfoundry_islands.tensors.exchange import Exchange, Peer


class ReceivedChanges(NamedTuple):
    """The changes of the other islands, decoded."""

    weights: dict[str, list[float]]
    """Island -> the weights of its changes in the mean, one for each fragment that is exchanged."""
    tensors: dict[str, Tensors]
    """Island -> key -> that island's change of this rank's piece, in fp32."""


class ChangeExchange:
    """Sends this rank's encoded pieces to all other islands and receives theirs, while this rank may compute.

    Creating it begins the exchange. Call `wait`, and if that returns True, `unpack`.
    """

    def __init__(
        self,
        exchange: Exchange,
        pieces: Boxes,
        encoded: dict[str, Encoded],
        dtype: str,
        label: int,
        weights: list[float],
    ):
        """Pack the overlaps with every peer, and begin to send and receive.

        `encoded` has the pieces to exchange, whose boxes are in `pieces`. A message has the `weights`, in float64, and
        then the packed overlaps. Both ends must pass the same keys, `dtype`, `label` and number of weights.
        """
        self.exchange = exchange
        self.pieces = pieces
        self.dtype = dtype
        self.label = label
        self.overlaps = exchange.overlaps_of(encoded)
        self.seconds = 0.0
        """Time from the beginning until everything has arrived. Set at the end."""
        weight_bytes = torch.tensor(weights, dtype=torch.float64).view(torch.uint8)
        self._num_weight_bytes = weight_bytes.numel()
        self._outgoing: dict[Peer, torch.Tensor] = {}
        self._incoming: dict[Peer, torch.Tensor] = {}
        for peer, overlaps in self.overlaps.items():
            self._outgoing[peer] = torch.cat([weight_bytes, pack(pieces, encoded, overlaps)])
            num_bytes = self._num_weight_bytes + packed_bytes(overlaps, dtype)
            self._incoming[peer] = torch.empty(num_bytes, dtype=torch.uint8)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="islands-changes", daemon=True)
        self._thread.start()

    def wait(self) -> bool:
        """Wait for the end of the exchange. Returns False if a link or another island has failed."""
        self._thread.join()
        if self._error is None:
            return True
        if isinstance(self._error, OSError):
            return False
        raise self._error

    def unpack(self) -> ReceivedChanges:
        """Decode what has arrived. `wait` must have returned True."""
        received = ReceivedChanges({}, {})
        for peer, message in self._incoming.items():
            weight_bytes = message[: self._num_weight_bytes]
            packed = message[self._num_weight_bytes :]
            received.weights[peer.island] = weight_bytes.view(torch.float64).tolist()
            # Several ranks of an island may each have a part of this rank's pieces.
            tensors = received.tensors.setdefault(peer.island, {})
            unpack(packed, self.pieces, self.overlaps[peer], self.dtype, tensors)
        return received

    # ----------------------------------------------------------------------------------------- background threads

    def _run(self) -> None:
        """Send to and receive from all peers in parallel. Sets `seconds`, and `_error` if that fails."""
        began_at = time.monotonic()
        jobs = []
        for peer in self.overlaps:
            jobs.append((self._send, peer))
            jobs.append((self._receive, peer))
        try:
            self.exchange.transfer(jobs, lambda job: job[0](job[1]))
        except Exception as error:
            self._error = error
        self.seconds = time.monotonic() - began_at

    def _send(self, peer: Peer) -> None:
        self.exchange.send(peer, self._outgoing[peer].numpy(), self.label)

    def _receive(self, peer: Peer) -> None:
        heading = self.exchange.receive_heading(peer)
        incoming = self._incoming[peer]
        if heading.label != self.label or heading.num_bytes != incoming.numel():
            raise BadMessageError("the other end sends something else")
        self.exchange.receive_into(peer, incoming.numpy())
