"""A module whose import lasts until the test has opened the other end."""

import os
from pathlib import Path

Path(os.environ["TAKES_LONG"]).read_text()
