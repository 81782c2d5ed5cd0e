"""Evaluate models in context, from a clone.

python scripts/eval.py yamls/eval/icl-zero-shot.yaml models.ours=runs/mpt-1b models.base=runs/other/checkpoints/ba400
composer -n 8 scripts/eval.py yamls/eval/icl-zero-shot.yaml models.ours=runs/mpt-1b
python scripts/eval.py --all-checkpoints runs/mpt-1b     # a learning curve, on the tasks in evals/ whose data are here
"""

from llmfoundry_lite.search_path import leave_out_working_directory

if __name__ == "__main__":
    leave_out_working_directory()
    from llmfoundry_lite.ranks.signals import leave_with_75_when_asked

    leave_with_75_when_asked()
    from llmfoundry_lite.launch_eval import main
    from llmfoundry_lite.ranks.ending import run_and_exit

    run_and_exit(main)
