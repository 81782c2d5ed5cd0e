"""Shell commands of relay.yaml: where the relay's arguments go, and which programs start. Nothing is run.

Not a shell's grammar: quotes, comments, and what separates commands. Leaves the rest to the shell itself.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath

ARGUMENTS = "{arguments}"
FAR = ("ssh", "sbatch", "salloc", "sky", "kubectl")
"""Programs that go on elsewhere when they are terminated here, or that take the run down without a save."""
WRAPPERS = (
    *("chrt", "command", "env", "exec", "ionice", "nice", "nohup", "numactl", "setsid", "stdbuf", "sudo"),
    *("systemd-run", "taskset", "time", "timeout"),
)
"""Programs that start the program that their arguments name."""
SHELLS = ("bash", "dash", "ksh", "sh", "zsh")
KEYWORDS = ("!", "do", "elif", "else", "if", "then", "until", "while", "{")
"""Words of the shell before a command."""
QUOTED = r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\""""
BLANK = r"\\\n|(?:(?<=[\s;&|()])|\A)\#[^\n]*"
"""A line that goes on, and a comment."""


def with_arguments(launch: str, arguments: str) -> str:
    """They come where the command says {arguments}, or at its end: before a comment, in its last line."""
    text = _without_comments(launch).rstrip()
    return text.replace(ARGUMENTS, arguments) if ARGUMENTS in text else f"{text} {arguments}"


def problem_of_end(launch: str) -> str | None:
    """Why arguments at the end of this command would not reach its launch; None if they would, or need not."""
    text = _without_comments(launch).rstrip()
    if ARGUMENTS in text:
        return None
    bare = _bare(text)
    last = re.split(r"&&|\|\||;|\n", bare)[-1]
    if bare.endswith((";", "&")):
        return f"it ends with {bare[-1]}"
    if re.search(r"(?<!>)\|", last):
        return "its end is the end of a pipe"
    if re.search(r"(?<!<)<<(?!<)", bare):
        return "its end is a here-document"
    program, *words = next(iter(_commands(text[len(bare) - len(last) :])), [""])
    if PurePosixPath(program).name in SHELLS and any(re.fullmatch(r"-\w*c", word) for word in words):
        return None if "$" in text else f"{program} -c would take them for itself"
    return None


def program_of(command: str) -> str:
    """The first word that is no assignment; nothing where that takes a shell to tell. Raises ValueError for a quote
    that is not closed."""
    words = shlex.split(_without_comments(command))
    word = next((word for word in words if word != "exec" and not re.fullmatch(r"\w+=[^$`(]*", word)), "")
    return word if re.fullmatch(r"[\w./+~:-]+", word) else ""


def far_program_of(command: str) -> str | None:
    """The first of `FAR` that this command starts, by itself or through a program such as nice."""
    for program, *words in _commands(_without_comments(command)):
        named = [PurePosixPath(word).name for word in (program, *words)]
        found = [name for name in (named if named[0] in WRAPPERS else named[:1]) if name in FAR]
        if found:
            return found[0]
    return None


def _commands(text: str) -> Iterator[list[str]]:
    """The words of each simple command, from its program on. What a command substitution runs is left out."""
    bare, before = _bare(text), ""
    while bare != before:
        bare, before = re.sub(r"\$\([^()]*\)|`[^`]*`", lambda match: "_" * len(match[0]), bare), bare
    for match in re.finditer(r"[^;&|()\n]+", bare):
        words = shlex.split(text[match.start() : match.end()])
        while words and (words[0] in KEYWORDS or re.match(r"\w+=", words[0])):
            words.pop(0)
        if words:
            yield words


def _without_comments(command: str) -> str:
    """As long as it was, blanks instead."""
    return re.sub(f"{BLANK}|({QUOTED})", lambda match: match[1] or " " * len(match[0]), command, flags=re.DOTALL)


def _bare(text: str) -> str:
    """As long as it was, with _ for all that is quoted."""
    return re.sub(QUOTED, lambda match: "_" * len(match[0]), text, flags=re.DOTALL)
