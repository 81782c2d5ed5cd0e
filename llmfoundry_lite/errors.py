"""Errors for users, in one line each, and the exit codes of every process.

A user's mistake fails again at every attempt. Other faults may pass: a full disk, a server's 5xx, an expired token, a
lost link. `is_transient` tells them apart by the cause that an error was raised `from`; `from None` marks a mistake.
"""

import difflib
import errno
import re
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import unquote

EXIT_DONE = 0
EXIT_FAILURE = 1
EXIT_USER = 2
EXIT_DIFFERS = 3
"""A replay is not bit-equal to the run."""
EXIT_PREEMPTED = 75
"""State was saved; run the same command again (the number is BSD's EX_TEMPFAIL)."""
EXIT_INTERRUPTED = 130
"""Ctrl-C twice: the process left at once. It is 128 plus SIGINT's number, as in shells."""
EXIT_UNREAD = 141
"""The reader of a command's output has left, as `head` does. It is 128 plus SIGPIPE's number, as in shells."""
EXIT_MEANINGS = {
    EXIT_DONE: "done",
    EXIT_USER: "a mistake in the configuration or the data",
    EXIT_PREEMPTED: "preempted, or stopped by a fault that may pass; run the same command again",
    EXIT_INTERRUPTED: "ended at once by a second Ctrl-C",
    EXIT_FAILURE: "failed: a bug, or a fault that may pass; status.json's reason says which",
}
"""What the exit codes of a run mean. Help and docs/moving-a-run.md say it in these words; other pages point there."""

SECOND_STEP = "pip install --no-deps mosaicml==0.32.1 mosaicml-streaming==0.13.0"
"""Second command of an installation. These two exclude releases of torch, numpy and others that they do run with."""


REFERENCE = r"\$\{(?:[^{}]|\{[^{}]*\})*\}"
"""Pattern of `${oc.env:NAME}`, which stands for a secret without being one."""
PASSWORD = re.compile(rf"""(://(?:{REFERENCE}|\$(?!\{{)|[^\s/:@?\#"$])*:)(?!\$\{{)([^\s/?\#"]*)(?=@)""")
"""Pattern of the password in scheme://user:password@, which ends at the first slash."""
TOKEN = re.compile(r"""(https?://)([^\s/:@?#"]+)(?=@)""")
"""Pattern of a token before the host, without a user's name."""
PARAMETER = re.compile(
    r"""([?&;](?:[\w.-]*[-_.])?
        (?:(?:access|auth)?token|(?:api)?key|awsaccesskeyid|secret|sig|signature|credential|auth|passw(?:or)?d|pwd|pass|pw)=)
        (?!\$\{)([^\s&;\#'"]+)""",
    re.VERBOSE | re.IGNORECASE,
)
"""Pattern of a secret parameter, judged by the last word of its name: access_token, X-Amz-Signature; not max_tokens."""
MASKED = re.compile(r"://[^\s/]*\*\*\*@|[?&;][^\s=&;]+=\*\*\*")
SECRET_NAME = re.compile(
    r"(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)token$|(?:api|access|secret|private|auth|account)_?key$"
    r"|secret$|credentials?$|passw(?:or)?d$|passphrase$|pwd$",
    re.IGNORECASE,
)
"""Pattern of a key or an environment variable whose value is a secret: HF_TOKEN, api_key; not eos_token."""

MIN_SECRET_LENGTH = 4
"""Characters from which on a secret is masked outside of its URL. A shorter one would hide too much other text."""
_known_secrets: set[str] = set()


def learn_secret(text: str) -> None:
    """Let `mask_credentials` hide `text` wherever it stands, as itself or percent-decoded."""
    _known_secrets.update(one for one in (text, unquote(text)) if len(one) >= MIN_SECRET_LENGTH and "***" not in one)


def learn_credentials(text: str) -> None:
    """Learn the secrets of URLs in `text`, which a user has given: a client's error may quote one without its URL, as
    botocore does in `Invalid bucket name "user:password@bucket"`."""
    for pattern in (PASSWORD, TOKEN, PARAMETER) if "://" in text else ():
        for found in pattern.finditer(text):
            learn_secret(found[2])


def is_secret_name(name: str) -> bool:
    """Return whether a key or an environment variable of this name holds a secret."""
    return SECRET_NAME.search(name) is not None


def mask_urls(text: str) -> str:
    """Return `text` with `***` for passwords, tokens and signatures in URLs. For JSON and other records with a form of
    their own, in which a known secret could be part of a key."""
    if "://" not in text:
        return text
    return PARAMETER.sub(r"\1***", TOKEN.sub(r"\1***", PASSWORD.sub(r"\1***", text)))


def mask_credentials(text: str) -> str:
    """Return `text` with `***` for secrets in URLs, and for known secrets outside of them. Every message goes through
    this, and every text that a record quotes."""
    text = mask_urls(text)
    for secret in sorted(_known_secrets, key=len, reverse=True):
        if secret in text:
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "***", text)
    return text


def is_masked(text: str) -> bool:
    """Return whether `text` has a URL whose credentials were masked, so that it opens nothing."""
    return "://" in text and MASKED.search(text) is not None


def printable(text: str, *, keep: str = "") -> str:
    """Return `text` for a terminal: control characters escaped, except those in `keep`, and credentials masked. Names
    of runs and files may come from anybody, and a terminal obeys control characters."""
    text = mask_credentials(text)
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape", "backslashreplace").decode() for c in text
    )


def list_names(names: Iterable[object]) -> str:
    """Write `a, b`. A name with white space, quotes or commas is quoted, since ` text` looks like `text`."""
    return ", ".join(name if re.fullmatch(r"[^\s,'\"]+", name) else repr(name) for name in map(str, names))


def either(options: Sequence[object]) -> str:
    """Write `a, b or c`."""
    *others, last = map(str, options)
    return f"{', '.join(others)} or {last}" if others else last


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known word that was probably meant; empty if no spelling is near. `cutoff`: difflib's ratio."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), "")


BRIEF_ERRNOS = (
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.EAGAIN, errno.ENOTCONN, errno.ESHUTDOWN),
    *(errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET),
)
"""Errors of disks, and of servers behind them, that may be gone a moment later."""
TRANSIENT_ERRNOS = {*BRIEF_ERRNOS, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EBUSY} - {errno.EAGAIN}
"""Errors that may be gone an hour later. EAGAIN is left out, since it means a lock that another process holds."""
TRANSIENT_STATUSES = (408, 425, 429)
"""Transient HTTP statuses besides 5xx: too slow, too early, too many requests."""
EXPIRED_CODES = ("400", "ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
"""S3's codes for expired credentials. The answer to a HEAD request has no body, so an expired token is a bare 400."""
TRANSIENT_CODES = (
    *(*EXPIRED_CODES, "SlowDown", "RequestTimeout", "BandwidthLimitExceeded", "RequestLimitExceeded"),
    *("ConditionalRequestConflict", "OperationAborted"),
)
"""Transient codes of S3 and similar stores. Every code that contains `Throttl` counts too."""
REFUSED_CODES = (
    "401",
    "403",
    "AccessDenied",
    "Forbidden",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
)
"""S3's codes for credentials that are unknown, or do not suffice."""
TRANSIENT_CLASSES = {
    *("HTTPClientError", "ConnectionError", "CredentialRetrievalError", "TokenRetrievalError"),
    *("MetadataRetrievalError", "UnauthorizedSSOTokenError", "SSOTokenLoadError", "ClientConnectionError"),
    *("ClientPayloadError", "TransportError", "IncompleteRead", "ResponseParserError"),
}
"""Names of clients' errors for links and credentials: botocore, aiohttp, requests, httpx, urllib3."""


class TransientError(OSError):
    """A fault on another rank that may pass. The original error cannot be sent between ranks."""


def is_transient(error: BaseException | None) -> bool:
    """Return whether the causes of `error` may pass without a change of the command. A server's answer decides if there
    is one, else the operating system's error."""
    chain = _causes(error)
    answers = [answer for one in chain if (answer := _answer_of(one)) is not None]
    return answers[0] if answers else any(_is_transient_here(one) for one in chain)


def has_expired(error: BaseException | None) -> bool:
    """Return whether a server has refused credentials that have expired."""
    return any(_code_of(one) in EXPIRED_CODES for one in _causes(error))


def needs_credentials(error: BaseException | None) -> bool:
    """Return whether a server has refused the credentials: they have expired, are unknown, or do not suffice."""
    if has_expired(error):
        return True
    return any(_code_of(one) in REFUSED_CODES or _status_of(one) in (401, 403) for one in _causes(error))


def lacks_permission(error: BaseException | None) -> bool:
    """Return whether this machine's system has refused a file to the user. A server's refusal is about credentials."""
    return any(isinstance(one, PermissionError) for one in _causes(error)) and not needs_credentials(error)


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
    """Return whether a server's answer is transient; None if `error` is no server's answer."""
    if any(kind.__name__ == "HttpProcessingError" for kind in type(error).__mro__):
        return None  # aiohttp gives a truncated answer the code 400, which no server has sent
    code, status = _code_of(error), _status_of(error)
    if code is not None and (code in TRANSIENT_CODES or "Throttl" in code):
        return True
    if status is None or not 400 <= status < 600:
        return None
    return status in TRANSIENT_STATUSES or (status >= 500 and status != 501)


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status of a server's answer."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status: Any = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    asked = ((response, "status_code"), (error, "status_code"), (error, "status"), (error, "code"))
    return next((found for where, name in asked if isinstance(found := getattr(where, name, None), int)), None)


def _is_transient_here(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS:
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, (TransientError, TimeoutError)) or bool(names & TRANSIENT_CLASSES)


class UserError(ValueError):
    """An error with a cause outside this package, in one line. Exit code 2: a mistake; 75: a fault that may pass.

    ConfigError, DataError and CheckpointError are subclasses of it.

    >>> try:
    ...     lf.load("runs/nowhere")
    ... except lf.UserError as error:
    ...     print(error, error.exit_code)
    models: runs/nowhere does not exist; expected a run, a checkpoint, an exported folder or hf:NAME 2
    """

    has_lost = False
    """Whether some trained batches are in no save, so that the exit code is 1, not 75."""
    _exit_code: int | None = None

    def __str__(self) -> str:
        return mask_credentials(super().__str__())

    _needs_credentials = False
    _lacks_permission = False

    @property
    def is_transient(self) -> bool:
        return is_transient(self.__cause__)

    @property
    def needs_credentials(self) -> bool:
        """Whether new credentials may mend it."""
        return self._needs_credentials or needs_credentials(self.__cause__)

    @needs_credentials.setter
    def needs_credentials(self, value: bool) -> None:
        self._needs_credentials = value

    @property
    def lacks_permission(self) -> bool:
        """Whether it is mended when somebody gives the user the right to a file here."""
        return self._lacks_permission or lacks_permission(self.__cause__)

    @lacks_permission.setter
    def lacks_permission(self, value: bool) -> None:
        self._lacks_permission = value

    @property
    def remedy(self) -> str:
        """What follows from the cause, for the end of a message; empty if nothing does."""
        if self.needs_credentials and self.is_transient:
            return "; renew the credentials, then run the same command again"
        if self.needs_credentials:
            return "; renew the credentials, or ask for access"
        if self.is_transient:
            return "; this may pass: run the same command again"
        return ""

    @property
    def exit_code(self) -> int:
        if self._exit_code is not None:
            return self._exit_code
        if not self.is_transient:
            return EXIT_USER
        return EXIT_FAILURE if self.has_lost else EXIT_PREEMPTED

    @exit_code.setter
    def exit_code(self, code: int) -> None:
        self._exit_code = code


def one_line(error: BaseException) -> str:
    """Return the message of an error without line ends, or its type if it has no message."""
    return mask_credentials(" ".join(str(error).split())) or type(error).__name__


class ConfigError(UserError):
    """The YAML files or the `key=value` arguments ask for something impossible."""


class DataError(UserError):
    """A data set, a document or a tokenizer is missing, damaged or does not match."""


class OtherDataError(DataError):
    """The data is not what a checkpoint was trained with."""

    def __init__(self, text: str, difference: str = ""):
        super().__init__(text)
        self.difference = difference


class TransientDataError(DataError):
    """A transient DataError from a worker process, whose cause cannot be sent to its rank."""

    @property
    def is_transient(self) -> bool:
        return True


class ExportError(UserError):
    """Weights cannot be written in, or read from, the layout that was asked for."""


class MissingRanksError(UserError):
    """The ranks of a launch did not find each other in time."""


class DivergedError(UserError):
    """The weights may have been ruined by training, so that a save of them would displace a better one."""


class NonFiniteError(DivergedError):
    """The loss or gradient of a batch is not finite and the policy is to stop, or logits are not finite."""


class OutOfMemoryError(UserError):
    """A step needs more memory than the device has."""


class CheckpointError(UserError):
    """A checkpoint cannot be written, read, or fitted to this run."""


class UnsoundCheckpointError(CheckpointError):
    """A file of a checkpoint is not as it was written: one of the three errors below."""

    def __init__(self, text: str, file: str = ""):
        super().__init__(text)
        self.file = file
        """Name of the file in the manifest; empty for the manifest itself."""


class DamagedCheckpointError(UnsoundCheckpointError):
    """A file exists, but two readings gave other bytes than were written. Older checkpoints may still be whole."""


class IncompleteCheckpointError(UnsoundCheckpointError):
    """A file is missing. Another machine may have it, or an older checkpoint may be complete."""


class UnreadableCheckpointError(UnsoundCheckpointError):
    """The system refuses to read a file, repeatedly. A mount, a server or a permission may need repair."""


class NewerFormatError(CheckpointError):
    """A checkpoint is of a newer release. It is sound, but this release must not read, replace or ignore it."""
