"""Where it was measured."""

import os
import platform
import re
from pathlib import Path


def describe():
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    return {
        "cpus": os.cpu_count(),
        "cpu": cpu.group(1) if cpu and not cpu.group(1).isdigit() else platform.machine(),
        "memory_gib": round(int(memory.group(1)) / (1 << 20), 1) if memory else None,
        "kernel": platform.release(),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "load_at_start": os.getloadavg()[0],
    }


def line(found):
    return (f"{found['cpus']} CPUs ({found['cpu']}), {found['memory_gib']} GiB, Linux {found['kernel']}, "
            f"pages of {found['page_bytes']} bytes, load {found['load_at_start']:.1f} at the start")
