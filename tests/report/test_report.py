"""`llmfoundry-lite report` on run directories written by hand, and on one real run in several launches.

A line of a log is made by `record(batch, loss)`: 1,000 tokens in 2 s on one device, unless it says otherwise. A run
directory is made by `write_run(folder, lines, segments)`; with segments it has a checkpoint whose manifest says so.
"""

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
from llmfoundry_lite.report.report import report
from llmfoundry_lite.report.sample_texts import extract_prompt, prompts_from_data
from llmfoundry_lite.report.segments import visible_spans
from llmfoundry_lite.tables import Table
from tests.helpers.interrupted import call_again_after_each_write
from tests.helpers.launch import train
from tests.helpers.present import leave_out_companions
from tests.helpers.reported import FLOPS_PER_TOKEN, H100, TOKENS, elapsed, on_cpu, on_gpu, record, save, write_run
from tests.helpers.tiny import tiny_config, write_config, write_data

NON_TRIVIAL_IMAGE_BYTES = 10_000


def report_one(run, **options):
    """The facts of a single run, as report.json has them."""
    (facts,) = report([run], **options)["runs"]
    return facts


def write_moved_run(folder):
    """Batches 1-10 on two H100, 11-20 on four CPU processes, and 21-22 after the last save."""
    on_h100 = [record(batch, device=H100, num_devices=2) for batch in range(1, 11)]
    on_cpus = [
        record(batch, launch=2, seconds=36.0, num_devices=4) | elapsed(batch - 10, 36.0) for batch in range(11, 23)
    ]
    return write_run(folder, on_h100 + on_cpus, [on_gpu(1, 10), on_cpu(11, 20)])


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_report_that_ended_midway_does_not_block_the_next_one(tmp_path):
    run = write_moved_run(tmp_path / "run")
    num_files = call_again_after_each_write(lambda folder: report([run], out=folder), tmp_path)
    assert num_files == 3


def test_a_report_is_in_its_files_before_it_is_printed(tmp_path, monkeypatch):
    """So that a console that takes nothing costs nothing but the console's text."""
    run = write_moved_run(tmp_path / "run")
    monkeypatch.setattr("llmfoundry_lite.report.report.print_sections", lambda sections: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        report([run], out=tmp_path / "out", with_csv=True)
    assert names_in(tmp_path / "out") == {"report.json", "report.md", "loss.png", "report.csv"}


# ------------------------------------------------------------------------------------------------- one run


def test_each_segment_has_its_speed_mfu_energy_and_cost(tmp_path):
    facts = report_one(write_moved_run(tmp_path / "run"), prices=[f"{H100}=2.5", "cpu=0.05"])
    on_h100, on_cpus, unsaved = facts["segments"]

    # 10 batches of 2 s on 2 devices, which are rated at 0.7 kW and 989.5 TFLOP/s each.
    assert on_h100["tokens"] == 10 * TOKENS
    assert on_h100["tokens_per_second_per_device"] == 250
    assert on_h100["mfu"] == pytest.approx(250 * FLOPS_PER_TOKEN / 989.5e12)
    assert on_h100["hours"] == pytest.approx(20 / 3600)
    assert on_h100["energy_kwh"] == pytest.approx(0.7 * 2 * 20 / 3600)
    assert on_h100["cost"] == pytest.approx(2.5 * 2 * 20 / 3600)

    # 10 batches of 36 s on 4 processes.
    assert on_cpus["mfu"] is None
    assert on_cpus["energy_kwh"] is None
    assert on_cpus["hours"] == pytest.approx(0.1)
    assert on_cpus["cost"] == pytest.approx(0.05 * 4 * 0.1)

    assert unsaved["first_batch"] == 21
    assert unsaved["last_batch"] == 22
    assert unsaved["device"] is None

    assert facts["total"]["tokens"] == 22 * TOKENS
    assert facts["total"]["cost"] is None, "a part of it is not known"


def test_a_device_whose_run_computed_no_mfu_has_no_energy_either(tmp_path):
    """A slice of a device bears the name of the whole, but the run, which counted its units, computed no MFU."""
    run = write_run(tmp_path / "slice", [record(batch) for batch in range(1, 5)], [on_gpu(1, 4)])
    (segment,) = report_one(run)["segments"]
    assert segment["mfu"] is None
    assert segment["energy_kwh"] is None
    assert segment["tokens_per_second_per_device"] == 250


def test_the_peak_of_the_run_tells_devices_of_one_name_apart(tmp_path):
    """MI250X and MI250 share the name below. The peak that the run's MFU was computed with is an MI250X's half."""
    peak_flops_per_second = 191.5e12
    lines = [record(batch) for batch in range(1, 5)]
    for line in lines:
        line["throughput/device/mfu"] = line["throughput/device/flops_per_sec"] / peak_flops_per_second
    run = write_run(tmp_path / "run", lines, [on_gpu(1, 4, 8, "AMD Instinct MI250X / MI250")])
    facts = report_one(run, prices=["MI250X=1", "H100=2.5"])
    (segment,) = facts["segments"]
    seconds, num_devices = 8, 8
    assert segment["energy_kwh"] == pytest.approx(0.28 * num_devices * seconds / 3600)
    assert segment["cost"] == pytest.approx(1 * num_devices * seconds / 3600)
    assert "the price of 'H100' was not used" in facts["notes"][-1]


def test_batches_with_local_steps_and_changed_settings_are_named(tmp_path):
    local_steps = replace(on_cpu(3, 4), sync="local steps, every 100", changes={"optimizer.lr": [0.1, 0.01]})
    run = write_run(tmp_path / "run", [record(batch) for batch in range(1, 5)], [on_cpu(1, 2), local_steps])
    first, second = visible_spans(report_one(run)["segments"])
    assert second.label == f"{first.label} · local steps, every 100"
    page = (tmp_path / "run/report.md").read_text()
    assert "- 3-4: local steps, every 100\n" in page
    assert "- from batch 3 on: optimizer.lr 0.1 -&gt; 0.01\n" in page


def test_without_the_companion_of_launches_a_report_has_no_section_on_them(tmp_path, monkeypatch):
    run = write_moved_run(tmp_path / "run")
    for name in ("launches.jsonl", "relay.jsonl"):
        (tmp_path / "run" / name).touch()
    leave_out_companions(monkeypatch)
    report_facts = report([run])
    (facts,) = report_facts["runs"]
    assert "failures" not in facts
    assert "relay" not in facts
    assert "relay_figure" not in report_facts
    page = (tmp_path / "run/report.md").read_text()
    assert not re.search(r"^## (Launches|Sites|Time line) of", page, re.M)
    missing = "relay.jsonl: needs the companion llmfoundry_ops"
    assert f"no sites and no allocations: {missing}" in facts["notes"]


def test_names_and_samples_stay_text_in_markdown():
    table = Table("<b>a\nb", ["x", "y"], [["[z](http://z)", "c|d"]], right=())
    hostile = Section(table, lines=["<script>"], text="`````\n# no heading", figure="![loss](loss.png)")
    assert markdown([hostile]) == (
        "## &lt;b&gt;a\\nb\n\n| x | y |\n|---|---|\n| \\[z](http://z) | c\\|d |\n\n- &lt;script&gt;\n\n"
        "``````text\n`````\n# no heading\n``````\n\n![loss](loss.png)\n"
    )


def test_console_markdown_and_json_say_the_same(tmp_path, capsys):
    report([write_moved_run(tmp_path / "run")], prices=["cpu=0.05"])
    printed = capsys.readouterr().out
    page = (tmp_path / "run/report.md").read_text()
    facts = json.loads((tmp_path / "run/report.json").read_text())
    assert facts["runs"][0]["segments"][0]["device"] == H100
    expected_texts = [
        H100,
        "1-10",  # batches
        "250",  # tokens per second and device
        "0:00:20",
        "0.00778",  # kWh
        "0:06:00",
        "since the last save",
        "rated power",
        "0.02",  # cost
        "HYBRID_SHARD of 2",
        "1-10: CUDA 13.0, NCCL_ALGO=Tree",
    ]
    for text in expected_texts:
        assert text in printed, text
        assert text in page, text
    assert "| 11-20 | 4 x AMD EPYC | FULL_SHARD fp32 |" in page


def test_the_page_shows_the_figure_of_the_loss(tmp_path):
    report([write_moved_run(tmp_path / "run")])
    assert "![loss](loss.png)" in (tmp_path / "run/report.md").read_text()
    assert (tmp_path / "run/loss.png").stat().st_size > NON_TRIVIAL_IMAGE_BYTES


def test_a_run_without_checkpoints_has_its_report_and_says_so(tmp_path, capsys):
    facts = report_one(write_run(tmp_path / "run", [record(1), record(2)]), out=tmp_path / "out")
    assert facts["segments"] == []
    note = f"where it ran is not known: no checkpoint in {tmp_path / 'run/checkpoints'}"
    assert facts["notes"] == [note]
    assert note in capsys.readouterr().out
    assert names_in(tmp_path / "out") == {"loss.png", "report.md", "report.json"}


def test_a_run_without_a_config_has_its_report_and_says_so(tmp_path):
    run = write_run(tmp_path / "run", [record(1), record(2)], [on_cpu(1, 2)])
    (tmp_path / "run/config.yaml").unlink()
    facts = report_one(run)
    assert facts["name"] == "run"
    assert len(facts["segments"]) == 1
    assert "no config.yaml here" in facts["notes"]


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path):
    run = write_run(tmp_path / "run", [record(batch) for batch in range(1, 5)], [on_cpu(1, 2)])
    save(tmp_path / "run/checkpoints", [on_cpu(1, 4)])
    (tmp_path / "run/checkpoints/ba4/manifest.json").write_text("{")
    facts = report_one(run)
    devices = [(segment["first_batch"], segment["device"]) for segment in facts["segments"]]
    assert devices == [(1, "AMD EPYC"), (3, None)], "where batch 3 ran, only the damaged checkpoint knows"
    assert "passed over damaged checkpoint" in facts["notes"][0]


def test_a_batch_trained_twice_counts_once_and_the_last_time(tmp_path):
    """Launch 1 trains 1 to 3, launch 2 trains 2 and 3 again. The last line repeats batch 3 with a save's size."""
    first_launch = [record(1), record(2), record(3, 9.0)]
    second_launch = [
        record(2, launch=2) | elapsed(1, 2.0),
        record(3, 1.0, launch=2) | elapsed(2, 2.0),
        record(3, 1.0, launch=2, checkpoint__bytes=5) | elapsed(2, 2.0),
    ]
    facts = report_one(write_run(tmp_path / "run", first_launch + second_launch))
    assert facts["num_batches"] == 3
    assert facts["training_loss"] == pytest.approx((2 + 2 + 1) / 3)
    assert facts["num_launches"] == 2
    assert facts["dead_branches"] == [{"launch": 1, "first_batch": 2, "last_batch": 3, "seconds": 4.0}]
    assert "batches 2 to 3 of launch 1: a dead branch" in " ".join(facts["notes"])


def test_what_was_lost_does_not_stand_in_until_it_is_trained_again(tmp_path):
    """Saved after batch 4, killed after 8; the launch that carries on is at 6."""
    saved = [record(batch, 2.0) for batch in range(1, 5)]
    lost = [record(batch, 9.0) for batch in range(5, 9)]
    again = [record(batch, 1.0, launch=2) | elapsed(batch - 4, 2.0) for batch in (5, 6)]
    facts = report_one(write_run(tmp_path / "run", saved + lost + again))
    assert facts["last_batch"] == 6
    assert facts["training_loss"] == pytest.approx((4 * 2.0 + 2 * 1.0) / 6)
    (dead_branch,) = facts["dead_branches"]
    assert dead_branch["first_batch"] == 5
    assert dead_branch["last_batch"] == 8


@pytest.mark.parametrize("carries", ["all", "its own"])
@pytest.mark.parametrize("saved_at", [300, 150])
@pytest.mark.parametrize("launch_of_b", [1, 2])
def test_the_log_that_travelled_with_the_newest_checkpoint_wins(tmp_path, carries, saved_at, launch_of_b):
    """A trains 1-200 and saves at 100 alone; B carries on from there on a slower machine, and A's folder is asked.

    B knows A's log or not, and so may count its launch as A does.
    """
    a_saved = [record(batch, 2.0, launch=1, seconds=2.5) for batch in range(1, 101)]
    a_lost = [record(batch, 9.0, launch=1, seconds=2.5) for batch in range(101, 201)]
    b_lines = [
        record(batch, 1.0, launch=launch_of_b, seconds=4.0) | elapsed(batch - 100, 4.0)
        for batch in range(101, saved_at + 1)
    ]
    run = write_run(tmp_path / "a", a_saved + a_lost, save_folder=str(tmp_path / "saves"))
    travelling_log = b_lines if carries == "its own" else a_saved + b_lines
    save(str(tmp_path / "saves"), [on_gpu(1, 100, 1), on_gpu(101, saved_at, 1)], log=travelling_log)

    facts = report_one(run)
    of_a, of_b = facts["segments"]
    assert of_a["tokens_per_second_per_device"] == 400
    assert of_a["hours"] == pytest.approx(100 * 2.5 / 3600)
    assert of_b["tokens_per_second_per_device"] == 250
    assert of_b["hours"] == pytest.approx((saved_at - 100) * 4 / 3600)
    assert facts["last_batch"] == saved_at
    assert facts["training_loss"] == 1.0
    assert facts["num_launches"] == 2
    (dead_branch,) = facts["dead_branches"]
    assert dead_branch["launch"] == 1
    assert dead_branch["first_batch"] == 101
    assert dead_branch["last_batch"] == 200
    assert f"batches 101 to {saved_at}: from the log that came with ba{saved_at}" in facts["notes"]


def test_batches_trained_since_the_newest_checkpoint_are_no_dead_branch(tmp_path):
    """A line that a crash of the machine made unreadable comes back from the checkpoint, and voids nothing."""
    lines = [record(batch) for batch in range(1, 21)]
    run = write_run(tmp_path / "run", lines, save_folder=str(tmp_path / "saves"))
    save(str(tmp_path / "saves"), [on_gpu(1, 10)], log=lines[:10])
    log = tmp_path / "run/metrics.jsonl"
    log.write_text(log.read_text().replace('"batch": 5,', '"batch": 5;'))
    facts = report_one(run)
    assert facts["num_batches"] == 20
    assert facts["num_launches"] == 1
    assert facts["dead_branches"] == []


def test_what_no_launch_has_written_is_passed_over(tmp_path):
    """A list for the run's name, a loss that no float holds, and lines of launches.jsonl without batch or status."""
    run = write_run(tmp_path / "run", [record(1), record(2, 10**400), record(3)], run_name=["odd"])
    launch_lines = [{"batch": 0}, {"batch": 1, "status": ["odd"]}, {"batch": 0, "status": "running"}]
    text = "".join(json.dumps(line) + "\n" for line in launch_lines)
    (tmp_path / "run/launches.jsonl").write_text(text + "{half")
    facts = report_one(run)
    assert facts["name"] == "['odd']"
    assert facts["num_batches"] == 3
    assert facts["training_loss"] == 2.0
    assert [line["status"] for line in read_run(run).launches] == ["running"]


def test_a_model_that_was_only_evaluated_has_a_validation_loss(tmp_path):
    evaluation = {"batch": 0, "launch": 1, "eval/loss": 4.5, "time/token": 0}
    facts = report_one(write_run(tmp_path / "untrained", [evaluation]))
    assert facts["num_batches"] == 0
    assert facts["training_loss"] is None
    assert facts["validation_loss"] == 4.5


def test_of_several_validation_losses_the_first_is_reported_and_named(tmp_path):
    """The first of the configuration's eval_loaders; a task in context of the same name does not count."""
    lines = [record(1, eval__wiki__loss=4.5, eval__c4__loss=3.0, eval__icl__wiki__loss=1.0), record(2)]
    facts = report_one(write_run(tmp_path / "run", lines, eval_loaders={"wiki": {}, "c4": {}}))
    assert facts["validation_loss"] == 4.5
    assert facts["validation_batch"] == 1
    note = "validation: eval/wiki/loss, the first of eval_loaders; metrics.jsonl has eval/c4/loss too"
    assert note in facts["notes"]


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no metrics.jsonl here; expected a run directory"):
        report([str(tmp_path)])


def test_a_run_without_a_batch_is_refused(tmp_path):
    with pytest.raises(DataError, match="has no batch in it yet"):
        report([write_run(tmp_path / "empty", [])])


def test_a_run_that_ended_before_its_first_batch_is_refused_with_reason(tmp_path):
    (tmp_path / "refused").mkdir()
    write_ended_early(tmp_path / "refused", "failed", "saves: another process is saving here")
    message = (
        "refused: metrics.jsonl has no batch in it yet; its last launch: failed, saves: another process is saving here"
    )
    with pytest.raises(DataError, match=message):
        report([str(tmp_path / "refused")])


def test_a_folder_of_islands_is_refused_and_names_the_island_to_report_on(tmp_path):
    """That is the one whose log has the most batches."""
    write_run(tmp_path / "run/a", [record(1)])
    write_run(tmp_path / "run/b", [record(1), record(2)])
    message = f"no metrics.jsonl here; its folders a, b are runs, such as islands of one; give {tmp_path}/run/b"
    with pytest.raises(DataError, match=message):
        report([str(tmp_path / "run")])


def test_a_run_of_a_sweep_that_has_no_batch_yet_is_left_out_and_named(tmp_path, capsys):
    waiting = write_run(tmp_path / "a", [])
    others = [write_run(tmp_path / name, [record(1), record(2)]) for name in "bc"]
    facts = report([waiting, *others])
    assert [run["name"] for run in facts["runs"]] == ["b", "c"]
    assert len(facts["comparisons"]) == 1
    assert facts["left_out"] == [f"{waiting}: metrics.jsonl has no batch in it yet"]
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line == f"left out: {waiting}: metrics.jsonl has no batch in it yet"


def test_among_several_runs_a_folder_that_is_no_run_is_refused(tmp_path):
    runs = [write_run(tmp_path / name, [record(1), record(2)]) for name in "bc"]
    with pytest.raises(DataError, match=r"nowhere: no metrics.jsonl here"):
        report([*runs, str(tmp_path / "nowhere")])


@pytest.mark.parametrize("price", ["H100", "H100=", "=2", "H100=cheap", "H100=-1", "H100=inf"])
def test_a_price_that_cannot_be_read_is_refused(tmp_path, price):
    with pytest.raises(ConfigError, match="expected DEVICE=PRICE per device-hour"):
        report([str(tmp_path)], prices=[price])


def test_a_run_behind_a_url_goes_where_the_user_says(tmp_path):
    from fsspec.implementations.memory import MemoryFileSystem

    write_moved_run(tmp_path / "run")
    MemoryFileSystem().put(str(tmp_path / "run"), "/runs/far", recursive=True)
    with pytest.raises(ConfigError, match="not on this disk; say with --out DIR"):
        report(["memory://runs/far"])
    facts = report_one("memory://runs/far", out=tmp_path / "out")
    assert len(facts["segments"]) == 3
    assert (tmp_path / "out/report.md").is_file()


def test_of_twenty_thousand_batches_the_one_that_differs_is_found(tmp_path):
    """Statistics are of all batches, however few are drawn."""
    records = [record(batch, 2 + math.sin(batch)) for batch in range(1, 20_001)]
    one = write_run(tmp_path / "one", records)
    records[17_776] = record(17_777, 5.5)
    two = write_run(tmp_path / "two", records)
    (comparison,) = report([one, two])["comparisons"]
    assert comparison["num_common"] == 20_000
    assert comparison["num_equal"] == 19_999
    assert comparison["max_absolute_batch"] == 17_777


def test_the_csv_has_a_row_for_each_batch_and_run_and_no_repeats(tmp_path):
    """Run `one` loses batches 3 and 4 and trains them again; its last line repeats batch 4 with a save's size."""
    lost = [record(batch, 9.0) for batch in range(1, 5)]
    again = [record(batch, 1.0, launch=2) | elapsed(batch - 2, 2.0) for batch in (3, 4)]
    with_save = again[-1] | {"checkpoint/bytes": 5}
    one = write_run(tmp_path / "one", [*lost, *again, with_save])
    two = write_run(tmp_path / "two", [record(1, 4.0, eval__loss=3.5)])
    report([one, two], out=tmp_path / "out", with_csv=True)

    rows = read_csv(tmp_path / "out/report.csv")
    assert [(row["run"], row["batch"], row["launch"], row["loss/train/total"]) for row in rows] == [
        ("one", "1", "1", "9.0"),
        ("one", "2", "1", "9.0"),
        ("one", "3", "2", "1.0"),
        ("one", "4", "2", "1.0"),
        ("two", "1", "1", "4.0"),
    ]
    assert rows[3]["checkpoint/bytes"] == "5"
    assert rows[4]["eval/loss"] == "3.5"
    assert rows[0]["eval/loss"] == "", "run one has none"


def test_no_cell_of_the_csv_is_a_formula(tmp_path):
    """A run's name, its numbers' names and its texts are its author's."""
    formula = "=HYPERLINK(1)"
    run = write_run(tmp_path / formula, [record(1, -4.0) | {"@SUM(1)": 5, "data/digest": "+1+cmd|x"}])
    report([run], out=tmp_path / "out", with_csv=True)
    (row,) = read_csv(tmp_path / "out/report.csv")
    assert row["run"] == f"'{formula}"
    assert row["data/digest"] == "'+1+cmd|x"
    assert row["'@SUM(1)"] == "5"
    assert row["loss/train/total"] == "-4.0", "a number stays one, with its sign"


def test_figures_come_in_the_format_and_along_the_axis_asked_for(tmp_path):
    run = write_run(tmp_path / "run", [record(batch) for batch in range(1, 5)])
    assert main.run(["report", run, "--format", "svg", "--x", "flops", "--smooth", "3", "--csv"]) == 0
    drawn = (tmp_path / "run/loss.svg").read_text()
    assert ">training FLOPs of the model<" in drawn
    assert ">training (mean of 3 batches)<" in drawn
    assert ">4T<" in drawn
    assert "![loss](loss.svg)" in (tmp_path / "run/report.md").read_text()
    assert (tmp_path / "run/report.csv").is_file()


def test_a_format_of_figures_that_is_not_known_is_refused(tmp_path):
    run = write_run(tmp_path / "run", [record(1)])
    assert main.run(["report", run, "--format", "bmp"]) == 2


def test_an_axis_that_the_log_has_no_numbers_for_is_refused(tmp_path, capsys):
    run = write_run(tmp_path / "run", [{"batch": 1, "loss/train/total": 1.0}])
    assert main.run(["report", run, "--x", "tokens"]) == 2
    error = capsys.readouterr().err
    assert "--x tokens: the log of " in error
    assert "has no time/token" in error


def loaders_of(data_folder):
    """Make the folder, and return a configuration's loaders that read its splits."""
    data_folder.mkdir()
    return {
        "train_loader": {"dataset": {"local": str(data_folder), "split": "train"}},
        "eval_loader": {"dataset": {"local": str(data_folder), "split": "val"}},
    }


def test_the_training_loss_is_also_in_bits_per_byte(tmp_path):
    """By the tokens of its own split: 4 bytes a token in train, 5 in val, so either loss is one bit a byte."""
    loaders = loaders_of(tmp_path / "data")
    splits = {
        "train": {"tokens": 10**9, "remainder_tokens": 0, "text_bytes": 4 * 10**9},
        "val": {"tokens": 90, "remainder_tokens": 10, "text_bytes": 500},
    }
    (tmp_path / "data/summary.json").write_text(json.dumps({"splits": splits}))
    line = record(1, 4 * math.log(2), eval__loss=5 * math.log(2))
    report([write_run(tmp_path / "run", [line], **loaders)])
    page = (tmp_path / "run/report.md").read_text()
    assert "| training loss, last 1 batches | 2.7726 | 1.000 |" in page
    assert "| validation loss | 3.4657 | 1.000 |" in page


def test_lines_that_somebody_has_written_to_cost_no_more_than_themselves(tmp_path):
    run = write_run(tmp_path / "run", [record(1), record(2)], train_loader=5, save_folder=6)
    unusable = [b'{"batch": -4}', b'{"batch": true}', b'{"batch": 1%s}' % (b"0" * 30), b"[" * 200_000]
    without_numbers = b'{"batch": 3, "launch": 1, "loss/train/total": "abc", "time/elapsed_seconds": [1]}'
    with open(f"{run}/metrics.jsonl", "ab") as file:
        file.write(b"\n".join([*unusable, without_numbers]) + b"\n")
    facts = report_one(run)
    assert facts["last_batch"] == 3
    assert facts["num_batches"] == 3
    assert facts["dead_branches"] == []
    assert "4 half-written lines passed over" in facts["notes"]


UNREADABLE_DATA = "no baselines and no bits per byte: the data that config.yaml names cannot be read"
SUMMARY_WITHOUT_SHARDS = json.dumps(
    {"splits": {split: {"tokens": 90, "remainder_tokens": 10, "text_bytes": 400} for split in ("train", "val")}}
)


@pytest.mark.parametrize(
    ("summary", "note", "bytes_per_token"),
    [
        pytest.param(SUMMARY_WITHOUT_SHARDS, "no baselines: ", 4, id="shards are gone"),
        pytest.param("{", UNREADABLE_DATA, None, id="half a summary"),
        pytest.param("{}", UNREADABLE_DATA, None, id="an empty summary"),
    ],
)
def test_a_run_whose_data_are_gone_or_of_something_else_has_its_report(tmp_path, summary, note, bytes_per_token):
    loaders = loaders_of(tmp_path / "data")
    (tmp_path / "data/summary.json").write_text(summary)
    facts = report_one(write_run(tmp_path / "run", [record(1)], model={"vocab_size": 9}, **loaders))
    assert facts["baselines"] is None
    assert facts["bytes_per_token"] == bytes_per_token
    assert any(line.startswith(note) for line in facts["notes"])


# ----------------------------------------------------------------------------------------------- several runs


def test_runs_are_compared_batch_by_batch(tmp_path, capsys):
    """`one` has batches 1-5, `two` 2-8. At batch 3 the losses are 0.5 apart; at 4 the validation losses and data."""
    one = [record(batch) for batch in range(1, 6)]
    one[3]["eval/loss"] = 3.0
    two = [record(batch) for batch in range(2, 9)]
    two[1]["loss/train/total"] = 2.5
    two[2]["eval/loss"] = 2.5
    two[2]["data/digest"] = "other"
    runs = [write_run(tmp_path / "one", one), write_run(tmp_path / "two", two)]
    (comparison,) = report(runs, out=tmp_path / "out")["comparisons"]

    assert comparison["num_common"] == 4
    assert comparison["num_equal"] == 3
    assert comparison["num_digests"] == 4
    assert comparison["max_absolute"] == 0.5
    assert comparison["max_absolute_batch"] == 3
    assert comparison["mean_absolute"] == 0.5 / 4
    assert comparison["final_batch"] == 5
    assert comparison["final_difference"] == 0.0
    assert comparison["validation_batch"] == 4
    assert comparison["validation_difference"] == -0.5
    assert comparison["digests_part_at"] == 4

    printed = capsys.readouterr().out
    page = (tmp_path / "out/report.md").read_text()
    for text in ("5.000e-01 at 3", "1.250e-01", "-5.000e-01 at 4", "part at batch 4"):
        assert text in printed, text
        assert text in page, text
    assert (tmp_path / "out/report.png").stat().st_size > NON_TRIVIAL_IMAGE_BYTES


def test_equal_losses_on_other_data_are_drawn(tmp_path, drawn):
    one = write_run(tmp_path / "one", [record(batch) for batch in range(1, 6)])
    two = write_run(tmp_path / "two", [record(batch, data__digest="other") for batch in range(1, 6)])
    (comparison,) = report([one, two], out=tmp_path / "out")["comparisons"]
    assert comparison["digests_part_at"] == 1
    _, labels = drawn[0].axes[-1].get_legend_handles_labels()
    assert labels[1] == "two: other data from batch 1"


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    namesakes = [write_run(tmp_path / "one", [record(1)]), write_run(tmp_path / "b" / "one", [record(1)])]
    facts = report(namesakes, out=tmp_path)
    assert [run["name"] for run in facts["runs"]] == namesakes


def decreasing_losses():
    return [record(batch, 2.0 / batch) for batch in range(1, 6)]


def test_equal_runs_are_said_so(tmp_path, capsys):
    runs = [write_run(tmp_path / name, decreasing_losses()) for name in ("one", "same")]
    (comparison,) = report(runs, out=tmp_path / "out")["comparisons"]
    assert comparison["digests_part_at"] is None
    assert comparison["num_equal"] == 5
    assert comparison["max_absolute"] == 0.0
    printed = capsys.readouterr().out
    assert "same: every loss equals that of one to the last bit" in printed
    assert "equal in all 5" in printed


def test_runs_without_a_common_batch_are_said_so(tmp_path, capsys):
    one = write_run(tmp_path / "one", decreasing_losses())
    apart = write_run(tmp_path / "apart", [record(batch) for batch in range(10, 12)])
    (comparison,) = report([one, apart], out=tmp_path / "out")["comparisons"]
    assert comparison["num_common"] == 0
    assert comparison["max_absolute"] is None
    assert comparison["final_difference"] is None
    assert "apart and one have no batch in common" in capsys.readouterr().out


def test_missing_digests_and_losses_that_are_not_finite_are_said_so(tmp_path, capsys):
    one = write_run(tmp_path / "one", decreasing_losses())
    plain_lines = decreasing_losses()
    for line in plain_lines:
        del line["data/digest"]
    plain_lines[1]["loss/train/total"] = None  # how the log has a loss that is not finite
    plain = write_run(tmp_path / "plain", plain_lines)
    (comparison,) = report([one, plain], out=tmp_path / "out")["comparisons"]
    assert comparison["num_digests"] == 0
    assert comparison["not_finite_in_one"] == [2]
    assert comparison["num_compared"] == 4
    printed = capsys.readouterr().out
    assert "none to compare" in printed
    assert "plain: loss not finite in one of the two alone: batch 2" in printed


def test_four_runs_are_compared_with_the_first_in_the_order_given(tmp_path):
    """The three kinds above in one report."""
    one = write_run(tmp_path / "one", decreasing_losses())
    same = write_run(tmp_path / "same", decreasing_losses())
    apart = write_run(tmp_path / "apart", [record(batch) for batch in range(10, 12)])
    other = write_run(tmp_path / "other", [record(batch) for batch in range(1, 6)])
    comparisons = report([one, same, apart, other], out=tmp_path / "out")["comparisons"]
    assert [comparison["num_common"] for comparison in comparisons] == [5, 0, 5]
    assert [comparison["num_equal"] for comparison in comparisons] == [5, 0, 1]


# -------------------------------------------------------------------------------------------- measured energy


def lines_with_joules():
    """Ten batches, each with 1,000 measured joules: one for each token."""
    return [record(batch, device=H100, num_devices=2, energy__joules=1000.0) for batch in range(1, 11)]


def test_the_energy_of_one_island_is_not_taken_for_the_runs(tmp_path):
    of_two_islands = replace(on_gpu(1, 10), islands={"a": {}, "b": {}})
    (segment,) = report_one(write_run(tmp_path / "run", lines_with_joules(), [of_two_islands]))["segments"]
    assert segment["energy_source"] == "rated"


def test_an_energy_that_every_batch_has_is_measured(tmp_path, capsys):
    (segment,) = report_one(write_run(tmp_path / "whole", lines_with_joules(), [on_gpu(1, 10)]))["segments"]
    assert segment["energy_kwh"] == pytest.approx(1e4 / 3.6e6)
    assert segment["energy_source"] == "measured"
    assert segment["joules_per_token"] == pytest.approx(1.0)
    assert "0.00278 measured" in capsys.readouterr().out


def test_an_energy_that_one_batch_lacks_is_rated_not_measured(tmp_path, capsys):
    lines = lines_with_joules()
    del lines[4]["energy/joules"]
    (segment,) = report_one(write_run(tmp_path / "part", lines, [on_gpu(1, 10)]))["segments"]
    assert segment["energy_kwh"] == pytest.approx(0.7 * 2 * 20 / 3600)
    assert segment["energy_source"] == "rated"
    assert "0.00778 rated" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------- real runs


@pytest.mark.multiprocess
def test_a_real_run_in_launches_and_what_travelled_with_its_checkpoints(tmp_path, capsys):
    """Two ranks train 1-2 in one run directory, then one rank 3-4 in another, with one folder of checkpoints."""
    saves = tmp_path / "saves"
    config = tiny_config(write_data(tmp_path / "data"), max_duration="4ba", autoresume=True, save_folder=str(saves))
    path = write_config(tmp_path / "tiny.yaml", config)
    train([path, "stop_after=2ba"], tmp_path, 2).check()
    train([path, "run_folder=elsewhere"], tmp_path).check()

    # As if the second run directory were gone: the folder of checkpoints alone has all of the run.
    assert main.run(["report", str(saves), "--out", str(tmp_path / "out"), "--price", "cpu=0.05"]) == 0
    (of_saves,) = json.loads((tmp_path / "out/report.json").read_text())["runs"]
    batches_and_devices = [
        (segment["first_batch"], segment["last_batch"], segment["num_devices"]) for segment in of_saves["segments"]
    ]
    assert batches_and_devices == [(1, 2, 2), (3, 4, 1)]
    for segment in of_saves["segments"]:
        assert segment["tokens"] == 2 * 8 * 32, "two batches of 8 samples of 32 tokens"
        assert segment["hours"] > 0
        assert segment["cost"] > 0
    assert of_saves["num_launches"] == 2

    # The first run directory has a log of batches 1-2 alone; the rest comes from the newest checkpoint.
    capsys.readouterr()
    assert main.run(["report", str(tmp_path / "runs/tiny")]) == 0
    (of_first,) = json.loads((tmp_path / "runs/tiny/report.json").read_text())["runs"]
    assert of_first["num_batches"] == 4
    assert "batches 3 to 4: from the log that came with ba4" in capsys.readouterr().out
    for run in (of_saves, of_first):
        if "failures" in run:  # a companion adds them, by the records of launches beside the checkpoints
            assert [launch["ended"] for launch in run["failures"]["launches"]] == ["stopped", "done"]


def test_the_report_of_a_run_that_is_not_there_is_the_users_mistake():
    assert main.run(["report", "runs/none"]) == 2


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN", "1e999", "1e308", "1" + "0" * 400, '"2.0"', "[]"])
@pytest.mark.parametrize("num_runs", [1, 2])
def test_a_loss_or_a_rate_that_no_fp32_holds_counts_as_not_finite(tmp_path, value, num_runs):
    """Batches 31 and 33 have the value in place of their loss."""
    lines = [json.dumps(record(batch)) for batch in range(1, 31)]
    lines += [json.dumps(record(batch)).replace(": 2.0", f": {value}") for batch in (31, 33)]
    lines += [json.dumps(record(batch, eval__loss=3.0)) for batch in range(34, 40)]
    runs = []
    for number in range(num_runs):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
        runs.append(str(folder))
    first_run = report(runs, out=tmp_path / "out", with_csv=True)["runs"][0]
    assert first_run["not_finite"] == [31, 33]
    assert first_run["training_loss"] == 2.0
    written = json.loads((tmp_path / "out/report.json").read_text())["runs"][0]
    assert written["validation_loss"] == 3.0


HOSTILE_NAME = "a\x1b[31mred\x07\x00\u202eb\ud800"


@pytest.mark.parametrize("image_format", ["png", "svg"])
@pytest.mark.parametrize(("num_runs", "figure"), [(1, "loss"), (2, "report")])
def test_control_characters_in_names_are_escaped_wherever_they_are_shown(
    tmp_path, image_format, num_runs, figure, capsys
):
    lines = [record(batch, note=HOSTILE_NAME) for batch in range(1, 5)]
    runs = [write_run(tmp_path / folder, lines, run_name=HOSTILE_NAME) for folder in ("one", "two")]
    save(tmp_path / "one/checkpoints", [replace(on_gpu(1, 4), device=HOSTILE_NAME)])
    report(runs[:num_runs], out=tmp_path / "out", image_format=image_format, with_csv=True)

    texts = [capsys.readouterr().out, (tmp_path / "out/report.md").read_text()]
    if image_format == "svg":
        svg_path = tmp_path / f"out/{figure}.svg"
        ElementTree.parse(svg_path)  # raises if it is no XML
        texts.append(svg_path.read_text())
        assert "a\\x1b[31mred" in texts[-1]
    for text in texts:
        control_characters = [character for character in text if not character.isprintable() and character != "\n"]
        assert control_characters == []


# ------------------------------------------------------------------------------------- prompts for the samples


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
    """The data set's tokens are the characters of its rows, eight each."""
    blank = "\n" * 8
    rows = [blank, "ab\nc d\nef\n", blank, blank, blank, "a\nd c\n\n\n"]
    tokens = np.array([list(row.encode()[:8]) for row in rows])
    monkeypatch.setattr("llmfoundry_lite.data.baselines.read_tokens", lambda folder: tokens)
    run = SimpleNamespace(config={"eval_loader": {"dataset": {"local": str(tmp_path)}}})
    tokenizer = SimpleNamespace(decode=lambda ids: bytes(ids).decode())
    assert prompts_from_data(run, tokenizer) == ["c d", "d c"]
