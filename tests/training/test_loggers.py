import contextlib
import fcntl
import json
import math
import os
import shutil
import signal
import struct
import sys
import termios
from concurrent.futures import wait
from types import SimpleNamespace

import pytest
from composer.core import Callback

from llmfoundry_lite.checkpoint.run_log import console_line, duration_text, validation_losses
from llmfoundry_lite.config.callbacks_schema import TensorboardConfig, WandbConfig
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.training.checkpointing import Checkpointing
from llmfoundry_lite.training.mirrors import (
    ConsoleLine,
    ProgressBar,
    TensorboardMirror,
    WandbMirror,
    build_mirrors,
    foundry_names,
    wandb_run_id,
)
from llmfoundry_lite.training.run_folder import append_missing_records, last_launch, log_until
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


def test_metrics_may_have_llm_foundry_s_names_and_units():
    memory = {"memory/peak_bytes": 2_500_000_000, "eval/loss": 2.0, "eval/wiki/loss": 3.0, "data/digest": "c0ffee"}
    named = foundry_names({**RECORD, **memory}, "decoupled_adamw")
    assert named == {
        "time/batch": 20,
        "launch": 1,
        "loss/train/total": 4.12345,
        "lr-DecoupledAdamW/group0": 3e-4,
        "l2_norm/grad/global": 0.5,
        "throughput/tokens_per_sec": 12345.6,
        "time/remaining_estimate": 3725 / 3600,
        "time/epoch": 0,
        "time/token": 8192,
        "memory/peak_allocated_mem": 2.5,
        "metrics/eval/LanguageCrossEntropy": 2.0,
        "metrics/eval/LanguagePerplexity": math.exp(2),
        "metrics/eval/wiki/LanguageCrossEntropy": 3.0,
        "metrics/eval/wiki/LanguagePerplexity": math.exp(3),
    }


@pytest.mark.parametrize(("names", "key"), [("ours", "lr"), ("llm_foundry", "lr-DecoupledAdamW/group0")])
def test_a_mirror_has_the_names_that_its_block_asks_for(tmp_path, data, names, key):
    loggers = {"tensorboard": {"log_dir": str(tmp_path / "board"), "names": names}}
    path = write_config(tmp_path / "tiny.yaml", tiny_config(data, log_to_console=False, loggers=loggers))
    (mirror,) = build_mirrors(load_train_config([path], {}).config, lambda: 0.0)
    mirror(RECORD)
    mirror.close()
    (file,) = (tmp_path / "board").iterdir()
    assert f"\n{chr(len(key))}{key}".encode() in file.read_bytes()


def test_losses_of_tasks_are_no_validation_losses():
    record = {"eval/a/loss": 4.0, "eval/icl/jeopardy/loss": 3.0, "eval/loss": 2.0, "eval/a/bits_per_byte": 1.0}
    assert validation_losses(record) == {"a": 4.0, "": 2.0}


def test_the_console_speaks_at_its_interval_and_at_evaluations(capsys):
    console = ConsoleLine(Duration.parse("100ba"), Duration.parse("10ba"))
    for batch in range(1, 25):
        console({**RECORD, "batch": batch, **({"eval/loss": 3.0} if batch == 15 else {})})
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["10/100", "15/100", "20/100"]


@pytest.fixture
def terminal():
    """Yield what a pseudo-terminal shows, its output, and a function that sets its width; it has none at first."""
    keyboard, descriptor = os.openpty()

    def set_width(columns):
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))

    with open(keyboard, "rb", buffering=0) as shown, open(descriptor, "w", encoding="utf-8") as output:
        yield shown, output, set_width


def test_a_progress_bar_begins_where_the_run_does_and_lines_stand_above_it(terminal, monkeypatch, tmp_path):
    shown, output, set_width = terminal
    set_width(100)
    monkeypatch.setattr(sys, "stdout", output)
    bar = ProgressBar(Duration.parse("40ba"), lambda: 0.5)
    assert bar.bar.desc == "first batch"
    bar.bar.mininterval = 0
    bar.begin(tmp_path / "metrics.jsonl", [])
    bar(RECORD)
    print("saved ba8", flush=True)
    bar.close()
    assert sys.stdout is output
    output.close()
    content = b""
    with contextlib.suppress(OSError):  # EIO after all that was written
        while part := shown.read(4096):
            content += part
    *above, last, end = content.decode().split("\n")
    assert above[0].startswith("\r 50%|") and above[0].endswith(" \rsaved ba8\r") and len(above) == 1
    assert "| batch 20/40 · loss 4.1235" in last and ", batch" not in last and end == ""


def test_without_a_terminal_of_some_width_a_progress_bar_is_lines(tmp_path, data, terminal, monkeypatch):
    path = write_config(tmp_path / "tiny.yaml", tiny_config(data, log_to_console=False, progress_bar=True))
    config = load_train_config([path], {}).config
    with open(tmp_path / "log", "w") as log:
        for output in (terminal[1], log):
            monkeypatch.setattr(sys, "stdout", output)
            assert isinstance(*build_mirrors(config, lambda: 0.0), ConsoleLine)


def test_a_torn_last_line_is_cut_off_before_more_is_appended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_launch(path) == 0
    path.write_text('{"batch": 1, "launch": 3}\n{"batch": 2, "lau')
    assert last_launch(path) == 3
    assert path.read_text() == '{"batch": 1, "launch": 3}\n'


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("key", "code", "said"),
    [
        ("", 2, "loggers.wandb: No API key configured. Use `wandb login` to log in; set WANDB_API_KEY, or WANDB_MODE="),
        ("0" * 40, 75, ": connection refused; set WANDB_API_KEY"),
    ],
    ids=["no key", "no server"],
)
def test_a_logger_that_cannot_start_is_a_line_on_all_ranks(tmp_path, data, key, code, said):
    path = write_config(tmp_path / "tiny.yaml", tiny_config(data, loggers={"wandb": {"project": "tests"}}))
    online = {"WANDB_MODE": "online", "HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "WANDB_API_KEY": key}
    nobody = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "5"}
    launch = train([path], tmp_path, 2, env=online | nobody)
    assert launch.exit_codes == [code, code], launch.output
    assert said in launch.output and "Traceback" not in launch.output


@pytest.mark.slow
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

    assert tensorboard_steps(run) == wandb_steps(run)[-4:] == [1, 2, 3, 4]
    assert json.loads((run / "status.json").read_text())["status"] == "done"


class KilledAt(Callback):
    """SIGKILL before this batch (the first is 1), once the save before it is whole: a save is written before one batch,
    and published before the next."""

    def __init__(self, batch: int):
        self.batch = batch

    def batch_start(self, state, logger):
        flight = next(c for c in state.callbacks if isinstance(c, Checkpointing)).saver._in_flight
        if flight is not None:
            wait([flight.background_task])
        if int(state.timestamp.batch) + 1 == self.batch:
            assert flight.manifest is not None
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_batches_trained_twice_are_in_every_mirror_once(tmp_path, data):
    """Killed after batch 5, the run carries on from what it saved after batch 4; wandb has lost all of it by then. Then
    once more, in another folder that has nothing but the save."""
    loggers = {"wandb": {"project": "tests"}, "tensorboard": {}}
    changes = {"max_duration": "8ba", "save_interval": "4ba", "save_folder": str(tmp_path / "saves")}
    config = tiny_config(data, loggers=loggers, autoresume=True, **changes)
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    killed = {"python:tests.training.test_loggers:KilledAt": {"batch": 6}}
    path = write_config(tmp_path / "killed.yaml", {**config, "callbacks": killed})
    assert train([path], tmp_path, env=offline).exit_codes == [-signal.SIGKILL]
    run = tmp_path / "runs/tiny"
    assert tensorboard_steps(run) == [1, 2, 3, 4, 5]

    path = write_config(tmp_path / "tiny.yaml", config)
    shutil.copytree(tmp_path / "saves", tmp_path / "saves-at-4")
    train([path], tmp_path, env=offline).check()
    batches = [json.loads(line)["batch"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert batches.count(5) == 2
    assert tensorboard_steps(run) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert wandb_steps(run)[-8:] == [1, 2, 3, 4, 5, 6, 7, 8], "the second launch's file begins with all of the log"

    elsewhere = ["run_folder=elsewhere", f"save_folder={tmp_path / 'saves-at-4'}"]
    train([path, *elsewhere], tmp_path, env=offline).check()
    assert tensorboard_steps(tmp_path / "elsewhere") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert wandb_steps(tmp_path / "elsewhere") == [5, 6, 7, 8], "the other folder's part has the first four"


def tensorboard_steps(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [event.step for event in events.Scalars("loss/train/total")]


def wandb_steps(run):
    """Every step in the files of wandb's offline mode: records in LevelDB's log format, behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    steps = []
    for path in sorted(run.glob(f"wandb/offline-run-*/run-{wandb_run_id(run)}.wandb")):
        content, at, parts = path.read_bytes(), 7, b""
        while at + 7 <= len(content):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768  # the rest of a block, filled with zeros
                continue
            _, length, kind = struct.unpack_from("<IHB", content, at)  # whole, first, middle, last: 1 to 4
            parts = (parts if kind in (3, 4) else b"") + content[at + 7 : at + 7 + length]
            at += 7 + length
            record = Record.FromString(parts) if kind in (1, 4) and at <= len(content) else None
            if record is not None and record.WhichOneof("record_type") == "history":
                steps.append(record.history.step.num)
    return steps


def test_tensorboard_voids_the_steps_that_a_launch_trains_again(tmp_path, monkeypatch):
    """The first launch has written batches 1 to 5, and the second goes back to 3; the third has lost 2 and 3."""
    steps: list[int] = []

    class Writer:
        """As TensorBoard reads it: from `purge_step` on, nothing that an earlier writer has written counts."""

        def __init__(self, folder, purge_step):
            steps[:] = [step for step in steps if step < purge_step]

        def add_scalar(self, key, value, global_step):
            steps.append(global_step)

        def flush(self):
            pass

        close = flush

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    for missed, batches in (((), range(1, 6)), ((), range(3, 7)), ((2, 3), range(4, 8))):
        mirror = TensorboardMirror(TensorboardConfig(), tmp_path)
        mirror.begin(tmp_path / "metrics.jsonl", [{"batch": batch, "loss/train/total": 1.0} for batch in missed])
        for batch in batches:
            mirror({"batch": batch, "loss/train/total": 1.0})
        mirror.close()
    assert steps == [1, 2, 3, 4, 5, 6, 7]


@pytest.fixture
def wandb_init(monkeypatch):
    """Calls of `wandb.init`, which starts nothing; and no variable of wandb's is set."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    calls = []

    def init(**arguments):
        calls.append(arguments)
        if arguments.get("mode") == "offlin":
            raise ValueError("mode\n  Input should be 'online', 'offline' or 'disabled'")

    fake = SimpleNamespace(init=init, Error=RuntimeError, Settings=type("Settings", (), {}))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return calls


def test_wandb_s_variables_are_obeyed_where_the_yaml_says_nothing(tmp_path, monkeypatch, capsys, wandb_init):
    def start(folder=tmp_path, **changes):
        WandbMirror(WandbConfig(**changes), "mpt", folder, {"seed": 1})
        return {key: value for key, value in wandb_init[-1].items() if value is not None}

    plain = start()
    assert plain == {"config": {"seed": 1}, "dir": str(tmp_path), "id": plain["id"], "name": "mpt", "resume": "allow"}
    for name, value in {"RUN_ID": "mine", "DIR": "/scratch", "NAME": "theirs", "PROJECT": "wandb reads it"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    assert start() == {**plain, "dir": "/scratch", "name": "theirs"}, "the id of the run's first launch stays"
    assert capsys.readouterr().out == f"loggers.wandb: WANDB_RUN_ID=mine has no effect: id is {plain['id']}\n"
    (tmp_path / "new").mkdir()
    assert start(tmp_path / "new")["id"] == wandb_run_id(tmp_path / "new") == "mine"
    given = start(name="ours", init_kwargs={"project": "p", "dir": "here", "job_type": "a"})
    assert given == {**plain, "name": "ours", "project": "p", "dir": "here", "job_type": "a"}
    with pytest.raises(
        ConfigError, match=r"loggers\.wandb: mode Input should be 'online', 'offline' or 'disabled'; set"
    ):
        start(init_kwargs={"mode": "offlin"})


def test_wandb_is_given_what_it_lost_and_nothing_that_it_has(tmp_path):
    """Batches 3 to 5 were logged and never written; 3 was saved, so that 4 and 5 are trained again. 2 is known."""

    class Run:
        offline, step, steps = False, 3, []

        def log(self, numbers, step, commit):
            self.steps.append((step, numbers["loss"]))

    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(json.dumps({"batch": batch, "loss": float(batch)}) + "\n" for batch in range(1, 6)))
    mirror = WandbMirror.__new__(WandbMirror)
    mirror.run = Run()
    mirror.begin(log, [])
    for batch in (2, 3, 4, 5):
        mirror({"batch": batch, "loss": batch + 0.5})
    assert Run.steps == [(3, 3.5), (4, 4.5), (5, 5.5)]
    Run.steps.clear()
    mirror.begin(log, [])
    mirror({"batch": 5, "loss": 5.5})
    assert Run.steps == [(3, 3.0), (4, 4.0), (5, 5.5)]
    Run.offline, Run.step = True, 0
    Run.steps.clear()
    mirror.begin(log, [{"batch": 1, "loss": 1.0}])
    mirror({"batch": 5, "loss": 5.5})
    assert Run.steps == [(2, 2.0), (3, 3.0), (4, 4.0), (5, 5.5)], "1 is in the other machine's file"


def test_a_log_that_a_crash_has_torn_is_read_around(tmp_path):
    log = tmp_path / "metrics.jsonl"
    good = b'{"batch": 1, "launch": 1}\n'
    log.write_bytes(b"\0\0\0\n" + good + b'{"batch": 2, "launch": 2}\n[1]\n{"batch": 3, "lau')
    assert last_launch(log) == 2
    assert log_until(log, 1) == good
    assert append_missing_records(log, good + b'{"batch": 2, "launch": 3}\n') == [{"batch": 2, "launch": 3}]


def test_a_log_that_came_along_voids_what_was_trained_here_instead(tmp_path):
    """Lines are taken over from the first that is not here, in order, so that the last line of a batch counts."""
    log = tmp_path / "metrics.jsonl"
    shared, ours = b'{"batch": 1, "launch": 1}\n', b'{"batch": 2, "launch": 2}\n{"batch": 3, "launch": 2}\n'
    log.write_bytes(shared + ours)
    theirs = [b'{"batch": 2, "launch": 2, "lr": 1}\n', ours.splitlines(keepends=True)[1]]
    assert append_missing_records(log, shared + b"".join(theirs)) == [
        {"batch": 2, "launch": 2, "lr": 1},
        {"batch": 3, "launch": 2},
    ]
    assert log.read_bytes() == shared + ours + b"".join(theirs)
    assert append_missing_records(log, shared + b"".join(theirs)) == []
