"""Two clusters, one run: what goes along from the one to the other besides the weights."""

import json
import shutil
import uuid

import pytest

from llmfoundry_lite.checkpoint.run_log import read_log
from llmfoundry_lite.checkpoint.store import open_checkpoint
from tests.checkpoint.s3_server import s3_server
from tests.helpers.launch import train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto")
pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture(scope="module")
def bucket():
    with s3_server() as port:
        environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        name = f"runs-{uuid.uuid4().hex}"
        with pytest.MonkeyPatch.context() as patch:
            for key, value in environment.items():
                patch.setenv(key, value)
            s3fs.S3FileSystem.clear_instance_cache()
            s3fs.S3FileSystem().mkdir(name)
            yield f"s3://{name}", environment
        s3fs.S3FileSystem.clear_instance_cache()


def test_the_curve_goes_from_cluster_to_cluster_with_the_checkpoint(tmp_path, data, bucket):
    """A bucket is all that the two have in common; each has its own run directory."""
    url, environment = bucket
    here, there = tmp_path / "here", tmp_path / "there"
    changes = {"save_folder": url + "/{run_name}", "autoresume": True, "max_duration": "9ba"}
    config = tiny_config(data, loggers={"wandb": {}}, **changes)
    environment = {**environment, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}

    def launch(cluster, num_ranks, **more):
        cluster.mkdir(exist_ok=True)
        path = write_config(cluster / "tiny.yaml", {**config, **more})
        return train([path], cluster, num_ranks, env=environment).check().output

    launch(here, 2, stop_after="3ba")
    assert "carrying on from s3://" in launch(there, 1, stop_after="3ba")
    assert [record["batch"] for record in read_metrics(there / "runs/tiny")] == [1, 2, 3, 4, 5, 6]
    launch(here, 2)
    records = read_metrics(here / "runs/tiny")
    assert [record["launch"] for record in records] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert len((here / "runs/tiny/metrics.jsonl").read_text().splitlines()) - len(records) <= 2  # rewritten at ends
    ids = {(cluster / "runs/tiny/wandb_id").read_text() for cluster in (here, there)}
    assert len(ids) == 1

    whole = tmp_path / "whole"
    whole.mkdir()
    path = write_config(whole / "tiny.yaml", {**config, "save_folder": None, "loggers": {}})
    train([path], whole, 2).check()
    expected = read_metrics(whole / "runs/tiny")
    assert values(records, "data/digest") == values(expected, "data/digest")
    assert values(records, "loss/train/total") == pytest.approx(values(expected, "loss/train/total"), abs=1e-4)


def test_another_run_begins_from_a_checkpoint_in_a_bucket(tmp_path, data, bucket):
    url, environment = bucket
    config = tiny_config(data, save_folder=url + "/{run_name}", max_duration="3ba", run_name="first")
    path = write_config(tmp_path / "first.yaml", config)
    train([path], tmp_path, 1, env=environment).check()
    options = {"run_name": "second", "save_folder": None, "max_duration": "5ba"}
    path = write_config(tmp_path / "second.yaml", {**config, **options, "load_path": f"{url}/first/ba3"})
    train([path], tmp_path, 2, env=environment).check()
    assert [record["batch"] for record in read_metrics(tmp_path / "runs/second")] == [1, 2, 3, 4, 5]


def test_without_a_run_directory_the_log_is_the_checkpoint_s(tmp_path, data):
    """A disk that all clusters see: `save_folder` outside of the run directory, which is lost."""
    config = tiny_config(data, save_folder=str(tmp_path / "shared"), autoresume=True, max_duration="6ba")
    path = write_config(tmp_path / "tiny.yaml", {**config, "stop_after": "4ba"})
    train([path], tmp_path).check()
    shutil.rmtree(tmp_path / "runs")
    (part,) = (tmp_path / "shared/log").iterdir()
    assert part.read_bytes().count(b"\n") == 4
    train([write_config(tmp_path / "tiny.yaml", config)], tmp_path).check()
    assert [record["batch"] for record in read_metrics(tmp_path / "runs/tiny")] == [1, 2, 3, 4, 5, 6]
    log = read_log(open_checkpoint(tmp_path / "shared/ba6")).content
    assert log is not None and [json.loads(line)["batch"] for line in log.splitlines()][-2:] == [5, 6]
    # Another experiment with the same save_folder would find this run done, and train nothing.
    other = train([write_config(tmp_path / "tiny.yaml", {**config, "run_name": "other"})], tmp_path)
    assert other.exit_codes == [2]
    assert "shared/ba6 is a checkpoint of the run tiny, but this run is other" in other.output
    assert not (tmp_path / "runs/other/metrics.jsonl").exists()


def test_a_run_that_begins_from_another_takes_its_curve_along(tmp_path, data):
    first = tiny_config(data, run_name="first", save_folder=str(tmp_path / "shared"), max_duration="2ba")
    train([write_config(tmp_path / "first.yaml", first)], tmp_path).check()
    second = tiny_config(data, run_name="second", load_path=str(tmp_path / "shared"), max_duration="4ba")
    output = train([write_config(tmp_path / "second.yaml", second)], tmp_path).check().output
    assert "run_name first -> second" in output
    assert [record["batch"] for record in read_metrics(tmp_path / "runs/second")] == [1, 2, 3, 4]


def test_a_bucket_that_cannot_be_reached_is_said_in_one_line(tmp_path, data):
    path = write_config(tmp_path / "tiny.yaml", tiny_config(data, load_path="s3://nowhere/run", max_duration="2ba"))
    environment = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    result = train([path], tmp_path, env=environment)
    assert result.exit_codes == [75]  # the link may come back
    assert "Traceback" not in result.output
