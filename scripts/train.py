"""Train a model, from a clone.

composer -n 2 scripts/train.py yamls/pretrain/mpt-quickstart.yaml max_duration=20ba
python scripts/train.py yamls/pretrain/mpt-125m.yaml --dry-run
"""

from llmfoundry_lite.search_path import leave_out_working_directory

if __name__ == "__main__":
    leave_out_working_directory()
    from llmfoundry_lite.ranks.signals import leave_with_75_when_asked

    leave_with_75_when_asked()
    from llmfoundry_lite.launch_train import main
    from llmfoundry_lite.ranks.ending import run_and_exit

    run_and_exit(main)
