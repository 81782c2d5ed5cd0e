"""A launch that is observed and does not train: python -m llmfoundry_ops.tests.observed_launch JSON RUN_FOLDER END

JSON is the block `alerts`, with `webhook` from $HOOK, and `metrics_port`. END is done, wait (for SIGKILL) or
leave (by a signal during imports).
"""

import json
import os
import signal
import sys
from pathlib import Path

from llmfoundry_lite.config.callbacks_schema import AlertsConfig
from llmfoundry_lite.config.load_train import Observed
from llmfoundry_lite.ranks import signals
from llmfoundry_lite.ranks.status import write_status
from llmfoundry_ops.observer import Observer


def main() -> None:
    options, folder, end = json.loads(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    port = options.pop("metrics_port", None)
    alerts = AlertsConfig(webhook=os.environ["HOOK"], **options)
    folder.mkdir(parents=True, exist_ok=True)
    observer = Observer(Observed(folder.name, folder, alerts, port, "127.0.0.1"))
    if end == "leave":
        signals.before_leaving = observer.close
        signals.leave_now(signal.SIGTERM, None)
    write_status(folder, "running", 7, launch=1, last_saved="ba5")
    print("began", flush=True)
    if end == "wait":
        signal.pause()
    write_status(folder, "done", 8, last_saved="ba8")
    observer.close()


if __name__ == "__main__":
    main()
