"""`pip install` brings everything that is needed: a wheel, in its own environments and an empty folder."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from llmfoundry_lite.errors import SECOND_STEP
from tests.helpers.environments import find_uv
from tests.helpers.launch import ROOT
from tests.helpers.markdown import links

pytestmark = pytest.mark.multiprocess

DAY = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["exclude-newer"]


@pytest.fixture(scope="module")
def uv():
    return find_uv()


def call(*command, cwd, code=0, **options):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        **options,
    )
    assert result.returncode == code, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def wheel(uv, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    call(uv, "build", "--quiet", "--wheel", "--out-dir", folder, ROOT, cwd=folder)
    return next(folder.glob("*.whl"))


def install(uv, wheel, folder, version):
    """The releases of `requirements.txt`, hard-linked from uv's cache where they are there. Returns its bin folder."""
    environment = folder / "environment"
    call(uv, "venv", "--quiet", "--python", version, environment, cwd=folder)
    pip = (uv, "pip", "install", "--quiet", "--python", environment / "bin/python", "--exclude-newer", DAY)
    call(*pip, "--constraint", ROOT / "requirements.txt", f"{wheel}[train]", cwd=folder)
    return environment / "bin", (*pip, *SECOND_STEP.split()[2:])


def check_whole_path(programs, second_step, folder):
    """Data, training, evaluation and text, as somebody does who has never seen the repository."""
    work = folder / "work"
    work.mkdir()
    ours = programs / "llmfoundry-lite"
    (work / "text").mkdir()
    for number, path in enumerate(sorted((ROOT / "llmfoundry_lite/checkpoint").glob("*.py"))):
        (work / "text" / f"{number}.txt").write_text(path.read_text())
    refused = call(ours, "train", "mpt-quickstart", cwd=work, code=2)
    assert "composer and streaming not installed" in refused and SECOND_STEP in refused

    said = call(programs / "python", "-c", "import llmfoundry_lite as lf; lf.open_dataset", cwd=work, code=1)
    assert (
        f"needs streaming, which is not installed; `pip install 'llmfoundry-lite[train]'`, then `{SECOND_STEP}`" in said
    )

    call(*second_step, cwd=folder)
    prepare = ("--out", "data/mine", "--tokenizer", "train:512", "--max-seq-len", "64", "--val-fraction", "0.1")
    call(ours, "data", "prepare", "--source", "text", *prepare, cwd=work)
    call(ours, "init", "data/mine", "--size", "125m", "--out", "mine.yaml", cwd=work)
    small = ("model.d_model=32", "model.n_heads=2", "model.n_layers=2", "precision=fp32", "max_duration=4ba")
    small = (*small, "global_train_batch_size=8", "train_loader.num_workers=0", "eval_loader.num_workers=0")
    plan = call(ours, "train", "mine.yaml", *small, "--dry-run", cwd=work)
    assert "parameters" in plan and "memory" in plan
    launch = (programs / "composer", "-n", "2", "-m", "llmfoundry_lite.launch_train")
    call(*launch, "mine.yaml", "cpu", *small, "eval_interval=0", "device_train_microbatch_size=2", cwd=work)
    assert json.loads((work / "runs/mine/status.json").read_text())["status"] == "done"

    task = {"label": "text", "icl_task_type": "perplexity", "dataset_uri": "text/0.txt"}
    (work / "task.yaml").write_text(json.dumps({"icl_tasks": [task]}))
    table = call(ours, "eval", "task.yaml", "models.mine=runs/mine", cwd=work)
    assert "text" in table and (work / "results/task/mine.json").is_file()
    written = call(ours, "generate", "runs/mine", "--prompt", "def ", "--max-new-tokens", "8", cwd=work)
    assert written.startswith("def ")
    assert call(programs / "python", "-c", USE_LIBRARY, cwd=work).startswith("[<runs/mine: done at batch 4, loss ")
    assert "arc_easy" in call(programs / "python", "-c", LIST_TASKS, cwd=work)


USE_LIBRARY = """
import llmfoundry_lite as lf
print(lf.runs("runs"), lf.load("runs/mine").logprobs(["def "]), next(lf.batches("runs/mine", 4)).digest)
"""
LIST_TASKS = "from llmfoundry_lite.config.shipped import find_task_folder; print(*find_task_folder('evals').iterdir())"


@pytest.mark.slow
def test_the_page_of_an_index_has_links_that_lead_somewhere(uv, wheel, tmp_path):
    """Through a source distribution, as an index has it; README's own links stay relative."""
    url = "https://code.example/us/llmfoundry_lite"
    call("env", f"LLMFOUNDRY_LITE_URL={url}", uv, "build", "--quiet", "--out-dir", tmp_path, ROOT, cwd=tmp_path)
    page, plain = (read_metadata(path) for path in (next(tmp_path.glob("*.whl")), wheel))
    assert not [link for link in links(page) if not link.startswith(("https:", "#"))]
    assert (
        f"]({url}/raw/v0.1.0/docs/measurements/switch.png)" in page and f"]({url}/blob/v0.1.0/docs/hardware.md)" in page
    )
    assert f"Project-URL: Changelog, {url}/blob/v0.1.0/CHANGELOG.md" in page
    assert "](docs/hardware.md)" in plain and "Project-URL" not in plain and "Classifier: Typing :: Typed" in plain


def read_metadata(wheel):
    with zipfile.ZipFile(wheel) as file:
        assert "llmfoundry_lite/py.typed" in file.namelist()
        return file.read(next(name for name in file.namelist() if name.endswith("dist-info/METADATA"))).decode()


@pytest.mark.slow
def test_a_wheel_prepares_trains_evaluates_and_writes_from_an_empty_folder(uv, wheel, tmp_path):
    try:
        programs, second_step = install(uv, wheel, tmp_path, sys.executable)
        check_whole_path(programs, second_step, tmp_path)
    finally:
        shutil.rmtree(tmp_path / "environment", ignore_errors=True)


@pytest.mark.long
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_other_pythons_install_and_run_it_too(uv, wheel, tmp_path, version):
    found = subprocess.run([uv, "python", "find", "--no-python-downloads", version], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"Python {version} is not on this machine")
    try:
        programs, second_step = install(uv, wheel, tmp_path, found.stdout.strip())
        check_whole_path(programs, second_step, tmp_path)
    finally:
        shutil.rmtree(tmp_path / "environment", ignore_errors=True)


@pytest.mark.long
def test_plain_pip_resolves_it(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "environment"], check=True)
    report = tmp_path / "report.json"
    resolve = ("-m", "pip", "install", "--dry-run", "--quiet", "--report", report, f"{wheel}[train]")
    call(tmp_path / "environment/bin/python", *resolve, cwd=Path(tmp_path))
    names = {item["metadata"]["name"].lower() for item in json.loads(report.read_text())["install"]}
    assert {"torch", "wandb", "omegaconf", "llmfoundry-lite"} <= names
    assert "mosaicml" not in names
