"""The peak of memory, told from the allocator's history."""

from llmfoundry_lite.rehearse.measure import replay

MODEL = [{"filename": "llmfoundry_lite/models/mpt.py", "line": 1, "name": "forward"}]
OPTIMIZER = [{"filename": "/torch/optim/adamw.py", "line": 2, "name": "step"}]


def history(*events):
    """(address, bytes, frames) for what is asked for; an address alone for what is given back."""
    entries = []
    for time_us, event in enumerate(events):
        if isinstance(event, int):
            entries.append({"action": "free_requested", "addr": event, "time_us": time_us})
        else:
            addr, size, frames = event
            entries.append({"action": "alloc", "addr": addr, "size": size, "frames": frames, "time_us": time_us})
    return entries


def test_what_was_given_back_is_not_in_the_peak():
    peak = replay(history((1, 100, MODEL), 1, (2, 70, OPTIMIZER), (3, 60, MODEL)), 0)
    assert peak.at_peak_bytes == {"optimizer": 70, "activations": 60}
    assert peak.peak_at.endswith("mpt.py:1")


def test_a_peak_before_the_first_batch_does_not_count_and_what_it_leaves_does():
    peak = replay(history((1, 30, OPTIMIZER), (2, 500, MODEL), 2, (3, 40, MODEL)), 3)
    assert peak.at_peak_bytes == {"optimizer": 30, "activations": 40}


def test_an_address_is_given_out_again():
    peak = replay(history((1, 10, MODEL), 1, (1, 20, OPTIMIZER), 1, (1, 5, MODEL)), 0)
    assert peak.at_peak_bytes == {"optimizer": 20}
