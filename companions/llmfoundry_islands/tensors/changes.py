"""Exchange of encoded changes of weights, from each island to all others. See `encoding`."""

import threading
import time
from typing import NamedTuple

import torch

from llmfoundry_islands.coordination.messages import BadMessageError
from llmfoundry_islands.tensors.boxes import Boxes, Tensors
from llmfoundry_islands.tensors.encoding import Encoded, pack, packed_bytes, unpack
from llmfoundry_islands.tensors.exchange import Exchange, Peer


class Swapped(NamedTuple):
    weights: dict[str, list[float]]
    """Weights of the other islands' changes."""
    tensors: dict[str, Tensors]
    """Island -> name -> that island's change of this rank's piece, in fp32."""


class Swap:
    """Sends pieces to all other islands and receives theirs, while this rank may compute."""

    def __init__(
        self,
        exchange: Exchange,
        pieces: Boxes,
        encoded: dict[str, Encoded],
        dtype: str,
        label: int,
        weights: list[float],
    ):
        """Pack, and begin. Both ends need the same names, `dtype`, `label` and number of weights."""
        self.exchange, self.pieces, self.dtype, self.label = exchange, pieces, dtype, label
        self.cuts = exchange.cuts_of(encoded)
        self.seconds = 0.0
        """From the beginning until all has arrived."""
        own = torch.tensor(weights, dtype=torch.float64).view(torch.uint8)
        self._weight_bytes = own.numel()
        self._sending = {peer: torch.cat([own, pack(pieces, encoded, cuts)]) for peer, cuts in self.cuts.items()}
        sizes = {peer: own.numel() + packed_bytes(cuts, dtype) for peer, cuts in self.cuts.items()}
        self._arriving = {peer: torch.empty(size, dtype=torch.uint8) for peer, size in sizes.items()}
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="islands-changes", daemon=True)
        self._thread.start()

    def wait(self) -> bool:
        """Wait for the end. Returns False if a link or another island has failed."""
        self._thread.join()
        if self._error is not None and not isinstance(self._error, OSError):
            raise self._error
        return self._error is None

    def unpack(self) -> Swapped:
        """Return what has arrived, after `wait`."""
        swapped = Swapped({}, {})
        for peer, arrived in self._arriving.items():
            weights, raw = arrived[: self._weight_bytes], arrived[self._weight_bytes :]
            swapped.weights[peer.island] = weights.view(torch.float64).tolist()
            unpack(raw, self.pieces, self.cuts[peer], self.dtype, swapped.tensors.setdefault(peer.island, {}))
        return swapped

    # --------------------------------------------------------------------------------------------------- threads

    def _run(self) -> None:
        began_at = time.monotonic()
        jobs = [(run, peer) for peer in self.cuts for run in (self._send, self._receive)]
        try:
            self.exchange.transfer(jobs, lambda job: job[0](job[1]))
        except Exception as error:
            self._error = error
        self.seconds = time.monotonic() - began_at

    def _send(self, peer: Peer) -> None:
        self.exchange.send(peer, self._sending[peer].numpy(), self.label)

    def _receive(self, peer: Peer) -> None:
        label, _, size, _ = self.exchange.receive_heading(peer)
        if (label, size) != (self.label, self._arriving[peer].numel()):
            raise BadMessageError("the other end sends something else")
        self.exchange.receive_into(peer, self._arriving[peer].numpy())
