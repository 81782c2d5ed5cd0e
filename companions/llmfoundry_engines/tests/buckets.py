"""A local S3 server for tests, and what an output there holds."""

from pathlib import Path

import pytest


def use_server(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Let clients use the server at a port."""
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "S3_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()


def copy_of(out: str, folder: Path) -> Path:
    """Copy an output to this machine."""
    import s3fs

    filesystem = s3fs.S3FileSystem()
    filesystem.invalidate_cache()
    root = out.removeprefix("s3://")
    for path in filesystem.find(root):
        target = folder / path.removeprefix(f"{root}/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(filesystem.cat_file(path))
    return folder
