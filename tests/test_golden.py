"""The product still does what the committed golden record says, part by part."""

import pytest

from tests.golden.__main__ import PARTS, ROOT, record
from tests.golden.compare import compare, describe
from tests.golden.lab import Lab
from tests.golden.owners import CORE, RECORD, owner_of, owners_of


def test_its_jobs_are_those_of_the_cases(tmp_path):
    lab = Lab(ROOT, tmp_path)
    made = {f"{part}/{name}" for part, module in PARTS.items() for name in module.jobs(lab)}
    assert RECORD["jobs"].keys() == made


@pytest.mark.parametrize(
    ("key", "owner"),
    [
        ("commands/help/checkpoint.import", CORE),
        ("commands/help/bench.mfu", "llmfoundry_machines"),
        ("commands/plan/layout.yaml", "llmfoundry_planner"),
        ("runs/full-shard/tensors", CORE),
        ("runs/pipeline/lr", "llmfoundry_layouts"),
        ("runs/zero-1/lr", "llmfoundry_layouts"),
        ("runs/islands/a/lr", "llmfoundry_islands"),
        ("errors/command/watch-nowhere", "llmfoundry_ops"),
        ("errors/damaged/tensor/ls", CORE),
        ("errors/key/islands.name=a", "llmfoundry_islands"),
        ("data/parquet/files", "llmfoundry_formats"),
        ("commands/report/keys", "llmfoundry_ops"),
        ("errors/key/pp_config={pipeline_parallel_degree: 1, blocks: [1, 3]}", "llmfoundry_layouts"),
    ],
)
def test_a_key_belongs_to_the_companion_that_brings_what_it_shows(key, owner):
    assert owner_of(key) == owner


def test_records_differ_by_owner_and_only_in_what_both_have():
    assert owners_of("commands/plan") == {"llmfoundry_planner"} and CORE in owners_of("errors/commands")
    jobs = {"errors/commands": {"command/no-yaml": "a", "command/watch-nowhere": "b", "command/plan-nothing": "c"}}
    others = {"errors/commands": {"command/no-yaml": "A", "command/watch-nowhere": "B"}}
    before, owners = {"machine": {}, "jobs": jobs}, [CORE, "llmfoundry_ops"]
    found = compare(before, {"machine": {}, "owners": owners, "jobs": others})
    assert [line for line in describe(found).splitlines() if line[0] in "#="] == [
        *("# core: 1 keys differ", "== errors/command/no-yaml"),
        *("# llmfoundry_ops: 1 keys differ", "== errors/command/watch-nowhere"),
    ]


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("part", ["commands", "errors", "data", "runs", "eval"])
def test_the_product_does_what_the_golden_record_says(part):
    after = record(ROOT, [part])
    found = compare(RECORD, after)
    assert after["jobs"]
    assert not found.different, describe(found)
