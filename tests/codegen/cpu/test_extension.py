"""The library is built once, by one process at a time, and what stands in the way is a reason, never an exception."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_linears import needs_kernels

import dsmp
from dsmp.codegen.cpu import extension
from dsmp.hardware_db.capability import Verdict

TINY = '#include <torch/library.h>\nTORCH_LIBRARY(dsmp_tiny, m) { m.def("f(Tensor x) -> Tensor"); }\n'


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As in a new process with an empty cache."""
    monkeypatch.setattr(extension, "_answers", [])
    monkeypatch.setattr(extension, "user_cache_path", lambda _: tmp_path / "cache")
    return tmp_path


def test_no_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(fresh))
    verdict = extension.cpu_operators()
    assert not verdict and "no C++ compiler" in verdict.reason


def test_one_attempt_per_process(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []
    monkeypatch.setattr(extension, "_attempt", lambda: attempts.append(1) or Verdict(ok=False, reason="no"))
    assert extension.cpu_operators() is extension.cpu_operators()
    assert attempts == [1]


def test_a_failing_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    compiler = fresh / "cc"
    compiler.write_text("#!/bin/sh\necho loud; echo 'x.cpp:1: error: what is this' >&2; exit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    verdict = extension.cpu_operators()
    assert not verdict and verdict.reason == f"{compiler} failed with status 3: x.cpp:1: error: what is this"
    assert capfd.readouterr() == ("", "")
    assert not list((fresh / "cache").rglob("*.so"))


def test_a_cache_that_cannot_be_written(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "cache").write_text("a file where the folder should be")
    verdict = extension.cpu_operators()
    assert not verdict and "cannot be built or loaded" in verdict.reason


def test_other_systems(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    verdict = extension.cpu_operators()
    assert not verdict and "not on darwin" in verdict.reason


def test_names_tell_flags_and_versions_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for capability, vnni, version in (
        ("AVX512", True, "1"), ("AVX512", False, "1"), ("AVX2", True, "1"), ("DEFAULT", False, "1"),
        ("DEFAULT", False, "2"),
    ):  # fmt: skip
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda answer=capability: answer)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda answer=vnni: {"avx512_vnni": answer})
        monkeypatch.setattr(torch, "__version__", version)
        names.append(extension.library_path())
    assert names[1] == names[2] and len(set(names)) == 4
    assert extension.instruction_flags() == ()


def tiny(folder: Path) -> Path:
    """Sources that compile in seconds, in place of ours."""
    sources = folder / "sources"
    sources.mkdir()
    (sources / "small_linear.cpp").write_text(TINY)
    return sources


def start(cache: Path, sources: Path) -> subprocess.Popen[str]:
    code = f"""
import pathlib
from dsmp.codegen.cpu import extension
extension.user_cache_path = lambda _: pathlib.Path({str(cache)!r})
extension._SOURCES = pathlib.Path({str(sources)!r})
extension.register_fakes = lambda: None
verdict = extension.cpu_operators()
assert verdict, verdict.reason
print(verdict.reason)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(dsmp.__file__).resolve().parent.parent)}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.slow
def test_two_processes_build_one_library(tmp_path: Path) -> None:
    if extension._compiler() is None:
        pytest.skip("no C++ compiler")
    sources, cache = tiny(tmp_path), tmp_path / "cache"
    (cache / "cpu").mkdir(parents=True)
    compiler, log = tmp_path / "counted", tmp_path / "log"
    compiler.write_text(f'#!/bin/sh\necho ran >> {log}\nexec {extension._compiler()[0]} "$@"\n')
    compiler.chmod(0o755)
    os.environ["CXX"], before = str(compiler), os.environ.get("CXX")
    try:
        running = [start(cache, sources) for _ in range(2)]
        outputs = [process.communicate(timeout=300) for process in running]
    finally:
        del os.environ["CXX"]
        if before is not None:
            os.environ["CXX"] = before
    assert [process.returncode for process in running] == [0, 0], outputs
    assert log.read_text() == "ran\n"
    assert [stderr for _, stderr in outputs] == ["", ""]
    assert len(list((cache / "cpu").glob("*.so"))) == 1 and not list((cache / "cpu").glob("*.partial"))


@pytest.mark.slow
def test_killed_builds_and_damaged_files(tmp_path: Path) -> None:
    if extension._compiler() is None:
        pytest.skip("no C++ compiler")
    sources, cache = tiny(tmp_path), tmp_path / "cache"
    process = start(cache, sources)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    library = Path(stdout.strip().rpartition(" ")[2])
    whole = library.read_bytes()
    library.unlink()
    library.with_suffix(".partial").write_bytes(whole[: len(whole) // 2])  # what a killed compiler leaves
    assert start(cache, sources).wait(timeout=300) == 0
    library.write_bytes(b"no library")
    assert start(cache, sources).wait(timeout=300) == 0
    assert library.read_bytes()[:4] == b"\x7fELF"


@pytest.mark.slow
def test_portable_code_gives_the_same_products() -> None:
    """All tests of products again, by a library without AVX2: torch takes no vector instructions in that process."""
    needs_kernels()
    tests = Path(__file__).with_name("test_small_linear.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(tests)],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default"},
        cwd=Path(dsmp.__file__).resolve().parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout
