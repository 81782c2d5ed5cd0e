"""Fit the planner's constants to measurements of a few of the user's own devices. No torch.

    llmfoundry-lite bench scaling --devices 1,2,4,8 --out measured
    llmfoundry-lite doctor --json measured/doctor.json
    llmfoundry-lite plan mpt-7b --hardware h100 --devices 64 --calibrate measured/scaling.json,measured/doctor.json

What is measured fixes these constants:

- Timed steps, of `bench scaling` or `bench mfu`, fix the rate of matrix products. They also fix the rate of attention
  if they have several sequence lengths, and the jitter if they have several numbers of nodes. How far the steps are off
  after the fit makes the plan's interval.
- Products timed alone, in `bench mfu`, fix their rate if there are no steps. Beside steps they are not used, and the
  plan says so.
- Collectives timed by `doctor` fix the bandwidth of links.

Options of `plan` override reports, and later reports override earlier ones. `calibrate` is the entry, `read_report`
reads one report, and `fit` adjusts the rates to timed steps.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from llmfoundry_lite.bounded import read_json
from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.layout import Layout, layout_of
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import ConfigError, DataError, UserError
from llmfoundry_lite.hardware import PRODUCTS, REPORT_SCHEMA
from llmfoundry_planner.plan.rates import LINK_SHARE, Residuals
from llmfoundry_planner.plan.step import Hardware, refuse_unknown_layers, step_time

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
"""Findings of `doctor` that measure links."""
DEVICES = r"\d+ x ([^,;(]+?)(?= \(|[,;]|$)"
"""Matches each name in `doctor`'s finding `devices`, such as `8 x NVIDIA H100 80GB HBM3 (...)`."""
LINKS = {"link_bytes_per_second": "in a node", "adapter_bytes_per_second": "between nodes"}
"""Field of Node -> where these links are, in words."""
SMALL_ERROR = 0.02
"""Relative error of a step up to which errors count by their square in the fit, and beyond which by their size, so that
a few odd steps do not decide it."""
SMALL_GAIN = 1e-4
"""If a round of changes reduces the errors by less than this share, the next changes are half as large."""
FIRST_CHANGE = 0.4
LAST_CHANGE = 4e-4
"""Changes that `minimise` tries first and last, in the logarithm of a value: about 50 % and 0.04 %."""
MIN_PRODUCTS = 0.01
"""Least share of the peak that matrix products can reach in a fit: less is an error in the measurements."""


class Step(NamedTuple):
    """A timed step of a run, as a report has it."""

    config: TrainConfig
    layout: Layout
    seconds: float

    def error(self, hardware: Hardware) -> float:
        """Return log(predicted rate / measured rate): 0.05 if the prediction for `hardware` is 5 % too fast."""
        return math.log(self.seconds / step_time(self.config, self.layout, hardware).seconds)


@dataclass(kw_only=True, frozen=True, slots=True)
class Report:
    """The measurements in one report of `bench` or `doctor`. A report has one of the three kinds."""

    file_name: str
    products: float | None = None
    """Share of the peak that matrix products alone reach; None if the report has none."""
    links: Mapping[str, float] = field(default_factory=dict)
    """Bandwidth of links in bytes per second, by the names of LINKS."""
    steps: Mapping[str, Step] = field(default_factory=dict)
    """Timed steps, by a key that is the same in two reports that timed the same step."""


def calibrate(hardware: Hardware, paths: Iterable[Path], node_changes: Mapping[str, Any]) -> Hardware:
    """Return hardware whose constants are those of the reports in `paths`, and whose sources say so.

    node_changes: fields of the node that the user gave on the command line. They override reports.

    Links and rates are set separately. Rates are fitted to timed steps if there are any, because these show how fast
    products are in a whole run. Without steps, products that were timed alone give their rate.

    Raises DataError for a report that fixes no constant, and ConfigError for a report of another device.
    """
    hardware = replace(hardware, node=replace(hardware.node, **node_changes))
    reports = [read_report(path, hardware) for path in paths]
    hardware = use_measured_links(hardware, reports, given_fields=node_changes)

    step_reports = [report for report in reports if report.steps]
    product_reports = [report for report in reports if report.products is not None]
    if step_reports:
        return fit_to_reports(hardware, step_reports, product_reports)
    if product_reports:
        return use_measured_products(hardware, product_reports[-1])
    return hardware


def use_measured_links(hardware: Hardware, reports: Sequence[Report], given_fields: Collection[str]) -> Hardware:
    """Return hardware with the bandwidth of links that reports have, each from the last report that has it.

    given_fields: fields of the node that the user has set, which stay as they are.
    """
    bandwidths: dict[str, float] = {}
    sources: list[str] = []
    for link, place in LINKS.items():
        link_reports = [report for report in reports if link in report.links]
        if not link_reports or link in given_fields:
            continue
        report = link_reports[-1]
        bandwidths[link] = report.links[link]
        sources.append(f"{place} as measured, {report.file_name}")

    if not bandwidths:
        return hardware
    source = "; ".join([*sources, f"else {hardware.node.source}"])
    return replace(hardware, node=replace(hardware.node, **bandwidths, source=source))


def use_measured_products(hardware: Hardware, report: Report) -> Hardware:
    """Return hardware with the rate of matrix products that `report` has. The rate of attention stays."""
    assert report.products is not None
    source = f"products measured, {report.file_name}; attention by {hardware.efficiency.origin}"
    efficiency = replace(hardware.efficiency, products=report.products, era=None, source=source)
    return replace(hardware, efficiency=efficiency)


def fit_to_reports(hardware: Hardware, step_reports: Sequence[Report], product_reports: Sequence[Report]) -> Hardware:
    """Return hardware with rates fitted to the steps of all `step_reports`.

    A step that several reports have is taken from the last one. `product_reports` are not used, which the source says.
    """
    steps: dict[str, Step] = {}
    for report in step_reports:
        steps |= report.steps
    file_names = ", ".join(report.file_name for report in step_reports)
    unused = ""
    if product_reports:
        unused = f"; {product_reports[-1].file_name} not used beside timed steps"
    return fit(hardware, list(steps.values()), file_names, unused)


# ------------------------------------------------------------------------------------------------------- the fit


def fit(hardware: Hardware, steps: Sequence[Step], file_names: str, unused: str = "") -> Hardware:
    """Return hardware with the rates that explain timed steps best.

    The rate of products is always fitted. Attention's is fitted if the steps have several sequence lengths, and else
    stays in proportion to products. The jitter is fitted if the steps have several numbers of nodes.

    file_names: files that the steps come from, for the source of the rates. unused: text that ends this source.
    Raises DataError if the steps can only be explained by products that run at an impossible rate.
    """
    efficiency = hardware.efficiency
    node = hardware.node

    # Choose what to fit. Values are changed by factors. The jitter may be 0, so 1 + jitter takes its place.
    start = {"products": efficiency.products}
    if len({step.config.max_seq_len for step in steps}) > 1:
        start["attention"] = efficiency.attention
    if len({node.doublings(step.layout.world_size) for step in steps}) > 1:
        start["jitter"] = 1 + node.jitter

    def with_values(values: Mapping[str, float]) -> Hardware:
        """Return the hardware with these values. One that is not fitted keeps its proportion, or stays."""
        proportional_attention = efficiency.attention / efficiency.products * values["products"]
        attention = values.get("attention", proportional_attention)
        jitter = values.get("jitter", 1 + node.jitter) - 1
        return replace(
            hardware,
            efficiency=replace(efficiency, products=values["products"], attention=attention),
            node=replace(node, jitter=jitter),
        )

    def cost(values: Mapping[str, float]) -> float:
        """Return how far predictions with these values are off the steps."""
        candidate = with_values(values)
        if candidate.node.jitter < 0:
            return math.inf
        # The hypotenuse grows with the square of a small error and with the size of a large one (pseudo-Huber loss).
        return sum(math.hypot(step.error(candidate), SMALL_ERROR) for step in steps)

    values = minimise(start, cost)
    if not MIN_PRODUCTS < values["products"] <= 1:
        raise DataError(
            f"--calibrate: {file_names}: its steps take products at {values['products']:.1%} of the peak; measure again"
        )

    # Say how well the steps are explained.
    fitted = with_values(values)
    residuals = measure_residuals(fitted, steps, num_fitted=len(values))
    max_devices = max(step.layout.world_size for step in steps)
    plural = "s" if len(steps) > 1 else ""
    source = f"{file_names}: {', '.join(values)} fitted to {len(steps)} step{plural} on at most {max_devices} devices"
    if residuals.freedom > 0:
        source += f", {residuals.spread:.1%} off"
    rates = replace(
        fitted.efficiency,
        era=None,
        source=source + unused,
        residuals=residuals,
        num_measured_devices=1 if max_devices == 1 else None,
    )
    return replace(fitted, efficiency=rates)


def measure_residuals(hardware: Hardware, steps: Sequence[Step], num_fitted: int) -> Residuals:
    """Return how far the steps are off after a fit of `num_fitted` values, from which `hardware` has its rates.

    The interval of later predictions follows from it. It is that of a regression on the doublings of a node.
    """
    num_degrees_of_freedom = len(steps) - num_fitted
    spread = 0.0
    if num_degrees_of_freedom > 0:
        squared_errors = [step.error(hardware) ** 2 for step in steps]
        spread = math.sqrt(sum(squared_errors) / num_degrees_of_freedom)

    doublings = [hardware.node.doublings(step.layout.world_size) for step in steps]
    mean_doublings = sum(doublings) / len(steps)
    return Residuals(
        num_steps=len(steps),
        freedom=num_degrees_of_freedom,
        spread=spread,
        mean_doublings=mean_doublings,
        squared_doublings=sum((number - mean_doublings) ** 2 for number in doublings),
    )


def minimise(start: Mapping[str, float], cost: Callable[[dict[str, float]], float]) -> dict[str, float]:
    """Return the positive values, one for each name of `start`, for which `cost` is about the smallest.

    A pattern search (Hooke and Jeeves 1961, "Direct search solution of numerical and statistical problems"). Each round
    changes one value at a time by a factor, up and down, and keeps each change that reduces the cost. Then it changes
    all of them again by the factors that they have changed by in this round. When a round gains little, the next one
    tries smaller factors.
    """
    best = dict(start)
    least_cost = cost(best)

    def keep_if_better(factors: Mapping[str, float]) -> None:
        nonlocal best, least_cost
        changed = best | {name: best[name] * factor for name, factor in factors.items()}
        changed_cost = cost(changed)
        if changed_cost < least_cost:
            best, least_cost = changed, changed_cost

    change = FIRST_CHANGE
    while change > LAST_CHANGE:
        before = best
        cost_before = least_cost
        for name in start:
            keep_if_better({name: math.exp(change)})
            keep_if_better({name: math.exp(-change)})
        keep_if_better({name: best[name] / before[name] for name in before})
        if least_cost > (1 - SMALL_GAIN) * cost_before:
            change /= 2
    return best


# --------------------------------------------------------------------------------------------------- the reports


def read_report(path: Path, hardware: Hardware) -> Report:
    """Read the measurements in one report of `bench` or `doctor`.

    Raises DataError for a file that is not such a report, or is damaged or too old, and ConfigError for a report of
    another device than `hardware`. Both errors name the file.
    """
    try:
        return _take_measurements(path.name, read_json(path, "a report"), hardware)
    except OSError as error:
        raise DataError(f"--calibrate: {path}: {error.strerror or error}") from None
    except UserError as error:
        raise type(error)(f"--calibrate: {path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
        raise DataError(
            f"--calibrate: {path}: damaged or no such report; expected mfu.json or scaling.json of `llmfoundry-lite "
            "bench`, or the file of `doctor --json`"
        ) from None


def _take_measurements(file_name: str, report: Mapping[str, Any], hardware: Hardware) -> Report:
    """Return the measurements in the content of a report, if it is of this release and of this hardware.

    Raises DataError and ConfigError as `read_report`, and for damaged content any error that reading it meets.
    """
    schema = report.get("schema", REPORT_SCHEMA)
    if schema != REPORT_SCHEMA:
        command = f"llmfoundry-lite bench {report['bench']} --out FOLDER"
        raise DataError(f"schema {schema}, this release reads {REPORT_SCHEMA}; measure again: {command}")

    # Only doctor's report has findings. One of them names the devices, of which there may be several kinds.
    findings = report.get("findings")
    if findings is None:
        devices = str(report.get("device_name") or report["device"])
        device_names = [devices]
    else:
        devices = ", ".join(str(finding["detail"]) for finding in findings if finding["check"] == "devices")
        device_names = re.findall(DEVICES, devices)
    accelerator = hardware.accelerator
    is_same_device = all(re.fullmatch(accelerator.pattern, name) for name in device_names)
    if not device_names or not is_same_device:
        raise ConfigError(f"measured on {devices or 'an unknown device'}, --hardware says {accelerator.name}")

    if findings is not None:
        return Report(file_name=file_name, links=read_links(findings, hardware.node.num_devices))

    rows = report["rows"]
    if report["bench"] == "scaling":
        return Report(file_name=file_name, steps=read_steps(rows, hardware))
    if report["bench"] != "mfu":
        raise ValueError  # `read_report` says which reports are expected

    # `bench mfu` times steps, or products alone, or both. Steps then count, as in `calibrate`.
    step_rows = [row for row in rows if "config" in row and "error" not in row]
    if step_rows:
        return Report(file_name=file_name, steps=read_steps(step_rows, hardware))
    return Report(file_name=file_name, products=read_products(rows, report["peak_flops"]))


def read_products(rows: Sequence[Mapping[str, Any]], peak_flops: float | None) -> float:
    """Return the share of the peak that matrix products alone reach in a report of `bench mfu`: the rows' median.

    Raises DataError if there are no such rows, if the peak is unknown, or if the share is not between 0 and 1.
    """
    rates = [float(row["flops_per_sec"]) for row in rows if row["step"] == PRODUCTS and "error" not in row]
    if not peak_flops:
        raise DataError("the device's peak is not in the table")
    if not rates:
        raise DataError("no rate of matrix products")

    share = median(rates) / peak_flops
    if not 0 < share <= 1:
        raise DataError(f"matrix products at {share:.0%} of the peak; measure again")
    return share


def read_steps(rows: Sequence[Mapping[str, Any]], hardware: Hardware) -> dict[str, Step]:
    """Return the steps of a report of `bench scaling` or `bench mfu`.

    The key of a step is its number of devices and its configuration, so that a later report replaces the same step.
    Raises DataError if there are no steps or a time is not possible, and ConfigError for a step that the planner cannot
    time on this hardware.
    """
    steps: dict[str, Step] = {}
    for row in rows:
        seconds = float(row["seconds"])
        num_devices = int(row["num_devices"])
        if not (0 < seconds < math.inf and num_devices > 0):
            raise DataError(f"a step of {seconds} s on {num_devices} devices; measure again")
        config = build_block(TrainConfig, row["config"])
        refuse_unknown_layers(config.model, "measure with a layer of ours that is as large")
        layout = layout_of(config, num_devices, min(hardware.node.num_devices, num_devices))
        step = Step(config, layout, seconds)
        step.error(hardware)  # raises the error for a step that cannot be timed
        steps[json.dumps([num_devices, row["config"]])] = step
    if not steps:
        raise DataError("no timed steps; measure again: llmfoundry-lite bench scaling --out FOLDER")
    return steps


def read_links(findings: Sequence[Mapping[str, Any]], per_node: int) -> dict[str, float]:
    """Return the bandwidth of links, in bytes per second by the names of LINKS, from findings of `doctor`.

    doctor measures bus bandwidth in GB/s, as nccl-tests defines it. The planner takes a link to reach LINK_SHARE of its
    bandwidth, so the result is the bandwidth with which the planner's collectives are as fast as doctor's. Several
    collectives count by their median.

    per_node: devices in a node. Raises DataError if no collective was timed, and for a number of ranks that does not
    fill the nodes.
    """
    in_node: list[float] = []
    across_nodes: list[float] = []
    for finding in findings:
        ranks = re.match(r"(\d+) ranks(?: on (\d+) nodes?)? over", str(finding["detail"]))
        if finding["check"] not in COLLECTIVES or not finding["value"] or ranks is None:
            continue
        num_ranks = int(ranks[1])
        num_nodes = int(ranks[2] or 1)
        bandwidth = 1e9 * float(finding["value"]) / LINK_SHARE
        if not 0 < bandwidth < math.inf:
            raise DataError(f"{finding['check']} at {finding['value']} GB/s; measure again")

        if num_nodes == 1:
            in_node.append(bandwidth)
        elif num_ranks == num_nodes * per_node:
            # doctor counts (n - 1) / n of the message for n ranks. An adapter carries that share for n nodes.
            across_nodes.append(bandwidth * (1 - 1 / num_nodes) / (1 - 1 / num_ranks))
        else:
            raise DataError(
                f"{num_ranks} ranks on {num_nodes} nodes of {per_node} devices; "
                "start doctor with a rank for each device, or say --per-node"
            )

    if not in_node and not across_nodes:
        raise DataError("no collective was timed; start doctor on several devices")
    return {name: median(rates) for name, rates in zip(LINKS, (in_node, across_nodes), strict=True) if rates}
