"""A finished run, told to people: a table, a figure, a sample of what the model writes.

Reads what a run directory holds (config.yaml, metrics.jsonl, huggingface/) and the data set it names, if that
is on this disk; asks nothing of the training code.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table

from llmfoundry_lite import plots
from llmfoundry_lite.data.baselines import Baselines, measure_baselines
from llmfoundry_lite.data.tokenizer import load_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.models.generate import generate
from llmfoundry_lite.models.hf import import_model
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.plots import Record

PROMPT = "def "


def report(run: Path, prompt: str = PROMPT) -> None:
    """Print the table of a run and a sample of its model, draw loss.png. Raises DataError if `run` is no run."""
    config, records = read_run(run)
    baselines, bytes_per_token = measure_data(config)
    console = Console()
    console.print(build_table(run, config, records, baselines, bytes_per_token))
    if (run / "huggingface" / "tokenizer.json").is_file():
        console.print(f"\n[bold]A sample, after {prompt!r}[/bold]")
        console.print(sample(run / "huggingface", prompt), markup=False, highlight=False)
    figure = run / "loss.png"
    lines = baselines._asdict() if baselines else None
    plots.plot_run(records, figure, title=config["run_name"], baselines=lines)
    console.print(f"\nplot: {figure}")


def read_run(run: Path) -> tuple[dict[str, Any], list[Record]]:
    """The resolved configuration and the records in order of batch; of a batch trained again, the last."""
    for name in ("config.yaml", "metrics.jsonl"):
        if not (run / name).is_file():
            raise DataError(f"{run / name} does not exist; expected a run directory such as runs/mpt-quickstart")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines if line.endswith("}")]  # the last line may be half-written
    if not records:
        raise DataError(f"{run / 'metrics.jsonl'} has no batch in it yet")
    latest = {record["batch"]: record for record in records}
    return yaml.safe_load((run / "config.yaml").read_text()), [latest[batch] for batch in sorted(latest)]


def measure_data(config: dict[str, Any]) -> tuple[Baselines | None, float | None]:
    """Baselines and bytes per validation token, where the data set is ours, local and small; else None."""
    train, validation = config["train_loader"]["dataset"], (config["eval_loader"] or {}).get("dataset")
    if not validation or not validation["local"] or train["local"] != validation["local"]:
        return None, None
    folder = Path(train["local"])
    summary_file = folder / "summary.json"
    if not summary_file.is_file():
        return None, None
    splits = json.loads(summary_file.read_text())["splits"]
    counts = splits[validation["split"]]
    bytes_per_token = counts["text_bytes"] / (counts["tokens"] + counts["remainder_tokens"])
    if splits[train["split"]]["tokens"] > 100_000_000:
        return None, bytes_per_token
    vocab_size = config["model"]["vocab_size"]
    return measure_baselines(folder / train["split"], folder / validation["split"], vocab_size), bytes_per_token


def build_table(
    run: Path, config: dict[str, Any], records: list[Record], baselines: Baselines | None, bytes_per_token: float | None
) -> Table:
    last, rows = records[-1], []
    tail = [record["loss/train/total"] for record in records[-20:] if record.get("loss/train/total") is not None]
    if tail:
        rows.append(("training loss, last batches", sum(tail) / len(tail)))
    evaluated = [record["eval/loss"] for record in records if "eval/loss" in record]
    if evaluated:
        rows.append(("validation loss", evaluated[-1]))
    if baselines:
        rows += [("bigram model", baselines.bigram), ("unigram model", baselines.unigram)]
    table = Table(title=str(run), title_justify="left")
    table.add_column()
    table.add_column("nats per token", justify="right")
    table.add_column("bits per byte", justify="right")
    for name, nats in rows:
        bits = f"{nats / math.log(2) / bytes_per_token:.3f}" if bytes_per_token and "training" not in name else ""
        table.add_row(name, f"{nats:.4f}", bits)
    rates = [record["throughput/tokens_per_sec"] for record in records if "throughput/tokens_per_sec" in record]
    table.caption = (
        f"{last['batch']} batches, {last['time/token']:,} tokens, {rates[-1] if rates else 0:,.0f} tokens/s"
        + ("; baselines are counted with add-one smoothing on the training tokens" if baselines else "")
    )
    return table


def sample(folder: Path, prompt: str, num_tokens: int = 120) -> str:
    """What the exported model writes after `prompt`."""
    config, weights = import_model(folder)
    model = MPT(config)
    model.load_state_dict(weights)
    model.eval()
    tokenizer = load_tokenizer(folder)
    tokens_t = generate(
        model, torch.tensor(tokenizer.encode(prompt) or [tokenizer.eos_token_id]), num_tokens, temperature=0.7, top_k=40
    )
    return tokenizer.decode(tokens_t.tolist())
