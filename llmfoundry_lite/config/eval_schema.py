"""An evaluation's YAML, its tasks and its gauntlet, in LLM Foundry's words."""

from dataclasses import dataclass
from typing import Any

from llmfoundry_lite.config.fields import POSITIVE, REQUIRED, must_be, setting

TOKENIZATIONS = "separate joint"
METRICS = "acc_per_token acc acc_norm"


@dataclass(kw_only=True, slots=True, frozen=True)
class TaskConfig:
    """One task; LLM Foundry's task lists load unchanged."""

    label: str
    icl_task_type: str = setting(
        choices="multiple_choice schema language_modeling generation_task_with_answers perplexity"
    )
    dataset_uri: str
    """A JSONL file (for perplexity also a text file or an MDS split), or hf://NAME with hf_loading_vars."""
    num_fewshot: list[int] = setting(
        lambda: [0], must_be("one number or more, 0 or above", lambda value: value and min(value) >= 0)
    )
    """One result for each."""
    fewshot_random_seed: int = 1234
    fewshot_fixed: bool = False
    """The same examples for every item, instead of a choice that depends on (seed, item) alone. They come from the
    first items of the file, which are then not evaluated."""
    prompt_string: str = ""
    """Once, before everything."""
    example_delimiter: str = "\n"
    """Before each example but the first, and before the item."""
    continuation_delimiter: str = " "
    """Between a context and its answer."""
    prelimiter: str = ""
    """Before each context."""
    strip_dataset: bool = True
    """Strip white space around the columns' texts."""
    tokenization: str | None = setting(None, choices=TOKENIZATIONS)
    """separate: context and answer each on their own, as LLM Foundry does; joint: together, then divided, as
    lm-evaluation-harness does. Default: the evaluation's."""
    metric: str | None = setting(None, choices=METRICS)
    """The metric of the task in tables and averages: acc_per_token, acc (summed) or acc_norm (per character). Default:
    acc_per_token where there are choices, as in LLM Foundry. All three are in the results."""
    has_categories: bool = False
    """Each value of the column `category` is a task of its own, as in LLM Foundry: an item's examples come from its
    category, and the score is the mean of the categories' scores, which are given too."""
    cluster: str | None = None
    """A column, such as `passage`, that items of one cluster share: standard errors, intervals and tests count clusters
    as independent, and the items of one as not."""
    max_new_tokens: int | None = setting(None, POSITIVE)
    """Generation; default: as many as the longest answer has."""
    early_stopping_criteria: list[str] = setting(
        list, must_be("no empty text, at which every answer would end", lambda value: "" not in value)
    )
    """Generation: texts that end an answer."""
    do_normalization: bool = True
    """Generation: compare in lower case, without punctuation, articles and extra spaces."""
    cot_delimiter: str = ""
    """Generation: the answer is what follows the last of these."""
    hf_loading_vars: dict[str, Any] = setting(dict)
    """Arguments of datasets.load_dataset."""
    hf_parsing_map: dict[str, list[str]] = setting(dict)
    """Our column -> theirs, joined by spaces."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Benchmark:
    """A task of a gauntlet's category."""

    name: str
    """The task's label."""
    num_fewshot: int
    random_baseline: float = setting(REQUIRED, must_be("a number from 0 to less than 1", lambda value: 0 <= value < 1))
    """The accuracy that chance gives, below 1."""

    @property
    def task(self) -> str:
        """The task's name in results: `arc_easy/3-shot`."""
        return f"{self.name}/{self.num_fewshot}-shot"


@dataclass(kw_only=True, slots=True, frozen=True)
class Category:
    name: str
    benchmarks: list[Benchmark]


@dataclass(kw_only=True, slots=True, frozen=True)
class GauntletConfig:
    """How scores of tasks become scores of categories and averages."""

    categories: list[Category]
    weighting: str = setting("EQUAL", choices="EQUAL SAMPLE_SZ LOG_SAMPLE_SZ")
    """Weights of a category's tasks: SAMPLE_SZ by the number of items, LOG_SAMPLE_SZ by its log2."""
    subtract_random_baseline: bool = True
    rescale_accuracy: bool = True
    """Divide by what is left above chance, so that the best score is 1."""
    averages: dict[str, list[str]] | None = None
    """Name -> categories; default: `default_average`, of all."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Pretrained:
    name: str
    pretrained_model_name_or_path: str


@dataclass(kw_only=True, slots=True, frozen=True)
class ListedModel:
    """Text in an entry of LLM Foundry's list of models."""

    model_name: str
    model: Pretrained
    tokenizer: Pretrained
    load_path: str


@dataclass(kw_only=True, slots=True, frozen=True)
class EvalConfig:
    """An evaluation. Precedence: these defaults < YAML files, in order < key=value arguments."""

    models: dict[str, str] = setting(written=dict[str, str] | list[ListedModel])
    """A name of your choice -> a run directory, a checkpoint (…/ba200, local or URL), the folder of a Hugging Face
    model, or hf:NAME."""
    icl_tasks: list[Any] | str = setting(written=list[TaskConfig | str] | str)
    """Names of files in task_folder (without .yaml), files, or tasks written out here;
    `{label: arc_easy, num_fewshot: [5]}` is the one of that name with other examples."""
    suite: str
    """Default: the first YAML file's name."""
    eval_gauntlet: GauntletConfig | None = setting(None, written=GauntletConfig | str | None)
    """LLM Foundry's Eval Gauntlet, or the name of a file of it: a second table, of categories and averages."""
    skip_missing_tasks: bool = False
    """Leave out, by name, tasks whose data file is not there, instead of refusing the evaluation."""
    results_folder: str = setting("results", must_be("a folder of this machine", lambda value: "://" not in value))
    """Holds <suite>/<model>.json and <model>.items.jsonl."""
    task_folder: str = "evals"
    data_root: str = "."
    """Where a relative path of data, or of a YAML that a YAML names, begins if there is no such file here: `scripts` of
    LLM Foundry's clone."""
    tokenization: str = setting("separate", choices=TOKENIZATIONS)
    precision: str = setting("fp32", choices="fp32 tf32 bf16 fp16")
    """Precision of weights and hidden states. tf32 is fp32 with products in TF32 where the device has it.
    Log-probabilities are always fp32, with tf32 from products in TF32."""
    device_batch_tokens: int | None = setting(None, POSITIVE)
    """Tokens in one forward pass; default: 2,048 on a CPU, 32,768 on an accelerator."""
    max_seq_len: int | None = setting(None, POSITIVE)
    """Default: the model's."""
    limit: int | None = setting(None, POSITIVE)
    """Only the first so many items of each task: a try, not a result."""
    tokenizer: str | None = None
    """Default: the model's own."""
    fsdp: bool = False
    """Shard each model over all ranks instead of keeping it whole on each."""
    all_checkpoints: bool = False
    """Evaluate every checkpoint of each run, as NAME-ba200: a learning curve."""
    redo: bool = False
    """Evaluate again, and replace, what results_folder has already: the tasks asked for of the same model, everything
    of another."""
    environment: dict[str, str] = setting(dict)
    dist_timeout: float = 600.0
    variables: dict[str, Any] = setting(dict)
