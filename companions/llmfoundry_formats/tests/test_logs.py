"""Logs that other tools wrote (tests/evaluation/logs/README.md) become results, or are refused in a line."""

import io
import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest
from streaming.base.compression import compress

from llmfoundry_formats import inspect_logs
from llmfoundry_formats import logs as foreign
from llmfoundry_formats.inspect_logs import ZSTANDARD, read_member
from llmfoundry_lite.cli import main
from llmfoundry_lite.errors import DataError, UserError
from llmfoundry_lite.evaluation.compare import compare, compare_files
from llmfoundry_lite.evaluation.results import load_any
from tests.helpers.bombs import MIB, little_memory
from tests.helpers.results import write_result

LOGS = Path(__file__).parent / "logs"
LM_EVAL, INSPECT = ([LOGS / tool / name for name in "ab"] for tool in ("lm_eval", "inspect"))
EVALS = [next(folder.glob("*.eval")) for folder in INSPECT]


def refusal(*paths, **options):
    with pytest.raises(UserError) as caught:
        compare(load_any(paths), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def logs(tmp_path):
    """The lm-eval logs of both models, to be changed."""
    return [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in LM_EVAL]


def samples_of(folder, task="short choices"):
    return next(folder.glob(f"samples_{task}_*.jsonl"))


def rewrite(path, change):
    """Pass each sample through `change`; None removes it."""
    samples = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples if sample is not None))


def test_lm_eval_logs_give_the_numbers_that_lm_eval_printed():
    for results in load_any(LM_EVAL):
        printed = json.loads(next(results.path.glob("results_*.json")).read_text())["results"]
        assert results.tasks["short choices"]["acc"] == printed["short choices"]["acc,none"]
        assert results.tasks["short choices"]["acc_stderr"] == pytest.approx(
            printed["short choices"]["acc_stderr,none"]
        )
        assert results.tasks["text"]["bits_per_byte"] == pytest.approx(printed["text"]["bits_per_byte,none"])
        for name in ("first", "vowel"):  # a metric by two filters
            key = f"exact_match,{name}"
            assert results.tasks["written"][key] == printed["written"][key]
        assert results.tasks["text"]["metrics"] == ["bits_per_byte"]  # word_perplexity is no number of one item
        assert (results.num_parameters, results.precision) == (247_552, "float32")


def test_models_are_compared_with_clusters_and_corrections():
    (pair,) = compare(load_any(LM_EVAL, "passage"), all_metrics=True)
    by_task = {task.task: task for task in pair.tasks}
    assert (by_task["text"].wins, by_task["text"].losses, by_task["text"].is_detected) == (19, 1, True)
    assert by_task["text"].p_corrected == pytest.approx(3 * by_task["text"].p)
    assert [paired.metric for paired in pair.other_metrics] == ["acc_norm", "exact_match,vowel"]
    assert pair.notes == ["short choices: 12 items in 6 clusters, which are what is independent"]
    assert repr(compare_files(*LM_EVAL, cluster="passage", all_metrics=True)) == repr(pair), "as the library has it"


def test_epochs_of_an_inspect_sample_are_one_item():
    for results, accuracy in zip(load_any(INSPECT), (0.8125, 0.875), strict=True):  # as `inspect eval` printed
        task = results.tasks["riddles"]
        assert (task["n"], task["metrics"], task["includes"]) == (8, ["includes", "match"], accuracy)
        assert {item["includes"] for item in results.items["riddles"]} <= {0, 0.5, 1}
    (pair,) = compare(load_any(EVALS, "passage"))
    assert (pair.first, pair.other, pair.tasks[0].wins, pair.tasks[0].losses) == ("hf/a", "hf/b", 2, 1)
    assert pair.notes == ["riddles: 4 clusters: no interval and no verdict below 6"]


def test_a_metric_of_which_less_is_better_is_no_gain(logs):
    """ "higher_is_better" is lm_eval's; its results file has it for each task."""
    for folder in logs:
        rewrite(samples_of(folder), lambda sample: {**sample, "metrics": ["error", *sample["metrics"]], "error": 0.5})
        path = next(folder.glob("results_*.json"))
        facts = json.loads(path.read_text())
        facts["higher_is_better"]["short choices"]["error"] = False
        path.write_text(json.dumps(facts))
    task = load_any(logs)[0].tasks["short choices"]
    assert (task["metric"], task["metrics"]) == ("acc", ["acc", "acc_norm"])


def test_an_inspect_sample_with_an_error_is_counted_and_scores_nothing(tmp_path):
    with zipfile.ZipFile(EVALS[0]) as archive:
        header = json.loads(read_member(archive, "header.json"))
        names = [name for name in archive.namelist() if name.startswith("samples/")]
        samples = [json.loads(read_member(archive, name)) for name in names]
    id_ = samples[0]["id"]
    samples = [{**sample, "error": {"message": "timeout"}} if sample["id"] == id_ else sample for sample in samples]
    (tmp_path / "log.json").write_text(json.dumps({**header, "samples": samples}))
    (found,) = load_any([tmp_path / "log.json"])
    assert (found.tasks["riddles"]["n"], found.tasks["riddles"]["skipped"]) == (7, {"not scored": 1})


def test_an_inspect_log_is_the_same_as_json_or_deflated(tmp_path):
    (expected,) = load_any(EVALS[:1])
    with zipfile.ZipFile(EVALS[0]) as archive:
        content = {name: read_member(archive, name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "old.eval", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in content.items():
            archive.writestr(name, raw)
    samples = [json.loads(raw) for name, raw in content.items() if name.startswith("samples/")]
    (tmp_path / "log.json").write_text(json.dumps({**json.loads(content["header.json"]), "samples": samples}))
    for name in ("old.eval", "log.json"):
        (found,) = load_any([tmp_path / name])
        assert (found.items, found.tasks) == (expected.items, expected.tasks)
    two = [{**samples[0], "id": 1}, {**samples[0], "id": "1"}]
    (tmp_path / "log.json").write_text(json.dumps({**json.loads(content["header.json"]), "samples": samples + two}))
    (found,) = load_any([tmp_path / "log.json"])
    assert [len(items) for items in found.items.values()] == [len(items) + 2 for items in expected.items.values()]


def test_other_questions_or_prompts_are_refused_by_item(logs):
    rewrite(samples_of(logs[1]), lambda sample: {**sample, "doc_hash": "0"} if sample["doc_id"] == 3 else sample)
    found = refusal(*logs)
    assert "asked the same: the data (12 items against 12; item 3 is the first with another question); eval" in found
    assert "sha256" not in found
    shutil.copytree(LM_EVAL[1], logs[1], dirs_exist_ok=True)
    rewrite(samples_of(logs[1]), lambda sample: sample if sample["doc_id"] < 9 else None)
    assert "the data (12 items against 9)" in refusal(*logs)
    shutil.copytree(LM_EVAL[1], logs[1], dirs_exist_ok=True)
    other = {"arguments": {"gen_args_0": {"arg_0": "Q: "}}}
    rewrite(samples_of(logs[1]), lambda sample: {**sample, **other} if sample["doc_id"] > 4 else sample)
    assert "asked the same: their prompts; item 5 is the first with another prompt; evaluate both" in refusal(*logs)
    rewrite(samples_of(logs[1]), lambda sample: {**sample, **other})
    for folder in logs:  # each model's own template: the prompts differ rightly
        path = next(folder.glob("results_*.json"))
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": "{{ messages }}"}))
    assert compare(load_any(logs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sample: None, "has no samples; expected a line for each item"),
        (
            lambda sample: {key: value for key, value in sample.items() if key != "doc_hash"},
            "has no doc_hash, by which",
        ),
        (lambda sample: {**sample, "doc_id": "3"}, "doc_id is '3', expected a whole number"),
        (lambda sample: {**sample, "doc_id": 3}, "has item 3 twice; is it two logs in one?"),
        (
            lambda sample: {**sample, "acc": [0, 1], "acc_norm": 37.5},
            "short choices has no metric with a number from 0",
        ),
        (
            lambda sample: {**sample, "doc": {}} if sample["doc_id"] == 3 else sample,
            "item 3 lacks the field that --cluster names, which others have",
        ),
    ],
    ids=["empty", "an old release", "an id that is text", "two logs in one", "no metric by item", "cluster"],
)
def test_a_log_that_lacks_something_is_refused(change, message, logs):
    rewrite(samples_of(logs[0]), change)
    with pytest.raises(DataError) as caught:
        load_any([samples_of(logs[0])], "passage")
    assert message in str(caught.value)


def test_logs_that_are_torn_unfinished_or_of_several_tools_or_models_are_refused(tmp_path, logs):
    path = samples_of(logs[0])
    path.write_text(path.read_text()[:-30])
    assert f"{path}, line 12 is not JSON" in refusal(path)
    (tmp_path / "torn.eval").write_bytes(EVALS[0].read_bytes()[:9000])
    assert "torn.eval cannot be read as an Inspect log: File is not a zip file" in refusal(tmp_path / "torn.eval")
    (tmp_path / "torn.eval").write_bytes(_with_a_broken_member())
    assert "torn.eval cannot be read as an Inspect log: Error -3 while decompressing" in refusal(tmp_path / "torn.eval")
    (tmp_path / "started.json").write_text(json.dumps({"eval": {"task": "t"}, "status": "started"}))
    assert "status 'started', expected 'success'" in refusal(tmp_path / "started.json")
    (tmp_path / "other.json").write_text(json.dumps({"eval": {"config": 3}, "status": "success", "samples": [{}]}))
    assert "other.json is not as Inspect writes its logs ('int' object" in refusal(tmp_path / "other.json")
    (tmp_path / "other.json").unlink()
    assert "is of lm-eval" in refusal(LM_EVAL[0], EVALS[0])
    ours = write_result(tmp_path, "ours", {"t/0-shot": [0, 1]})
    assert f"{ours} of llmfoundry-lite" in refusal(LM_EVAL[0], ours)
    shutil.copy(EVALS[0], tmp_path / "both.eval")
    (tmp_path / "started.json").unlink()
    (tmp_path / "torn.eval").unlink()
    shutil.copy(EVALS[1], tmp_path / "also.eval")
    assert "has two logs of riddles, also.eval and both.eval" in refusal(tmp_path)
    shutil.copytree(LM_EVAL[0], logs[0], dirs_exist_ok=True)
    samples_of(logs[0], "text").unlink()
    for path in [samples_of(logs[1], "text"), next(logs[1].glob("results_*"))]:
        shutil.copy(path, logs[0])
    assert "has logs of a-hf and b-hf; expected a folder for each model" in refusal(logs[0])
    assert "no samples_*_2026" in refusal(_without_samples(logs[1]))
    assert "or a folder with samples_*.jsonl of lm_eval --log_samples" in refusal(_emptied(tmp_path))


# What a stranger wrote ----------------------------------------------------------------------------------------------


def eval_log(path, samples, method=zipfile.ZIP_DEFLATED):
    """A log of Inspect whose samples have these bytes; None: packed by Zstandard."""
    header = {"eval": {"task": "t", "model": "m"}, "status": "success"}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.json", json.dumps(header))
        for number, sample in enumerate(samples):
            packed = compress("zstd", sample) if method is None else sample
            archive.writestr(f"samples/{number}.json", packed, method or zipfile.ZIP_STORED)
            if method is None:  # in the directory, which is written at the end
                archive.getinfo(f"samples/{number}.json").compress_type = ZSTANDARD
    return path


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, None], ids=["deflate", "zstandard"])
def test_a_sample_that_unpacks_to_gigabytes_is_refused_after_a_few(tmp_path, monkeypatch, method):
    """A log of 6 MB took 10.6 GB of memory."""
    monkeypatch.setattr(inspect_logs, "MAX_JSON_BYTES", MIB)
    log = eval_log(tmp_path / "bomb.eval", [b'{"id": "' + bytes(64 * MIB)], method)
    with little_memory(48):
        message = refusal(log)
    assert f"{log}: samples/0.json has more than 1,048,576 bytes, the most that are read of a sample" in message


def test_a_log_in_json_that_is_too_large_is_refused_with_the_way_to_convert_it(tmp_path, monkeypatch):
    monkeypatch.setattr(foreign, "MAX_JSON_BYTES", 100)
    log = tmp_path / "log.json"
    log.write_text(json.dumps({"eval": {}, "samples": ["a" * 100]}))
    for given in (log, tmp_path):  # a folder does not leave it out unsaid
        assert refusal(given).endswith("read of results in JSON; " + foreign.CONVERSION_HINT)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_compression_whose_pieces_have_no_bound_is_refused(tmp_path, method):
    log = eval_log(tmp_path / "bomb.eval", [bytes(64 * MIB)], method)
    with little_memory(48):
        message = refusal(log)
    assert f"samples/0.json is compressed by ZIP's method {method}, expected deflate or Zstandard" in message


@pytest.mark.parametrize("tool", ["inspect", "lm_eval"])
def test_samples_are_read_one_by_one(tmp_path, tool):
    filler = " " * (2 * MIB)
    if tool == "inspect":
        of = {"input": "q", "target": "a", "scores": {"match": {"value": "C"}}, "messages": filler}
        log = eval_log(tmp_path / "long.eval", [json.dumps({"id": i, **of}).encode() for i in range(16)])
    else:
        of = {"doc": {}, "doc_hash": "d", "arguments": [], "metrics": ["acc"], "acc": 1.0, "resps": filler}
        log = tmp_path / "samples_long_2026-01-01T00-00-00.jsonl"
        log.write_text("".join(json.dumps({"doc_id": i, **of}) + "\n" for i in range(16)))
    with little_memory(24):
        [results] = load_any([log])
    assert [len(items) for items in results.items.values()] == [16]


def test_all_samples_of_a_log_together_have_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect_logs, "MAX_LOG_BYTES", MIB)
    sample = {"id": 0, "input": "q" * 100_000, "target": ""}
    log = eval_log(tmp_path / "bomb.eval", [json.dumps(sample).encode()] * 20)
    assert f"{log} has more than 1,048,576 bytes, the most that are read of a log, unpacked" in refusal(log)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["a.json", "a.eval", "samples_t_2026-01-01T00-00-00.jsonl", "items"])
def test_a_pipe_in_a_result_s_place_is_refused_and_not_waited_for(tmp_path, name):
    path = write_result(tmp_path, "a", {"t/0-shot": [0, 1]}) if name == "items" else tmp_path / name
    pipe = tmp_path / "a.items.jsonl" if name == "items" else path
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    message = refusal(path)
    assert str(pipe) in message and "not a regular file" in message


def _without_samples(folder):
    for path in folder.glob("samples_*"):
        path.unlink()
    return next(folder.glob("results_*.json"))


def _with_a_broken_member():
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", "{}")
    content = bytearray(raw.getvalue())
    content[30 + len("header.json")] = 0xFF
    return bytes(content)


def _emptied(folder):
    (folder / "empty").mkdir()
    return folder / "empty"


def test_the_command_writes_its_tables_and_names_a_field_that_no_row_has(tmp_path, capsys):
    arguments = ["compare", *map(str, LM_EVAL)]
    assert main.run([*arguments, "--out", str(tmp_path)]) == 0
    assert "| text | bits_per_byte | 20 |" in (tmp_path / "compare.md").read_text()
    assert main.run([*arguments, "--cluster", "page"]) == 2
    assert "--cluster page: no row of" in capsys.readouterr().err


def test_an_output_folder_is_the_one_result_in_it(tmp_path):
    """lm_eval writes OUT/MODEL/results_DATE.json, our evaluation FOLDER/SUITE/MODEL.json."""
    outs = [tmp_path / name for name in ("first", "other")]
    for out, folder in zip(outs, LM_EVAL, strict=True):
        shutil.copytree(folder, out / f"models__{folder.name}")
    (found,), (expected,) = compare(load_any(outs)), compare(load_any(LM_EVAL))
    assert (found.first, found.sentence) == (expected.first, expected.sentence)
    assert compare_files(str(outs[0]), outs[1]).sentence == expected.sentence
    write_result(tmp_path / "ours", "base", {"t/0-shot": [0, 1]})
    assert load_any([tmp_path / "ours"])[0].model == "base"


def test_an_output_folder_of_several_results_or_of_averages_alone_is_refused_by_what_is_in_it(tmp_path, logs):
    out = tmp_path / "out"
    out.mkdir()
    for folder in logs:
        folder.rename(out / f"models__{folder.name}")
    assert f"{out} holds 2 results: models__a, models__b; name one of them" in refusal(out, LM_EVAL[0])
    _without_samples(out / "models__a")
    _without_samples(out / "models__b")
    assert f"{out}: models__a/results_2026-11-25T04-02-17.980768.json has only averages" in refusal(out)
    assert "run lm_eval again with --log_samples" in refusal(out / "models__b")
    assert "does not exist" in refusal(tmp_path / "nowhere")
