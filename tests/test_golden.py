"""The product still does what the committed golden record says, part by part."""

import json
from pathlib import Path

import pytest

from tests.golden.__main__ import ROOT, record
from tests.golden.compare import compare, describe

RECORD = Path(__file__).parent / "golden" / "record.json"


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("part", ["commands", "errors", "data", "runs", "eval"])
def test_the_product_does_what_the_golden_record_says(part):
    before = json.loads(RECORD.read_text())
    after = record(ROOT, [part])
    recorded = {name for name in before["jobs"] if name.partition("/")[0] == part}

    assert recorded and recorded == set(after["jobs"])
    found = compare(before, after)
    assert not found.different, describe(found)
