"""The strict check: it refuses what Apple's compiler refuses, and passes every shipped kernel."""

from __future__ import annotations

import importlib.util

import mlx.core as mx
import pytest
from kernels import cases

from lily_mlx.ops import norm
from lily_mlx.runtime import backends, source, strict

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="needs the ziglang package"
)

TEXT = """// A text with most of what kernels use.
#include <metal_stdlib>
using namespace metal;
{header}
constant constexpr float TABLE[2] = {{1.0f, 2.0f}};
struct Pair {{
  float a, b;
  float sum() const {{ return a + b; }}
}};
template <typename U>
inline float total(const device U* p, thread float* q, int n) {{
  float s = 0;
  for (int i = 0; i < n; i++) s += float(p[i]) + q[i % 4];
  return s;
}}
template <typename T, int N, bool FLAG>
[[kernel]] void planted(
    const device T* x [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device bool* mask [[buffer(2)]],
    device T* out [[buffer(3)]],
    uint3 at [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {{
  threadgroup float shared[N];
  threadgroup T rows[4][8];
  float mine[4] = {{0, 1, 2, 3}};
  Pair pair = {{1.0, 2.0}};
  float4 v = float4(1.0f, mine[1], mine[2], mine[3]);
  v.xy = v.zw;
  const device vec<T, 4>* x4 = reinterpret_cast<const device vec<T, 4>*>(x);
  v += float4(x4[0]) * 0.5f + select(0.0f, 1.0f, FLAG);
  shared[lane % N] = simd_sum(v.x) + precise::exp(v.y) + TABLE[1] + pair.sum();
  rows[0][lane % 8] = x[0];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float s = total(x, mine, 8) + shared[0] + as_type<float>(w[0]) + max(w[0], lane);
  if (mask[0]) s += float(rows[0][0]) + clamp(int(w[1]), 0, 3);
  {body}
  out[at.x] = T(s);
}}
"""


def planted(tmp_path, header="", body=""):
    path = tmp_path / "planted.metal"
    path.write_text(TEXT.format(header=header, body=body))
    text = source.parse(path)

    def call(x, w, mask):
        return backends.build(text, backends.backend())(
            inputs=[x, w, mask],
            template={"T": x.dtype, "N": 64, "FLAG": True},
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(32,)],
            output_dtypes=[x.dtype],
        )

    return call


def arguments(dtype=mx.bfloat16):
    return [mx.zeros((32,), dtype), mx.zeros((8,), mx.uint32), mx.zeros((9,), mx.bool_)]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_passes_good_text(tmp_path, dtype):
    assert strict.check(planted(tmp_path), arguments(dtype)) == []


REFUSED = {
    "pointer without address space": ("", "float* p = mine; s += p[0];", "p is a pointer"),
    "reference without address space": (
        "inline float f(const float& v) { return v; }", "s += f(mine[0]);", "v is a pointer",
    ),
    "pointer member": ("struct P { float* p; };", "", "p is a pointer"),
    "pointer returned": (
        "inline float* f(thread float* p) { return (thread float*)p; }", "", "f returns a pointer",
    ),
    "device pointer to a thread parameter": ("", "s += total(x, x, 3);", "no matching function"),
    "cast between address spaces": ("", "s += *(thread T*)x;", "address space"),
    "cast that drops the address space": ("", "s += float(*(T*)x);", "loses the address space"),
    "write to a const buffer": ("", "x[0] = T(1.0f);", "no viable"),
    "write to constant memory": ("", "TABLE[0] = 1;", "const"),
    "double": ("", "double d = 1; s += d;", "Metal has no double"),
    "recursion": (
        "inline int f(int n) { return n ? n * f(n - 1) : 1; }", "s += f(3);", "no recursion",
    ),
    "mutual recursion": (
        "int g(int n); inline int f(int n) { return n ? g(n - 1) : 1; } "
        "int g(int n) { return f(n); }", "s += f(3);", "no recursion",
    ),
    "goto": ("", "again: s += 1; if (s < 3) goto again;", "Metal has no goto"),
    "exceptions": ("", "throw 1;", "Metal has no throw"),
    "new": ("", "auto p = new float[3];", "Metal has no new"),
    "static local": ("", "static int calls = 0; s += calls++;", "may not be static"),
    "mutable global": ("int counter = 0;", "s += counter;", "counter at program scope"),
    "const global": ("const int LIMIT = 3;", "s += LIMIT;", "LIMIT at program scope"),
    "threadgroup memory": (
        "", "threadgroup float big[8160]; big[lane] = 1; s += big[0];", "bytes of threadgroup",
    ),
    "variable length array": ("", "float v[lane]; s += v[0];", "not a constant"),
    "float to bfloat": ("", "bfloat b = mine[0]; s += b;", "bfloat"),
    "float literal to bfloat": ("", "bfloat b = 1.0f; s += b;", "bfloat"),
    "half from bfloat": ("", "half h = bfloat(mine[0]); s += h;", "half"),
    "bfloat from half": ("", "bfloat b = half(mine[0]); s += b;", "half"),
    "bfloat plus float back to bfloat": ("", "bfloat b = 1; b += mine[0];", "+="),
    "max of uint and int": ("", "s += max(lane, 3);", "ambiguous"),
    "min of float and half": ("", "s += min(s, half(1));", "ambiguous"),
    "half times bfloat": ("", "s += half(1) * bfloat(mine[0]);", "deleted"),
    "unknown function": ("", "s += expf(s);", "expf"),
    "float to vector of half": ("", "half4 h = float4(1.0f); s += h.x;", "half4"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refuses(tmp_path, what):
    header, body, message = REFUSED[what]
    reasons = strict.check(planted(tmp_path, header, body), arguments())
    assert any(message in reason for reason in reasons), reasons


def test_threadgroup_memory_up_to_the_limit(tmp_path):
    """64 floats and 32 bfloats are there already; what is left may be used to the byte."""
    left = strict.THREADGROUP_BYTES - 64 * 4 - 32 * 2
    for extra, passes in ((0, True), (1, False)):
        body = f"threadgroup uchar big[{left + extra}]; big[lane] = 1; s += big[0];"
        assert (strict.check(planted(tmp_path, "", body), arguments()) == []) is passes


def test_threadgroup_memory_of_other_types(tmp_path):
    body = "threadgroup float4 a[1000]; threadgroup Pair b[2000]; threadgroup float3 c[64]; "
    body += "a[0] = v; b[0] = pair; c[0] = v.xyz; s += a[0].x + b[0].a + c[0].x;"
    (reason,) = strict.check(planted(tmp_path, "", body), arguments())
    assert reason.startswith(f"{64 * 4 + 32 * 2 + 16000 + 16000 + 1024} bytes of threadgroup")


def test_refuses_more_buffers_than_metal_has(tmp_path):
    for inputs, passes in ((30, True), (31, False)):
        params = "".join(f"const device float* x{i} [[buffer({i})]], " for i in range(inputs))
        path = tmp_path / "many.metal"
        path.write_text(
            f"[[kernel]] void many({params} device float* out [[buffer({inputs})]]) "
            "{ out[0] = x0[0]; }"
        )
        text = source.parse(path)

        def call(*arrays, text=text):
            return backends.build(text, backends.backend())(
                inputs=arrays,
                template={},
                grid=(32, 1, 1),
                threadgroup=(32, 1, 1),
                output_shapes=[(8,)],
                output_dtypes=[mx.float32],
            )

        assert (strict.check(call, [mx.zeros((8,))] * inputs) == []) is passes


def test_the_text_is_the_shipped_one():
    """MLX's text is its signature around the loader's header and body, unchanged."""
    text = source.load("rms_norm_gated")
    args = norm.rms_norm_gated.inputs(mx.random.key(0), mx.bfloat16, 128)
    (whole,) = strict.metal_texts(norm.rms_norm_gated.launch, *args)
    assert whole.startswith(text.header + "template <typename T, int D>\n[[kernel]] void ")
    assert f"{{\n{text.body}\n}}\n" in whole


@pytest.mark.parametrize(
    ("op", "variant", "size"),
    [pytest.param(*c, id=f"{c[0].name}-{'-'.join(map(str, c[1]))}-{c[2]}") for c in cases()],
)
def test_shipped(op, variant, size):
    assert strict.check(op.launch, op.inputs(mx.random.key(0), *variant, **size)) == []
