"""The product still does what the committed golden record says, part by part."""

import json
from pathlib import Path

import pytest

from tests.golden.__main__ import PARTS, ROOT, record
from tests.golden.compare import compare, describe
from tests.golden.lab import Lab

RECORD = Path(__file__).parent / "golden" / "record.json"


def test_its_jobs_are_those_of_the_cases(tmp_path):
    lab = Lab(ROOT, tmp_path)
    made = {f"{part}/{name}" for part, module in PARTS.items() for name in module.jobs(lab)}
    assert json.loads(RECORD.read_text())["jobs"].keys() == made


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("part", ["commands", "errors", "data", "runs", "eval"])
def test_the_product_does_what_the_golden_record_says(part):
    before = json.loads(RECORD.read_text())
    after = record(ROOT, [part])
    found = compare(before, after)
    assert after["jobs"]
    assert not found.different, describe(found)
