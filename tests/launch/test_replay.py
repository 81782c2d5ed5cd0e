"""A replay without its training: what is chosen, what its ranks are given, and what their findings come to."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml

from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.cli.main import run as run_command
from llmfoundry_lite.config.parameter_groups import refuse_slow_expressions
from llmfoundry_lite.config.replayed import find_code
from llmfoundry_lite.data.tokenizer import load_tokenizer, train_tokenizer
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.launch import replay
from llmfoundry_lite.launch.replay import adapt_advice, compare_replay, plan_replay, write_replay
from llmfoundry_lite.report import reading
from tests.helpers.recorded import HERE, record_of, rewrite, write_run
from tests.helpers.tiny import tiny_config, write_data

DATA = "train_loader.dataset"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"), num_train=40, num_val=8)


@pytest.fixture(scope="module")
def template(tmp_path_factory, data):
    return write_run(tmp_path_factory.mktemp("template") / "run", tiny_config(data), (2, 4, 6))


@pytest.fixture
def run(tmp_path, data, template):
    """A function that records a run of 6 batches of 8 samples in microbatches of 2, saved at 2, 4 and 6."""

    def record(saves=(2, 4, 6), **changes):
        manifest = {name: changes.pop(name) for name in ("records", "segments", "fingerprints") if name in changes}
        config = tiny_config(data, **{"device_train_microbatch_size": 8, "exact_sums": True, **changes})
        return write_run(tmp_path / f"run{len([*tmp_path.glob('run*')])}", config, saves, like=template, **manifest)

    return record


def plan(where, states=None):
    return plan_replay(str(where), states)


# ------------------------------------------------------------------------------------------------------ what to train


@pytest.mark.parametrize(
    ("states", "start", "first", "last"),
    [
        (None, 4, 5, 6),
        ("ba2..ba6", 2, 3, 6),
        ("ba3..ba5", 2, 3, 5),
        ("ba0..ba2", None, 1, 2),
        ("ba1..ba2", None, 1, 2),
    ],
)
def test_it_starts_from_the_save_at_or_before_the_first_state(run, states, start, first, last):
    its = plan(run(), states)
    assert (its.start and its.start.manifest.timestamp.batch) == start
    assert (its.first_batch, its.last_batch, [*its.records]) == (first, last, [*range(first, last + 1)])


def test_without_saves_it_starts_from_the_seed_and_by_default_ends_with_the_log(run):
    its = plan(run(saves=()), None)
    assert (its.start, its.first_batch, its.last_batch, its.segments) == (None, 1, 6, ())


@pytest.mark.parametrize("states", ["ba4..ba4", "ba6..ba2", "4..6", "ba4", "ba4..ba6..ba8", "ba-1..ba2"])
def test_other_than_two_states_are_refused(run, states):
    with pytest.raises(ConfigError, match=r"given, expected two states of the run, the earlier first: ba100\.\.ba110"):
        plan(run(saves=(2,)), states)


def test_a_batch_without_a_loss_is_named(run):
    with pytest.raises(DataError, match=r"metrics\.jsonl has no loss of batch 7; it ends with 6"):
        plan(run(), "ba4..ba9")
    records = [record_of(batch, **{"loss/train/total": None} if batch == 5 else {}) for batch in range(1, 7)]
    with pytest.raises(DataError, match="no loss of batch 5"):
        plan(run(records=records), "ba4..ba6")


def test_a_log_of_absurd_batches_is_answered_at_once(run):
    where = run(saves=(), records=[*map(record_of, (1, 2)), record_of(2**52)])
    with pytest.raises(DataError, match=f"no loss of batch 3; it ends with {2**52}"):
        plan(where)


def test_digests_are_those_of_manifests_and_of_the_log(run):
    records = [record_of(batch, **{"state/digest": f"s{batch}", "state/batch": batch}) for batch in range(1, 7)]
    where = run(records=records)
    for batch, digest in ((2, "m2"), (4, None), (6, "m6")):
        rewrite(where, batch, state_digest=digest)
    digests = plan(where, "ba2..ba6").digests
    assert digests == {1: "s1", 2: "m2", 3: "s3", 4: "s4", 5: "s5", 6: "m6"}


def test_the_configuration_is_that_of_the_first_save_after_the_start(run):
    where = run()
    model = plan(where).config["model"]
    rewrite(where, 4, config={"seed": 4, "model": model})
    rewrite(where, 6, config={"seed": 6, "model": model})
    assert plan(where, "ba2..ba6").config["seed"] == 4
    assert plan(where, "ba4..ba6").config["seed"] == 6
    rewrite(where, 6, config=None)
    with pytest.raises(DataError, match="the run's configuration is missing"):
        plan(where, "ba4..ba6")


def test_segments_are_those_that_trained_the_batches_by_the_first_save_after_them(run):
    parts = [replace(HERE, first_batch=a, last_batch=b, world_size=n) for a, b, n in ((1, 2, 1), (3, 3, 2), (4, 6, 3))]
    where = run(segments=tuple(parts))
    assert [one.world_size for one in plan(where, "ba2..ba4").segments] == [2, 3]
    assert [one.world_size for one in plan(where, "ba4..ba6").segments] == [3]
    rewrite(where, 6, segments=(replace(HERE, world_size=9),))
    assert [one.world_size for one in plan(where, "ba2..ba4").segments] == [2, 3]


def test_a_change_within_the_batches_is_refused_and_one_before_them_is_not(run):
    parts = [HERE, replace(HERE, first_batch=5, changes={"optimizer.lr": [0.1, 0.2]})]
    where = run(segments=(replace(parts[0], last_batch=4), parts[1]))
    with pytest.raises(ConfigError, match=r"optimizer\.lr changed after ba4; replay ba2\.\.ba4 and ba4\.\.ba6"):
        plan(where, "ba2..ba6")
    assert len(plan(where, "ba4..ba6").segments) == 1


def test_batches_of_islands_apart_are_refused(run):
    where = run(segments=(replace(HERE, sync="local steps, every 4"),))
    with pytest.raises(ConfigError, match="with local steps, every 4, which one world does not repeat"):
        plan(where, None)


def test_a_save_folder_that_is_not_resolved_is_asked_for(run):
    with pytest.raises(
        ConfigError, match=r"its checkpoints are in s3://\$\{oc\.env:B\}, which is not resolved here; give"
    ):
        plan(run(save_folder="s3://${oc.env:B}", saves=()), None)


def test_a_save_folder_behind_a_url_is_opened_only_when_allowed(run, monkeypatch):
    where = run(save_folder="s3://bucket/run", saves=())
    with pytest.raises(
        ConfigError, match=r"s3://bucket/run, which is not opened unasked; give that folder instead, or"
    ):
        plan(where, "ba1..ba2")
    opened = []
    monkeypatch.setattr(reading, "find_newest_checkpoint", lambda folder, notes: opened.append(folder))
    monkeypatch.setattr(replay.CheckpointStore, "candidates", lambda store: [])
    monkeypatch.setattr(replay, "CheckpointStore", lambda folder: CheckpointStore(where / "checkpoints"))
    plan_replay(str(where), "ba1..ba2", uses_recorded_remote=True)
    assert opened == ["s3://bucket/run"]


def test_a_folder_of_checkpoints_is_read_itself_and_not_the_recorded_one(run):
    for recorded in ("s3://bucket/run", "${oc.env:SCRATCH}/run", None):
        where = run()
        model = plan(where).config["model"]
        for batch in (2, 4, 6):
            rewrite(where, batch, config={"save_folder": recorded, "model": model})
        assert reading.read_recorded(str(where), ()).saved_in == str(where / "checkpoints")
        assert plan(where, "ba4..ba6").start.url == str(where / "checkpoints/ba4")


# ------------------------------------------------------------------------------------------- what the ranks are given


def written(where, folder, num_ranks=1, changes=(), states=None, **options):
    """The configuration of the ranks."""
    path = write_replay(plan(where, states), folder / "out", num_ranks, changes, **options)
    return yaml.safe_load(Path(path).read_text())


def test_a_replay_saves_nothing_and_leaves_out_what_trains_nothing(run, tmp_path, data):
    callbacks = {"extra": {"python:a:B": {}}, "profiler": {"folder": "/x"}}
    left_out = {"callbacks": callbacks, "loggers": {"wandb": {}}, "icl_tasks": ["x"], "eval_interval": "1ba"}
    left_out |= {"max_wall_time": "1h", "save_folder": None, "load_path": "/x", "autoresume": True}
    values = written(run(**left_out), tmp_path, states="ba3..ba5")
    assert values["run_folder"] == str(tmp_path / "out") and values["save_folder"] is None
    assert values["load_path"].endswith("/ba2") and not values["autoresume"] and not values["export_at_end"]
    assert (values["stop_after"], values["digest_interval"], values["eval_interval"]) == ("3ba", "1ba", 0)
    assert values["callbacks"]["extra"] == {} and values["callbacks"]["profiler"] is None
    assert values["loggers"] == {"wandb": None, "tensorboard": None, "extra": {}} and not values["icl_tasks"]
    assert values["eval_loader"] is None and values["max_wall_time"] is None and values["environment"] == {}
    assert (values["optimizer"]["lr"], values["seed"], values["precision"]) == (0.01, 17, "fp32")
    dataset = values["train_loader"]["dataset"]
    assert (dataset["local"], dataset["remote"], dataset["split"]) == (str(data), None, "train")
    assert json.loads((tmp_path / "out/recorded-segments.json").read_text())[0]["world_size"] == 1


def test_code_is_taken_along_where_it_is_trusted(run, tmp_path):
    callbacks = {"extra": {"python:a:B": {"x": 1}}}
    values = written(run(callbacks=callbacks, environment={"A": "1"}), tmp_path, trusts_code=True)
    assert values["callbacks"]["extra"] == callbacks["extra"] and values["environment"] == {"A": "1"}


def test_an_environment_of_anything_is_refused_in_a_line(run, tmp_path):
    where = run()
    for number, odd in enumerate((5, "LD_PRELOAD", [["a"]])):
        rewrite(where, 6, config=tiny_config(tmp_path, environment=odd))
        with pytest.raises(ConfigError, match=r"its configuration: environment: .* given"):
            written(where, tmp_path / str(number))


def test_recorded_expressions_that_never_end_are_refused(run, tmp_path, monkeypatch):
    in_short_time = partial(refuse_slow_expressions, max_seconds=0.2)
    monkeypatch.setattr("llmfoundry_lite.launch.replay.refuse_slow_expressions", in_short_time)
    where = run(optimizer={"name": "adamw", "lr": 0.1, "param_groups": [{"param_str_match": "(.*)*!"}]})
    with pytest.raises(ConfigError, match=r"takes more than 0.2 seconds; a run with such expressions is not replayed"):
        written(where, tmp_path)


def test_from_the_seed_nothing_is_loaded(run, tmp_path):
    assert written(run(load_path="/x"), tmp_path, states="ba0..ba2")["load_path"] is None


def test_other_ranks_divide_no_layer_and_share_the_model_by_all(run, tmp_path):
    fsdp = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 2}
    layout = {"fsdp_config": fsdp, "tp_config": {"tensor_parallel_degree": 2}, "exact_sums": False}
    where = run(segments=(replace(HERE, world_size=4),), **layout)
    here = written(where, tmp_path / "a", 2)
    assert (here["tp_config"], here["fsdp_config"]["sharding_strategy"]) == (None, "FULL_SHARD")
    assert here["fsdp_config"]["data_parallel_shard_degree"] is None
    same = written(where, tmp_path / "b", 4)
    assert (
        same["tp_config"]["tensor_parallel_degree"] == 2 and same["fsdp_config"]["sharding_strategy"] == "HYBRID_SHARD"
    )


def test_microbatches_are_the_runs_or_smaller_where_no_exact_sums_need_them(run, tmp_path):
    for number, (exact, size, num_ranks, expected) in enumerate(
        [(1, 2, 2, 2), (0, 8, 1, 8), (0, 8, 4, 2), (0, 2, 4, 2)]
    ):
        where = run(exact_sums=bool(exact), segments=(replace(HERE, device_train_microbatch_size=size),))
        assert written(where, tmp_path / str(number), num_ranks)["device_train_microbatch_size"] == expected
    where = run(exact_sums=False)
    assert written(where, tmp_path / "x", 1, ["device_train_microbatch_size=1"])["device_train_microbatch_size"] == 1


def test_microbatches_are_shared_by_data_ranks_and_not_by_all(run, tmp_path):
    parts = (replace(HERE, world_size=4, device_train_microbatch_size=8),)
    where = run(exact_sums=False, segments=parts, tp_config={"tensor_parallel_degree": 4})
    assert written(where, tmp_path / "a", 4)["device_train_microbatch_size"] == 8
    assert written(where, tmp_path / "b", 2)["device_train_microbatch_size"] == 4


@pytest.mark.parametrize(
    ("changes", "num_ranks", "words"),
    [
        (["optimizer.lr=1"], 1, r"optimizer\.lr 0\.01 -> 1\.0 would be another run; leave it out"),
        (["optimizer={lr: 1}"], 1, r"optimizer\.lr 0\.01 -> 1\.0 would be another run"),
        (["scheduler.alpha_f=0"], 1, r"scheduler\.alpha_f 0\.1 -> 0\.0 would be another run"),
        (["exact_sums=false"], 1, r"exact_sums true -> false would be another run"),
        (
            ["device_train_microbatch_size=4"],
            1,
            r"device_train_microbatch_size 2 -> 4 would be another run, for exact_su",
        ),
        (["run_folder=x"], 1, "run_folder is set by the replay itself; leave it out"),
        (["load_path=x"], 1, "load_path is set by the replay itself"),
        (["deterministic=false"], 1, "deterministic is set by the replay itself"),
        (
            [],
            3,
            r"-n 3: the run's batches of 8 cannot be shared evenly in microbatches of 2 samples, .* start 1, 2 or 4",
        ),
        ([], 8, r"-n 8: .* start 1, 2 or 4 ranks$"),
    ],
)
def test_another_run_is_refused_and_nothing_refused_is_suggested(run, tmp_path, changes, num_ranks, words):
    with pytest.raises(ConfigError, match=f"^replay: {words}"):
        written(run(), tmp_path, num_ranks, changes)


def test_ranks_that_cannot_share_a_batch_are_refused_without_advice_on_the_batch(run, tmp_path):
    with pytest.raises(
        ConfigError, match=r"^replay: -n 3: .* of 8 cannot be shared evenly in samples; start 1, 2, 4 or 8"
    ):
        written(run(exact_sums=False), tmp_path, 3)


def test_a_choice_of_hardwares_is_free(run, tmp_path):
    values = written(run(), tmp_path, 1, ["precision=amp_bf16", "train_loader.num_workers=2", "optimizer.lr=0.01"])
    assert values["precision"] == "amp_bf16" and values["train_loader"]["num_workers"] == 2


def test_variables_and_credentials_that_the_user_gives_reach_the_ranks(run, tmp_path, monkeypatch):
    """The record would have them masked, or as they were written."""
    monkeypatch.setenv("PLACE", "s3://me:secret@there")
    values = written(run(), tmp_path, 1, [f"{DATA}.remote=${{oc.env:PLACE}}/x", "tokenizer.name=${oc.env:PLACE}"])
    assert values["train_loader"]["dataset"]["remote"] == "s3://me:secret@there/x"
    assert values["tokenizer"]["name"] == "s3://me:secret@there"


def test_a_mistake_in_a_recorded_configuration_names_the_run(run, tmp_path):
    where = run()
    rewrite(where, 6, config=tiny_config(tmp_path, optimizer__lr=-1))
    with pytest.raises(ConfigError, match=r"^.*run0: its configuration: optimizer\.lr: -1\.0 given"):
        written(where, tmp_path)


def test_what_the_user_gives_reaches_the_ranks_with_variables_and_credentials(run, tmp_path, data, monkeypatch):
    place, url = f"{DATA}.local={tmp_path}", "sftp://me:pw@host/x"
    monkeypatch.setenv("REMOTE", url)
    monkeypatch.setenv("TOKENIZER", str(tmp_path))
    changes = ["tokenizer.name=${oc.env:TOKENIZER}", place, f"{DATA}.remote=${{oc.env:REMOTE}}"]
    values = written(run(), tmp_path / "a", 1, changes)
    assert values["tokenizer"]["name"] == str(tmp_path) and values["train_loader"]["dataset"]["remote"] == url
    values = written(run(), tmp_path / "b", 1, [place, f"{DATA}.remote={url}"])
    assert values["train_loader"]["dataset"]["remote"] == url


def test_another_tokenizer_is_named(run, tmp_path):
    train_tokenizer(["the cat sat"] * 3, 300).save(tmp_path / "tokenizer")
    ours = load_tokenizer(tmp_path / "tokenizer").fingerprint
    place = f"tokenizer.name={tmp_path / 'tokenizer'}"
    with pytest.raises(ConfigError, match=r"tokenizer is not the run's tokenizer \(sha256:\w+ here, abc there\); give"):
        written(run(fingerprints={"tokenizer": "abc"}), tmp_path / "a", 1, [place])
    assert written(run(fingerprints={"tokenizer": ours}), tmp_path / "b", 1, [place])


def test_advice_to_change_the_run_becomes_advice_to_give_its_data():
    error = adapt_advice(DataError("key: samples have 32 tokens, max_seq_len is 64; set max_seq_len to 32"))
    own = "train_loader.dataset.local=FOLDER tokenizer.name=FOLDER"
    assert str(error) == (
        "replay: key: samples have 32 tokens, max_seq_len is 64; give the data and the tokenizer that the run was "
        f"trained with: {own}"
    )
    assert "give the data" in str(adapt_advice(ConfigError("model.vocab_size: 9 is less than 10; set it to 128")))
    other = ConfigError("dist_timeout: 0 given, expected more; give more")
    assert adapt_advice(other) is other


# ---------------------------------------------------------------------------------------------------- what came of it


def found(its, folder, differences=(), digest=None, deterministic=None, **records):
    """The outcome of ranks that find what the run recorded, but for `records`: batch5={quantity: value}."""
    folder.mkdir()
    start = its.start.manifest.state_digest if its.start else "seed"
    begun = {"digest": digest or start, "differences": list(differences), "deterministic": deterministic}
    (folder / "begun.json").write_text(json.dumps(begun))
    lines = [
        {**record, "state/digest": its.digests.get(batch), **records.get(f"batch{batch}", {})}
        for batch, record in its.records.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return compare_replay(its, folder)


def test_equal_in_every_bit_counts_each_quantity(run, tmp_path):
    outcome = found(plan(run(), "ba2..ba6"), tmp_path / "out", ["devices 1 -> 2"])
    assert outcome.is_equal and outcome.text == (
        "bit-equal: 4 of data/digest, 4 of lr, 4 of loss/train/total, 4 of grad_norm, 2 of state/digest; beside the "
        "run: devices 1 -> 2"
    )


@pytest.mark.parametrize(
    ("changes", "differences", "words"),
    [
        ({"loss/train/total": 3.0}, [], "does not fit: batch 5: loss/train/total is 3.0 here and 3.375 in the run$"),
        (
            {"loss/train/total": 3.37501},
            ["torch 1 -> 2"],
            r"within a band: loss/train/total within 3\.0e-06; torch 1 -> 2$",
        ),
        (
            {"loss/train/total": 3.3755},
            ["torch 1 -> 2"],
            r"does not fit: batch 5: loss/train/total is .*; beside .*torch",
        ),
        ({"loss/train/total": 3.37501}, ["devices 1 -> 2"], "does not fit: .*; beside the run: devices 1 -> 2$"),
        ({"loss/train/total": 3.37501}, ["sharding A -> B", "shard degree 1 -> 2", "pipeline a -> b"], "does not fit"),
        ({"grad_norm": 6.005}, ["torch 1 -> 2"], "within a band: grad_norm within 8.3e-04"),
        ({"grad_norm": 6.007}, ["torch 1 -> 2"], "does not fit: batch 5: grad_norm"),
        ({"lr": 0.01 * (1 + 5e-10)}, ["torch 1 -> 2"], "within a band: lr within 5.0e-10"),
        ({"lr": 0.01 * (1 + 5e-9)}, ["torch 1 -> 2"], "does not fit: batch 5: lr"),
        ({"data/digest": "x"}, ["torch 1 -> 2"], "does not fit: batch 5: data/digest is x here and d5 in the run"),
        ({"state/digest": "x"}, ["torch 1 -> 2"], "bit-equal: "),
        ({"loss/train/total": None}, ["torch 1 -> 2"], "does not fit: batch 5: loss/train/total is None here"),
        ({"loss/train/total": float("nan")}, ["torch 1 -> 2"], "does not fit: batch 5: loss/train/total is nan here"),
        ({"grad_norm": 9.0, "data/digest": "x"}, [], "does not fit: batch 5: data/digest"),
    ],
)
def test_a_difference_is_explained_or_it_does_not_fit(run, tmp_path, changes, differences, words):
    outcome = found(plan(run(), "ba4..ba6"), tmp_path / "out", differences, batch5=changes)
    assert outcome.is_equal == words.startswith("bit-equal")
    assert re.match(words, outcome.text), outcome.text


def test_kernels_whose_digits_vary_explain_a_difference_unless_the_run_had_none(run, tmp_path):
    """A GPU trained the run with kernels of torch's own choice; the replay takes deterministic ones."""
    changes = {"batch5": {"loss/train/total": 3.37501}}
    outcome = found(plan(run(), "ba4..ba6"), tmp_path / "varied", deterministic=True, **changes)
    assert outcome.text == "within a band: loss/train/total within 3.0e-06; deterministic false -> true"
    its = plan(run(deterministic=True), "ba4..ba6")
    assert found(its, tmp_path / "fixed", deterministic=True, **changes).text.startswith("does not fit: batch 5: loss")


def test_without_exact_sums_ranks_explain_a_difference(run, tmp_path):
    its = plan(run(exact_sums=False), "ba4..ba6")
    outcome = found(its, tmp_path / "out", ["devices 1 -> 2"], batch6={"loss/train/total": 3.25001})
    assert outcome.text == "within a band: loss/train/total within 3.1e-06; devices 1 -> 2" and not outcome.is_equal


def test_in_16_bits_the_band_is_wider(run, tmp_path):
    its = plan(run(precision="amp_bf16"), "ba4..ba6")
    outcome = found(its, tmp_path / "out", ["torch 1 -> 2"], batch5={"loss/train/total": 3.405})
    assert outcome.text.startswith("within a band: loss/train/total within 8.8e-03"), "of the larger"
    outcome = found(its, tmp_path / "more", ["torch 1 -> 2"], batch5={"loss/train/total": 3.42})
    assert outcome.text.startswith("does not fit: batch 5: loss")


def test_another_state_alone_is_within_the_band_of_other_kernels(run, tmp_path):
    its = plan(run(), "ba4..ba6")
    outcome = found(its, tmp_path / "out", ["torch 1 -> 2"], batch6={"state/digest": "x"})
    assert outcome.text == "within a band: only state/digest differs; torch 1 -> 2" and not outcome.is_equal
    assert found(its, tmp_path / "same", batch6={"state/digest": "x"}).text.startswith("does not fit: batch 6: state/")


def test_a_start_with_another_state_explains_nothing(run, tmp_path):
    outcome = found(plan(run(), "ba4..ba6"), tmp_path / "out", ["torch 1 -> 2"], digest="x")
    assert outcome.text.startswith("does not fit: batch 4: state/digest is x here and ") and not outcome.is_equal


def test_data_that_a_checkpoint_refuses_does_not_fit(run, tmp_path):
    its = plan(run(), None)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/begun.json").write_text(json.dumps({"other_data": "x holds a, the data in the checkpoint was b"}))
    assert compare_replay(its, tmp_path / "out") == (
        "does not fit: the data is not what the run was trained with: x holds a, the data in the checkpoint was b",
        False,
    )


def test_numbers_beyond_a_float_are_compared_too(run, tmp_path):
    records = [record_of(batch, **({"grad_norm": 10**400} if batch == 5 else {})) for batch in range(1, 7)]
    its = plan(run(records=records), "ba4..ba6")
    outcome = found(its, tmp_path / "out", ["torch 1 -> 2"], batch5={"grad_norm": 1.0})
    assert outcome.text.startswith("does not fit: batch 5: grad_norm")


@pytest.fixture
def command(run, monkeypatch, capfd, tmp_path):
    """Run `replay` with ranks that find `changes` in batch 5, or leave with `code`; returns exit code and output."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"):
        monkeypatch.setenv(name, "")  # so that what the command sets goes with the test
        monkeypatch.delenv(name)

    def call(*words, code=0, changes=None, **config):
        where, programs = run(**config), []

        def ranks(module, arguments, num_ranks, logs):
            programs.append((module, num_ranks))
            values = yaml.safe_load(Path(*arguments).read_text())
            out = tmp_path / "found"
            its = plan(where, None)
            found(its, out, batch5=changes or {})
            for name in ("begun.json", "metrics.jsonl"):
                (out / name).rename(f"{values['run_folder']}/{name}")
            return code

        monkeypatch.setattr("llmfoundry_lite.launch.ranks.run_ranks", ranks)
        return run_command(["replay", str(where), *words]), programs, "".join(capfd.readouterr())

    return call


def test_the_command_ends_with_0_for_equal_3_for_a_difference_and_else_with_the_ranks_code(command):
    code, programs, told = command()
    assert code == 0 and "training batches 5 to 6 of" in told and "bit-equal: 2 of data/digest" in told
    assert programs == [("llmfoundry_lite.launch_replay", 1)]


def test_the_command_ends_with_3_where_it_does_not_fit(command):
    code, _, told = command(changes={"loss/train/total": 1.0}, callbacks={"extra": {"python:a:B": {}}})
    assert code == 3 and "does not fit: batch 5" in told
    assert "without its callbacks python:a:B, which --trust-code runs" in told


def test_code_that_is_trusted_is_named(command, monkeypatch):
    monkeypatch.setenv("OF_A_RUN", "")
    _, _, told = command("--trust-code", environment={"OF_A_RUN": "1"})
    assert "--trust-code lets the run's own code take part: environment OF_A_RUN\n" in told
    assert [*find_code({"callbacks": {"extra": {"python:a:B": {}}}})] == ["python:a:B"]


def test_the_command_ends_with_the_code_of_its_ranks(command):
    assert command(code=75)[0] == 75


def test_data_of_another_length_is_answered_for_a_replay(command, data):
    code, _, told = command("train_loader.dataset.local=nowhere")
    assert code == 2 and f"{DATA}: nowhere/train does not hold its data here; give {DATA}.local=FOLDER" in told
