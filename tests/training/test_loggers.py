import io
import json

import pytest

from llmfoundry_lite.config.schema import Duration
from llmfoundry_lite.training.loggers import ConsoleLine, console_line, duration_text, last_launch
from tests.helpers.launch import train
from tests.helpers.tiny import read_metrics, tiny_config, write_config

RECORD = {
    "batch": 20,
    "launch": 1,
    "loss/train/total": 4.12345,
    "lr": 3e-4,
    "grad_norm": 0.5,
    "throughput/tokens_per_sec": 12345.6,
    "time/remaining_seconds": 3725.0,
    "time/epoch": 0,
    "time/token": 8192,
}


def test_a_console_line_says_where_the_run_is():
    expected = "batch 20/800 · loss 4.1235 · lr 3.00e-04 · grad 0.50 · 12,346 tokens/s · ETA 1:02:05"
    assert console_line(RECORD, Duration.parse("800ba")) == expected
    assert console_line(RECORD, Duration.parse("1e6tok")).startswith("batch 20 · 8192/1000000tok · loss")
    assert duration_text(61) == "1:01"


def test_the_console_speaks_at_its_interval_and_at_evaluations():
    stream = io.StringIO()
    console = ConsoleLine(Duration.parse("100ba"), Duration.parse("10ba"), stream)
    for batch in range(1, 25):
        console({**RECORD, "batch": batch, **({"eval/loss": 3.0} if batch == 15 else {})})
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["10/100", "15/100", "20/100"]


def test_a_torn_last_line_is_cut_off_before_more_is_appended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_launch(path) == 0
    path.write_text('{"batch": 1, "launch": 3}\n{"batch": 2, "lau')
    assert last_launch(path) == 3
    assert path.read_text() == '{"batch": 1, "launch": 3}\n'


@pytest.mark.multiprocess
def test_metrics_hold_what_the_readme_promises_and_mirrors_agree(tmp_path, data):
    loggers = {"wandb": {"project": "tests"}, "tensorboard": {}}
    config = tiny_config(data, max_duration="4ba", eval_interval="2ba", loggers=loggers, autoresume=True)
    path = write_config(tmp_path / "tiny.yaml", config)
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    run = tmp_path / "runs/tiny"

    train([path, "stop_after=2ba"], tmp_path, env=offline).check()
    first_id = (run / "wandb_id").read_text()
    train([path], tmp_path, env=offline).check()
    assert (run / "wandb_id").read_text() == first_id
    assert len(list(run.glob(f"wandb/offline-run-*-{first_id.strip()}"))) == 2

    records = read_metrics(run)
    promised = {
        *("batch", "launch", "loss/train/total", "lr", "grad_norm", "data/digest", "memory/peak_bytes"),
        *("throughput/tokens_per_sec", "throughput/device/tokens_per_sec", "throughput/device/flops_per_sec"),
        *("time/epoch", "time/sample", "time/token", "time/batch_seconds", "time/remaining_seconds"),
    }
    for record in records:
        assert promised <= set(record)
        assert ("eval/loss" in record) == (record["batch"] in (2, 4))
        assert record["time/sample"] == 8 * record["batch"]
        assert len(record["data/digest"]) == 16
    assert "throughput/device/mfu" not in records[0], "an unknown device has no MFU"

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    steps = [event.step for event in events.Scalars("loss/train/total")]
    assert steps == [1, 2, 3, 4]
    assert json.loads((run / "status.json").read_text())["status"] == "done"


@pytest.mark.multiprocess
def test_a_progress_bar_takes_the_place_of_lines(tmp_path, data):
    path = write_config(tmp_path / "tiny.yaml", tiny_config(data, max_duration="2ba", progress_bar=True))
    output = train([path], tmp_path).check().output
    assert "100%" in output
    assert "batch 2/2" in output
