"""Errors for users, whose messages are one line each, and the exit codes of all processes.

A mistake of the user fails again at every attempt. Other faults may pass: a full disk, a server's 5xx, an expired
token, a lost connection. `is_transient` tells them apart by the error that another was raised `from`; `raise … from
None` marks a mistake. The module also masks credentials, which no message may contain, and has helpers for messages.
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
"""The reader of a command's output has ended, as `head` does. It is 128 plus SIGPIPE's number, as in shells."""
EXIT_MEANINGS = {
    EXIT_DONE: "done",
    EXIT_USER: "a mistake in the configuration or the data",
    EXIT_PREEMPTED: "preempted, or stopped by a fault that may pass; run the same command again",
    EXIT_INTERRUPTED: "ended at once by a second Ctrl-C",
    EXIT_FAILURE: "failed: a bug, or a fault that may pass; status.json's reason says which",
}
"""Meaning of the exit codes of a run. Help and docs/moving-a-run.md say it in these words; other pages point there."""

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
"""Least number of characters of a secret that is masked outside of its URL. Shorter ones would hide too much text."""
_known_secrets: set[str] = set()


def remember_secret(text: str) -> None:
    """Remember a secret, so that `mask_credentials` replaces it by `***` in every later message of this process.

    Its percent-decoded form is remembered too. Texts of fewer than MIN_SECRET_LENGTH characters, and texts that are
    masked already, are ignored.
    """
    for secret in (text, unquote(text)):
        if len(secret) >= MIN_SECRET_LENGTH and "***" not in secret:
            _known_secrets.add(secret)


def remember_url_secrets(text: str) -> None:
    """Remember the passwords, tokens and signatures of URLs in `text`, so that later messages mask them.

    Masking URLs does not suffice, because a client's error may quote a secret without its URL, as botocore does in
    `Invalid bucket name "user:password@bucket"`.
    """
    if "://" not in text:
        return
    for pattern in (PASSWORD, TOKEN, PARAMETER):
        for match in pattern.finditer(text):
            remember_secret(match[2])


def is_secret_name(name: str) -> bool:
    """Return whether a key or an environment variable of this name holds a secret: true for HF_TOKEN, not eos_token."""
    return SECRET_NAME.search(name) is not None


def mask_urls(text: str) -> str:
    """Return `text` with `***` for passwords, tokens and signatures in URLs.

    >>> mask_urls("s3://user:password@bucket/run")
    's3://user:***@bucket/run'

    Unlike `mask_credentials`, this does not change secrets outside of URLs. It is meant for JSON and other structured
    records, in which a known secret could happen to be part of a key.
    """
    if "://" not in text:
        return text
    text = PASSWORD.sub(r"\1***", text)
    text = TOKEN.sub(r"\1***", text)
    return PARAMETER.sub(r"\1***", text)


def mask_credentials(text: str) -> str:
    """Return `text` with `***` for secrets in URLs, and for secrets that `remember_secret` was given.

    Every message to a user goes through this function, and so does every text that a record quotes.
    """
    text = mask_urls(text)
    # Longest first, because one secret may be part of another.
    for secret in sorted(_known_secrets, key=len, reverse=True):
        if secret in text:
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "***", text)
    return text


def is_masked(text: str) -> bool:
    """Return whether `text` has a URL with `***` in place of its credentials, which therefore cannot be opened."""
    return "://" in text and MASKED.search(text) is not None


def printable(text: str, *, keep: str = "") -> str:
    """Return `text` in a form that is safe to print: control characters escaped, credentials masked.

    Names of runs and files may come from other people, and a terminal obeys control characters. Those in `keep`, such
    as a line end, stay as they are.
    """

    def escape(character: str) -> str:
        if character.isprintable() or character in keep:
            return character
        return character.encode("unicode_escape", "backslashreplace").decode()

    return "".join(map(escape, mask_credentials(text)))


def list_names(names: Iterable[object]) -> str:
    """Return names as `a, b`. Those with white space, quotes or commas are quoted: ` text` differs from `text`."""
    texts = map(str, names)
    return ", ".join(text if re.fullmatch(r"[^\s,'\"]+", text) else repr(text) for text in texts)


def join_with_or(options: Sequence[object]) -> str:
    """Return one or more options as a phrase for a message: `a`, `a or b`, `a, b or c`."""
    *others, last = map(str, options)
    return f"{', '.join(others)} or {last}" if others else last


def join_with_and(names: Sequence[object]) -> str:
    """Return one or more names as a phrase: `a`, `a and b`, `a, b and c`."""
    *others, last = map(str, names)
    return f"{', '.join(others)} and {last}" if others else last


def find_nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known word that is spelt most like `word`, to suggest it in a message; empty if none is similar.

    >>> find_nearest("max_seqlen", ["seed", "max_seq_len"])
    'max_seq_len'

    `cutoff` is the least similarity, from 0 to 1, by `difflib.get_close_matches`.
    """
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else ""


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
    """A fault on another rank that may pass. It replaces that rank's error, which cannot be sent between ranks."""


def is_transient(error: BaseException | None) -> bool:
    """Return whether an error may go away without any change, so that the same command can succeed later.

    `error` and the errors that it was raised `from` are examined. If one of them is a server's answer, the first such
    answer decides. Otherwise one transient error of the operating system or of a network client suffices.
    """
    causes = chain_of_causes(error)
    for cause in causes:
        is_transient_answer = _is_transient_answer(cause)
        if is_transient_answer is not None:
            return is_transient_answer
    return any(_is_transient_local_error(cause) for cause in causes)


def has_expired(error: BaseException | None) -> bool:
    """Return whether a server has refused credentials because they have expired, by `error` or one of its causes."""
    return any(_s3_code_of(cause) in EXPIRED_CODES for cause in chain_of_causes(error))


def needs_credentials(error: BaseException | None) -> bool:
    """Return whether a server has refused the credentials: they have expired, are unknown, or do not suffice."""
    if has_expired(error):
        return True
    for cause in chain_of_causes(error):
        if _s3_code_of(cause) in REFUSED_CODES or _http_status_of(cause) in (401, 403):
            return True
    return False


def lacks_permission(error: BaseException | None) -> bool:
    """Return whether this machine's file system has refused a file to the user.

    It is false if a server has refused the credentials, because then `needs_credentials` is true.
    """
    has_permission_error = any(isinstance(cause, PermissionError) for cause in chain_of_causes(error))
    return has_permission_error and not needs_credentials(error)


def chain_of_causes(error: BaseException | None) -> list[BaseException]:
    """Return `error`, the error that it was raised `from`, that one's cause, and so on; empty for None."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__
    return chain


def _s3_code_of(error: BaseException) -> str | None:
    """Return the code in the response of a botocore ClientError, such as `SlowDown`; None for other errors."""
    response: Any = getattr(error, "response", None)
    if not isinstance(response, dict):
        return None
    return str(response.get("Error", {}).get("Code"))


def _is_transient_answer(error: BaseException) -> bool | None:
    """Return whether `error` is a server's answer that may change later; None if it is not a server's answer.

    S3's code counts before the HTTP status. Transient statuses are those of TRANSIENT_STATUSES, and 5xx except 501 (not
    implemented).
    """
    if any(base.__name__ == "HttpProcessingError" for base in type(error).__mro__):
        return None  # aiohttp gives a truncated answer the code 400, which no server has sent

    code = _s3_code_of(error)
    if code is not None and (code in TRANSIENT_CODES or "Throttl" in code):
        return True

    status = _http_status_of(error)
    if status is None or not 400 <= status < 600:
        return None
    is_server_error = status >= 500 and status != 501
    return is_server_error or status in TRANSIENT_STATUSES


def _http_status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an error of a network client carries; None if it carries none.

    botocore has it in a dictionary `response`, requests and httpx in `response.status_code`, huggingface_hub, aiohttp
    and urllib in an attribute of the error itself.
    """
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status: Any = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None

    attributes = ((response, "status_code"), (error, "status_code"), (error, "status"), (error, "code"))
    for holder, name in attributes:
        status = getattr(holder, name, None)
        if isinstance(status, int):
            return status
    return None


def _is_transient_local_error(error: BaseException) -> bool:
    """Return whether this single error, without its causes, is a fault of a disk, a link or credentials that may pass.

    Errors of network clients are recognised by the names of their classes, so that no client has to be imported.
    """
    if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS:
        return True
    if isinstance(error, (TransientError, TimeoutError)):
        return True
    class_names = {base.__name__ for base in type(error).__mro__}
    return bool(class_names & TRANSIENT_CLASSES)


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
        """Whether the same command may succeed later without any change, by the error it was raised `from`."""
        return is_transient(self.__cause__)

    @property
    def needs_credentials(self) -> bool:
        """Whether a server has refused the credentials, so that the user has to renew them or ask for access.

        It follows from the error that this was raised `from`, unless it was set to true.
        """
        return self._needs_credentials or needs_credentials(self.__cause__)

    @needs_credentials.setter
    def needs_credentials(self, value: bool) -> None:
        self._needs_credentials = value

    @property
    def lacks_permission(self) -> bool:
        """Whether this machine's file system has refused a file, so that somebody has to grant the user a permission.

        It follows from the error that this was raised `from`, unless it was set to true.
        """
        return self._lacks_permission or lacks_permission(self.__cause__)

    @lacks_permission.setter
    def lacks_permission(self, value: bool) -> None:
        self._lacks_permission = value

    @property
    def remedy(self) -> str:
        """Advice to the user, to be appended to a message. It begins with `; `, or is empty if there is none."""
        if self.needs_credentials and self.is_transient:
            return "; renew the credentials, then run the same command again"
        if self.needs_credentials:
            return "; renew the credentials, or ask for access"
        if self.is_transient:
            return "; this may pass: run the same command again"
        return ""

    @property
    def exit_code(self) -> int:
        """Exit code of a process that ends with this error, unless another one was set.

        EXIT_USER if the error would occur again. Otherwise EXIT_PREEMPTED, so that a scheduler runs the command
        again, or EXIT_FAILURE if trained batches were lost (`has_lost`).
        """
        if self._exit_code is not None:
            return self._exit_code
        if not self.is_transient:
            return EXIT_USER
        return EXIT_FAILURE if self.has_lost else EXIT_PREEMPTED

    @exit_code.setter
    def exit_code(self, code: int) -> None:
        self._exit_code = code


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line, credentials masked, or the error's type if it has no message."""
    message = " ".join(str(error).split())
    return mask_credentials(message) or type(error).__name__


class ConfigError(UserError):
    """The YAML files or the `key=value` arguments ask for something impossible."""


class OwnCodeError(ConfigError):
    """The user's own code has raised an error when it was imported, built or restored.

    The error is the `__cause__`, and its traceback is printed before this line. A restart would meet it again.
    """


class DataError(UserError):
    """A data set, a document or a tokenizer is missing, damaged or does not match."""


class OtherDataError(DataError):
    """The data is not what a checkpoint was trained with."""

    def __init__(self, text: str, difference: str = ""):
        super().__init__(text)
        self.difference = difference
        """Differences, without the advice that follows them in the message."""


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
