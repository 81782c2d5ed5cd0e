"""Rates that kernels and links reach: every constant of the planner that is fitted or measured. No torch.

`step.py` and `network.py` compute a step's time with these and with datasheets (`hardware.py`, `network.NODES`).
`python -m benchmarks published` fits those that say so to half of LLM Foundry's published rows, and holds them against
the other half and against what papers published (docs/measurements/published.md). `calibrate.py` fixes some of them by
a user's own measurements.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmfoundry_lite.hardware import Accelerator

# ---------------------------------------------------------------------------------------------------- of any device

MEMORY_SHARE = 0.85
"""Share of the memory's bandwidth that kernels reach."""
STREAM_BYTES = 214
"""Bytes read and written for each token and number of the residual stream in one block, forward and backward, by norms,
activation functions, residual sums and copies between them, in 16 bits. Fitted."""
LOGIT_BYTES = 45
"""Bytes read and written for each logit by the loss, forward and backward. Fitted."""
COMPILED_SHARE = 0.65
"""Share of these two that compiled blocks and losses still move: they run chains of such steps as one kernel. Fitted to
MPT-1B and MPT-125M on one H100 with torch 2.11, 2026-11-27: alone 1B asks for 0.70, or 0.86 by
a second, traced run, and 125M for 0.60."""
SCORE_TRANSFERS, SCORE_GRADIENT_TRANSFERS = 4, 7
"""Times that plain attention reads or writes a score, forward and backward, with a mask and softmax in one kernel: the
fewest. Forward: a product writes, softmax reads and writes, a product reads. Backward: two products read the weights or
write their gradient, softmax reads both and writes the scores' gradient, two products read that. Counted."""
OPTIMIZER_BYTES = 40
"""Bytes read and written for each parameter by AdamW and by clipping its gradient."""
READ_TOKENS_PER_SECOND = 7e6
"""Rate of one process of the loader, from local shards: 8,000 samples of 2,048 took 2.3 s of an AMD EPYC core,
2026-11-22."""
OVERLAP_COST = 0.77
"""Share of a hidden exchange's time that shows: it takes units and bandwidth from the products beside it. Fitted."""

# ---------------------------------------------------------------------------------------------------------- of links

LINK_SHARE = 0.8
"""Share of a link's bandwidth that collectives reach: nccl-tests measures 360 to 370 of NVLink 4's 450 GB/s."""
IN_NODE_LATENCY_SECONDS = 3e-6
ACROSS_LATENCY_SECONDS = 10e-6
"""For each step of a ring. Order of magnitude, from nccl-tests with small messages."""
JITTER = 0.003
"""Share of a step that each doubling of the nodes adds: stragglers, and links that others use too. Fitted,
loosely: without it the rows' mean error grows by 2 %, with twice as much by 4 %. `--fit` ends at 0.0016."""
MI250_JITTER, SLINGSHOT_JITTER = 0.0055, 0.028
"""The same of MosaicML's MI250 cluster and of Frontier, each fitted to one published loss."""

# --------------------------------------------------------------------------------------------------- of accelerators


KNOWN_SPREAD = 1.07
"""Nine of ten published rows of an A100 that no constant was fitted to come within this factor: the least that a
calibration by fewer models may promise of another."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Residuals:
    """Errors of the steps that a calibration was fitted to, in logarithms."""

    num_steps: int
    freedom: int
    """Steps beyond the number of fitted constants."""
    spread: float
    """Standard deviation; 0 without freedom."""
    mean_doublings: float
    """Doublings of a node, the steps' mean."""
    squared_doublings: float
    """Sum of squares around that mean; 0: one count of nodes, so that the jitter was not fitted."""

    def interval(self, doublings: float, jitter: float) -> tuple[float, float]:
        """Return multiples of a rate predicted for so many doublings, for nine cases of ten.

        The interval of a prediction by a regression. A jitter without freedom may be any known cluster's.
        """
        beyond = doublings - self.mean_doublings
        by_slope = beyond**2 / self.squared_doublings if self.squared_doublings else 0.0
        # Student's t for 0.95, by Cornish and Fisher's expansion: 3 % too small for 3 degrees of freedom.
        student = 1.645 + 1.524 / self.freedom + 1.42 / self.freedom**2 if self.freedom > 0 else 0.0
        half = max(student * self.spread * math.sqrt(1 + 1 / self.num_steps + by_slope), math.log(KNOWN_SPREAD))
        low, high = math.exp(-half), math.exp(half)
        if beyond > 0 and not (self.squared_doublings and self.freedom > 0):
            now = 1 + jitter * beyond
            low *= now / (1 + max(JITTER, SLINGSHOT_JITTER, jitter) * beyond)
            high *= now / (1 + min(JITTER, SLINGSHOT_JITTER, jitter) * beyond)
        return low, high


@dataclass(kw_only=True, slots=True, frozen=True)
class Efficiency:
    """Shares of the peak that kernels reach, and how far predictions with them have been off."""

    products: float
    attention: float
    source: str
    era: int | None = None
    """Year of the software and kernels that the rates were measured with; None: the user measured or gave them."""
    interval: tuple[float, float] = (0.75, 1.35)
    """Rates come between these multiples of the predicted one, in nine cases of ten. By default as far as known
    accelerators' shares of the peak lie apart."""
    num_measured_devices: int | None = None
    """The interval holds for at most so many devices; on more it begins at MANY_DEVICES. None: for any number."""
    residuals: Residuals | None = None
    """Errors of a calibration by steps, which then make the interval."""

    @property
    def origin(self) -> str:
        """Era and source."""
        return self.source if self.era is None else f"software of {self.era}: {self.source}"


_FITTED = "fitted to half of LLM Foundry's published rows of MPT"
_A100 = Efficiency(products=0.754, attention=0.31, era=2023, source=_FITTED, interval=(0.93, 1.07))
_H100 = Efficiency(products=0.645, attention=0.178, era=2023, source=_FITTED, interval=(0.94, 1.06))
PCIE_SHARE = 0.83
"""Product rate of an A100's PCIe card over the module's (arXiv 2408.14158): it has 250 W instead of 400."""


def _as_card(module: Efficiency, source: str) -> Efficiency:
    products, attention = PCIE_SHARE * module.products, PCIE_SHARE * module.attention
    return Efficiency(products=products, attention=attention, era=module.era, source=source)


PUBLISHED: Mapping[str, Efficiency] = {
    "A100": _A100,
    "A100-PCIe": _as_card(_A100, "the module's; 0.83 of its products, arXiv 2408.14158"),
    "H100": _H100,
    "H100-PCIe": _as_card(_H100, "the module's; of its products as much as an A100's card"),
    "MI250": Efficiency(products=0.525, attention=0.25, era=2023, source="fitted to MPT-7B on 4 MI250, MosaicML"),
    "MI250X": Efficiency(products=0.672, attention=0.25, era=2023, source="fitted to 175 billion on Frontier"),
}
"""Beginning of an accelerator's name -> its efficiency with the software of 2023; the longest that fits counts."""
UNPUBLISHED = Efficiency(
    products=0.6, attention=0.17, era=2023, source="no published run, those of the H100 rounded down"
)
_NOW = Efficiency(
    products=0.734,
    attention=0.371,
    era=2026,
    source="kernels of MPT-1B on one H100, torch 2.11",
    interval=(0.9, 1.1),
    num_measured_devices=1,
)
MEASURED: Mapping[str, Efficiency] = {
    "H100-80GB": _NOW,
    "H200": replace(_NOW, source=f"{_NOW.source}; the H200 is the same chip"),
}
"""Accelerator -> its efficiency with the software of today: 356 ms of products and 63 ms of attention in a step of
32,768 tokens (docs/measurements/h100.md).

Three steps are of other models than the kernels. MPT-125M is 3.4 % too slow, 6.0 % when compiled by the share of 1B.
Llama 3 8B on one H200 is 2.6 % too slow (docs/measurements/published.md). The kernels of MPT-1B gave products and
attention: its step is 1.6 % too slow, and compiled, by the share that 125M asks for, 2.7 % too fast.
Student's t makes 7 % of these five; the interval is rounded up."""
UNCOMPILED_LOW = 0.85
"""Lower end of the interval of a compiled run by rates of 2023, when nothing was compiled: it may gain nothing, and
COMPILED_SHARE predicts a gain of up to 17 %, for MPT-125M."""
MANY_DEVICES = 0.8
"""Lower end of the interval on more devices than were measured. Published rates are 0.85 to 0.99 times the predicted of
FSDP on 2 to 8 H200, and 0.83 where one MI250 becomes four (docs/measurements/published.md)."""


def find_efficiency(accelerator: Accelerator, *, published: bool = False) -> Efficiency:
    """Return an accelerator's efficiency: of today's software if it was measured, else the published one of 2023.

    `published` asks for that of 2023. Without either, it is that of unpublished accelerators.
    """
    if accelerator.name in MEASURED and not published:
        return MEASURED[accelerator.name]
    fitting = [name for name in PUBLISHED if accelerator.name.startswith(name)]
    return PUBLISHED[max(fitting, key=len)] if fitting else UNPUBLISHED
