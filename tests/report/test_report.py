"""`llmfoundry-lite report` on run directories written by hand; one real run in several launches is at the end."""

import csv
import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest

from llmfoundry_lite.cli import main
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.ranks.status import write_ended_early
from llmfoundry_lite.report.page import Section, markdown
from llmfoundry_lite.report.reading import read_run
from llmfoundry_lite.report.report import extract_prompt, prompts_from_data, report
from llmfoundry_lite.report.segments import visible_spans
from llmfoundry_lite.tables import Table
from tests.helpers.interrupted import call_again_after_each_write
from tests.helpers.launch import train
from tests.helpers.present import leave_out_companions
from tests.helpers.reported import FLOPS_PER_TOKEN, H100, TOKENS, elapsed, on_cpu, on_gpu, record, save, write_run
from tests.helpers.tiny import tiny_config, write_config, write_data


def switching(folder):
    """Batches 1-10 on two H100, 11-20 on four CPU processes, 21-22 since the last save."""
    records = [record(b, device=H100, num_devices=2) for b in range(1, 11)]
    records += [record(b, launch=2, seconds=36.0, num_devices=4) | elapsed(b - 10, 36.0) for b in range(11, 23)]
    return write_run(folder, records, [on_gpu(1, 10), on_cpu(11, 20)])


def test_a_report_that_ended_midway_does_not_block_the_next_one(tmp_path):
    run = switching(tmp_path / "run")
    assert call_again_after_each_write(lambda folder: report([run], out=folder), tmp_path) == 3


def test_a_report_is_in_its_files_before_it_is_printed(tmp_path, monkeypatch):
    """So that a console that takes nothing costs nothing but the console's text."""
    monkeypatch.setattr("llmfoundry_lite.report.report.print_sections", lambda sections: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        report([switching(tmp_path / "run")], out=tmp_path / "out", with_csv=True)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "report.json",
        "report.md",
        "loss.png",
        "report.csv",
    }


# ------------------------------------------------------------------------------------------------- one run


def test_each_segment_has_its_speed_mfu_energy_and_cost(tmp_path):
    facts = report([switching(tmp_path / "run")], prices=[f"{H100}=2.5", "cpu=0.05"])["runs"][0]
    gpu, cpu, unsaved = facts["segments"]
    assert (gpu["tokens"], gpu["tokens_per_second_per_device"]) == (10 * TOKENS, 250)
    assert gpu["mfu"] == pytest.approx(250 * FLOPS_PER_TOKEN / 989.5e12)
    assert gpu["hours"] == pytest.approx(20 / 3600)
    assert gpu["energy_kwh"] == pytest.approx(0.7 * 2 * 20 / 3600)
    assert gpu["cost"] == pytest.approx(2.5 * 2 * 20 / 3600)
    assert (cpu["mfu"], cpu["energy_kwh"]) == (None, None)
    assert cpu["hours"] == pytest.approx(0.1)
    assert cpu["cost"] == pytest.approx(0.05 * 4 * 0.1)
    assert (unsaved["first_batch"], unsaved["last_batch"], unsaved["device"]) == (21, 22, None)
    assert facts["total"]["tokens"] == 22 * TOKENS
    assert facts["total"]["cost"] is None, "a part of it is not known"


def test_the_peak_of_the_run_tells_devices_of_one_name_apart(tmp_path):
    """A slice of a device bears the name of the whole, but the run, which counted its units, computed no MFU."""
    where = write_run(tmp_path / "slice", [record(b) for b in range(1, 5)], [on_gpu(1, 4)])
    (segment,) = report([where])["runs"][0]["segments"]
    assert (segment["mfu"], segment["energy_kwh"], segment["tokens_per_second_per_device"]) == (None, None, 250)
    records = [record(b) for b in range(1, 5)]
    for line in records:
        line["throughput/device/mfu"] = line["throughput/device/flops_per_sec"] / 191.5e12
    where = write_run(tmp_path / "run", records, [on_gpu(1, 4, 8, "AMD Instinct MI250X / MI250")])
    run = report([where], prices=["MI250X=1", "H100=2.5"])["runs"][0]
    assert run["segments"][0]["energy_kwh"] == pytest.approx(0.28 * 8 * 8 / 3600)
    assert run["segments"][0]["cost"] == pytest.approx(8 * 8 / 3600)
    assert "the price of 'H100' was not used" in run["notes"][-1]


def test_batches_with_local_steps_and_changed_settings_are_named(tmp_path):
    steps = replace(on_cpu(3, 4), sync="local steps, every 100", changes={"optimizer.lr": [0.1, 0.01]})
    where = write_run(tmp_path / "run", [record(b) for b in range(1, 5)], [on_cpu(1, 2), steps])
    facts = report([where])["runs"][0]["segments"]
    first, second = visible_spans(facts)
    assert second.label == f"{first.label} · local steps, every 100"
    page = (tmp_path / "run/report.md").read_text()
    assert "- 3-4: local steps, every 100\n" in page and "- from batch 3 on: optimizer.lr 0.1 -&gt; 0.01\n" in page


def test_without_the_companion_of_launches_a_report_has_no_section_on_them(tmp_path, monkeypatch):
    where = switching(tmp_path / "run")
    for name in ("launches.jsonl", "relay.jsonl"):
        (tmp_path / "run" / name).touch()
    leave_out_companions(monkeypatch)
    facts = report([where])
    assert not {"failures", "relay"} & facts["runs"][0].keys() and "relay_figure" not in facts
    page = (tmp_path / "run/report.md").read_text()
    assert not re.search(r"^## (Launches|Sites|Time line) of", page, re.M)
    missing = "relay.jsonl: needs the companion llmfoundry_ops"
    assert f"no sites and no allocations: {missing}" in facts["runs"][0]["notes"]


def test_names_and_samples_stay_text_in_markdown():
    table = Table("<b>a\nb", ["x", "y"], [["[z](http://z)", "c|d"]], right=())
    hostile = Section(table, lines=["<script>"], text="`````\n# no heading", figure="![loss](loss.png)")
    assert markdown([hostile]) == (
        "## &lt;b&gt;a\\nb\n\n| x | y |\n|---|---|\n| \\[z](http://z) | c\\|d |\n\n- &lt;script&gt;\n\n"
        "``````text\n`````\n# no heading\n``````\n\n![loss](loss.png)\n"
    )


def test_console_markdown_and_json_say_the_same(tmp_path, capsys):
    report([switching(tmp_path / "run")], prices=["cpu=0.05"])
    printed, page = capsys.readouterr().out, (tmp_path / "run/report.md").read_text()
    facts = json.loads((tmp_path / "run/report.json").read_text())
    assert facts["runs"][0]["segments"][0]["device"] == H100
    said = (H100, "1-10", "250", "0:00:20", "0.00778", "0:06:00", "since the last save", "rated power", "0.02")
    said = (*said, "HYBRID_SHARD of 2", "1-10: CUDA 13.0, NCCL_ALGO=Tree")
    for words in said:
        assert words in printed and words in page, words
    assert "| 11-20 | 4 x AMD EPYC | FULL_SHARD fp32 |" in page
    assert "![loss](loss.png)" in page
    assert (tmp_path / "run/loss.png").stat().st_size > 10_000


def test_a_run_without_checkpoints_has_its_report_and_says_so(tmp_path, capsys):
    facts = report([write_run(tmp_path / "run", [record(1), record(2)])], out=tmp_path / "out")
    assert facts["runs"][0]["segments"] == []
    note = f"where it ran is not known: no checkpoint in {tmp_path / 'run/checkpoints'}"
    assert facts["runs"][0]["notes"] == [note]
    assert note in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"loss.png", "report.md", "report.json"}
    (tmp_path / "run/config.yaml").unlink()
    save(tmp_path / "run/checkpoints", [on_cpu(1, 2)])
    facts = report([str(tmp_path / "run")])["runs"][0]
    assert facts["name"] == "run" and len(facts["segments"]) == 1 and "no config.yaml here" in facts["notes"]


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path):
    where = write_run(tmp_path / "run", [record(b) for b in range(1, 5)], [on_cpu(1, 2)])
    save(tmp_path / "run/checkpoints", [on_cpu(1, 4)])
    (tmp_path / "run/checkpoints/ba4/manifest.json").write_text("{")
    facts = report([where])["runs"][0]
    assert [(s["first_batch"], s["device"]) for s in facts["segments"]] == [(1, "AMD EPYC"), (3, None)]
    assert "passed over damaged checkpoint" in facts["notes"][0]


def test_a_batch_trained_twice_counts_once_and_the_last_time(tmp_path):
    records = [record(1), record(2), record(3, 9.0), {**record(2, launch=2), "time/elapsed_seconds": 2.0}]
    records += [record(3, 1.0, launch=2) | elapsed(2, 2.0), record(3, 1.0, launch=2, checkpoint__bytes=5)]
    records[-1]["time/elapsed_seconds"] = 4.0
    facts = report([write_run(tmp_path / "run", records)])["runs"][0]
    assert (facts["num_batches"], facts["training_loss"], facts["num_launches"]) == (3, pytest.approx(5 / 3), 2)
    assert facts["dead_branches"] == [{"launch": 1, "first_batch": 2, "last_batch": 3, "seconds": 4.0}]
    assert "batches 2 to 3 of launch 1: a dead branch" in " ".join(facts["notes"])


def test_what_was_lost_does_not_stand_in_until_it_is_trained_again(tmp_path):
    """Saved after batch 4, killed after 8; the launch that carries on is at 6."""
    records = [record(b, 9.0 if b > 4 else 2.0) for b in range(1, 9)]
    records += [record(b, 1.0, launch=2) | elapsed(b - 4, 2.0) for b in (5, 6)]
    facts = report([write_run(tmp_path / "run", records)])["runs"][0]
    assert (facts["last_batch"], facts["training_loss"]) == (6, pytest.approx(10 / 6))
    assert [(d["first_batch"], d["last_batch"]) for d in facts["dead_branches"]] == [(5, 8)]


@pytest.mark.parametrize("carries", ["all", "its own"])
@pytest.mark.parametrize("saved_at", [300, 150])
@pytest.mark.parametrize("launch", [1, 2])
def test_the_log_that_travelled_with_the_newest_checkpoint_wins(tmp_path, carries, saved_at, launch):
    """A trains 1-200 and saves at 100 alone; B carries on from there on a slower machine, and A's folder is asked.

    B knows A's log or not, and so may count its launch as A does.
    """
    a_lines = [record(b, 9.0 if b > 100 else 2.0, launch=1, num_devices=1, seconds=2.5) for b in range(1, 201)]
    b_lines = [record(b, 1.0, launch=launch, seconds=4.0) | elapsed(b - 100, 4.0) for b in range(101, saved_at + 1)]
    carried = b_lines if carries == "its own" else a_lines[:100] + b_lines
    segments = [on_gpu(1, 100, 1), on_gpu(101, saved_at, 1)]
    where = write_run(tmp_path / "a", a_lines, save_folder=str(tmp_path / "saves"))
    save(str(tmp_path / "saves"), segments, log=carried)
    run = report([where])["runs"][0]
    first, second = run["segments"]
    assert (first["tokens_per_second_per_device"], second["tokens_per_second_per_device"]) == (400, 250)
    assert (first["hours"], second["hours"]) == (pytest.approx(250 / 3600), pytest.approx(4 * (saved_at - 100) / 3600))
    assert (run["last_batch"], run["training_loss"], run["num_launches"]) == (saved_at, 1.0, 2)
    assert [(d["launch"], d["first_batch"], d["last_batch"]) for d in run["dead_branches"]] == [(1, 101, 200)]
    assert f"batches 101 to {saved_at}: from the log that came with ba{saved_at}" in run["notes"]


def test_what_was_trained_here_since_the_newest_checkpoint_is_no_dead_branch(tmp_path):
    """A line that a crash of the machine made unreadable comes back from the checkpoint, and voids nothing."""
    lines = [record(b) for b in range(1, 21)]
    where = write_run(tmp_path / "run", lines, save_folder=str(tmp_path / "saves"))
    save(str(tmp_path / "saves"), [on_gpu(1, 10)], log=lines[:10])
    log = tmp_path / "run/metrics.jsonl"
    log.write_text(log.read_text().replace('"batch": 5,', '"batch": 5;'))
    run = report([where])["runs"][0]
    assert (run["num_batches"], run["num_launches"], run["dead_branches"]) == (20, 1, [])


def test_what_no_launch_has_written_is_passed_over(tmp_path):
    where = write_run(tmp_path / "run", [record(1), record(2, 10**400), record(3)], run_name=["odd"])
    lines = [{"batch": 0}, {"batch": 1, "status": ["odd"]}, {"batch": 0, "status": "running"}]
    (tmp_path / "run/launches.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{half")
    facts = report([where])["runs"][0]
    assert (facts["name"], facts["num_batches"], facts["training_loss"]) == ("['odd']", 3, 2.0)
    assert [line["status"] for line in read_run(where).launches] == ["running"]


def test_of_several_validation_losses_the_first_is_reported_and_named(tmp_path):
    first = {"batch": 0, "launch": 1, "eval/loss": 4.5, "time/token": 0}
    facts = report([write_run(tmp_path / "untrained", [first])])["runs"][0]
    assert (facts["num_batches"], facts["training_loss"], facts["validation_loss"]) == (0, None, 4.5)
    lines = [record(1, eval__wiki__loss=4.5, eval__c4__loss=3.0, eval__icl__wiki__loss=1.0), record(2)]
    facts = report([write_run(tmp_path / "run", lines, eval_loaders={"wiki": {}, "c4": {}})])["runs"][0]
    assert (facts["validation_loss"], facts["validation_batch"]) == (4.5, 1)
    note = "validation: eval/wiki/loss, the first of eval_loaders; metrics.jsonl has eval/c4/loss too"
    assert note in facts["notes"]


def test_what_is_no_run_is_refused_and_a_folder_of_islands_says_which_of_them_to_report_on(tmp_path):
    with pytest.raises(DataError, match=r"no metrics.jsonl here; expected a run directory"):
        report([str(tmp_path)])
    with pytest.raises(DataError, match="has no batch in it yet"):
        report([write_run(tmp_path / "empty", [])])
    (tmp_path / "refused").mkdir()
    write_ended_early(tmp_path / "refused", "failed", "saves: another process is saving here")
    words = (
        "refused: metrics.jsonl has no batch in it yet; its last launch: failed, saves: another process is saving here"
    )
    with pytest.raises(DataError, match=words):
        report([str(tmp_path / "refused")])
    write_run(tmp_path / "run/a", [record(1)])
    write_run(tmp_path / "run/b", [record(1), record(2)])
    words = f"no metrics.jsonl here; its folders a, b are runs, such as islands of one; give {tmp_path}/run/b"
    with pytest.raises(DataError, match=words):
        report([str(tmp_path / "run")])


def test_a_run_of_a_sweep_that_has_no_batch_yet_is_left_out_and_named(tmp_path, capsys):
    waiting = write_run(tmp_path / "a", [])
    others = [write_run(tmp_path / name, [record(1), record(2)]) for name in "bc"]
    facts = report([waiting, *others])
    assert [run["name"] for run in facts["runs"]] == ["b", "c"]
    assert len(facts["comparisons"]) == 1
    assert facts["left_out"] == [f"{waiting}: metrics.jsonl has no batch in it yet"]
    assert capsys.readouterr().out.splitlines()[-1] == f"left out: {waiting}: metrics.jsonl has no batch in it yet"
    with pytest.raises(DataError, match=r"nowhere: no metrics.jsonl here"):
        report([waiting, *others, str(tmp_path / "nowhere")])


@pytest.mark.parametrize("price", ["H100", "H100=", "=2", "H100=cheap", "H100=-1", "H100=inf"])
def test_a_price_that_cannot_be_read_is_refused(tmp_path, price):
    with pytest.raises(ConfigError, match="expected DEVICE=PRICE per device-hour"):
        report([str(tmp_path)], prices=[price])


def test_a_run_behind_a_url_goes_where_the_user_says(tmp_path):
    from fsspec.implementations.memory import MemoryFileSystem

    filesystem = MemoryFileSystem()
    switching(tmp_path / "run")
    filesystem.put(str(tmp_path / "run"), "/runs/far", recursive=True)
    with pytest.raises(ConfigError, match="not on this disk; say with --out DIR"):
        report(["memory://runs/far"])
    facts = report(["memory://runs/far"], out=tmp_path / "out")
    assert len(facts["runs"][0]["segments"]) == 3
    assert (tmp_path / "out/report.md").is_file()


def test_of_twenty_thousand_batches_the_one_that_differs_is_found(tmp_path):
    """Statistics are of all batches, however few are drawn."""
    records = [record(b, 2 + math.sin(b)) for b in range(1, 20_001)]
    one = write_run(tmp_path / "one", records)
    records[17_776] = record(17_777, 5.5)
    two = write_run(tmp_path / "two", records)
    (pair,) = report([one, two])["comparisons"]
    assert (pair["num_common"], pair["num_equal"], pair["max_absolute_batch"]) == (20_000, 19_999, 17_777)


def test_the_csv_has_a_row_for_each_batch_and_run_and_no_repeats(tmp_path):
    lost = [record(b, 9.0) for b in range(1, 5)]
    again = [record(b, 1.0, launch=2) | elapsed(b - 2, 2.0) for b in (3, 4)]
    again.append({**again[-1], "checkpoint/bytes": 5})
    one = write_run(tmp_path / "one", lost + again)
    two = write_run(tmp_path / "two", [record(1, 4.0, eval__loss=3.5)])
    report([one, two], out=tmp_path / "out", with_csv=True)
    with (tmp_path / "out/report.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["run"], r["batch"], r["launch"], r["loss/train/total"]) for r in rows] == [
        *(("one", "1", "1", "9.0"), ("one", "2", "1", "9.0"), ("one", "3", "2", "1.0"), ("one", "4", "2", "1.0")),
        ("two", "1", "1", "4.0"),
    ]
    assert (rows[3]["checkpoint/bytes"], rows[4]["eval/loss"], rows[0]["eval/loss"]) == ("5", "3.5", "")


def test_no_cell_of_the_csv_is_a_formula(tmp_path):
    """A run's name, its numbers' names and its texts are its author's."""
    formula = "=HYPERLINK(1)"
    where = write_run(tmp_path / formula, [record(1, -4.0) | {"@SUM(1)": 5, "data/digest": "+1+cmd|x"}])
    report([where], out=tmp_path / "out", with_csv=True)
    with (tmp_path / "out/report.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["run"], row["data/digest"], row["'@SUM(1)"]) == (f"'{formula}", "'+1+cmd|x", "5")
    assert row["loss/train/total"] == "-4.0"


def test_figures_come_in_the_format_and_along_the_axis_asked_for(tmp_path, capsys):
    where = write_run(tmp_path / "run", [record(b) for b in range(1, 5)])
    assert main.run(["report", where, "--format", "svg", "--x", "flops", "--smooth", "3", "--csv"]) == 0
    drawn = (tmp_path / "run/loss.svg").read_text()
    assert ">training FLOPs of the model<" in drawn and ">training (mean of 3 batches)<" in drawn and ">4T<" in drawn
    assert "![loss](loss.svg)" in (tmp_path / "run/report.md").read_text()
    assert (tmp_path / "run/report.csv").is_file()
    assert main.run(["report", where, "--format", "bmp"]) == 2
    plain = write_run(tmp_path / "plain", [{"batch": 1, "loss/train/total": 1.0}])
    assert main.run(["report", plain, "--x", "tokens"]) == 2
    assert "--x tokens: the log of " in (error := capsys.readouterr().err) and "has no time/token" in error


def loaders_of(folder):
    folder.mkdir()
    splits = {"train_loader": "train", "eval_loader": "val"}
    return {key: {"dataset": {"local": str(folder), "split": split}} for key, split in splits.items()}


def test_the_training_loss_is_also_in_bits_per_byte(tmp_path):
    """Tokens are those of its own split: another text takes other tokens."""
    splits = {
        "train": {"tokens": 10**9, "remainder_tokens": 0, "text_bytes": 4 * 10**9},
        "val": {"tokens": 90, "remainder_tokens": 10, "text_bytes": 500},
    }
    loaders = loaders_of(tmp_path / "data")
    (tmp_path / "data/summary.json").write_text(json.dumps({"splits": splits}))
    report([write_run(tmp_path / "run", [record(1, 4 * math.log(2), eval__loss=5 * math.log(2))], **loaders)])
    page = (tmp_path / "run/report.md").read_text()
    assert "| training loss, last 1 batches | 2.7726 | 1.000 |" in page
    assert "| validation loss | 3.4657 | 1.000 |" in page


def test_lines_that_somebody_has_written_to_cost_no_more_than_themselves(tmp_path):
    lines = [record(batch, 1.0) for batch in (1, 2)]
    odd = [b'{"batch": -4}', b'{"batch": true}', b'{"batch": 1%s}' % (b"0" * 30), b"[" * 200_000]
    odd += [b'{"batch": 3, "launch": 1, "loss/train/total": "abc", "time/elapsed_seconds": [1]}']
    run = write_run(tmp_path / "run", lines, train_loader=5, save_folder=6)
    with open(f"{run}/metrics.jsonl", "ab") as file:
        file.write(b"\n".join(odd) + b"\n")
    (facts,) = report([run])["runs"]
    assert (facts["last_batch"], facts["num_batches"], facts["dead_branches"]) == (3, 3, [])
    assert "4 half-written lines passed over" in facts["notes"]


def test_a_run_whose_data_are_gone_or_of_something_else_has_its_report(tmp_path):
    loaders = loaders_of(tmp_path / "data")
    splits = {split: {"tokens": 90, "remainder_tokens": 10, "text_bytes": 400} for split in ("train", "val")}
    run = write_run(tmp_path / "run", [record(1, 4 * math.log(2))], model={"vocab_size": 9}, **loaders)
    for content, words in (
        (json.dumps({"splits": splits}), "no baselines: "),
        ("{", "no baselines and no bits per byte: the data that config.yaml names cannot be read"),
        ("{}", "no baselines and no bits per byte: the data that config.yaml names cannot be read"),
    ):
        (tmp_path / "data/summary.json").write_text(content)
        (facts,) = report([run])["runs"]
        assert facts["baselines"] is None
        assert any(note.startswith(words) for note in facts["notes"])
        assert (facts["bytes_per_token"] == 4) == ("splits" in content)


# ----------------------------------------------------------------------------------------------- several runs


def test_runs_are_compared_batch_by_batch(tmp_path, capsys):
    one = write_run(tmp_path / "one", [record(b, 2.0, **({"eval__loss": 3.0} if b == 4 else {})) for b in range(1, 6)])
    two = [record(b, 2.0 + (0.5 if b == 3 else 0), **({"eval__loss": 2.5} if b == 4 else {})) for b in range(2, 9)]
    two[2]["data/digest"] = "other"
    facts = report([one, write_run(tmp_path / "two", two)], out=tmp_path / "out")
    (pair,) = facts["comparisons"]
    assert (pair["num_common"], pair["num_equal"], pair["num_digests"]) == (4, 3, 4)
    assert (pair["max_absolute"], pair["max_absolute_batch"], pair["mean_absolute"]) == (0.5, 3, 0.125)
    assert (pair["final_batch"], pair["final_difference"]) == (5, 0.0)
    assert (pair["validation_batch"], pair["validation_difference"]) == (4, -0.5)
    assert pair["digests_part_at"] == 4
    printed, page = capsys.readouterr().out, (tmp_path / "out/report.md").read_text()
    for words in ("5.000e-01 at 3", "1.250e-01", "-5.000e-01 at 4", "part at batch 4"):
        assert words in printed and words in page
    assert (tmp_path / "out/report.png").stat().st_size > 10_000


def test_equal_losses_on_other_data_are_drawn(tmp_path, drawn):
    one = write_run(tmp_path / "one", [record(b) for b in range(1, 6)])
    two = write_run(tmp_path / "two", [record(b, data__digest="other") for b in range(1, 6)])
    assert report([one, two], out=tmp_path / "out")["comparisons"][0]["digests_part_at"] == 1
    assert drawn[0].axes[-1].get_legend_handles_labels()[1][1] == "two: other data from batch 1"


def test_equal_runs_runs_apart_and_runs_without_digests_are_said_so(tmp_path, capsys):
    one = write_run(tmp_path / "one", [record(b, 2.0 / b) for b in range(1, 6)])
    same = write_run(tmp_path / "same", [record(b, 2.0 / b) for b in range(1, 6)])
    apart = write_run(tmp_path / "apart", [record(b) for b in range(10, 12)])
    namesakes = [one, write_run(tmp_path / "b" / "one", [record(1)])]
    assert [run["name"] for run in report(namesakes, out=tmp_path)["runs"]] == namesakes
    capsys.readouterr()
    plain = [record(b, None if b == 2 else 2.0 / b) for b in range(1, 6)]
    for line in plain:
        del line["data/digest"]
    facts = report([one, same, apart, write_run(tmp_path / "plain", plain)], out=tmp_path / "out")
    equal, none, no_digest = facts["comparisons"]
    assert (equal["digests_part_at"], equal["num_equal"], equal["max_absolute"]) == (None, 5, 0.0)
    assert (none["num_common"], none["max_absolute"], none["final_difference"]) == (0, None, None)
    assert (no_digest["num_digests"], no_digest["not_finite_in_one"], no_digest["num_compared"]) == (0, [2], 4)
    printed = capsys.readouterr().out
    for words in (
        "same: every loss equals that of one to the last bit",
        "equal in all 5",
        "apart and one have no batch in common",
        "none to compare",
        "plain: loss not finite in one of the two alone: batch 2",
    ):
        assert words in printed


# -------------------------------------------------------------------------------------------------- to one loss


def test_the_energy_of_one_island_is_not_taken_for_the_runs(tmp_path):
    lines = [record(b, device=H100, num_devices=2, energy__joules=1000.0) for b in range(1, 11)]
    together = replace(on_gpu(1, 10), islands={"a": {}, "b": {}})
    segment = report([write_run(tmp_path / "run", lines, [together])])["runs"][0]["segments"][0]
    assert segment["energy_source"] == "rated"


def test_an_energy_that_one_batch_lacks_is_rated_not_measured(tmp_path, capsys):
    lines = [record(b, device=H100, num_devices=2, energy__joules=1000.0) for b in range(1, 11)]
    whole = report([write_run(tmp_path / "whole", lines, [on_gpu(1, 10)])])["runs"][0]["segments"][0]
    assert (whole["energy_kwh"], whole["energy_source"]) == (pytest.approx(1e4 / 3.6e6), "measured")
    assert whole["joules_per_token"] == pytest.approx(1.0)
    assert "0.00278 measured" in capsys.readouterr().out
    del lines[4]["energy/joules"]
    part = report([write_run(tmp_path / "part", lines, [on_gpu(1, 10)])])["runs"][0]["segments"][0]
    assert (part["energy_kwh"], part["energy_source"]) == (pytest.approx(0.7 * 40 / 3600), "rated")
    assert "0.00778 rated" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------- real runs


@pytest.mark.multiprocess
def test_a_real_run_in_launches_and_what_travelled_with_its_checkpoints(tmp_path, capsys):
    """The second cluster's run directory is gone: its folder of checkpoints alone has all of it."""
    folder = tmp_path / "saves"
    config = tiny_config(write_data(tmp_path / "data"), max_duration="4ba", autoresume=True, save_folder=str(folder))
    path = write_config(tmp_path / "tiny.yaml", config)
    train([path, "stop_after=2ba"], tmp_path, 2).check()
    train([path, "run_folder=elsewhere"], tmp_path).check()
    assert main.run(["report", str(folder), "--out", str(tmp_path / "out"), "--price", "cpu=0.05"]) == 0
    whole = json.loads((tmp_path / "out/report.json").read_text())["runs"][0]
    assert [(s["first_batch"], s["last_batch"], s["num_devices"]) for s in whole["segments"]] == [(1, 2, 2), (3, 4, 1)]
    assert all(s["tokens"] == 2 * 8 * 32 and s["hours"] > 0 and s["cost"] > 0 for s in whole["segments"])
    assert whole["num_launches"] == 2

    assert main.run(["report", "runs/none"]) == 2
    assert main.run(["report", str(tmp_path / "runs/tiny")]) == 0
    first = json.loads((tmp_path / "runs/tiny/report.json").read_text())["runs"][0]
    assert first["num_batches"] == 4, "what the other cluster trained is in the newest checkpoint"
    assert "batches 3 to 4: from the log that came with ba4" in capsys.readouterr().out
    if "failures" in first:  # a companion adds them
        assert [launch["ended"] for launch in first["failures"]["launches"]] == ["stopped", "not known here"]


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN", "1e999", "1e308", "1" + "0" * 400, '"2.0"', "[]"])
@pytest.mark.parametrize("num_runs", [1, 2])
def test_a_loss_or_a_rate_that_no_fp32_holds_counts_as_not_finite(tmp_path, value, num_runs):
    lines = [json.dumps(record(b)) + "\n" for b in range(1, 31)]
    lines += [line.replace(": 2.0", f": {value}") for line in map(json.dumps, (record(b) for b in (31, 33)))]
    lines += [json.dumps(record(b, eval__loss=3.0)) + "\n" for b in range(34, 40)]
    places = []
    for number in range(num_runs):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("\n".join(line.rstrip() for line in lines) + "\n")
        places.append(str(folder))
    facts = report(places, out=tmp_path / "out", with_csv=True)["runs"][0]
    assert facts["not_finite"] == [31, 33] and facts["training_loss"] == 2.0
    assert json.loads((tmp_path / "out/report.json").read_text())["runs"][0]["validation_loss"] == 3.0


@pytest.mark.parametrize("form", ["png", "svg"])
def test_names_with_control_characters_are_escaped_wherever_a_report_shows_them(tmp_path, form, capsys):
    name = "a\x1b[31mred\x07\x00\u202eb\ud800"
    records = [record(b, note=name) for b in range(1, 5)]
    places = [write_run(tmp_path / folder, records, run_name=name) for folder in ("one", "two")]
    save(tmp_path / "one/checkpoints", [replace(on_gpu(1, 4), device=name)])
    for runs in (places[:1], places):
        report(runs, out=tmp_path / "out", image_format=form, with_csv=True)
        shown = capsys.readouterr().out + (tmp_path / "out/report.md").read_text()
        shown += (tmp_path / f"out/{'loss' if len(runs) == 1 else 'report'}.svg").read_text() if form == "svg" else ""
        assert [c for c in shown if not c.isprintable() and c != "\n"] == []
    if form == "svg":
        ElementTree.parse(tmp_path / "out/report.svg")
        assert "a\\x1b[31mred" in shown


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ("ord\n\nclass Shards:\n    def read the next(self, i):\n        ret", "def read the"),
        ("ord the end of a line\nand the next lin", "the end of"),  # no line is whole
        ("ord\n\n  \nthe next lin", "the next"),  # those that are whole are blank
        ("one_long_word", "one_long_word"),
        ("ord\nself.assert_equal(found, the_expected_answer)\nret", "self.assert_equal(found,"),
        ("吾輩は猫である。" * 9, ("吾輩は猫である。" * 9)[:30]),
        (" \n \n ", ""),
        ("", ""),
    ],
)
def test_a_prompt_is_whole_words_of_a_row(row, prompt):
    assert extract_prompt(row) == prompt


def test_rows_without_words_are_passed_over(monkeypatch, tmp_path):
    rows = ["\n" * 8, "ab\nc d\nef\n", "\n" * 8, "\n" * 8, "\n" * 8, "a\nd c\n\n\n"]
    monkeypatch.setattr(
        "llmfoundry_lite.data.baselines.read_tokens", lambda folder: np.array([[*row.encode()[:8]] for row in rows])
    )
    run = SimpleNamespace(config={"eval_loader": {"dataset": {"local": str(tmp_path)}}})
    assert prompts_from_data(run, SimpleNamespace(decode=lambda ids: bytes(ids).decode())) == ["c d", "d c"]
