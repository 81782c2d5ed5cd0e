"""Tasks in, results out: files, resuming, ranks, and the models that can be evaluated."""

import errno
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import llmfoundry_lite.launch_eval
from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.config.load_eval import load_eval_config
from llmfoundry_lite.config.load_tasks import load_tasks
from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.convert.huggingface import export_model
from llmfoundry_lite.data.tokenizer import train_tokenizer
from llmfoundry_lite.errors import CheckpointError, ConfigError, DataError, UserError
from llmfoundry_lite.evaluation import harness, models, suite
from llmfoundry_lite.evaluation import result_files as result_files_module
from llmfoundry_lite.evaluation.compare import compare
from llmfoundry_lite.evaluation.harness import evaluate
from llmfoundry_lite.evaluation.means import mean_and_error
from llmfoundry_lite.evaluation.models import locate_and_load_model
from llmfoundry_lite.evaluation.result_files import Outline, ResultFiles
from llmfoundry_lite.evaluation.results import Results, load_results
from llmfoundry_lite.evaluation.scoring import Score
from llmfoundry_lite.evaluation.tasks import prepare_task
from tests.helpers.launch import launch, train
from tests.helpers.models import normal_model
from tests.helpers.present import leave_out_companions, needs
from tests.helpers.results import write_result
from tests.helpers.tiny import read_metrics, tiny_config, write_config, write_data

CPU = torch.device("cpu")
TEXT = "the cat sat on a mat and the dog ran over a hill to see the sun go down"
WORDS = TEXT.split()
QUESTIONS = [
    {
        "query": f"{WORDS[i % 18]} {WORDS[(i * 7) % 18]}",
        "choices": [WORDS[(i * 5) % 18], WORDS[(i * 3 + 1) % 18]],
        "gold": i % 2,
    }
    for i in range(20)
]
SENTENCES = [{"context": " ".join(WORDS[i : i + 4]), "continuation": WORDS[i + 4]} for i in range(12)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A tokenizer, a model and two tasks, in the working directory."""
    monkeypatch.chdir(tmp_path)
    tokenizer = train_tokenizer([" ".join(WORDS)] * 3, 300)
    tokenizer.save("tokenizer")
    sizes = {"d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 64, "vocab_size": 384}
    config = ModelConfig(**sizes, no_bias=True, attn_config=AttentionConfig(alibi=True))
    model = normal_model(config, std=0.2)
    export_model(model.state_dict(), model.config, "model", tokenizer_folder="tokenizer")
    (tmp_path / "evals").mkdir()
    for name, kind, rows in (("choice", "multiple_choice", QUESTIONS), ("next", "language_modeling", SENTENCES)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = {"label": name, "icl_task_type": kind, "dataset_uri": f"{name}.jsonl", "num_fewshot": [0, 2]}
        (tmp_path / f"evals/{name}.yaml").write_text(json.dumps(task))
    return tmp_path


def tasks():
    return load_tasks(["choice", "next"], "evals")


def run(names=("choice", "next"), *, redo=False, source="model", **options):
    subject = locate_and_load_model("model", device=CPU)
    files = ResultFiles(Path("results"), "suite", "ours", redo=redo)
    results = Results(model="ours", suite="suite", source=source, tokenizer=subject.tokenizer.fingerprint)
    return evaluate(subject.model, subject.tokenizer, load_tasks(names, "evals"), results, files, **options)


def test_results_and_items_are_written(here):
    results = run()
    written = json.loads((here / "results/suite/ours.json").read_text())
    assert list(written["tasks"]) == ["choice/0-shot", "choice/2-shot", "next/0-shot", "next/2-shot"]
    assert written == json.loads(json.dumps(results.as_json()))
    choice = written["tasks"]["choice/0-shot"]
    assert (choice["n"], choice["num_fewshot"], choice["chance"]) == (20, 0, 0.5)
    items = [json.loads(line) for line in (here / "results/suite/ours.items.jsonl").read_text().splitlines()]
    mine = [item for item in items if item["task"] == "choice/0-shot"]
    for metric in ("acc_per_token", "acc", "acc_norm"):
        assert choice[metric] == sum(item[metric] for item in mine) / 20
    first = mine[1]
    per_token = [s / n for s, n in zip(first["log_probability"], first["num_tokens"], strict=True)]
    assert first["chosen"]["acc_per_token"] == per_token.index(max(per_token))
    accuracies = [written["tasks"][name][written["tasks"][name]["metric"]] for name in written["tasks"]]
    assert written["average"] == pytest.approx(sum(accuracies) / 4)
    perplexity = math.exp(-sum(item["log_probability"][0] for item in items if item["task"] == "next/0-shot") / 12)
    assert written["tasks"]["next/0-shot"]["perplexity"] == pytest.approx(perplexity)


def test_a_killed_evaluation_does_not_do_finished_tasks_again(here, monkeypatch):
    real, asked = harness.run_task, []

    def dies_at_the_third(runner, task, *rest):
        asked.append(task.name)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return real(runner, task, *rest)

    monkeypatch.setattr(harness, "run_task", dies_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        run()
    results = run()
    assert asked == ["choice/0-shot", "choice/2-shot", "next/0-shot", "next/0-shot", "next/2-shot"]
    assert len(results.tasks) == 4
    run(redo=True)
    assert asked[5:] == list(results.tasks)


@pytest.mark.parametrize("tokenization", ["separate", "joint"])
def test_a_finished_task_is_known_again_before_a_model_is_loaded(here, tokenization):
    """A schema task without examples may leave out its delimiter."""
    rows = [{"context_options": ["the cat", "the dog"], "continuation": word, "gold": 0} for word in TEXT.split()]
    (here / "s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"label": "s", "icl_task_type": "schema", "dataset_uri": "s.jsonl", "continuation_delimiter": ": "}
    suite_of_it = {"models": {"ours": "model"}, "icl_tasks": [task], "tokenization": tokenization}
    (here / "icl.yaml").write_text(json.dumps(suite_of_it))
    for _ in range(2):
        llmfoundry_lite.launch_eval.main(["icl.yaml"])


def test_a_torn_items_file_is_evaluated_again(here, monkeypatch):
    run()
    real, asked = harness.run_task, []
    monkeypatch.setattr(harness, "run_task", lambda *a: asked.append(a[1].name) or real(*a))
    run()
    assert asked == []
    items = here / "results/suite/ours.items.jsonl"
    items.write_text(items.read_text()[:-40])
    run()
    assert asked == ["next/2-shot"]


def test_what_is_finished_and_not_asked_for_now_stays(here):
    first = run(["choice"]).tasks
    both = run(["next"])
    assert list(both.tasks) == ["next/0-shot", "next/2-shot", "choice/0-shot", "choice/2-shot"]
    written = json.loads((here / "results/suite/ours.json").read_text())
    assert written == both.as_json() and {name: written["tasks"][name] for name in first} == first
    values = [task[task["metric"]] for task in written["tasks"].values()]
    assert written["average"] == pytest.approx(sum(values) / 4)
    (loaded,) = load_results([here / "results/suite/ours.json"])
    assert [len(items) for items in loaded.items.values()] == [12, 12, 20, 20]
    assert list(run(["choice"], redo=True).tasks) == ["choice/0-shot", "choice/2-shot", "next/0-shot", "next/2-shot"]


def test_launches_side_by_side_keep_each_others_tasks(here):
    subject = locate_and_load_model("model", device=CPU)
    both_begin = [ResultFiles(Path("results"), "suite", "ours") for _ in range(2)]
    for name, files in zip(("choice", "next"), both_begin, strict=True):
        results = Results(model="ours", suite="suite", source="model", tokenizer=subject.tokenizer.fingerprint)
        evaluate(subject.model, subject.tokenizer, load_tasks([name], "evals"), results, files)
    (loaded,) = load_results([here / "results/suite/ours.json"])
    counts = {"next/0-shot": 12, "next/2-shot": 12, "choice/0-shot": 20, "choice/2-shot": 20}
    assert {name: len(items) for name, items in loaded.items.items()} == counts
    other = Results(model="ours", suite="suite", source="other", tokenizer=subject.tokenizer.fingerprint)
    with pytest.raises(DataError, match=r"ours.json holds 4 finished tasks of model, and other is to be evaluated"):
        files.add(other, Outline("choice/0-shot", {}, None), [])


def test_results_that_somebody_removes_in_mid_run_are_whole_at_the_end(here, monkeypatch):
    run(["next"])  # these two are found finished by the launch below

    def lose_then_add(files, *arguments):
        shutil.rmtree("results", ignore_errors=True)
        add(files, *arguments)

    add = ResultFiles.add
    monkeypatch.setattr(ResultFiles, "add", lose_then_add)
    run(["next", "choice"])
    (loaded,) = load_results([here / "results/suite/ours.json"])
    counts = {"next/0-shot": 12, "next/2-shot": 12, "choice/0-shot": 20, "choice/2-shot": 20}
    assert {name: len(items) for name, items in loaded.items.items()} == counts


def test_a_try_side_by_side_does_not_replace_what_was_finished_meanwhile(here):
    path = here / "results/suite/ours.json"
    subject, asked = locate_and_load_model("model", device=CPU), load_tasks(["next"], "evals")
    results = [
        Results(model="ours", suite="suite", source="model", tokenizer=subject.tokenizer.fingerprint) for _ in range(2)
    ]
    begun = ResultFiles(Path("results"), "suite", "ours")
    evaluate(subject.model, subject.tokenizer, asked, results[0], ResultFiles(Path("results"), "suite", "ours"))
    before = path.read_text()
    with pytest.raises(DataError, match=r"ours.json holds next/0-shot with limit None, not 3 as asked for now"):
        evaluate(subject.model, subject.tokenizer, asked, results[1], begun, limit=3)
    assert path.read_text() == before


def test_a_results_folder_that_fills_up_is_one_line(here, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(result_files_module, "write_atomically", full)
    with pytest.raises(DataError, match=r"results_folder: .*suite/ours.json cannot be written: No space left"):
        run(["next"])


def change_the_data(here, name="next"):
    file = here / f"{name}.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    return {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda here: {"limit": 5}, "holds choice/0-shot with limit None, not 5 as asked for now; name"),
        (
            lambda here: change_the_data(here, "choice") | {"limit": 5, "tokenization": "joint"},
            "holds choice/0-shot with tokenization 'separate', not 'joint'; limit None, not 5 as asked for now, and "
            "other data than asked for now; name",
        ),
        (lambda here: {"tokenization": "joint"}, "choice/0-shot with tokenization 'separate', not 'joint' as ask"),
        (change_the_data, "holds next/0-shot with other data than asked for now"),
        (lambda here: {"source": "other"}, "holds 4 finished tasks of model, and other is to be evaluated"),
    ],
)
def test_a_finished_task_is_replaced_only_when_that_is_said(here, change, reason):
    run()
    path = here / "results/suite/ours.json"
    before, options = path.read_text(), change(here)
    with pytest.raises(DataError) as error:
        run(**options)
    assert reason in str(error.value) and "\n" not in str(error.value)
    assert "; name it otherwise, models.NAME=…, choose another results_folder, or replace" in str(error.value)
    assert str(error.value).endswith(": redo=true") and path.read_text() == before
    assert list(run(redo=True, **options).tasks) == list(json.loads(before)["tasks"])
    assert path.read_text() != before
    run(**options)


def test_a_task_that_was_asked_after_other_tokens_is_not_taken_for_the_same(here):
    run()
    path = here / "results/suite/ours.json"
    known = json.loads(path.read_text())
    known["tasks"]["choice/0-shot"]["beginning"] = [7]
    path.write_text(json.dumps(known))
    with pytest.raises(
        DataError, match=r"holds choice/0-shot with texts that begin with \[7\], not \[\] as asked for now"
    ):
        run()


def test_a_launch_that_would_replace_anything_is_refused_before_any_model_is_loaded(here, monkeypatch):
    (here / "icl.yaml").write_text(json.dumps({"icl_tasks": ["choice"], "models": {"ours": "model"}}))
    llmfoundry_lite.launch_eval.main(["icl.yaml"])
    monkeypatch.setattr(models, "import_model", lambda folder: pytest.fail("weights are read"))
    with pytest.raises(DataError, match=r"icl/ours.json holds choice/0-shot with limit None, not 3 as asked for now"):
        llmfoundry_lite.launch_eval.main(["icl.yaml", "models.another=model", "limit=3"])
    with pytest.raises(DataError, match=r"icl/ours.json holds 2 finished tasks of model with precision fp32, not bf16"):
        llmfoundry_lite.launch_eval.main(["icl.yaml", "precision=bf16"])
    (here / "model/README.md").write_text("other files")
    with pytest.raises(DataError, match=r"icl/ours.json holds 2 .* of model with save files:\w+, not files:\w+ as now"):
        llmfoundry_lite.launch_eval.main(["icl.yaml"])


def test_a_limit_beyond_the_data_limits_nothing(here, capsys):
    (here / "icl.yaml").write_text(json.dumps({"icl_tasks": ["choice"], "models": {"ours": "model"}, "limit": 99}))
    llmfoundry_lite.launch_eval.main(["icl.yaml"])
    assert "a try" not in (here / "results/icl/table.md").read_text()
    before = (here / "results/icl/ours.json").read_text()
    assert "nothing was run" not in capsys.readouterr().err
    for same in ("limit=null", "limit=1000"):
        llmfoundry_lite.launch_eval.main(["icl.yaml", same])
        told = "ours: nothing was run, results/icl/ours.json has every task; redo=true asks again"
        assert told in capsys.readouterr().err
    assert (here / "results/icl/ours.json").read_text() == before
    with pytest.raises(DataError, match="with limit None, not 3 as asked for now"):
        llmfoundry_lite.launch_eval.main(["icl.yaml", "limit=3"])


def test_a_try_of_a_few_items_gives_way(here):
    (here / "icl.yaml").write_text(json.dumps({"icl_tasks": ["choice"], "models": {"ours": "model"}}))
    found = []
    for options in (["limit=3"], ["limit=4"], ["limit=4", "precision=bf16"], []):
        llmfoundry_lite.launch_eval.main(["icl.yaml", *options])
        known = json.loads((here / "results/icl/ours.json").read_text())
        found.append((known["precision"], known["tasks"]["choice/0-shot"]["settings"]["limit"]))
    assert found == [("fp32", 3), ("fp32", 4), ("bf16", 4), ("fp32", None)]


def prepare_where_one_rank_lacks_a_file(folder):
    import os

    import torch.distributed as dist

    os.chdir(folder)
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        os.chdir("evals")
    subject = locate_and_load_model(str(folder / "model"), device=CPU)
    with pytest.raises(UserError, match=r"next.jsonl does not exist"):
        evaluate(
            subject.model,
            subject.tokenizer,
            load_tasks([str(folder / "evals/next.yaml")], ""),
            Results(model="", suite="", source=""),
        )


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_file_that_one_rank_alone_lacks_ends_all(here):
    launch(prepare_where_one_rank_lacks_a_file, (here,), here, 2).check()


def evaluate_on_rank(folder):
    import os

    import torch.distributed as dist

    os.chdir(folder)
    dist.init_process_group("gloo")
    results = run(max_batch_tokens=32)
    print(json.dumps({name: {**task, "seconds": 0} for name, task in results.tasks.items()}))


@pytest.mark.multiprocess
def test_every_world_size_gives_the_same_results_on_every_rank(here):
    outputs = []
    for world_size in (1, 3):
        outputs += launch(evaluate_on_rank, (str(here),), here / f"world{world_size}", world_size).check().outputs
        for file in (here / "results/suite").iterdir():
            file.unlink()
    assert len(set(outputs)) == 1


def evaluate_suite(arguments):
    from llmfoundry_lite.ranks.ending import run_and_exit

    sys.argv = ["scripts/eval.py", *arguments]
    run_and_exit(llmfoundry_lite.launch_eval.main)


def items_of(folder):
    return [json.loads(line) for line in (folder / "sharded/ours.items.jsonl").read_text().splitlines()]


@pytest.mark.multiprocess
def test_a_sharded_model_answers_as_a_whole_one_and_carries_on_where_it_was_killed(here):
    """Items that two ranks cannot share evenly, and answers of different lengths, which must not part the ranks."""
    riddles = [{"context": " ".join(WORDS[i : i + 3]), "answer": "cat"} for i in range(5)]
    (here / "write.jsonl").write_text("".join(json.dumps(row) + "\n" for row in riddles))
    changed = {"label": "choice", "num_fewshot": [1]}
    write = {
        "label": "write",
        "icl_task_type": "generation_task_with_answers",
        "dataset_uri": "write.jsonl",
        "early_stopping_criteria": ["?"],
        "max_new_tokens": 12,
    }
    suite = {"suite": "sharded", "models": {"ours": "model"}, "icl_tasks": [changed, "next", write], "limit": 11}
    (here / "icl.yaml").write_text(json.dumps(suite))
    arguments = ["icl.yaml", "device_batch_tokens=64"]
    launch(evaluate_suite, ([*arguments, "results_folder=whole"],), here).check()
    sharded = [*arguments, "results_folder=parts", "fsdp=true"]
    launch(evaluate_suite, (sharded,), here, 2).check()
    whole, parts = items_of(here / "whole"), items_of(here / "parts")
    assert len(whole) == len(parts) == 11 + 2 * 11 + 5
    assert len({len(item["text"]) for item in whole if "text" in item}) > 1, "the case is chosen for this"
    for ours, theirs in zip(whole, parts, strict=True):
        assert ours.pop("log_probability", 0) == pytest.approx(theirs.pop("log_probability", 0), abs=1e-5)
        assert ours == theirs

    path, written = here / "parts/sharded/ours.json", items_of(here / "parts")
    kept = json.loads(path.read_text())
    del kept["tasks"]["next/2-shot"], kept["tasks"]["write/0-shot"]
    kept["tasks"]["choice/1-shot"]["seconds"] = 1234  # to be known again
    path.write_text(json.dumps(kept))
    launch(evaluate_suite, (sharded,), here, 2).check()
    assert items_of(here / "parts") == written
    carried_on = json.loads(path.read_text())["tasks"]
    assert list(carried_on) == ["choice/1-shot", "next/0-shot", "next/2-shot", "write/0-shot"]
    assert carried_on["choice/1-shot"]["seconds"] == 1234


@pytest.mark.multiprocess
def test_a_run_is_evaluated_while_it_trains_and_its_checkpoint_says_the_same(here, capsys, monkeypatch):
    write_data(here / "data")
    blocks = {
        "tokenizer": {"name": "tokenizer"},
        "model__vocab_size": 384,
        "model__no_bias": True,
        "model__attn_config": {"alibi": True},
        "icl_tasks": ["choice"],
        "eval_interval": "2ba",
        "save_interval": "2ba",
        "max_duration": "4ba",
        "export_at_end": True,
    }
    path = write_config(here / "tiny.yaml", tiny_config(here / "data", **blocks))
    train([path], here, 2).check()
    records = read_metrics(here / "runs/tiny")
    assert [record["batch"] for record in records if "eval/icl/average" in record] == [2, 4]
    subject = locate_and_load_model("runs/tiny", device=CPU)
    assert subject.save_id is not None
    results = evaluate(
        subject.model, subject.tokenizer, load_tasks(["choice"], "evals"), Results(model="", suite="", source="")
    )
    assert results.average == records[-1]["eval/icl/average"]
    exported = locate_and_load_model("runs/tiny/huggingface", device=CPU)
    same = evaluate(
        exported.model, exported.tokenizer, load_tasks(["choice"], "evals"), Results(model="", suite="", source="")
    )
    for name, record in results.tasks.items():
        assert {**same.tasks[name], "seconds": 0} == {**record, "seconds": 0}

    (here / "icl.yaml").write_text("icl_tasks: [choice]\nmodels: {tiny: runs/tiny}\nsuite: curve\n")
    llmfoundry_lite.launch_eval.main(["--all-checkpoints", "runs/tiny/", "icl_tasks=[choice]", "suite=curve"])
    names = ["tiny-ba2.items.jsonl", "tiny-ba2.json", "tiny-ba4.items.jsonl", "tiny-ba4.json"]
    assert [path.name for path in sorted((here / "results/curve").glob("tiny*"))] == names
    capsys.readouterr()
    llmfoundry_lite.launch_eval.main(["models.r=runs/tiny", "icl_tasks=[choice]", "suite=shown", "--show", "1"])
    assert "Prompts of r, with a context of" in capsys.readouterr().out and not (here / "results/shown").exists()
    learnt = [json.loads((here / f"results/curve/tiny-ba{n}.json").read_text())["average"] for n in (2, 4)]
    assert learnt == [record["eval/icl/average"] for record in records if "eval/icl/average" in record]

    launch(evaluate_suite, (["icl.yaml", "suite=sharded", "fsdp=true"],), here, 2).check()
    sharded = json.loads((here / "results/sharded/tiny.json").read_text())
    assert (sharded["average"], sharded["save_id"]) == (learnt[-1], subject.save_id)

    # Another suite's model stays in the table, and what a live run prunes meanwhile is named and passed over.
    real = {"locate_model": suite.locate_model, "evaluate_one": suite.evaluate_one}
    for step, name in ((real["locate_model"], "locate_model"), (real["evaluate_one"], "evaluate_one")):
        shutil.copytree(here / "runs/tiny", here / "runs/live")

        def prune_first(*arguments, step=step, **options):
            shutil.rmtree(here / "runs/live/checkpoints/ba2", ignore_errors=True)
            return step(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(suite, name, prune_first)
            llmfoundry_lite.launch_eval.main(
                ["--all-checkpoints", "runs/live", "icl_tasks=[choice]", "suite=curve", "redo=true"]
            )
        assert "models.live-ba2: passed over runs/live/checkpoints/ba2, which was removed" in capsys.readouterr().err
        rows = (here / "results/curve/table.md").read_text().splitlines()
        assert [row.split()[1] for row in rows if "-ba" in row] == ["live-ba4", "tiny-ba2", "tiny-ba4"]
        shutil.rmtree(here / "runs/live")

    other = train_tokenizer(["something else"] * 3, 280)
    other.save("other")
    with pytest.raises(
        DataError, match=r"models: runs/tiny was trained with another tokenizer \(sha256:.*\) than other"
    ):
        locate_and_load_model("runs/tiny", tokenizer="other", device=CPU)
    shard = here / "runs/tiny/checkpoints/ba4/shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-17] ^= 1  # of a tensor; the last bytes are hashes
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"ba4/shard-00000.safetensors") as error:
        locate_and_load_model("runs/tiny", device=CPU)
    assert "\n" not in str(error.value)
    llmfoundry_lite.launch_eval.main(["--all-checkpoints", "runs/tiny", "icl_tasks=[choice]", "suite=damaged"])
    assert "models.tiny-ba4: passed over damaged checkpoint: " in capsys.readouterr().err
    assert [path.stem for path in (here / "results/damaged").glob("*.json")] == ["tiny-ba2"]
    shard.unlink()
    subject = locate_and_load_model("runs/tiny", device=CPU)
    assert subject.source.endswith("ba2")
    assert len(subject.notes) == 1 and "shard-00000.safetensors" in subject.notes[0]
    (here / "runs/tiny/checkpoints/ba2/shard-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="models: runs/tiny has no intact checkpoint: passed over incomplete"):
        locate_and_load_model("runs/tiny", device=CPU)


def test_what_cannot_be_evaluated_is_said_in_one_line(here, monkeypatch):
    for where, message in (
        ("nowhere", "models: nowhere does not exist; expected a run, a checkpoint, an exported folder or hf:NAME"),
        ("x" * 300, f"models: {'x' * 300} does not exist; expected a run, a checkpoint, an exported folder or hf:NAME"),
        ("evals", "models: evals holds neither a checkpoint nor the config.json of a Hugging Face model"),
    ):
        with pytest.raises(DataError) as error:
            locate_and_load_model(where, device=CPU)
        assert str(error.value) == message
    with pytest.raises(DataError, match="models: nowhere does not exist; expected a run or a folder of checkpoints"):
        llmfoundry_lite.launch_eval.main(["--all-checkpoints", "nowhere"])
    for misspelt in (
        lambda: locate_and_load_model("S3://b/x", device=CPU),
        lambda: llmfoundry_lite.launch_eval.main(["--all-checkpoints", "s3:/b/x"]),
    ):
        with pytest.raises(ConfigError, match=r"did you mean s3://b/x\?"):
            misspelt()
    train_tokenizer(["something else"] * 3, 280).save("other")
    with pytest.raises(DataError, match=r"models: model has another tokenizer of its own \(sha256:\w+\) than other \("):
        locate_and_load_model("model", tokenizer="other", device=CPU)
    for path in (here / "model").glob("tokenizer*"):
        path.unlink()
    assert not locate_and_load_model("model", tokenizer="tokenizer", device=CPU).notes
    (here / "model/vocab.json").write_text("{}")
    leave_out_companions(monkeypatch)
    assert locate_and_load_model("model", tokenizer="tokenizer", device=CPU).notes == [
        "passed over the model's own tokenizer model: tokenizers without tokenizer.json: needs the companion "
        "llmfoundry_formats"
    ]
    (here / "icl.yaml").write_text("icl_tasks: [choice]\n")
    with pytest.raises(ConfigError, match="models: none given; name one"):
        load_eval_config(["icl.yaml"])
    with pytest.raises(ConfigError, match="precision: 'fp8' is not known; expected fp32, tf32, bf16 or fp16"):
        load_eval_config(["icl.yaml", "models.a=b", "precision=fp8"])
    with pytest.raises(ConfigError, match="icl_tasks: no task given"):
        load_eval_config(["icl.yaml", "models.a=b", "icl_tasks=[]"])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("suite=../../x", "suite: '../../x' given, expected the name of a folder in results_folder (results), without"),
        ("suite=/tmp/x", "suite: '/tmp/x' given, expected the name of a folder in results_folder (results), without"),
        ("suite=..", "suite: '..' given, expected the name of a folder in results_folder (results), without slashes"),
        (
            "results_folder=gs//b/x",
            "results_folder: 'gs//b/x' given, expected a folder of this machine; did you mean gs:/",
        ),
        ("results_folder=out/{suite}", "expected a folder of this machine, in which nothing replaces {suite}"),
        ('"models={../x: model}"', "models: '../x' given, expected the name of a file"),
    ],
)
def test_results_are_written_nowhere_but_in_results_folder(here, argument, message):
    with pytest.raises(ConfigError) as error:
        load_eval_config(["models.a=model", argument.strip('"')])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_all_checkpoints_needs_a_run_and_nothing_else(here):
    config, found, *_ = load_eval_config(["--all-checkpoints", "runs/mpt-1b/checkpoints/"])
    assert config.models == {"mpt-1b": "runs/mpt-1b/checkpoints/"} and config.all_checkpoints
    assert (config.suite, [task.label for task in found]) == ("evals", ["choice", "next"])
    (here / "next.jsonl").unlink()
    assert [task.label for task in load_eval_config(["--all-checkpoints", "s3://b/a", "runs/b"])[1]] == ["choice"]
    (here / "icl.yaml").write_text("icl_tasks: [next]\n")
    config, found, *_ = load_eval_config(["icl.yaml", "--all-checkpoints", "runs/a", "limit=3"])
    assert (config.suite, config.models, config.limit, found[0].label) == ("icl", {"a": "runs/a"}, 3, "next")


def test_a_runs_own_held_out_text_is_a_task_where_it_is_here(here):
    loader = {"eval_loader": {"dataset": {"local": "data/mine", "split": "val"}}}
    (here / "runs/mine/checkpoints").mkdir(parents=True)
    (here / "runs/mine/config.yaml").write_text(json.dumps(loader))
    given = ["models.mine=runs/mine/checkpoints/ba2", "task_folder=none"]
    with pytest.raises(ConfigError, match="no YAML file given"):
        load_eval_config(given)
    (here / "data/mine/val").mkdir(parents=True)
    (here / "data/mine/val/text.jsonl").write_text('{"text": "a"}')
    (task,) = load_eval_config(given)[1]
    assert (task.label, task.icl_task_type, task.dataset_uri) == (
        "mine_text",
        "perplexity",
        "data/mine/val/text.jsonl",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no YAML file given; try icl-zero-shot models.ours=runs/mpt-1b"),
        (["icl_tasks=[next]"], "models: none given; name one on the command line, such as models.ours=runs/mpt-1b"),
        (
            ["icl-zero-shot", "--dry-run"],
            "--dry-run is an option of train; to see what an evaluation asks, use --show 3",
        ),
        (["--all-checkpoints"], "--all-checkpoints: no run given; name one, such as --all-checkpoints runs/mpt-1b"),
        (["models.a=b", "icl-zero-shot", "icl_tasks=[x=1.yaml]"], "x=1.yaml: no such file"),
        (["runs/a"], "'runs/a' is neither a .yaml file nor key=value; a model is given as models.a=runs/a"),
        (["--all-checkpoints", "a/x", "b/x"], "models: a/x and b/x are both x; name one otherwise: models.NAME=b/x"),
        (
            ["models.a=b", "task_folder=none"],
            "no YAML file given, and the data of every task in none/ is missing; in a clone, ",
        ),
    ],
)
def test_what_is_missing_on_the_command_line_is_said(here, arguments, message):
    with pytest.raises(ConfigError) as error:
        load_eval_config(arguments)
    assert message in str(error.value)


def ask_for_tasks_that_are_not_everywhere(folder):
    import os

    import torch.distributed as dist

    dist.init_process_group("gloo")
    os.chdir(folder if dist.get_rank() == 0 else folder / "elsewhere")
    with pytest.raises(
        UserError, match=r"rank 1 has the tasks next/0-shot, next/2-shot, but rank 0 has choice/0-shot, choice/2"
    ):
        llmfoundry_lite.launch_eval.main([f"models.a={folder}/model"])


@pytest.mark.multiprocess
def test_ranks_that_find_other_data_do_not_wait_for_each_other(here):
    (here / "elsewhere/evals").mkdir(parents=True)
    for name in ("evals/next.yaml", "next.jsonl"):
        (here / "elsewhere" / name).write_text((here / name).read_text())
    launch(ask_for_tasks_that_are_not_everywhere, (here,), here, 2).check()


WRITE = {"label": "write", "icl_task_type": "generation_task_with_answers", "dataset_uri": "next.jsonl"}


@pytest.mark.parametrize("is_ours", [True, pytest.param(False, marks=needs("llmfoundry_formats"))])
def test_a_model_that_gives_no_numbers_has_no_result_where_it_writes_either(here, is_ours):
    riddles = [{"context": row["context"], "answer": row["continuation"]} for row in SENTENCES]
    (here / "next.jsonl").write_text("".join(json.dumps(row) + "\n" for row in riddles))
    (here / "evals/write.yaml").write_text(json.dumps(WRITE))
    model = locate_and_load_model("model" if is_ours else str(save_neox(here / "neox")), device=CPU).model
    for name, parameter in model.model.named_parameters():
        if "norm_f" in name or "final_layer_norm" in name:
            parameter.data.fill_(math.nan)
    files = ResultFiles(Path("results"), "suite", "ours")
    results = Results(model="ours", suite="suite", source="model")
    tokenizer = locate_and_load_model("model", device=CPU).tokenizer
    with pytest.raises(DataError) as error:
        evaluate(model, tokenizer, load_tasks(["write"], "evals"), results, files)
    assert str(error.value) == (
        "write/0-shot: the model gives NaN or infinity in its answer to item 0; nothing is kept"
    )
    assert not (here / "results/suite/ours.json").exists()


def save_neox(folder):
    """A layout that is not ours, beside the model's tokenizer."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(vocab_size=384, max_position_embeddings=64, **sizes)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(folder)
    for path in Path("tokenizer").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


REPOSITORY = [
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "spiece.model"),
    *("pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "training_args.bin", "README.md"),
    *("onnx/model.onnx", "onnx/model.safetensors", "onnx/config.json", "tf_model.h5", "flax_model.msgpack"),
    *("model-q4.gguf", "consolidated.safetensors", "model.fp16.safetensors", "model.tflite", "optimizer.pt"),
]


@needs("llmfoundry_formats")
@pytest.mark.parametrize("has_safetensors", [True, False])
def test_of_a_hub_model_what_is_read_is_fetched_and_pickles_only_where_there_is_nothing_else(
    here, monkeypatch, has_safetensors
):
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    fetched = set()

    def download(name, **patterns):
        there = [*REPOSITORY, "pytorch_model.bin", *(["model.safetensors"] if has_safetensors else [])]
        fetched.update(filter_repo_objects(there, **patterns))
        if "pytorch_model.bin" in fetched:
            torch.save(model.state_dict(), folder / "pytorch_model.bin")
        return str(folder)

    folder = save_neox(here / "neox")
    model = locate_and_load_model("neox", device=CPU).model.model
    if not has_safetensors:
        (folder / "model.safetensors").unlink()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    subject = locate_and_load_model("hf:someone/neox", device=CPU)
    pickles = ["pytorch_model-00001-of-00002.bin", "pytorch_model.bin"]
    weights = ["model.safetensors"] if has_safetensors else pickles
    assert fetched == {*REPOSITORY[:6], "pytorch_model.bin.index.json", *weights}
    found, expected = (m.get_output_embeddings().weight for m in (subject.model.model, model))
    assert torch.equal(found, expected)


def test_a_model_that_gives_nan_or_lacks_the_tokenizers_tokens_is_refused(here):
    subject = locate_and_load_model("model", device=CPU)
    results = Results(model="m", suite="s", source="")
    subject.model.vocab_size = 100
    with pytest.raises(DataError, match=r"choice: the tokenizer gives token \d+, and the model has 100; give"):
        evaluate(subject.model, subject.tokenizer, tasks(), results)
    subject = locate_and_load_model("model", device=CPU)
    for parameter in subject.model.model.parameters():
        parameter.fill_(math.nan)
    with pytest.raises(DataError, match="choice/0-shot: the model gives NaN or infinity for 40 of 40 answers"):
        evaluate(subject.model, subject.tokenizer, tasks(), results)


def test_a_perplexity_beyond_all_floats_is_left_out(here):
    subject = locate_and_load_model("model", device=CPU)
    for parameter in subject.model.model.parameters():
        torch.nn.init.normal_(parameter, std=30)
    found = evaluate(subject.model, subject.tokenizer, tasks(), Results(model="m", suite="s", source="")).tasks
    assert found["next/0-shot"]["n"] == 12 and "perplexity" not in found["next/0-shot"]


def test_a_perplexity_that_no_result_may_have_is_left_out(here):
    """A model that is not trained yet gives a long answer one of exp(100), and the next evaluation reads the result."""
    (here / "next.jsonl").write_text(json.dumps({"context": "the", "continuation": " ".join(WORDS * 2)}) + "\n")
    Path("evals/next.yaml").write_text(Path("evals/next.yaml").read_text().replace("[0, 2]", "[0]"))
    run(["next"])
    (line,) = (here / "results/suite/ours.items.jsonl").read_text().splitlines()
    assert math.log(1e30) < -json.loads(line)["log_probability"][0] < 700
    (results,) = load_results([Path("results/suite/ours.json")])
    assert "perplexity" not in results.tasks["next/0-shot"]


def test_a_file_that_is_no_result_is_not_overwritten_unasked(here):
    path = here / "results/suite/ours.json"
    path.parent.mkdir(parents=True)
    for content in ("[1]", '{"torn'):
        path.write_text(content)
        with pytest.raises(DataError, match=r"ours.json .*; it would be replaced: move it away, or set redo=true$"):
            run()
        assert path.read_text() == content
    run(redo=True)
    assert len(json.loads(path.read_text())["tasks"]) == 4


def test_a_results_folder_that_is_a_file_is_refused(here):
    with pytest.raises(DataError, match=r"results_folder: .*choice.jsonl is not a folder that can be written to"):
        ResultFiles(Path("choice.jsonl"), "suite", "ours")


GOOD = {"query": "a cat", "choices": ["sat", "ran"], "gold": 1}
TASK = {"label": "t", "icl_task_type": "multiple_choice", "dataset_uri": "t.jsonl"}


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ([GOOD, {"query": "a", "gold": 0}], {}, "t: t.jsonl, line 2: no column 'choices'; a multiple_choice task has"),
        ([], {}, "t: t.jsonl has no rows"),
        ([{**GOOD, "gold": 2}], {}, "t: t.jsonl, line 1: gold is 2, expected 0 to 1"),
        ([{**GOOD, "choices": ["", "a"]}], {}, "t: no item can be asked of a model of 64 tokens: 1 with an answer"),
        ([GOOD], {"num_fewshot": [1]}, "t: t.jsonl has 1 rows, too few for 1 examples and a question"),
        ([GOOD], {"num_fewshots": [1]}, "icl.yaml: icl_tasks[0].num_fewshots: unknown key; did you mean"),
        (
            [GOOD],
            {"dataset_uri": "u.jsonl"},
            "t: u.jsonl does not exist; in a clone, `python scripts/fetch_tasks.py` fetches",
        ),
        ([GOOD], {"dataset_uri": "u.jsonl"}, "finds LLM Foundry's, skip_missing_tasks=true leaves it out"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_computed(here, rows, changes, message):
    (here / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (here / "icl.yaml").write_text(json.dumps({"models": {"ours": "model"}, "icl_tasks": [{**TASK, **changes}]}))
    with pytest.raises(UserError) as error:
        llmfoundry_lite.launch_eval.main(["icl.yaml"])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (here / "results").exists()


def test_a_gauntlet_leaves_out_by_name_a_task_that_no_item_of_can_be_asked(here, capsys):
    categories = [
        {"name": name, "benchmarks": [{"name": name, "num_fewshot": 0, "random_baseline": 0.5}]} for name in "tvw"
    ]
    tasks = [{**TASK, "label": name, "dataset_uri": f"{name}.jsonl", "num_fewshot": [0]} for name in "tvw"]
    (here / "t.jsonl").write_text(json.dumps(GOOD))
    (here / "v.jsonl").write_text("")
    (here / "w.jsonl").write_text(json.dumps({**GOOD, "choices": [TEXT * 9, TEXT * 8]}))
    asked = {"models": {"ours": "model"}, "icl_tasks": tasks, "eval_gauntlet": {"categories": categories}}
    (here / "icl.yaml").write_text(json.dumps(asked))
    llmfoundry_lite.launch_eval.main(["icl.yaml"])
    said = capsys.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if "left out of the gauntlet: " in line]
    assert lines == [
        "ours: left out of the gauntlet: v: v.jsonl has no rows",
        "ours: left out of the gauntlet: w: no item can be asked of a model of 64 tokens: 1 with an answer longer than "
        "the model",
    ]
    assert list(json.loads((here / "results/icl/ours.json").read_text())["tasks"]) == ["t/0-shot"]
    table = (here / "results/icl/gauntlet.md").read_text()
    assert "v is left out: no accuracy of v/0-shot" in table and "| t |" in table.replace("  ", " ")
    (here / "t.jsonl").write_text("")
    with pytest.raises(DataError, match="no task has an item that can be asked of a model of 64 tokens; name others"):
        llmfoundry_lite.launch_eval.main(["icl.yaml", "results_folder=other"])


def test_what_could_not_be_asked_or_had_to_be_cut_is_told_under_the_table(here, capsys):
    rows = [GOOD, {**GOOD, "choices": ["sat", ""]}, {**GOOD, "query": TEXT * 9}]
    (here / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (here / "icl.yaml").write_text(json.dumps({"models": {"ours": "model"}, "icl_tasks": [TASK]}))
    llmfoundry_lite.launch_eval.main(["icl.yaml"])
    told = capsys.readouterr().out
    assert "1 skipped (an answer without tokens, first in row 2); 2 asked" in told
    assert "1 with a context cut to fit the model, of 2 items" in told
    write = {"label": "w", "icl_task_type": "generation_task_with_answers", "dataset_uri": "w.jsonl"}
    (here / "w.jsonl").write_text(json.dumps({"context": TEXT * 9, "answer": "a cat"}))
    (here / "icl.yaml").write_text(json.dumps({"models": {"ours": "model"}, "icl_tasks": [write]}))
    llmfoundry_lite.launch_eval.main(["icl.yaml"])
    assert "w/0-shot: 1 with a context cut to fit the model, of 1 items" in " ".join(capsys.readouterr().out.split())


def ask_by_hand(kind, rows, nats, greedy=()):
    """Results and items of a task whose requests' summed log-probabilities are given."""

    class Known:
        shares_prefixes, max_seq_len, vocab_size = True, 64, 384

    class Words:
        eos_token_id, prefix_token_id, beginning = 0, 0, []

        def encode(self, text):
            return [1 + sum(map(ord, word)) % 300 for word in text.split()]

    model: Any = Known()
    words: Any = Words()
    found = {i: Score(value, i in greedy) for i, value in enumerate(nats)}
    config = TaskConfig(label="t", icl_task_type=kind, dataset_uri="")
    task = prepare_task(config, rows, 0, words, max_seq_len=64, tokenization="separate")
    runner = harness.TaskRunner(
        model=model, tokenizer=words, max_batch_tokens=64, data_rank=harness.DataRank(0, 1), on_progress=lambda *_: None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "score", lambda *_, **__: [found])
        return harness.run_task(runner, task)


def test_three_scores_by_hand():
    """Two words of 5 letters and a space, three of 2 letters: what is best depends on what the sum is divided by."""
    rows = [{"query": query, "choices": ["a", "bbbbbb cccccc", "d e f"], "gold": 2} for query in "qr"]
    record, items = ask_by_hand("multiple_choice", rows, [-3.0, -4.0, -4.5, -1.0, -2.0, -3.0])
    # -3, -4, -4.5; over 1, 2 and 3 tokens -3, -2, -1.5; over 1, 13 and 5 characters -3, -0.31, -0.9.
    assert items[0]["chosen"] == {"acc_per_token": 2, "acc": 0, "acc_norm": 1, "acc_per_byte": 1}
    # -1, -2, -3: the same for each token, where the first counts; over characters -1, -0.15, -0.6.
    assert items[1]["chosen"] == {"acc_per_token": 0, "acc": 0, "acc_norm": 1, "acc_per_byte": 1}
    assert [item["tie"]["acc_per_token"] for item in items] == [False, True]
    assert (record["acc_per_token"], record["acc"], record["acc_norm"], record["num_ties"]) == (0.5, 0, 0, 1)
    assert record["acc_per_token_stderr"] == pytest.approx(0.5) and record["chance"] == pytest.approx(1 / 3)


def test_ranks_that_compute_as_one_count_each_answer_once(monkeypatch):
    """Stages of a pipeline and groups of tensor parallelism find the same answers on each of their ranks."""
    rows = [{"query": query, "choices": ["a", "b c"], "gold": 0} for query in "qr"]
    alone = ask_by_hand("multiple_choice", rows, [-1.0, -2.0, -4.0, -3.0])
    monkeypatch.setattr(harness, "all_gather_json", lambda value: [value, value])
    record, items = ask_by_hand("multiple_choice", rows, [-1.0, -2.0, -4.0, -3.0])
    assert items == alone[1] and record | {"seconds": 0} == alone[0] | {"seconds": 0}


def test_language_modelling_by_hand():
    """Right is what is the likeliest token by token; perplexity is of a whole answer, as in lm-evaluation-harness."""
    rows = [{"context": "a", "continuation": "b c"}, {"context": "a", "continuation": "d"}]
    record, _ = ask_by_hand("language_modeling", rows, [-2.0, -1.0], greedy={1})
    assert record["acc"] == 0.5 and record["perplexity"] == pytest.approx(math.exp(1.5))
    assert record["perplexity_stderr"] == pytest.approx(math.exp(1.5) * 0.5)


def test_rows_alike_are_one_cluster_however_often_they_are_there(tmp_path):
    rows = [{"context": f"q{i}", "continuation": "b"} for i in range(24)]
    right = {"base": set(range(12)), "ours": set(range(3, 21))}  # 9 won, 3 lost

    def verdict(copies):
        paths = []
        for name, won in right.items():
            more = [{**row, "id": number} for number in range(copies) for row in rows]
            greedy = {i for i in range(len(more)) if i % 24 in won}
            record, items = ask_by_hand("language_modeling", more, [-1.0] * len(more), greedy)
            paths.append(write_result(tmp_path / str(copies), name, {"t/0-shot": (record, items)}))
        results = load_results(paths)
        (task,) = compare(results)[0].tasks
        return results[0].tasks["t/0-shot"]["acc_stderr"], task.p, task.low, task.high, task.verdict

    once = verdict(1)
    assert once[1] > 0.05 and once[-1] == "no detectable difference"
    assert verdict(20)[:-1] == pytest.approx(once[:-1]) and verdict(20)[-1] == once[-1]


def test_a_result_names_its_code():
    record, _ = ask_by_hand("language_modeling", [{"context": "a", "continuation": "b"}], [-2.0])
    assert re.fullmatch(r"\d+\.\d+\.\d+( [0-9a-f]{12}\+?)?", record["code"])


def of(values, **columns):
    return [{"acc": value, **{name: column[i] for name, column in columns.items()}} for i, value in enumerate(values)]


def test_standard_errors():
    assert mean_and_error(of([1, 0, 1, 1]), "acc") == (0.75, pytest.approx(0.25))
    assert mean_and_error(of([1]), "acc") == (1, 0)


def test_the_error_of_clusters_is_that_of_their_means():
    clustered = of([1, 1, 0, 0, 1, 1, 1, 1], cluster="aabbccdd")
    assert mean_and_error(clustered, "acc") == (0.75, pytest.approx(0.25))
    assert mean_and_error(of([1, 0], cluster="aa"), "acc") == (0.5, 0)


def test_categories_count_the_same_and_spread_within():
    items = of([1, 0, 1, 1, 1, 1, 1, 1], category="aaaabbbb")
    assert mean_and_error(items, "acc", True) == (0.875, pytest.approx(0.125))
    uneven = of([1, 1, 1, 1, 0], category="aaaab")
    assert mean_and_error(uneven, "acc", True) == (0.5, pytest.approx(0.25))  # b has one, whose spread is the whole's
