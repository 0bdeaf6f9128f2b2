// What a compiled kernel and the runtime library share: the running thread's state and the calls
// that block it. Fibers switch only inside those calls.
#pragma once

#define SIMT_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace simt {

constexpr unsigned kLanes = 32;
constexpr unsigned kSlot = 64;  // the largest value that a simd function exchanges, in bytes

// A simd function: every lane writes its slot of `in` and blocks; the first lane to resume turns
// `in` into `out` (fresh is 1 until then); each lane reads its result from `out`.
struct Simdgroup {
  alignas(64) unsigned char in[kLanes * kSlot];
  alignas(64) unsigned char out[kLanes * kSlot];
  unsigned mask;   // the lanes that take part
  unsigned fresh;
};

struct Triple {
  unsigned x, y, z;
};

// Attributes of the thread about to start, and the running lane.
struct State {
  Simdgroup* simdgroup;
  unsigned lane;    // in the simdgroup
  unsigned index;   // in the threadgroup
  unsigned simdgroup_index, simdgroups;
  Triple thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
  Triple threads_per_grid, threads_per_threadgroup, dispatch_threads_per_threadgroup;
  Triple threadgroups_per_grid;
};

enum Wait { kSimd, kQuad, kSimdBarrier, kBarrier };

}  // namespace simt

extern "C" {
extern simt::State simt_state;
void simt_wait(int kind, int flags, const char* what, const char* file, int line);
void simt_inactive(const char* what, unsigned from, const char* file, int line);
void simt_threadgroup_array(void* base, unsigned long size, const char* name);
}

namespace simt {

// The storage of one `threadgroup T name[...]` declaration, with a margin on both sides.
template <class T>
struct Shared {
  alignas(128) unsigned char before[128];
  unsigned char value[sizeof(T)];
  alignas(128) unsigned char after[128];
  T* get([[maybe_unused]] const char* name) {
    void* at = value;
#ifdef SIMT_CHECK
    simt_threadgroup_array(at, sizeof(T), name);
    // Hides that this is a static: else the compiler may load from it where the source does not.
    // (A reference as the result would tell as much.)
    asm volatile("" : "+r"(at));
#endif
    return static_cast<T*>(at);
  }
};

}  // namespace simt
