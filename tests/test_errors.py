"""Whose fault an error is: a mistake comes again with every try, a fault of the world may pass."""

import errno
import os

import pytest

from llmfoundry_lite.errors import (
    CheckpointError,
    DataError,
    TransientDataError,
    TransientError,
    UserError,
    has_expired,
    is_transient,
)


class ClientError(Exception):
    """As botocore's: the server's answer is in `response`."""

    def __init__(self, code: str, status: int):
        super().__init__(f"An error occurred ({code})")
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class HttpError(Exception):
    """As gcsfs's (`code`), aiohttp's (`status`) and adlfs's (`status_code`)."""

    def __init__(self, **answer: int):
        self.__dict__ |= answer


class HTTPClientError(Exception):
    """As botocore's, of which lost and refused connections are."""


class HttpProcessingError(Exception):
    """As aiohttp's: it has a code of its own, also when the answer was cut."""

    code = 400


class ClientPayloadError(Exception):
    """As aiohttp's."""


class NoCredentialsError(Exception):
    """As botocore's."""


def as_s3fs(kind, cause: Exception) -> OSError:
    """s3fs makes an OSError of each answer, and says which one it was raised from."""
    error = kind if isinstance(kind, OSError) else kind("refused")
    error.__cause__ = cause
    return error


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def of(number: int) -> OSError:
    return OSError(number, os.strerror(number))


MAY_PASS = {
    "a disk that is full": of(errno.ENOSPC),
    "a quota that is used up": of(errno.EDQUOT),
    "a disk that is read-only": of(errno.EROFS),
    "a disk that fails": of(errno.EIO),
    "a network disk that was taken away": of(errno.ESTALE),
    "a connection that was refused": ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
    "a connection that was cut, without a number": ConnectionResetError("cut"),
    "a server that does not answer": TimeoutError("timed out"),
    "SlowDown": as_s3fs(of(errno.EBUSY), ClientError("SlowDown", 503)),
    "an answer to a HEAD request": as_s3fs(of(errno.EBUSY), ClientError("503", 503)),
    "InternalError": as_s3fs(of(errno.EREMOTEIO), ClientError("InternalError", 500)),
    "ThrottlingException": as_s3fs(of(errno.EIO), ClientError("ThrottlingException", 400)),
    "ExpiredToken": as_s3fs(PermissionError, ClientError("ExpiredToken", 400)),
    "too many requests": HttpError(status_code=429),
    "a gateway of Google's": HttpError(code=502),
    "a link of botocore's": HTTPClientError("Could not connect to the endpoint URL"),
    "an answer that was cut": caused_by(ClientPayloadError("not completed"), HttpProcessingError("81 of 163 bytes")),
    "another rank's": TransientError("of another rank"),
}
MISTAKES = {
    "a permission": PermissionError(errno.EACCES, "Permission denied"),
    "a file that is not there": FileNotFoundError(errno.ENOENT, "No such file"),
    "a lock that somebody holds": BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    "AccessDenied": as_s3fs(PermissionError, ClientError("AccessDenied", 403)),
    "NoSuchBucket": as_s3fs(FileNotFoundError, ClientError("NoSuchBucket", 404)),
    "a code that s3fs does not know": as_s3fs(of(errno.EIO), ClientError("IllFormed", 400)),
    "what the server cannot do": HttpError(status=501),
    "no credentials": NoCredentialsError("Unable to locate credentials"),
    "a value": ValueError("seven"),
}


@pytest.mark.parametrize("what", [*MAY_PASS, *MISTAKES])
def test_what_led_to_an_error_says_whose_fault_it_is(what):
    cause = (MAY_PASS | MISTAKES)[what]
    error = CheckpointError("s3://b/run: cannot be listed")
    error.__cause__ = cause
    assert is_transient(error) == error.is_transient == (what in MAY_PASS)
    assert error.exit_code == (75 if what in MAY_PASS else 2)
    outer = DataError("load_path")
    outer.__cause__ = error
    assert outer.is_transient == (what in MAY_PASS)


def test_a_fault_that_may_pass_is_a_failure_where_batches_are_lost():
    error = UserError("full")
    error.__cause__ = of(errno.ENOSPC)
    error.has_lost = True
    assert error.exit_code == 1


def test_what_nothing_led_to_is_a_mistake():
    try:
        raise of(errno.ENOSPC)
    except OSError as full:
        try:
            raise UserError("/dev/shm is too small for the table") from None
        except UserError as error:
            assert error.__context__ is full and not error.is_transient and error.exit_code == 2


def test_a_workers_error_is_known_by_its_kind():
    assert TransientDataError("gone").exit_code == 75


@pytest.mark.parametrize(("code", "expected"), [("ExpiredToken", True), ("400", True), ("SlowDown", False)])
def test_credentials_that_have_expired_are_told_from_other_answers(code, expected):
    assert has_expired(as_s3fs(PermissionError, ClientError(code, 400))) is expected
