"""NVIDIA's runtime compiler from its pip wheels: compiles what MLX's CUDA build would, anywhere."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx

WHEELS = "nvidia-cuda-nvrtc, nvidia-cuda-runtime and nvidia-cuda-cccl, version 13"
# What MLX's utils.cuh, which only its CUDA build holds, gives to a custom kernel.
UTILS = """
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/array>
#include <cuda/std/complex>
#include <cuda/std/limits>
#include <cuda/std/tuple>
#include <cuda/std/type_traits>
namespace mlx::core::cu {
using Shape = cuda::std::array<int32_t, 10>;
using Strides = cuda::std::array<int64_t, 10>;
template <typename T, typename = void>
struct Limits {
  static constexpr T max() { return cuda::std::numeric_limits<T>::max(); }
  static constexpr T finite_min() { return cuda::std::numeric_limits<T>::lowest(); }
};
}  // namespace mlx::core::cu
"""
TYPES = {
    mx.bool_: "bool", mx.int8: "int8_t", mx.int16: "int16_t", mx.int32: "int32_t",
    mx.int64: "int64_t", mx.uint8: "uint8_t", mx.uint16: "uint16_t", mx.uint32: "uint32_t",
    mx.uint64: "uint64_t", mx.float16: "__half", mx.float32: "float",
    mx.bfloat16: "__nv_bfloat16",
}  # fmt: skip


@cache
def _root() -> Path | None:
    spec = importlib.util.find_spec("nvidia") if sys.platform == "linux" else None
    for path in (spec.submodule_search_locations or []) if spec else []:
        root = Path(path) / "cu13"
        if all((root / "include" / name).exists() for name in ("cuda_fp16.h", "cccl", "nvrtc.h")):
            return root
    return None


def available() -> bool:
    """Whether the wheels are installed."""
    return _root() is not None


@cache
def _library() -> ctypes.CDLL:
    (path,) = (_root() / "lib").glob("libnvrtc.so.13")
    return ctypes.CDLL(str(path))


def errors(texts: Sequence[str]) -> list[str]:
    """What the compiler says against kernels' texts; empty if it takes them all."""
    return [said for text in together(texts) if (said := compile_errors(text))]


def compile_errors(text: str, arch: str = "sm_90a") -> str:
    """What the compiler says against a kernel's whole text, as MLX calls it; "" if nothing."""
    lib, root, program = _library(), _root(), ctypes.c_void_p()
    names = (ctypes.c_char_p * 1)(b"mlx/backend/cuda/device/utils.cuh")
    headers = (ctypes.c_char_p * 1)(UTILS.encode())
    flags = [
        b"--device-as-default-execution-space",
        f"--gpu-architecture={arch}".encode(),
        f"--include-path={root}/include/cccl".encode(),
        f"--include-path={root}/include".encode(),
    ]
    made = lib.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"kernel.cu", 1, headers, names
    )
    assert made == 0, f"nvrtcCreateProgram: {made}"
    try:
        result = lib.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * 4)(*flags))
        if result == 0:
            return ""
        size = ctypes.c_size_t()
        lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, log)
        return log.value.decode() or f"nvrtcCompileProgram: {result}"
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def kernel_text(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str,
    inputs: Sequence[mx.array],
    output_dtypes: Sequence[mx.Dtype],
    template: Sequence[tuple[str, object]],
) -> str:
    """The text that `mx.fast.cuda_kernel` compiles, as MLX's CUDA build writes it.

    `test_kernels.py` compares this with what that build prints, where there is one.
    """
    tag = ""
    for _, value in template:
        if isinstance(value, mx.Dtype):
            tag += "_" + TYPE_TAGS[value]
        else:
            tag += ("_t" if value else "_f") if isinstance(value, bool) else f"_{value}"
    params = []
    for label, array in zip(input_names, inputs, strict=True):
        params.append(f"const {TYPES[array.dtype]}* {label}")
        if array.ndim:
            for what, kind in (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int")):
                if f"{label}_{what}" in source:
                    params.append(f"const __grid_constant__ {kind} {label}_{what}")
    for label, dtype in zip(output_names, output_dtypes, strict=True):
        params.append(f"{TYPES[dtype]}* {label}")
    constants = ""
    for label, value in template:
        if isinstance(value, mx.Dtype):
            constants += f"  using {label} = {TYPES[value]};\n"
        elif isinstance(value, bool):
            constants += f"  constexpr bool {label} = {str(value).lower()};\n"
        else:
            constants += f"  constexpr int {label} = {value};\n"
    return (
        '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
        f"{header}namespace mlx::core::cu {{\n\nnamespace cg = cooperative_groups;\n\n"
        f"__global__ void custom_kernel_{name}{tag}(\n    "
        + ",\n    ".join(params)
        + f") {{\n{constants}{chr(10) if constants else ''}{source}\n}}\n\n"
        "} // namespace mlx::core::cu\n"
    )


TYPE_TAGS = {
    mx.bool_: "bool_", mx.int8: "int8_t", mx.int16: "int16_t", mx.int32: "int32_t",
    mx.int64: "int64_t", mx.uint8: "uint8_t", mx.uint16: "uint16_t", mx.uint32: "uint32_t",
    mx.uint64: "uint64_t", mx.float16: "float16_t", mx.float32: "float",
    mx.bfloat16: "bfloat16_t",
}  # fmt: skip


def recorded(monkeypatch) -> list[str]:
    """A list that fills with the text of each `mx.fast.cuda_kernel` launch from here on.

    Without CUDA a launch returns zeros: its text is what is wanted.
    """
    texts: list[str] = []
    real = mx.fast.cuda_kernel

    def cuda_kernel(**made):
        run = real(**made) if mx.cuda.is_available() else None

        def launch(*, inputs, output_shapes, output_dtypes, template=(), **rest):
            parts = (made[key] for key in ("name", "input_names", "output_names", "source"))
            text = kernel_text(*parts, made["header"], inputs, output_dtypes, template)
            texts.append(text)
            shapes = {"output_shapes": output_shapes, "output_dtypes": output_dtypes}
            if run:
                return run(inputs=inputs, template=template, **shapes, **rest)
            return [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]

        return launch

    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_kernel)
    return texts


def together(texts: Sequence[str]) -> list[str]:
    """Texts of many kernels as few: those with the same lines before the kernel in one."""
    start = "namespace mlx::core::cu {\n\nnamespace cg"
    bodies: dict[str, dict[str, None]] = {}
    for text in texts:
        head, kernel = text.split(start, 1)
        bodies.setdefault(head, {})[start + kernel] = None
    return [
        head + "".join(k.replace("void custom_", f"void k{i}_", 1) for i, k in enumerate(kernels))
        for head, kernels in bodies.items()
    ]
