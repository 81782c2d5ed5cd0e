"""The peer's side of the eval benchmarks, which runs where lm-eval is installed.

    python peer.py MODEL_FOLDER hf

It imports nothing of this package except, with `llmfoundry_lite` instead of `hf`, its model for lm-eval. It reads one
task from each line of stdin, as the JSON arguments of `measure`, and prints one line of results.
"""

# pyright: reportMissingImports=false

import json
import math
import sys
import time

import lm_eval
import torch
import transformers
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def answer_questions(folder: str, name: str) -> None:
    """Load the model, then measure each task that stands on a line of stdin, and print its result as JSON."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_ours(folder, device) if name == "llmfoundry_lite" else load_hf(folder, device)
    for line in sys.stdin:
        print(json.dumps(measure(model, **json.loads(line))), flush=True)


def load_hf(folder: str, device: str) -> LM:
    """Load a model folder with lm-eval's own class for transformers, in fp32."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=folder, dtype="float32", device=device, batch_size=16)


def load_ours(folder: str, device: str) -> LM:
    """Load a model folder with this package's class for lm-eval."""
    from lm_eval.api.registry import get_model

    from llmfoundry_formats.lm_eval import register

    register()
    return get_model("llmfoundry_lite")(hf=folder, device=device)


def measure(model: LM, items: str, kind: str = "multiple_choice", delimiter: str = " ") -> dict:
    """Evaluate a file of items as a task of lm-eval, and return results and seconds.

    `kind` is the task's icl_task_type, or "letters" for multiple choice by letters, and `delimiter` its
    continuation_delimiter. Accuracies, log-probabilities and bits per byte of the right answer are given for each item,
    in the order of the file.
    """
    original_loglikelihood = model.loglikelihood

    task = ConfigurableTask(
        config={
            "task": "bench",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": items}},
            "test_split": "test",
            **ask(kind, delimiter),
        }
    )
    wall_and_cpu_seconds = count_seconds(model)
    results = lm_eval.simple_evaluate(model=model, tasks=[task], log_samples=True, bootstrap_iters=0)
    # Undo the timing, because the next task is measured with the same model.
    model.loglikelihood = original_loglikelihood
    aggregated = results["results"]["bench"]

    # Put the samples into the order of the file.
    samples = sorted(results["samples"]["bench"], key=lambda sample: sample["doc_id"])
    metrics = [metric for metric in ("acc", "acc_norm") if metric in samples[0]]

    return {
        "n": len(samples),
        "seconds": wall_and_cpu_seconds[0],
        "cpu_seconds": wall_and_cpu_seconds[1],
        **{metric: [int(sample[metric]) for sample in samples] for metric in metrics},
        "log_probability": [[nats_of(response[0]) for response in sample["resps"]] for sample in samples],
        "bpb": None if kind == "perplexity" else [bits_of_right_answer(sample, kind) for sample in samples],
        "perplexity": next(
            (aggregated[key] for key in ("perplexity,none", "byte_perplexity,none") if key in aggregated), None
        ),
        "versions": {"lm-eval": lm_eval.__version__, "transformers": transformers.__version__},
    }


def nats_of(response: "float | tuple[float, bool] | list") -> float:
    """Return the log-probability of an answer (a pair with whether it is the likeliest) or of a whole document."""
    return float(response[0] if isinstance(response, tuple | list) else response)


def bits_of_right_answer(sample: dict, kind: str) -> float:
    """Return the bits per byte of the right answer of a sample.

    lm-eval has no such metric of questions. This counts the bytes of the text that lm-eval has scored, which is the
    answer with the delimiter's white space before it.
    """
    gold = 0 if kind == "language_modeling" else sample["doc"]["gold"]
    _, scored_text = sample["arguments"][gold]
    return -nats_of(sample["resps"][gold][0]) / math.log(2) / len(scored_text.encode())


def count_seconds(model: LM) -> list[float]:
    """Make the model's loglikelihood add its time to the returned list, [wall, processor] seconds.

    Only tokenising and scoring are timed. lm-eval's other work takes the same time whatever the number of items.
    """
    original_loglikelihood, seconds = model.loglikelihood, [0.0, 0.0]

    def timed(*arguments: object, **options: object) -> object:
        """Answer, and add the seconds that this takes."""
        started, cpu_started = time.perf_counter(), time.process_time()
        answers = original_loglikelihood(*arguments, **options)
        seconds[0] += time.perf_counter() - started
        seconds[1] += time.process_time() - cpu_started
        return answers

    model.loglikelihood = timed
    return seconds


def ask(kind: str, delimiter: str) -> dict:
    """Return the keys of a task's configuration that define its prompts and metrics.

    `kind` is one of multiple_choice, letters, schema, perplexity and language_modeling. lm-eval puts the delimiter's
    white space before the answer, as ours does; the rest of the delimiter belongs to the question.
    """
    delimiter_text = delimiter.rstrip()
    delimiter_space = delimiter[len(delimiter_text) :]
    if kind == "multiple_choice":
        return {
            "output_type": "multiple_choice",
            "doc_to_text": "{{query}}" + delimiter_text,
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "gold",
            "target_delimiter": delimiter_space,
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        }
    if kind == "letters":  # the template of lm-eval's MMLU, for any number of choices
        choice_line = f"{{{{'{LETTERS}'[loop.index0]}}}}. {{{{choice}}}}\n"
        return {
            "output_type": "multiple_choice",
            "doc_to_text": "{{query}}\n{% for choice in choices %}" + choice_line + "{% endfor %}Answer:",
            "doc_to_choice": f"{{{{'{LETTERS}'[:choices|length]|list}}}}",
            "doc_to_target": "gold",
            "metric_list": [{"metric": "acc"}],
        }
    if kind == "schema":  # the name of a number as doc_to_text tells lm-eval that the choices are contexts
        return {
            "output_type": "multiple_choice",
            "doc_to_text": "gold",
            "doc_to_choice": "{{context_options}}",
            "doc_to_target": "{{continuation}}",
            "target_delimiter": delimiter_text + delimiter_space,
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
        "doc_to_text": "{{context}}" + delimiter_text,
        "doc_to_target": delimiter_space + "{{continuation}}",  # lm-eval adds no delimiter to this output type
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    }


if __name__ == "__main__":
    answer_questions(*sys.argv[1:])
