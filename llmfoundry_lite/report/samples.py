"""Samples of text that a run's model writes, beside what it wrote earlier."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmfoundry_lite.report.reading import Run

if TYPE_CHECKING:
    from llmfoundry_lite.models.mpt import MPT

NUM_PROMPTS, PROMPT_TOKENS, PROMPT_WORDS = 3, 96, 3
LOOK_BACK_PARAMETERS = 50_000_000
"""Parameters of a model, at most, whose earlier texts are shown beside its last."""
MAX_READ_BYTES = 256 * 1024**2
"""Size of validation data, at most, from which prompts are read."""


def samples(run: Run, prompts: Sequence[str], num_tokens: int = 80, **sampling: Any) -> list[dict[str, Any]]:
    """Return what the exported model writes after each prompt, and what it wrote before; nothing if none was exported.

    `sampling`: temperature, top_k.
    """
    folder = Path(run.folder.url) / "huggingface"
    if run.folder.path_here is None or not (folder / "tokenizer.json").is_file():
        return []

    import torch

    from llmfoundry_lite.evaluation.loaded import generate_text, model_of
    from llmfoundry_lite.evaluation.models import load_subject

    subject = load_subject(str(folder), device=torch.device("cpu"))
    prompts = prompts or first_words(run, subject.tokenizer) or ("",)
    found = [{"prompt": prompt, "texts": [], **sampling} for prompt in prompts]
    for batch, model in [*earlier_models(run, model_of(subject)), (int(run.log.batch[-1]), model_of(subject))]:
        for sample in found:
            pieces = generate_text(model, subject.tokenizer, sample["prompt"], num_tokens, **sampling)
            sample["texts"].append({"batch": batch, "text": sample["prompt"] + "".join(pieces)})
    return found


def first_words(run: Run, tokenizer: Any) -> list[str]:
    """Return the first words of a line in each of three rows of the validation data, if that is small and here.

    A row may begin and end within a line, so its first one and its last are left out.
    """
    dataset = ((run.config or {}).get("eval_loader") or {}).get("dataset") or {}
    folder = Path(dataset.get("local") or "", dataset.get("split") or "")
    if not folder.is_dir() or sum(file.stat().st_size for file in folder.iterdir()) > MAX_READ_BYTES:
        return []

    from llmfoundry_lite.data.baselines import read_tokens

    try:
        tokens_nt = read_tokens(folder)
    except (OSError, ValueError, KeyError):  # no shards of tokens, or damaged ones
        return []
    rows = [tokens_nt[len(tokens_nt) * i // NUM_PROMPTS] for i in range(min(NUM_PROMPTS, len(tokens_nt)))]
    texts = [tokenizer.decode(row[:PROMPT_TOKENS].tolist()).splitlines()[1:-1] for row in rows]
    lines = [max(lines, key=lambda line: len(line.split())) for lines in texts if lines]
    return [" ".join(line.split()[:PROMPT_WORDS]) for line in lines if line.strip()]


def earlier_models(run: Run, model: "MPT") -> Iterator[tuple[int, "MPT"]]:
    """Yield the model as it was after fewer batches: its initial weights, and the save nearest a third of the run.

    Nothing for a large model, whose weights would have to be read once more.
    """
    if run.config is None or sum(p.numel() for p in model.parameters()) > LOOK_BACK_PARAMETERS:
        return

    import torch

    from llmfoundry_lite.evaluation.loaded import model_of
    from llmfoundry_lite.evaluation.models import find_all_checkpoints, load_subject
    from llmfoundry_lite.models.initialise import initialise_weights
    from llmfoundry_lite.models.mpt import MPT

    if not run.config.get("load_path"):
        initial = MPT(model.config).eval().requires_grad_(False)
        initialise_weights(initial, run.config["seed"])
        yield 0, initial
    last = int(run.log.batch[-1])
    saves = [save for save in find_all_checkpoints(run.folder.url)[0] if 0 < save.manifest.timestamp.batch < last]
    if saves:
        nearest = min(saves, key=lambda save: abs(save.manifest.timestamp.batch - last / 3))
        subject = load_subject(nearest.url, device=torch.device("cpu"))
        yield nearest.manifest.timestamp.batch, model_of(subject)
