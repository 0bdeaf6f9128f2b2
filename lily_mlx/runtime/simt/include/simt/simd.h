// <metal_simdgroup>, <metal_quadgroup> and the barriers. 32 lanes; a reduction combines
// neighbours first (lanes 0 and 1, then pairs, ...): the butterfly xor 1, 2, 4, 8, 16.
#pragma once
#include "simt/math.h"
#include "simt/runtime.h"

namespace metal {

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16,
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
enum class thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup,
                          thread_scope_device };

METAL_FUNC void threadgroup_barrier(mem_flags flags, SIMT_SITE) {
  simt_wait(simt::kBarrier, int(flags), "threadgroup_barrier", file, line);
}
METAL_FUNC void simdgroup_barrier(mem_flags flags, SIMT_SITE) {
  simt_wait(simt::kSimdBarrier, int(flags), "simdgroup_barrier", file, line);
}

// Out of line: a kernel has many calls, and each computation is worth a call.
template <class R, class T, class F>
[[gnu::noinline]] void simt_compute(simt::Simdgroup* g, F compute) {
  g->fresh = 0;
  compute(reinterpret_cast<const T*>(g->in), reinterpret_cast<R*>(g->out), g->mask);
}

// Exchanges `x` among the lanes: compute(in, out, mask) runs once, for all of them.
template <class R, class T, class F>
METAL_FUNC R simt_exchange(int kind, T x, F compute, const char* what, const char* file, int line) {
  static_assert(sizeof(T) <= simt::kSlot && sizeof(R) <= simt::kSlot);
  reinterpret_cast<T*>(simt_state.simdgroup->in)[simt_state.lane] = x;
  simt_wait(kind, 0, what, file, line);
  simt::Simdgroup* g = simt_state.simdgroup;
  if (g->fresh) simt_compute<R, T>(g, compute);
  return reinterpret_cast<R*>(g->out)[simt_state.lane];
}

// Reduces blocks of `width` lanes (32 or 4).
template <int width, class T, class Op>
METAL_FUNC T simt_reduce(T x, Op op, const char* what, const char* file, int line) {
  return simt_exchange<T>(
      width == 4 ? simt::kQuad : simt::kSimd, x,
      [=](const T* in, T* out, uint mask) {
        for (uint i = 0; i < 32; i++) out[i] = in[i];
        for (uint by = 1; by < width; by *= 2) {
          uint merged = mask;
          for (uint i = 0; i < 32; i += 2 * by) {
            bool a = mask >> i & 1, b = mask >> (i + by) & 1;
            if (a && b) out[i] = op(out[i], out[i + by]);
            else if (b) out[i] = out[i + by];
            if (b) merged |= 1u << i;
          }
          mask = merged;
        }
        for (uint i = 0; i < 32; i++) out[i] = out[i / width * width];
      },
      what, file, line);
}

#define SIMT_REDUCE(name, expr)                                                              \
  template <class T>                                                                         \
  METAL_FUNC T simd_##name(T x, SIMT_SITE) {                                                 \
    return simt_reduce<32>(x, [](T a, T b) { return T(expr); }, "simd_" #name, file, line);  \
  }                                                                                          \
  template <class T>                                                                         \
  METAL_FUNC T quad_##name(T x, SIMT_SITE) {                                                 \
    return simt_reduce<4>(x, [](T a, T b) { return T(expr); }, "quad_" #name, file, line);   \
  }
SIMT_REDUCE(sum, a + b)
SIMT_REDUCE(product, a* b)
SIMT_REDUCE(max, metal::max(a, b))
SIMT_REDUCE(min, metal::min(a, b))
SIMT_REDUCE(and, a& b)
SIMT_REDUCE(or, a | b)
SIMT_REDUCE(xor, a ^ b)
SIMT_REDUCE(all, a&& b)
SIMT_REDUCE(any, a || b)
#undef SIMT_REDUCE

#define SIMT_PREFIX(name, start, expr)                                                   \
  template <class T>                                                                     \
  METAL_FUNC T simd_prefix_exclusive_##name(T x, SIMT_SITE) {                            \
    return simt_exchange<T>(                                                             \
        simt::kSimd, x,                                                                  \
        [](const T* in, T* out, uint mask) {                                             \
          T a = T(start);                                                                \
          for (uint i = 0; i < 32; i++) {                                                \
            T b = in[i];                                                                 \
            out[i] = a;                                                                  \
            if (mask >> i & 1) a = T(expr);                                              \
          }                                                                              \
        },                                                                               \
        "simd_prefix_exclusive_" #name, file, line);                                     \
  }                                                                                      \
  template <class T>                                                                     \
  METAL_FUNC T simd_prefix_inclusive_##name(T x, SIMT_SITE) {                            \
    T a = simd_prefix_exclusive_##name(x, file, line), b = x;                            \
    return T(expr);                                                                      \
  }
SIMT_PREFIX(sum, 0, a + b)
SIMT_PREFIX(product, 1, a* b)
#undef SIMT_PREFIX

// Each lane takes the value of lane `from`; `valid` false keeps its own.
template <class T>
METAL_FUNC T simt_take(T x, uint from, bool valid, int kind, const char* what, const char* file,
                       int line) {
  struct Slot {
    T value;
  };
  simt_exchange<Slot>(
      kind, Slot{x},
      [](const Slot* in, Slot* out, uint) {
        for (uint i = 0; i < 32; i++) out[i] = in[i];
      },
      what, file, line);
  if (!valid) return x;
  simt::Simdgroup* g = simt_state.simdgroup;
  if (from > 31 || !(g->mask >> from & 1)) {
    simt_inactive(what, from, file, line);
    return x;
  }
  return reinterpret_cast<Slot*>(g->out)[from].value;
}

#define SIMT_SHUFFLE(name, args, from, valid)                                               \
  template <class T>                                                                        \
  METAL_FUNC T simd_##name args {                                                           \
    [[maybe_unused]] uint lane = simt_state.lane;                                           \
    return simt_take(x, from, valid, simt::kSimd, "simd_" #name, file, line);               \
  }
SIMT_SHUFFLE(shuffle, (T x, ushort id, SIMT_SITE), uint(id), true)
SIMT_SHUFFLE(broadcast, (T x, ushort id, SIMT_SITE), uint(id), true)
SIMT_SHUFFLE(shuffle_xor, (T x, ushort by, SIMT_SITE), lane ^ uint(by), true)
SIMT_SHUFFLE(shuffle_up, (T x, ushort by, SIMT_SITE), lane - by, lane >= by)
SIMT_SHUFFLE(shuffle_down, (T x, ushort by, SIMT_SITE), lane + by, lane + by < 32)
SIMT_SHUFFLE(shuffle_rotate_up, (T x, ushort by, SIMT_SITE), (lane - by) & 31, true)
SIMT_SHUFFLE(shuffle_rotate_down, (T x, ushort by, SIMT_SITE), (lane + by) & 31, true)
#undef SIMT_SHUFFLE
// The lanes that would read past the end take the fill value's lanes, counted from that end.
#define SIMT_FILL(name, from, within, past)                                                   \
  template <class T>                                                                          \
  METAL_FUNC T simd_shuffle_and_fill_##name(T x, T fill, ushort by, SIMT_SITE) {              \
    uint lane = simt_state.lane;                                                              \
    const char* what = "simd_shuffle_and_fill_" #name;                                        \
    T moved = simt_take(x, from, within, simt::kSimd, what, file, line);                      \
    T filled = simt_take(fill, past, !(within), simt::kSimd, what, file, line);               \
    return within ? moved : filled;                                                           \
  }
SIMT_FILL(up, lane - by, lane >= by, 32 + lane - by)
SIMT_FILL(down, lane + by, lane + by < 32, lane + by - 32)
#undef SIMT_FILL
template <class T>
METAL_FUNC T simd_broadcast_first(T x, SIMT_SITE) {
  return simt_exchange<T>(
      simt::kSimd, x,
      [](const T* in, T* out, uint mask) {
        for (uint i = 0; i < 32; i++) out[i] = in[__builtin_ctz(mask)];
      },
      "simd_broadcast_first", file, line);
}
#define SIMT_QUAD(name, by, from)                                                           \
  template <class T>                                                                        \
  METAL_FUNC T quad_##name(T x, ushort by, SIMT_SITE) {                                     \
    [[maybe_unused]] uint lane = simt_state.lane;                                           \
    return simt_take(x, from, true, simt::kQuad, "quad_" #name, file, line);                \
  }
SIMT_QUAD(shuffle, id, (lane & ~3u) | (id & 3))
SIMT_QUAD(broadcast, id, (lane & ~3u) | (id & 3))
SIMT_QUAD(shuffle_xor, by, lane ^ (by & 3))
SIMT_QUAD(shuffle_up, by, (lane & 3) >= by ? lane - by : lane)
SIMT_QUAD(shuffle_down, by, (lane & 3) + by < 4 ? lane + by : lane)
#undef SIMT_QUAD

struct simd_vote {
  using vote_t = ulong;
  vote_t votes;
  explicit constexpr simd_vote(vote_t v = 0) : votes(v) {}
  explicit constexpr operator vote_t() const { return votes; }
  bool all() const { return votes == 0xffffffffu; }
  bool any() const { return votes != 0; }
};
METAL_FUNC simd_vote simt_ballot(bool x, const char* what, const char* file, int line) {
  return simd_vote(simt_exchange<ulong>(
      simt::kSimd, x,
      [](const bool* in, ulong* out, uint mask) {
        ulong votes = 0;
        for (uint i = 0; i < 32; i++) votes |= ulong(mask >> i & 1 && in[i]) << i;
        for (uint i = 0; i < 32; i++) out[i] = votes;
      },
      what, file, line));
}
METAL_FUNC simd_vote simd_ballot(bool x, SIMT_SITE) {
  return simt_ballot(x, "simd_ballot", file, line);
}
METAL_FUNC simd_vote simd_active_threads_mask(SIMT_SITE) {
  return simt_ballot(true, "simd_active_threads_mask", file, line);
}
METAL_FUNC bool simd_is_first(SIMT_SITE) {
  ulong votes = ulong(simt_ballot(true, "simd_is_first", file, line));
  return uint(__builtin_ctzl(votes)) == simt_state.lane;
}

}  // namespace metal

METAL_FUNC ushort __metal_get_thread_index_in_simdgroup(ushort) { return simt_state.lane; }

namespace simt {
// How the entry point passes a buffer or an attribute to whatever type the kernel declares.
struct Pointer {
  void* p;
  template <class T>
  operator T*() const { return static_cast<T*>(p); }
};
struct Reference {
  void* p;
  template <class T>
  operator T&() const { return *static_cast<T*>(p); }
};
struct Attribute {
  Triple t;
  template <class T>
    requires(__is_integral(T))
  operator T() const { return T(t.x); }
  template <class T>
  operator metal::vec<T, 2>() const { return {T(t.x), T(t.y)}; }
  template <class T>
  operator metal::vec<T, 3>() const { return {T(t.x), T(t.y), T(t.z)}; }
};
}  // namespace simt
