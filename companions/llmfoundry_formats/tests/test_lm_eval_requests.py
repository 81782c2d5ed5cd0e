"""Answers of our model to lm_eval's requests. lm_eval is not needed: a stand-in replaces its base class."""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.harness import DataRank
from tests.helpers.pieces import Pieces


class TemplateLM:
    """Divides context and answer as lm_eval's does."""

    tok_encode: Any
    _loglikelihood_tokens: Any

    def loglikelihood(self, requests, disable_tqdm=False):
        pairs = [
            (self.tok_encode(context), self.tok_encode(context + answer)) for context, answer in map(args, requests)
        ]
        return self._loglikelihood_tokens([(None, one, both[len(one) :]) for one, both in pairs])


def args(request):
    return request.args


def request(*texts, task="arc_easy", item=7):
    return SimpleNamespace(args=texts, task_name=task, doc_id=item)


@pytest.fixture
def model(monkeypatch):
    unused = dict.fromkeys(("handle_stop_sequences", "get_rolling_token_windows", "make_disjoint_window"))
    names = {"TemplateLM": TemplateLM, "normalize_gen_kwargs": lambda given, most: given, **unused}
    for module in (
        "lm_eval",
        "lm_eval.api",
        "lm_eval.api.model",
        "lm_eval.models",
        "lm_eval.models.utils",
        "lm_eval.utils",
    ):
        stand_in = ModuleType(module)
        vars(stand_in).update(names)
        monkeypatch.setitem(sys.modules, module, stand_in)
    monkeypatch.delitem(sys.modules, "llmfoundry_formats.lm_eval_model", raising=False)
    found = importlib.import_module("llmfoundry_formats.lm_eval_model")
    monkeypatch.delitem(sys.modules, "llmfoundry_formats.lm_eval_model")
    model = found.CheckpointLM.__new__(found.CheckpointLM)
    tokenizer: Any = Pieces()
    model.located, model.model = SimpleNamespace(tokenizer=tokenizer), SimpleNamespace(vocab_size=10**6)
    model._encode, model._beginning, model.data_rank = tokenizer.encode, [], DataRank(0, 1)
    model.max_length, model.max_gen_toks = 6, 4
    return model


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (
            ("One two", "three"),
            "the answer has no token of its own: it is empty, or shares its only token with the context",
        ),
        (("One two", ""), "the answer has no token of its own"),
        (("", ""), "has no text at all"),
        (("One", " a b c d e f g"), "the answer has 7 tokens, and the model reads 6; leave the task out"),
    ],
)
def test_a_bad_request_is_named_by_task_and_item(model, bad, words):
    """Requests of all tasks come in one call: one of them ends the others, too."""
    with pytest.raises(DataError, match=rf"^lm_eval: piqa, item 3:? ?{words}"):
        model.loglikelihood([request("One", " two"), request(*bad, task="piqa", item=3)])


def test_settings_that_sample_are_refused_by_task(model):
    with pytest.raises(DataError, match=r"^lm_eval: gsm8k, item 0: generation_kwargs has temperature 0.7, and answers"):
        model.generate_until([request("One", {"temperature": 0.7}, task="gsm8k", item=0)])
