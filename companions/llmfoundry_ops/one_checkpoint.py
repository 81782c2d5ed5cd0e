"""A process beside a run that exports one of its checkpoints, or lets it write text. `after_saves` starts it."""

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
from llmfoundry_lite.data.tokenizer import is_local_or_cached
from llmfoundry_lite.errors import one_line
from llmfoundry_lite.evaluation.loaded import load
from llmfoundry_lite.files import open_no_link
from llmfoundry_ops.processes import JOB


def main() -> None:
    """Run the function that JOB names. If it fails, print its reason in a line and exit with 1."""
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    function, arguments = json.loads(os.environ.pop(JOB))
    try:
        {"export": export, "generate": generate}[function](**arguments)
    except Exception as error:
        print(one_line(error), flush=True)
        sys.exit(1)


def _end_with_rank_0() -> None:
    os.read(0, 1)  # returns when rank 0 closes the other end, or is gone
    os._exit(1)


def export(url: str, folder: str, dtype: str, tokenizer: str | None) -> None:
    """Write a Hugging Face folder of a checkpoint. On a remote folder config.json is removed first and written last."""
    target = open_folder(folder)
    if not isinstance(target, RemoteFolder):
        export_checkpoint(url, Path(folder), dtype, tokenizer)
        return
    with tempfile.TemporaryDirectory() as draft:
        whole = Path(draft, "model")
        export_checkpoint(url, whole, dtype, tokenizer)
        target.make(with_parents=True)
        if "config.json" in target.names():
            target.remove("config.json")
        for path in sorted(whole.iterdir(), key=lambda path: path.name == "config.json"):
            sink, size = target.sink(path.name, path.stat().st_size), part_bytes(path.stat().st_size)
            with path.open("rb") as file:
                for offset in range(0, path.stat().st_size, size):
                    sink.write_at(offset, [memoryview(file.read(size))])
            sink.close()


def generate(
    url: str, out: str, batch: int, tokenizer: str, prompts: list[str], max_new_tokens: int, **sampling: Any
) -> None:
    """Append a line for each prompt: the batch, the prompt, and the text that follows it."""
    model = load(url, tokenizer=tokenizer if is_local_or_cached(tokenizer) else None)
    texts = model.generate(prompts, max_new_tokens, **sampling)
    found = zip(prompts, texts, strict=True)
    lines = [json.dumps({"batch": batch, "prompt": prompt, "text": text}) + "\n" for prompt, text in found]
    with open(out, "a", encoding="utf-8", opener=open_no_link) as file:
        file.write("".join(lines))
