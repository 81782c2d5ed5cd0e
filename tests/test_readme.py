"""Every sentence of the README's "Checkpoints you can trust" has a test behind it, named here."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

CLAIMS = {
    "A checkpoint is a folder of plain safetensors": (
        "checkpoint/test_shards.py::test_files_are_plain_safetensors_that_can_be_mapped",
        "checkpoint/test_manifest.py::test_a_manifest_comes_back_as_it_was",
    ),
    "Nothing in it is pickled": (
        "checkpoint/test_no_pickle.py::test_nothing_in_the_package_pickles_or_unpickles",
        "checkpoint/test_restore.py::test_a_pickle_in_the_folder_is_never_opened",
    ),
    "It appears whole or not at all": (
        "checkpoint/test_faults_on_ranks.py::test_a_killed_rank_costs_at_most_the_save_in_flight",
        "training/test_resume_faults.py::test_killed_at_any_phase_the_run_carries_on_as_if_nothing_had_been",
    ),
    "A disk that is full": (
        "checkpoint/test_failing_disks.py::test_a_full_disk_that_is_cleared",
        "checkpoint/test_failing_disks.py::test_writing_a_shard",
        "training/test_resume_faults.py::test_a_read_only_folder_can_be_loaded_from_but_not_saved_into",
    ),
    "What a launch that was thought dead": (
        "checkpoint/test_store.py::test_a_zombie_that_slips_through_loses_to_the_new_writer",
    ),
    "A state with a number in it": (
        "training/test_resume_faults.py::test_weights_that_are_not_finite_are_never_published",
    ),
    "Each rank hashes the blocks": (
        "checkpoint/test_resharding.py::test_a_rank_reads_and_verifies_only_what_it_needs",
    ),
    "All ranks agree before": ("checkpoint/test_faults_on_ranks.py::test_what_one_rank_finds_all_ranks_do",),
    "A damaged checkpoint is named": (
        "checkpoint/test_store.py::test_every_damage_to_files_is_found_by_name",
        "training/test_resume_faults.py::test_damaged_saves_are_passed_over_to_the_newest_intact_and_pickles_never_opened",
        "training/test_resume_faults.py::test_when_all_are_damaged_the_run_refuses_and_says_so",
    ),
    "A checkpoint of another model": (
        "training/test_checkpointing.py::test_another_model_tokenizer_data_or_batch_size_is_refused_by_name",
    ),
    "Saves of 1, 2, 3 or 4 ranks": (
        "checkpoint/test_resharding_on_ranks.py::test_a_save_is_restored_bit_for_bit_on_other_ranks_and_shardings",
        "training/test_resume_exactly.py::test_every_world_and_sharding_takes_up_what_the_one_before_left",
    ),
    "torch 2.11, 2.13 and the newest": (
        "test_torch_releases.py::test_a_save_of_one_release_is_the_same_state_under_another_and_trains_on",
    ),
    "On the same ranks the losses": (
        "training/test_checkpointing.py::test_on_the_same_ranks_the_losses_after_a_stop_are_bit_equal",
        "training/test_resume_exactly.py::"
        "test_workers_dropout_an_evaluation_before_the_save_and_an_epochs_end_change_no_bit",
    ),
    "On other ranks the data": (
        "training/test_checkpointing.py::"
        "test_across_worlds_shardings_and_epochs_the_data_is_the_same_and_the_losses_agree",
    ),
    "Training waits while": ("checkpoint/test_restore.py::test_a_save_is_of_its_moment_though_training_goes_on",),
    "A failure there stops": (
        "training/test_resume_faults.py::test_what_fails_in_the_background_stops_the_run_at_the_next_batch_with_its_cause",
    ),
    "Retention removes the oldest": (
        "checkpoint/test_store.py::test_old_ones_go_and_those_to_keep_stay",
        "checkpoint/test_store.py::test_the_last_verified_one_is_never_removed",
        "cli/test_checkpoint.py::test_prune_keeps_what_it_has_hashed",
    ),
    "`save_folder` and `load_path` are": (
        "training/test_switching.py::test_another_run_begins_from_a_checkpoint_in_a_bucket",
    ),
    "Over a bad line to S3": (
        "checkpoint/test_s3.py::test_dropped_connections_are_retried_or_reported_but_never_damage",
        "checkpoint/test_s3.py::test_nothing_is_there_until_the_manifest_is",
    ),
    "A checkpoint outside of the run": (
        "training/test_switching.py::test_the_curve_goes_from_cluster_to_cluster_with_the_checkpoint",
    ),
    "A launch that is refused": ("training/test_checkpointing.py::test_a_refused_launch_takes_no_lease_and_says_why",),
    "`ls`, `inspect`, `verify` and `prune`": ("cli/test_checkpoint.py::test_looking_at_checkpoints_needs_no_torch",),
    "`checkpoint import` makes": (
        "convert/test_to_checkpoint.py::test_a_checkpoint_of_composers_trainer_becomes_a_portable_one",
        "convert/test_to_checkpoint.py::test_a_malicious_pickle_is_never_run",
    ),
    "Importing an export": ("convert/test_to_checkpoint.py::test_export_import_export_is_bit_equal",),
}
"""How a sentence begins -> the tests that would fail if it were not so."""


def sentences() -> list[str]:
    section = (ROOT / "README.md").read_text().split("## Checkpoints you can trust")[1].split("**Exit codes.**")[0]
    return re.split(r"(?<=\.)\s+(?=[A-Z`t])", " ".join(section.split()))


def test_every_sentence_has_a_test():
    found = [sentence for sentence in sentences() if sentence]
    orphans = [sentence for sentence in found if not any(sentence.startswith(claim) for claim in CLAIMS)]
    assert not orphans
    assert len(found) == len(CLAIMS)


@pytest.mark.parametrize("name", sorted({test for tests in CLAIMS.values() for test in tests}))
def test_the_test_is_there(name):
    file, function = name.split("::")
    assert f"def {function}(" in (ROOT / "tests" / file).read_text()
