"""lm-evaluation-harness and Inspect themselves, where LM_EVAL_PYTHON and INSPECT_PYTHON name Pythons that have them.

LM_EVAL_PYTHON's environment has what this package needs as well, but for Composer. INSPECT_PYTHON's has accelerate.
"""

import json
import os
import random
import subprocess
from pathlib import Path

import pytest
import torch
import yaml

from llmfoundry_lite.companions import search_path
from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.convert.huggingface import export_model
from llmfoundry_lite.convert.to_checkpoint import import_checkpoint
from llmfoundry_lite.data.tokenizer import train_tokenizer
from llmfoundry_lite.evaluation.compare import compare
from llmfoundry_lite.evaluation.harness import evaluate
from llmfoundry_lite.evaluation.loaded import load
from llmfoundry_lite.evaluation.models import locate_and_load_model
from llmfoundry_lite.evaluation.result_files import ResultFiles
from llmfoundry_lite.evaluation.results import Results, load_any
from tests.helpers.launch import ROOT, free_port
from tests.helpers.models import normal_model

pytestmark = pytest.mark.long
RIDDLES = Path(__file__).parent / "logs/tasks/riddles.py"
WORDS = ["cat", "dog", "cow", "hen", "fox", "owl", "bee", "sat", "ran", "saw", "ate", "sky", "red", "old", "big", "sun"]
CHOICES = {"output_type": "multiple_choice", "doc_to_text": "{{query}}", "doc_to_choice": "{{choices}}"}
CHOICES |= {"doc_to_target": "gold", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}
TASKS = {
    "some choices": CHOICES,
    "many shots": {**CHOICES, "num_fewshot": 12, "fewshot_split": "test"},  # more than the model reads
    "last word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{query}}",
        "doc_to_target": " {{choices[0]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "{{query}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["a", "\n\n"], "max_gen_toks": 20, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}

ALL = ",".join(TASKS)


def python_of(variable: str, module: str) -> str:
    python = os.environ.get(variable, "")
    if not python or subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode:
        pytest.skip(f"{variable} names no Python that has {module}")
    return python


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run, its export and the tasks."""
    folder, draw = tmp_path_factory.mktemp("a run"), random.Random(0)
    rows = []
    for gold in [0, 1, 2] * 9:
        query, *choices = (" ".join(draw.choices(WORDS, k=draw.randint(2, 9))) for _ in range(4))
        text = " ".join(draw.choices(WORDS, k=draw.randint(20, 200)))
        rows.append({"query": query, "choices": choices, "gold": gold, "text": text})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number, (name, task) in enumerate(TASKS.items()):
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
        facts = {"task": name, **data, "test_split": "test", **task}
        (folder / f"{number}.yaml").write_text(yaml.safe_dump(facts))
    train_tokenizer([row["text"] for row in rows] * 3, 320).save(folder / "tokenizer")
    config = ModelConfig(d_model=32, n_heads=4, n_layers=2, max_seq_len=96, vocab_size=384)
    model = normal_model(config, std=0.15)
    export_model(model.state_dict(), config, folder / "export", tokenizer_folder=folder / "tokenizer")
    import_checkpoint(str(folder / "export"), str(folder / "run one" / "checkpoints"))
    return folder


def ask(folder, out, *arguments, module="llmfoundry_formats.lm_eval", num_ranks=1, tasks=ALL):
    """Run lm_eval's command line; return the process of rank 0 and the folder of its logs."""
    command = [python_of("LM_EVAL_PYTHON", "lm_eval"), "-m", module, "--tasks", tasks]
    command += ["--include_path", str(folder), "--log_samples", "--output_path", str(folder / out), *arguments]
    environment = {
        **os.environ,
        **search_path({"PYTHONPATH": str(ROOT)}),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment |= {"HF_DATASETS_CACHE": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank in range(num_ranks):
        names = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
        of_rank = {**address, **{name: str(number) for name, number in names.items()}} if num_ranks > 1 else {}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, env=environment | of_rank, cwd=folder, **options))
    said = [rank.communicate(timeout=400)[1] for rank in ranks]
    return ranks[0].returncode, said[0], next((folder / out).glob("*"), folder / "no logs")


OURS = ("--model", "llmfoundry_lite", "--model_args", "run=run one")


@pytest.fixture(scope="module")
def logs(folder) -> dict[str, Path]:
    """Logs of the same tasks: of our run on one rank and on two, and of its export by lm_eval's own model."""
    export = ("--model", "hf", "--model_args", "pretrained=export,dtype=float32", "--device", "cpu")
    found = {
        "ours": ask(folder, "ours", *OURS),
        "two ranks": ask(folder, "two", *OURS, num_ranks=2),
        "hf": ask(folder, "hf", *export, "--batch_size", "4", module="lm_eval"),
    }
    for code, said, _ in found.values():
        assert code == 0, said
    return {name: out for name, (_, _, out) in found.items()}


def answers_of(logs: Path, task: str) -> dict[tuple[int, str], list]:
    """(item, filter) -> what the model answered: texts, or numbers with whether they are the likeliest."""
    (path,) = logs.glob(f"samples_{task}_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    return {(sample["doc_id"], sample["filter"]): sample["resps"] for sample in samples}


@pytest.mark.parametrize("task", TASKS)
def test_a_checkpoint_answers_every_item_as_its_export_does(task, logs):
    ours, two, theirs = (answers_of(logs[name], task) for name in ("ours", "two ranks", "hf"))
    assert len(ours) == 27 and ours == two  # the same bits
    assert ours.keys() == theirs.keys()
    for item, answers in ours.items():
        for (mine,), (other,) in zip(answers, theirs[item], strict=True):
            if task == "written":
                assert mine == other
                continue
            mine, other = ([one] if isinstance(one, str) else one for one in (mine, other))
            assert float(mine[0]) == pytest.approx(float(other[0]), rel=1e-6, abs=1e-4)
            assert mine[1:] == other[1:]


def test_compare_finds_no_difference_and_our_harness_has_the_same_numbers(folder, logs):
    (pair,) = compare(load_any([logs["ours"], logs["hf"]]))
    assert [task.task for task in pair.tasks] == sorted(TASKS)
    assert {task.verdict for task in pair.tasks if task.metric != "bits_per_byte"} == {"the same on every item"}
    subject = locate_and_load_model(str(folder / "run one"), device=torch.device("cpu"))
    task = TaskConfig(
        label="choices",
        icl_task_type="multiple_choice",
        dataset_uri=str(folder / "rows.jsonl"),
        continuation_delimiter=" ",
        tokenization="joint",
    )
    files = ResultFiles(folder, "suite", "ours")
    evaluate(subject.model, subject.tokenizer, [task], Results(model="", suite="", source=""), files)
    items = [json.loads(line) for line in files.items_path.read_text().splitlines()]
    asked = answers_of(logs["ours"], "some choices")
    for item in items:
        numbers = [float(answer[0][0]) for answer in asked[item["index"], "none"]]
        assert item["log_probability"] == pytest.approx(numbers, rel=1e-6, abs=1e-5)


def test_after_a_context_of_spaces_an_answer_follows_the_token_that_begins_a_text(folder):
    task = {**CHOICES, "doc_to_text": "  ", "task": "after spaces", "test_split": "test", "dataset_path": "json"}
    task["dataset_kwargs"] = {"data_files": {"test": str(folder / "rows.jsonl")}}
    (folder / "spaces.yaml").write_text(yaml.safe_dump(task))
    code, said, out = ask(folder, "spaces", *OURS, "--limit", "3", tasks="after spaces")
    assert code == 0, said
    (path,) = out.glob("samples_after spaces_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    asked = [given for sample in samples for given in sample["arguments"].values()]
    assert len(asked) == 9 and all(given["arg_0"].isspace() for given in asked)
    expected = load(folder / "run one").logprobs([given["arg_0"] + given["arg_1"] for given in asked])
    found = [float(answer[0][0]) for sample in samples for answer in sample["resps"]]
    assert found == pytest.approx([float(values.sum()) for values in expected], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run=run one", "hf=export"], "model_args: run and hf given, expected one of run=RUN, checkpoint=PATH"),
        (["rum=run one"], "model_args.rum: unknown key; did you mean model_args.run?"),
        (["run=run one", "--gen_kwargs", "do_sample=true"], "generation_kwargs has do_sample True, and answers are"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments, message, folder):
    options = ("--model", "llmfoundry_lite", "--model_args", *arguments)
    code, said, _ = ask(folder, "refused", *options, tasks="written")
    assert code == 2 and said.strip().splitlines()[-1].startswith("error: ") and message in said, said


def test_a_batch_size_and_a_limit_are_taken(folder):
    code, said, out = ask(folder, "limited", *OURS, "--batch_size", "8", "--limit", "4", tasks="some choices")
    assert code == 0 and "--batch_size is not used: requests are packed by tokens" in said
    (results,) = load_any([out])
    assert results.tasks["some choices"]["settings"]["limit"] == 4 == results.tasks["some choices"]["n"]


@pytest.mark.parametrize("form", ["eval", "json"])
def test_inspects_own_log_gives_the_accuracy_that_it_computed(form, folder, tmp_path):
    python = python_of("INSPECT_PYTHON", "inspect_ai")
    command = [python, "-m", "inspect_ai", "eval", RIDDLES.name, "--model", "hf/export", "--epochs", "2"]
    command += ["-M", f"model_path={folder / 'export'}", "-M", "device=cpu", "--max-tokens", "8", "--display", "none"]
    command += ["--limit", "6", "--log-dir", str(tmp_path), "--log-format", form]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=RIDDLES.parent, check=True, capture_output=True, env=environment)
    dump = [python, "-m", "inspect_ai", "log", "dump", "--header-only", str(next(tmp_path.glob(f"*.{form}")))]
    header = json.loads(subprocess.run(dump, check=True, capture_output=True, text=True).stdout)
    (results,) = load_any([tmp_path])
    task = results.tasks["riddles"]
    assert (task["n"], task["settings"]["limit"]) == (6, 6)
    for score in header["results"]["scores"]:
        assert task[score["name"]] == score["metrics"]["accuracy"]["value"]
