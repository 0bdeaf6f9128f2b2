"""The loader: what it takes from a kernel file, what it refuses, and that minifying is safe."""

from __future__ import annotations

import re
import textwrap

import pytest

from lily_mlx.runtime import source, tokens

KERNEL = """
// out = x + 1.
//
// Use: prefill
#include <metal_stdlib>
#include "common/helper.h"
using namespace metal;
#define TWICE(x) \\
  ((x) + (x))  // two
template <typename T, int N, bool FLAG>
[[kernel]] void add_one(
    const device T* x [[buffer(0)]],
    const constant float* eps [[buffer(1)]],
    device T* out [[buffer(2)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]],
    ushort lane [[thread_index_in_simdgroup]],
    uint group [[threadgroup_position_in_grid]]) {
  /* a comment
     of two lines */
  int a = 1 - -1;  // - - must not join
  int b = a / *&a + +a;
#if 1
  out[thread_position_in_grid.x] = T(helper(x[0]) + TWICE(eps[0]) + a - b + lane + group);
#endif
}
"""


def write(folder, text, name="add_one", helper="inline float helper(float v) { return v; }"):
    common = folder / "metal_kernels" / "common"
    common.mkdir(parents=True, exist_ok=True)
    (common / "helper.h").write_text("#pragma once\n// a header\n" + helper + "\n")
    path = folder / "metal_kernels" / f"{name}.metal"
    path.write_text(textwrap.dedent(text).lstrip())
    return path


def test_takes_a_kernel_apart(tmp_path):
    got = source.parse(write(tmp_path, KERNEL))
    assert got.name == "add_one"
    assert got.template == {"T": "typename", "N": "int", "FLAG": "bool"}
    assert got.inputs == ("x", "eps") and got.outputs == ("out",)
    assert got.contiguous
    assert got.doc.startswith("out = x + 1.") and got.limit == source.PREFILL_LIMIT
    assert got.header == ("inline float helper(float v){return v;}\n#define TWICE(x) ((x) + (x))\n")
    assert got.body == (
        "ushort lane=thread_index_in_simdgroup;uint group=threadgroup_position_in_grid.x;"
        "int a=1- -1;int b=a/ *&a+ +a;\n#if 1\n"
        "out[thread_position_in_grid.x]=T(helper(x[0])+TWICE(eps[0])+a-b+lane+group);\n#endif"
    )


def test_debug_text_keeps_lines(tmp_path):
    path = write(tmp_path, KERNEL)
    got = source.parse(path)
    lines = path.read_text().splitlines()
    wanted = next(i for i, line in enumerate(lines, 1) if "helper(x[0])" in line)
    at, file = 0, ""
    for line in got.debug_body.splitlines():
        if mark := re.fullmatch(r'#line (\d+) "(.*)"', line):
            at, file = int(mark[1]), mark[2]
            continue
        if "helper" in line:
            assert (at, file) == (wanted, "metal_kernels/add_one.metal")
            break
        at += 1
    else:
        pytest.fail("the line is not in the debug text")
    assert '"metal_kernels/common/helper.h"' in got.debug_header
    assert [t[:2] for t in tokens.tokenize(_without_lines(got.debug_body))] == [
        t[:2] for t in tokens.tokenize(got.body)
    ]


def _without_lines(text):
    return re.sub(r"^#line.*$", "", text, flags=re.M)


@pytest.mark.parametrize(
    ("old", "new", "where", "message"),
    [
        ("void add_one", "void add_two", "add_two", "its file add_one"),
        ("[[kernel]]", "", "", "exactly one [[kernel]]"),
        ("const device T* x", "const T* x", "T* x", "x must be const device"),
        ("const constant float* eps", "constant float& eps", "eps", "array of one element"),
        ("device T* out", "device atomic_uint* out", "atomic_uint", "atomic"),
        ("ushort lane [[thread_index_in", "ushort lane [[render_target_in", "lane", "attribute"),
        ("ushort lane", "float lane", "lane", "must be declared uint lane"),
        ("int N,", "float N,", "float N", "typename, int or bool"),
        ("int a =", "int x_shape = 0, a =", "x_shape", "takes x_shape for the shape of an input"),
        ("int a =", "int max_ndim = 0, a =", "max_ndim", "takes max_ndim for the ndim"),
        ('"common/helper.h"', '"common/none.h"', "none.h", "no file common/none.h"),
        ("uint group [[threadgroup_position_in_grid]]", "uint group", "uint group", "attribute"),
    ],
)
def test_refuses(tmp_path, old, new, where, message):
    assert old in KERNEL
    path = write(tmp_path, KERNEL.replace(old, new, 1))
    with pytest.raises(source.SourceError) as error:
        source.parse(path)
    line = 1
    if where:
        line = next(i for i, s in enumerate(path.read_text().splitlines(), 1) if where in s)
    assert f"add_one.metal:{line}: " in str(error.value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_refuses_text_after_the_kernel_and_a_second_kernel(tmp_path):
    with pytest.raises(source.SourceError, match=r"add_one.metal:\d+: nothing may follow"):
        source.parse(write(tmp_path, KERNEL + "int more;"))
    with pytest.raises(source.SourceError, match="this has 2"):
        source.parse(write(tmp_path, KERNEL + KERNEL))


def test_strides_are_layout_and_not_inputs(tmp_path):
    text = KERNEL.replace(
        "const constant float* eps",
        "constant int64_t* x_strides [[buffer(9)]], const constant float* eps",
    ).replace("x[0]", "x[x_strides[0]]")
    got = source.parse(write(tmp_path, text))
    assert got.inputs == ("x", "eps") and not got.contiguous


@pytest.mark.parametrize(
    "text",
    ["a - - b", "a--- b", "x<y> >z", "1.0f + .5f", "a & & b", "a < ::b", "p->*q", "s = \"a  // b\"",
     "a / /**/ * b", "a / *b */**/ c", "1 .x", "1e - 3", "0x1e + 3", "return - 1",
     "a ? b : : c", "# define F (x)  \\\n  (x)"],
)  # fmt: skip
def test_minified_text_has_the_same_tokens(text):
    first = list(tokens.tokenize(text))
    again = list(tokens.tokenize(tokens.join(first)))
    assert [t[:2] for t in again] == [t[:2] for t in first]


@pytest.mark.parametrize("name", source.names())
def test_shipped_kernel(name):
    got = source.load(name)
    assert got.size <= got.limit, f"{name} has {got.size} bytes, its limit is {got.limit}"
    assert len(got.doc.splitlines()) >= 3, "the head comment: formula, ownership, floor"
    for text in (got.header, got.body):
        again = tokens.join(tokens.tokenize(text))
        assert again == text.strip(), "minifying is not a fixed point"


def test_the_wheels_and_the_repositorys_folder(tmp_path, monkeypatch):
    package = tmp_path / "lily_mlx"
    (package / "runtime").mkdir(parents=True)
    monkeypatch.setattr(source, "__file__", str(package / "runtime" / "source.py"))
    find = source.folder.__wrapped__
    with pytest.raises(source.SourceError, match="reinstall"):
        find()
    (tmp_path / "metal_kernels").mkdir()
    assert find() == tmp_path / "metal_kernels"
    (package / "metal_kernels").mkdir()
    assert find() == package / "metal_kernels"


def test_unknown_kernel_names_the_known():
    with pytest.raises(source.SourceError, match="rms_norm_gated"):
        source.load("no_such_kernel")
