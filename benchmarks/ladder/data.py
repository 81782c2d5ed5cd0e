"""Text of the ladder: sources and prose of the packages beside this interpreter, two parts of it held out.

    train.jsonl     what is trained on
    split.jsonl     files of the same packages, drawn by their path: the held-out split
    domain.jsonl    files with `sympy` or `mpmath` in their path, symbolic and numeric mathematics: the held-out domain

Equal files are kept once, before anything is drawn.
"""

import hashlib
import json
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from llmfoundry_lite.errors import UserError
from llmfoundry_lite.prepare.make_tasks import Module, identifier_questions, in_turn, next_line_questions, pieces

VOCAB_SIZE, SEQ_LEN = 1024, 256
SUFFIXES = (".py", ".md", ".rst", ".txt")
DOMAIN = ("sympy", "mpmath")
LEFT_OUT = ("codespell_lib",)
"""Packages that are lists of words."""
PACKAGE_BYTES = 24_000_000
"""Most of one package: generated clients of clouds are as large as all others together."""
SPLIT_SHARE = 1 / 64
MAX_FILE_BYTES = 400_000
NUM_PIECES, NUM_QUESTIONS = 160, 800
"""Pieces of a held-out text, one a file, and questions of a task."""
QUESTIONS = {"next_line": next_line_questions, "identifier_recall": identifier_questions}


def share(name: str) -> float:
    """Return a number from 0 to 1 that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6]) / 2**48


def texts(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (path within `root`, text) of every file that is taken, in an order that depends on the paths alone."""
    seen: set[bytes] = set()
    taken: dict[str, int] = defaultdict(int)
    names = [path.relative_to(root).as_posix() for path in root.rglob("*")]
    for name in sorted(names, key=lambda name: (share(name), name)):
        path, package = root / name, name.partition("/")[0]
        is_text = path.suffix.lower() in SUFFIXES or path.name == "METADATA"
        if not is_text or package in LEFT_OUT or not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            continue
        content = path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if digest in seen or taken[package] + len(content) > PACKAGE_BYTES:
            continue
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue
        if text.strip():
            seen.add(digest)
            taken[package] += len(content)
            yield name, text


def collect(out: Path, root: Path | None = None) -> dict[str, int]:
    """Write the three files into `out`, and the held-out tasks. Returns the bytes of each part.

    Raises UserError if there is too little held-out text.
    """
    root = root or Path(sysconfig.get_path("purelib"))
    out.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, int] = dict.fromkeys(("train", "split", "domain"), 0)
    files = {part: (out / f"{part}.jsonl").open("w", encoding="utf-8") for part in sizes}
    for name, text in texts(root):
        in_domain = any(word in name.lower() for word in DOMAIN)
        part = "domain" if in_domain else "split" if share(f"held out {name}") < SPLIT_SHARE else "train"
        sizes[part] += len(text.encode())
        files[part].write(json.dumps({"name": name, "text": text}, ensure_ascii=False) + "\n")
    for file in files.values():
        file.close()
    for part in ("split", "domain"):
        make_tasks(out, part)
    return sizes


def make_tasks(folder: Path, part: str) -> None:
    """Write tasks of a held-out part: its text for bits per byte, and questions about its Python files."""
    rows = [json.loads(line) for line in (folder / f"{part}.jsonl").open(encoding="utf-8")]
    if len(rows) < NUM_PIECES:
        raise UserError(f"{part}: {len(rows)} held-out files, expected {NUM_PIECES}; install more packages")
    beginnings = [{"text": next(pieces(row["text"]))} for row in rows]
    write_rows(folder / f"{part}_text.jsonl", [row for row in beginnings if len(row["text"]) > 400][:NUM_PIECES])
    modules = [Module(row["name"], row["text"]) for row in rows if row["name"].endswith(".py")][:NUM_QUESTIONS]
    for name, ask in QUESTIONS.items():
        write_rows(folder / f"{part}_{name}.jsonl", list(islice(in_turn(map(ask, modules)), NUM_QUESTIONS)))


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
