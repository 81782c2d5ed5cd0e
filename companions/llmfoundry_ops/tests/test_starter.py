import json
import re
from dataclasses import replace

import pytest
import yaml

from llmfoundry_lite.cli import main
from llmfoundry_lite.config.auto_hardware import DetectedDevices
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_ops import hours, like, starter
from llmfoundry_ops.hours import WidthSpeed, choose
from llmfoundry_ops.starter import Facts, count_parameters, read_shape, sizes, write_starter
from tests.helpers.present import leave_out_companions


def data_folder(folder, samples, num_val=32):
    splits = {"train": {"samples": samples}, "val": {"samples": num_val}}
    summary = {"max_seq_len": 2048, "tokenizer": {"vocab_size": 7070}, "splits": splits}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.mark.parametrize(("samples", "batch"), [(100_000, 256), (256, 256), (27, 16), (8, 8), (1, 1)])
def test_a_small_data_set_gets_a_batch_that_several_devices_can_share(tmp_path, samples, batch):
    data_folder(tmp_path, samples)
    write_starter(tmp_path, "125m", tmp_path / "mine.yaml")
    assert load_train_config([str(tmp_path / "mine.yaml")], {}).config.global_train_batch_size == batch


@pytest.mark.parametrize(
    ("samples", "batches", "said"),
    [
        (4_000_000, 3450, r"0\.2 epochs of 15,625 batches: 20\.0 tokens for each of about 90 M parameters$"),
        (1_024, 16, r"4\.0 epochs of 4 batches: 0\.1 tokens .*\(20 would be best; .*: --size quickstart$"),
    ],
)
def test_a_text_is_read_four_times_at_most(tmp_path, samples, batches, said):
    note = write_starter(data_folder(tmp_path, samples), "125m", tmp_path / "mine.yaml")
    assert re.match(said, note), note
    assert load_train_config([str(tmp_path / "mine.yaml")], {}).config.max_duration == Duration(batches, "ba")


def test_of_the_smallest_size_no_smaller_one_is_asked_for(tmp_path):
    note = write_starter(data_folder(tmp_path, 8), "quickstart", tmp_path / "mine.yaml")
    assert note.endswith("enough for 0.0033 M parameters: the smallest size will learn it by heart; add text"), note
    assert ": 0.0 tokens" not in write_starter(data_folder(tmp_path, 8), "125m", tmp_path / "other.yaml")


@pytest.mark.parametrize("size", sizes())
def test_every_size_is_the_model_and_the_optimizer_that_come_with_the_package(tmp_path, size):
    write_starter(data_folder(tmp_path, 100_000), size, tmp_path / "mine.yaml")
    ours = load_train_config([str(tmp_path / "mine.yaml")], {}).config
    shape = load_train_config([f"mpt-{size}"], {}).config
    assert ours.model == replace(shape.model, max_seq_len=2048, vocab_size=7168)
    assert ours.optimizer == shape.optimizer


@pytest.mark.parametrize(
    ("flags", "device", "precision"),
    [("avx2", False, "fp32"), ("avx512f avx512_bf16", False, "amp_bf16"), ("avx2", True, "amp_bf16")],
)
def test_the_precision_is_one_that_this_machine_is_fast_in(tmp_path, monkeypatch, flags, device, precision):
    cpu = tmp_path / "cpuinfo"
    cpu.write_text(f"flags : {flags}")
    monkeypatch.setattr(starter, "CPU_INFO", cpu)
    monkeypatch.setattr(starter, "find_devices", lambda: DetectedDevices("A100", None) if device else None)
    write_starter(data_folder(tmp_path, 100_000), "125m", tmp_path / "mine.yaml")
    assert load_train_config([str(tmp_path / "mine.yaml")], {}).config.precision == precision


@pytest.mark.parametrize(
    ("folder", "name", "run_name"),
    [("a: #{i} [é] 🙂", "[x] y", "x-y"), ("7", "7", "7"), ("a 'b' \"c\"", "🙂", "run")],
)
def test_any_name_of_data_and_file_makes_a_yaml_that_loads(tmp_path, folder, name, run_name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = tmp_path / folder
    data.mkdir()
    write_starter(data_folder(data, 100).relative_to(tmp_path), "125m", tmp_path / f"{name}.yaml")
    written = yaml.safe_load((tmp_path / f"{name}.yaml").read_text())
    assert written["variables"]["data"] == folder
    assert load_train_config([str(tmp_path / f"{name}.yaml")], {}).config.run_name == run_name == written["run_name"]


@pytest.mark.parametrize("content", ["{}", "no JSON", "[]", '{"max_seq_len": null, "splits": {}}'])
def test_a_summary_that_is_none_is_refused_by_name(tmp_path, content):
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(
        DataError, match=r"summary\.json is not a file that `data prepare` writes \(.*\); prepare the data again"
    ):
        write_starter(tmp_path, "125m", tmp_path / "mine.yaml")


def test_a_folder_that_is_not_there_is_refused_for_the_yaml(tmp_path):
    with pytest.raises(ConfigError, match=r"gone/mine\.yaml: cannot be written: No such file"):
        write_starter(data_folder(tmp_path, 100), "125m", tmp_path / "gone/mine.yaml")


def test_a_folder_of_texts_is_named_as_a_source_and_never_written_into(tmp_path):
    with pytest.raises(DataError, match=r"--source .*/texts --out data/texts --tokenizer") as error:
        write_starter(tmp_path / "texts", "125m", tmp_path / "mine.yaml")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("num_val", "said"), [(0, "has no samples"), (3, "has 3 samples")])
def test_a_validation_split_that_tells_little_is_said(tmp_path, num_val, said):
    note = write_starter(data_folder(tmp_path, 100, num_val), "125m", tmp_path / "mine.yaml")
    assert f"; the validation split {said}, which tell little: prepare with --val-fraction" in note


def test_a_rank_for_each_device_of_this_machine(tmp_path, monkeypatch):
    for found, launch in ((None, "lite train"), (DetectedDevices("H100", None, num_devices=4), "lite train -n 4")):
        monkeypatch.setattr(starter, "find_devices", lambda found=found: found)
        out = tmp_path / f"{launch[-1]}.yaml"
        write_starter(data_folder(tmp_path, 100), "125m", out)
        assert f"{launch} {out}\n" in out.read_text()


@pytest.mark.parametrize(("size", "width"), [("1m", 96), ("3m", 192), ("10m", 320), ("30m", 512), ("124.9m", 832)])
def test_a_size_in_between_is_the_nearest_of_one_family(tmp_path, size, width):
    write_starter(data_folder(tmp_path, 100_000), size, tmp_path / "mine.yaml")
    config = load_train_config([str(tmp_path / "mine.yaml")], {}).config
    assert config.model.d_model == width
    assert config.console_log_interval == Duration(int(config.max_duration.value) // 400, "ba")


def test_the_familys_width_of_the_quickstart_is_the_quickstart():
    ours, theirs = starter.scaled_shape(160), read_shape("quickstart", 0)
    assert (ours.model, ours.optimizer["adamw_lr"]) == (theirs.model, theirs.optimizer["adamw_lr"])


@pytest.mark.parametrize("size", ["0.5m", "126m", "3M", "3"])
def test_a_size_that_is_none_is_refused(tmp_path, size):
    with pytest.raises(ConfigError, match=r"--size: '.*' given, expected one of .* or one in between such as 3m, 10m"):
        write_starter(data_folder(tmp_path, 100), size, tmp_path / "mine.yaml")


@pytest.mark.parametrize("samples", [1_000, 10_000, 1_000_000])
def test_more_hours_are_a_larger_model_that_ends_in_time(samples):
    facts, sizes_chosen = Facts(512, 4096, samples, 64, None), []
    for given in (0.02, 1, 8, 100):
        shape, speed = choose(facts, given, [WidthSpeed((1e7, 1e8), (5e10, 1e10))])
        parameters, batch_size, wanted, _ = starter.length_of_run(facts, shape, speed)
        assert wanted * batch_size * 512 / speed.tokens_per_second <= 0.86 * given * 3600 or wanted == 1
        assert wanted * batch_size <= 4 * samples
        assert parameters == count_parameters(shape.model, 4096)
        sizes_chosen.append(parameters)
    assert sizes_chosen == sorted(sizes_chosen) and sizes_chosen[-1] < 125e6
    assert samples < 10_000 or sizes_chosen[0] < sizes_chosen[-1]


def test_the_hours_yaml_has_the_rate_that_was_measured_here(tmp_path, monkeypatch):
    monkeypatch.setattr(hours, "MEASURED_WIDTHS", (96,))
    note = hours.write_for_hours(data_folder(tmp_path, 1_000), 0.01, tmp_path / "mine.yaml")
    assert re.search(r"training at [\d,]+ tokens per second, measured here; \d blocks of width \d+, 1 rank", note)
    assert load_train_config([str(tmp_path / "mine.yaml")], {}).config.variables["tokens_per_second"] > 0


def test_beside_other_programs_the_rate_is_that_of_a_quiet_machine(tmp_path, monkeypatch, capsys):
    for share in (1.0, hours.QUIET_SHARE / 2):
        rates = 5e10 * share, 1e10 * share
        monkeypatch.setattr(
            hours, "measure_widths", lambda facts, rates=rates, share=share: [WidthSpeed((1e7, 1e8), rates, share)]
        )
        hours.write_for_hours(data_folder(tmp_path, 1_000), 0.01, tmp_path / f"{share}.yaml")
    quiet, busy = (yaml.safe_load(path.read_text()) for path in sorted(tmp_path.glob("*.yaml"), reverse=True))
    assert busy["variables"]["tokens_per_second"] == pytest.approx(
        quiet["variables"]["tokens_per_second"] * 0.75, rel=0.1
    )
    assert "other programs left 38% of the cores' time: the hours are a guess" in capsys.readouterr().out


def test_hours_and_a_size_are_one_too_many(tmp_path, capsys):
    assert main.run(["init", str(tmp_path), "--hours", "8", "--size", "3m"]) == 2
    assert "--hours: given with --size or --like, which name a model" in capsys.readouterr().err


def test_without_the_companion_of_formats_a_foreign_model_is_refused_by_its_name(tmp_path, monkeypatch):
    leave_out_companions(monkeypatch)
    monkeypatch.setattr(like, "check_tokenizer", lambda *given: None)
    (theirs := tmp_path / "theirs").mkdir()
    (theirs / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"theirs: folders of GPT-2, .*: needs the companion llmfoundry_formats$"):
        like.write_like(data_folder(tmp_path, 100), str(theirs), tmp_path / "mine.yaml")


def test_texts_are_prepared_with_a_part_held_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for number in range(40):
        (tmp_path / f"texts/{number}.txt").write_text(" ".join(f"word{i} of {number}" for i in range(200)))
    out = hours.prepare_texts(tmp_path / "texts")
    assert str(out) == "data/texts"
    assert json.loads((out / "summary.json").read_text())["splits"]["val"]["samples"] >= 1
    assert hours.prepare_texts(tmp_path / "texts") == out
    (tmp_path / "texts").rename(tmp_path / "data/other")
    assert str(hours.prepare_texts(tmp_path / "data/other")) == "data/other-tokens"
    (tmp_path / "other.yaml").touch()
    assert main.run(["init", "data/other", "--hours", "8"]) == 2
