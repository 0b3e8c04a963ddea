"""Refuse what does not fit in memory before anything is allocated."""

import os

from fixedformer.errors import CapacityError


def available_bytes() -> int:
    """Memory that this process may still take, in bytes: what the system calls available, else the physical total."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 1 << 63  # nothing to go by on this system: the allocation itself will tell


def readable(size: int) -> str:
    """Bytes for people: 1536 -> '1.5 KB' (powers of 1024)."""
    value = float(size)
    for unit in ("B", "KB", "MB", "GB", "TB", "PB", "EB"):
        if value < 1024 or unit == "EB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def require_memory(needed: int, what: str, remedy: str) -> None:
    """Raise CapacityError when `what` needs more than the memory at hand; nothing has been allocated yet."""
    available = available_bytes()
    if needed > available:
        raise CapacityError(
            f"{what} needs {needed} bytes ({readable(needed)}), {readable(available)} are available; {remedy}"
        )
