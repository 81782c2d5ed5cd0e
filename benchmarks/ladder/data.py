"""Text of the ladder: sources and prose of the packages installed beside this interpreter, with two parts held out.

`train` is trained on. `split` are held-out files, drawn by their path. `domain` are the files with `sympy` or `mpmath`
in their path: symbolic and numeric mathematics, which the training data has nothing of. Equal files are kept once,
before anything is drawn. Which files are drawn depends on their paths alone, so the same packages always give the same
text.
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
"""A package that consists of lists of words."""
PACKAGE_BYTES, FILE_BYTES = 24_000_000, 400_000
"""Limits for one package and for one file: generated cloud clients are as large as all other packages together."""
SPLIT_SHARE = 1 / 64
"""Share of the files that are held out for `split`."""
NUM_PIECES, NUM_QUESTIONS = 160, 800
"""Largest number of beginnings of files in a held-out text, and of questions in a task."""
# Task -> function that makes questions from a module.
QUESTIONS = {"next_line": next_line_questions, "identifier_recall": identifier_questions}


def gather(keep: Path) -> dict[str, int]:
    """Collect and prepare the text in `keep`, unless it is there already. Returns the bytes of each part."""
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
    """Return a number from 0 to 1 that depends on the name alone, evenly distributed (from its hash)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6]) / 2**48


def texts(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (path within `root`, text) of every file that is taken, in an order that depends on the paths alone.

    Taken are files with one of SUFFIXES, and packages' METADATA. Skipped are large files, those that equal an earlier
    one, those beyond a package's limit, and those that are empty or not UTF-8.
    """
    digests: set[bytes] = set()
    bytes_of_packages: Counter[str] = Counter()
    names = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    for name in sorted(names, key=lambda name: (share(name), name)):
        path, package = root / name, name.partition("/")[0]
        # The license and description of a package are in METADATA, which has no suffix.
        if (path.suffix.lower() not in SUFFIXES and path.name != "METADATA") or package == LEFT_OUT:
            continue

        content = path.read_bytes()

        digest, is_large = hashlib.sha256(content).digest(), len(content) > FILE_BYTES
        if is_large or digest in digests or bytes_of_packages[package] + len(content) > PACKAGE_BYTES:
            continue

        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue
        if not text.strip():
            continue

        digests.add(digest)
        bytes_of_packages[package] += len(content)
        yield name, text


def collect(out: Path, root: Path) -> dict[str, int]:
    """Write the training text, the two held-out texts and two tasks of each into `out`. Returns the bytes of each part.

    `root` is the folder of the packages. Raises UserError if fewer than 20 files are held out for a part.
    """
    files_of_parts: dict[str, list[tuple[str, str]]] = {"train": [], "split": [], "domain": []}
    for name, text in texts(root):
        is_held_out = share(f"held out {name}") < SPLIT_SHARE
        if any(word in name.lower() for word in DOMAIN):
            part = "domain"
        elif is_held_out:
            part = "split"
        else:
            part = "train"
        files_of_parts[part].append((name, text))

    write_rows(out / "train.jsonl", [{"text": text} for _, text in files_of_parts["train"]])
    for part in ("split", "domain"):
        # The text: the first piece of each file, unless it is too short to be a document.
        beginnings = []
        for _, text in files_of_parts[part]:
            beginning = next(pieces(text))
            if len(beginning) > 400:
                beginnings.append(beginning)
        if len(beginnings) < 20:
            raise UserError(f"{root}: {len(beginnings)} files held out for {part}, expected 20; install more packages")
        write_rows(out / f"{part}_text.jsonl", [{"text": text} for text in beginnings[:NUM_PIECES]])

        # The tasks: questions from the Python files, one file after the other in turn.
        modules = [Module(*row) for row in files_of_parts[part] if row[0].endswith(".py")][:NUM_QUESTIONS]
        for name, make_questions in QUESTIONS.items():
            write_rows(out / f"{part}_{name}.jsonl", list(islice(in_turn(map(make_questions, modules)), NUM_QUESTIONS)))
    return {part: sum(len(text.encode()) for _, text in rows) for part, rows in files_of_parts.items()}


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """Write rows as JSONL."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
