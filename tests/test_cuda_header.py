"""The CUDA translation: what it writes, what it refuses, and that NVIDIA's compiler takes it."""

from __future__ import annotations

import mlx.core as mx
import nvrtc
import pytest
from backend_cases import fresh_key, gated_delta_kernels
from kernels import KERNELS
from test_backends import APPROXIMATE, BODY, FAST, HEADER, SEMANTICS

from lily_mlx.runtime import backends, cuda

needs_nvrtc = pytest.mark.skipif(not nvrtc.available(), reason=f"needs {nvrtc.WHEELS}")
FLOATS = [mx.float32, mx.float16, mx.bfloat16]


@pytest.mark.parametrize(
    ("metal", "translated"),
    [
        ("const device float* p = x + 1;", "const float*p=x+1;"),
        ("threadgroup float a[32];", "__shared__ float a[32];"),
        ("threadgroup vec<T, 4> a[N * 2];", "__shared__ vec<T,4>a[N*2];"),
        ("threadgroup int n;", "__shared__ int n;"),
        ("threadgroup float* p = a;", "float*p=a;"),
        ("f((threadgroup uint4*)p)", "f((uint4*)p)"),
        ("threadgroup_barrier(mem_flags::mem_threadgroup);",) * 2,
        ("metal::precise::exp(x) + fast::exp(x)", "precise::exp(x)+fast::exp(x)"),
        ("1.0 + 1. + .5 + 1e3 + 1.5e-3", "1.0f+1.f+.5f+1e3f+1.5e-3f"),
        ("1.0f + 2 + 0x1F + 3u + 7ul + 0x1.8p3", "1.0f+2+0x1F+3u+7ul+0x1.8p3f"),
        ("1.0h + 2h", "half(1.0f)+half(2)"),
        ("a.xy + p->wzyx + a.x", "a.template swizzle<0,1>()+p->template swizzle<3,2,1,0>()+a.x"),
        ("v.rgb", "v.template swizzle<0,1,2>()"),
    ],
)
def test_rewrites(metal, translated):
    assert cuda.translate("", metal)[1] == "\n" + translated


def test_writes_the_attributes_that_the_body_names():
    header, body = cuda.translate("#define F(x) ((x) * 2.0)\n", "out[thread_position_in_grid.x];")
    assert body == (
        "const auto thread_position_in_grid=get_thread_position_in_grid();\n"
        "out[thread_position_in_grid.x];"
    )
    assert header.splitlines()[1:] == [
        "namespace mlx::core::cu{", "#define F(x) ((x)*2.0f)", "}",
    ]  # fmt: skip
    assert cuda.HEADER.is_file() and header.startswith(f'#include "{cuda.HEADER}"\n')


@pytest.mark.parametrize(
    ("metal", "named"),
    [
        ("simdgroup_float8x8 m;", "simdgroup_float8x8"),
        ("mpp::tensor_ops::matmul2d", "mpp"),
        ("v.xy = w.xy;", "assignment to .xy"),
        ("v.xyz += w;", "assignment to .xyz"),
        ("#include <MetalPerformancePrimitives/x.h>", "#include"),
        ("T x = 1.0bf;", "1.0bf"),
    ],
)
def test_refuses_what_is_not_there(metal, named):
    with pytest.raises(cuda.CudaError, match=named):
        cuda.translate("", metal)


@needs_nvrtc
def test_a_wrong_text_does_not_compile():
    """The compiler is really asked."""
    text = nvrtc.kernel_text("bad", ["x"], ["y"], "y[0] = no_such(x);", "", [mx.zeros(8)],
                             [mx.float32], [])  # fmt: skip
    assert "no_such" in nvrtc.compile_errors(text)


@needs_nvrtc
def test_metals_functions_compile(monkeypatch):
    texts = nvrtc.recorded(monkeypatch)
    expressions = [*SEMANTICS, *APPROXIMATE, *FAST]
    body = BODY + "".join(f"out[{64 * k} + i] = {e};\n" for k, e in enumerate(expressions))
    kernel = cuda.metal_kernel(
        name="semantics", input_names=["x"], output_names=["out"], source=body, header=HEADER
    )
    for dtype in FLOATS:
        kernel(
            inputs=[mx.zeros((64,), dtype)],
            template=[("T", dtype)],
            grid=(16, 4, 1),
            threadgroup=(16, 4, 1),
            output_shapes=[(len(expressions), 64)],
            output_dtypes=[mx.float32],
        )
    assert nvrtc.errors(texts) == []


@needs_nvrtc
def test_gated_delta_text_of_mlx_lm_compiles(monkeypatch):
    texts = nvrtc.recorded(monkeypatch)
    kernels = gated_delta_kernels(cuda.metal_kernel)
    for dtype in FLOATS:
        wide = [mx.zeros((1, 2, 4, 128), dtype)] * 3
        for kind, kernel in kernels.items():
            g = mx.zeros((1, 2, 4, *[128] * (kind == "vector")))
            rest = [mx.zeros((1, 2, 4), dtype), mx.zeros((1, 4, 128, 128)), 2]
            mask = [mx.zeros((1, 2), mx.bool_)] if kind == "mask" else []
            kernel(
                inputs=[*wide, g, *rest, *mask],
                template=[("InT", dtype), ("StT", mx.float32), ("Dk", 128), ("Dv", 128),
                          ("Hk", 4), ("Hv", 4)],
                grid=(32, 128, 4),
                threadgroup=(32, 4, 1),
                output_shapes=[(1, 2, 4, 128), (1, 4, 128, 128)],
                output_dtypes=[dtype, mx.float32],
            )  # fmt: skip
    assert len(texts) == 12
    assert nvrtc.errors(texts) == []


@needs_nvrtc
@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.op.name)
def test_shipped_kernels_compile(row, monkeypatch):
    texts = nvrtc.recorded(monkeypatch)
    with backends.using("cuda"):
        for variant in row.variants:
            row.op.launch(*row.op.inputs(fresh_key(), *variant))
    assert texts and nvrtc.errors(texts) == []
