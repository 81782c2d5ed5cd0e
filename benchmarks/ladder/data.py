"""Text of the ladder: sources and prose of the packages beside this interpreter, two parts of it held out.

`train` is trained on. `split` are files drawn by their path. `domain` are files with `sympy` or `mpmath` in their
path: symbolic and numeric mathematics. Equal files are kept once, before anything is drawn.
"""

import hashlib
import json
import sysconfig
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from benchmarks.ladder.plan import SEQ_LEN, VOCAB_SIZE
from llmfoundry_lite.errors import UserError
from llmfoundry_lite.prepare.prepare import prepare
from llmfoundry_lite.prepare.request import PrepareRequest
from scripts.make_tasks import Module, identifier_questions, in_turn, next_line_questions, pieces

SUFFIXES = (".py", ".md", ".rst", ".txt")
DOMAIN = ("sympy", "mpmath")
LEFT_OUT = "codespell_lib"
"""A package of lists of words."""
PACKAGE_BYTES, FILE_BYTES = 24_000_000, 400_000
"""Most of one package and of one file: generated clients of clouds are as large as all other packages together."""
SPLIT_SHARE = 1 / 64
NUM_PIECES, NUM_QUESTIONS = 160, 800
"""Most beginnings of files in a held-out text, and questions of a task."""
QUESTIONS = {"next_line": next_line_questions, "identifier_recall": identifier_questions}


def gather(keep: Path) -> dict[str, int]:
    """Collect and prepare the text in `keep`, unless it is there. Returns the bytes of each part."""
    counts = keep / "bytes.json"
    if not counts.exists():
        (keep / "text").mkdir(parents=True, exist_ok=True)
        sizes = collect(keep / "text", Path(sysconfig.get_path("purelib")))
        counts.write_text(json.dumps(sizes))
    if not (keep / "data" / "summary.json").exists():
        source = str(keep / "text" / "train.jsonl")
        request = PrepareRequest(sources=(source,), tokenizer=f"train:{VOCAB_SIZE}", max_seq_len=SEQ_LEN)
        prepare(request, keep / "data", show_progress=True)
    return json.loads(counts.read_text())


def share(name: str) -> float:
    """Return a number from 0 to 1 that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6]) / 2**48


def texts(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (path within `root`, text) of every file that is taken, in an order that depends on the paths alone."""
    seen: set[bytes] = set()
    taken: Counter[str] = Counter()
    names = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    for name in sorted(names, key=lambda name: (share(name), name)):
        path, package = root / name, name.partition("/")[0]
        if (path.suffix.lower() not in SUFFIXES and path.name != "METADATA") or package == LEFT_OUT:
            continue
        content = path.read_bytes()
        digest, is_large = hashlib.sha256(content).digest(), len(content) > FILE_BYTES
        if is_large or digest in seen or taken[package] + len(content) > PACKAGE_BYTES:
            continue
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue
        if not text.strip():
            continue
        seen.add(digest)
        taken[package] += len(content)
        yield name, text


def collect(out: Path, root: Path) -> dict[str, int]:
    """Write the three parts and tasks of two into `out`. Returns the bytes of each. Raises UserError for too little."""
    found: dict[str, list[tuple[str, str]]] = {"train": [], "split": [], "domain": []}
    for name, text in texts(root):
        is_held_out = share(f"held out {name}") < SPLIT_SHARE
        part = "domain" if any(word in name.lower() for word in DOMAIN) else "split" if is_held_out else "train"
        found[part].append((name, text))
    write_rows(out / "train.jsonl", [{"text": text} for _, text in found["train"]])
    for part in ("split", "domain"):
        beginnings = [piece for _, text in found[part] if len(piece := next(pieces(text))) > 400]
        if len(beginnings) < 20:
            raise UserError(f"{root}: {len(beginnings)} files held out for {part}, expected 20; install more packages")
        write_rows(out / f"{part}_text.jsonl", [{"text": text} for text in beginnings[:NUM_PIECES]])
        modules = [Module(*row) for row in found[part] if row[0].endswith(".py")][:NUM_QUESTIONS]
        for name, ask in QUESTIONS.items():
            write_rows(out / f"{part}_{name}.jsonl", list(islice(in_turn(map(ask, modules)), NUM_QUESTIONS)))
    return {part: sum(len(text.encode()) for _, text in rows) for part, rows in found.items()}


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
