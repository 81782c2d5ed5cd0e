"""The configuration of an evaluation (`EvalConfig`), its tasks and its gauntlet, with LLM Foundry's names of keys.

`load_eval.py` and `load_tasks.py` build them from files and `key=value` arguments.
"""

from dataclasses import dataclass
from typing import Any

from llmfoundry_lite.config.fields import (
    NON_NEGATIVE,
    POSITIVE,
    REQUIRED,
    Use,
    check_source_path_or_url,
    local_folder,
    parsed,
    setting,
    validator,
)
from llmfoundry_lite.config.spans import Time
from llmfoundry_lite.config.task_types import METRICS, TASK_TYPES, TaskType, find_task_type
from llmfoundry_lite.own_code import PREFIX, is_own

TOKENIZATIONS = "separate joint"
FORMS = "cloze letters"
LETTERS = "letters"
"""The form of a multiple-choice task that shows the choices as "A. …", "B. …", and scores the letters."""

GENERATION = (
    Use(
        has_effect=lambda task, _: task.task_type.answer in ("generation", None),
        reason="a {block.icl_task_type} task generates nothing",
    ),
)
PROMPTS = (
    Use(
        has_effect=lambda task, _: task.task_type.answer != "text",
        reason="the text of a perplexity task has no prompts",
    ),
)
OWN_TYPE = (
    Use(
        has_effect=lambda task, _: is_own(task.icl_task_type),
        reason="only a type of your own is given them, and icl_task_type is {block.icl_task_type}",
    ),
)
OWN_METRICS = (Use(has_effect=lambda task, _: task.own_metrics, reason="metric_names has no metric of your own"),)
LISTED_CHOICES = (Use(has_effect=lambda task, _: task.form == LETTERS, reason="form is not letters"),)
EXAMPLES = (Use(has_effect=lambda task, _: any(task.num_fewshot), reason="num_fewshot is 0"),)
FOLLOWING = (Use(has_effect=lambda config, _: config.follow, reason="follow is false"),)
HUB = (Use(has_effect=lambda task, _: task.dataset_uri.startswith("hf://"), reason="dataset_uri is no hf://NAME"),)


def result_name(label: str, num_fewshot: int, form: str | None) -> str:
    """Return a task's name in results: its label, its number of examples, and its form unless that is cloze.

    The names are such as `arc_easy/3-shot` and `arc_easy/3-shot-letters`, so that a table never mixes two forms.
    """
    name = f"{label}/{num_fewshot}-shot"
    return f"{name}-letters" if form == LETTERS else name


@dataclass(kw_only=True, slots=True, frozen=True)
class TaskConfig:
    """One task; LLM Foundry's task lists load unchanged."""

    label: str
    """The task's name. Results are named after it and the number of examples: `arc_easy/5-shot`."""
    icl_task_type: str = setting(choices=" ".join((*TASK_TYPES, PREFIX)))
    """The type of the task, which decides the columns of its file, and how answers are scored. A type of your own is
    `python:package.module:Thing` (docs/own-parts.md)."""
    kwargs: dict[str, Any] = setting(dict, uses=OWN_TYPE)
    """Arguments of a type of your own. Keys of its task that are not ours are arguments, too."""
    dataset_uri: str = setting(REQUIRED, check_source_path_or_url, is_path_or_url=True)
    """A JSONL file (for perplexity also a text file or an MDS split), or hf://NAME with hf_loading_vars."""
    num_fewshot: list[int] = setting(
        lambda: [0], validator("one number or more, 0 or above", lambda value: value and min(value) >= 0)
    )
    """Numbers of examples. Each gives a result of its own."""
    fewshot_random_seed: int = setting(
        1234,
        uses=(*EXAMPLES, Use(has_effect=lambda task, _: not task.fewshot_fixed, reason="fewshot_fixed is true")),
    )
    """Seed by which examples are drawn."""
    fewshot_fixed: bool = setting(False, uses=EXAMPLES)
    """Show the same examples for every item, instead of choosing them by (seed, item). They are the first items of the
    file, which are then not evaluated. With fewshot_split, they are the first rows of that split."""
    fewshot_split: str | None = None
    """Take the examples from the rows that have this text in the column `split`, such as dev. These rows are never
    asked, whatever num_fewshot is. Default: the other items are the examples."""
    prompt_string: str = setting("", uses=PROMPTS)
    """Text before everything else, once. With has_categories, {category} in it stands for the item's category."""
    example_delimiter: str = setting("\n", uses=PROMPTS)
    """Text before each example and before the item, unless nothing stands before them in the prompt."""
    continuation_delimiter: str = setting(" ", uses=PROMPTS)
    """Text between a context and its answer. With form: letters, "\\nAnswer: " takes the place of white space."""
    prelimiter: str = setting("", uses=PROMPTS)
    """Text before each context."""
    strip_dataset: bool = setting(True, uses=PROMPTS)
    """Strip white space around the columns' texts."""
    form: str | None = setting(None, choices=FORMS)
    """Multiple choice: how the choices are asked. cloze: the text of each choice is scored after the question. letters:
    the question is followed by the choices as "A. …", "B. …", and the letters are scored, as in MMLU. Names of results
    by letters end with `-letters`. Default: the evaluation's."""
    choices_delimiter: str = setting("\n", uses=LISTED_CHOICES)
    """form: letters. Text between the question and its first choice."""
    letter_prefix: str = setting(" ", uses=LISTED_CHOICES)
    """form: letters. Text before each letter of the list. With most tokenizers, a space, as in OLMES, gives a letter
    the same token in the list and in the answer. lm-evaluation-harness has none in MMLU."""
    tokenization: str | None = setting(None, choices=TOKENIZATIONS, uses=PROMPTS)
    """separate: context and answer are tokenised apart, as in LLM Foundry. joint: together, then divided, as in
    lm-evaluation-harness. Default: the evaluation's."""
    metric: str | None = setting(None, choices=" ".join((*METRICS, PREFIX)))
    """Metric of the task in tables and averages: acc_per_token, acc (summed), acc_norm (per character), acc_per_byte,
    or bpb, which is bits per byte of the right answer. Default: acc_per_token for tasks with choices, as in LLM
    Foundry, and acc for others and for letters. The results have all of them. One of `metric_names` may be named."""
    metric_names: list[str] = setting(list)
    """Metrics of your own that are computed besides, as `python:package.module:function`. LLM Foundry's names are
    accepted, and ignored."""
    metric_kwargs: dict[str, dict[str, Any]] = setting(dict, uses=OWN_METRICS)
    """Metric of your own -> its arguments."""
    has_categories: bool = False
    """Treat each value of the column `category` as a task of its own, as LLM Foundry does. An item's examples come from
    its category. The score is the mean of the categories' scores, which are in the results too."""
    cluster: str | None = None
    """A column, such as `passage`, whose value names an item's cluster. Standard errors, intervals and tests treat
    clusters as independent, and items of one cluster as related."""
    max_new_tokens: int | None = setting(None, POSITIVE, uses=GENERATION)
    """Generation: tokens of an answer at most. Default: as many as the longest answer in the file has."""
    early_stopping_criteria: list[str] = setting(
        list,
        validator("no empty text, at which every answer would end", lambda value: "" not in value),
        uses=GENERATION,
    )
    """Generation: texts that end an answer."""
    do_normalization: bool = setting(True, uses=GENERATION)
    """Generation: compare in lower case, without punctuation, articles and extra spaces."""
    cot_delimiter: str = setting("", uses=GENERATION)
    """Generation: the answer is what follows the last of these."""
    hf_loading_vars: dict[str, Any] = setting(dict, uses=HUB)
    """Arguments of datasets.load_dataset."""
    hf_parsing_map: dict[str, list[str]] = setting(dict, uses=HUB)
    """Our column -> columns of the data set, whose texts are joined by spaces."""

    @property
    def task_type(self) -> TaskType:
        """The row of the task's type in the table of types."""
        return find_task_type(self.icl_task_type)

    @property
    def own_metrics(self) -> list[str]:
        """The metrics of the user's own that are computed, by their import paths."""
        return [name for name in self.metric_names if is_own(name)]

    @property
    def own_code(self) -> list[tuple[str, str]]:
        """Code of the user that the task names: key and import path of each."""
        names = [("icl_task_type", self.icl_task_type), *(("metric_names", name) for name in self.own_metrics)]
        return [(f"icl_tasks: {self.label}: {key}", name) for key, name in names if is_own(name)]


@dataclass(kw_only=True, slots=True, frozen=True)
class Benchmark:
    """A task of a gauntlet's category."""

    name: str
    """The task's label."""
    num_fewshot: int = setting(REQUIRED, NON_NEGATIVE)
    """Number of examples of the result that is used."""
    random_baseline: float = setting(
        REQUIRED, validator("a number from 0 to less than 1", lambda value: 0 <= value < 1)
    )
    """Accuracy of guessing, below 1."""
    form: str | None = setting(None, choices=FORMS)
    """letters: the result by the letters of the choices, as the task's `form` has it."""

    @property
    def task(self) -> str:
        """The task's name in results: `arc_easy/3-shot`, or `arc_easy/3-shot-letters`."""
        return result_name(self.name, self.num_fewshot, self.form)


@dataclass(kw_only=True, slots=True, frozen=True)
class Category:
    """A category of a gauntlet: tasks whose scores make one."""

    name: str
    """Name of the category in tables and averages."""
    benchmarks: list[Benchmark]
    """Tasks whose scores are averaged."""


@dataclass(kw_only=True, slots=True, frozen=True)
class GauntletConfig:
    """A gauntlet: how scores of tasks become scores of categories and averages."""

    categories: list[Category]
    """Groups of tasks, each of which has a score."""
    weighting: str = setting("EQUAL", choices="EQUAL SAMPLE_SZ LOG_SAMPLE_SZ")
    """Weights of a category's tasks: EQUAL counts each the same, SAMPLE_SZ by the number of items, LOG_SAMPLE_SZ by its
    log2."""
    subtract_random_baseline: bool = True
    """Subtract the accuracy of guessing, so that a model that guesses has 0."""
    rescale_accuracy: bool = True
    """Divide an accuracy above chance by the highest one possible, so that the best score is 1."""
    averages: dict[str, list[str]] | None = None
    """Name of an average -> its categories. Default: `default_average`, over all; {} is none."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Pretrained:
    """The model or tokenizer in an entry of LLM Foundry's list."""

    name: str
    pretrained_model_name_or_path: str


@dataclass(kw_only=True, slots=True, frozen=True)
class ListedModel:
    """The part of an entry in LLM Foundry's list of models that is read as text."""

    model_name: str
    model: Pretrained
    tokenizer: Pretrained
    load_path: str


@dataclass(kw_only=True, slots=True, frozen=True)
class EvalConfig:
    """An evaluation. Precedence: these defaults < YAML files, in order < key=value arguments."""

    models: dict[str, str] = setting(written=dict[str, str] | list[ListedModel], is_path_or_url=True)
    """A name of your choice -> a run directory, a checkpoint (…/ba200, local or URL), the folder of a Hugging Face
    model, or hf:NAME."""
    icl_tasks: list[Any] | str = setting(written=list[TaskConfig | str] | str)
    """Names of files in task_folder (without .yaml), files, or tasks written out here;
    `{label: arc_easy, num_fewshot: [5]}` is the task of that name with another number of examples."""
    suite: str
    """Name of the suite, and of its folder of results. Default: the first YAML file's name; without a file, that of
    `task_folder`."""
    eval_gauntlet: GauntletConfig | None = setting(None, written=GauntletConfig | str | None)
    """LLM Foundry's Eval Gauntlet, or a file with it. Adds a table of categories and averages."""
    metric: str | None = setting(None, choices=" ".join((*METRICS, PREFIX)))
    """Metric of tables, averages and the gauntlet, for tasks that have it. Default: each task's own, except that
    acc_norm (per character) takes the place of acc_per_token if the models have different tokenizers. A gauntlet is of
    accuracies, also with bpb."""
    skip_missing_tasks: bool = False
    """Leave out tasks whose data file is missing, and name them, instead of refusing the evaluation."""
    results_folder: str = setting("results", local_folder(), is_path_or_url=True)
    """Holds <suite>/<model>.json and <model>.items.jsonl."""
    task_folder: str = setting("evals", is_path_or_url=True)
    """Folder of the tasks' YAML files."""
    data_root: str = setting(".", is_path_or_url=True)
    """Folder for relative paths of data, and of YAMLs that a YAML names, if there is no such file here. For example
    `scripts` of LLM Foundry's clone."""
    tokenization: str = setting("separate", choices=TOKENIZATIONS)
    """How prompts are tokenised in tasks that do not say it themselves."""
    form: str | None = setting(None, choices=FORMS)
    """How multiple-choice tasks are asked that do not say it themselves: cloze (the default) or letters."""
    precision: str = setting("fp32", choices="fp32 tf32 bf16 fp16")
    """Precision of weights and hidden states. tf32 is fp32 with products in TF32 where the device has it.
    Log-probabilities are always fp32, with tf32 from products in TF32."""
    device_batch_tokens: int | None = setting(None, POSITIVE)
    """Tokens in one forward pass; default: 2,048 on a CPU, 32,768 on an accelerator."""
    max_seq_len: int | None = setting(None, POSITIVE)
    """Tokens of a prompt with its answer at most; longer prompts lose their beginning. Default: the model's length."""
    limit: int | None = setting(None, POSITIVE)
    """Evaluate only the first items of each task, this many: a trial, not a result. Of held-out text, these are windows
    of the context's length; a document may have several."""
    keep_prompts: bool = False
    """Record each item's prompt as the model got it, token by token, in <model>.items.jsonl. Finished tasks are not run
    again for it; redo=true runs them."""
    tokenizer: str | None = setting(None, is_path_or_url=True)
    """A tokenizer for all models, as a folder or a Hub name. Default: each model's own."""
    trust_code: bool = False
    """Run code (`python:`) that checkpoints name for parts of their models. Only for models whose author you trust.
    A YAML cannot set it."""
    fsdp: bool = False
    """Shard each model over all ranks instead of keeping it whole on each."""
    all_checkpoints: bool = False
    """Evaluate every checkpoint of each run, as NAME-ba200: a learning curve."""
    follow: bool = False
    """Evaluate every checkpoint of each run as it appears, as NAME-ba200, until the training ends."""
    follow_interval: Time = parsed("60s", Time.parse, uses=FOLLOWING)
    """Time between two looks at a run's checkpoints."""
    follow_patience: Time = parsed("30m", Time.parse, uses=FOLLOWING)
    """A run that is not done counts as ended if for this long no launch has trained it: no new checkpoint, and nobody
    renews its lease."""
    redo: bool = False
    """Evaluate again and replace finished results: the tasks asked for, or all where they are of another model."""
    environment: dict[str, str] = setting(dict)
    """Environment variables to set before torch is imported."""
    dist_timeout: float = setting(600.0, POSITIVE)
    """Seconds that a rank waits for the others before the launch fails."""
    variables: dict[str, Any] = setting(dict)
    """Values of your own, which other keys refer to: `${variables.name}`."""
