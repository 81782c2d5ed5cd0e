"""A checkpoint of somebody else's that names code for a part of its model: no command runs it unless it is trusted."""

import json
import re
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import llmfoundry_lite as lf
from llmfoundry_lite import own_code
from llmfoundry_lite.cli.main import run as run_command
from llmfoundry_lite.companions import is_installed
from llmfoundry_lite.config.load_eval import load_eval_config
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.convert import huggingface
from llmfoundry_lite.data.tokenizer import train_tokenizer
from llmfoundry_lite.errors import ConfigError, DataError, ExportError, UserError
from llmfoundry_lite.evaluation.models import locate_and_load_model
from llmfoundry_lite.launch.replay import plan_replay
from llmfoundry_lite.launch_eval import launch
from llmfoundry_lite.report.batch import compute_losses
from tests.helpers.present import present
from tests.helpers.recorded import write_run
from tests.helpers.tiny import tiny_config

NAME = "python:evil_part:Norm"
REFUSAL = (
    r"its model has parts that are code of its author: model\.norm_type python:evil_part:Norm; if you trust it, let it "
    r"run: eval with trust_code=true, generate and replay with --trust-code, lf.load with trust_code=True; other "
    r"commands run no such code"
)

REPLAY_REFUSAL = (
    r"replay: the run's configuration brings code of its author: model\.norm_type python:evil_part:Norm, "
    r"optimizer\.name python:evil_part:Sgd; if you trust it, let it run with --trust-code$"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with `run`, whose norm is code, and with the same run without it."""
    folder = tmp_path_factory.mktemp("parts")
    train_tokenizer(["the cat sat on a mat"] * 3, 300).save(folder / "tokenizer")
    config = tiny_config(
        folder / "gone",
        model__vocab_size=300,
        model__norm_type="layernorm",
        model__no_bias=True,
        model__attn_config={"alibi": True},
        tokenizer__name=str(folder / "tokenizer"),
        exact_sums=True,
        device_train_microbatch_size=1,
        run_folder=str(folder / "run"),
    )
    write_run(folder / "plain", config, (3, 6))
    config["model"]["norm_type"] = NAME
    config["optimizer"] = {"name": "python:evil_part:Sgd", "lr": 0.1}
    write_run(folder / "run", config, (3, 6), like=folder / "plain")
    (folder / "task.yaml").write_text("label: rhymes\ndataset_uri: rhymes.jsonl\nicl_task_type: language_modeling\n")
    (folder / "rhymes.jsonl").write_text(json.dumps({"context": "the cat", "continuation": " sat"}) + "\n")
    return folder


@pytest.fixture(autouse=True)
def marker(folder, tmp_path, monkeypatch):
    """Return a file that the author's code writes when it is imported. It lies in the working directory."""
    marker = tmp_path / "marker"
    code = f"from torch.nn import LayerNorm as Norm\nopen({str(marker)!r}, 'w')\n"
    (tmp_path / "evil_part.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(own_code, "_trusted_names", set())
    yield marker
    sys.modules.pop("evil_part", None)


def evaluate(folder, **changes):
    """Evaluate the run on one question."""
    return lf.evaluate(
        {
            "models": {"x": str(folder / "run")},
            "icl_tasks": [str(folder / "task.yaml")],
            "data_root": str(folder),
            "results_folder": "results",
            **changes,
        }
    )


COMMANDS = {
    "report": (("report", "RUN", "--out", "OUT"), "state/digest .* of ba6"),
    "watch": (("watch", "RUN"), "done at batch 6"),
    "ls": (("checkpoint", "ls", "RUN"), r"ba6 .*\nba3 "),
    "inspect": (("checkpoint", "inspect", "RUN", "--tensors"), r"transformer\.norm_f\.weight +F32 +\[32\]"),
    "verify": (("checkpoint", "verify", "RUN"), "ba6: intact, 14 tensors"),
    "diff": (
        ("checkpoint", "diff", "RUN/checkpoints/ba3", "RUN/checkpoints/ba6"),
        "0 of 14 tensors and 0 numbers differ",
    ),
    "average": (("checkpoint", "average", "RUN", "--last", "2", "--out", "OUT"), "averaged 2 checkpoints as OUT/ba6"),
    "consolidate": (("checkpoint", "consolidate", "RUN", "OUT.safetensors", "--everything"), "wrote OUT.safetensors"),
    "prune": (("checkpoint", "prune", "RUN", "--keep", "1", "--dry-run"), "would remove ba3; kept ba6"),
    "plan": (("plan", "--check", "RUN"), "the checkpoint does not name the device, no prediction"),
}
"""Name -> (a command that builds no model, what it prints when it has done its work)."""
REFUSED = {
    "generate": (("generate", "RUN", "--prompt", "the cat", "--max-new-tokens", "3"), REFUSAL),
    "generate a checkpoint": (("generate", "RUN/checkpoints/ba3", "--prompt", "the cat"), REFUSAL),
    "export": (
        ("checkpoint", "export", "RUN", "OUT"),
        r"ba6: model\.norm_type python:evil_part:Norm: no format of transformers has parts that are not of this "
        r"package, so the model cannot be exported; keep the training checkpoint",
    ),
    "replay": (("replay", "RUN", "ba3..ba6"), f"error: {REPLAY_REFUSAL}"),
    # It has read the configuration, and its table needs what this run's log does not have.
    "bench": (("bench", "scaling", "--runs", "RUN"), "nobody knows how many devices in its batches"),
}
"""Name -> (a command, the line with which it ends)."""


@pytest.mark.parametrize("words", present({**COMMANDS, **REFUSED}))
def test_a_command_runs_no_code_of_a_checkpoint(folder, marker, tmp_path, capfd, words):
    if words == "average" and not is_installed("llmfoundry_studies"):
        pytest.skip("needs the companion llmfoundry_studies")
    paths = {"RUN": str(folder / "run"), "OUT": str(tmp_path / "out")}
    command, expected = {**COMMANDS, **REFUSED}[words]
    code = run_command([re.sub("RUN|OUT", lambda match: paths[match[0]], word) for word in command])
    captured = capfd.readouterr()
    error = captured.err.strip()
    assert not marker.exists() and "evil_part" not in sys.modules
    if words in REFUSED:
        assert code == 2 and re.search(expected, error) and "\n" not in error, error
    else:
        assert (code, error) == (0, "")
        assert re.search(expected.replace("OUT", paths["OUT"]), captured.out), captured.out


FOLLOW = "evaluate, later checkpoints too"
LIBRARY = {
    "load": lambda folder: lf.load(folder / "run"),
    "evaluate": evaluate,
    "evaluate, every checkpoint": lambda folder: evaluate(folder, all_checkpoints=True),
    FOLLOW: lambda folder: evaluate(folder, follow=True),
    "show prompts": lambda folder: launch(
        [f"models.x={folder / 'run'}", f"icl_tasks=[{folder / 'task.yaml'}]", f"data_root={folder}", "--show", "1"]
    ),
    "a model for lm_eval": lambda folder: locate_and_load_model(
        str(folder / "run"), tokenizer=None, precision="fp32", device=torch.device("cpu")
    ),
    "losses of a batch": lambda folder: compute_losses(
        cast(Any, SimpleNamespace(run="run", checkpoint=None)), str(folder / "run"), torch.device("cpu")
    ),
    "plan a replay": lambda folder: plan_replay(str(folder / "run"), "ba3..ba6"),
}


@pytest.mark.parametrize("call", LIBRARY)
def test_the_library_runs_no_code_of_a_checkpoint(folder, marker, call):
    if call == FOLLOW and not is_installed("llmfoundry_studies"):
        pytest.skip("needs the companion llmfoundry_studies")
    refusal = REPLAY_REFUSAL if call == "plan a replay" else REFUSAL
    with pytest.raises(UserError, match=refusal):
        LIBRARY[call](folder)
    assert not marker.exists() and "evil_part" not in sys.modules


def test_code_that_is_trusted_runs(folder, marker, capfd):
    words = ["generate", str(folder / "run"), "--prompt", "the cat", "--max-new-tokens", "3", "--temperature", "0"]
    assert run_command([*words, "--trust-code"]) == 0, capfd.readouterr().err
    text = capfd.readouterr().out
    assert marker.exists()
    words[1] = str(folder / "plain")
    assert run_command(words) == 0 and capfd.readouterr().out == text, "this norm is LayerNorm"

    model = lf.load(folder / "run", trust_code=True)
    assert type(model.model.get_submodule("transformer.norm_f")) is torch.nn.LayerNorm
    assert evaluate(folder, trust_code=True)["x"].tasks["rhymes/0-shot"]["n"] == 1
    plan_replay(str(folder / "run"), "ba3..ba6", trusts_code=True)

    # The next one has to be trusted again.
    with pytest.raises(DataError, match=REFUSAL):
        lf.load(folder / "run")


def test_only_the_user_trusts_code_in_an_evaluation(tmp_path):
    path = tmp_path / "theirs.yaml"
    for text in ("true", "yes", "'${oc.decode:true}'"):
        path.write_text(f"models: {{x: run}}\nicl_tasks: [arc_easy]\ntrust_code: {text}\n")
        for words in ([str(path)], [str(path), "trust_code=true"]):
            with pytest.raises(ConfigError, match=r"theirs\.yaml: trust_code: .* given, which a file cannot decide"):
                load_eval_config(words)


PLACES = {"norm_type": NAME, "ffn_config": {"ffn_type": NAME}, "attn_config": {"alibi": True, "attn_type": NAME}}


@pytest.mark.parametrize("place", PLACES)
def test_a_folder_of_transformers_names_no_code(folder, marker, tmp_path, place):
    assert run_command(["checkpoint", "export", str(folder / "plain"), "exported"]) == 0
    description = json.loads((tmp_path / "exported/config.json").read_text())
    block = PLACES[place]
    description[place] = {**description.get(place, {}), **block} if isinstance(block, dict) else block
    (tmp_path / "exported/config.json").write_text(json.dumps(description))
    own_code.trust_code([NAME])  # a checkpoint that was loaded before may have named the same code
    for command in (["checkpoint", "import", "exported", "imported"], ["generate", "exported", "--prompt", "the cat"]):
        assert run_command(command) == 2
    with pytest.raises(UserError):
        lf.load("exported")
    assert not marker.exists() and "evil_part" not in sys.modules


def test_a_format_that_would_let_code_through_is_refused(marker, monkeypatch):
    """`own_code` remembers what a process has trusted, by name, so the reader of a folder does not rely on it."""
    own_code.trust_code([NAME])
    monkeypatch.setattr(huggingface, "read_model_config", lambda *_: ModelConfig(norm_type=NAME))
    with pytest.raises(
        ExportError, match=r"^there: config\.json names code, python:evil_part:Norm, for model\.norm_type"
    ):
        huggingface.read_checked_config({}, {}, cast(Any, None), "there")
    assert not marker.exists() and "evil_part" not in sys.modules
