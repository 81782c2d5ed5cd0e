"""The commands of README and docs: each parses with its options and keys, and the cheap ones run."""

import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer

import llmfoundry_lite.launch_eval
import llmfoundry_lite.launch_train
from llmfoundry_lite.cli.main import app, run
from llmfoundry_lite.companions import find_missing
from llmfoundry_lite.config.load_eval import load_eval_config
from llmfoundry_lite.config.load_train import load_train_config
from tests.helpers.launch import ROOT
from tests.helpers.markdown import commands, quoted_commands
from tests.helpers.present import present

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
STARTERS = ("llmfoundry-lite ", "composer ", "python ", "srun ", "OMP_NUM_THREADS=", "WORLD_SIZE=")
FENCED = sorted({line for page in PAGES for line in commands(page.read_text()) if line.startswith(STARTERS)})
QUOTED = sorted({span for page in PAGES for span in quoted_commands(page.read_text(), "llmfoundry-lite ")})
OURS = present(command for command in (*FENCED, *QUOTED) if "llmfoundry-lite " in command)
PROGRAMS = {"train": ("scripts/train.py", "llmfoundry_lite.launch_train", "train"), "eval": ("scripts/eval.py", "eval")}
PROGRAM = typer.main.get_command(app)


def words_after(command: str, programs: tuple[str, ...]) -> list[str] | None:
    """The arguments of a launch. None for another command, and for a pattern rather than an example."""
    words = shlex.split(command)
    index = next((i for i, word in enumerate(words) if word in programs), None)
    if index is None or any(name in command for name in ("YAML", "THEIRS", "mine.yaml", "my-texts.yaml")):
        return None
    first = index + 3 if words[index + 1] == "-n" else index + 1
    return [word for word in words[first:] if word not in ("…", "[--dry-run]") and not word.endswith("=…")]


def launches(kind: str) -> list[list[str]]:
    found = [words_after(command, PROGRAMS[kind]) for command in FENCED]
    missing = {*find_missing("blocks")}
    return [words for words in found if words and not missing & {word.partition(".")[0] for word in words}]


@pytest.mark.parametrize("command", OURS)
def test_a_command_is_there_and_has_these_options(command):
    words = shlex.split(command.split("llmfoundry-lite ", 1)[1])
    found: Any = PROGRAM
    while hasattr(found, "commands") and words and words[0] != "…":
        found = found.commands[words.pop(0)]
        if words[:1] == ["|"]:
            return
    if found.context_settings.get("ignore_unknown_options") or hasattr(found, "commands"):
        return
    options = {option for parameter in found.params for option in parameter.opts} | {"--help"}
    assert {word for word in words if word.startswith("-")} <= options


def leaves(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    below = getattr(command, "commands", {})
    return [leaf for name in below for leaf in leaves(below[name], (*path, name))] if below else [path]


@pytest.mark.parametrize("path", leaves(PROGRAM), ids=" ".join)
def test_every_help_ends_with_an_example_that_parses(path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(ROOT)
    own = {("train",): llmfoundry_lite.launch_train.HELP, ("eval",): llmfoundry_lite.launch_eval.HELP}.get(path)
    assert own or run([*path, "--help"]) == 0
    last = (own or capsys.readouterr().out).splitlines()[-1]
    said, _, example = last.partition(": llmfoundry-lite ")
    words = shlex.split(example)
    assert said.strip() == "Example" and tuple(words[: len(path)]) == path, last
    if path == ("train",):
        load_train_config(words[3:], {})
    elif path == ("eval",):
        load_eval_config(words[3:])
    else:
        command: Any = PROGRAM
        for name in path:
            command = command.commands[name]
        command.make_context(" ".join(path), words[len(path) :])


def test_there_are_examples_of_every_kind():
    assert len(OURS) >= 25 and len(launches("train")) >= 8 and launches("eval")


@pytest.mark.parametrize("words", launches("train"), ids=" ".join)
def test_a_launch_has_a_configuration_without_errors(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    load_train_config(words, {})


@pytest.mark.parametrize("words", [words for words in launches("eval") if ".yaml" in " ".join(words)], ids=" ".join)
def test_an_evaluation_has_a_configuration_without_errors(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    load_eval_config(words)


def test_checkpoint_ls_lists_a_run(capsys):
    assert run(["checkpoint", "ls", str(next((ROOT / "tests/checkpoint/fixtures").rglob("ba*")).parent)]) == 0
    assert "ba" in capsys.readouterr().out


def test_help_answers():
    result = subprocess.run(
        [sys.executable, "-m", "llmfoundry_lite", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "checkpoint" in result.stdout
