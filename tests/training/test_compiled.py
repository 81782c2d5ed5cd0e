"""Blocks compiled by torch.compile with all that it does: on a CPU it needs a C++ compiler."""

import re
import shutil

import pytest
from composer import Callback
from torch._dynamo.utils import counters

from tests.helpers.launch import train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]


class CacheCounts(Callback):
    def fit_end(self, state, logger):
        found = counters["inductor"]
        print(f"graphs: {found['fxgraph_cache_hit']} from the cache, {found['fxgraph_cache_miss']} compiled")


@pytest.mark.parametrize("precision", ["fp32", pytest.param("amp_bf16", marks=pytest.mark.long)])
def test_compiled_blocks_train_the_same_run_and_a_restart_compiles_nothing_anew(tmp_path, data, precision):
    common = {"max_duration": "6ba", "precision": precision, "callbacks": {f"python:{__name__}:CacheCounts": {}}}
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    losses, counts = {}, {}
    for name, changes in (("eager", {}), ("compiled", {"compile_config": {}}), ("again", {"compile_config": {}})):
        path = write_config(tmp_path / f"{name}.yaml", tiny_config(data, run_name=name, **common, **changes))
        output = train([path], tmp_path, env=cache, timeout_seconds=300).check().output
        losses[name] = values(read_metrics(tmp_path / "runs" / name), "loss/train/total")
        found = re.search(r"graphs: (\d+) from the cache, (\d+) compiled", output)
        assert found, output
        counts[name] = [int(count) for count in found.groups()]
    assert losses["compiled"] == pytest.approx(losses["eager"], abs=1e-5 if precision == "fp32" else 5e-3)
    assert losses["again"] == losses["compiled"]
    assert counts["eager"] == [0, 0]
    compiled, again = counts["compiled"], counts["again"]
    assert compiled[1] > 0 and again == [sum(compiled), 0]
