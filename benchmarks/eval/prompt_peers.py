"""The other programs' side of `eval-prompts`: prints the prompts that a program makes of rows.

    python prompt_peers.py lm_eval                       in an environment that has lm_eval
    python prompt_peers.py llm_foundry FOLDER TOKENIZER  FOLDER has the package `llmfoundry`, TOKENIZER a tokenizer
    python prompt_peers.py nanochat CLONE

Each line of stdin is the JSON of a task: the arguments of this side's function, such as `ask_nanochat`. The line that
answers it is the JSON of a list: the prompt of each option of the first row, with the option's answer at its end. It
imports nothing of this repository.
"""

# pyright: reportMissingImports=false

import importlib
import importlib.util
import json
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Ask = Callable[..., list[str]]

KINDS = {
    "multiple_choice": "InContextLearningMultipleChoiceTaskDataset",
    "schema": "InContextLearningSchemaTaskDataset",
    "language_modeling": "InContextLearningLMTaskDataset",
}
"""Type of a task -> its class in LLM Foundry."""
PROMPT_KEYS = {"multiple_choice": "query", "schema": "context_options", "language_modeling": "context"}
"""Type of a task -> the key of its prompts in an item of LLM Foundry."""
MAX_TOKENS = 16384
"""Length to which LLM Foundry pads a prompt."""


def answer_tasks(side: str, *arguments: str) -> None:
    """Answer each task that stands on a line of stdin, with the program that `side` names."""
    ask = {"lm_eval": load_lm_eval, "llm_foundry": load_llm_foundry, "nanochat": load_nanochat}[side](*arguments)
    for line in sys.stdin:
        print(json.dumps(ask(**json.loads(line))), flush=True)


def load_lm_eval() -> Ask:
    """Return the function that renders rows by a task of lm_eval, whose YAML and functions are used as they are."""
    import datasets
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    rows_of_split: dict[str, list[Row]] = {}

    def load_rows_here(*arguments: object, **options: object) -> datasets.DatasetDict:
        """Take the place of the Hub: return this task's rows, whatever data set is asked for."""
        return datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in rows_of_split.items()})

    datasets.load_dataset = load_rows_here

    def ask_lm_eval(task: str, row: Row, example: Row, num_fewshot: int) -> list[str]:
        """Render a row of the task's data set, after one other as its example if `num_fewshot` is 1."""
        # Some samplers draw one example more than they show.
        rows_of_split.clear()
        for split in ("train", "dev"):
            rows_of_split[split] = [example, example]
        for split in ("validation", "test"):
            rows_of_split[split] = [row]
        loaded = manager.load([task])["tasks"][task]
        loaded.set_config("num_fewshot", num_fewshot)
        loaded.build_all_requests(limit=1, rank=0, world_size=1)

        # The second argument of a generation's request says how to generate.
        texts = []
        for request in loaded.instances:
            answer = request.args[1] if isinstance(request.args[1], str) else ""
            texts.append(request.args[0] + answer)
        return texts

    return ask_lm_eval


def load_llm_foundry(folder: str, tokenizer_folder: str) -> Ask:
    """Return the function that renders rows by LLM Foundry's data sets, and decodes the tokens that a model would get.

    Only its module of data sets is imported, because the package itself imports a hundred others.
    """
    from transformers import PreTrainedTokenizerFast

    for name in ("llmfoundry", "llmfoundry.eval", "llmfoundry.eval.datasets"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(folder, *name.split(".")))]
        sys.modules[name] = package
    module = importlib.import_module("llmfoundry.eval.datasets.in_context_learning_evaluation")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(tokenizer_folder, "tokenizer.json")))
    padding_id = len(tokenizer)

    def ask_llm_foundry(kind: str, delimiter: str, rows: list[Row], num_fewshot: int) -> list[str]:
        """Render the first of two rows, after the second as its example if `num_fewshot` is 1."""
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "rows.jsonl")
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            dataset = getattr(module, KINDS[kind])(
                dataset_uri=str(path),
                tokenizer=tokenizer,
                max_seq_len=MAX_TOKENS,
                pad_tok_id=padding_id,
                num_fewshot=num_fewshot,
                destination_path=str(Path(scratch, "copy.jsonl")),
                fewshot_random_seed=1234,
                prompt_string="",
                example_delimiter="\n",
                continuation_delimiter=delimiter,
            )
            item = dataset[0]

        prompts = item[PROMPT_KEYS[kind]]
        if kind == "language_modeling":
            prompts = [prompts]
        texts: list[str] = []
        for prompt in prompts:
            token_ids = [token for token in map(int, prompt) if token != padding_id]
            texts.append(str(tokenizer.decode(token_ids)))
        return texts

    return ask_llm_foundry


def load_nanochat(clone: str) -> Ask:
    """Return the function that renders rows by the templates of nanochat."""
    path = Path(clone, "nanochat", "core_eval.py")
    spec = importlib.util.spec_from_file_location("core_eval", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def ask_nanochat(kind: str, delimiter: str, rows: list[Row], num_fewshot: int) -> list[str]:
        """Render the first of two rows, after the second as its example if `num_fewshot` is 1."""
        row, example = rows
        examples = [example] if num_fewshot else []
        if kind == "multiple_choice":
            return module.render_prompts_mc(row, delimiter, examples)
        if kind == "schema":
            return module.render_prompts_schema(row, delimiter, examples)
        return module.render_prompts_lm(row, delimiter, examples)[-1:]  # the first one is without the answer

    return ask_nanochat


if __name__ == "__main__":
    answer_tasks(*sys.argv[1:])
