"""Models of the Hub."""

from llmfoundry_lite.convert.to_checkpoint import import_checkpoint
from tests.helpers.importing import folder_of, refusal


def test_a_model_of_the_hub_comes_from_the_cache(tmp_path, monkeypatch):
    import huggingface_hub

    def unreachable(*args, **kwargs):
        raise ConnectionError

    def cached(name, local_files_only=False, **options):
        assert (name, local_files_only) == ("owner/name", True)
        return str(tmp_path / "hf")

    folder_of(tmp_path / "hf")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    imported = import_checkpoint("hf:owner/name", str(tmp_path / "out"))
    assert imported.checkpoint.manifest.scalars["imported_from"]["source"] == "hf:owner/name"
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    words = "hf:owner/name: not in the local cache, and the Hugging Face Hub cannot be reached (ConnectionError)"
    assert refusal("hf:owner/name", tmp_path / "other").startswith(words)
