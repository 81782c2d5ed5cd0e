"""Every command of README and of getting started, in the order of a newcomer, in one fresh folder: each runs, made
small, or a table says why it cannot run here. A command that no table has is an error.

Ranks are forks of a server that has imported Composer, in place of `composer`; everything else is the real program.
"""

import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from llmfoundry_lite.cli import main
from llmfoundry_lite.ranks.rank import rank_variables
from tests.helpers.launch import ROOT, launch
from tests.helpers.markdown import commands
from tests.helpers.present import needs

README, FIRST = ((ROOT / page).read_text() for page in ("README.md", "docs/getting-started.md"))
STARTERS = ("llmfoundry-lite ", "composer ", "make ", "python ")
ON_PAGES = {line for page in (README, FIRST) for line in commands(page) if line.startswith(STARTERS)}

TINY = "model.d_model=64 model.n_heads=2 model.n_layers=1"
SIX = "max_duration=6ba eval_interval=3ba save_interval=2ba model.d_model=80"
ONE_B = (
    f"{TINY} max_duration=3ba save_interval=1ba eval_interval=3ba global_train_batch_size=2 precision=fp32 "
    "exact_sums=true device_train_microbatch_size=1 train_loader.num_workers=0 eval_loader.num_workers=0"
)
ONE_WORKER = "--num-workers 1"
ASKED = "icl_tasks=[next_line] limit=8"
RUN = {
    "llmfoundry-lite init my-texts/ --hours 8": "",
    "llmfoundry-lite train my-texts.yaml": "",
    "llmfoundry-lite generate runs/my-texts": "--max-new-tokens 8",
    'llmfoundry-lite generate runs/my-texts --prompt "Once upon a time"': "--max-new-tokens 8",
    "llmfoundry-lite report runs/my-texts": "",
    "llmfoundry-lite eval models.mine=runs/my-texts": "",
    "make quickstart": SIX,
    'llmfoundry-lite generate runs/mpt-quickstart --prompt "import"': "--max-new-tokens 8",
    "llmfoundry-lite watch runs/mpt-quickstart": "",
    "llmfoundry-lite train mpt-1b --dry-run": "",
    "llmfoundry-lite train -n 2 mpt-quickstart run_name=wider model.d_model=256 model.n_heads=8 "
    "model.ffn_config.ffn_hidden_size=688": "max_duration=1ba",
    "llmfoundry-lite train -n 2 mpt-quickstart run_name=moved stop_after=100ba": SIX,
    "llmfoundry-lite train mpt-quickstart run_name=moved": SIX,
    "llmfoundry-lite checkpoint inspect runs/moved": "",
    "llmfoundry-lite data prepare --source my.jsonl.zst --out data/mine --tokenizer train:32768 "
    "--max-seq-len 2048": "--out data/zst",
    "llmfoundry-lite data prepare --source my-texts/ --out data/mine --tokenizer train:32768 "
    "--max-seq-len 2048": ONE_WORKER,
    "llmfoundry-lite init data/mine --size 125m": "",
    "llmfoundry-lite train mpt-125m-mine.yaml --dry-run=here": TINY,
    "composer -n 8 scripts/train.py yamls/pretrain/mpt-1b.yaml variables.data=data/mine autoresume=true": ONE_B,
    "llmfoundry-lite report runs/mpt-1b": "",
    "llmfoundry-lite replay runs/mpt-1b ba1000..ba1003": "",
    "composer -n 8 scripts/eval.py yamls/eval/icl-zero-shot.yaml models.ours=runs/mpt-1b models.base=hf:NAME": ASKED,
    "llmfoundry-lite compare results/icl-zero-shot/base.json results/icl-zero-shot/ours.json": "",
}
"""Command -> what is added here; its options and keys come last, and win."""
SMALLER = {
    "--hours 8": "--hours 0.001",
    "composer -n 8": "composer -n 2",
    "hf:NAME": "runs/mpt-quickstart/huggingface",
    "ba1000..ba1003": "ba1..ba3",
    "--source python-stdlib": f"--source my-texts {ONE_WORKER}",
    "stop_at=210ba": "stop_at=3ba",
    "ba210..ba213": "ba3..ba5",
    "stop_after=100ba": "stop_after=2ba",
}
NOT_RUN = {
    "make install && source .venv/bin/activate": "it made the environment that this test runs in",
    "composer -n 8 scripts/train.py yamls/pretrain/mpt-1b.yaml variables.data=data/mine hardware=auto autoresume=true "
    "save_folder=s3://bucket/{run_name}": "there are no GPUs and there is no S3 here; tests/checkpoint has an S3",
    "llmfoundry-lite train -n 8 mpt-125m-mine.yaml": "125 M parameters are for GPUs",
}
"""Command -> why. Its configuration is checked by a dry run, or by make's."""


def test_each_command_of_the_first_pages_is_known():
    assert {*RUN, *NOT_RUN} == ON_PAGES, "add a command to RUN, or to NOT_RUN with the reason"


def _program(words: list[str], typed: str) -> None:
    """A rank, or a command as a shell starts it, in a fork."""
    sys.stdin = io.StringIO(typed)
    if words[0] != "llmfoundry-lite":
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
        return
    for name in rank_variables(0, 1):
        os.environ.pop(name, None)
    if words[1] == "init":
        from llmfoundry_ops import hours

        hours.MEASURED_WIDTHS, hours.STEPS_SECONDS = (96,), 0.1
    sys.exit(main.run(words[1:]))


def call(command: str, folder: Path, typed: str = "") -> str:
    words = [word for word in shlex.split(command) if not word.startswith("OMP_NUM_THREADS=")]
    num_ranks = int(words[2]) if words[0] == "composer" else 1
    words = words[3:] if words[0] == "composer" else words[1:] if words[0] == "python" else words
    return launch(_program, (words, typed), folder, num_ranks).check().output


def smaller(command: str) -> str:
    for large, small in SMALLER.items():
        command = command.replace(large, small)
    return command


def recipe() -> list[str]:
    """The commands of `make quickstart`."""
    told = subprocess.run(
        ["make", "-n", "--no-print-directory", "--assume-old=install", "quickstart"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},  # `make test-slow`'s
        capture_output=True,
        text=True,
        check=True,
    )
    lines = told.stdout.replace("\\\n", " ").splitlines()
    return [smaller(line) for line in lines if not line.startswith("echo")]


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, str]:
    """Run all of RUN; command -> output."""
    folder = tmp_path_factory.mktemp("newcomer")
    for name in ("scripts", "yamls", "evals"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "my-texts").mkdir()
    texts = [path.read_text() for path in sorted((ROOT / "llmfoundry_lite/checkpoint").rglob("*.py"))]
    for number, text in enumerate(texts):
        (folder / f"my-texts/{number}.md").write_text(text)
    (folder / "my.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    compress(folder / "my.jsonl")
    outputs = {"folder": str(folder)}
    for command, more in RUN.items():
        if command == "make quickstart":
            outputs[command] = quickstart(folder, more)
        else:
            outputs[command] = call(f"{smaller(command)} {more}", folder, "import\n")
    return outputs


def compress(path: Path) -> None:
    import zstandard

    path.with_name(f"{path.name}.zst").write_bytes(zstandard.compress(path.read_bytes()))


def quickstart(folder: Path, small: str) -> str:
    """Interrupted in its second half, and repeated from its beginning."""
    lines = [f"{line} {small}" if "train" in line and "mpt-quickstart" in line else line for line in recipe()]
    second = next(i for i, line in enumerate(lines) if "train" in line and "-n 2" in line)
    for line in lines[:second]:
        call(line, folder)
    call(f"{lines[second]} stop_after=1ba", folder)
    return "".join(call(line, folder) for line in lines)


@pytest.mark.slow
@needs("llmfoundry_ops")
@pytest.mark.multiprocess
def test_the_commands_of_the_first_pages_run_in_their_order(said):
    folder = Path(said["folder"])
    assert "parameters" in said["llmfoundry-lite train mpt-1b --dry-run"]
    assert re.search(r"wrote my-texts\.yaml; next: ", said["llmfoundry-lite init my-texts/ --hours 8"])
    assert re.search(r"^import[\s\S]{2,}", said["llmfoundry-lite generate runs/my-texts"], re.M), "nothing is written"
    assert "bits per byte" in said["llmfoundry-lite eval models.mine=runs/my-texts"]
    assert "ba6" in said["llmfoundry-lite checkpoint inspect runs/moved"]
    assert "bit-equal: 2 of data/digest" in said["llmfoundry-lite replay runs/mpt-1b ba1000..ba1003"]
    assert (folder / "runs/mpt-1b/loss.png").exists()


@pytest.mark.slow
@needs("llmfoundry_ops")
@pytest.mark.multiprocess
def test_the_quickstart_interrupted_and_repeated_ends_right(said):
    output, run = said["make quickstart"], Path(said["folder"]) / "runs/mpt-quickstart"
    assert "the run has reached stop_at, 3ba: it is at batch 4" in output
    assert "bit-equal: 2 of data/digest" in output and "devices 2 -> 1" in output
    told = json.loads((run / "status.json").read_text())
    assert (told["status"], told["batch"], told["reason"], told["last_saved"]) == ("done", 6, None, "ba6")
    for words in ("validation loss", "bigram model", "unigram model", "temperature 0.7, top-k 40", "loss.png"):
        assert words in output
    facts = json.loads((run / "report.json").read_text())
    (ran,) = facts["runs"]
    spans = [(span["num_devices"], span["sharding"], span["last_batch"]) for span in ran["segments"]]
    assert spans == [(1, "NO_SHARD", 3), (2, "FULL_SHARD", 4), (2, "FULL_SHARD", 6)]
    for sample in facts["samples"]:
        assert [text["batch"] for text in sample["texts"]] == [0, 2, 6]
        assert all(text["text"].startswith(sample["prompt"]) for text in sample["texts"])
        assert sample["prompt"] == sample["prompt"].strip() != ""
    assert facts["samples"] and re.search(r"batch 0 +\| batch 2 +\| batch 6", output)
    assert (run / "loss.png").stat().st_size > 10_000


@pytest.mark.slow
@needs("llmfoundry_ops")
def test_the_first_pages_code_loads_the_model(said, monkeypatch):
    monkeypatch.chdir(said["folder"])
    (code,) = re.findall(r"```python\n(.*?)```", FIRST, re.S)
    found: dict = {}
    exec(code, found)
    assert found["model"].config.vocab_size == 1024


@pytest.mark.slow
@needs("llmfoundry_ops")
@pytest.mark.parametrize("command", NOT_RUN)
def test_what_cannot_run_here_is_checked(said, command, monkeypatch):
    if command.startswith("make "):
        subprocess.run(["make", "-n", "install"], cwd=ROOT, capture_output=True, check=True)
        return
    words = shlex.split(command.replace("composer -n 8 scripts/train.py", "llmfoundry-lite train -n 8"))
    small = "global_train_batch_size=8"  # the newcomer's data are small, too
    assert "parameters" in call(shlex.join([*words, small, "--dry-run"]), Path(said["folder"]))
