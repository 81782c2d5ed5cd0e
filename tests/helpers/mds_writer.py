"""streaming's MDSWriter and downloads, without their waits.

The writer waits a millisecond for its queue of uploads where it would wait a second, and a download that has failed is
tried again after a hundredth of the usual time.
"""

import time

from streaming import MDSWriter as MDSWriter
from streaming.base import util
from streaming.base.format.base import writer

POLL_SECONDS = 0.001
BACK_OFF_FACTOR = 0.01

# Before it writes the index, the writer sleeps for a second if the last shard is still queued, which is a race.
writer.sleep = lambda seconds: time.sleep(POLL_SECONDS)
util.sleep = lambda seconds: time.sleep(BACK_OFF_FACTOR * seconds)
