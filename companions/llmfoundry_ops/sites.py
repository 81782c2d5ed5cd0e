"""relay.yaml -> the sites a run may be at, and when it moves.

run: runs/mpt-1b
policy: {every: 200ba}                     or on_preemption
sites:
  a100:
    launch: composer -n 8 scripts/train.py yamls/pretrain/mpt-1b.yaml hardware=auto {arguments}
  mi250:
    launch: ssh mi250 'cd llmfoundry_lite && llmfoundry-lite train -n 8 mpt-1b hardware=auto {arguments}'
    leave: ssh mi250 touch llmfoundry_lite/runs/mpt-1b/STOP
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
from llmfoundry_lite.config.layers import merge_layers, read_file
from llmfoundry_lite.config.spans import Duration, Time
from llmfoundry_lite.errors import ConfigError

ARGUMENTS = "{arguments}"
"""Placeholder for the relay's arguments in a launch command, which may end with a pipe, a comment or ssh's quote."""
FAR = ("ssh", "sbatch", "salloc", "sky", "kubectl")
"""Programs whose end here leaves the run going elsewhere, or ends it without a save."""
ON_PREEMPTION = "on_preemption"


@dataclass(kw_only=True, slots=True, frozen=True)
class Site:
    launch: str
    """A shell command that ends when its launch ends, with {arguments}."""
    leave: str | None = None
    """A shell command that asks the launch to save and leave. By default its launcher gets SIGTERM."""
    status: str | None = None
    """A shell command that prints this site's status.json, where its run folder is not the relay's."""
    price: float | None = None
    """Price of an hour of the whole site, in any currency, for `report`."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Policy:
    every: Duration | None = setting(
        None, matches("batches, such as 200ba", "[1-9][0-9_]*ba"), parse=Duration.parse, written=str
    )
    """Batches after which the run moves (200ba). None: it moves when a site is preempted or fails."""
    order: list[str] = setting(list)
    """Names of sites, repeated from the first. By default all of them in the order of the file."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Relay:
    run: str = setting(REQUIRED, validator("a folder", lambda run: run and "\0" not in run), local_folder())
    """The run folder, as the relay sees it; its journal and the launches' output lie here."""
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
        return Path(os.path.expanduser(self.run))

    @property
    def store(self) -> str:
        return self.checkpoints or str(self.folder / "checkpoints")

    @property
    def order(self) -> list[str]:
        return self.policy.order or list(self.sites)

    @property
    def every(self) -> int | None:
        """Batches."""
        return None if self.policy.every is None else int(self.policy.every.value)


def load_relay(path: str) -> Relay:
    """Read relay.yaml. Raises ConfigError, in one line: the file, the key, what was given, what was expected."""
    layers = [read_file(path)]
    values = merge_layers(layers, Relay)
    if isinstance(policy := values.get("policy"), str):
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
    """Yield (key, what is wrong with it)."""
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
        if name not in relay.sites:
            near = difflib.get_close_matches(name, relay.sites, n=1, cutoff=0.6)
            meant = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(relay.sites)}"
            yield "policy.order", f"{name!r} is not a site; {meant}"


def _problems_of_site(site: Site) -> Iterator[tuple[str, str]]:
    if site.price is not None and not 0 <= site.price < float("inf"):
        yield "price", f"{site.price:g} given, expected the price of an hour, 0 or more"
    for key in ("launch", "leave", "status"):
        command = getattr(site, key)
        if command is not None and (problem := _problem_of_command(command)):
            yield key, problem
    words = words_of(site.launch)
    far = next((word for word in words if PurePosixPath(word).name in FAR), None)
    if far and site.leave is None:
        asks = "say which command asks it to leave, such as touching STOP in its run folder"
        yield "leave", f"missing; SIGTERM to {far} does not let the launch save, so {asks}"
    if problem := _problem_of_sbatch(words):
        yield "launch", problem
    if not any(ARGUMENTS in word for word in words):
        where = "write it where those of the run stand: the relay adds its own there"
        yield "launch", f"{ARGUMENTS} is missing; {where}"


def _problem_of_command(command: str) -> str | None:
    if "\0" in command:
        return f"{command!r} is not a shell command: it has a NUL"
    if not command.strip():
        return "no command given"
    syntax = subprocess.run(["sh", "-n"], input=command.encode(), capture_output=True, check=False)
    if syntax.returncode != 0:
        lines = syntax.stderr.decode(errors="replace").strip().splitlines()
        return f"{command!r} is not a shell command: {(lines or ['sh cannot read it'])[0]}"
    is_other = re.compile(r"exec|\w+=[^$`(]*").fullmatch
    program = next((word for word in words_of(command) if not is_other(word)), "")
    if re.fullmatch(r"[\w./+~:-]+", program):  # only a shell can tell for others
        known = subprocess.run(["sh", "-c", 'command -v "$1"', "sh", program], capture_output=True, check=False)
        if known.returncode != 0:
            return f"{program}: command not found; install it, or give its path"
    return None


def _problem_of_sbatch(words: list[str]) -> str | None:
    """Refuse a job that SLURM queues again when the run leaves early: the relay decides what comes next."""
    words = [part for word in words for part in (words_of(word) if " " in word else [word])]
    if not any(PurePosixPath(word).name == "sbatch" for word in words):
        return None
    if not {"--wait", "-W"} & set(words):
        return "sbatch without --wait ends when the job is queued; add --wait"
    if "--no-requeue" not in words:
        return "sbatch without --no-requeue waits for a job that SLURM queues again and again; add --no-requeue"
    return None


def words_of(command: str) -> list[str]:
    """Return the words of a shell command and what stands between commands, without comments."""
    lexer = shlex.shlex(re.sub(r"(?<=[^\s;&|()])#", "_", command), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:  # a quote in a here-document may be plain text
        return command.split()
