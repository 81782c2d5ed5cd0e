"""Evaluation in context while a run trains: the same tasks and scores as `scripts/eval.py`, in the run's own log."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from composer.core import State
from composer.loggers import Logger

from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.config.layout import DataRanks
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.evaluation.harness import DataRank, evaluate
from llmfoundry_lite.evaluation.models import TreeModel
from llmfoundry_lite.evaluation.packing import Separator
from llmfoundry_lite.evaluation.results import Results as TaskResults
from llmfoundry_lite.evaluation.scoring import AnswerTokens, Inputs, Scores
from llmfoundry_lite.training.adapter import LanguageModel


@dataclass(kw_only=True)
class InContext:
    """The tasks that are evaluated during a run. The data ranks divide the items, and end with the same numbers."""

    model: LanguageModel
    tokenizer: Tokenizer
    tasks: Sequence[TaskConfig]
    max_batch_tokens: int
    """Number of tokens that are put through the model at once, at most, on each rank."""
    limit: int | None
    """Number of items of each task that are evaluated; None for all."""
    ranks: DataRanks

    def evaluate(self, state: State, logger: Logger, leave_if_asked: Callable[[State, Logger], None]) -> None:
        """Run the in-context tasks with the model that is being trained, and log their scores as `eval/icl/...`.

        Collective. For each task, the metrics are its score, the score's standard error, the perplexity if the task has
        one, and numbers of the user's own code; `eval/icl/average` is the mean of the tasks. All ranks call
        `leave_if_asked` together before each batch. It raises Preempted if this launch must leave.
        """
        was_training = self.model.training
        self.model.eval()
        device = cast(torch.device, state.device._device)  # not the parameters', which may be offloaded to the host
        results = evaluate(
            ModelInTraining(self.model, device),
            self.tokenizer,
            self.tasks,
            TaskResults(model="", suite="", source=""),
            max_batch_tokens=self.max_batch_tokens,
            limit=self.limit,
            on_progress=lambda task, done, total: leave_if_asked(state, logger),
            data_rank=DataRank(self.ranks.rank, self.ranks.size),
        )
        self.model.train(was_training)

        metrics: dict[str, Any] = {}
        for name, task in results.tasks.items():
            own_metrics = task.get("own_metrics", [])
            for metric in (task["metric"], f"{task['metric']}_stderr", "perplexity", *own_metrics):
                if metric in task:
                    metrics[f"eval/icl/{name}/{metric}"] = task[metric]
        if results.average is not None:
            metrics["eval/icl/average"] = results.average
        logger.log_metrics(metrics)


class ModelInTraining(TreeModel):
    """The model that is being trained, as tasks ask it: sharded, in the run's precision."""

    def __init__(self, model: LanguageModel, device: torch.device):
        """Wrap the model, which computes on `device`. The tasks' texts get the separators of the training data."""
        separator = None
        if model.separator is not None:
            separator = Separator(model.separator, model.separator_begins)
        super().__init__(model.model, device, separator)
        self.autocast = model.precision.autocast

    def score(self, inputs: Inputs, answers: AnswerTokens) -> Scores:
        """Return the log-probabilities of answers, as `TreeModel.score` does, in the run's precision."""
        with self._precision():
            return super().score(inputs, answers)

    def generate(self, context: Sequence[int], max_new_tokens: int) -> Iterator[int]:
        """Yield the tokens that the model writes after `context`, in the run's precision; see `TreeModel.generate`."""
        with self._precision():
            yield from super().generate(context, max_new_tokens)

    def _precision(self) -> AbstractContextManager[Any]:
        """Return the context in which torch casts to the run's precision, if that is left to torch."""
        return torch.autocast(self.device.type, self.autocast) if self.autocast else nullcontext()
