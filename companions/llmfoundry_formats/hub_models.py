"""Models of the Hugging Face Hub, `hf:NAME`: fetched into its cache, to be imported or evaluated."""

from pathlib import Path

from llmfoundry_lite.convert.files import VOCABULARY_FILES
from llmfoundry_lite.convert.to_checkpoint import HUB
from llmfoundry_lite.data import tokenizer_files
from llmfoundry_lite.errors import CheckpointError, DataError

LISTING_TIMEOUT_SECONDS = 20


def fetch_to_import(name: str, trust_pickle: bool) -> Path:
    """Download a model's repository, or take it from the cache if there is no network. Returns the local folder.

    Only the files of a model in safetensors and its tokenizer are downloaded. If the user trusts pickles and the
    repository has no safetensors, `pytorch_model.bin` is downloaded too. Raises CheckpointError.
    """
    import huggingface_hub
    from huggingface_hub import errors

    patterns = ["config.json", "*.safetensors", "*.safetensors.index.json", *VOCABULARY_FILES]
    patterns += [*tokenizer_files.FILES, f"{tokenizer_files.NAMED_TEMPLATES}*.jinja"]
    try:
        # Listed first because this fails at once without a network, where a download tries for half a minute.
        model_info = huggingface_hub.HfApi().model_info(name, timeout=LISTING_TIMEOUT_SECONDS)
        files = [entry.rfilename for entry in model_info.siblings or []]
        if trust_pickle and not any(file.endswith(".safetensors") for file in files):
            patterns += ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise CheckpointError(f"{HUB}{name}: no such model on the Hugging Face Hub, or not one you may read") from None
    except Exception as error:  # errors of the network have no common base class that huggingface_hub exports
        try:
            return Path(huggingface_hub.snapshot_download(name, local_files_only=True))
        except Exception:
            raise CheckpointError(
                f"{HUB}{name}: not in the local cache, and the Hugging Face Hub cannot be reached "
                f"({type(error).__name__}); give a local folder"
            ) from None


def fetch_to_evaluate(name: str, *, with_weights: bool = True) -> Path:
    """Return the local folder of a model: `name` itself if it is a folder, or what is downloaded from the Hub.

    Only files that the evaluation reads are downloaded, and not the same weights as ONNX or GGUF. Without weights, only
    the configuration and the tokenizer are. Raises DataError.
    """
    if Path(name).is_dir():
        return Path(name)
    import huggingface_hub

    def fetch(*weight_patterns: str) -> Path:
        patterns = ["*.json", "*.txt", "*.model", *weight_patterns]  # configuration and tokenizer come first
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))

    try:
        if not with_weights:
            return fetch()
        folder = fetch("model.safetensors", "model-*.safetensors")
        if not any(folder.glob("model*.safetensors")):  # older models have only pickles
            folder = fetch("pytorch_model.bin", "pytorch_model-*.bin")
        return folder
    except Exception as error:  # whatever the Hub or the network raise
        reason = str(error) or repr(error)
        raise DataError(f"models: hf:{name} cannot be had: {reason.splitlines()[0]}") from error
