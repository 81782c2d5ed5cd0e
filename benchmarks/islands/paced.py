"""A rank of an island whose batches take a tenth of a second longer, as a larger model's would. See `faults`.

Faults then hit computing and exchanges alike, and a run of some minutes has few enough batches to be trained again by
single worlds. A launch without islands has the time it has.
"""

import importlib
import time
from collections.abc import Sequence
from typing import Any

SECONDS = 0.1


def main(arguments: Sequence[str]) -> None:
    from llmfoundry_islands.training.islands import Islands
    from llmfoundry_islands.training.local_islands import LocalIslands

    def delay(exchange: Any) -> Any:
        def exchange_later(*given: Any) -> Any:
            time.sleep(SECONDS)
            return exchange(*given)

        return exchange_later

    for kind in (Islands, LocalIslands):
        kind.exchange_gradient = delay(kind.exchange_gradient)  # type: ignore[method-assign]
    importlib.import_module("llmfoundry_lite.launch_train").main(arguments)  # as a launcher finds it
