"""A run whose checkpoints go to S3 over HTTP while connections drop, or while the server says SlowDown."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.checkpoint.s3_server import DroppingProxy, RefusingProxy, s3_server
from tests.helpers.launch import ROOT, train
from tests.helpers.present import needs
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
            assert 2 not in result.exit_codes, "a bad line is no mistake of the user"
            ended = json.loads((tmp_path / "runs/bad/status.json").read_text())["status"]
            assert ended == ("preempted" if 75 in result.exit_codes else "failed")
        assert proxy.num_dropped
    finally:
        proxy.shutdown()
        proxy.server_close()
    run(tmp_path, config, "bad", 2, server).check()
    good, bad = (read_metrics(tmp_path / "runs" / name) for name in ("good", "bad"))
    assert values(bad, "loss/train/total") == values(good, "loss/train/total")


class Storm:
    """SlowDown for so many requests at the start, and for so many that put what belongs to batch 4."""

    def __init__(self, at_start: int, in_save: int):
        self.at_start, self.in_save = at_start, in_save

    def __call__(self, method, path, headers):
        if self.at_start > 0:
            self.at_start -= 1
            return "SlowDown"
        if self.in_save > 0 and method == "PUT" and "/ba4/" in path:
            self.in_save -= 1
            return "SlowDown"
        return None


@pytest.fixture
def proxy(server):
    proxy = RefusingProxy(server)
    yield proxy
    proxy.close()


def test_a_storm_at_the_start_ends_ranks_with_75_and_nothing_is_lost(tmp_path, data, proxy):
    """Without our launcher."""
    proxy.refuses = Storm(at_start=10_000, in_save=0)
    config = tiny_config(data, autoresume=True, max_duration="2ba", save_folder="s3://runs/{run_name}")
    path = write_config(tmp_path / "storm.yaml", {**config, "run_name": "storm"})
    quick = {"AWS_MAX_ATTEMPTS": "1"}
    result = train([path], tmp_path, env=credentials(proxy.port) | quick)
    assert result.exit_codes == [75]
    assert result.output.strip().splitlines()[-1].endswith("; this may pass: run the same command again")
    assert json.loads((tmp_path / "runs/storm/status.json").read_text())["status"] == "preempted"
    proxy.refuses = Storm(at_start=0, in_save=0)
    train([path], tmp_path, env=credentials(proxy.port) | quick).check()


@needs("llmfoundry_ops")
def test_storms_at_the_start_and_in_the_middle_of_a_save_cost_a_launcher_nothing_but_time(tmp_path, data, proxy):
    proxy.refuses = Storm(at_start=30, in_save=25)
    config = tiny_config(data, max_duration="6ba", save_interval="2ba", save_folder="s3://runs/{run_name}")
    write_config(tmp_path / "run.yaml", {**config, "run_name": "waits"})
    command = [sys.executable, "-m", "llmfoundry_lite", "train", "-n", "2", "--max-restarts", "0", "run.yaml"]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "AWS_MAX_ATTEMPTS": "1", **credentials(proxy.port)}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 300, "check": False}
    found = subprocess.run(command, cwd=tmp_path, env=os.environ | environment, **options)
    assert found.returncode == 0, found.stdout
    assert "met a fault that may pass; next try in 1 s, for 1800 s in all (retry_for)" in found.stdout
    assert "ba2 stands, and the next save tries again" in found.stdout
    assert "saved ba6" in found.stdout and "saved ba4" not in found.stdout


class TokenExpires:
    """The token has expired from the first shard of batch 4 on, until three saves have failed."""

    def __init__(self, num_saves: int):
        self.num_saves, self.seen, self.has_expired = num_saves, set[str](), False

    def __call__(self, method, path, headers):
        save = re.search(r"/e1-(ba\d+)-", path)
        if method in ("PUT", "POST") and save is not None and save[1] != "ba2":
            self.seen.add(save[1])
            self.has_expired = len(self.seen) <= self.num_saves
        return "ExpiredToken" if self.has_expired else None


@pytest.mark.parametrize(("num_saves", "code"), [(1, 0), (99, 1)], ids=["renewed", "never renewed"])
def test_saves_after_a_token_has_expired_ask_for_new_credentials_and_do_not_end_as_saved(
    tmp_path, data, proxy, num_saves, code
):
    proxy.refuses = TokenExpires(num_saves)
    config = tiny_config(data, max_duration="40ba", save_interval="2ba", save_folder="s3://runs/{run_name}")
    config["max_unsaved"] = "12ba" if code else "30m"
    path = write_config(tmp_path / "expires.yaml", {**config, "run_name": f"expires{code}"})
    result = train([path], tmp_path, env=credentials(proxy.port))
    status = json.loads((tmp_path / f"runs/expires{code}/status.json").read_text())
    assert result.exit_codes == [code], result.output
    assert "renew the credentials; ba2 stands, and the next save tries again\n" in result.output
    assert "run the same command again" not in result.output.replace("renew the credentials, then run the same", "")
    if code == 0:
        assert (status["status"], status["last_saved"], status["failed_saves"]) == ("done", "ba40", 0)
    else:
        assert (status["status"], status["last_saved"]) == ("failed", "ba2")
        assert status["reason"].endswith("; renew the credentials, then run the same command again")


def test_a_bucket_that_takes_no_record_of_a_launch_changes_neither_its_end_nor_its_code(tmp_path, data, proxy):
    refused = []

    def refuses(method, path, headers):
        is_record = method == "PUT" and "/launches/" in path
        refused.append(path) if is_record else None
        return "InternalError" if is_record else None

    proxy.refuses = refuses
    config = tiny_config(data, max_duration="4ba", save_interval="2ba", save_folder="s3://runs/{run_name}")
    path = write_config(tmp_path / "untold.yaml", {**config, "run_name": "untold"})
    result = train([path], tmp_path, env=credentials(proxy.port)).check()
    assert refused and result.output.strip().splitlines()[-1] == "saved ba4"
    status = json.loads((tmp_path / "runs/untold/status.json").read_text())
    assert (status["status"], status["last_saved"]) == ("done", "ba4")
