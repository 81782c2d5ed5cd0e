"""LLM Foundry's side of the train benchmark: its MPT in a bare loop.

Run by the interpreter of an environment that has LLM Foundry, so it imports nothing of this package. Its argument is
the settings as JSON. Prints {"step_seconds": [...], "peak_bytes": ...} as JSON.
"""

import json
import resource
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Build LLM Foundry's MPT with its fastest attention on this device, and time steps of it.

    `settings` are those of the benchmark, with the model's sizes under "model". All steps train on the same random
    batch. The first two warm up and are left out. On a CPU, peak memory is that of the whole process.
    """
    from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM  # type: ignore[import-not-found]

    shape, device = settings["model"], "cuda" if torch.cuda.is_available() else "cpu"
    attn_config = {"attn_impl": "flash" if device == "cuda" else "torch", "attn_pdrop": 0.0}
    config = MPTConfig(**shape, max_seq_len=settings["seq_len"], no_bias=True, attn_config=attn_config)
    model = MPTForCausalLM(config).to(device)
    tokens = torch.randint(shape["vocab_size"], (settings["batch_size"], settings["seq_len"]), device=device)

    def compute_loss(tokens_bt: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting each next token, in bf16 autocast if that is measured."""
        with torch.autocast(device, torch.bfloat16, enabled=settings["dtype"] == "bf16"):
            logits = model(input_ids=tokens_bt).logits
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens_bt[:, 1:].flatten())

    seconds = run_steps(model, compute_loss, [tokens] * (settings["num_steps"] + 2))
    device_peak_bytes = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    peak_bytes = device_peak_bytes or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {"step_seconds": seconds[2:], "peak_bytes": peak_bytes}


def run_steps(
    model: torch.nn.Module, compute_loss: Callable[[torch.Tensor], torch.Tensor], batches: Iterable[torch.Tensor]
) -> list[float]:
    """Train one step on each batch with the loop that every bare side runs, and return the seconds of each.

    Reading the loss at the end of a step waits for the device, so that the step's whole time is counted.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    seconds = []
    for tokens_bt in batches:
        started = time.perf_counter()
        loss = compute_loss(tokens_bt)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        seconds.append(time.perf_counter() - started)
    return seconds


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
