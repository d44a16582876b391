"""What every result file says of the machine and the versions it was measured with. No names, no paths."""

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("callboard", "mlx", "mlx-lm", "pyzmq", "msgspec", "uvloop", "uvicorn", "tokenizers")


def cpu_model() -> str:
    """The processor's name as its maker gives it."""
    if platform.system() == "Darwin":
        asked = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
        return asked.stdout.strip()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def package_versions() -> dict[str, str]:
    """Versions of the packages whose speed we measure."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine_facts() -> dict[str, object]:
    """Processor, cores, memory, system, Python and package versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / (1 << 30), 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": package_versions(),
    }


def without_paths(text: str) -> str:
    """The text without folders of this machine; a failure may quote some."""
    for folder in (str(Path(__file__).resolve().parents[1]), str(Path.home())):
        text = text.replace(folder, "…")
    return re.sub(r"/tmp/[\w.-]+", "…", text)
