"""One thread for torch: the tests share two cores with others. Folders of both kinds."""

import uuid

import pytest


@pytest.fixture(autouse=True)
def one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(params=["local", "remote"])
def url(request, tmp_path):
    return str(tmp_path / "checkpoints") if request.param == "local" else f"memory://{uuid.uuid4().hex}"
