"""Quantized matmuls of few rows, with what stands before and after them in a layer."""

from __future__ import annotations

import functools

import mlx.core as mx

from ..device import tuned
from ..runtime import kernel, op, scalar

MAX_ROWS = 8
# {mode: {bits: values a lane must own at least, for them to fill whole words}}
MODES = {
    "affine": {2: 16, 3: 32, 4: 8, 5: 32, 6: 16, 8: 8},
    "mxfp4": {4: 8},
    "nvfp4": {4: 8},
    "mxfp8": {8: 8},
}
_FLOATS = (mx.bfloat16, mx.float16, mx.float32)
_REGISTERS = 64  # of a lane, for its values of x

Variant = tuple[mx.Dtype, str, int, int, int, int, bool, bool]


def qmv_reference(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    norm_weight: mx.array | None = None,
    eps: float = 1e-6,
    residual: mx.array | None = None,
    group_size: int = 64,
    bits: int = 4,
    mode: str = "affine",
) -> mx.array:
    """`qmv` in plain MLX, operation by operation as MLX-LM has it."""
    if norm_weight is not None:
        x = mx.fast.rms_norm(x, norm_weight, eps)
    y = mx.quantized_matmul(
        x, w, scales, biases, transpose=True, group_size=group_size, bits=bits, mode=mode
    )
    return y if residual is None else residual + y


@functools.cache
def _values(mode: str, bits: int, group_size: int, K: int, R: int) -> int:
    """Values of x that a lane owns, 0 if the kernel does not serve these sizes.

    As many as one load of 16 bytes brings, fewer to have 32 lanes at work or R rows in registers.
    """
    least = MODES.get(mode, {}).get(bits, 0)
    if not least or K % group_size or group_size % 16:
        return 0
    values = 16 if bits == 8 or group_size % 32 else 32
    while values > least and (values * R > _REGISTERS or 32 * values > K):
        values //= 2
    return values if values * R <= _REGISTERS and 1024 * values >= K else 0


def _variant(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    norm_weight: mx.array | None = None,
    eps: float = 1e-6,
    residual: mx.array | None = None,
    group_size: int = 64,
    bits: int = 4,
    mode: str = "affine",
) -> Variant | None:
    dtype, K = x.dtype, x.shape[-1]
    R = x.size // K if K else 0
    affine = mode == "affine"
    fits = (
        0 < R <= MAX_ROWS
        and dtype in _FLOATS
        and w.ndim == 2
        and scales.size >= 8  # MLX gives a kernel smaller inputs in constant memory
        and _values(mode, bits, group_size, K, R)
        and (biases is not None) == affine
        and scales.dtype == (dtype if affine else mx.uint8)
        and (norm_weight is None or norm_weight.dtype == dtype)
        and (residual is None or (residual.dtype == dtype and residual.size == R * w.shape[0] >= 8))
    )
    if not fits:
        return None
    return dtype, mode, bits, group_size, K, R, norm_weight is not None, residual is not None


def qmv_inputs(
    key: mx.array,
    dtype: mx.Dtype,
    mode: str,
    bits: int,
    group_size: int,
    K: int,
    R: int,
    norm: bool,
    add: bool,
    N: int = 21,
) -> tuple:
    """Random arguments: x (R, K), w (N, K) quantized, norm weight (K,) near 1, residual (R, N)."""
    keys = mx.random.split(key, 4)
    x = mx.random.normal((R, K), key=keys[0]).astype(dtype)
    w = (mx.random.normal((N, K), key=keys[1]) * K**-0.5).astype(dtype)
    w, scales, *biases = mx.quantize(w, group_size=group_size, bits=bits, mode=mode)
    weight = (1 + 0.1 * mx.random.normal((K,), key=keys[2])).astype(dtype) if norm else None
    residual = mx.random.normal((R, N), key=keys[3]).astype(dtype) if add else None
    biases = biases[0] if biases else None
    return x, w, scales, biases, weight, 1e-6, residual, group_size, bits, mode


def _bytes(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    norm_weight: mx.array | None = None,
    eps: float = 1e-6,
    residual: mx.array | None = None,
    group_size: int = 64,
    bits: int = 4,
    mode: str = "affine",
) -> int:
    arrays = (x, w, scales, biases, norm_weight, residual)
    out = x.size // x.shape[-1] * w.shape[0] * x.dtype.size
    return out + sum(a.nbytes for a in arrays if a is not None)


@functools.cache
def _geometry(
    N: int, K: int, R: int, values: int
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and threadgroup for N output rows."""
    tuning = tuned("qmv")
    simdgroups = -(-K // (32 * values))
    most = 16 if simdgroups * R > 128 else 32  # the kernel's threadgroup memory holds no more
    rows = min(max(N // tuning["threadgroups"] // 4 * 4, 4), tuning["rows"], most)
    return (-(-N // rows) * 32 * simdgroups, 1, 1), (32 * simdgroups, 1, 1)


@op(reference=qmv_reference, variant=_variant, inputs=qmv_inputs, bytes=_bytes)
def qmv(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    norm_weight: mx.array | None = None,
    eps: float = 1e-6,
    residual: mx.array | None = None,
    group_size: int = 64,
    bits: int = 4,
    mode: str = "affine",
) -> mx.array:
    """rms_norm(x) @ dequantize(w).T + residual; without the norm or the residual if None.

    Args:
        x: (..., K), 1 to 8 rows in all, float32, float16 or bfloat16, aligned to 4 elements.
        w: (N, K * bits / 32) uint32, scales and biases (N, K / group_size), as `mx.quantize` packs
            them: affine in 2, 3, 4, 5, 6 or 8 bits, x.dtype; mxfp4, nvfp4 or mxfp8, no biases.
        norm_weight: (K,), x.dtype; None for no norm.
        eps: added to the mean square.
        residual: (..., N), x.dtype, or None.
        group_size, bits, mode: of w.
    Returns: (..., N), x.dtype. fp32 sums; the normed x rounds as `mx.fast.rms_norm`'s, the result
        once. What the kernel does not serve, the reference does: more rows than 8, or than 2 at 3
        and 5 bits and 4 at 6; other dtypes.
    Cost: 1 launch; bytes of w, scales and biases, and R * (K + 2 * N) * itemsize.
    """
    K = x.shape[-1]
    R = x.size // K
    N = w.shape[0]
    affine = mode == "affine"
    values = _values(mode, bits, group_size, K, R)
    grid, threadgroup = _geometry(N, K, R, values)
    return kernel("qmv")(
        inputs=[
            x,
            w,
            scales,
            biases if affine else scales,
            x if norm_weight is None else norm_weight,
            scalar(eps),
            x if residual is None else residual,
            scalar(N, mx.int32),
        ],
        template={
            "T": x.dtype,
            "S": scales.dtype,
            "BITS": bits,
            "GROUP": group_size,
            "FP": not affine,
            "K": K,
            "R": R,
            "V": values,
            "NORM": norm_weight is not None,
            "ADD": residual is not None,
        },
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[(*x.shape[:-1], N)],
        output_dtypes=[x.dtype],
    )[0]
