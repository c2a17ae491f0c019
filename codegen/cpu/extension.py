"""Building the C++ operators `torch.ops.dsmp_cpu` once, and loading them.

The library lies in `cpu` in the user's cache folder (platformdirs; `~/.cache/dsmp/cpu` on Linux) under a name that
hashes the sources, torch's version, the C library, the machine and the compiler's flags. One process builds it under a
file lock, into a file that then takes its name at once, so that others wait for it and a killed build leaves nothing
that is taken for a library; the system drops a dead process's lock. The compiler is the one that torch's own tools
take: CXX, else the first of c++, g++ and clang++ on the path; it needs C++20. Nothing is built on import.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from platformdirs import user_cache_path

from ...hardware_db.capability import Verdict
from .fakes import register_fakes

if sys.platform != "win32":
    import fcntl

_SOURCES = Path(__file__).resolve().parent
_TORCH = Path(torch.__file__).resolve().parent
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden", "-w"),
    # one rounding for a product and a sum; no errno or traps, which nobody reads, so that loops of roundings vectorise
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
# vectors stay at 256 bits but where the sources ask for more: wider ones lower the clock of some CPUs
_VNNI = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mprefer-vector-width=256")
_TIMEOUT = 600.0  # seconds

_lock = threading.Lock()
_answers: list[Verdict] = []


def cpu_operators() -> Verdict:
    """Whether `torch.ops.dsmp_cpu` is there: builds and loads it at the first call, the only attempt of a process."""
    with _lock:
        if not _answers:
            _answers.append(_attempt())
        return _answers[0]


def instruction_flags() -> tuple[str, ...]:
    """The compiler's flags for the instructions that torch uses on this CPU: AVX512 VNNI's, AVX2's, or none (portable
    code). Torch uses AVX2 on a CPU of AVX512 where ATEN_CPU_CAPABILITY says so."""
    capability = torch.backends.cpu.get_cpu_capability()
    if not capability.startswith(("AVX2", "AVX512")):
        return ()
    vnni = capability.startswith("AVX512") and torch.cpu.get_capabilities().get("avx512_vnni") is True
    return (*_AVX2, *_VNNI) if vnni else _AVX2


def library_path() -> Path:
    """Where the library of these sources, this torch and this machine is or will be."""
    digest = hashlib.sha256()
    for file in sorted(_SOURCES.iterdir()):
        if file.suffix in (".cpp", ".h"):
            digest.update(file.read_bytes())
    abi = str(torch.compiled_with_cxx11_abi())
    for part in (torch.__version__, abi, *platform.libc_ver(), platform.machine(), *_FLAGS, *instruction_flags()):
        digest.update(part.encode() + b"\0")
    return user_cache_path("dsmp") / "cpu" / f"operators-{digest.hexdigest()[:20]}.so"


def _attempt() -> Verdict:
    if sys.platform != "linux":
        return Verdict(ok=False, reason=f"the C++ operators are built on Linux only, not on {sys.platform}")
    try:
        library = library_path()
        failure = _build(library) if not library.exists() else None
        if failure is None:
            try:
                _load(library)
            except OSError:  # a damaged file: once more, from the sources
                library.unlink(missing_ok=True)
                failure = _build(library)
                if failure is None:
                    _load(library)
        if failure is not None:
            return Verdict(ok=False, reason=failure)
        register_fakes()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return Verdict(ok=False, reason=f"the C++ operators cannot be built or loaded: {error}")
    return Verdict(ok=True, reason=f"the C++ operators are loaded from {library}")


def _load(library: Path) -> None:
    load: Callable[[Path], None] = torch.ops.load_library
    load(library)


def _build(library: Path) -> str | None:
    """Compile the sources into `library`, unless another process just did. A reason where that fails."""
    compiler = _compiler()
    if compiler is None:
        names = ", ".join(_COMPILERS)
        return f"there is no C++ compiler: none of {names} is on the path, and CXX names none. Install one."
    library.parent.mkdir(parents=True, exist_ok=True)
    with _locked(library.with_suffix(".lock")):
        if library.exists():
            return None
        partial = library.with_suffix(".partial")
        done = subprocess.run(
            [*compiler, *_arguments(), *map(str, sorted(_SOURCES.glob("*.cpp"))), "-o", str(partial), *_libraries()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_TIMEOUT,
        )
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
            return f"{compiler[0]} failed with status {done.returncode}: {' '.join(errors[:3])}"
        partial.replace(library)
    return None


def _compiler() -> list[str] | None:
    """The command that compiles C++ here, as CXX or the path has it."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named and shutil.which(named[0]):
        return named
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    return None if found is None else [found]


def _arguments() -> list[str]:
    abi = int(torch.compiled_with_cxx11_abi())
    include = _TORCH / "include"
    return [*_FLAGS, *instruction_flags(), f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-isystem", str(include)]


def _libraries() -> list[str]:
    return [f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold `file` against other processes; waits for one that does."""
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
