"""`python -m benchmarks layouts`: what it writes and removes, and what it refuses."""

import pytest

from benchmarks import layouts
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.hardware import GIB


@pytest.fixture
def chosen(monkeypatch):
    """Layouts that are all alike, without a search."""
    monkeypatch.setattr(layouts, "predict_worst", lambda *_: layouts.Prediction(1.1, 2, GIB))


def test_layouts_that_are_no_longer_chosen_are_removed_and_no_other_file(tmp_path, chosen):
    for name in ("mpt-7b-512x80gb", "mpt-7b-mine-80gb", "mpt-13b-512x80gb"):
        (tmp_path / f"{name}.yaml").touch()
    layouts.run(models=["mpt-7b"], out=tmp_path)
    written = {f"mpt-7b-8x{size}gb" for size in layouts.OVERLAYS}
    assert {path.stem for path in tmp_path.iterdir()} == {*written, "mpt-7b-mine-80gb", "mpt-13b-512x80gb"}
    assert "# 512 devices, 2 samples at a time: 1.0 GiB; 10 % slower" in (tmp_path / "mpt-7b-8x80gb.yaml").read_text()


def test_a_model_or_a_folder_that_is_none_is_refused_before_the_search(tmp_path):
    with pytest.raises(ConfigError, match=r"^--models: 'mpt-1t' given, expected one of mpt-7b, "):
        layouts.run(models=["mpt-1t"])
    for out in (tmp_path / "absent", tmp_path / "file"):
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=f"^--out: {out} given, expected a folder that exists and is writable$"):
            layouts.run(out=out)
