"""Where a record is made: the product's commands, run in an empty folder; their words without what chance decides."""

import gzip
import hashlib
import json
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

CASES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())
"""What is recorded."""

MEANINGLESS = [
    (r"\x1b\[[0-9;]*[A-Za-z]", ""),
    (r"\be(\d+)-ba(\d+)-[0-9a-f]{12}\b", r"e\1-ba\2-SAVE"),
    (r"\.damaged-ba(\d+)-[0-9a-f]{6}\b", r".damaged-ba\1-ID"),
    (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?(\+\d\d:\d\d|Z)?", "WHEN"),
    (r"\b(\d+-)?\d+:\d\d:\d\d\b", "TIME"),
    (r"\bETA \d+:\d\d\b", "ETA TIME"),
    (r"\b(process|pid) \d+\b", r"\1 PID"),
    (r"\b127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
    (r"\b\d+\.\d+\.\d+ [0-9a-f]{12}(\+changes)?\b", "VERSION"),
    (r"[\d,.]+ (tokens/s|items/s|documents/s|MB/s|GB/s)\b", r"N \1"),
    (r"(?<![\w.,-])[\d,]+(\.\d+)? s\b(?!\w)", "N s"),
    (r"\.py:\d+", ".py:LINE"),
]
"""Patterns in everything that is printed, and what stands for them."""


class Said(NamedTuple):
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.out}" + (f"--- stderr ---\n{self.err}" if self.err else "")


class Lab:
    """An empty folder in which the commands of one checkout are run. What several parts need is made once."""

    def __init__(self, repo: Path, folder: Path):
        self.repo, self.folder = repo.resolve(), folder.resolve()
        python = self.repo / ".venv/bin/python"
        self.python = str(python if python.exists() else sys.executable)
        self.environment = {
            **{key: os.environ[key] for key in os.environ if not key.startswith(("COMPOSER", "PYTEST", "RUN_NAME"))},
            "PYTHONPATH": str(self.repo),
            "PATH": f"{Path(self.python).parent}:{os.environ['PATH']}",
            "COLUMNS": "120",
            "TERM": "dumb",
            "LC_ALL": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.folder / "hub"),
            "PYTHONDONTWRITEBYTECODE": "",
        }
        self._made: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def has(self, owner: str) -> bool:
        """Return whether the checkout has this companion; the core is everywhere."""
        return owner == "core" or (self.repo / "companions" / owner).is_dir()

    def call(
        self, *arguments: object, module: str = "llmfoundry_lite", timeout_seconds: float = 600, **environment: str
    ) -> Said:
        """Run `llmfoundry-lite ARGUMENTS`, another module, or one of scripts/ if the first of them is `SCRIPT.py`."""
        is_script = str(arguments[0]).endswith(".py")
        program = [str(self.repo / "scripts" / str(arguments[0]))] if is_script else ["-m", module]
        command = [self.python, *program, *map(str, arguments[is_script:])]
        try:
            ended = subprocess.run(
                command,
                cwd=self.folder,
                env={**self.environment, **environment},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            return Said(-1, self.plain(error.stdout), f"still ran after {timeout_seconds} s")
        return Said(ended.returncode, self.plain(ended.stdout), self.plain(ended.stderr))

    def check(self, *arguments: object, **environment: str) -> Said:
        """Run a command that must end well."""
        said = self.call(*arguments, timeout_seconds=600, **environment)
        if said.code:
            raise RuntimeError(f"{' '.join(map(str, arguments))}: {said}")
        return said

    def plain(self, output: bytes | str | None) -> str:
        """The text without what chance, the machine and the folder decide."""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
        text = re.sub(r"[^\n]*\r(?!\n)", "", text)
        for path, name in ((self.folder, "$WORK"), (self.repo, "$REPO"), (Path.home(), "$HOME")):
            if path != Path("/"):
                text = re.sub(re.escape(str(path)) + r"(?=[/\s:;,'\")]|$)", name, text)
        text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", text)
        for pattern, instead in MEANINGLESS:
            text = re.sub(pattern, instead, text)
        return "\n".join(line.rstrip() for line in text.splitlines()) + "\n" if text.strip() else ""

    def once(self, name: str, make: Callable[[], Any]) -> None:
        """Make something unless it is there; whoever else needs it waits."""
        with self._lock:
            lock = self._made.setdefault(name, threading.Lock())
        with lock:
            if not (self.folder / f".made-{name}").exists():
                make()
                (self.folder / f".made-{name}").touch()

    # ------------------------------------------------------------------------------------------ what parts read

    @cached_property
    def documents(self) -> list[str]:
        """Documents of different lengths, some with more than ASCII."""
        chance = random.Random(0)
        lexicon = [
            "".join(chance.choices("etaoinshrdlucmfwypvbgkqjxzéß漢", k=chance.randint(1, 9))) for _ in range(300)
        ]
        return [f"{i}: {' '.join(chance.choices(lexicon, k=chance.randint(1, 120)))}.\n" for i in range(400)]

    def need_text(self) -> None:
        """`text/`: plain files, JSON lines, compressed ones and a table, whose rows are lines where none reads it."""

        def write() -> None:
            text, documents = self.folder / "text", self.documents
            text.mkdir()
            for i, document in enumerate(documents[:40]):
                (text / f"{i:02}.txt").write_text(document)
            lines = [json.dumps({"text": document}) + "\n" for document in documents]
            (text / "a.jsonl").write_text("".join(lines[40:200]))
            with gzip.GzipFile(text / "b.jsonl.gz", "wb", mtime=0) as file:
                file.write("".join(lines[200:300]).encode())
            if not self.has("llmfoundry_formats"):
                (text / "c.jsonl").write_text("".join(lines[300:]))
                return
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.table({"text": documents[300:]}), text / "c.parquet")

        self.once("text", write)

    def need_data(self) -> None:
        """`data/`: the text as samples of 64 tokens, with a tokenizer of 512."""
        self.need_text()
        self.once("data", lambda: self.check(*split("data prepare text --out data TRAINED")))

    def need_yaml(self) -> None:
        """`base.yaml`: a small run of 4 batches over `data/`."""
        self.once(
            "yaml", lambda: (self.folder / "base.yaml").write_text(yaml.safe_dump(CASES["base"], sort_keys=False))
        )

    def copy(self, source: str, target: str) -> Path:
        shutil.rmtree(self.folder / target, ignore_errors=True)
        shutil.copytree(self.folder / source, self.folder / target, symlinks=True)
        return self.folder / target


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def split(line: str) -> list[str]:
    """Arguments of a case."""
    words = {**CASES["WORDS"], "LLAMA": CASES["LLAMA"]}
    return [part for given in shlex.split(line) for part in (split(words[given]) if given in words else [given])]
