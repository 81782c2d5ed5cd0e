"""An evaluation against a stored result: fewer items, the same verdict, refusals before a model is loaded."""

import json
import shutil

import pytest

from llmfoundry_lite.cli import main
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.convert.huggingface import export_model
from llmfoundry_lite.data.tokenizer import train_tokenizer
from llmfoundry_lite.errors import UserError
from llmfoundry_lite.eval import main as evaluate
from llmfoundry_lite.evaluation import harness, suite
from llmfoundry_lite.evaluation.compare import compare
from llmfoundry_lite.evaluation.results import load_results
from llmfoundry_lite.evaluation.sequential import Rule
from tests.helpers.launch import launch
from tests.helpers.models import normal_model

TEXT = "the cat sat on a mat and the dog ran over a hill to see the sun go down"
WORDS = TEXT.split()
NUM = 120


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two models; all answers of the first, `base`, are right, and those of the second by chance."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        tokenizer = train_tokenizer([" ".join(WORDS)] * 3, 300)
        tokenizer.save("tokenizer")
        for seed, name in enumerate(("base", "ours")):
            config = ModelConfig(d_model=16, n_heads=2, n_layers=1, max_seq_len=64, vocab_size=384)
            model = normal_model(config, seed, 0.2)
            export_model(model.state_dict(), model.config, name, tokenizer_folder="tokenizer")
        rows = [
            {
                "query": f"{WORDS[i % 18]} {WORDS[i * 7 % 18]} {WORDS[i * i % 17]}",
                "choices": [WORDS[i * 5 % 18], WORDS[(i * 3 + 1) % 17]],
                "gold": 0,
            }
            for i in range(NUM)
        ]
        write_rows(folder / "choice.jsonl", rows)
        (folder / "evals").mkdir()
        for label in ("choice", "other"):
            task = {"label": label, "icl_task_type": "multiple_choice", "dataset_uri": "choice.jsonl", "metric": "acc"}
            (folder / f"evals/{label}.yaml").write_text(json.dumps(task | {"num_fewshot": [0]}))
        ask("models.base=base", "results_folder=draft")
        (result,) = load_results([folder / "draft/s/base.json"])
        for row, item in zip(rows, result.items["choice/0-shot"], strict=True):
            row["gold"] = item["chosen"]["acc"]
        write_rows(folder / "choice.jsonl", rows)
        ask("models.base=base")
        ask("models.ours=ours", "results_folder=whole")
    return folder


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def ask(*arguments, tasks="[choice]"):
    evaluate([f"icl_tasks={tasks}", "suite=s", *arguments])


AGAINST = "against=results/s/base.json"


def read(path):
    return json.loads(path.read_text())["tasks"]["choice/0-shot"]


def test_few_items_are_asked_and_the_same_is_found_as_by_all(here, capsys, monkeypatch):
    real, parts = harness.Asker.ask, []
    monkeypatch.setattr(harness.Asker, "ask", lambda *a: parts.append(len(a[1].items)) or real(*a))
    ask("models.ours=ours", AGAINST)
    record = read(here / "results/s/ours.json")
    assert sum(parts) == record["n"] < NUM / 2 and set(parts) == {NUM // 10}
    told = record["sequential"]
    assert (told["against"], told["num_items"], told["decision"]) == ("base", NUM, "worse")
    assert told["looks"] == list(range(12, 121, 12)) and told["look"] == record["n"] // 12
    printed = capsys.readouterr().out
    assert "worse by 0." in printed and f"{record['n']} of {NUM} items asked, look {told['look']} of 10" in printed

    stopped = load_results([here / "results/s/base.json", here / "results/s/ours.json"])
    whole = load_results([here / "results/s/base.json", here / "whole/s/ours.json"])
    found, replayed = (pair[0].tasks[0] for pair in (compare(stopped), compare(whole, sequential=Rule())))
    assert (found.p, found.low, found.high, found.verdict) == (
        replayed.p,
        replayed.low,
        replayed.high,
        replayed.verdict,
    )
    assert found.stage == replayed.stage
    wanted = {item["index"]: item["acc"] for item in whole[1].items["choice/0-shot"]}
    asked = stopped[1].items["choice/0-shot"]
    assert [item["index"] for item in asked] == sorted(item["index"] for item in asked)
    assert all(item["acc"] == wanted[item["index"]] for item in asked)


def test_a_part_is_no_whole_result(here, capsys):
    ask("models.ours=ours", AGAINST)
    record = read(here / "results/s/ours.json")
    assert json.loads((here / "results/s/ours.json").read_text())["average"] is None
    table = (here / "results/s/table.md").read_text()
    note = f"{record['n']} of {NUM} items asked, until the difference to base was decided (worse): no whole result"
    assert note in table and "| base |" in table
    capsys.readouterr()
    shutil.copytree(here / "whole/s", here / "third")
    for pair in (("results/s/ours.json", "results/s/base.json"), ("third/ours.json", "results/s/ours.json")):
        assert main.run(["compare", *pair]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"ours was asked {record['n']} of {NUM} items" in line or "results/s/ours was asked" in line
        assert "until its difference to base was decided; give that result first" in line


def test_without_against_the_task_is_asked_whole(here):
    ask("models.ours=ours", AGAINST)
    ask("models.ours=ours")
    record = read(here / "results/s/ours.json")
    assert record["n"] == NUM and "sequential" not in record
    ask("models.ours=ours", AGAINST)  # a whole result is not given up for a part
    assert read(here / "results/s/ours.json") == record


def test_a_finished_task_is_not_asked_again_by_the_same_rule(here, monkeypatch):
    ask("models.ours=ours", AGAINST)
    first = read(here / "results/s/ours.json")
    real, parts = harness.Asker.ask, []
    monkeypatch.setattr(harness.Asker, "ask", lambda *a: parts.append(1) or real(*a))
    ask("models.ours=ours", AGAINST)
    assert not parts and read(here / "results/s/ours.json") == first
    ask("models.ours=ours", AGAINST, "spending=pocock")
    assert parts and read(here / "results/s/ours.json")["sequential"]["spending"] == "pocock"


def test_equal_models_are_asked_everything_and_then_are_whole(here):
    ask("models.twin=base", AGAINST)
    record = read(here / "results/s/twin.json")
    assert record["n"] == NUM and record["sequential"]["decision"] == "" and record["sequential"]["look"] == 10
    assert json.loads((here / "results/s/twin.json").read_text())["average"] == 1.0
    assert main.run(["compare", "whole/s/ours.json", "results/s/twin.json"]) == 0


def test_tasks_and_models_share_the_error(here):
    ask("models.a=ours", "models.b=base", "redo=true", "results_folder=new", "against=results/s/base.json")
    assert read(here / "new/s/a.json")["sequential"]["level"] == 0.025


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (None, ["against=gone.json"], "gone.json does not exist"),
        ("items", [], "base.items.jsonl is missing, and results are compared item by item"),
        ("data", [], "against: results/s/base.json has choice/0-shot with other data than asked for now"),
        (None, ["limit=50"], "against: results/s/base.json has choice/0-shot with limit None, not 50 as asked for now"),
        (None, ["tokenization=joint"], "with tokenization 'separate', not 'joint' as asked for now"),
        (None, ["against=results/s/part.json"], "choice/0-shot of results/s/part.json is sequential, "),
        (None, ["models.base=ours"], "against: results/s/base.json is where this evaluation is written to"),
        ("few", [], "choice/0-shot: 5 items, too few to be asked until a difference is decided, which takes 6"),
        (None, ["margin=-1"], "margin: -1 given, expected a number above 0"),
        (None, ["spending=early"], "spending: 'early' is not known; expected obrien_fleming or pocock"),
        (None, ["all_checkpoints=true"], "against: a learning curve needs whole results; remove it, or all_check"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(here, monkeypatch, change, arguments, message):
    if "part" in str(arguments):
        ask("models.part=ours", AGAINST)
    if change == "items":
        (here / "results/s/base.items.jsonl").unlink()
    if change in ("data", "few"):
        lines = (here / "choice.jsonl").read_text().splitlines(keepends=True)
        (here / "choice.jsonl").write_text("".join(lines[:5] if change == "few" else lines[1:]))
    if change == "few":
        ask("models.base=base", "redo=true")
    monkeypatch.setattr(suite, "evaluate_one", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(UserError) as error:
        ask("models.ours=ours", AGAINST, *arguments)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_task_that_the_stored_result_lacks_is_named(here):
    with pytest.raises(UserError, match="has no other/0-shot; it has choice/0-shot: ask for these in icl_tasks"):
        ask("models.ours=ours", AGAINST, tasks="[choice,other]")


@pytest.mark.multiprocess
@pytest.mark.slow
def test_ranks_stop_at_the_same_look(here):
    ask("models.ours=ours", AGAINST)
    arguments = ["models.ours=ours", AGAINST, "icl_tasks=[choice]", "suite=s", "results_folder=two"]
    launch(evaluate, (arguments,), here, 2).check()
    one, two = (read(here / f"{folder}/s/ours.json") for folder in ("results", "two"))
    assert one["sequential"] == two["sequential"] and one["acc"] == two["acc"]
    files = (here / f"{folder}/s/ours.items.jsonl" for folder in ("results", "two"))
    one, two = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    for ours, theirs in zip(one, two, strict=True):  # other batches round the last bit otherwise
        assert (ours["index"], ours["chosen"]) == (theirs["index"], theirs["chosen"])
        assert ours["log_probability"] == pytest.approx(theirs["log_probability"], rel=1e-5)
