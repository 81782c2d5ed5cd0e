"""Which functions of one revision are not in another, wherever their file is: nothing, if a commit only moves."""

import ast
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

FOLDERS = ("llmfoundry_lite", "companions", "scripts", "benchmarks")


class Function(NamedTuple):
    name: str
    code: str


def list_moved(repo: Path, before: str, after: str | None, *, code_only: bool) -> list[str]:
    """A line for each function that only one of the two has. `after` is None for the files as they lie there."""
    old, new = (functions_of(sources(repo, revision), code_only=code_only) for revision in (before, after))
    lost, gained = (Counter(a.keys()) - Counter(b.keys()) for a, b in ((old, new), (new, old)))
    fewer = [key for key in old.keys() & new.keys() if len(old[key]) != len(new[key])]
    lines = [f"- {key.name}  {', '.join(old[key])}" for key in lost]
    lines += [f"+ {key.name}  {', '.join(new[key])}" for key in gained]
    lines += [f"x {key.name}  {len(old[key])} times before, {len(new[key])} after" for key in fewer]
    return sorted(lines, key=lambda line: line[2:])


def sources(repo: Path, revision: str | None) -> dict[str, str]:
    """Python files of a revision, or those that lie there now."""
    if revision is None:
        paths = [path for folder in FOLDERS for path in sorted((repo / folder).rglob("*.py"))]
        return {str(path.relative_to(repo)): path.read_text() for path in paths}

    def git(*arguments: str, text: str | None = None) -> bytes:
        return subprocess.run(
            ["git", "-C", str(repo), *arguments], input=text and text.encode(), capture_output=True, check=True
        ).stdout

    listed = [row.split("\t") for row in git("ls-tree", "-r", revision, "--", *FOLDERS).decode().splitlines()]
    blobs = {name: row.split()[2] for row, name in listed if name.endswith(".py")}
    contents, at = git("cat-file", "--batch", text="\n".join(blobs.values()) + "\n"), 0
    found = {}
    for name in blobs:
        end = contents.index(b"\n", at)
        size = int(contents[at:end].split()[2])
        found[name] = contents[end + 1 : end + 1 + size].decode()
        at = end + 1 + size + 1
    return found


def functions_of(files: dict[str, str], *, code_only: bool) -> dict[Function, list[str]]:
    """Every function and method, by its name and what it does; where it is."""
    found: dict[Function, list[str]] = {}
    for path, text in files.items():
        for node, name in walk(ast.parse(text), ""):
            code = ast.dump(without_docstrings(node) if code_only else node)
            found.setdefault(Function(name, code), []).append(f"{path}:{node.lineno}")
    return found


def walk(node: ast.AST, prefix: str):
    """Functions of modules and classes, with the names of their classes; functions in functions are of these."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child, prefix + child.name
        elif isinstance(child, ast.ClassDef):
            yield from walk(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from walk(child, prefix)


def without_docstrings(node: ast.AST) -> ast.AST:
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(child):
            child.body = child.body[1:]
    return node
