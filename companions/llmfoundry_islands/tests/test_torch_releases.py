"""Islands of two releases of torch: clusters bring their own."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from llmfoundry_islands.coordination.messages import TOKEN
from llmfoundry_islands.tests.world import SECRET, coordination, metrics
from llmfoundry_lite.checkpoint.store import open_checkpoint
from tests.helpers import releases
from tests.helpers.releases import losses, train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config, write_data

pytestmark = [pytest.mark.long, pytest.mark.multiprocess]

interpreters = releases.interpreters

STREAMING = {"every": "4ba", "fragments": 2, "delay": "1ba", "dtype": "int8"}


@pytest.mark.parametrize(
    ("way", "sync"),
    [({}, {}), ({"exact_sums": True}, {}), ({}, {"sync": STREAMING, "check_weights_every": 1})],
    ids=["gradients", "exact", "local steps"],
)
def test_islands_of_two_releases_train_one_run(interpreters, tmp_path, monkeypatch, way, sync):
    """With local steps: they have the same bits after each outer step."""
    monkeypatch.setenv(TOKEN, SECRET)
    config = tiny_config(write_data(tmp_path / "data"), max_duration="8ba", device_train_microbatch_size=1, **way)
    train(interpreters["ours"], tmp_path, [write_config(tmp_path / "alone.yaml", {**config, "run_name": "alone"})])
    releases = {"a": "ours", "b": "oldest"}
    with coordination(tmp_path) as running, ThreadPoolExecutor(2) as pool:
        shared = {**config, "run_name": "run", "save_folder": str(tmp_path / "saves")}
        launches = []
        for name, release in releases.items():
            islands = {"coordinator": f"127.0.0.1:{running.port}", "name": name, **sync}
            path = write_config(tmp_path / f"{name}.yaml", {**shared, "islands": islands})
            launches.append(pool.submit(train, interpreters[release], tmp_path, [path]))
        for launch in launches:
            launch.result()
    alone = read_metrics(tmp_path / "runs/alone")
    for name in releases:
        records = metrics(tmp_path, name)
        assert values(records, "islands/members") == [2] * 8
        assert values(records, "islands/drifts") == [0] * 8
        if not sync:
            assert values(records, "data/digest") == values(alone, "data/digest")
            assert losses(tmp_path, f"run/{name}") == pytest.approx(losses(tmp_path, "alone"), abs=1e-5)
    islands = open_checkpoint(tmp_path / "saves/ba8").manifest.segments[-1].islands
    assert islands["b"]["torch"].split("+")[0] == "2.11.0" != islands["a"]["torch"].split("+")[0]
