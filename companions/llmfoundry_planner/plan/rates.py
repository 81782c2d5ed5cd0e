"""Rates that kernels and links reach: every constant of the planner that is fitted or measured. No torch.

`step.py` and `network.py` compute a step's time with these and with datasheets (`hardware.py`, `network.NODES`).
Constants that say "Fitted" are fitted by `python -m benchmarks published` to half of LLM Foundry's published rows. The
same benchmark compares them with the other half and with published papers (docs/measurements/published.md).
`calibrate.py` replaces some of them by a user's own measurements.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmfoundry_lite.hardware import Accelerator

# ---------------------------------------------------------------------------------------------------- of any device

MEMORY_SHARE = 0.85
"""Share of the memory's bandwidth that kernels reach."""
STREAM_BYTES = 214
"""Bytes read and written in one block, forward and backward, by norms, activation functions, residual sums and copies
between them, for each token and element of the residual stream in 16 bits. Fitted."""
LOGIT_BYTES = 45
"""Bytes read and written for each logit by the loss, forward and backward. Fitted."""
COMPILED_SHARE = 0.65
"""Share of STREAM_BYTES and LOGIT_BYTES that compiled blocks and losses still move, because torch.compile fuses chains
of such operations into one kernel. Fitted to MPT-1B and MPT-125M on one H100 with torch 2.11, 2026-11-27. Alone, 1B
would give 0.70, or 0.86 in a second run with a trace, and 125M would give 0.60."""
SCORE_TRANSFERS = 4
"""Times that plain attention reads or writes a score in the forward pass, if mask and softmax are one kernel: a product
writes, softmax reads and writes, a product reads. Counted; it cannot be fewer."""
SCORE_GRADIENT_TRANSFERS = 7
"""The same in the backward pass: two products read the weights or write their gradient, softmax reads both and writes
the scores' gradient, and two products read that. Counted."""
CLIPPING_BYTES = 12
"""Bytes read and written for each parameter by clipping its gradient: read for the norm, then read and written."""
READ_TOKENS_PER_SECOND = 7e6
"""Rate of one process of the loader, from local shards: 8,000 samples of 2,048 took 2.3 s of an AMD EPYC core,
2026-11-22."""
OVERLAP_COST = 0.77
"""Share of a hidden exchange's time that still adds to the step, because the exchange takes compute units and memory
bandwidth from the products beside it. Fitted."""

# ---------------------------------------------------------------------------------------------------------- of links

LINK_SHARE = 0.8
"""Share of a link's bandwidth that collectives reach: nccl-tests measures 360 to 370 of NVLink 4's 450 GB/s."""
IN_NODE_LATENCY_SECONDS = 3e-6
"""Latency of each step of a ring within a node. Order of magnitude, from nccl-tests with small messages."""
ACROSS_LATENCY_SECONDS = 10e-6
"""Latency of each step of a ring between nodes. Order of magnitude, from nccl-tests with small messages."""
JITTER = 0.003
"""Share of a step that each doubling of the number of nodes adds, by stragglers and by links that others use too.
Fitted, but loosely: without it the rows' mean error grows by 2 %, with twice as much by 4 %. `--fit` ends at 0.0016."""
MI250_JITTER = 0.0055
"""Jitter of MosaicML's MI250 cluster, fitted to one published loss of speed."""
SLINGSHOT_JITTER = 0.028
"""Jitter of Frontier, fitted to one published loss of speed."""

# --------------------------------------------------------------------------------------------------- of accelerators


KNOWN_SPREAD = 1.07
"""Nine of ten published rows of an A100 that no constant was fitted to come within this factor of the prediction. A
calibration by fewer models cannot promise less for another model."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Residuals:
    """How far the steps that a calibration was fitted to are off after the fit, in logarithms of their rate."""

    num_steps: int
    freedom: int
    """Degrees of freedom: steps beyond the number of fitted constants."""
    spread: float
    """Standard deviation; 0 without degrees of freedom."""
    mean_doublings: float
    """Mean over the steps of how often one node was doubled (`Node.doublings`)."""
    squared_doublings: float
    """Sum of squares around that mean. 0 if all steps had as many nodes, so that the jitter was not fitted."""

    def interval(self, doublings: float, jitter: float) -> tuple[float, float]:
        """Return factors (low, high) of a predicted rate between which the real rate lies in nine cases of ten.

        It is the prediction interval of a regression of the logarithm of the rate on the doublings of a node, and at
        least KNOWN_SPREAD wide. If the jitter was not fitted, it may be that of any known cluster.

        doublings: of the cluster that the rate is predicted for. jitter: that the prediction was made with.
        """
        doublings_beyond = doublings - self.mean_doublings
        slope_variance = 0.0
        if self.squared_doublings:
            slope_variance = doublings_beyond**2 / self.squared_doublings
        # Nine of ten cases lie between the quantile 0.95 of Student's t and its negative. This is Cornish and Fisher's
        # series for it, which is 3 % too small for 3 degrees of freedom.
        student = 0.0
        if self.freedom > 0:
            student = 1.645 + 1.524 / self.freedom + 1.42 / self.freedom**2
        half_width = student * self.spread * math.sqrt(1 + 1 / self.num_steps + slope_variance)
        half_width = max(half_width, math.log(KNOWN_SPREAD))
        low = math.exp(-half_width)
        high = math.exp(half_width)

        has_fitted_jitter = self.squared_doublings and self.freedom > 0
        if doublings_beyond > 0 and not has_fitted_jitter:
            slowdown = 1 + jitter * doublings_beyond
            low *= slowdown / (1 + max(JITTER, SLINGSHOT_JITTER, jitter) * doublings_beyond)
            high *= slowdown / (1 + min(JITTER, SLINGSHOT_JITTER, jitter) * doublings_beyond)
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
    """Factors of a predicted rate between which real rates lie in nine cases of ten. The default is how far the shares
    of the peak of known accelerators lie apart."""
    num_measured_devices: int | None = None
    """Devices that the interval was measured on; on more it begins at MANY_DEVICES. None: it holds for any number."""
    residuals: Residuals | None = None
    """Errors of a calibration by timed steps, which then make the interval instead of `interval`."""

    @property
    def origin(self) -> str:
        """Where the rates come from: the era, unless they are the user's own, and the source."""
        return self.source if self.era is None else f"software of {self.era}: {self.source}"


_FITTED = "fitted to half of LLM Foundry's published rows of MPT"
_A100 = Efficiency(products=0.754, attention=0.31, era=2023, source=_FITTED, interval=(0.93, 1.07))
_H100 = Efficiency(products=0.645, attention=0.178, era=2023, source=_FITTED, interval=(0.94, 1.06))
PCIE_SHARE = 0.83
"""Product rate of an A100's PCIe card over the module's (arXiv 2408.14158): it has 250 W instead of 400."""


def _as_card(module: Efficiency, source: str) -> Efficiency:
    """Return the efficiency of a PCIe card from that of the module with the same chip."""
    products = PCIE_SHARE * module.products
    attention = PCIE_SHARE * module.attention
    return Efficiency(products=products, attention=attention, era=module.era, source=source)


PUBLISHED: Mapping[str, Efficiency] = {
    "A100": _A100,
    "A100-PCIe": _as_card(_A100, "the module's; 0.83 of its products, arXiv 2408.14158"),
    "H100": _H100,
    "H100-PCIe": _as_card(_H100, "the module's; of its products as much as an A100's card"),
    "MI250": Efficiency(products=0.525, attention=0.25, era=2023, source="fitted to MPT-7B on 4 MI250, MosaicML"),
    "MI250X": Efficiency(products=0.672, attention=0.25, era=2023, source="fitted to 175 billion on Frontier"),
}
"""Beginning of an accelerator's name -> its efficiency with the software of 2023. The longest that matches counts."""
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
"""Accelerator -> its efficiency with the software of today. A traced step of MPT-1B with 32,768 tokens spent 356 ms in
products and 63 ms in attention (docs/measurements/h100.md).

Five timed steps make the interval. Predictions for other models: MPT-125M is 3.4 % too slow; compiled, with
COMPILED_SHARE fitted to 1B alone, it is 6.0 % too slow; Llama 3 8B on one H200 is 2.6 % too slow
(docs/measurements/published.md). For MPT-1B itself: 1.6 % too slow; compiled, with the share fitted to 125M alone,
2.7 % too fast. By Student's t these give 7 %, which the interval rounds up."""
UNCOMPILED_LOW = 0.85
"""Lower end of the interval of a compiled run that is predicted with rates of 2023, when nothing was compiled. It may
gain nothing, where COMPILED_SHARE predicts a gain of up to 17 % (MPT-125M)."""
MANY_DEVICES = 0.8
"""Lower end of the interval on more devices than were measured. Published rates of FSDP are 0.85 to 0.99 times the
predicted ones on 2 to 8 H200, and 0.83 times from one MI250 to four (docs/measurements/published.md)."""


def find_efficiency(accelerator: Accelerator, *, published: bool = False) -> Efficiency:
    """Return the shares of the peak that an accelerator's kernels reach.

    They are those of today's software if these were measured, or else the published ones of 2023. An accelerator
    without either gets UNPUBLISHED. `published` asks for those of 2023 in any case.
    """
    if accelerator.name in MEASURED and not published:
        return MEASURED[accelerator.name]
    matching_names = [name for name in PUBLISHED if accelerator.name.startswith(name)]
    if not matching_names:
        return UNPUBLISHED
    return PUBLISHED[max(matching_names, key=len)]
