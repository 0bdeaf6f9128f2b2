"""C++ text to a loaded library, through clang and lld from the ziglang package, with a cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from .instrument import Site, instrument

HERE = Path(__file__).resolve().parent

_COMMON = [
    "-std=c++23",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-nostdinc",
    "-w",
    "-fsigned-char",
]
_COMMON += [
    "-fno-stack-protector",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-threadsafe-statics",
]
_KERNEL = ["-Xclang", "-ffloat16-excess-precision=none"]  # half rounds after each operation
_FAST = ["-O2"]
# Sanitizer calls and plain scalar code: one hook a source-level access.
_CHECKED = ["-O2", "-g1", "-DSIMT_CHECK", "-fno-builtin", "-fno-vectorize", "-fno-slp-vectorize"]
_CHECKED += ["-mllvm", "-disable-vector-combine", "-fsanitize=array-bounds,integer-divide-by-zero"]
_CHECKED += ["-fsanitize=signed-integer-overflow,unsigned-integer-overflow"]
# Accesses of two branches stay two, each with its line.
for _merge in ("sink-common", "hoist-common", "merge-cond-stores", "hoist-cond-stores"):
    _CHECKED += ["-mllvm", f"-simplifycfg-{_merge}=false"]


class BuildError(RuntimeError):
    """A kernel did not compile; the message is the compiler's."""


def _target() -> list[str]:
    machine = platform.machine()
    if sys.platform == "darwin":
        return ["-target", "aarch64-apple-macos" if machine == "arm64" else "x86_64-apple-macos"]
    if machine in ("x86_64", "AMD64"):
        return ["-target", "x86_64-linux-gnu", "-march=x86-64-v3"]
    return ["-target", f"{machine}-linux-gnu"]


@functools.cache
def compiler() -> str:
    """The zig executable. Raises RuntimeError if the ziglang package is not installed."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("the CPU executor needs a compiler: pip install 'ziglang==0.17.1'")
    return str(Path(spec.submodule_search_locations[0]) / "zig")


@functools.cache
def cache_dir() -> Path:
    """Where built libraries stay: LILY_CACHE_DIR, or the user's cache directory.

    Falls back to a temporary directory if that cannot be written.
    """
    if "LILY_CACHE_DIR" in os.environ:
        root = Path(os.environ["LILY_CACHE_DIR"])
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches" / "lily_mlx"
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lily_mlx"
    try:
        path = root / "simt"
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError:
        return Path(tempfile.mkdtemp(prefix="lily_mlx_simt_"))


@functools.cache
def _fingerprint() -> bytes:
    """Everything besides the text that a built library depends on."""
    digest = hashlib.sha256(repr((_target(), _COMMON, _KERNEL, _FAST, _CHECKED)).encode())
    digest.update(importlib.metadata.version("ziglang").encode())
    for file in sorted(
        [*HERE.rglob("*.py"), *(HERE / "include").rglob("*"), *(HERE / "engine").rglob("*")]
    ):
        if file.is_file() and "__pycache__" not in file.parts:
            digest.update(file.name.encode() + file.read_bytes())
    return digest.digest()


def _run(args: list[str]) -> None:
    # Away from the sources, so that the debug information keeps absolute paths.
    done = subprocess.run([compiler(), *args], capture_output=True, text=True, cwd=cache_dir())
    if done.returncode:
        raise BuildError(done.stderr[:6000] or f"zig {args[0]} failed")


def _link(objects: list[Path], to: Path) -> None:
    files = [str(o) for o in objects]
    if sys.platform == "darwin":
        _run(["cc", "-dynamiclib", "-Wl,-undefined,dynamic_lookup", *files, "-o", str(to)])
    else:
        _run(["ld.lld", "-shared", *files, "-o", str(to)])


def _cached(key: bytes, make) -> Path:
    """The library of ``key``. If missing, ``make(directory)`` writes out.so and files beside it."""
    path = cache_dir() / (hashlib.sha256(_fingerprint() + key).hexdigest()[:32] + ".so")
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=cache_dir()) as work:
            make(Path(work))
            for file in sorted(Path(work).glob("out.*"), key=lambda f: f.suffix == ".so"):
                os.replace(file, path.with_suffix(file.suffix))
    return path


@functools.cache
def runtime() -> ctypes.CDLL:
    """The scheduler and the checker, loaded so that kernels find them."""

    def make(work: Path) -> None:
        objects = []
        for source in ("scheduler.cpp", "checker.cpp"):
            objects.append(work / f"{source}.o")
            include = ["-I", str(HERE / "include")]
            source = str(HERE / "engine" / source)
            _run(
                [
                    "clang",
                    "-c",
                    *_target(),
                    *_COMMON,
                    "-O2",
                    *include,
                    source,
                    "-o",
                    str(objects[-1]),
                ]
            )
        _link(objects, work / "out.so")

    if sys.platform != "darwin":
        ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(_cached(b"runtime", make)), mode=ctypes.RTLD_GLOBAL)
    library.simt_run.argtypes = [ctypes.c_void_p]
    library.simt_run.restype = None
    return library


def kernel(text: str, checked: bool) -> tuple[ctypes.CDLL, list[Site]]:
    """A kernel's C++ text as a loaded library, and its instrumented places if ``checked``.

    Raises BuildError with the compiler's message.
    """
    runtime()
    flags = [*_target(), *_COMMON, *_KERNEL, *(_CHECKED if checked else _FAST)]

    def make(work: Path) -> None:
        source, object_file = work / "kernel.cpp", work / "kernel.o"
        source.write_text(text)
        compile_ = ["clang", *flags, "-I", str(HERE / "include"), str(source)]
        if checked:
            ir = work / "kernel.ll"
            _run([*compile_, "-S", "-emit-llvm", "-o", str(ir)])
            code, sites = instrument(ir.read_text())
            ir.write_text(code)
            codegen = ["-fPIC", "-w", "-O1", "-Xclang", "-disable-llvm-passes"]
            _run(["clang", "-c", *_target(), *codegen, str(ir), "-o", str(object_file)])
            table = "".join(f"{s.line}\t{s.file}\n" for s in sites)
            (work / "out.sites").write_text(table)
        else:
            _run([*compile_, "-c", "-o", str(object_file)])
        _link([object_file], work / "out.so")

    path = _cached(bytes([checked]) + text.encode(), make)
    sites = []
    if checked:
        for line in path.with_suffix(".sites").read_text().splitlines():
            number, file = line.split("\t", 1)
            sites.append(Site(file, int(number)))
    return ctypes.CDLL(str(path)), sites
