"""As long as it takes until the test has opened the other end."""

import os

open(os.environ["TAKES_LONG"]).read()
