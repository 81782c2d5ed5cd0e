"""Transient errors and the user's: a mistake comes again with every try, a fault of the world may pass."""

import errno
import json
import os

import pytest
import typer

from llmfoundry_lite.cli.main import run
from llmfoundry_lite.errors import (
    CheckpointError,
    DataError,
    TransientDataError,
    TransientError,
    UserError,
    has_expired,
    is_masked,
    is_secret_name,
    is_transient,
    mask_credentials,
    one_line,
    printable,
    remember_url_secrets,
)
from llmfoundry_lite.ranks.ending import describe_error
from llmfoundry_lite.ranks.status import write_status


class ClientError(Exception):
    """Like botocore's: the server's answer is in `response`."""

    def __init__(self, code: str, status: int):
        super().__init__(f"An error occurred ({code})")
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class HttpError(Exception):
    """Like gcsfs's (`code`), aiohttp's (`status`) and adlfs's (`status_code`)."""

    def __init__(self, **answer: int):
        self.__dict__ |= answer


class HTTPClientError(Exception):
    """Like botocore's, the base of lost and refused connections."""


class HttpProcessingError(Exception):
    """Like aiohttp's: it has a code of its own, even when the answer was cut."""

    code = 400


class ClientPayloadError(Exception):
    """Like aiohttp's."""


class NoCredentialsError(Exception):
    """Like botocore's."""


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


RENEW = "; renew the credentials, "


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        (ClientError("ExpiredToken", 400), RENEW + "then run the same command again"),
        (ClientError("InvalidAccessKeyId", 403), RENEW + "or ask for access"),
        (ClientError("AccessDenied", 403), RENEW + "or ask for access"),
        (HttpError(status=401), RENEW + "or ask for access"),
        (HttpError(code=403), RENEW + "or ask for access"),
        (ClientError("SlowDown", 503), "; this may pass: run the same command again"),
        (ClientError("NoSuchBucket", 404), ""),
        (of(errno.EACCES), ""),
    ],
    ids=str,
)
def test_an_error_says_what_mends_credentials_that_were_refused(cause, remedy, capsys):
    error = UserError("s3://b: cannot be listed")
    error.__cause__ = as_s3fs(PermissionError, cause)
    assert describe_error(error) == f"error: s3://b: cannot be listed{remedy}"
    assert error.needs_credentials == (RENEW in remedy)

    program = typer.Typer()

    @program.callback(invoke_without_command=True)
    def refused() -> None:
        raise error

    assert run([], program) == error.exit_code
    assert capsys.readouterr().err == f"error: s3://b: cannot be listed{remedy}\n"


MASKED_URLS = {
    "s3://user:hunter2@host:9000/b/k": "s3://user:***@host:9000/b/k",
    "https://u:it's@h/x": "https://u:***@h/x",
    "https://h/x?api_key=a&client.secret=b&X-Amz-Security-Token=c&X-Amz-Credential=d": (
        "https://h/x?api_key=***&client.secret=***&X-Amz-Security-Token=***&X-Amz-Credential=***"
    ),
    "redis://:hunter2@host": "redis://:***@host",
    "https://hunter2@host/x?versionId=3": "https://***@host/x?versionId=3",
    "https://h/x?a=1&X-Amz-Signature=hunter2&b=2": "https://h/x?a=1&X-Amz-Signature=***&b=2",
    "https://h/x?sv=1&sig=hunter2": "https://h/x?sv=1&sig=***",
    "https://h/x?AWSAccessKeyId=hunter2": "https://h/x?AWSAccessKeyId=***",
    "('s3://u:hunter2@h/x', \"https://h?token=hunter2\")": "('s3://u:***@h/x', \"https://h?token=***\")",
    "no://u:p@ss:hunter2@h/x": "no://u:***@h/x",
}
PLAIN_URLS = [
    "s3://bucket/run/ba100",
    "https://host:8080/path@v1",
    "abfss://container@account.dfs.core.windows.net/x",
    "http://127.0.0.1:9/x?versionId=3&page=2",
    "ssh://git@host/x",
    "gs://bucket:name/x@y",
    "http://[::1]:29500/a@x",
    "https://h/x?author=a&max_tokens=5&tokenizer=b&monkey=c",
    "a:b@c, no URL?token=1",
    "hf://datasets/a@main/b",
    "s3://${oc.env:USER}:${oc.decode:${oc.env:PW}}@host/b?token=${oc.env:TOKEN}",
    "https://${oc.env:TOKEN}@host",
]


@pytest.mark.parametrize("text", MASKED_URLS)
def test_credentials_in_urls_are_masked_wherever_text_leaves(text):
    masked = MASKED_URLS[text]
    assert mask_credentials(text) == printable(text) == str(UserError(text)) == mask_credentials(masked) == masked
    assert is_masked(masked) and not is_masked(text)


QUOTED = 'Invalid bucket name "user:{}@bucket": it must match'


@pytest.mark.parametrize(
    ("url", "quoted"),
    [
        ("s3://user:hunter2@bucket/x", "hunter2"),
        ("s3://user:hunter%402@bucket/x", "hunter@2"),
        ("https://hunter2@host/x", "hunter2"),
        ("https://host/x?X-Amz-Signature=hunter2", "hunter2"),
    ],
)
def test_a_secret_that_an_error_quotes_without_its_url_is_masked(tmp_path, url, quoted):
    remember_url_secrets(f"save_folder={url}")
    text = QUOTED.format(quoted)
    masked = QUOTED.format("***")
    assert mask_credentials(text) == printable(text) == str(UserError(text)) == one_line(ValueError(text)) == masked
    write_status(tmp_path, "failed", 3, text, save_error=text)
    for name in ("status.json", "launches.jsonl"):
        assert json.loads((tmp_path / name).read_text())["reason"] == masked
    assert json.loads((tmp_path / "status.json").read_text())["save_error"] == masked
    assert printable(f"a{quoted}") == f"a{quoted}", "a part of another word"


def test_what_is_too_short_to_be_told_from_other_text_is_masked_in_its_url_alone():
    remember_url_secrets("s3://user:a/b@c s3://user:abc@bucket")
    assert mask_credentials("s3://user:abc@bucket, abc") == "s3://user:***@bucket, abc"


def test_a_folder_that_a_client_refuses_is_named_without_its_password(monkeypatch, capsys):
    def refuse(url, **options):
        raise ValueError(QUOTED.format("hunter2"))

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    assert run(["checkpoint", "ls", "s3://user:hunter2@bucket/x"]) == 2
    assert capsys.readouterr().err == f"error: s3://user:***@bucket/x: {QUOTED.format('***')}\n"


SECRET_NAMES = ["HF_TOKEN", "token", "api_key", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "client_secret", "PGPASSWORD"]
OTHER_NAMES = ["eos_token", "num_tokens", "text_key", "key", "NCCL_ALGO", "OMP_NUM_THREADS", "tokenizer", "monkey"]


@pytest.mark.parametrize("name", [*SECRET_NAMES, *OTHER_NAMES])
def test_a_secret_is_told_by_its_name(name):
    assert is_secret_name(name) == (name in SECRET_NAMES)


@pytest.mark.parametrize("text", PLAIN_URLS)
def test_a_url_without_credentials_stays(text):
    assert mask_credentials(text) == text
