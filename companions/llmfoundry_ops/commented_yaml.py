"""Write the values of a configuration as a YAML with comments, and with keys that are commented out."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from llmfoundry_lite.config.yaml_text import dump_record
from llmfoundry_lite.errors import printable

WIDTH = 110
"""Maximum length of a line of a comment."""

Path = tuple[str | int, ...]
"""Keys and indices that lead to a value: ("icl_tasks", 0, "icl_task_type")."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Comment:
    """A comment above a key of a YAML."""

    path: Path
    text: str
    is_disabling: bool = False
    """Whether the key and its value become a comment, too."""


def write_commented(values: Mapping[str, Any], blocks: Mapping[str, str], comments: Sequence[Comment]) -> str:
    """Return the text of a YAML, whose top-level keys are in the order of `values`.

    blocks: key -> the lines that replace its value in `values`. Without lines, the key is left out.
    """
    text = ""
    was_block = True
    for key, value in values.items():
        comments_here = [comment for comment in comments if comment.path[0] == key]
        lines = blocks[key] if key in blocks else add_comments(dump_record({key: value}), comments_here)
        if not lines:
            continue

        # A block has an empty line before and after it.
        is_block = lines.count("\n") > 1
        if text and (is_block or was_block):
            text += "\n"
        text += lines
        was_block = is_block
    return text


def add_comments(text: str, comments: Sequence[Comment]) -> str:
    """Return the text of a YAML, as `dump_record` writes it, with comments above the lines of their keys.

    A key in a list's item is never disabled, because the item may begin with it.
    """
    lines = text.splitlines()
    disabled_paths = [comment.path for comment in comments if comment.is_disabling]
    placed = []
    for comment in comments:
        outer_paths = [comment.path[:length] for length in range(1, len(comment.path))]
        if not any(path in disabled_paths for path in outer_paths):
            placed.append((find_line(text, comment.path), comment))

    # Lines are inserted from below, so that the numbers of those above stay valid.
    for first, comment in sorted(placed, key=lambda item: item[0], reverse=True):
        indent = _indent_of(lines[first])
        is_in_list = any(isinstance(step, int) for step in comment.path)
        if comment.is_disabling and not is_in_list:
            for number in range(first, _end_of_value(lines, first)):
                lines[number] = f"{lines[number][:indent]}# {lines[number][indent:]}"
        prefix = f"{' ' * indent}# "
        # A character that ends a line for YAML would end the comment.
        wrapped = textwrap.wrap(printable(comment.text), WIDTH, initial_indent=prefix, subsequent_indent=prefix)
        lines[first:first] = wrapped
    return "\n".join(lines) + "\n"


def find_line(text: str, path: Path) -> int:
    """Return the index of the line in which the key or the item at a path of a YAML's text begins."""
    node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    line = 0
    for step in path:
        if isinstance(step, int):
            node = node.value[step]
            line = node.start_mark.line
        else:
            key_node, node = next(pair for pair in node.value if pair[0].value == step)
            line = key_node.start_mark.line
    return line


def _end_of_value(lines: Sequence[str], first: int) -> int:
    """Return the index after the last line of the value whose key is in line `first`.

    Its lines are indented further, are the items of a list at the key's own indentation, or are empty.
    """
    indent = _indent_of(lines[first])
    end = first + 1
    while end < len(lines):
        line = lines[end]
        is_item = _indent_of(line) == indent and line[indent:].startswith("- ")
        if line.strip() and not is_item and _indent_of(line) <= indent:
            break
        end += 1
    return end


def _indent_of(line: str) -> int:
    """Return the number of spaces with which a line begins."""
    return len(line) - len(line.lstrip(" "))


def path_of(key: str) -> Path:
    """Return the path of a dotted key: ("icl_tasks", 0, "label") for `icl_tasks[0].label`."""
    steps: list[str | int] = []
    for part in key.split("."):
        name, *indices = re.split(r"[\[\]]+", part)
        steps.append(name)
        steps += [int(index) for index in indices if index]
    return tuple(steps)
