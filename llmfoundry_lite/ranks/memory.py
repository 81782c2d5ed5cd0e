"""Memory of the C library."""

import ctypes
import platform


def return_freed_memory() -> None:
    """Give back what this process has freed, so that for a while what is resident is in use."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
