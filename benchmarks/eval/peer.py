"""The peer's side of the eval benchmark: runs where lm-eval is, and imports nothing of ours but our model."""

# pyright: reportMissingImports=false

import json
import sys
import time

import lm_eval
import torch
import transformers
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask


def answer_questions(folder: str, name: str) -> None:
    """Read a file of items and their kind of task from each line; print a line of results for it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_ours(folder, device) if name == "llmfoundry_lite" else load_hf(folder, device)
    for line in sys.stdin:
        print(json.dumps(measure(model, **json.loads(line))), flush=True)


def load_hf(folder: str, device: str) -> LM:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=folder, dtype="float32", device=device, batch_size=16)


def load_ours(folder: str, device: str) -> LM:
    from lm_eval.api.registry import get_model

    from llmfoundry_formats.lm_eval import register

    register()
    return get_model("llmfoundry_lite")(hf=folder, device=device)


def measure(model: LM, items: str, kind: str = "multiple_choice", delimiter: str = " ") -> dict:
    answer = model.loglikelihood
    task = ConfigurableTask(
        config={
            "task": "bench",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": items}},
            "test_split": "test",
            **ask(kind, delimiter),
        }
    )
    seconds = count_seconds(model)
    found = lm_eval.simple_evaluate(model=model, tasks=[task], log_samples=True, bootstrap_iters=0)
    model.loglikelihood = answer
    of_all = found["results"]["bench"]
    samples = sorted(found["samples"]["bench"], key=lambda sample: sample["doc_id"])
    names = [name for name in ("acc", "acc_norm") if name in samples[0]]
    return {
        "n": len(samples),
        "seconds": seconds[0],
        "cpu_seconds": seconds[1],
        **{name: [int(sample[name]) for sample in samples] for name in names},
        "log_probability": [[nats_of(response[0]) for response in sample["resps"]] for sample in samples],
        "perplexity": next((of_all[key] for key in ("perplexity,none", "byte_perplexity,none") if key in of_all), None),
        "versions": {"lm-eval": lm_eval.__version__, "transformers": transformers.__version__},
    }


def nats_of(response: "float | tuple[float, bool] | list") -> float:
    """Return the log-probability of an answer (a pair with whether it is the likeliest) or of a whole document."""
    return float(response[0] if isinstance(response, tuple | list) else response)


def count_seconds(model: LM) -> list[float]:
    """Return [wall, processor] seconds that fill up during tokenising and scoring.

    The peer's other work takes seconds whatever the number of items, and is left out.
    """
    answer, seconds = model.loglikelihood, [0.0, 0.0]

    def timed(*arguments: object, **options: object) -> object:
        started, cpu_started = time.perf_counter(), time.process_time()
        found = answer(*arguments, **options)
        seconds[0] += time.perf_counter() - started
        seconds[1] += time.process_time() - cpu_started
        return found

    model.loglikelihood = timed
    return seconds


def ask(kind: str, delimiter: str) -> dict:
    """Return the task's prompts as templates. White space at the delimiter's end goes before the answer."""
    head = delimiter.rstrip()
    space = delimiter[len(head) :]
    if kind == "multiple_choice":
        return {
            "output_type": "multiple_choice",
            "doc_to_text": "{{query}}" + head,
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "gold",
            "target_delimiter": space,
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        }
    if kind == "schema":  # a number as text means that the choices are contexts
        return {
            "output_type": "multiple_choice",
            "doc_to_text": "gold",
            "doc_to_choice": "{{context_options}}",
            "doc_to_target": "{{continuation}}",
            "target_delimiter": head + space,
            "metric_list": [{"metric": "acc"}],
        }
    if kind == "perplexity":
        return {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "byte_perplexity"}],
        }
    return {
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}" + head,
        "doc_to_target": space + "{{continuation}}",  # here the delimiter is not put in
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    }


if __name__ == "__main__":
    answer_questions(*sys.argv[1:])
