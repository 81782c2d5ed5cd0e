"""A process beside a run that exports one of its checkpoints, or generates texts with it. `after_saves` starts it."""

import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.remote_folder import RemoteFolder, part_bytes
from llmfoundry_lite.cli.checkpoint import export as export_checkpoint
from llmfoundry_lite.data.tokenizer_files import is_local_or_cached
from llmfoundry_lite.errors import one_line
from llmfoundry_lite.evaluation.loaded import load
from llmfoundry_lite.files import open_no_link
from llmfoundry_ops.processes import JOB


def main() -> None:
    """Run the function that the variable JOB names. If it fails, print the reason in one line and exit with 1."""
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    function_name, arguments = json.loads(os.environ.pop(JOB))
    functions = {"export": export, "generate": generate}
    try:
        functions[function_name](**arguments)
    except Exception as error:
        print(one_line(error), flush=True)
        sys.exit(1)


def _end_with_rank_0() -> None:
    """Wait for the end of rank 0, and end this process. Runs in a thread."""
    os.read(0, 1)  # returns when rank 0 closes the other end, or is gone
    os._exit(1)


def export(url: str, folder: str, dtype: str, tokenizer: str | None) -> None:
    """Export a checkpoint as a Hugging Face folder.

    url: the checkpoint.
    folder: where the export goes: a path, or a URL of an object store.
    dtype, tokenizer: as for `checkpoint export`.

    On an object store, config.json is removed first and written last, so that a reader never takes a part of the files
    for a model.
    """
    target = open_folder(folder)
    if not isinstance(target, RemoteFolder):
        export_checkpoint(url, Path(folder), dtype, tokenizer)
        return

    with tempfile.TemporaryDirectory() as temporary_folder:
        exported = Path(temporary_folder, "model")
        export_checkpoint(url, exported, dtype, tokenizer)
        target.make(with_parents=True)
        if "config.json" in target.names():
            target.remove("config.json")
        for path in sorted(exported.iterdir(), key=lambda path: path.name == "config.json"):
            _upload(path, target)


def _upload(path: Path, target: RemoteFolder) -> None:
    """Write a file into a folder of an object store, one part at a time, so that little of it is in memory."""
    num_bytes = path.stat().st_size
    num_part_bytes = part_bytes(num_bytes)
    sink = target.sink(path.name, num_bytes)
    with path.open("rb") as file:
        for offset in range(0, num_bytes, num_part_bytes):
            sink.write_at(offset, [memoryview(file.read(num_part_bytes))])
    sink.close()


def generate(
    url: str,
    out: str,
    batch: int,
    tokenizer: str,
    prompts: list[str],
    max_new_tokens: int,
    trust_code: bool,
    **sampling: Any,
) -> None:
    """Generate a text after each prompt with the checkpoint at `url`, and append them to the file `out`.

    A line is {"batch": …, "prompt": …, "text": …}, where `batch` is the checkpoint's. `trust_code` lets parts of the
    model be code that the checkpoint names, and `sampling` is as for `lf.load(…).generate`. If `tokenizer`, which the
    run's configuration names, is not on this machine, the checkpoint's own is used.
    """
    model = load(url, tokenizer=tokenizer if is_local_or_cached(tokenizer) else None, trust_code=trust_code)
    texts = model.generate(prompts, max_new_tokens, **sampling)
    lines = []
    for prompt, text in zip(prompts, texts, strict=True):
        lines.append(json.dumps({"batch": batch, "prompt": prompt, "text": text}) + "\n")
    with open(out, "a", encoding="utf-8", opener=open_no_link) as file:
        file.write("".join(lines))
