"""A rank of an island whose batches take a tenth of a second longer, as those of a larger model would. See `faults.py`.

With longer batches, faults hit computation and exchanges alike, and a run of some minutes has few enough batches to be
trained again without islands. A launch without islands is not slowed.
"""

import importlib
import time
from collections.abc import Sequence
from typing import Any

SECONDS = 0.1
"""Added to each batch."""


def main(arguments: Sequence[str]) -> None:
    """Slow the exchange of gradients, then run the usual program of a rank with these arguments."""
    from llmfoundry_islands.training.islands import Islands
    from llmfoundry_islands.training.local_islands import LocalIslands

    def delay(exchange: Any) -> Any:
        """Return the method with a pause before it."""

        def exchange_later(*args: Any) -> Any:
            """Wait, then exchange."""
            time.sleep(SECONDS)
            return exchange(*args)

        return exchange_later

    for kind in (Islands, LocalIslands):
        kind.exchange_gradient = delay(kind.exchange_gradient)  # type: ignore[method-assign]
    importlib.import_module("llmfoundry_lite.launch_train").main(arguments)  # as a launcher finds it
