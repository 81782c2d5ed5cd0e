"""`data prepare … --engine ray`: prepare parts, and then their shards, as tasks of a Ray cluster.

A task is a part of `prepare_part.py` or of `join.py` on one core. Ray starts it again if its process or its node dies,
and it then goes on where it was. There are several tasks for each core, so that machines of different speed end
together. All nodes need the source and the output folder under the same paths, and this package.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmfoundry_engines.join import join, join_shards
from llmfoundry_engines.part import Part
from llmfoundry_engines.places import open_place
from llmfoundry_engines.prepare_part import prepare_part
from llmfoundry_engines.scratch import Scratch
from llmfoundry_engines.status import choose_parts
from llmfoundry_lite.errors import ConfigError, DataError, TransientDataError, UserError, one_line
from llmfoundry_lite.own_code import trust_code
from llmfoundry_lite.prepare.out_folder import PARTIAL, find_finished
from llmfoundry_lite.prepare.prepare import open_input, progress_bars
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.summary import Summary
from llmfoundry_lite.prepare.token_files import MAX_LOST_TEXT

PARTS_PER_CORE = 4
"""Number of parts for each core of the cluster, so that a slow one does not keep all others waiting for long."""
MAX_RETRIES = 5
"""Number of times that Ray starts a task again whose process or node has died."""


@dataclass(kw_only=True, slots=True)
class TaskResult:
    """Message that a task sends back to the command that has started it."""

    error: str = ""
    """The message of a UserError; empty if there is none. A part with one is not tried again."""
    is_transient: bool = False
    """Whether the error may pass."""
    lines: list[str] = field(default_factory=list)
    """Sentences for the user."""


def prepare_with_ray(
    request: PrepareRequest,
    out: str | Path,
    *,
    num_parts: int | None = None,
    max_lost_text: float = MAX_LOST_TEXT,
    show_progress: bool = False,
    notify: Callable[[str], None] = lambda line: None,
    scratch: Scratch | None = None,
) -> Summary:
    """Prepare a corpus on a Ray cluster. The result is byte for byte that of one machine.

    request, out, max_lost_text: as for `prepare` in the core.
    num_parts: number of parts, by default that of earlier parts in `out`, or PARTS_PER_CORE for each core.

    The cluster is the one to which this process is connected, or the one of RAY_ADDRESS, or one that runs on this
    machine. If there is none, one begins on this machine, and ends with the process. Raises DataError and ConfigError.
    """
    ray = import_ray()
    with open_place(out, scratch) as place:
        opened = open_input(request, place.out)  # its errors come before a cluster starts
        with place.errors():
            place.pull()
            remedy = f"remove {place.out} first"
            finished = find_finished(place.out, opened.record, opened.existing_tokenizer, remedy)
            num_begun = len(choose_parts(place.out / PARTIAL))
    if finished:
        notify(f"{out} is complete: the same preparation finished there before")
        return finished
    if not ray.is_initialized():
        ray.init(log_to_driver=False)

    # Tokenise, then write the shards by the same number of parts.
    num_cores = int(ray.cluster_resources().get("CPU", 1))
    count = num_parts or num_begun or PARTS_PER_CORE * num_cores
    parts = [Part(number, count) for number in range(1, count + 1)]
    folder = os.getcwd()
    with progress_bars(show_progress) as bars:
        for description, function, arguments in (
            ("tokenising", run_part, (request, str(out), max_lost_text, scratch)),
            ("writing shards", run_share, (str(out), scratch)),
        ):
            task = ray.remote(num_cpus=1, max_retries=MAX_RETRIES)(function)
            bar = bars.add_task(f"{description}, {count} parts on {num_cores} cores", total=count)
            run_tasks(ray, task, folder, arguments, parts, notify, lambda bar=bar: bars.advance(bar))
    return join(out, max_lost_text=max_lost_text, show_progress=show_progress, notify=notify, scratch=scratch)


def import_ray() -> Any:
    """Import Ray. Raises ConfigError if it is not installed."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            "--engine ray needs the package ray on all nodes: pip install 'llmfoundry-lite[ray]'"
        ) from error
    return ray


def run_tasks(
    ray: Any,
    task: Any,
    folder: str,
    arguments: Sequence[Any],
    parts: Sequence[Part],
    notify: Callable[[str], None],
    on_complete: Callable[[], None],
) -> None:
    """Run a task for each part, and wait until all are complete. Raises the first error as DataError.

    task: a remote function, which is called with `folder`, a part and `arguments`.
    on_complete: called when a part is complete.
    """
    pending = {task.remote(folder, part, *arguments): part for part in parts}
    try:
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1)
            for reference in ready:
                part = pending.pop(reference)
                try:
                    result = ray.get(reference)
                except ray.exceptions.RayError as error:
                    raise DataError(
                        f"part {part} failed on Ray ({one_line(error)}); run the same command again to resume"
                    ) from error
                for line in result.lines:
                    notify(line)
                if result.error:
                    raise (TransientDataError if result.is_transient else DataError)(result.error)
                on_complete()
    finally:
        for reference in pending:
            ray.cancel(reference, force=True)


# In a task


def run_part(
    folder: str, part: Part, request: PrepareRequest, out: str, max_lost_text: float, scratch: Scratch | None
) -> TaskResult:
    """Tokenise a part. `folder` is the working directory, to which paths in the request may be relative."""
    result = TaskResult()

    def add_warning(line: str) -> None:
        if line.startswith("warning"):
            result.lines.append(line)

    os.chdir(folder)
    trust_code(request.own_code)  # the driver has imported them before
    try:
        prepare_part(
            request, out, part, num_workers=1, max_lost_text=max_lost_text, notify=add_warning, scratch=scratch
        )
    except UserError as error:
        result.error = str(error)
        result.is_transient = error.is_transient
    return result


def run_share(folder: str, part: Part, out: str, scratch: Scratch | None) -> TaskResult:
    """Write a share of the shards. `folder` is the working directory, to which `out` may be relative."""
    os.chdir(folder)
    try:
        join_shards(out, part, scratch=scratch)
    except UserError as error:
        return TaskResult(error=str(error), is_transient=error.is_transient)
    return TaskResult()
