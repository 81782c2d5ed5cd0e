"""The working directory may be somebody else's folder: no command imports a module from it that nobody has named."""

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from llmfoundry_lite import search_path
from llmfoundry_lite.companions import search_path as path_of_companions
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.launch_train import check
from tests.helpers.launch import PATHS, ROOT
from tests.helpers.present import needs
from tests.helpers.runs import run
from tests.helpers.tiny import build_tokenizer, tiny_config, write_config

STANDARD = ("json", "multiprocessing", "pickle", "random", "signal", "socket", "typing")
INSTALLED = (
    "composer",
    "datasets",
    "matplotlib",
    "numpy",
    "omegaconf",
    "pyarrow",
    "torch",
    "typing_extensions",
    "yaml",
)
ABSENT = ("flash_attn", "gigatoken", "sitecustomize", "usercustomize", "wandb")
"""Not installed, or imported by nothing here."""
PROGRAMS = Path(sys.executable).parent


@pytest.fixture
def planted(tmp_path):
    """A folder with modules that leave a mark when they are imported, and the place of the marks."""
    folder, marks = tmp_path / "theirs", tmp_path / "marks"
    folder.mkdir()
    marks.mkdir()
    for name in (*STANDARD, *INSTALLED, *ABSENT):
        (folder / f"{name}.py").write_text(f"open({str(marks / name)!r}, 'w')\nraise ImportError('planted')\n")
    return folder, marks


def call(planted, *command, code=0, **environment):
    """Run a command in the planted folder, and return what it says. Nothing planted may have been imported."""
    folder, marks = planted
    given = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    given |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(marks.parent), "PYTHONPATH": PATHS, **environment}
    ended = subprocess.run(
        [str(word) for word in command], cwd=folder, env=given, capture_output=True, text=True, timeout=300, check=False
    )
    said = ended.stdout + ended.stderr
    assert not list(marks.iterdir()), said
    assert ended.returncode == code, said
    return said


@pytest.mark.parametrize("program", ["llmfoundry_lite", "llmfoundry_lite.cli.main"])
def test_a_module_of_ours_imports_nothing_from_the_working_directory(planted, program):
    assert "mpt-125m" in call(planted, sys.executable, "-m", program, "list")


@needs("llmfoundry_formats")
@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="needs no error")
def test_lm_eval_by_us_imports_nothing_from_the_working_directory(planted):
    assert "lm_eval is not installed" in call(planted, sys.executable, "-m", "llmfoundry_formats.lm_eval", code=2)


def test_an_empty_entry_of_pythonpath_is_not_the_working_directory(planted):
    for name in ("sitecustomize", "usercustomize"):  # Python itself imports these, before any code of ours runs
        (planted[0] / f"{name}.py").unlink()
    assert "mpt-125m" in call(planted, PROGRAMS / "llmfoundry-lite", "list", PYTHONPATH=f":{PATHS}:")


@pytest.mark.parametrize(
    "library", ["libcuda.so.1", "libnvrtc.so.13", "tls/x86_64/libcuda.so.1", "glibc-hwcaps/x86-64-v3/libcuda.so.1"]
)
def test_a_library_that_torch_would_load_from_the_working_directory_is_refused(planted, library):
    """libcusparseLt looks for it there, when torch is imported."""
    folder, _ = planted
    (folder / library).parent.mkdir(parents=True, exist_ok=True)
    (folder / library).write_bytes(b"")
    for command in ([PROGRAMS / "llmfoundry-lite", "list"], [sys.executable, ROOT / "scripts/train.py"]):
        said = call(planted, *command, code=2)
        assert said.startswith(f"error: {library} lies in the working directory: torch would load it") and "\n" in said
        assert said.count("\n") == 1


def test_workers_that_prepare_data_import_nothing_from_the_working_directory(planted):
    folder, _ = planted
    for number in range(2):
        (folder / f"{number}.txt").write_text("the cat sat on a mat\n" * 100)
    options = ["--out", "out", "--tokenizer", "train:300", "--max-seq-len", "8", "--num-workers", "2"]
    call(planted, sys.executable, "-m", "llmfoundry_lite", "data", "prepare", "--source", "0.txt", "1.txt", *options)
    assert (folder / "out/summary.json").exists()


OWN = """
import os
from composer.core import Callback

class Noted(Callback):
    def fit_start(self, state, logger):
        import helper_of_mine
        print("mine", os.environ.get("PYTHONSAFEPATH"), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="not in the wheel")
@pytest.mark.parametrize("words", ["-m benchmarks --help", f"{ROOT}/scripts/make_tasks.py --help"])
def test_benchmarks_and_scripts_import_nothing_through_an_empty_entry_of_pythonpath(planted, words):
    for name in ("sitecustomize", "usercustomize", "random", "typing"):  # Python itself imports these before any code
        (planted[0] / f"{name}.py").unlink()
    assert "sage" in call(planted, sys.executable, *words.split(), PYTHONPATH=f":{PATHS}")


@pytest.mark.slow
@pytest.mark.multiprocess
@needs("llmfoundry_ops")
def test_launchers_import_only_what_the_configuration_names(planted, data):
    """The user's own callback lies in the working directory, and imports a module beside it. Nothing there stands for
    an installed module. A rank more would import Composer once more."""
    folder, _ = planted
    for name in ABSENT:  # found there by the same search as what the callback imports
        (folder / f"{name}.py").unlink()
    (folder / "module_of_mine.py").write_text(OWN)
    (folder / "helper_of_mine.py").write_text("")
    own = {"python:module_of_mine:Noted": {}}
    config = tiny_config(data, max_duration="4ba", save_interval="2ba", callbacks=own, train_loader__num_workers=2)
    path = write_config(folder / "tiny.yaml", config)
    lite = [sys.executable, "-m", "llmfoundry_lite"]
    assert "mine None\n" in call(planted, *lite, "train", "-n", "2", path)
    assert "mine None\n" in call(
        planted, PROGRAMS / "composer", "-n", "1", "-m", "llmfoundry_lite.launch_train", path, "run_name=b"
    )
    assert "mine None\n" not in call(planted, *lite, "replay", "-n", "2", "runs/tiny", "ba2..ba4")
    assert "mine None\n" in call(planted, *lite, "replay", "--trust-code", "-n", "1", "runs/tiny", "ba2..ba4")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ranks_of_an_evaluation_import_nothing_from_the_working_directory(planted, data, tmp_path):
    folder, _ = planted
    build_tokenizer(folder / "tokenizer")
    row = {"query": "a b", "choices": ["a", "b"], "gold": 0}
    (folder / "words.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    task = {"label": "words", "dataset_uri": "words.jsonl", "icl_task_type": "multiple_choice", "num_fewshot": [0]}
    evaluation = write_config(folder / "words.yaml", {"suite": "words", "icl_tasks": [task]})
    own = tiny_config(data, max_duration="2ba", tokenizer__name=str(folder / "tokenizer"))
    run(tmp_path, own, "tiny")
    lite = [sys.executable, "-m", "llmfoundry_lite"]
    call(planted, *lite, "eval", "-n", "2", evaluation, "models.ours=../runs/tiny")
    assert (folder / "results/words/ours.json").exists()


@pytest.mark.slow
@pytest.mark.multiprocess
@needs("llmfoundry_machines")
@pytest.mark.parametrize(
    "words",
    [
        "doctor --quick",
        "bench mfu --shapes tiny --seq-len 64 --num-steps 1 --minutes 0.001 --out out",  # products; models are compiled
        "bench accumulation --shape tiny --seq-len 64 --batch-size 2 --microbatches 1 --num-steps 1 --out out",
    ],
)
def test_machines_are_measured_without_the_working_directory(planted, words):
    code = 2 if "doctor" in words else 0  # a machine without a GPU, or a busy one, is not fit
    folder, marks = planted
    ended = subprocess.run(
        [sys.executable, "-m", "llmfoundry_lite", *words.split()],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert not list(marks.iterdir()) and ended.returncode in (0, code), ended.stdout + ended.stderr


def test_every_python_that_we_start_is_told_to_leave_the_working_directory_out():
    """`-m` and `-c` put it first on the path; `-P` before them does not."""
    starts = 0
    for path in (*ROOT.glob("llmfoundry_lite/**/*.py"), *ROOT.glob("companions/*/**/*.py")):
        text = path.read_text()
        if "tests" in path.parts or "sys.executable" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            words = [ast.unparse(one) for one in node.elts] if isinstance(node, ast.List | ast.Tuple) else []
            if words[:1] == ["sys.executable"]:
                assert words[1] == "'-P'", f"{path}: {ast.unparse(node)}"
                starts += 1
    assert starts >= (6 if find_spec("llmfoundry_ops") else 1)


def test_a_clone_that_is_not_installed_is_found_without_the_working_directory(tmp_path):
    environment = path_of_companions({"PYTHONPATH": f":{tmp_path}:"})
    if (ROOT / "companions").is_dir():
        assert environment == {"PYTHONPATH": f"{ROOT}:{ROOT}/companions:{tmp_path}"}


@pytest.fixture
def path_kept(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONSAFEPATH", search_path.SET_BY_US)


def test_a_launch_finds_a_module_of_the_user_s_in_the_working_directory(path_kept, tmp_path, data):
    path = write_config(tmp_path / "tiny.yaml", tiny_config(data, callbacks={"python:module_of_mine:Noted": {}}))
    with pytest.raises(ConfigError, match="No module named 'module_of_mine'; is its folder on PYTHONPATH"):
        check([path])
    (tmp_path / "module_of_mine.py").write_text("raise AssertionError('a check imports nothing')")
    check([path])


def test_the_working_directory_is_searched_last_and_only_for_what_is_nowhere_else(path_kept, tmp_path, monkeypatch):
    for name in ("yaml", "module_of_mine"):
        (tmp_path / f"{name}.py").write_text("")
    before = [*sys.path]
    search_path.allow_working_directory_for("yaml.loader")
    search_path.allow_working_directory_for("absent_from_here")
    assert sys.path == before and "PYTHONSAFEPATH" in os.environ
    search_path.allow_working_directory_for("module_of_mine")
    assert sys.path == [*before, str(tmp_path)] and "PYTHONSAFEPATH" not in os.environ
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    sys.path.remove(str(tmp_path))
    search_path.allow_working_directory_for("module_of_mine")
    assert os.environ["PYTHONSAFEPATH"] == "1", "which the user has set"


@pytest.mark.parametrize(
    ("given", "first", "expected"),
    [
        (":there:", "", ("there", False)),
        ("", "", (None, False)),
        (".:there", "here", (".:there", True)),
    ],
    ids=["an empty entry", "none", "named by the user"],
)
def test_the_path_after_the_working_directory_is_left_out(path_kept, tmp_path, monkeypatch, given, first, expected):
    monkeypatch.delenv("PYTHONSAFEPATH")
    monkeypatch.setenv("PYTHONPATH", given)
    here = str(tmp_path)
    sys.path[:0] = [here] + [here] * (given != "")  # by `python -m`, and by PYTHONPATH
    search_path.leave_out_working_directory()
    assert (os.environ.get("PYTHONPATH"), here in sys.path) == expected
    assert os.environ["PYTHONSAFEPATH"] == search_path.SET_BY_US
    assert search_path.SAFE_PATH not in search_path.environment_of_user()
