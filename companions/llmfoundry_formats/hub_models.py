"""Models of the Hugging Face Hub, downloaded or from its cache: `hf:NAME`."""

from pathlib import Path

from llmfoundry_lite.convert.files import VOCABULARY_FILES
from llmfoundry_lite.convert.to_checkpoint import HUB
from llmfoundry_lite.data import tokenizer as tokenizers
from llmfoundry_lite.errors import CheckpointError, DataError


def fetch_to_import(name: str, trust_pickle: bool) -> Path:
    """Download a repository's files, or take them from the cache without a network. Raises CheckpointError."""
    import huggingface_hub
    from huggingface_hub import errors

    patterns = ["config.json", "*.safetensors", "*.safetensors.index.json", *VOCABULARY_FILES]
    patterns += [*tokenizers.FILES, f"{tokenizers.NAMED_TEMPLATES}*.jinja"]
    try:
        # Asked first because it fails at once without a network, where a download tries for half a minute.
        files = [entry.rfilename for entry in huggingface_hub.HfApi().model_info(name, timeout=20).siblings or []]
        if trust_pickle and not any(file.endswith(".safetensors") for file in files):
            patterns += ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise CheckpointError(f"{HUB}{name}: no such model on the Hugging Face Hub, or not one you may read") from None
    except Exception as error:  # the HTTP client's own errors have no common ancestor that is ours to name
        try:
            return Path(huggingface_hub.snapshot_download(name, local_files_only=True))
        except Exception:
            raise CheckpointError(
                f"{HUB}{name}: not in the local cache, and the Hugging Face Hub cannot be reached "
                f"({type(error).__name__}); give a local folder"
            ) from None


def fetch_to_evaluate(name: str) -> Path:
    """Download what is read here from the Hub, not all that a repository may hold, such as ONNX or GGUF."""
    if Path(name).is_dir():
        return Path(name)
    import huggingface_hub

    def fetch(*weights: str) -> Path:
        patterns = ["*.json", "*.txt", "*.model", *weights]  # configuration and tokenizer
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))

    try:
        folder = fetch("model.safetensors", "model-*.safetensors")
        if not any(folder.glob("model*.safetensors")):  # older models have pickles alone
            folder = fetch("pytorch_model.bin", "pytorch_model-*.bin")
        return folder
    except Exception as error:  # whatever the Hub or the network raise
        raise DataError(f"models: hf:{name} cannot be had: {(str(error) or repr(error)).splitlines()[0]}") from error
