"""LLM Foundry's MPT in a bare loop, run by the interpreter of an environment that has it: the peer of `bench train`.

Imports nothing of this package. Prints {"step_seconds": [...], "peak_bytes": ...} as JSON.
"""

import json
import resource
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM  # type: ignore[import-not-found]

    shape, device = settings["model"], "cuda" if torch.cuda.is_available() else "cpu"
    attention = {"attn_impl": "flash" if device == "cuda" else "torch", "attn_pdrop": 0.0}
    config = MPTConfig(**shape, max_seq_len=settings["seq_len"], no_bias=True, attn_config=attention)
    model = MPTForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    tokens = torch.randint(shape["vocab_size"], (settings["batch_size"], settings["seq_len"]), device=device)
    seconds = []
    for _ in range(settings["num_steps"] + 2):
        started = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=settings["dtype"] == "bf16"):
            logits = model(input_ids=tokens).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        seconds.append(time.perf_counter() - started)
    on_device = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    peak_bytes = on_device or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {"step_seconds": seconds[2:], "peak_bytes": peak_bytes}


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
