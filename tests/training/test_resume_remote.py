"""A run whose checkpoints go to S3 over HTTP while connections drop."""

import json

import pytest

from tests.checkpoint.s3_server import DroppingProxy, s3_server
from tests.helpers.launch import train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config

pytest.importorskip("s3fs")
pytest.importorskip("moto")
pytestmark = [pytest.mark.multiprocess, pytest.mark.fault, pytest.mark.slow]


def credentials(port):
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@pytest.fixture(scope="module")
def server():
    import s3fs

    with s3_server() as port:
        options = {"endpoint_url": f"http://127.0.0.1:{port}"}
        s3fs.S3FileSystem(key="test", secret="test", client_kwargs=options).mkdir("runs")
        yield port


def run(tmp_path, config, name, num_ranks, port, **changes):
    path = write_config(tmp_path / f"{name}.yaml", {**config, "run_name": name, **changes})
    return train([path], tmp_path, num_ranks, env=credentials(port))


def test_a_run_over_a_bad_line_saves_or_stops_and_in_the_end_is_the_same_run(tmp_path, data, server):
    config = tiny_config(data, autoresume=True, max_duration="8ba", save_interval="1ba", save_num_checkpoints_to_keep=2)
    config["save_folder"] = "s3://runs/{run_name}"
    run(tmp_path, config, "good", 2, server).check()
    proxy = DroppingProxy(server, drop_rate=0.5, seed=1)
    try:
        for _ in range(6):
            result = run(tmp_path, config, "bad", 2, proxy.port)
            assert "Traceback" not in result.output
            if set(result.exit_codes) == {0}:
                break
            assert 2 in result.exit_codes
            assert json.loads((tmp_path / "runs/bad/status.json").read_text())["status"] == "failed"
        assert proxy.num_dropped
    finally:
        proxy.shutdown()
        proxy.server_close()
    run(tmp_path, config, "bad", 2, server).check()
    good, bad = (read_metrics(tmp_path / "runs" / name) for name in ("good", "bad"))
    assert values(bad, "loss/train/total") == values(good, "loss/train/total")
