"""A run, a checkpoint or a folder that somebody else made is data: to open it runs, resolves and fetches nothing."""

import json
import os
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import yaml

import llmfoundry_lite as lf
from llmfoundry_lite.checkpoint import restore
from llmfoundry_lite.checkpoint.store import open_checkpoint
from llmfoundry_lite.cli.main import run as run_command
from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.changes import find_changes
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.data.tokenizer import train_tokenizer
from llmfoundry_lite.models.mpt import MPT
from tests.helpers.present import present
from tests.helpers.recorded import write_run
from tests.helpers.tiny import tiny_config

SECRET = "hunter2-of-the-reader"


class Server(BaseHTTPRequestHandler):
    """The author's; it notes what it is asked for."""

    def do_GET(self):
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        self.send_error(404)

    do_HEAD = do_PUT = do_POST = do_GET

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """`run`, whose every part is hostile; `tagged`, whose YAML names an object; and the author's server."""
    folder = tmp_path_factory.mktemp("foreign")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.asked = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/${{oc.env:SECRET}}"
    train_tokenizer(["the cat sat on a mat"] * 3, 300).save(folder / "tokenizer")
    (folder / "evil").mkdir()
    for name in ("sitecustomize", "usercustomize", "json", "torch", "evil"):
        (folder / "evil" / f"{name}.py").write_text(f"open({str(folder / 'marker')!r}, 'w')\n")
    touch = {"args": ["touch", str(folder / "marker")]}
    config = tiny_config(folder / "gone", model__vocab_size=300, tokenizer__name=str(folder / "tokenizer"))
    config["train_loader"] = {"name": "python:subprocess:Popen", "kwargs": touch, **config["train_loader"]}
    config["train_loader"]["dataset"]["remote"] = url
    config["eval_loaders"] = {"x": {"name": "python:subprocess:Popen", "kwargs": touch}}
    config["optimizer"] |= {"name": "python:subprocess:Popen", "kwargs": touch}
    config["callbacks"] = {"extra": {"python:subprocess:Popen": touch}, "python:subprocess:Popen": touch}
    config["loggers"] = {"wandb": {"project": "${oc.env:SECRET}", "init_kwargs": {"settings": {"base_url": url}}}}
    config["environment"] = {"LD_PRELOAD": str(folder / "evil/x.so"), "PYTHONPATH": str(folder / "evil")}
    config["icl_tasks"] = [{"label": "x", "dataset_uri": url, "icl_task_type": "python:subprocess:Popen"}]
    config["compile_config"] = {"options": {"cpp.cxx": str(folder / "evil/cxx")}}
    config |= {"variables": {"x": url}, "metadata": {"x": "${oc.env:SECRET}"}, "load_path": url, "save_fallback": url}
    write_run(folder / "run", config, (3, 6))
    write_run(folder / "tagged", config, (3, 6))
    text = f"!!python/object/apply:os.system ['touch {folder / 'marker'}']"
    (folder / "tagged" / "config.yaml").write_text(f"run_name: {text}\n{yaml.safe_dump(config)}")
    yield folder, server
    server.shutdown()


def load(run, out):
    model = lf.load(run)
    assert model.generate("the cat", 3)


def restore_weights(run, out):
    """Restore as `load_path` does."""
    checkpoint = lf.read_run(run).segments_from
    assert checkpoint is not None
    config = open_checkpoint(checkpoint).manifest.config
    model = MPT(build_block(ModelConfig, config["model"], "model"))
    restore.load(checkpoint, model, torch.optim.AdamW(model.parameters()))


def read(run, out):
    found = lf.read_run(run)
    find_changes(found.config or {}, found.config or {})


COMMANDS = {
    "report": ("report", "RUN", "--out", "OUT"),
    "watch": ("watch", "RUN"),
    "generate": ("generate", "RUN", "--prompt", "the cat", "--max-new-tokens", "3"),
    "data show": ("data", "show", "RUN", "--batch", "2"),
    "ls": ("checkpoint", "ls", "RUN"),
    "inspect": ("checkpoint", "inspect", "RUN", "--tensors"),
    "verify": ("checkpoint", "verify", "RUN"),
    "diff": ("checkpoint", "diff", "RUN/checkpoints/ba3", "RUN/checkpoints/ba6"),
    "export": ("checkpoint", "export", "RUN", "OUT"),
    "consolidate": ("checkpoint", "consolidate", "RUN", "OUT.safetensors", "--everything"),
    "prune": ("checkpoint", "prune", "RUN", "--keep", "1", "--dry-run"),
    "import": ("checkpoint", "import", "RUN/checkpoints/ba6", "OUT"),
    "replay": ("replay", "RUN", "ba3..ba6"),
    "replay, goes without": ("replay", "RUN", "ba3..ba6", "environment={}", "train_loader.dataset.remote=other"),
    "plan": ("plan", "--check", "RUN"),
    "bench": ("bench", "scaling", "--runs", "RUN"),
    "compare": ("compare", "RUN/config.yaml", "RUN/status.json"),
}
REFUSED = {
    "data show": "train_loader.name is python:subprocess:Popen, whose order only its own code knows",
    "import": "a portable checkpoint already",
    "replay": r"brings code of its author: train_loader.name python:subprocess:Popen, optimizer.name python:.*, "
    r"environment LD_PRELOAD, PYTHONPATH, compile_config.options; if you trust it, let it run with --trust-code; or "
    r"leave the variables out: environment=\{\}",
    "replay, goes without": r"its author: train_loader.name .*, compile_config.options; .* with --trust-code$",
    "plan": r"config\.yaml: .*callbacks\.python:subprocess:Popen: unknown key",
    "bench": r"config\.yaml: .*callbacks\.python:subprocess:Popen: unknown key",
    "compare": "config.yaml",
}
"""Command -> how it is refused, with exit code 2."""


CASES = [("run", words) for words in (*present(COMMANDS), "load", "restore", "read")]
CASES += [("tagged", words) for words in present(("watch", "data show", "replay", "read"))]


@pytest.mark.parametrize(("name", "words"), CASES)
def test_opening_a_foreign_run_runs_resolves_and_fetches_nothing(world, tmp_path, monkeypatch, capfd, name, words):
    folder, server = world
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.chdir(tmp_path)
    run, out = str(folder / name), str(tmp_path / "out")
    path, code = os.environ.get("PYTHONPATH"), 0
    if words in COMMANDS:
        code = run_command([word.replace("RUN", run).replace("OUT", out) for word in COMMANDS[words]])
    else:
        {"load": load, "restore": restore_weights, "read": read}[words](run, out)
    told, error = capfd.readouterr()
    assert code == (2 if words in REFUSED else 0), error
    assert re.search(REFUSED.get(words, ""), error.strip()), error
    assert not (folder / "marker").exists(), "nothing of the author's ran"
    assert not server.asked, "nothing was asked of the author's server"
    assert "LD_PRELOAD" not in os.environ and os.environ.get("PYTHONPATH") == path
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert SECRET not in told + error and SECRET.encode() not in written
    assert not (folder / "gone").exists(), "and nothing was written where it said"


@pytest.mark.parametrize("words", [("import", "FOLDER", "OUT"), ("generate", "FOLDER", "--prompt", "the cat")])
def test_code_of_an_exported_folder_is_not_run(world, tmp_path, monkeypatch, capfd, words):
    folder, _ = world
    exported = tmp_path / "exported"
    assert run_command(["checkpoint", "export", str(folder / "run"), str(exported)]) == 0
    description = json.loads((exported / "config.json").read_text())
    description |= {"model_type": "its_own", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (exported / "config.json").write_text(json.dumps(description))
    (exported / "evil.py").write_text((folder / "evil" / "evil.py").read_text())
    monkeypatch.chdir(exported)
    command = ["checkpoint"] * (words[0] == "import") + [*words]
    assert run_command([word.replace("FOLDER", ".").replace("OUT", str(tmp_path / "out")) for word in command]) == 2
    assert not (folder / "marker").exists() and "evil" not in sys.modules, capfd.readouterr().err
