"""Speed of `data prepare` beside LLM Foundry's converter, on the same file, tokenizer, length and cores.

    python -m benchmarks prepare --peer-command ~/lf-venv/bin/llmfoundry

Both must make the same samples. LLM Foundry is not a dependency: the peer is the `llmfoundry` program of another
environment (`pip install llm-foundry==0.22.0 "setuptools<80"`); without one, our figure stands alone.

The same text also comes as parquet, for which the peer has no command; and one core does all that several do. What is
timed is the whole command, start-up included, because that is what a user waits for. Documents are cut to the
length of web pages, since the peer copies the rest of a document for every sample it cuts from it.
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
"""Documents are cut at the first blank line after so many: about a web page."""
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
    """Time both sides in turns, print a table, write prepare.json and .md to `out`, and return what the JSON holds.

    `peer_command` is the peer's program; by default that of LLMFOUNDRY_COMMAND, or the `llmfoundry` on the PATH.
    Raises DataError when a side fails, or the peer made other samples than we did.
    """
    # Long because it is the story of the benchmark, told once from top to bottom.
    peer_command = peer_command or os.environ.get(PEER_VARIABLE) or shutil.which("llmfoundry")
    console, report = frame.open_console(), frame.describe_conditions()
    with tempfile.TemporaryDirectory(prefix="bench-prepare-") as folder:
        work = Path(folder)
        documents, text_bytes = write_documents(work / "text.jsonl", text_bytes)
        with (work / "text.jsonl").open() as lines:
            sample = (json.loads(line)["text"] for index, line in enumerate(lines) if index % TRAINING_STRIDE == 0)
            tokenizer = train_tokenizer(sample, vocab_size)
        tokenizer.save(work / "tokenizer")

        write_parquet(work / "text.jsonl", work / "text.parquet")

        def ours(source: str, cores: int) -> Callable[[], Timing]:
            made = work / f"{source} on {cores}"
            return partial(time_command, our_command(work / source, work, made, max_seq_len, cores), cores, made)

        sides = {OURS: ours("text.jsonl", num_cores)}
        sides |= {OURS_OF_PARQUET: ours("text.parquet", num_cores), OURS_ON_ONE_CORE: ours("text.jsonl", 1)}
        if peer_command:
            command = their_command(peer_command, work, max_seq_len)
            sides[PEER] = partial(time_command, command, num_cores, work / "peer")
        found, _ = frame.take_turns(sides, num_rounds, console)
        made = {folder.parent.name: describe_samples(folder) for folder in sorted(work.glob("* on */train"))}
        if peer_command:
            made[PEER] = describe_samples(work / "peer")
        if len(set(made.values())) > 1:
            raise DataError(f"the times cannot be compared, because the samples differ: {made}")
        num_samples, _ = made[f"text.jsonl on {num_cores}"]
    report |= {
        "text_bytes": text_bytes,
        "documents": documents,
        "samples": num_samples,
        "max_seq_len": max_seq_len,
        "vocab_size": tokenizer.vocab_size,
        "num_cores": num_cores,
        "num_rounds": num_rounds,
        "sides": {name: [timing._asdict() for timing in timings] for name, timings in found.items()},
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
    """Return our command, which puts everything into one split, as the peer does."""
    options = ["--source", str(source), "--tokenizer", str(work / "tokenizer"), "--val-fraction", "0"]
    target = ["--out", str(out), "--max-seq-len", str(max_seq_len), "--num-workers", str(num_cores)]
    return [sys.executable, "-m", "llmfoundry_lite.cli.main", "data", "prepare", *options, *target]


def their_command(peer_command: str, work: Path, max_seq_len: int) -> list[str]:
    """Return the peer's own command, without compression, because ours does not compress either."""
    source = ["--path", str(work / "text.jsonl"), "--tokenizer", str(work / "tokenizer"), "--eos-text", END_OF_TEXT]
    target = ["--out-root", str(work / "peer"), "--concat-tokens", str(max_seq_len), "--compression", ""]
    return [peer_command, "data_prep", "convert_dataset_json", *source, *target]


def time_command(command: list[str], num_cores: int, made: Path) -> Timing:
    """Run one side on the same `num_cores` cores, alone; `made` is where it writes."""
    shutil.rmtree(made, ignore_errors=True)
    cores = sorted(os.sched_getaffinity(0))[:num_cores]
    cpu_before = children_cpu_seconds()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "HF_DATASETS_CACHE": cache}  # or else the peer finds its last run's table there
        started = time.monotonic()
        try:
            ended = subprocess.run(
                command,
                stdout=output,
                stderr=output,
                env=environment,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )
        except OSError as error:
            raise DataError(f"{command[0]} cannot be started: {error.strerror}") from error
        seconds = time.monotonic() - started
        if ended.returncode:
            output.seek(0)
            last_line = (output.read().strip().splitlines() or ["no output"])[-1]
            raise DataError(f"{command[0]} failed with exit code {ended.returncode}: {last_line}")
    return Timing(seconds, children_cpu_seconds() - cpu_before)


def children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def write_documents(path: Path, text_bytes: int) -> tuple[int, int]:
    """Write Python source code of this environment as JSON lines. Returns counts of documents and their bytes."""
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
    """Yield pieces of every installed Python file, the standard library first, no content twice."""
    seen: set[bytes] = set()
    for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for path in sorted(Path(folder).rglob("*.py")):
            content = path.read_bytes()
            digest = hashlib.sha256(content).digest()
            # The two sides differ, on purpose, about a document that spells the end-of-text token.
            if digest in seen or END_OF_TEXT.encode() in content:
                continue
            seen.add(digest)
            try:
                yield from pieces(content.decode("utf-8"))
            except UnicodeDecodeError:
                continue


def pieces(text: str) -> Iterator[str]:
    """Cut a text at blank lines into pieces of at least DOCUMENT_CHARACTERS."""
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
    title = (
        f"{report['documents']:,} documents, {report['text_bytes'] / 1e6:.1f} MB of text, "
        f"{report['samples']:,} samples of {report['max_seq_len']} tokens, vocabulary {report['vocab_size']:,}, "
        f"{report['num_cores']} cores"
    )
    rows = []
    peer = report["sides"].get(PEER, [])
    for name, timings in report["sides"].items():
        seconds, cpu_seconds = (frame.spread(timing[key] for timing in timings) for key in Timing._fields)
        rate = report["text_bytes"] / 1e6 / seconds.median
        times = [
            str(frame.ratios((timing[key] for timing in peer), (timing[key] for timing in timings))) if peer else ""
            for key in Timing._fields
        ]
        rows.append([name, f"{seconds.median:.1f}", f"{rate:.2f}", f"{cpu_seconds.median:.1f}", *times])
    return frame.measured_table(title, ["", "seconds", "MB/s", "CPU seconds", "times as fast", "in CPU seconds"], rows)


def notes_of(report: dict[str, Any]) -> list[str]:
    if PEER not in report["sides"]:
        return [f"{PEER}: not measured; give its program with --peer-command or {PEER_VARIABLE}"]
    return ["all make the same samples; the peer reads the JSON lines"]
