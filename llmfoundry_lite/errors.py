"""The errors a user is meant to read, and the exit codes of every process we start.

Whoever raises one of these owns its sentence: what was given, what was expected, where, and what to do
next, in one line. `ranks.ending` and `cli` print that line and exit with the error's code; anything else
that escapes is a bug and keeps its traceback.
"""

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_INTERRUPTED = 130
EXIT_USER = 2
EXIT_PREEMPTED = 75
"""State was saved; run the same command again (the number is BSD's EX_TEMPFAIL)."""
EXIT_UNREAD = 141
"""Whoever read what a command prints has left, as `head` does: 128 and SIGPIPE's number, as shells have it."""


def printable(text: str, *, keep: str = "") -> str:
    """`text` for a terminal: control characters escaped, but those in `keep`.

    Names of runs and of files may come from anybody, and a terminal obeys what it is shown.
    """
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape", "backslashreplace").decode() for c in text
    )


class UserError(ValueError):
    """Something outside our code is wrong: configuration, data, disk. One line, exit code 2."""

    exit_code = EXIT_USER


class ConfigError(UserError):
    """The YAML files or the `key=value` arguments ask for something that cannot be."""


class DataError(UserError):
    """A data set, a document or a tokenizer is missing, damaged or does not match."""


class ExportError(UserError):
    """Weights cannot be written in, or read from, the layout that was asked for."""


class NonFiniteError(UserError):
    """The loss or the gradient of a batch is not finite, and the policy says stop; or logits are not."""


class OutOfMemoryError(UserError):
    """A step needs more memory than the device has."""


class CheckpointError(UserError):
    """A checkpoint cannot be written, read, or fitted to this run."""


class UnsoundCheckpointError(CheckpointError):
    """A file of a checkpoint cannot be had as it was written. One of the three below."""

    def __init__(self, text: str, file: str = ""):
        super().__init__(text)
        self.file = file
        """Its name in the manifest; empty for the manifest itself."""


class DamagedCheckpointError(UnsoundCheckpointError):
    """A file is there, and its bytes were not those written, twice. Older checkpoints may still be whole."""


class IncompleteCheckpointError(UnsoundCheckpointError):
    """A file is not there. Another machine may have it, or an older checkpoint all of its own."""


class UnreadableCheckpointError(UnsoundCheckpointError):
    """The system refuses to read a file, again and again. A mount, a server or a permission can be mended."""


class NewerFormatError(CheckpointError):
    """A checkpoint of a newer release: sound, but not for this one to read, replace or pass over."""
