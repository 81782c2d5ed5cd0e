"""DCLM's CORE: its tasks, their prompts as text, and its score. The rows are made here in the published form."""

from pathlib import Path
from typing import Any

import pytest

from llmfoundry_lite.config.load_eval import load_eval_config
from llmfoundry_lite.evaluation.gauntlet import run_gauntlet
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.tables import gauntlet_table
from llmfoundry_lite.evaluation.tasks import prepare_task
from scripts.fetch_tasks import CORE_FILES
from tests.helpers.pieces import Pieces
from tests.helpers.results import choice

ROOT = Path(__file__).parents[2]
LANGUAGES = "Given a sentence, select the correct language among the choices\nSentence: "
STORY = (
    "Below is a story followed by a series of related questions.\n\nStory: Ann has a red hat.\n\nFinal question:\n\n"
)
PROMPTS = {
    # task -> its number of examples in CORE, two rows, and the prompt of the first row with the second as its example
    "jeopardy": (
        10,
        {"context": "SCIENCE: It boils at 100 degrees ", "continuation": "water", "category": "science"},
        {"context": "SCIENCE: The nearest star", "continuation": "the Sun", "category": "science"},
        "SCIENCE: The nearest star\nAnswer: the Sun\nSCIENCE: It boils at 100 degrees\nAnswer:| water",
    ),
    "bigbench_qa_wikidata": (
        10,
        {"context": "The country of Riga is", "continuation": "Latvia"},
        {"context": "The capital of Peru is", "continuation": "Lima"},
        "The capital of Peru is Lima\nThe country of Riga is| Latvia",
    ),
    "arc_easy": (
        10,
        {"query": "Question: What falls?", "choices": ["rain", "a hill"], "gold": 0},
        {"query": "Question: What burns?", "choices": ["sand", "wood"], "gold": 1},
        "Question: What burns?\nAnswer: wood\nQuestion: What falls?\nAnswer:| rain",
    ),
    "piqa": (
        10,
        # Rows of PIQA end in a line break.
        {"query": "Question: How do I cool tea?\n", "choices": ["Wait.", "Boil it."], "gold": 0},
        {"query": "Question: How do I cut wood?\n", "choices": ["With a spoon.", "With a saw."], "gold": 1},
        "Question: How do I cut wood?\nAnswer: With a saw.\nQuestion: How do I cool tea?\nAnswer:| Wait.",
    ),
    "commonsense_qa": (
        10,
        {"query": "Question: Who barks?\nChoices:\nA. dog\nB. cat\nAnswer:", "choices": ["A", "B"], "gold": 0},
        {"query": "Question: Who flies?\nChoices:\nA. cow\nB. owl\nAnswer:", "choices": ["A", "B"], "gold": 1},
        "Question: Who flies?\nChoices:\nA. cow\nB. owl\nAnswer: B\n"
        "Question: Who barks?\nChoices:\nA. dog\nB. cat\nAnswer:| A",
    ),
    "hellaswag": (
        10,
        {"query": "Baking: A chef stirs. She", "choices": ["bakes.", "flies."], "gold": 0},
        {"query": "Skating: A man turns. He", "choices": ["sings.", "falls."], "gold": 1},
        "Skating: A man turns. He falls.\nBaking: A chef stirs. She| bakes.",
    ),
    "bigbench_dyck_languages": (
        10,
        {"context": "Complete the sequence. \n\nInput: ( [\nOutput:", "continuation": "] )"},
        {"context": "Complete the sequence. \n\nInput: <\nOutput:", "continuation": ">"},
        "Complete the sequence. \n\nInput: <\nOutput: >\nComplete the sequence. \n\nInput: ( [\nOutput:| ] )",
    ),
    "agi_eval_lsat_ar": (
        3,
        {"query": "Passage: Ann sits left.\nQ: Who?\nChoices:\nA.) Ann\nAnswer:", "choices": ["A", "B"], "gold": 0},
        {"query": "Passage: Bob sits right.\nQ: Who?\nChoices:\nA.) Bob\nAnswer:", "choices": ["A", "B"], "gold": 0},
        "Passage: Bob sits right.\nQ: Who?\nChoices:\nA.) Bob\nAnswer: A\n"
        "Passage: Ann sits left.\nQ: Who?\nChoices:\nA.) Ann\nAnswer:| A",
    ),
    "bigbench_cs_algorithms": (
        10,
        {"context": "Strings: AB BA\nLength of longest common subsequence:", "continuation": "1"},
        {"context": "Strings: AB AB\nLength of longest common subsequence:", "continuation": "2"},
        "Strings: AB AB\nLength of longest common subsequence: 2\n"
        "Strings: AB BA\nLength of longest common subsequence:| 1",
    ),
    "bigbench_operators": (
        10,
        {"context": "op i doubles i.\nop 4 =", "continuation": "8"},
        {"context": "op i halves i.\nop 4 =", "continuation": "2"},
        "op i halves i.\nop 4 = 2\nop i doubles i.\nop 4 =| 8",
    ),
    "bigbench_repeat_copy_logic": (
        10,
        {"context": "repeat with logic:\n\nQ: say tea twice\nA:", "continuation": "tea tea"},
        {"context": "repeat with logic:\n\nQ: say ice once\nA:", "continuation": "ice"},
        "repeat with logic:\n\nQ: say ice once\nA: ice\nrepeat with logic:\n\nQ: say tea twice\nA:| tea tea",
    ),
    "squad": (
        10,
        {"context": "Context: Ann won.\nQuestion: Who won?\nAnswer:", "continuation": "Ann"},
        {"context": "Context: Bob lost.\nQuestion: Who lost?\nAnswer:", "continuation": "Bob"},
        "Context: Bob lost.\nQuestion: Who lost?\nAnswer: Bob\nContext: Ann won.\nQuestion: Who won?\nAnswer:| Ann",
    ),
    "boolq": (
        10,
        {"query": "Passage: It is so.\nQuestion: is it so?", "choices": ["no", "yes"], "gold": 1},
        {"query": "Passage: It was so.\nQuestion: is it so?", "choices": ["no", "yes"], "gold": 0},
        "Passage: It was so.\nQuestion: is it so?\nAnswer: no\nPassage: It is so.\nQuestion: is it so?\nAnswer:| yes",
    ),
    "bigbench_language_identification": (
        10,
        # The rows end in a space, which an example loses and its delimiter puts back.
        {"query": LANGUAGES + "Guten Tag\nA. German\nB. Hdi\nAnswer: ", "choices": ["A", "B"], "gold": 0},
        {"query": LANGUAGES + "Bonjour\nA. Nepali\nB. French\nAnswer: ", "choices": ["A", "B"], "gold": 1},
        f"{LANGUAGES}Bonjour\nA. Nepali\nB. French\nAnswer: B\n{LANGUAGES}Guten Tag\nA. German\nB. Hdi\nAnswer:| A",
    ),
    "copa": (
        0,
        {"query": "The glass fell, therefore", "choices": ["it broke.", "it sang."], "gold": 0},
        {"query": "It rained, because", "choices": ["it was dry.", "clouds came."], "gold": 1},
        "The glass fell, therefore| it broke.",
    ),
    "openbook_qa": (
        0,
        {"query": "Predators eat", "choices": ["grass", "bunnies"], "gold": 1},
        {"query": "Ice is", "choices": ["cold", "hot"], "gold": 0},
        "Predators eat| bunnies",
    ),
    "lambada_openai": (
        0,
        {"context": "He read the sign. \"I don't care about", "continuation": "signs"},
        {"context": "She called Shane. Then came", "continuation": "Shane"},
        "He read the sign. \"I don't care about| signs",
    ),
    "winograd": (
        0,
        {"context_options": ["Tea spilt, for tea", "Tea spilt, for ink"], "continuation": "fell.", "gold": 0},
        {"context_options": ["Ann fed Bob, for Ann", "Ann fed Bob, for Bob"], "continuation": "cooks.", "gold": 0},
        "Tea spilt, for tea| fell.",
    ),
    "winogrande": (
        0,
        {"context_options": ["Ann beat Sue, so Ann", "Ann beat Sue, so Sue"], "continuation": "won.", "gold": 0},
        {"context_options": ["Ann fed Bob, for Ann", "Ann fed Bob, for Bob"], "continuation": "cooks.", "gold": 0},
        "Ann beat Sue, so Ann| won.",
    ),
    "coqa": (
        0,
        {"context": f"{STORY}Question: What has Ann?\nAnswer:", "continuation": "a red hat"},
        {"context": f"{STORY}Question: Who?\nAnswer:", "continuation": "Ann"},
        f"{STORY}Question: What has Ann?\nAnswer:| a red hat",
    ),
}  # fmt: skip
PROMPTS["arc_challenge"] = PROMPTS["arc_easy"]

# Baselines in percent, as DCLM's eval/eval_meta_data.csv has them, and where eval_meta_data_v1.csv has others, those.
BASELINES = {
    "hellaswag/0-shot": 25, "hellaswag/10-shot": 25, "jeopardy/10-shot": 0, "bigbench_qa_wikidata/10-shot": 0,
    "arc_easy/10-shot": 25, "arc_challenge/10-shot": 25, "copa/0-shot": 50, "commonsense_qa/10-shot": 40.3,
    "piqa/10-shot": 50, "openbook_qa/0-shot": 25, "lambada_openai/0-shot": 0, "winograd/0-shot": 50,
    "winogrande/0-shot": 50, "bigbench_dyck_languages/10-shot": 0, "agi_eval_lsat_ar/3-shot": 25,
    "bigbench_cs_algorithms/10-shot": 0, "bigbench_operators/10-shot": 0, "bigbench_repeat_copy_logic/10-shot": 0,
    "squad/10-shot": 0, "coqa/0-shot": 0, "boolq/10-shot": 62, "bigbench_language_identification/10-shot": 25,
}  # fmt: skip
FIRST_BASELINES = BASELINES | {
    "commonsense_qa/10-shot": 20,
    "agi_eval_lsat_ar/3-shot": 20,
    "bigbench_language_identification/10-shot": 9.1,
}


@pytest.fixture(scope="module")
def core():
    return load_eval_config([str(ROOT / "yamls/eval/core.yaml"), "models.ours=runs/mpt-1b"])


def test_core_has_its_22_tasks_and_nothing_is_said_about_them(core):
    names = [f"{task.label}/{shots}-shot" for task in core.tasks for shots in task.num_fewshot]
    assert sorted(names) == sorted(BASELINES)
    assert len(names) == 22
    assert core.notes == []


def test_every_task_of_core_can_be_fetched(core):
    assert [task.dataset_uri for task in core.tasks] == [f"data/eval/{name}.jsonl" for name in CORE_FILES]


@pytest.mark.parametrize("label", PROMPTS)
def test_a_prompt_of_core_is_that_of_dclm(label, core):
    num_fewshot, row, example, expected = PROMPTS[label]
    (task,) = [task for task in core.tasks if task.label == label]
    assert task.num_fewshot[-1] == num_fewshot
    shown = 1 if num_fewshot else 0
    # Texts lose the white space around them when the file is read.
    rows = [
        {key: text.strip() if isinstance(text, str) else text for key, text in row.items()} for row in (row, example)
    ]
    tokenizer: Any = Pieces()
    prepared = prepare_task(task, rows, shown, tokenizer, max_seq_len=200, tokenization=core.config.tokenization)
    item = prepared.items[0]
    request = item.requests[item.gold]
    assert f"{tokenizer.decode(request.context)}|{tokenizer.decode(request.continuation)}" == expected


def test_core_is_the_mean_of_accuracies_above_each_baseline(core):
    accuracies = {name: 0.3 + 0.02 * number for number, name in enumerate(BASELINES)}
    tasks = {name: {**choice([0, 1])[0], "acc_per_token": accuracy} for name, accuracy in accuracies.items()}
    scores = run_gauntlet(core.config.eval_gauntlet, tasks).scores
    for name, baselines in (("CORE_v2", BASELINES), ("CORE_v1", FIRST_BASELINES)):
        centred = [(accuracies[task] - percent / 100) / (1 - percent / 100) for task, percent in baselines.items()]
        assert scores[name].score == pytest.approx(sum(centred) / 22)
    assert list(scores) == ["CORE_v2", "CORE_v1"]  # without a mean of the two


def test_core_is_scored_by_token_whatever_the_tokenizers(core):
    task = {name: choice([0, 1, 1, 1])[0] for name in BASELINES}
    both = [Results(model=name, suite="core", source=name, tokenizer=name, tasks=task) for name in ("one", "other")]
    table = gauntlet_table(core.config.eval_gauntlet, both, core.config.metric)
    assert [*table.columns] == ["CORE_v2", "CORE_v1"]
    assert core.config.metric == "acc_per_token"
