"""Errors for users, in one line each, and the exit codes of every process.

A user's mistake comes again with every try. A fault of the world may pass: a full disk, a server's 5xx, an expired
token, a lost link. `is_transient` tells them apart by what an error was raised `from`; `from None` keeps a mistake one.
"""

import difflib
import errno
import re
from collections.abc import Iterable, Sequence
from typing import Any

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_INTERRUPTED = 130
"""Ctrl-C twice: left at once. 128 and SIGINT's number, as shells have it."""
EXIT_USER = 2
EXIT_DIFFERS = 3
"""A replay is not bit-equal to the run."""
EXIT_PREEMPTED = 75
"""State was saved; run the same command again (the number is BSD's EX_TEMPFAIL)."""
EXIT_UNREAD = 141
"""Whoever read what a command prints has left, as `head` does: 128 and SIGPIPE's number, as shells have it."""

SECOND_STEP = "pip install --no-deps mosaicml==0.32.1 mosaicml-streaming==0.13.0"
"""Apart from the package's own dependencies, because both cap torch, numpy and others below what they run with."""


_REFERENCE = r"\$\{(?:[^{}]|\{[^{}]*\})*\}"
"""`${oc.env:NAME}` stands for a secret, and is none."""
PASSWORD = re.compile(rf"""(://(?:{_REFERENCE}|\$(?!\{{)|[^\s/:@?\#"$])*:)(?!\$\{{)[^\s/?\#"]*(?=@)""")
"""scheme://user:password@: it ends at the first slash."""
TOKEN = re.compile(r"""(https?://)[^\s/:@?#"]+(?=@)""")
"""Before the host, without a user's name."""
PARAMETER = re.compile(
    r"""([?&;](?:[\w.-]*[-_.])?
        (?:(?:access|auth)?token|(?:api)?key|awsaccesskeyid|secret|sig|signature|credential|auth|passw(?:or)?d|pwd|pass|pw)=)
        (?!\$\{)[^\s&;\#'"]+""",
    re.VERBOSE | re.IGNORECASE,
)
"""The last word of the name decides: access_token, X-Amz-Signature; not max_tokens, author."""
MASKED = re.compile(r"://[^\s/]*\*\*\*@|[?&;][^\s=&;]+=\*\*\*")


def mask_credentials(text: str) -> str:
    """Return `text` with `***` for passwords, tokens and signatures in URLs. Nothing that leaves a process has them:
    no record, no log, no message."""
    if "://" not in text:
        return text
    return PARAMETER.sub(r"\1***", TOKEN.sub(r"\1***", PASSWORD.sub(r"\1***", text)))


def is_masked(text: str) -> bool:
    """Return whether `text` has a URL whose credentials were masked: nothing can be opened with it."""
    return "://" in text and MASKED.search(text) is not None


def printable(text: str, *, keep: str = "") -> str:
    """Return `text` for a terminal: control characters escaped, except those in `keep`, and credentials masked. Names
    of runs and of files may come from anybody, and a terminal obeys what it is shown."""
    text = mask_credentials(text)
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape", "backslashreplace").decode() for c in text
    )


def list_names(names: Iterable[object]) -> str:
    """Write `a, b`. A name with white space, quotes or commas stands in quotes: ` text` looks like `text`."""
    return ", ".join(name if re.fullmatch(r"[^\s,'\"]+", name) else repr(name) for name in map(str, names))


def either(options: Sequence[object]) -> str:
    """Write `a, b or c`."""
    *others, last = map(str, options)
    return f"{', '.join(others)} or {last}" if others else last


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known word that was probably meant; empty if none is spelled like it. `cutoff`: difflib's ratio."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), "")


BRIEF_ERRNOS = (
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.EAGAIN, errno.ENOTCONN, errno.ESHUTDOWN),
    *(errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET),
)
"""Answers of disks and of the servers behind them that may differ a moment later."""
TRANSIENT_ERRNOS = {*BRIEF_ERRNOS, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EBUSY} - {errno.EAGAIN}
"""Answers that may differ an hour later. EAGAIN means a lock that another process holds."""
TRANSIENT_STATUSES = (408, 425, 429)
"""HTTP statuses beside 5xx: too slow, too early, too many requests."""
EXPIRED_CODES = ("400", "ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
"""S3's codes. The answer to a HEAD request has no body: an expired token is a bare 400 there."""
TRANSIENT_CODES = (
    *(*EXPIRED_CODES, "SlowDown", "RequestTimeout", "BandwidthLimitExceeded", "RequestLimitExceeded"),
    *("ConditionalRequestConflict", "OperationAborted"),
)
"""Codes of S3 and its like. Every code with `Throttl` in it counts too."""
TRANSIENT_CLASSES = {
    *("HTTPClientError", "ConnectionError", "CredentialRetrievalError", "TokenRetrievalError"),
    *("MetadataRetrievalError", "UnauthorizedSSOTokenError", "SSOTokenLoadError", "ClientConnectionError"),
    *("ClientPayloadError", "TransportError", "IncompleteRead", "ResponseParserError"),
}
"""Names of clients' own errors for a link or credentials: botocore, aiohttp, requests, httpx, urllib3."""


class TransientError(OSError):
    """A fault that may pass, on another rank, whose own error does not travel."""


def is_transient(error: BaseException | None) -> bool:
    """Return whether the causes of `error` may pass without a change of the command. A server's answer decides, if
    there is one; else the operating system's."""
    chain = _causes(error)
    answers = [answer for one in chain if (answer := _answer_of(one)) is not None]
    return answers[0] if answers else any(_is_transient_here(one) for one in chain)


def has_expired(error: BaseException | None) -> bool:
    """Return whether a server has refused credentials that have expired."""
    return any(_code_of(one) in EXPIRED_CODES for one in _causes(error))


def _causes(error: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__
    return chain


def _code_of(error: BaseException) -> str | None:
    """Return the code of botocore's ClientError, such as SlowDown."""
    response: Any = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code")) if isinstance(response, dict) else None


def _answer_of(error: BaseException) -> bool | None:
    """Return whether a server's answer may pass; None if `error` is no answer."""
    if any(kind.__name__ == "HttpProcessingError" for kind in type(error).__mro__):
        return None  # aiohttp's, with the code 400 that no server has sent: the answer was cut
    code, response = _code_of(error), getattr(error, "response", None)
    if code is not None and (code in TRANSIENT_CODES or "Throttl" in code):
        return True
    if isinstance(response, dict):
        status: Any = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        asked = ((response, "status_code"), (error, "status_code"), (error, "status"), (error, "code"))
        status = next((found for where, name in asked if isinstance(found := getattr(where, name, None), int)), None)
    if not isinstance(status, int) or not 400 <= status < 600:
        return None
    return status in TRANSIENT_STATUSES or (status >= 500 and status != 501)


def _is_transient_here(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS:
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, (TransientError, TimeoutError)) or bool(names & TRANSIENT_CLASSES)


class UserError(ValueError):
    """Something outside our code is wrong. One line; exit code 2 for a mistake, 75 for a fault that may pass.

    Errors of configuration, data and checkpoints are kinds of it.

    >>> try:
    ...     lf.load("runs/nowhere")
    ... except lf.UserError as error:
    ...     print(error, error.exit_code)
    models: runs/nowhere does not exist; expected a run, a checkpoint, an exported folder or hf:NAME 2
    """

    has_lost = False
    """No save holds some batches that were trained: the exit code is 1, not 75."""
    _exit_code: int | None = None

    def __str__(self) -> str:
        return mask_credentials(super().__str__())

    @property
    def is_transient(self) -> bool:
        return is_transient(self.__cause__)

    @property
    def exit_code(self) -> int:
        if self._exit_code is not None:
            return self._exit_code
        if not self.is_transient:
            return EXIT_USER
        return EXIT_BUG if self.has_lost else EXIT_PREEMPTED

    @exit_code.setter
    def exit_code(self, code: int) -> None:
        self._exit_code = code


def one_line(error: BaseException) -> str:
    """Return the message of an error without line ends, or its type where it has none."""
    return mask_credentials(" ".join(str(error).split())) or type(error).__name__


class ConfigError(UserError):
    """The YAML files or the `key=value` arguments ask for something that cannot be."""


class DataError(UserError):
    """A data set, a document or a tokenizer is missing, damaged or does not match."""


class OtherDataError(DataError):
    """The data is not what a checkpoint was trained with."""

    def __init__(self, text: str, difference: str = ""):
        super().__init__(text)
        self.difference = difference


class TransientDataError(DataError):
    """A transient DataError from a worker process, whose cause does not travel."""

    @property
    def is_transient(self) -> bool:
        return True


class ExportError(UserError):
    """Weights cannot be written in, or read from, the layout that was asked for."""


class NonFiniteError(UserError):
    """The loss or the gradient of a batch is not finite, and the policy says stop; or logits are not."""


class OutOfMemoryError(UserError):
    """A step needs more memory than the device has."""


class CheckpointError(UserError):
    """A checkpoint cannot be written, read, or fitted to this run."""


class UnsoundCheckpointError(CheckpointError):
    """A file of a checkpoint is not as it was written. One of the three below."""

    def __init__(self, text: str, file: str = ""):
        super().__init__(text)
        self.file = file
        """Name in the manifest; empty for the manifest itself."""


class DamagedCheckpointError(UnsoundCheckpointError):
    """A file is there, and its bytes were not those written, twice. Older checkpoints may still be whole."""


class IncompleteCheckpointError(UnsoundCheckpointError):
    """A file is not there. Another machine may have it, or an older checkpoint all of its own."""


class UnreadableCheckpointError(UnsoundCheckpointError):
    """The system refuses to read a file, again and again. A mount, a server or a permission can be mended."""


class NewerFormatError(CheckpointError):
    """A checkpoint of a newer release: sound, but this release must not read, replace or ignore it."""
