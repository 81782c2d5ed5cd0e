"""`llmfoundry-lite relay`: who has the run, for how long, and what survives when anything is killed.

Launches are real processes, but they do not train as those of `test_killed_at_random.py` do: `trainer.py` leaves behind
what a launch does.
"""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.config.layers import read_layers
from llmfoundry_lite.config.merge import merge_layers
from llmfoundry_lite.errors import CheckpointError, ConfigError, UserError
from llmfoundry_ops import processes
from llmfoundry_ops import relay as relay_module
from llmfoundry_ops.journal import JOURNAL, Allocation, append, read_allocations
from llmfoundry_ops.relay import GivenUp, how_it_ended, rest_of, run, turns_from
from llmfoundry_ops.sites import Relay, load_relay
from tests.checkpoint.saves import save
from tests.helpers.launch import PATHS

DEADLINE_SECONDS = 60
TRAINER = f"PYTHONPATH={PATHS} {sys.executable} -m llmfoundry_ops.tests.trainer runs/x"


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(relay_module, "CHECK_SECONDS", 0.05)


def write(sites, policy: str | dict[str, Any] = "on_preemption", **more):
    """Write relay.yaml for sites by name, each a launch command or a whole block. A command that does not say where
    arguments go gets them at its end."""
    blocks = {name: dict(site) if isinstance(site, dict) else {"launch": site} for name, site in sites.items()}
    for block in blocks.values():
        if "{arguments}" not in block["launch"]:
            block["launch"] += " {arguments}"
    content = {"run": "runs/x", "policy": policy, "sites": blocks, "rest": "0.1s", **more}
    Path("relay.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return "relay.yaml"


def relay(sites, policy: str | dict[str, Any] = "on_preemption", **more):
    return run(load_relay(write(sites, policy, **more)))


def begin() -> subprocess.Popen[Any]:
    """Begin the relay as users do."""
    command = [sys.executable, "-m", "llmfoundry_lite", "relay", "relay.yaml"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": PATHS}, **pipes)


def ask_to_leave(process: subprocess.Popen[Any], number: int = signal.SIGTERM) -> str:
    process.send_signal(number)
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 75, output
    return output


def wait_for(condition):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def allocations():
    return read_allocations(Path("runs/x"))


def spans():
    return [(one.site, one.from_batch, one.to_batch, one.ended) for one in allocations()]


def lines():
    path = Path("runs/x/metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def batches():
    return [line["batch"] for line in lines()]


# ------------------------------------------------------------------------------------------------------- whose turn


def test_every_so_many_batches_the_next_site_has_the_run_until_it_is_done(capsys):
    sites = {"a": f"{TRAINER} 50 site=a", "b": f"{TRAINER} 50 site=b {{arguments}}"}
    assert relay(sites, {"every": "20ba"}) == 0
    assert spans() == [("a", 0, 20, "stopped"), ("b", 20, 40, "stopped"), ("a", 40, 50, "done")]
    assert [line["site"] for line in lines()] == ["a"] * 20 + ["b"] * 20 + ["a"] * 10
    assert batches() == list(range(1, 51))
    assert "relay: the run is done, at batch 50, after 3 allocations\n" in capsys.readouterr().out


def test_an_allocation_that_begins_between_two_moves_ends_at_the_next_one():
    subprocess.run(f"{TRAINER} 40 stop_after=15ba", shell=True, check=True)
    assert relay({"a": f"{TRAINER} 40", "b": f"{TRAINER} 40"}, {"every": "20ba"}) == 0
    assert spans() == [("a", 15, 20, "stopped"), ("b", 20, 40, "done")]


def test_an_order_of_its_own(capsys):
    sites = {"a": f"{TRAINER} 40", "b": f"{TRAINER} 40", "c": f"{TRAINER} 40"}
    assert relay(sites, {"every": "10ba", "order": ["b", "a", "b"]}) == 0
    assert [one.site for one in allocations()] == ["b", "a", "b", "b"]


def allocation(site, ended, turn=0, from_batch=0, to_batch=0, over=100.0):
    more = {"from_batch": from_batch, "to_batch": to_batch, "over": over, "ended": ended}
    return Allocation(number=1, site=site, turn=turn, began=0.0, host="h", **more)


def begin_allocation(site, turn=0, host=None):
    """Write what a relay writes right before it launches."""
    Path("runs/x").mkdir(parents=True, exist_ok=True)
    begun = {"turn": turn, "began": time.time(), "from_batch": 0, "price": None, "status_before": None}
    append(Path("runs/x"), number=1, site=site, host=host or socket.gethostname(), **begun)


def loaded(policy, **more):
    return load_relay(write(dict.fromkeys("abc", "true"), policy, **more))


def test_a_turn_follows_from_the_batch_alone():
    """So an allocation that was cut short is finished before the next site has its own."""
    every = loaded({"every": "20ba"})
    assert [turns_from(every, [], batch)[0] for batch in (0, 19, 20, 39, 40, 60)] == [0, 0, 1, 1, 2, 0]
    assert turns_from(every, [allocation("b", "failed", turn=1)], 25) == [1, 2, 0]


def test_on_preemption_the_run_goes_to_the_next_in_the_list():
    relay = loaded("on_preemption")
    assert turns_from(relay, [], 0) == [0, 1, 2]
    assert turns_from(relay, [allocation("a", "preempted", turn=0)], 7) == [1, 2, 0]
    assert turns_from(relay, [allocation("c", "failed", turn=2)], 7) == [0, 1, 2]


def test_a_site_rests_twice_as_long_each_time_in_a_row_that_it_saved_nothing():
    relay = loaded("on_preemption", rest="5s")
    failed, moved = allocation("a", "failed"), allocation("a", "failed", to_batch=5)
    assert rest_of(relay, "a", []) == 0
    assert [rest_of(relay, "a", [failed] * n) for n in (1, 2, 3, 4)] == [5, 10, 20, 40]
    assert rest_of(relay, "a", [failed] * 30) == 3600
    assert rest_of(relay, "a", [failed, failed, moved]) == 5
    assert rest_of(relay, "a", [failed, failed, allocation("b", "stopped")]) == 10
    assert rest_of(relay, "a", [failed, allocation("a", "stopped")]) == 0


def test_a_site_that_fails_rests_and_others_go_on(capsys):
    assert relay({"a": "echo out of order; false", "b": f"{TRAINER} 30"}, {"every": "10ba"}, rest="1h") == 0
    assert spans()[0] == ("a", 0, 0, "failed")
    assert spans()[1:] == [("b", 0, 10, "stopped"), ("b", 10, 20, "stopped"), ("b", 20, 30, "done")]
    assert "allocation 1 at a: failed at batch 0: exit code 1: out of order\n" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------- how a launch ended

STOPPED, DONE = {"status": "stopped", "batch": 20, "reason": None}, {"status": "done", "batch": 30, "reason": None}
PREEMPTED = {"status": "preempted", "batch": 25, "reason": "preempted by SIGTERM"}
FAILED = {"status": "failed", "batch": 25, "reason": "no disk"}


@pytest.mark.parametrize(
    ("code", "status", "before", "ended", "reason"),
    [
        (0, STOPPED, None, "stopped", None),
        (0, DONE, STOPPED, "done", None),
        (0, DONE, DONE, "done", None),  # a finished run launched again
        (1, STOPPED, None, "stopped", None),  # torchrun's code for every end
        (1, PREEMPTED, STOPPED, "preempted", "preempted by SIGTERM"),
        (255, FAILED, STOPPED, "failed", "no disk"),
        (None, PREEMPTED, STOPPED, "preempted", "preempted by SIGTERM"),
        (75, STOPPED, STOPPED, "preempted", None),  # its status.json is elsewhere
        (255, STOPPED, STOPPED, "failed", None),  # ssh never got there
        (2, FAILED, STOPPED, "refused", "no disk"),
        (2, STOPPED, STOPPED, "refused", None),
        (127, None, None, "refused", None),
        (
            1,
            {"status": "running", "batch": 3},
            STOPPED,
            "failed",
            "its launcher has ended, and status.json has fallen silent",
        ),
    ],
)
def test_a_launch_ended_as_status_json_says_if_it_wrote_it_and_else_as_its_exit_code_says(
    code, status, before, ended, reason
):
    assert how_it_ended(code, status, before) == (ended, reason)


def test_a_launch_into_another_run_folder_is_noticed(capsys):
    write({"a": f"{TRAINER}-elsewhere 10"}, rest="3s")
    process = begin()
    wait_for(lambda: allocations() and allocations()[0].over)
    output = ask_to_leave(process, signal.SIGINT)
    assert "exit code 0, but this launch has written no status.json here; is `run` its run folder?" in output


def test_saves_in_another_folder_are_noticed():
    with pytest.raises(UserError, match="checkpoints: elsewhere has no save of batch 20, at which a stopped; name the"):
        relay({"a": f"{TRAINER} 30"}, {"every": "20ba"}, checkpoints="elsewhere")


def test_exit_code_2_is_not_tried_again(capsys):
    refusing = "echo 'error: lr: unknown key' >&2; exit 2;:"
    assert relay({"a": refusing, "b": f"{TRAINER} 10"}, rest="0s") == 0
    assert [one.site for one in allocations()] == ["a", "b"]
    with pytest.raises(UserError, match=r"a is not tried again: exit code 2: error: lr: unknown key; b is not tried"):
        relay({"a": refusing, "b": refusing})
    assert [one.ended for one in allocations()[2:]] == ["refused", "refused"]


@pytest.mark.parametrize(
    "command",
    [
        "A=b true {arguments}",
        "cd /tmp && true {arguments}",
        "(true {arguments})",
        "n=$(echo 1); true {arguments}",
        "if true; then : {arguments}; fi",
        "true {arguments} 2>&1 | cat > log",
        "cat <<END {arguments}\n|;& don't\nEND\n",
        "sh -c 'true {arguments}' sh",
        "exec nice -n 5 true {arguments} # don't",
        "echo $# a#b; true {arguments} &",
    ],
)
def test_a_command_may_be_any_of_the_shell_s(command):
    assert load_relay(write({"a": command})).sites["a"].launch == command


@pytest.mark.parametrize("end", ["\n", "   # on all devices\n", " \\\n\n", " 2>&1 | cat"])
def test_a_launch_of_several_lines_hears_the_relay_s_arguments(end):
    """Without `stop_after` the first site would have trained to the end."""
    launch = f"cd .\n{TRAINER} 20 {{arguments}}{end}"
    assert relay({"a": launch, "b": launch}, {"every": "10ba"}) == 0
    assert spans() == [("a", 0, 10, "stopped"), ("b", 10, 20, "done")]


def test_sites_may_be_numbers_and_a_launch_may_be_exec():
    begins = TRAINER.replace("PYTHONPATH", "exec env PYTHONPATH", 1)
    assert relay({1: f"{begins} 20", 2: f"cd . && {begins} 20"}, {"every": "10ba", "order": [2, 1]}) == 0
    assert spans() == [("2", 0, 10, "stopped"), ("1", 10, 20, "done")]
    assert [one.code for one in allocations()] == [0, 0]


# ---------------------------------------------------------------------------------------------- killed, asked to leave

SLOW = f"{TRAINER} 100000 seconds_per_batch=0.02"


def trainers():
    return {line["pid"] for line in lines()}


@pytest.mark.fault
def test_a_relay_that_is_killed_and_started_again_waits_for_the_launch_that_goes_on():
    write({"a": f"{TRAINER} 200 seconds_per_batch=0.01", "b": f"{TRAINER} 200"})
    first = begin()
    wait_for(batches)
    first.kill()
    first.communicate()
    second = begin()
    output, _ = second.communicate(timeout=DEADLINE_SECONDS)
    assert second.returncode == 0, output
    assert "relay: allocation 1 at a had begun; waiting for it\n" in output
    assert spans() == [("a", 0, 200, "done")] and allocations()[0].code == 0
    assert batches() == list(range(1, 201)) and len(trainers()) == 1


@pytest.mark.slow
def test_one_relay_moves_a_run_and_its_lock_ends_with_it():
    write({"a": SLOW})
    first = begin()
    wait_for(batches)
    with pytest.raises(UserError, match="run: another relay is moving runs/x; stop that one, or leave the run to it"):
        run(load_relay("relay.yaml"))
    first.kill()
    first.communicate()
    (pid,) = trainers()
    assert psutil.pid_exists(pid)  # the launch does not hold the lock
    third = begin()
    said: Any = third.stdout
    wait_for(lambda: "waiting for it" in said.readline())
    ask_to_leave(third)
    assert allocations()[0].ended == "preempted" and len(allocations()) == 1


@pytest.mark.fault
def test_a_relay_that_was_killed_before_its_launch_had_begun_goes_on():
    Path("runs/x").mkdir(parents=True)
    begin_allocation("b", turn=1)
    assert relay({"a": f"{TRAINER} 10", "b": f"{TRAINER} 10"}) == 0
    assert spans() == [("b", 0, 0, "lost"), ("a", 0, 10, "done")]


def test_a_relay_that_nobody_listens_to_goes_on():
    """Ctrl-C ends `| tee` before the site has saved."""
    write({"a": f"{TRAINER} 10"})
    process = begin()
    process.stdout.close()
    assert process.wait(DEADLINE_SECONDS) == 0
    assert spans() == [("a", 0, 10, "done")]


LEAVE = {"launch": f"sh -c 'echo $$ > pid; exec env {SLOW} {{arguments}}'", "leave": "kill -TERM $(cat pid)"}


@pytest.mark.fault
@pytest.mark.parametrize(
    "site",
    [SLOW, SLOW.replace("PYTHONPATH", "exec env PYTHONPATH", 1), pytest.param(LEAVE, marks=pytest.mark.slow)],
    ids=["command", "exec", "leave"],
)
def test_a_relay_that_is_asked_to_leave_asks_its_site_and_waits_for_the_save(site):
    write({"a": site})
    process = begin()
    wait_for(batches)
    assert ask_to_leave(process).endswith("relay: asked to leave; start the relay again to carry on\n")
    (allocation,) = allocations()
    assert (allocation.ended, allocation.code, allocation.to_batch) == ("preempted", 75, batches()[-1])


@pytest.mark.slow
@pytest.mark.fault
def test_ranks_that_outlive_their_launcher_are_asked_to_leave_before_the_next_site_begins():
    """Composer's ranks do so when it is killed."""
    launch = f"sh -c '{SLOW} site=a & echo $$ > launcher; wait'"
    write({"a": launch, "b": f"{TRAINER} 0 site=b"})
    process = begin()
    wait_for(batches)
    os.kill(int(Path("launcher").read_text()), signal.SIGKILL)
    wait_for(lambda: len(allocations()) > 1)
    (pid,) = trainers()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    first = allocations()[0]
    assert (first.ended, first.code, first.to_batch) == ("preempted", 137, batches()[-1])
    ask_to_leave(process)


@pytest.mark.fault
def test_what_does_not_leave_when_it_is_asked_is_killed_before_the_next_site_begins(monkeypatch):
    monkeypatch.setattr(relay_module, "KILL_SECONDS", 0.1)
    monkeypatch.setattr(relay_module, "CHECK_SECONDS", 0.05)
    Path("deaf.sh").write_text("trap '' TERM; echo $$ > deaf; sleep 60; touch outlived\n")
    launch = "sh deaf.sh & while [ ! -s deaf ]; do sleep 0.05; done; exit 1;:"
    assert relay({"a": launch, "b": f"{TRAINER} 10"}) == 0
    assert [(one.site, one.ended) for one in allocations()] == [("a", "failed"), ("b", "done")]
    pid = int(Path("deaf").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert not Path("outlived").exists()


def test_a_launch_elsewhere_that_ssh_has_lost_is_asked_to_leave_through_its_own_command():
    """status.json is another host's, which nobody here can ask; the site's commands can."""
    Path("far").mkdir()
    begins = "cp running.json far/status.json; exit 255;:"
    Path("running.json").write_text(json.dumps({"status": "running", "batch": 3, "reason": None}))
    Path("left.json").write_text(json.dumps(PREEMPTED))
    far = {"launch": begins, "leave": "cp left.json far/status.json", "status": "cat far/status.json"}
    assert relay({"far": far, "here": f"{TRAINER} 10"}) == 0
    assert [(one.site, one.ended, one.code) for one in allocations()] == [
        ("far", "preempted", 255),
        ("here", "done", 0),
    ]


def test_a_launch_elsewhere_that_has_fallen_silent_is_given_up():
    Path("running.json").write_text(json.dumps({"status": "running", "batch": 3, "reason": None}))
    far = {"launch": "cp running.json far.json; exit 255;:", "leave": "true", "status": "cat far.json"}
    assert relay({"far": far, "here": f"{TRAINER} 10"}, silence="0.1s") == 0
    assert [(one.site, one.ended) for one in allocations()] == [("far", "failed"), ("here", "done")]


RUNNING = {"status": "running", "batch": 3, "reason": None}


def far_site(*answers: Any, **more: str) -> dict[str, str]:
    """Return a site whose status.json gives these answers in turn; the last one stays."""
    for number, answer in enumerate(answers):
        Path(f"{number}.json").write_text(json.dumps(answer) if answer else "")
    last = len(answers) - 1
    looks = f"n=$(cat n 2>/dev/null || echo -1); n=$((n < {last} ? n + 1 : {last})); echo $n > n; cat $n.json"
    return {"launch": "true", "leave": "touch asked", "status": looks, **more}


@pytest.mark.fault
@pytest.mark.parametrize("answers", [(RUNNING, PREEMPTED), ("", RUNNING, PREEMPTED)])
def test_a_launch_that_a_relay_on_another_machine_began_is_waited_for_and_not_asked_to_leave(answers):
    """A launch that has not written its status yet is waited for too: it imports and reads data for minutes."""
    begin_allocation("far", host="another")
    assert relay({"far": far_site(*answers), "here": f"{TRAINER} 10"}) == 0
    assert [(one.site, one.ended) for one in allocations()] == [("far", "preempted"), ("here", "done")]
    assert not Path("asked").exists()


def test_a_launch_elsewhere_that_is_silent_but_renews_its_lease_is_waited_for(capsys):
    """Its status.json cannot be seen to change from here; the bucket can."""
    leases = Path("runs/x/checkpoints/.leases")
    leases.mkdir(parents=True)
    claim = {"host": "far", "boot": "another", "pid": 1, "claim": "c"}
    (leases / "00000001.json").write_text(json.dumps(claim))
    far = far_site(*[RUNNING] * 6, RUNNING | {"status": "done"})
    renewal = '{"claim": "c", "renewals": \'$n\', "released": false}'
    far["status"] += f"; echo '{renewal}' > {leases}/00000001.renewed.json"
    begin_allocation("far", host="another")
    assert relay({"far": far}, silence="0.01s") == 0
    assert [(one.site, one.ended) for one in allocations()] == [("far", "done")]
    said = (
        "relay: allocation 1 at far: status.json has fallen silent, but the launch renews its lease; waiting for it\n"
    )
    assert said in capsys.readouterr().out


@pytest.mark.fault
def test_a_launch_that_never_began_on_another_machine_is_given_up_after_the_silence(capsys):
    begin_allocation("b", host="another")
    assert relay({"a": f"{TRAINER} 10", "b": f"{TRAINER} 10"}, silence="0.1s") == 0
    assert [(one.site, one.ended) for one in allocations()] == [("b", "lost"), ("a", "done")]
    assert "relay: allocation 1 at b may be about to begin; waiting for 0.1s (silence)\n" in capsys.readouterr().out


@pytest.mark.fault
def test_a_status_that_cannot_be_read_for_a_moment_does_not_end_a_launch():
    """The network that lost ssh loses the next question too."""
    far = far_site("", RUNNING, "", PREEMPTED, launch="exit 255;:")
    assert relay({"far": far, "here": f"{TRAINER} 10"}) == 0
    assert [(one.site, one.ended) for one in allocations()] == [("far", "preempted"), ("here", "done")]


@pytest.mark.fault
def test_a_site_that_does_not_answer_holds_the_relay_up_for_a_while_only(monkeypatch, capsys):
    """A process that such a command leaves behind, such as an ssh that keeps its connection, is not waited for."""
    ask, left_behind = processes.ask, Path("left-behind")

    def ask_briefly(command, seconds):
        return ask(command, 0.5 if command == "sleep 600" else seconds)

    monkeypatch.setattr(processes, "ask", ask_briefly)
    far = {"launch": "echo $$ > shell; exit 1;:", "leave": "sleep 600", "status": "sleep 600"}
    near = {"launch": f"{TRAINER} 10", "status": f"sleep 601 & echo $! >> {left_behind}; cat runs/x/status.json"}
    try:
        assert relay({"far": far, "near": near}) == 0
        assert [(one.site, one.ended) for one in allocations()] == [("far", "failed"), ("near", "done")]
        assert "relay: sleep 600: not done in 60 s\n" in capsys.readouterr().out
    finally:
        alive = []
        for pid in map(int, left_behind.read_text().split()):
            with suppress(psutil.NoSuchProcess):
                alive.append(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
                psutil.Process(pid).kill()
    assert alive and all(alive)


@pytest.mark.parametrize("words", ["[]", "null", '{"status": "running"}', '{"status": "stopped", "batch": "9"}', "{"])
def test_a_status_that_is_none_is_no_word_of_the_launch(words):
    Path("odd.json").write_text(words)
    sites = {"odd": "mkdir -p runs/x; cp odd.json runs/x/status.json; exit 75;:", "here": f"{TRAINER} 10"}
    assert relay(sites) == 0
    far = {"launch": "exit 75;:", "leave": "true", "status": "cat odd.json"}
    Path("runs/y").mkdir(parents=True)
    assert relay({"odd": far, "here": TRAINER.replace("runs/x", "runs/y") + " 10"}, run="runs/y") == 0
    assert [(one.site, one.ended) for one in allocations()] == [("odd", "preempted"), ("here", "done")]


def test_the_last_line_of_a_long_output_is_found_in_its_tail(capsys):
    words = "yes | head -c 1000000; echo; echo out of memory; exit 1;:"
    assert relay({"a": words, "b": f"{TRAINER} 10"}) == 0
    assert "exit code 1: out of memory\n" in capsys.readouterr().out


@pytest.mark.fault
@pytest.mark.parametrize(("name", "ended"), [("relay/1-a.txt", ["lost", "done"]), (JOURNAL, ["done"])])
def test_a_run_folder_that_cannot_be_used_any_more_is_said_and_mended(name, ended):
    """This stands for a disk that is full or read-only. Root may write everything, so a folder stands in the way."""
    in_the_way = Path("runs/x", name)
    in_the_way.mkdir(parents=True)
    with pytest.raises(UserError, match=rf"run: runs/x/{name}: Is a directory; when that is mended, start the re"):
        relay({"a": f"{TRAINER} 10"})
    in_the_way.rmdir()
    assert relay({"a": f"{TRAINER} 10"}) == 0
    assert [one.ended for one in allocations()] == ended


@pytest.mark.parametrize("name", ["relay.lock", JOURNAL, "relay/1-a.txt"])
def test_nothing_is_written_through_a_link_in_the_run_folder(name):
    kept = Path("kept.txt")
    kept.write_text("")
    Path("runs/x/relay").mkdir(parents=True)
    Path("runs/x", name).symlink_to(kept.absolute())
    with pytest.raises(UserError, match="a link, which would be written through; remove it"):
        relay({"a": f"{TRAINER} 10"})
    assert kept.read_text() == ""


def test_an_exit_code_is_not_written_through_a_link():
    kept = Path("kept.txt")
    kept.write_text("")
    Path("1.code.part").symlink_to(kept.absolute())
    assert processes.begin("exit 3", Path("1.code").absolute(), Path("1.txt")).wait() == 3
    assert processes.exit_code(Path("1.code")) == 3 and kept.read_text() == ""


def test_the_run_is_not_touched_while_a_launch_that_no_relay_began_runs():
    process = subprocess.Popen(f"exec env {SLOW}", shell=True)
    wait_for(batches)
    with pytest.raises(UserError, match=r"run: a launch that no relay began still runs in runs/x; touch runs/x/STOP, "):
        relay({"a": SLOW})
    process.terminate()
    assert process.wait(DEADLINE_SECONDS) == 75


class Answers:
    """Answers of a bucket: errors for the first looks at it, then its content."""

    def __init__(self, monkeypatch, *errors):
        self.errors, self.real, self.num_looks = list(errors), relay_module.CheckpointStore, 0
        monkeypatch.setattr(relay_module, "CheckpointStore", self)

    def __call__(self, url):
        self.num_looks += 1
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise CheckpointError("s3://b: cannot be listed") from error
        return self.real(url)


SLOW_DOWN = OSError(errno.EBUSY, "Please reduce your request rate")
EXPIRED = PermissionError("The provided token has expired.")
EXPIRED.__cause__ = OSError()
EXPIRED.__cause__.response = {"Error": {"Code": "ExpiredToken"}}  # type: ignore[attr-defined]


@pytest.mark.fault
@pytest.mark.parametrize("errors", [(SLOW_DOWN, SLOW_DOWN), (EXPIRED,), (None, PermissionError("Access Denied"))])
def test_a_bucket_that_cannot_be_read_for_a_while_is_waited_for(monkeypatch, capsys, errors):
    """The relay waits at its start, too."""
    answers = Answers(monkeypatch, *errors)
    assert relay({"a": f"{TRAINER} 10"}, {"every": "10ba"}) == 0
    remedy = "; renew the credentials" if EXPIRED in errors else ""
    assert f"relay: s3://b: cannot be listed{remedy}; looking again in 0.1 s\n" in capsys.readouterr().out
    assert not answers.errors


@pytest.mark.fault
def test_a_bucket_that_the_user_may_not_read_is_refused_at_once(monkeypatch):
    answers = Answers(monkeypatch, PermissionError("Access Denied"))
    with pytest.raises(CheckpointError, match="cannot be listed"):
        relay({"a": f"{TRAINER} 10"})
    assert answers.num_looks == 1


@pytest.mark.fault
@pytest.mark.parametrize(("num_batches", "code"), [(0, 1), (10, 75)])
def test_a_bucket_that_stays_unreadable_ends_the_relay_when_it_has_tried_for_long_enough(
    monkeypatch, num_batches, code
):
    if num_batches:
        relay({"a": f"{TRAINER} {num_batches}"})
    Answers(monkeypatch, *[SLOW_DOWN] * 50)
    with pytest.raises(GivenUp, match=r"cannot be listed; given up after 0\.2s \(retry_for\); start the rel") as caught:
        relay({"a": f"{TRAINER} 30"}, retry_for="0.2s")
    assert caught.value.exit_code == code


@pytest.mark.fault
@pytest.mark.parametrize(
    ("before", "left_with", "ended", "state", "code"),
    [(0, 1, "failed", "nothing is saved", 1), (5, 75, "preempted", "batch 5 is saved", 75)],
)
def test_launches_that_all_end_in_vain_end_the_relay_when_it_has_tried_for_long_enough(
    before, left_with, ended, state, code
):
    if before:
        save(CheckpointStore("runs/x/checkpoints"), CheckpointStore("runs/x/checkpoints").acquire(), before)
    launch = f"echo tried >> tries; echo the disk is full; exit {left_with};:"
    with pytest.raises(GivenUp) as caught:
        relay({"a": launch}, retry_for="0.3s")
    why = f"exit code {left_with}: the disk is full"
    assert str(caught.value).endswith(f": {ended}: {why}; mend that, and start the relay again")
    assert f"no launch has saved anything for 0.3s (retry_for), and {state}; allocation " in str(caught.value)
    assert caught.value.exit_code == code
    assert 1 < len(Path("tries").read_text().splitlines()) < 6


@pytest.mark.fault
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ESTALE, errno.EROFS, errno.ENOENT])
def test_a_run_folder_that_takes_nothing_for_a_while_is_waited_for(monkeypatch, capsys, number):
    real, errors = relay_module.journal.append, [OSError(number, os.strerror(number))] * 2

    def append_later(folder, **event):
        if errors:
            raise errors.pop()
        real(folder, **event)

    monkeypatch.setattr(relay_module.journal, "append", append_later)
    assert relay({"a": f"{TRAINER} 10"}) == 0
    assert f"{os.strerror(number)}; looking again in 0.2 s\n" in capsys.readouterr().out


@pytest.mark.fault
def test_a_command_that_was_there_before_may_come_back():
    """Its disk is not mounted for a moment. A command that never was there is a mistake."""
    there = f"[ -e moved ] || {{ touch moved; exit 127; }}; {TRAINER}"
    first = f"[ -e first ] || {{ touch first; {TRAINER} 30 stop_after=5ba; exit 0; }}; {there} 30"
    assert relay({"a": f"{first} {{arguments}}"}, {"every": "10ba"}) == 0
    assert [(one.ended, one.code) for one in allocations()][:2] == [("stopped", 0), ("failed", 127)]
    assert allocations()[-1].ended == "done"


@pytest.mark.fault
def test_a_folder_that_looks_newest_and_holds_no_checkpoint_does_not_make_the_relay_crawl(capsys):
    """An interrupted `rm -r` leaves such a folder. Each allocation would last only one batch."""
    Path("runs/x/checkpoints/ba999").mkdir(parents=True)
    Path("runs/x/checkpoints/ba999/shard-00000.safetensors").touch()
    assert relay({"a": f"{TRAINER} 30", "b": f"{TRAINER} 30"}, {"every": "10ba"}) == 0
    assert spans() == [("a", 0, 10, "stopped"), ("b", 10, 20, "stopped"), ("a", 20, 30, "done")]
    said = "relay: passed over incomplete checkpoint: runs/x/checkpoints/ba999/manifest.json: missing\n"
    assert capsys.readouterr().out.count(said) == 1


@pytest.mark.fault
def test_a_save_that_has_lost_a_shard_is_not_where_a_launch_carries_on():
    store = CheckpointStore("runs/x/checkpoints")
    lease = store.acquire()
    for batch in (5, 10):
        save(store, lease, batch)
    next(Path("runs/x/checkpoints/ba10").glob("shard-*")).unlink()
    assert runner(loaded("on_preemption"))._newest_batch() == 5


# ---------------------------------------------------------------------------------------------------- what is refused


def command(launch: Any, **more: Any) -> dict[str, Any]:
    return {"sites": {"a": {"launch": launch, **more}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (command("true", leaves="true"), "sites.a.leaves: unknown key; did you mean sites"),
        ({"sites": {}}, "sites: none given; name at least one, with its launch command"),
        ({"sites": {"a": {}}}, "relay.yaml: sites.a.launch: missing; expected text"),
        ({"sites": {"a/b": {"launch": "true"}}}, "sites: 'a/b' given, expected the name of a file"),
        ({"sites": {"x" * 300: {"launch": "true"}}}, "given, expected the name of a file: at most 100 letters,"),
        ({"run": None}, "relay.yaml: run: missing; expected text"),
        ({"run": ""}, "relay.yaml: run: '' given, expected a folder"),
        ({"run": "s3://bucket/x"}, "relay.yaml: run: 's3://bucket/x' given, expected a folder"),
        ({"run": "a\0b"}, "relay.yaml: run: 'a\\x00b' given, expected a folder"),
        ({"run": "~no-such-user/x"}, "relay.yaml: run: '~no-such-user/x' given; there is no such user here"),
        ({"checkpoints": "relay.yaml"}, "checkpoints: 'relay.yaml' given, expected the run's save_folder: a folder or"),
        ({"checkpoints": "a\0b"}, "checkpoints: 'a\\x00b' given, expected the run's save_folder: a folder or"),
        (
            {"run": "runs/{run_name}"},
            "run: 'runs/{run_name}' given, expected a folder of this machine, in which nothing",
        ),
        (
            {"checkpoints": "s3:/b/x"},
            "checkpoints: 's3:/b/x' given, expected a folder or a URL; did you mean s3://b/x?",
        ),
        ({"policy": "sometimes"}, "policy: 'sometimes' given, expected on_preemption or, as a block, every: 200ba"),
        ({"policy": {"every": "200"}}, "policy.every: '200' given, expected batches, such as 200ba"),
        ({"policy": {"order": ["mi25"]}}, "policy.order: 'mi25' is not a site; did you mean mi250?"),
        ({"policy": {"order": ["x"]}}, "policy.order: 'x' is not a site; expected one of mi250"),
        ({"rest": "soon"}, "rest: 'soon' given, expected a time such as 3h55m, 90s"),
        (command("tarin -n 8"), "sites.a.launch: tarin: command not found; install it, or give"),
        (command(" "), "sites.a.launch: no command given"),
        (command("true 'x"), 'sites.a.launch: "true \'x" is not a shell command: '),
        (command("if true"), "sites.a.launch: 'if true' is not a shell command: "),
        (command("true \0"), "sites.a.launch: 'true \\x00' is not a shell command: it has a NUL"),
        (command("(true) {arguments}"), "sites.a.launch: '(true) {arguments}' is not a shell "),
        (command("true 'a'"), "sites.a.launch: {arguments} is missing; write it where those of the run stand: the"),
        (command("true # {arguments}"), "sites.a.launch: {arguments} is missing; "),
        (command("ssh x y"), "sites.a.leave: missing; SIGTERM to ssh does not let the launch"),
        (command("cd x && A=b nice /usr/bin/ssh x y"), "sites.a.leave: missing; SIGTERM to /usr/bin/ssh does not let"),
        (command("true", leave="scancle"), "sites.a.leave: scancle: command not found"),
        (command("true", price=-1), "sites.a.price: -1 given, expected the price of an hour"),
        (
            command("ssh x sbatch y {arguments}", leave="true"),
            "sites.a.launch: sbatch without --wait ends when the job is queued; add --wait",
        ),
        (
            command("ssh x 'cd y && sbatch -W z {arguments}'", leave="true"),
            "sites.a.launch: sbatch without --no-requeue waits for a job that SLURM queues again and again; add",
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_is_wrong_with_relay_yaml_is_said_in_one_line(changes, message, monkeypatch, tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ssh").write_text("#!/bin/sh\n")
    (programs / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    content = {"run": "runs/x", "policy": "on_preemption", "sites": {"mi250": {"launch": "true {arguments}"}}}
    content = {key: value for key, value in (content | changes).items() if value is not None}
    Path("relay.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError) as error:
        load_relay("relay.yaml")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_run_folder_may_be_in_one_s_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    relay = load_relay(write({"a": "true"}, run="~/runs/x"))
    assert relay.folder == tmp_path / "runs/x" and relay.store == str(tmp_path / "runs/x/checkpoints")


def test_a_run_folder_that_cannot_be_reached_is_refused():
    Path("file").touch()
    with pytest.raises(UserError, match=r"run: file/x cannot be reached from here \(Not a directory\); name the run"):
        relay({"a": "true"}, run="file/x")


def test_a_site_that_has_the_run_must_be_in_the_file():
    Path("runs/x").mkdir(parents=True)
    begin_allocation("gone", turn=1)
    with pytest.raises(UserError, match=r"sites: gone is missing, where the run still is, by runs/x/relay\.jsonl; put"):
        relay({"a": "true"})


@pytest.mark.fault
def test_a_line_of_the_journal_is_on_disk_before_anything_is_launched(monkeypatch, tmp_path):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    append(tmp_path, number=1, site="a")
    assert synced == [str(tmp_path / JOURNAL)]


def test_a_journal_whose_last_line_was_cut_off_is_carried_on():
    folder = Path("runs/x")
    folder.mkdir(parents=True)
    begun = {"turn": 0, "began": 1.0, "from_batch": 0, "host": "h"}
    append(folder, number=1, site="a", **begun)
    with (folder / JOURNAL).open("a") as file:
        file.write('{"number": 1, "over": 2.0, "to_b')
    append(folder, number=1, over=3.0, to_batch=4, code=0, ended="done", reason=None)
    (found,) = read_allocations(folder)
    assert (found.over, found.to_batch) == (3.0, 4)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"number": "1", "over": 2.0}', "number: '1' given, expected a whole number"),
        ('{"number": 2, "site": null}', "site: None given, expected text"),
        ('{"number": 2, "begun": 1.0}', "begun: unknown key"),
        ("[1, 2]", "expected a block with the number of an allocation"),
    ],
)
def test_a_journal_with_a_line_that_is_not_the_relay_s_is_refused_before_anything_starts(line, problem):
    folder = Path("runs/x")
    folder.mkdir(parents=True)
    append(folder, number=1, site="a", turn=0, began=1.0, from_batch=0, host="h")
    with (folder / JOURNAL).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError) as error:
        relay({"a": f"{TRAINER} 10"})
    assert str(error.value) == f"runs/x/relay.jsonl: line 2: {problem}; mend the line, or remove it"
    assert not batches()


def runner(relay) -> Any:
    return relay_module.Runner(relay, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [-86400, 86400])
def test_a_step_of_the_clock_changes_no_rest_and_after_another_relay_there_is_none(seconds):
    resting, last = runner(loaded("on_preemption", rest="10m")), allocation("a", "failed", over=time.time() + seconds)
    assert resting._rest_left("a", [last]) == 0
    resting.ended_at[last.number] = time.monotonic() - 120
    assert resting._rest_left("a", [last]) == pytest.approx(480, abs=30)


def test_time_without_a_save_is_counted_from_the_last_one(monkeypatch):
    """A launch that saved begins the count anew; one that was refused, and so never ran, changes nothing."""
    vain, saved = allocation("a", "failed"), allocation("a", "failed", from_batch=10, to_batch=20)
    checking, now = runner(loaded("on_preemption", retry_for="60s")), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for seconds, one in ((0, vain), (50, saved), (100, vain), (130, allocation("a", "refused")), (159, vain)):
        now[0] = seconds
        checking._check_progress(one)
    now[0] = 160
    with pytest.raises(GivenUp, match="no launch has saved anything for 60s"):
        checking._check_progress(vain)


def test_a_relay_keeps_names_of_sites(tmp_path):
    file = tmp_path / "relay.yaml"
    file.write_text(
        "run: 010\npolicy: on_preemption\nsites:\n"
        "  010: {launch: 'true {arguments}'}\n  on: {launch: 'true {arguments}'}\n"
    )
    relay = load_relay(str(file))
    assert (relay.run, list(relay.sites)) == ("010", ["010", "on"])
    keys = ("launch", "leave", "status")
    for value in ("010", "5e12", "1:30", "no", "0x10", "1_000"):
        file.write_text(f"sites: {{010: {{{', '.join(f'{key}: {value}' for key in keys)}}}}}\ncheckpoints: {value}\n")
        values = merge_layers(read_layers([str(file)]), Relay)
        assert (values["sites"]["010"], values["checkpoints"]) == (dict.fromkeys(keys, value), value)
