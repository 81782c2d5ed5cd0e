"""relay.yaml: the sites that a run may be at, and when it moves. `load_relay` reads and checks it.

run: runs/mpt-1b
policy: {every: 200ba}                     or on_preemption
sites:
  a100:
    launch: composer -n 8 scripts/train.py yamls/pretrain/mpt-1b.yaml hardware=auto {arguments}
  mi250:
    launch: ssh mi250 'cd llmfoundry_lite && llmfoundry-lite train -n 8 mpt-1b hardware=auto {arguments}'
    leave: ssh mi250 touch llmfoundry_lite/runs/mpt-1b/STOP

Every mistake that shows in the file or in a shell's check of its commands is reported before anything is launched.
"""

import difflib
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.fields import REQUIRED, check_path_or_url, local_folder, matches, parsed, setting, validator
from llmfoundry_lite.config.layers import read_file
from llmfoundry_lite.config.merge import merge_layers
from llmfoundry_lite.config.spans import Duration, Time
from llmfoundry_lite.errors import ConfigError

ARGUMENTS = "{arguments}"
"""Placeholder for the relay's arguments in a launch command, which may end with a pipe, a comment or ssh's quote."""
REMOTE_PROGRAMS = ("ssh", "sbatch", "salloc", "sky", "kubectl")
"""Programs that run a command elsewhere. If one is ended here, the run goes on there, or ends without a save."""
ON_PREEMPTION = "on_preemption"


@dataclass(kw_only=True, slots=True, frozen=True)
class Site:
    """A machine or a cluster on which the run may be."""

    launch: str
    """A shell command that ends when its launch ends, with {arguments}."""
    leave: str | None = None
    """A shell command that asks the launch to save and leave. By default its launcher gets SIGTERM."""
    status: str | None = None
    """A shell command that prints this site's status.json, for a site whose run folder is not the relay's."""
    price: float | None = None
    """Price of an hour of the whole site, in any currency, for `report`."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Policy:
    """Times at which the run moves, and the order."""

    every: Duration | None = setting(
        None, matches("batches, such as 200ba", "[1-9][0-9_]*ba"), parse=Duration.parse, written=str
    )
    """Number of batches after which the run moves (200ba). None: it moves when a site is preempted or fails."""
    order: list[str] = setting(list)
    """Names of sites, repeated from the first. By default all of them in the order of the file."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Relay:
    """The content of relay.yaml."""

    run: str = setting(REQUIRED, validator("a folder", lambda run: run and "\0" not in run), local_folder())
    """The run folder, as the relay sees it. Its journal and the output of the launches are in it."""
    checkpoints: str | None = setting(None, check_path_or_url)
    """The run's save_folder, if it has one: a folder or a URL. By default `checkpoints` in the run folder."""
    policy: Policy
    sites: dict[str, Site]
    rest: Time = parsed("5s", Time.parse, str)
    """Rest of a site that has left early; twice as long each time in a row that it saved nothing, at most an hour."""
    silence: Time = parsed("10m", Time.parse, str)
    """Time without a change of status.json after which a launch whose launcher has ended is given up."""
    retry_for: Time = parsed("12h", Time.parse, str)
    """Time after which the relay gives up, while no launch saves anything or a folder cannot be used."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(os.path.expanduser(self.run))

    @property
    def store(self) -> str:
        """The folder of the run's checkpoints, as a path or a URL."""
        return self.checkpoints or str(self.folder / "checkpoints")

    @property
    def order(self) -> list[str]:
        """The order in which sites take turns. A site may be in it more than once."""
        return self.policy.order or list(self.sites)

    @property
    def every(self) -> int | None:
        """Number of batches after which the run moves; None if it moves on preemption."""
        return None if self.policy.every is None else int(self.policy.every.value)


def load_relay(path: str) -> Relay:
    """Read and check relay.yaml.

    Raises ConfigError, in one line: the file, the key, what was given, and what was expected.
    """
    layers = [read_file(path)]
    values = merge_layers(layers, Relay)
    policy = values.get("policy")
    if isinstance(policy, str):
        if policy != ON_PREEMPTION:
            raise ConfigError(
                f"{path}: policy: {policy!r} given, expected {ON_PREEMPTION} or, as a block, every: 200ba"
            )
        values["policy"] = {}
    relay: Relay = build_block(Relay, values, "", layers)
    for key, problem in _problems(relay):
        raise ConfigError(f"{path}: {key}: {problem}")
    return relay


def _problems(relay: Relay) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, what is wrong with it) for each mistake in relay.yaml."""
    if not relay.sites:
        yield "sites", "none given; name at least one, with its launch command"
    for name, site in relay.sites.items():
        if not re.fullmatch(r"\w[\w.\-]{0,99}", name):
            expected = "the name of a file: at most 100 letters, digits and . _ -"
            yield "sites", f"{name[:100]!r} given, expected {expected}"
        for key, problem in _problems_of_site(site):
            yield f"sites.{name}.{key}", problem

    if os.path.expanduser(relay.run).startswith("~"):
        yield "run", f"{relay.run!r} given; there is no such user here"
    if "\0" in relay.store or os.path.isfile(os.path.expanduser(relay.store)):
        yield "checkpoints", f"{relay.store!r} given, expected the run's save_folder: a folder or a URL"

    for name in relay.policy.order:
        if name in relay.sites:
            continue
        similar_names = difflib.get_close_matches(name, relay.sites, n=1, cutoff=0.6)
        hint = f"did you mean {similar_names[0]}?" if similar_names else f"expected one of {', '.join(relay.sites)}"
        yield "policy.order", f"{name!r} is not a site; {hint}"


def _problems_of_site(site: Site) -> Iterator[tuple[str, str]]:
    """Yield (key of the site, what is wrong with it) for each mistake."""
    if site.price is not None and not 0 <= site.price < float("inf"):
        yield "price", f"{site.price:g} given, expected the price of an hour, 0 or more"
    for key in ("launch", "leave", "status"):
        command = getattr(site, key)
        problem = None if command is None else _problem_of_command(command)
        if problem:
            yield key, problem

    words = words_of(site.launch)
    remote_word = next((word for word in words if PurePosixPath(word).name in REMOTE_PROGRAMS), None)
    if remote_word and site.leave is None:
        advice = "say which command asks it to leave, such as touching STOP in its run folder"
        yield "leave", f"missing; SIGTERM to {remote_word} does not let the launch save, so {advice}"
    problem = _problem_of_sbatch(words)
    if problem:
        yield "launch", problem
    if not any(ARGUMENTS in word for word in words):
        advice = "write it where those of the run stand: the relay adds its own there"
        yield "launch", f"{ARGUMENTS} is missing; {advice}"


def _problem_of_command(command: str) -> str | None:
    """Return what is wrong with a shell command; None if the shell can parse it and its program is installed."""
    if "\0" in command:
        return f"{command!r} is not a shell command: it has a NUL"
    if not command.strip():
        return "no command given"
    syntax = subprocess.run(["sh", "-n"], input=command.encode(), capture_output=True, check=False)
    if syntax.returncode != 0:
        errors = syntax.stderr.decode(errors="replace").strip().splitlines()
        reason = errors[0] if errors else "sh cannot read it"
        return f"{command!r} is not a shell command: {reason}"

    # The program is the first word, after `exec` and variables: NAME=value. Only the shell itself can tell for a word
    # with substitutions, so these are not checked.
    is_before_program = re.compile(r"exec|\w+=[^$`(]*").fullmatch
    program = next((word for word in words_of(command) if not is_before_program(word)), "")
    if re.fullmatch(r"[\w./+~:-]+", program):
        look_up = subprocess.run(["sh", "-c", 'command -v "$1"', "sh", program], capture_output=True, check=False)
        if look_up.returncode != 0:
            return f"{program}: command not found; install it, or give its path"
    return None


def _problem_of_sbatch(words: list[str]) -> str | None:
    """Return what is wrong with the options of sbatch in a launch command, given as its words.

    sbatch must wait for the job. SLURM must not queue a job again if it leaves early, because the relay decides what
    comes next.
    """
    # A word with spaces is a quoted command, such as the one of ssh.
    parts: list[str] = []
    for word in words:
        parts += words_of(word) if " " in word else [word]

    if not any(PurePosixPath(part).name == "sbatch" for part in parts):
        return None
    if "--wait" not in parts and "-W" not in parts:
        return "sbatch without --wait ends when the job is queued; add --wait"
    if "--no-requeue" not in parts:
        return "sbatch without --no-requeue waits for a job that SLURM queues again and again; add --no-requeue"
    return None


def words_of(command: str) -> list[str]:
    """Split a shell command into words and the operators between commands, without comments.

    "a 'b c' && d # e" gives ["a", "b c", "&&", "d"].
    """
    # shlex takes every # for a comment, and the shell only one that begins a word.
    text = re.sub(r"(?<=[^\s;&|()])#", "_", command)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:  # a quote in a here-document may be plain text
        return command.split()
