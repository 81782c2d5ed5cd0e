"""The peer's side of `bench eval`. Runs in an environment of its own that has lm-eval; imports nothing of ours."""

# pyright: reportMissingImports=false

import json
import sys
import time

import lm_eval
import torch
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM


def measure(settings: dict) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = HFLM(pretrained=settings["model"], dtype="float32", device=device, batch_size=16)
    task = ConfigurableTask(
        config={
            "task": "bench",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": settings["items"]}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{query}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "gold",
            "target_delimiter": " ",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        }
    )
    started = time.perf_counter()
    found = lm_eval.simple_evaluate(model=model, tasks=[task], log_samples=True, bootstrap_iters=0)
    seconds = time.perf_counter() - started
    samples = sorted(found["samples"]["bench"], key=lambda sample: sample["doc_id"])
    return {
        "n": len(samples),
        "seconds": seconds,
        "acc": [int(sample["acc"]) for sample in samples],
        "acc_norm": [int(sample["acc_norm"]) for sample in samples],
        "log_probability": [[float(response[0][0]) for response in sample["resps"]] for sample in samples],
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
