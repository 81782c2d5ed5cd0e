"""Evaluation tasks from the standard library's modules that `data prepare --source python-stdlib` holds out.

    python scripts/make_tasks.py --out data/eval

    next_line           which of four lines comes next; one wrong line is of about the same length and from the same
                        file, two are the right one with its words in another order
    identifier_recall   which of four identifiers of the file comes next; the context has the right one, after the same
                        word as here
    stdlib_text         the text itself, for bits per byte

A model of any size learns something about them in minutes, on any machine. They are made where they are used, because
the text is Python's, under its own licence, and the held-out part depends on the version of Python that the training
data came from. Random choices depend on the file and the line alone.
"""

if __name__ == "__main__":  # first, because an empty entry of PYTHONPATH stands for the working directory
    from llmfoundry_lite.search_path import leave_out_working_directory

    leave_out_working_directory()

import ast
import io
import json
import keyword
import random
import re
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, zip_longest
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from llmfoundry_lite.bounded import MAX_LOG_BYTES, read_lines_at_most
from llmfoundry_lite.cli.main import run_program
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.prepare.documents import Skipped, read_documents
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.sources import PYTHON_STDLIB, open_standard_library

NUM_QUESTIONS = 400
"""Questions of each task, for a standard error of 2.5 points or less."""
NUM_CHOICES = 4
MAX_TEXT_BYTES = 120_000
MAX_PIECE_CHARACTERS = 4_000

CONTEXT_LINES = 12
CONTEXT_CHARACTERS = (160, 480)
"""Fewest and most characters of a context: about 150 tokens of the quickstart's tokenizer, whose model takes 256."""
LINE_CHARACTERS = (16, 80)
GUESSED = ("self", "__init__")

Row = dict[str, Any]

program = typer.Typer(add_completion=False, rich_markup_mode=None)


@program.command()
def main(out: Annotated[Path, typer.Option(help="The folder for <name>.jsonl.")] = Path("data/eval")) -> None:
    """Make evaluation tasks from held-out modules. `data prepare --source python-stdlib` holds them out."""
    make_tasks(out, notify=typer.echo)


class Module(NamedTuple):
    """A held-out file."""

    name: str
    """Number of the file among held-out ones, in order of path."""
    text: str


def make_tasks(out: Path, *, notify: Callable[[str], None]) -> None:
    """Write the three files into `out`, replacing earlier ones.

    Raises DataError if there is too little held-out text, or a file of that name has other rows.
    """
    modules = held_out_modules()
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in (
        ("next_line", list(islice(in_turn(map(next_line_questions, modules)), NUM_QUESTIONS))),
        ("identifier_recall", list(islice(in_turn(map(identifier_questions, modules)), NUM_QUESTIONS))),
        ("stdlib_text", list(pieces_of_text(modules))),
    ):
        if not rows:
            raise DataError(f"{name}: nothing in {len(modules)} held-out modules of {sysconfig.get_path('stdlib')}")
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        path = out / f"{name}.jsonl"
        if not is_replaceable(path, rows[0]):
            raise DataError(f"{path}: exists and is not of this script; choose another --out, or remove it")
        write_atomically(path, content)
        notify(f"{name}: {len(rows)} rows, {len(content) / 1000:.0f} kB, in {path}")


def is_replaceable(path: Path, row: Mapping[str, Any]) -> bool:
    """Return whether the file does not exist, or has rows of this kind."""
    try:
        found = json.loads(next(read_lines_at_most(path, MAX_LOG_BYTES, "a task"), b""))
    except FileNotFoundError:
        return True
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.keys() == row.keys()


def held_out_modules() -> list[Module]:
    """Read the validation split of `python-stdlib`, as text."""
    source = open_standard_library()
    request = PrepareRequest(sources=(PYTHON_STDLIB,), tokenizer="", max_seq_len=1)
    documents = (document for unit in source.units() for document in read_documents(unit, request, Skipped()))
    threshold = int(source.val_fraction * 2**64)
    texts = [document.text for document in documents if document.split_key < threshold]
    return [Module(str(number), text) for number, text in enumerate(texts)]


def in_turn(iterators: Iterable[Iterator[Any]]) -> Iterator[Any]:
    """Yield one item of each iterator, then the next of each, until all are exhausted."""
    return (item for turn in zip_longest(*iterators) for item in turn if item is not None)


# Which line comes next


def next_line_questions(module: Module) -> Iterator[Row]:
    """Yield questions in a random order, spread over the file."""
    lines = module.text.splitlines()
    usable = [n for n in code_lines(module.text) if is_telling(lines[n])]
    for n in apart(shuffled(usable, module.name), CONTEXT_LINES):
        context = context_before(lines, n)
        if context is None or lines[n].strip() in context:
            continue
        others = {lines[m].strip(): lines[m] for m in usable if lines[m].strip() not in context}
        others.pop(lines[n].strip())
        generator = random.Random(f"{module.name}/{n}")
        wrong = reordered(lines[n], generator)
        if wrong and others:
            choices = [lines[n], *wrong, generator.choice(nearest(lines[n], others.values()))]
            generator.shuffle(choices)
            yield {"query": context, "choices": choices, "gold": choices.index(lines[n])}


def reordered(line: str, generator: random.Random) -> list[str]:
    """Return two lines with the words in other orders; none if the line has too few different words."""
    parts = re.split(r"([A-Za-z_]\w*)", line)
    words = parts[1::2]
    if len(set(words)) < 3:
        return []
    found: set[str] = set()
    while len(found) < 2:
        parts[1::2] = generator.sample(words, len(words))
        found.add("".join(parts))
        found.discard(line)
    return sorted(found)


def code_lines(text: str) -> list[int]:
    """Return the numbers, from 0, of lines that begin with code: no comments, insides of strings or blank lines."""
    started: set[int] = set()
    others: set[int] = set()
    for token in python_tokens(text):
        if token.type != tokenize.COMMENT and token.string.strip():
            started.add(token.start[0] - 1)
            others.update(range(token.start[0], token.end[0]))
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):
        nodes = []
    for node in nodes:  # strings that are statements
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            others.update(range(node.lineno - 1, node.end_lineno or node.lineno))
    return sorted(started - others)


def python_tokens(text: str) -> list[tokenize.TokenInfo]:
    """Return a file's tokens; none if only another version of Python understands it."""
    try:
        return list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return []


def is_telling(line: str) -> bool:
    """Return whether a line is indented, of middling length, and has two words."""
    shortest, longest = LINE_CHARACTERS
    text = line.strip()
    return line.startswith("    ") and shortest <= len(text) <= longest and len(re.findall(r"[A-Za-z]{2,}", text)) >= 2


# Which identifier comes next


def identifier_questions(module: Module) -> Iterator[Row]:
    """Yield questions in a random order, spread over the file."""
    lines = module.text.splitlines()
    in_code = list(names_in_code(module.text))
    names = sorted({name for _, _, name in in_code})
    found: dict[int, tuple[str, str]] = {}
    for n, column, name in in_code:
        before, line = context_before(lines, n), lines[n]
        word = re.search(r"(\w+|[=(,]) $", line[:column])
        if before and word and re.search(rf"\s{re.escape(word[0])}{name}\b", before):
            found[n] = (f"{before}\n{line[:column]}".rstrip(), name)
    for n in apart(shuffled(found, module.name), CONTEXT_LINES // 2):
        context, name = found[n]
        alike = nearest(name, (other for other in names if other not in context and other != name))
        if len(alike) >= NUM_CHOICES - 1:
            generator = random.Random(f"{module.name}/{n}")
            choices = [name, *generator.sample(alike, NUM_CHOICES - 1)]
            generator.shuffle(choices)
            yield {"query": context, "choices": choices, "gold": choices.index(name)}


def names_in_code(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield (line, from 0; column; name), without names that are easy to guess."""
    for token in python_tokens(text):
        name = token.string
        if token.type == tokenize.NAME and len(name) >= 4 and not keyword.iskeyword(name) and name not in GUESSED:
            yield token.start[0] - 1, token.start[1], name


# Text


def pieces_of_text(modules: Iterable[Module]) -> Iterator[Row]:
    """Yield the beginnings of modules, then the next pieces, up to MAX_TEXT_BYTES in all, cut at line ends."""
    left = MAX_TEXT_BYTES
    for piece in in_turn(pieces(module.text) for module in modules):
        left -= len(piece.encode())
        if left < 0:
            return
        yield {"text": piece}


def pieces(text: str) -> Iterator[str]:
    piece = ""
    for line in text.splitlines(keepends=True):
        if piece and len(piece) + len(line) > MAX_PIECE_CHARACTERS:
            yield piece
            piece = ""
        piece += line
    if piece:
        yield piece


# Parts of questions


def context_before(lines: list[str], n: int) -> str | None:
    """Return the lines before line `n`, as many as fit; None if that is too little."""
    shortest, longest = CONTEXT_CHARACTERS
    kept: list[str] = []
    for line in reversed(lines[max(0, n - CONTEXT_LINES) : n]):
        if sum(map(len, kept)) + len(kept) + len(line) > longest:
            break
        kept.insert(0, line)
    while kept and not kept[0].strip():
        kept.pop(0)
    context = "\n".join(kept).rstrip()
    return context if len(context) >= shortest else None


def nearest(right: str, others: Iterable[str]) -> list[str]:
    """Return the other texts whose length is nearest to that of the right one."""
    return sorted(others, key=lambda other: (abs(len(other) - len(right)), other))[: 4 * NUM_CHOICES]


def shuffled(numbers: Iterable[int], seed: str) -> list[int]:
    numbers = list(numbers)
    random.Random(seed).shuffle(numbers)
    return numbers


def apart(numbers: Iterable[int], distance: int) -> Iterator[int]:
    """Yield numbers that are at least `distance` from all those yielded before."""
    taken: list[int] = []
    for n in numbers:
        if all(abs(n - m) >= distance for m in taken):
            taken.append(n)
            yield n


if __name__ == "__main__":
    run_program(program, "make_tasks.py")
