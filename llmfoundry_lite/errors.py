"""The errors a user is meant to read, and the exit codes of every process we start.

Whoever raises one of these owns its sentence: what was given, what was expected, where, and what to do
next, in one line. `scripts/` and `cli.py` print that line and exit with the error's code; anything else
that escapes is a bug and keeps its traceback.
"""

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USER = 2
EXIT_PREEMPTED = 75
"""State was saved; run the same command again (the number is BSD's EX_TEMPFAIL)."""


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
    """The loss or the gradient of a batch is not finite, and the policy says stop."""


class OutOfMemoryError(UserError):
    """A step needs more memory than the device has."""


class CheckpointError(UserError):
    """A checkpoint cannot be written, read, or fitted to this run."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not what was written: bytes changed, files missing. Older ones may still be whole."""


class NewerFormatError(CheckpointError):
    """A checkpoint of a newer release: sound, but not for this one to read, replace or pass over."""
