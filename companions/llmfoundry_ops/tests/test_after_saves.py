"""Exports and texts of published checkpoints, by a process beside the run: whole, or a line that says why not."""

import json
import subprocess
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from composer.core import Timestamp
from safetensors.torch import load_file

from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors
from llmfoundry_lite.checkpoint.start import Start
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.training.checkpointing import Checkpointing
from llmfoundry_lite.training.launch_role import LaunchRole
from llmfoundry_lite.training.preemption import Preemption
from llmfoundry_ops import one_checkpoint
from llmfoundry_ops.after_saves import Job, JobsAfterSaves, build_generate
from tests.checkpoint.s3_server import s3_server
from tests.checkpoint.saves import names, save
from tests.helpers.runs import run, saved_names, status
from tests.helpers.tiny import build_tokenizer, tiny_config, write_config

WORDS: Any = {"function": "", "arguments": {}, "done": "", "missed": "not exported", "remedy": "do it"}
EXPORTED = {"hf_checkpointer": {"save_interval": "3ba"}}


def config_of(tmp_path, data, **callbacks: Any) -> dict[str, Any]:
    build_tokenizer(tmp_path / "tokenizer")
    return tiny_config(
        data,
        tokenizer={"name": "tokenizer"},
        max_duration="8ba",
        save_interval="2ba",
        save_num_checkpoints_to_keep=1,
        callbacks=callbacks,
    )


@pytest.mark.slow
@pytest.mark.multiprocess
def test_exports_and_texts_follow_published_checkpoints(tmp_path, data):
    texts = {"generate_callback": {"prompts": ["a b", "b"], "interval": "4ba", "max_new_tokens": 4}}
    said = run(tmp_path, config_of(tmp_path, data, **EXPORTED, **texts), "run", 2).output
    folder = tmp_path / "runs/run/checkpoints"
    exported = {path.name for path in (folder / "huggingface").iterdir()}
    assert exported == {"ba4", "ba6", "ba8"}, said
    assert all(f"exported {name} to runs/run/checkpoints/huggingface/{name}\n" in said for name in exported)
    assert saved_names(tmp_path, "run") == {"ba8"}, "what was kept to be read is removed"
    head = load_file(folder / "huggingface/ba8/model.safetensors")["transformer.wte.weight"]
    assert torch.equal(head, load_full_tensors(folder / "ba8")["transformer.wte.weight"])
    assert json.loads((folder / "huggingface/ba4/config.json").read_text())["dtype"] == "float32"
    lines = [json.loads(line) for line in (tmp_path / "runs/run/generations.jsonl").read_text().splitlines()]
    assert [(line["batch"], line["prompt"]) for line in lines] == [(4, "a b"), (4, "b"), (8, "a b"), (8, "b")]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_failed_export_is_a_line_and_the_run_goes_on(tmp_path, data):
    (tmp_path / "file").touch()
    blocked = {"hf_checkpointer": {"save_interval": "1ep", "save_folder": "file"}}
    said = run(tmp_path, config_of(tmp_path, data, **blocked), "run").output.splitlines()
    assert said[-1].startswith("ba8 was not exported: file/huggingface/ba8: cannot be written: Not a directory; `llm")
    assert status(tmp_path, "run")["status"] == "done"


@pytest.mark.long
@pytest.mark.multiprocess
def test_checkpoints_and_exports_may_lie_on_s3(tmp_path, data):
    s3fs = pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with s3_server() as port:
        options = {"endpoint_url": f"http://127.0.0.1:{port}"}
        there = s3fs.S3FileSystem(key="test", secret="test", client_kwargs=options)
        there.mkdir("runs")
        environment = {"AWS_ENDPOINT_URL": options["endpoint_url"], "AWS_DEFAULT_REGION": "us-east-1"}
        environment |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        config = config_of(tmp_path, data, **EXPORTED) | {"save_folder": "s3://runs/{run_name}"}
        said = run(tmp_path, config, "run", 2, environment).output
        assert "exported ba8 to s3://runs/run/huggingface/ba8\n" in said
        assert {path.rsplit("/", 1)[-1] for path in there.ls("runs/run/huggingface/ba4")} >= {
            "config.json",
            "model.safetensors",
            "tokenizer.json",
        }


def test_too_many_that_wait_are_passed_over_but_for_the_last(monkeypatch, capfd):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    there: Any = SimpleNamespace(published_batch=0, in_use=set(), newest_url="c/ba0")
    callback = JobsAfterSaves(Duration(1, "ba"), there, lambda name, url: Job(name=name, **WORDS))
    for there.published_batch in range(1, 6):
        callback._add()
    assert there.in_use == {"ba1", "ba2", "ba3", "ba4"}
    assert capfd.readouterr().out == "not exported: ba1 is still being read; do it\n"
    callback._add(max_waiting=4)
    assert [job.name for job in callback.jobs][-1] == "ba5"


@pytest.mark.parametrize("norm", ["layernorm", "python:mine:Norm"])
def test_a_run_trusts_its_own_parts_when_it_generates_texts(tmp_path, monkeypatch, norm):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    texts = {"prompts": ["a b"], "interval": "1ba"}
    changes = {"model__norm_type": norm, "callbacks": {"generate_callback": texts}}
    config = load_train_config([write_config(tmp_path / "run.yaml", tiny_config(tmp_path / "data", **changes))]).config
    there: Any = SimpleNamespace(published_batch=3, in_use=set(), newest_url="c/ba3")
    job = build_generate(config, there).job_of("ba3", "c/ba3")
    is_own = norm == "python:mine:Norm"
    option = " --trust-code" if is_own else ""
    assert (
        job.arguments["trust_code"] is is_own and job.remedy == f"`llmfoundry-lite generate c/ba3{option}` writes some"
    )

    given: dict[str, Any] = {}
    model = SimpleNamespace(generate=lambda *_, **__: [])
    monkeypatch.setattr(one_checkpoint, "load", lambda url, **options: given.update(options) or model)
    monkeypatch.setattr(one_checkpoint, "is_local_or_cached", lambda name: False)
    with pytest.raises(ValueError, match="zip"):  # a model that generates nothing
        one_checkpoint.generate(**job.arguments)
    assert given["trust_code"] is is_own


class Reads(JobsAfterSaves):
    """Its process reads ba3 until its input ends, and others at once."""

    def _start(self, job: Job) -> None:
        code = "import sys; sys.stdin.read()" if job.name == "ba3" else ""
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with its process
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=self.output)


@pytest.mark.parametrize(("in_second", "first_answers"), [(False, True), (True, True), (True, False)])
def test_a_checkpoint_that_is_being_read_is_kept_and_then_removed(tmp_path, monkeypatch, in_second, first_answers):
    """The names that `JobsAfterSaves` notes are those that retention keeps, wherever saves go."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    changes = {"run_folder": str(tmp_path / "run"), "save_num_checkpoints_to_keep": 1}
    if in_second:
        changes["save_fallback"] = str(tmp_path / "second")
    config = load_train_config([write_config(tmp_path / "tiny.yaml", tiny_config(tmp_path / "data", **changes))]).config
    preemption = Preemption(tmp_path, 30.0, None, print, print)
    nothing: Any = SimpleNamespace()
    there = Checkpointing(config, nothing, nothing, preemption, nothing, Start(), LaunchRole())
    there.published_batch, there.saver = -1, nothing
    there.saver.lease = lease = there.store.acquire()
    there.saver.first_answers = first_answers
    place = there.store
    if there.store.second is not None:
        place = there.store.second
        place.follow(lease)
    callback = Reads("1ba", there, lambda name, url: Job(name=name, **WORDS))

    def train_batch(batch: int) -> None:
        save(place, lease, batch)
        there.published_batch = batch
        state: Any = SimpleNamespace(timestamp=Timestamp(batch=batch), previous_timestamp=Timestamp(batch=batch - 1))
        callback.batch_checkpoint(state, nothing)
        there.after_save.remove_old(lease, place)

    callback.interval = Duration.parse("3ba")
    for batch in range(1, 6):
        train_batch(batch)
    assert names(place) == ["ba5", "ba3"]

    assert callback.process is not None and callback.process.stdin is not None
    callback.process.stdin.close()
    callback.close(nothing, nothing)
    assert names(place) == ["ba5"] and not there.in_use


def test_a_launch_that_leaves_early_says_what_was_not_exported(monkeypatch, capfd):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    leaving: Any = SimpleNamespace(
        was_preempted_by="SIGTERM",
        was_stopped=False,
        published_batch=4,
        in_use=set(),
        policy=SimpleNamespace(stop_reason=""),
        store=SimpleNamespace(root=SimpleNamespace(url="c")),
    )
    job = Job(name="ba4", **WORDS)
    callback, nothing = JobsAfterSaves(Duration(2, "ba"), leaving, lambda name, url: job), SimpleNamespace()
    child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    callback.process, callback.jobs, callback.last_batch = child, [job], 4
    callback.close(nothing, nothing)  # type: ignore[arg-type]
    assert child.returncode
    assert capfd.readouterr().out == "not exported: this launch leaves; do it\n"


def test_the_process_ends_with_rank_0():
    code = "import threading; from llmfoundry_ops.one_checkpoint import _end_with_rank_0 as end; end()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(300) == 1
