"""Constants of the planner, fixed by what a few devices were measured to do. No torch.

    llmfoundry-lite bench scaling --devices 1,2,4,8 --out measured
    llmfoundry-lite doctor --json measured/doctor.json
    llmfoundry-lite plan mpt-7b --hardware h100 --devices 64 --calibrate measured/scaling.json,measured/doctor.json

Timed steps, of `bench scaling` or `bench mfu`, fix the rate of products; also that of attention if their lengths
differ, and the jitter if their numbers of nodes do. Without steps the products of `bench mfu` fix their rate; beside
steps they are not used, and the plan says so. `doctor` fixes links. The errors of the steps make the plan's interval.
Options of `plan` override reports, and later reports override earlier ones.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
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
from llmfoundry_planner.plan.step import Hardware, step_time

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
DEVICES = r"\d+ x ([^,;(]+?)(?= \(|[,;]|$)"
"""Names in `doctor`'s finding `devices`."""
LINKS = {"link_bytes_per_second": "in a node", "adapter_bytes_per_second": "between nodes"}
SMALL_ERROR = 0.02
"""Larger errors count by their size, smaller ones by their square: a few steps of a table may be odd."""
SMALL_GAIN = 1e-4
"""If a round of changes reduces the errors by less than this share, the next changes are half as large."""


class Step(NamedTuple):
    """A timed step of a run."""

    config: TrainConfig
    layout: Layout
    seconds: float

    def error(self, hardware: Hardware) -> float:
        """Return the logarithm of the predicted rate over the measured one."""
        return math.log(self.seconds / step_time(self.config, self.layout, hardware).seconds)


def calibrate(hardware: Hardware, paths: Iterable[Path], given: Mapping[str, Any]) -> Hardware:
    """Fix constants by reports. `given`: values of the node that the user gave, which override reports.

    Raises DataError for a file that fixes none of them, ConfigError for one of another device.
    """
    found, sources, steps = dict[str, float](), dict[str, str](), dict[str, Step]()
    timed = list[str]()
    hardware = replace(hardware, node=replace(hardware.node, **given))
    for path in paths:
        constants, new_steps = read_constants(path, hardware)
        found, steps = found | constants, steps | new_steps
        sources |= dict.fromkeys(constants, path.name)
        timed += [path.name] if new_steps else []
    links = {name: found[name] for name in LINKS if name in found and name not in given}
    if links:
        said = [f"{LINKS[name]} as measured, {sources[name]}" for name in links]
        source = "; ".join([*said, f"else {hardware.node.source}"])
        hardware = replace(hardware, node=replace(hardware.node, **links, source=source))
    if steps:
        unused = f"; {sources['products']} not used beside timed steps" if "products" in found else ""
        return fit(hardware, list(steps.values()), ", ".join(timed), unused)
    if "products" in found:
        source = f"products measured, {sources['products']}; attention by {hardware.efficiency.origin}"
        efficiency = replace(hardware.efficiency, products=found["products"], era=None, source=source)
        hardware = replace(hardware, efficiency=efficiency)
    return hardware


# ------------------------------------------------------------------------------------------------------- the fit


def fit(hardware: Hardware, steps: Sequence[Step], names: str, unused: str = "") -> Hardware:
    """Fit rates to timed steps of files. Raises DataError for steps that no rate of products explains.

    `unused` ends the source of the rates.
    """
    efficiency, node = hardware.efficiency, hardware.node
    doublings = [node.doublings(step.layout.world_size) for step in steps]
    start = {"products": efficiency.products}
    if len({step.config.max_seq_len for step in steps}) > 1:
        start["attention"] = efficiency.attention
    if len(set(doublings)) > 1:
        start["jitter"] = 1 + node.jitter  # its logarithm is near 0, as a jitter may be

    def with_rates(rates: Mapping[str, float]) -> Hardware:
        in_proportion = efficiency.attention / efficiency.products * rates["products"]
        attention = rates.get("attention", in_proportion)
        return replace(
            hardware,
            efficiency=replace(efficiency, products=rates["products"], attention=attention),
            node=replace(node, jitter=rates.get("jitter", 1 + node.jitter) - 1),
        )

    def cost(rates: Mapping[str, float]) -> float:
        tried = with_rates(rates)
        if tried.node.jitter < 0:
            return math.inf
        return sum(math.hypot(step.error(tried), SMALL_ERROR) for step in steps)

    found = minimise(start, cost)
    if not 0.01 < found["products"] <= 1:
        share = f"{found['products']:.1%}"
        raise DataError(f"--calibrate: {names}: its steps take products at {share} of the peak; measure again")
    fitted = with_rates(found)
    errors = [step.error(fitted) for step in steps]
    freedom, mean = len(steps) - len(found), sum(doublings) / len(steps)
    residuals = Residuals(
        num_steps=len(steps),
        freedom=freedom,
        spread=math.sqrt(sum(error * error for error in errors) / freedom) if freedom > 0 else 0.0,
        mean_doublings=mean,
        squared_doublings=sum((one - mean) ** 2 for one in doublings),
    )
    most = max(step.layout.world_size for step in steps)
    source = (
        f"{names}: {', '.join(found)} fitted to {len(steps)} step{'s' * (len(steps) > 1)} on at most {most} devices"
    )
    source += (f", {residuals.spread:.1%} off" if freedom > 0 else "") + unused
    rates = replace(fitted.efficiency, era=None, source=source, residuals=residuals)
    return replace(fitted, efficiency=replace(rates, num_measured_devices=1 if most == 1 else None))


def minimise(start: Mapping[str, float], cost: Callable[[dict[str, float]], float]) -> dict[str, float]:
    """Change one value at a time by a factor, then all together in the same directions; by ever smaller factors.

    Hooke and Jeeves 1961, "Direct search solution of numerical and statistical problems".
    """
    best, width = dict(start), 0.4
    least = cost(best)
    while width > 4e-4:
        base, before = best, least
        steps = [{name: math.exp(sign * width)} for name in base for sign in (1, -1)]
        for step in [*steps, None]:
            factors = step or {name: best[name] / base[name] for name in base}
            changed = best | {name: best[name] * factor for name, factor in factors.items()}
            if (found := cost(changed)) < least:
                best, least = changed, found
        if least > (1 - SMALL_GAIN) * before:
            width /= 2
    return best


# --------------------------------------------------------------------------------------------------- the reports


def read_constants(path: Path, hardware: Hardware) -> tuple[dict[str, float], dict[str, Step]]:
    """Return constants by name, and steps. Raises DataError for neither, ConfigError for another device's."""
    accelerator = hardware.accelerator
    try:
        report = read_json(path, "a report")
        findings, rows, schema = report.get("findings"), report.get("rows"), report.get("schema", REPORT_SCHEMA)
        if schema != REPORT_SCHEMA:
            again = f"llmfoundry-lite bench {report['bench']} --out FOLDER"
            raise DataError(f"schema {schema}, this release reads {REPORT_SCHEMA}; measure again: {again}")
        if findings is None:
            device = str(report.get("device_name") or report["device"])
            names = [device]
        else:
            device = ", ".join(str(one["detail"]) for one in findings if one["check"] == "devices")
            names = re.findall(DEVICES, device)
        if not names or not all(re.fullmatch(accelerator.pattern, name) for name in names):
            raise ConfigError(f"measured on {device or 'an unknown device'}, --hardware says {accelerator.name}")
        if findings is not None:
            return read_links(findings, hardware.node.num_devices), {}
        if report["bench"] == "scaling":
            return {}, read_steps(rows, hardware)
        if report["bench"] == "mfu":
            timed = [row for row in rows if "config" in row and "error" not in row]
            if timed:  # steps show how fast products are in a whole run
                return {}, read_steps(timed, hardware)
            return {"products": read_products(rows, report["peak_flops"])}, {}
        raise ValueError
    except OSError as error:
        raise DataError(f"--calibrate: {path}: {error.strerror or error}") from None
    except UserError as error:
        raise type(error)(f"--calibrate: {path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
        raise DataError(
            f"--calibrate: {path}: damaged or no such report; expected mfu.json or scaling.json of `llmfoundry-lite "
            "bench`, or the file of `doctor --json`"
        ) from None


def read_products(rows: Sequence[Mapping[str, Any]], peak: float | None) -> float:
    """Return the share of the peak that products alone reach in a report of `bench mfu`."""
    rates = [float(row["flops_per_sec"]) for row in rows if row["step"] == PRODUCTS and "error" not in row]
    if not rates or not peak:
        raise DataError("no rate of matrix products" if peak else "the device's peak is not in the table")
    if not 0 < (share := median(rates) / peak) <= 1:
        raise DataError(f"matrix products at {share:.0%} of the peak; measure again")
    return share


def read_steps(rows: Sequence[Mapping[str, Any]], hardware: Hardware) -> dict[str, Step]:
    """Return the steps of a report of `bench scaling` or `bench mfu`, each once: key -> step.

    Raises DataError for what is not a time, ConfigError for a step that the planner cannot time.
    """
    steps = dict[str, Step]()
    for row in rows:
        seconds, num_devices = float(row["seconds"]), int(row["num_devices"])
        if not (0 < seconds < math.inf and num_devices > 0):
            raise DataError(f"a step of {seconds} s on {num_devices} devices; measure again")
        config = build_block(TrainConfig, row["config"])
        layout = layout_of(config, num_devices, min(hardware.node.num_devices, num_devices))
        step = Step(config, layout, seconds)
        step.error(hardware)
        steps[json.dumps([num_devices, row["config"]])] = step
    if not steps:
        raise DataError("no timed steps; measure again: llmfoundry-lite bench scaling --out FOLDER")
    return steps


def read_links(findings: Sequence[Mapping[str, Any]], per_node: int) -> dict[str, float]:
    """Return bandwidths of links, with which the planner's collectives are as fast as those that `doctor` timed."""
    in_node, across = list[float](), list[float]()
    for one in findings:
        ranks = re.match(r"(\d+) ranks(?: on (\d+) nodes?)? over", str(one["detail"]))
        if one["check"] not in COLLECTIVES or not one["value"] or ranks is None:
            continue
        num_ranks, num_nodes = int(ranks[1]), int(ranks[2] or 1)
        rate = 1e9 * float(one["value"]) / LINK_SHARE
        if not 0 < rate < math.inf:
            raise DataError(f"{one['check']} at {one['value']} GB/s; measure again")
        if num_nodes == 1:
            in_node.append(rate)
        elif num_ranks == num_nodes * per_node:
            across.append(rate * (1 - 1 / num_nodes) / (1 - 1 / num_ranks))
        else:
            each = f"{num_ranks} ranks on {num_nodes} nodes of {per_node} devices"
            raise DataError(f"{each}; start doctor with a rank for each device, or say --per-node")
    if not in_node and not across:
        raise DataError("no collective was timed; start doctor on several devices")
    return {name: median(rates) for name, rates in zip(LINKS, (in_node, across), strict=True) if rates}
