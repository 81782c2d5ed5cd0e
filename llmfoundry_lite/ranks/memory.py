"""What the C library keeps of memory that this process has freed."""

import ctypes
import platform


def return_freed_memory() -> None:
    """What is resident is in use, for a while."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
