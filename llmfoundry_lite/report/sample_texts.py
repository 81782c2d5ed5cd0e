"""Samples of text that a run's model writes, as it is now and as it was earlier in the run.

`sample_texts` chooses the prompts and the models, and lets each model continue each prompt. torch is imported only if
the run has exported a model.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.report.page import Facts
from llmfoundry_lite.report.reading import Run

if TYPE_CHECKING:  # a report without samples needs no torch
    from llmfoundry_lite.models.mpt import MPT

NUM_PROMPTS = 3
"""Most prompts that are taken from the validation data."""
PROMPT_TOKENS = 96
"""Tokens at the beginning of a row in which a prompt is looked for."""
PROMPT_WORDS = 3
PROMPT_CHARACTERS = 30
"""Most words and most characters of a prompt that is taken from the validation data."""
MAX_NEW_TOKENS = 80
"""Length of a sample of text after its prompt."""
MAX_EARLIER_PARAMETERS = 50_000_000
"""Largest model whose earlier checkpoints are loaded too, to show how its texts have changed."""
MAX_PROMPT_DATA_BYTES = 256 * 1024**2
"""Largest validation split from which prompts are taken; all of it is read."""


def sample_texts(run: Run, prompts: Sequence[str], *, temperature: float, top_k: int) -> list[Facts]:
    """Let the run's model continue each prompt, as it is now and as it was earlier in the run.

    The run must have exported a model with its tokenizer into huggingface/ on this disk; otherwise there are no
    samples. If the export needs a companion that is not installed, the newest checkpoint is read instead. If there is
    none, a note is added to the run.

    Without `prompts`, words of the validation data are used, or an empty prompt. Returns a dictionary for each prompt:

        {"prompt": "import", "temperature": 0.7, "top_k": 40, "texts": [{"batch": 0, "text": "import qx…"}, …]}

    `texts` has the prompt with its continuation by the model after each batch at which one was available, oldest first.
    """
    export = Path(run.folder.url) / "huggingface"
    if run.folder.path_here is None or not (export / "tokenizer.json").is_file():
        return []

    import torch

    from llmfoundry_lite.evaluation.loaded import generate_text, model_of
    from llmfoundry_lite.evaluation.models import locate_and_load_model

    # Load the final model: the export, or the newest checkpoint with the export's tokenizer.
    cpu = torch.device("cpu")
    try:
        loaded = locate_and_load_model(str(export), device=cpu)
    except ConfigError as missing_companion:
        try:
            loaded = locate_and_load_model(run.folder.url, tokenizer=str(export), device=cpu)
        except DataError:
            run.notes.append(f"no texts: {missing_companion}")
            return []

    # Continue every prompt by each earlier model, and by the final one.
    sampling = {"temperature": temperature, "top_k": top_k}
    prompts = prompts or prompts_from_data(run, loaded.tokenizer) or ("",)
    samples: list[Facts] = [{"prompt": prompt, "texts": [], **sampling} for prompt in prompts]
    last_batch = int(run.log.batch[-1])
    final_model = model_of(loaded)
    for batch, model in [*load_earlier_models(run, final_model), (last_batch, final_model)]:
        for sample in samples:
            prompt = sample["prompt"]
            pieces = generate_text(model, loaded.tokenizer, prompt, MAX_NEW_TOKENS, **sampling)
            sample["texts"].append({"batch": batch, "text": prompt + "".join(pieces)})
    return samples


def prompts_from_data(run: Run, tokenizer: Any) -> list[str]:
    """Take up to NUM_PROMPTS prompts from the run's validation data, one from each third of its rows.

    Each is taken from the third's first row that has words; a third without any gives no prompt. Rows are decoded by
    `tokenizer`. Returns no prompts if the data is not on this disk, is larger than MAX_PROMPT_DATA_BYTES, or cannot be
    read.
    """
    dataset = ((run.config or {}).get("eval_loader") or {}).get("dataset") or {}
    folder = Path(dataset.get("local") or "", dataset.get("split") or "")
    if not folder.is_dir():
        return []
    if sum(file.stat().st_size for file in folder.iterdir()) > MAX_PROMPT_DATA_BYTES:
        return []

    from llmfoundry_lite.data.baselines import read_tokens

    try:
        tokens_nt = read_tokens(folder)  # [samples, tokens]
    except (OSError, ValueError, LookupError):  # no shards of tokens, or damaged ones
        return []

    prompts: list[str] = []
    num_parts = min(NUM_PROMPTS, len(tokens_nt))
    for part_nt in np.array_split(tokens_nt[:, :PROMPT_TOKENS], num_parts):
        for tokens_t in part_nt:
            prompt = extract_prompt(tokenizer.decode(tokens_t[tokens_t >= 0].tolist()))  # without padding
            if prompt:
                prompts.append(prompt)
                break
    return prompts


def extract_prompt(text: str) -> str:
    """Return the first PROMPT_WORDS words of the longest whole line in a row's text; "" if the row is blank.

    A row is cut from a longer text, so its first and last line, and its first and last word, may be incomplete. If no
    line between them has words, the row's own words are taken without the first and the last, or if that leaves none,
    with them. The prompt has at most PROMPT_CHARACTERS characters, because not all languages have spaces.

    "lf.x\n    return a + b\nclass Na" gives "return a +", and "ound the red house quic" gives "the red house".
    """
    whole_lines = text.splitlines()[1:-1]
    longest_line = max(whole_lines, key=lambda line: len(line.split()), default="")
    words = longest_line.split() or text.split()[1:-1] or text.split()

    # Wrapping cuts after the last word that fits, or within the first word if that alone is too long.
    wrapped_lines = wrap(" ".join(words[:PROMPT_WORDS]), PROMPT_CHARACTERS)
    return wrapped_lines[0] if wrapped_lines else ""


def load_earlier_models(run: Run, model: "MPT") -> Iterator[tuple[int, "MPT"]]:
    """Yield (batch, model) of earlier states of a run, to show how its texts have changed.

    These are the initial weights, at batch 0, and the checkpoint whose batch is nearest to a third of the last one.
    Initial weights are computed again, from the seed. They are left out if the run began from another run's weights
    (`load_path`). The checkpoint is left out if there is none before the last batch.

    `model` is the final one. If it has more than MAX_EARLIER_PARAMETERS, nothing is yielded, because loading it again
    takes long.
    """
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if run.config is None or num_parameters > MAX_EARLIER_PARAMETERS:
        return

    import torch

    from llmfoundry_lite.evaluation.loaded import model_of
    from llmfoundry_lite.evaluation.models import find_all_checkpoints, locate_and_load_model, model_config_of
    from llmfoundry_lite.models.flops import count_parameters
    from llmfoundry_lite.models.initialise import initialise_weights
    from llmfoundry_lite.models.mpt import MPT

    # Compute the initial weights.
    checkpoints, _ = find_all_checkpoints(run.folder.url)
    # A checkpoint's configuration says how weights are initialised; an export's does not.
    config = model_config_of(checkpoints[-1]) if checkpoints else model.config
    has_own_initial_weights = not run.config.get("load_path")
    if has_own_initial_weights and count_parameters(config) <= MAX_EARLIER_PARAMETERS:
        initial_model = MPT(config).eval().requires_grad_(False)
        initialise_weights(initial_model, run.config["seed"])
        yield 0, initial_model

    # Load the checkpoint nearest to a third of the run.
    last_batch = int(run.log.batch[-1])
    earlier = [checkpoint for checkpoint in checkpoints if 0 < checkpoint.manifest.timestamp.batch < last_batch]
    if earlier:
        nearest = min(earlier, key=lambda checkpoint: abs(checkpoint.manifest.timestamp.batch - last_batch / 3))
        loaded = locate_and_load_model(nearest.url, device=torch.device("cpu"))
        yield nearest.manifest.timestamp.batch, model_of(loaded)
