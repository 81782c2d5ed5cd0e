"""Compare the speed of `data prepare` with LLM Foundry's converter, on the same file, tokenizer, length and cores.

    python -m benchmarks prepare --peer-command ~/lf-venv/bin/llmfoundry

Both must make the same samples. LLM Foundry is not a dependency: the peer is the `llmfoundry` program of another
environment (`pip install llm-foundry==0.22.0 "setuptools<80"`). Without one, only our side is measured.

Our side also prepares the same text from parquet, for which the peer has no command, and on a single core. The time is
that of the whole command, including its start, because that is what a user waits for. Documents are cut to the length
of web pages, because the peer copies the rest of a document for every sample that it cuts from it.
"""

import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from llmfoundry_lite.data.tokenizer import END_OF_TEXT, train_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench import frame

PEER_VARIABLE = "LLMFOUNDRY_COMMAND"
DOCUMENT_CHARACTERS = 2500
"""A document ends at the first blank line after this many characters: about the length of a web page."""
TRAINING_STRIDE = 8
"""The tokenizer is trained on every eighth document."""
OURS, PEER = "llmfoundry-lite data prepare", "LLM Foundry convert_dataset_json"
OURS_OF_PARQUET, OURS_ON_ONE_CORE = f"{OURS}, parquet", f"{OURS}, one core"
ROWS_IN_A_GROUP = 1024
"""Rows of a group of the parquet file."""


class Timing(NamedTuple):
    """One run of one side."""

    seconds: float
    """Wall time of the whole command."""
    cpu_seconds: float
    """Processor time of all its processes."""


def run(
    *,
    peer_command: str | None = None,
    text_bytes: int = 256_000_000,
    max_seq_len: int = 2048,
    vocab_size: int = 32768,
    num_cores: int = 2,
    num_rounds: int = 1,
    out: Path | None = None,
) -> dict[str, Any]:
    """Time all sides in turns, print a table, write prepare.json and .md to `out`, and return the report.

    `peer_command` is the peer's program. The default is that of the variable LLMFOUNDRY_COMMAND, or the `llmfoundry` on
    the PATH. `text_bytes` is the size of the text, `vocab_size` that of the tokenizer which is trained on it. Raises
    DataError when a side fails, or when the sides made different samples.
    """
    # This function is long because it is the whole benchmark from top to bottom.
    peer_command = peer_command or os.environ.get(PEER_VARIABLE) or shutil.which("llmfoundry")
    console, report = frame.open_console(), frame.describe_conditions()
    with tempfile.TemporaryDirectory(prefix="bench-prepare-") as folder:
        work = Path(folder)

        # The input of all sides: the text as JSON lines and as parquet, and a tokenizer trained on it.
        documents, text_bytes = write_documents(work / "text.jsonl", text_bytes)
        with (work / "text.jsonl").open() as lines:
            sample = (json.loads(line)["text"] for index, line in enumerate(lines) if index % TRAINING_STRIDE == 0)
            tokenizer = train_tokenizer(sample, vocab_size)
        tokenizer.save(work / "tokenizer")

        write_parquet(work / "text.jsonl", work / "text.parquet")

        def ours(source: str, cores: int) -> Callable[[], Timing]:
            """Return a function that times our command on this file and number of cores."""
            out_folder = work / f"{source} on {cores}"
            command = our_command(work / source, work, out_folder, max_seq_len, cores)
            return partial(time_command, command, cores, out_folder)

        sides = {OURS: ours("text.jsonl", num_cores)}
        sides |= {OURS_OF_PARQUET: ours("text.parquet", num_cores), OURS_ON_ONE_CORE: ours("text.jsonl", 1)}
        if peer_command:
            command = their_command(peer_command, work, max_seq_len)
            sides[PEER] = partial(time_command, command, num_cores, work / "peer")
        timings_of_sides, _ = frame.take_turns(sides, num_rounds, console)

        # Times are comparable only if all sides made the same samples.
        samples_of_sides = {
            folder.parent.name: describe_samples(folder) for folder in sorted(work.glob("* on */train"))
        }
        if peer_command:
            samples_of_sides[PEER] = describe_samples(work / "peer")
        if len(set(samples_of_sides.values())) > 1:
            raise DataError(f"the times cannot be compared, because the samples differ: {samples_of_sides}")
        num_samples, _ = samples_of_sides[f"text.jsonl on {num_cores}"]
    report |= {
        "text_bytes": text_bytes,
        "documents": documents,
        "samples": num_samples,
        "max_seq_len": max_seq_len,
        "vocab_size": tokenizer.vocab_size,
        "num_cores": num_cores,
        "num_rounds": num_rounds,
        "sides": {name: [timing._asdict() for timing in timings] for name, timings in timings_of_sides.items()},
    }
    frame.tell(
        report,
        table_of(report),
        notes_of(report),
        name="prepare",
        heading="`data prepare`, compared with LLM Foundry's converter",
        command="python -m benchmarks prepare",
        asked=("text_bytes", "max_seq_len", "num_cores"),
        out=out,
    )
    return report


def our_command(source: Path, work: Path, out: Path, max_seq_len: int, num_cores: int) -> list[str]:
    """Return our command. Everything goes into one split, as it does with the peer."""
    options = ["--source", str(source), "--tokenizer", str(work / "tokenizer"), "--val-fraction", "0"]
    target = ["--out", str(out), "--max-seq-len", str(max_seq_len), "--num-workers", str(num_cores)]
    return [sys.executable, "-m", "llmfoundry_lite.cli.main", "data", "prepare", *options, *target]


def their_command(peer_command: str, work: Path, max_seq_len: int) -> list[str]:
    """Return the peer's command, without compression, because ours does not compress either."""
    source = ["--path", str(work / "text.jsonl"), "--tokenizer", str(work / "tokenizer"), "--eos-text", END_OF_TEXT]
    target = ["--out-root", str(work / "peer"), "--concat-tokens", str(max_seq_len), "--compression", ""]
    return [peer_command, "data_prep", "convert_dataset_json", *source, *target]


def time_command(command: list[str], num_cores: int, out_folder: Path) -> Timing:
    """Run a command on the first `num_cores` cores of this process, and return its wall-clock and processor seconds.

    `out_folder` is the folder that it writes into, which is removed first. Raises DataError with the command's last
    line if it fails.
    """
    shutil.rmtree(out_folder, ignore_errors=True)
    cores = sorted(os.sched_getaffinity(0))[:num_cores]
    cpu_before = children_cpu_seconds()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryDirectory() as cache:
        # A new cache, because otherwise the peer would find the table of its previous run there.
        environment = {**os.environ, "HF_DATASETS_CACHE": cache}
        started = time.monotonic()
        try:
            result = subprocess.run(
                command,
                stdout=output,
                stderr=output,
                env=environment,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )
        except OSError as error:
            raise DataError(f"{command[0]} cannot be started: {error.strerror}") from error
        seconds = time.monotonic() - started
        if result.returncode:
            output.seek(0)
            last_line = (output.read().strip().splitlines() or ["no output"])[-1]
            raise DataError(f"{command[0]} failed with exit code {result.returncode}: {last_line}")
    return Timing(seconds, children_cpu_seconds() - cpu_before)


def children_cpu_seconds() -> float:
    """Return the processor seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def write_documents(path: Path, text_bytes: int) -> tuple[int, int]:
    """Write Python source code of this environment as JSON lines, until it has `text_bytes`.

    Returns the number of documents and their bytes.
    """
    num_documents = num_bytes = 0
    with path.open("w", encoding="utf-8") as file:
        for document in documents_of_this_environment():
            file.write(json.dumps({"text": document}) + "\n")
            num_documents += 1
            num_bytes += len(document.encode())
            if num_bytes >= text_bytes:
                break
    return num_documents, num_bytes


def write_parquet(lines: Path, path: Path) -> None:
    """Write the documents of a JSON-lines file as rows of a parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with lines.open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=ROWS_IN_A_GROUP)


def documents_of_this_environment() -> Iterator[str]:
    """Yield pieces of every installed Python file, the standard library first. Equal files are read once."""
    digests: set[bytes] = set()
    for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for path in sorted(Path(folder).rglob("*.py")):
            content = path.read_bytes()
            digest = hashlib.sha256(content).digest()
            # The two sides treat a document that contains the end-of-text token in different ways, on purpose.
            if digest in digests or END_OF_TEXT.encode() in content:
                continue
            digests.add(digest)
            try:
                yield from pieces(content.decode("utf-8"))
            except UnicodeDecodeError:
                continue


def pieces(text: str) -> Iterator[str]:
    """Cut a text at blank lines into pieces of at least DOCUMENT_CHARACTERS. The last piece may be shorter."""
    start = 0
    while start < len(text):
        blank = text.find("\n\n", start + DOCUMENT_CHARACTERS)
        end = len(text) if blank < 0 else blank + 2
        yield text[start:end]
        start = end


def describe_samples(folder: Path) -> tuple[int, str]:
    """Return the number of samples in an MDS folder, and a hash of their tokens, whatever their dtype."""
    import numpy as np
    from streaming import LocalDataset

    digest = hashlib.sha256()
    dataset = LocalDataset(local=str(folder))
    for index in range(len(dataset)):
        digest.update(dataset[index]["tokens"].astype(np.uint32).tobytes())
    return len(dataset), digest.hexdigest()


def table_of(report: dict[str, Any]) -> Table:
    """Return a table with a row for each side: seconds, and how many times as fast as the peer it is."""
    title = (
        f"{report['documents']:,} documents, {report['text_bytes'] / 1e6:.1f} MB of text, "
        f"{report['samples']:,} samples of {report['max_seq_len']} tokens, vocabulary {report['vocab_size']:,}, "
        f"{report['num_cores']} cores"
    )
    rows = []
    peer_timings = report["sides"].get(PEER, [])
    for name, timings in report["sides"].items():
        seconds, cpu_seconds = (frame.spread(timing[key] for timing in timings) for key in Timing._fields)
        rate = report["text_bytes"] / 1e6 / seconds.median
        # The peer's time over this side's, within each round.
        speedups = [
            str(frame.ratios((timing[key] for timing in peer_timings), (timing[key] for timing in timings)))
            if peer_timings
            else ""
            for key in Timing._fields
        ]
        rows.append([name, f"{seconds.median:.1f}", f"{rate:.2f}", f"{cpu_seconds.median:.1f}", *speedups])
    return frame.measured_table(title, ["", "seconds", "MB/s", "CPU seconds", "times as fast", "in CPU seconds"], rows)


def notes_of(report: dict[str, Any]) -> list[str]:
    """Return the note below the table."""
    if PEER not in report["sides"]:
        return [f"{PEER}: not measured; give its program with --peer-command or {PEER_VARIABLE}"]
    return ["all make the same samples; the peer reads the JSON lines"]
