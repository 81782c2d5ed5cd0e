"""the switch benchmark: its statistics, its sabotage, and the whole of it on a tiny run without the launcher."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from benchmarks.switch import switch, tamper
from benchmarks.switch.band import Series, Verdict, judge, leave_one_out, measure_band, measure_deviation, measure_pairs
from benchmarks.switch.workshop import INSTRUCTION_SETS, Cluster, Launch, Workshop, probe
from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors
from llmfoundry_lite.checkpoint.store import open_checkpoint
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from llmfoundry_lite.errors import UserError
from tests.helpers.launch import ROOT, train
from tests.helpers.resave import assert_same_state
from tests.helpers.runs import carry_on, losses, metrics, run, saves
from tests.helpers.tiny import read_metrics, tiny_config, write_data

NUM_BATCHES = 120


def walks(num_runs, seed=0, scale=1e-5):
    """Losses of runs that rounding takes apart, further and further, around one curve."""
    generator = np.random.default_rng(seed)
    curve = 6 + 3 * np.exp(-np.arange(NUM_BATCHES) / 30)
    growing = scale * np.exp(np.arange(NUM_BATCHES) / 25)
    return curve + growing * generator.normal(size=(num_runs, NUM_BATCHES))


def series(losses, digest="d", validation=None):
    count = len(losses)
    return Series(
        losses=list(losses),
        digests=[f"{digest}{i}" for i in range(count)],
        learning_rates=[0.1] * count,
        validation=validation or {count: float(np.mean(losses[-20:]))},
    )


@pytest.mark.parametrize("num_runs", [3, 4, 6, 8])
def test_one_more_run_of_the_same_kind_is_inside_the_band_of_the_others(num_runs):
    found = []
    for seed in range(200):
        *others, one = (series(losses) for losses in walks(num_runs + 1, seed))
        found.append(judge(one, others))
    ends = [verdict.final_deviation / measure_band(walks(num_runs + 1, i)[:-1])[-1] for i, verdict in enumerate(found)]
    assert 0.5 < np.mean(ends) < np.sqrt((num_runs + 1) / (2 * num_runs))
    assert np.mean(np.array(ends) <= 1) > 0.9


def test_a_run_that_left_the_others_is_outside_from_there_on():
    others = walks(3)
    one = others[0].copy()
    one[60:] += 0.01
    verdict = judge(series(one), [series(losses) for losses in others])
    assert verdict.same_data and not verdict.inside and not verdict.is_the_same_run
    assert verdict.first_outside == 61
    assert verdict.largest_ratio > 10
    assert verdict.final_deviation == pytest.approx(0.01 / np.sqrt(2), rel=0.05)


def test_other_data_is_seen_at_its_first_batch_and_another_schedule_too():
    *others, one = (series(losses) for losses in walks(4))
    digests, rates = list(one.digests), list(one.learning_rates)
    digests[30], rates[40] = "other", 0.2
    other = Series(losses=one.losses, digests=digests, learning_rates=rates, validation=one.validation)
    verdict = judge(other, others)
    assert (verdict.first_other_digest, verdict.first_other_learning_rate) == (31, 41)
    assert not verdict.is_the_same_run


def test_a_band_is_no_finer_than_what_a_float32_can_hold():
    same = [series(walks(1)[0])] * 3
    assert judge(same[0], same).is_the_same_run
    assert judge(series(walks(1)[0] + 4e-7), same).is_the_same_run
    assert not judge(series(walks(1)[0] + 2e-6), same).inside


def test_the_formulas_are_those_of_the_docstring():
    losses_rt = np.array([[1.0, 2.0], [1.0, 5.0], [1.0, 2.0]])
    assert measure_band(losses_rt) == pytest.approx([2**-23, 3 / np.sqrt(2)])
    assert measure_deviation([1.0, 4.0], losses_rt) == pytest.approx([0, 1 / np.sqrt(2)])
    assert leave_one_out([series(losses) for losses in losses_rt[:2]]) == []
    assert len(leave_one_out([series(losses) for losses in walks(3)])) == 3


def report_of(controls, **more):
    """Sound runs beside three that span a band, and the controls' runs."""
    alone = [dataclasses.asdict(series(losses)) for losses in walks(3)]
    switching = untouched = dataclasses.asdict(series(walks(3).mean(0)))
    return {
        "exact_sums": False,
        "uninterrupted": dict(zip(("A", "B", "A+1"), alone, strict=True)),
        switch.SWITCHING: switching,
        "controls": {switch.UNTOUCHED: untouched} | controls,
        **more,
    }


@pytest.mark.parametrize(
    ("name", "other_tensors", "words", "passes"),
    [
        (
            switch.ROUNDED,
            [switch.ROUNDED],
            "not told apart by the loss; caught by the digest of the checkpoint's",
            True,
        ),
        (switch.ROUNDED, [], "not told apart by the loss", False),
        ("moments", ["moments"], "not told apart by the loss", False),
        (switch.ROUNDED, [switch.ROUNDED, switch.UNTOUCHED], "not told apart by the loss; caught by the digest", False),
    ],
)
def test_a_control_that_the_loss_misses_is_named_and_fails_unless_its_checkpoint_tells(
    name, other_tensors, words, passes
):
    missed = dataclasses.asdict(series(walks(3)[:2].mean(0)))
    report = report_of({name: missed}, other_tensors=other_tensors)
    switch.evaluate(report)
    assert report["passed"] == passes
    rows = {row["name"]: row["words"] for row in switch.rows_of_verdicts(report, {n: n for n in report["verdicts"]})}
    assert rows[name].startswith(words)
    assert rows[switch.SWITCHING] == rows[switch.UNTOUCHED] == "the same run"


def test_a_control_that_the_loss_tells_apart_needs_no_other_record():
    report = report_of({switch.ROUNDED: dataclasses.asdict(series(walks(1)[0] + 0.1))}, other_tensors=[switch.ROUNDED])
    switch.evaluate(report)
    assert report["passed"]
    assert Verdict(**report["verdicts"][switch.ROUNDED]).words == "caught by loss, batch 1"


def test_pairs_of_one_cluster_are_kept_apart_from_those_of_unlike_ones():
    runs = {name: {"losses": [6.0 + offset] * 4} for name, offset in (("A", 0), ("B", 1), ("A+1", 3))}
    alike, unlike = measure_pairs(runs)
    assert alike == [3] and sorted(unlike) == [1, 2]


def test_the_effect_of_the_release_stands_apart_from_that_of_the_precision():
    offsets = {"ours": 3, "ours-fp32": 0, "fp32": 0.5, "ours-full": 7}
    report = {
        "torch": "2.13.0",
        "clusters": [{"letter": "A", "torch": "2.13.0"}, {"letter": "D", "torch": "2.11.0+cu130"}],
        "changed": {name: {"losses": [6.0 + offset] * 4} for name, offset in offsets.items()},
        "uninterrupted": {"D": {"losses": [6.0 + 5] * 4}},
        "band": [2.0] * 4,
    }
    rows = [(row[1], row[2:]) for row in switch.table_of_changes(report).rows]
    assert rows == [
        ("fp32 of torch 2.13.0 and 2.11.0", ["5.0e-01", "0.25"]),
        ("bf16 of torch 2.13.0 and 2.11.0", ["2.0e+00", "1.00"]),
        ("fp32 and bf16 of torch 2.13.0", ["3.0e+00", "1.50"]),
        ("fp32 and bf16 of torch 2.11.0", ["4.5e+00", "2.25"]),
        ("DEFAULT and FULL in bf16 of torch 2.13.0", ["4.0e+00", "2.00"]),
    ]


@pytest.mark.parametrize("unlike", [switch.SWITCHING, switch.UNTOUCHED, "B", None])
def test_with_exact_sums_every_bit_must_be_the_same(unlike):
    curve = walks(1)[0].astype(np.float32).astype(float)
    same, off, far = (dataclasses.asdict(series(losses)) for losses in (curve, curve.copy(), curve + 0.01))
    off["losses"][30] = float(np.nextafter(np.float32(off["losses"][30]), np.float32(9)))
    of = {name: off if name == unlike else same for name in ("A", "B", switch.SWITCHING, switch.UNTOUCHED)}
    report = {
        "exact_sums": True,
        "uninterrupted": {letter: of[letter] for letter in "AB"},
        switch.SWITCHING: of[switch.SWITCHING],
        "controls": {name: of.get(name, far) for name in switch.CONTROLS},
    }
    switch.evaluate(report)
    assert report["verdicts"][switch.SWITCHING]["largest_ratio"] <= 1, "within the band, by a float's last bit"
    assert report["passed"] == (unlike is None)


# Sabotage -----------------------------------------------------------------------------------------------------------


def nudged(seed):
    generator = torch.Generator().manual_seed(0)
    tied = torch.randn(100, 30, generator=generator)
    tied[0] = 0
    moments = torch.ones(4)
    content = tamper.Content({"model/a": tied.clone(), "optim/a/exp_avg": moments.clone()}, {}, {})
    content.tensors["model/b"] = content.tensors["model/a"]
    tamper.nudge(seed)(content)
    assert torch.equal(content.tensors["optim/a/exp_avg"], moments)
    return tied, content.tensors["model/a"]


def test_a_seed_of_rounding_moves_weights_by_one_fp32_number_at_most():
    before, after = nudged(1)
    down, up = (torch.nextafter(before, torch.tensor(towards)) for towards in (-np.inf, np.inf))
    shares = [(after == there).float().mean() for there in (down, before, up)]
    assert sum(shares) == 1
    assert all(0.3 < share < 0.37 for share in shares)
    assert torch.equal(nudged(1)[1], after) and not torch.equal(nudged(2)[1], after)


def test_weights_rounded_to_bf16_compute_the_same_products_and_lose_the_rest():
    weights = torch.randn(50, generator=torch.Generator().manual_seed(0))
    content = tamper.Content({"model/a": weights.clone(), "optim/a/exp_avg": weights.clone()}, {}, {})
    tamper.round_weights(content)
    assert torch.equal(content.tensors["model/a"].bfloat16(), weights.bfloat16())
    assert not torch.equal(content.tensors["model/a"], weights)
    assert torch.equal(content.tensors["optim/a/exp_avg"], weights)


@pytest.fixture(scope="module")
def four_batches(tmp_path_factory, data):
    """A run of 4 batches that saved at the end, and its configuration of 8."""
    folder = tmp_path_factory.mktemp("run")
    config = tiny_config(data, autoresume=True, max_duration="8ba")
    run(folder, config, "run", 2, stop_after="4ba")
    return folder, config


@pytest.mark.slow
@pytest.mark.multiprocess
def test_published_again_unchanged_a_checkpoint_restores_the_same_state_and_run(tmp_path, four_batches):
    folder, config = four_batches
    there = saves(folder, "run") / "ba4"
    assert tamper.republish(there, saves(tmp_path, "again"), lambda content: None) == "ba4"
    assert_same_state(there, saves(tmp_path, "again") / "ba4")
    carry_on(tmp_path, config, "again", 4, "carried", 2)
    run(folder, config, "run", 2)
    assert losses(tmp_path, "carried") == losses(folder, "run")[4:]


@pytest.mark.multiprocess
def test_a_tampered_checkpoint_is_valid_and_wrong(tmp_path, four_batches):
    folder, _ = four_batches
    there = saves(folder, "run") / "ba4"

    def publish(name, change):
        place = tmp_path / name
        tamper.republish(there, place, change)
        verify_checkpoint(open_checkpoint(place / "ba4"))
        return open_checkpoint(place / "ba4").manifest, load_full_tensors(place / "ba4", prefix="")

    _, tensors = publish("moments", tamper.zero_moments)
    assert not any(tensor.any() for name, tensor in tensors.items() if name.startswith("optim/"))
    assert all(tensor.any() for name, tensor in tensors.items() if name.startswith("model/") and "weight" in name)
    manifest, _ = publish("steps", tamper.reset_steps)
    assert manifest.optimizer is not None
    assert {slots["step"]["value"] for slots in manifest.optimizer["state"].values()} == {0.0}
    manifest, _ = publish("skipped", tamper.move_data(1))
    assert manifest.scalars["data"]["sample_in_epoch"] == 40
    assert manifest.scalars["timestamp"]["sample_in_epoch"] == 32


@pytest.mark.multiprocess
def test_a_run_moved_to_batch_10000_trains_that_batch(tmp_path, four_batches):
    folder, config = four_batches
    name = tamper.republish(saves(folder, "run") / "ba4", saves(tmp_path, "late"), tamper.move_run(10_000, 62, 32))
    assert name == "ba10000"
    run(tmp_path, config, "late", max_duration="20000ba", stop_after="1ba")
    (record,) = metrics(tmp_path, "late")
    assert (record["batch"], record["time/epoch"]) == (10_001, 161)
    assert record["time/sample"] == 80_008


# The whole ----------------------------------------------------------------------------------------------------------


def forked(shop: Workshop, name, cluster, *arguments):
    """`Workshop.launch` without the launcher and its imports; instruction sets need a fresh process, so none here."""
    train(
        ["run.yaml", f"{cluster.letter}.yaml", f"run_name={name}", *arguments], shop.folder, cluster.num_ranks
    ).check()
    batches = [record["batch"] for record in read_metrics(shop.run_folder(name))]
    return Launch(
        cluster=cluster.letter,
        first_batch=batches[0],
        last_batch=batches[-1],
        seconds_to_restore=None,
        seconds_to_first_batch=1.0,
        seconds=1.0,
        exit_code=0,
    )


@pytest.mark.long
@pytest.mark.multiprocess
def test_the_bench_passes_a_sound_run_and_catches_every_control(tmp_path, monkeypatch):
    data = write_data(tmp_path / "data", num_train=600, seq_len=switch.SEQ_LEN)
    (data / "summary.json").write_text("{}")
    monkeypatch.setattr(Workshop, "launch", forked)
    shapes = [("A", 2, 4, "FULL_SHARD"), ("B", 1, 16, "NO_SHARD"), ("C", 2, 8, "SHARD_GRAD_OP")]
    clusters = [
        Cluster(
            letter=letter,
            num_ranks=num_ranks,
            overlay={
                "device_train_microbatch_size": microbatch,
                "model": {"attn_config": {"attn_impl": "reference" if letter == "B" else "sdpa"}},
                "fsdp_config": {"sharding_strategy": sharding},
            },
        )
        for letter, num_ranks, microbatch, sharding in shapes
    ]
    out = tmp_path / "out"
    report = switch.run(data=data, num_batches=24, every=6, out=out, keep=tmp_path / "keep", clusters=clusters)
    verdicts = report["verdicts"]
    assert report["passed"], verdicts
    assert verdicts["skipped"]["first_other_digest"] == verdicts["repeated"]["first_other_digest"] == 13
    for name in ("moments", "schedule", "steps"):
        assert verdicts[name]["first_other_digest"] is None
        assert verdicts[name]["largest_ratio"] > 2
    assert [one["after_batch"] for one in report["resumes"]] == [6, 10_000, 1_000_000]
    again = json.loads((out / "switch.json").read_text())
    switch.evaluate(again)
    assert again["verdicts"] == json.loads(json.dumps(verdicts))
    assert (out / "switch.png").stat().st_size > 10_000
    assert "caught by digest, batch 13" in (out / "switch.md").read_text()


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_leg_goes_through_the_real_launcher_and_its_overlay_reaches_torch(tmp_path, data):
    overlay = {"environment": {**INSTRUCTION_SETS["avx2"], "OMP_NUM_THREADS": "1"}, "device_train_microbatch_size": 2}
    cluster = Cluster(letter="A", num_ranks=2, overlay=overlay)
    assert probe(cluster).isa in ("AVX2", "DEFAULT")
    shop = Workshop(folder=tmp_path, config=tiny_config(data, autoresume=True), clusters=[cluster])
    shop.prepare()
    launch = shop.launch("run", cluster, "stop_after=4ba")
    assert (launch.first_batch, launch.last_batch, launch.exit_code) == (1, 4, 0)
    assert launch.seconds_to_restore is None
    launch = shop.launch("run", cluster)
    assert (launch.first_batch, launch.last_batch) == (5, 10)
    assert launch.seconds_to_restore is not None and launch.seconds_to_first_batch is not None
    assert 0 < launch.seconds_to_restore < launch.seconds_to_first_batch < launch.seconds
    with pytest.raises(UserError, match="max_duration"):
        shop.launch("other", cluster, "max_duration=soon")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_batches": 20, "every": 10}, "need two switches"),
        ({"only": ["A", "X"]}, "--only: 'X' given, expected one of A, B, C, D"),
        ({"only": ["A"]}, "--only: one cluster given, expected at least two"),
    ],
)
def test_a_bench_without_two_switches_between_two_clusters_is_refused(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        switch.run(data=tmp_path, **options)


def test_the_page_in_bf16_says_how_many_sound_runs_leave_the_band_of_the_others():
    report = json.loads((ROOT / "benchmarks/results/switch-bf16.json").read_text())
    page = (ROOT / "docs/measurements/switch-bf16.md").read_text().splitlines()
    notes = switch.notes_of(report)
    assert {f"- {note}" for note in notes} <= set(page)
    assert any(note.endswith("leaves the band of the others: 2 of 8 do") for note in notes)
