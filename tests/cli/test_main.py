import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmfoundry_lite.cli import main
from llmfoundry_lite.cli.options import expand_home
from llmfoundry_lite.cli.run import read_prompts
from llmfoundry_lite.errors import ConfigError, UserError
from llmfoundry_lite.files import check_result_replaceable
from tests.helpers.present import needs, present


@pytest.mark.parametrize("group", present(["", "bench", "checkpoint", "data", "islands"]))
def test_help_has_no_line_that_is_cut(group, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main.run([*group.split(), "--help"]) == 0
    commands = capsys.readouterr().out.split("Commands:\n")[1].splitlines()
    assert commands and [line for line in commands if line.endswith("...")] == []


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_on_is_no_bug(unbuffered):
    """`… | head -1`, with what is printed still in a buffer or not."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as output:
        result = subprocess.run(
            [sys.executable, "-m", "llmfoundry_lite.cli.main", "list"],
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=output,
            stderr=subprocess.PIPE,
        )
    assert (result.returncode, result.stderr) == (141, b"")


def test_an_exit_code_is_told_whether_or_not_the_words_were_read():
    """A run that Ctrl-C has ended with code 75, and `| tee` with it."""
    ends = ["def run(*arguments): print(1); raise SystemExit(75)", "main.run = run", "main.main()"]
    program = "\n".join(["from llmfoundry_lite.cli import main", *ends])
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # else the command itself meets the closed pipe
    with open(writer, "wb") as output:
        assert subprocess.run([sys.executable, "-c", program], stdout=output, env=environment).returncode == 75


def in_a_shell(redirect, *arguments, cwd=None, **environment):
    command = ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-m", "llmfoundry_lite.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("redirect", "code", "reason", "remedy"),
    [
        (">/dev/full", 75, "No space left on device", "; this may pass: run the same command again"),
        (">&-", 2, "closed", ""),
    ],
)
def test_an_answer_that_cannot_be_written_is_an_error_of_one_line(redirect, code, reason, remedy):
    result = in_a_shell(redirect, "list")
    said = f"error: standard output: {reason}; what this command prints is incomplete{remedy}\n"
    assert (result.returncode, result.stderr) == (code, said)


def test_an_answer_has_a_question_mark_for_what_the_console_cannot_print():
    result = in_a_shell("", "data", "prepare", "--help", PYTHONIOENCODING="latin-1")
    assert (result.returncode, result.stderr) == (0, "")
    assert "Compress shards: zstd, zstd:9, gz, ?" in " ".join(result.stdout.split())


@needs("llmfoundry_ops")
def test_a_command_that_writes_files_writes_them_whatever_its_console(tmp_path):
    splits, tokenizer = {"train": {"samples": 1000}}, {"vocab_size": 512}
    (tmp_path / "summary.json").write_text(json.dumps({"max_seq_len": 64, "splits": splits, "tokenizer": tokenizer}))
    result = in_a_shell(">/dev/full", "init", ".", "--size", "quickstart", "--out", "x.yaml", cwd=tmp_path)
    said = "warning: standard output: No space left on device; some lines were not written\n"
    assert (result.returncode, result.stderr) == (0, said)
    assert (tmp_path / "x.yaml").read_text().startswith("#")


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("checkpoint ls s3:/bucket/run", "s3://bucket/run"),
        ("checkpoint export s3//bucket/run out", "s3://bucket/run"),
        ("report gs//bucket/run", "gs://bucket/run"),
        ("generate s3:/bucket/run --prompt x", "s3://bucket/run"),
        ("data prepare --out data --tokenizer train:300 --max-seq-len 8 --source hf//name", "hf:name"),
    ],
)
def test_a_misspelt_url_is_no_folder_s_name(command, meant, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.run(command.split()) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("out", "meant"), [("gs//bucket/data", "gs://bucket/data"), ("S3://b/data", "s3://b/data")])
def test_a_misspelt_url_of_the_output_is_refused(out, meant, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text")
    command = f"data prepare --out {out} --tokenizer train:300 --max-seq-len 8"
    assert main.run([*command.split(), "text.txt"]) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize("command", present(["bench mfu", "bench block", "report run", "compare a.json b.json"]))
def test_a_folder_that_cannot_be_is_refused_before_the_work(command, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main.run([*command.split(), "--out", str(tmp_path / "file/here")]) == 2
    assert capsys.readouterr().err == f"error: --out: {tmp_path}/file is a file, expected a folder\n"


@pytest.mark.parametrize(
    ("arguments", "name"),
    present(
        [
            (["compare", "a.json", "b.json", "--out", "."], "compare.md"),
            (["bench", "mfu", "--out", "."], "mfu.png"),
            (["bench", "memory", "--out", "."], "memory.json"),
            (["bench", "block", "--out", "."], "block.md"),
            (["report", "run", "--out", "."], "report.md"),
            (["doctor", "--json", "facts.json"], "facts.json"),
            (["plan", "mpt-30b", "--hardware", "a100-80gb", "--devices", "64", "--write", "x.yaml"], "x.yaml"),
            (["init", "data", "--size", "125m", "--out", "x.yaml"], "x.yaml"),
        ]
    ),
    ids=lambda value: None if isinstance(value, str) else "-".join(value[:2]),
)
def test_no_command_writes_over_a_file_that_is_not_its_own(tmp_path, monkeypatch, capsys, arguments, name):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.write_text('{"mine": 1}')
    assert main.run(arguments) == 2
    told = capsys.readouterr().err
    assert name in told and told.count("\n") == 1
    assert path.read_text() == '{"mine": 1}' and [file.name for file in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("content", ['{"schema": 1, "bench": "mfu"}', '{"rows": []}'])
def test_an_earlier_answer_is_replaced(tmp_path, content):
    for name in ("mfu.json", "mfu.md", "notes.md"):
        (tmp_path / name).write_text(content)
    check_result_replaceable(tmp_path, "mfu")


def test_an_answer_is_not_written_through_a_link(tmp_path):
    """The folder of `report` is by default the run's, which may be somebody else's."""
    (tmp_path / "mfu.json").write_text('{"rows": []}')
    (tmp_path / "mfu.md").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"mfu\.md: a link, which would be written through; name another folder"):
        check_result_replaceable(tmp_path, "mfu")


def test_an_answer_is_not_written_into_a_pipe(tmp_path):
    """An earlier answer lies beside it. Opening the pipe would wait for a reader for ever."""
    (tmp_path / "mfu.json").write_text('{"rows": []}')
    os.mkfifo(tmp_path / "mfu.csv")
    with pytest.raises(ConfigError, match=r"mfu\.csv: exists and is not a regular file; name another folder"):
        check_result_replaceable(tmp_path, "mfu")


PRESSES_CTRL_C = """
import os, signal, typer
from llmfoundry_lite.cli import main
program = typer.Typer()
@program.command()
def wait():
    print("waiting", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
main.run_program(program, "wait")
"""


def test_ctrl_c_ends_a_command_and_the_loop_of_the_shell_around_it(tmp_path):
    """A shell goes on with a loop whose command exits with 130, and ends it when the signal has ended the command."""
    command = [sys.executable, "-c", PRESSES_CTRL_C]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (-signal.SIGINT, "waiting\n")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("stdin", ["", "\n\n"])
def test_generating_without_a_prompt_is_said(stdin, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    with pytest.raises(UserError, match="standard input: no prompt there; give --prompt TEXT"):
        next(read_prompts())


def test_a_closed_standard_input_has_no_prompt(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="standard input: no prompt there"):
        next(read_prompts())


def test_an_empty_line_of_a_file_of_prompts_is_not_its_end(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
    assert [*read_prompts()] == ["one", "two"]


def test_options_for_files_know_the_home_folder(tmp_path, monkeypatch):
    """A shell leaves `~` alone in `--out=~/folder`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand_home(Path("~/logs")) == tmp_path / "logs"
    monkeypatch.chdir(tmp_path)
    folders = []
    monkeypatch.setattr("llmfoundry_lite.report.report.report", lambda runs, out, **_: folders.append(out))
    assert main.run(["report", "--out=~/written", "runs/a"]) == 0
    assert folders == [tmp_path / "written"]


@pytest.mark.parametrize("arguments", [["compare", "{}", "other.json"], ["bench", "mfu", "--out", "{}"]])
def test_a_name_that_is_too_long_for_a_file_is_one_line(arguments, capsys):
    if "bench" in arguments:
        pytest.importorskip("llmfoundry_machines")
    assert main.run([argument.format("x" * 5_000) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.endswith("…: the name is too long for a file; check the arguments\n")
    assert "xxx" in error and len(error) < 200
