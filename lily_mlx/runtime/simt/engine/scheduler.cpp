// Runs a grid: threadgroups one after another, each thread a fiber with a stack of its own.
//
// A lane runs until it blocks in a simd function or a barrier. When no lane of a simdgroup can
// run, the lanes that wait at one place form the active set and go on together, as on a GPU
// whose lanes reconverge. A stack goes back to the pool when its thread ends, so a kernel that
// never blocks uses one stack.
#include "launch.h"

simt::State simt_state;

namespace simt {

Launch* launch;
Lane lanes[kMaxThreads];
u32 n_threads;
u32 sync_count[2][kMaxThreads / kLanes];

static Simdgroup simdgroups[kMaxThreads / kLanes];
static u8* free_stacks[kMaxThreads];
static u32 n_free;
static void* main_sp;
static u32 random_state;

extern "C" void simt_switch(void** save, void* to);

#if defined(__x86_64__)
asm(".text\n.globl simt_switch\n.type simt_switch,@function\nsimt_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
static void* fresh_stack(u8* top, void (*start)()) {
  void** sp = reinterpret_cast<void**>(top) - 8;
  for (int i = 0; i < 8; i++) sp[i] = nullptr;
  sp[6] = reinterpret_cast<void*>(start);
  return sp;
}
#elif defined(__aarch64__)
#if defined(__APPLE__)
#define SIMT_SYMBOL "_simt_switch"
#else
#define SIMT_SYMBOL "simt_switch"
#endif
asm(".text\n.globl " SIMT_SYMBOL "\n.p2align 2\n" SIMT_SYMBOL ":\n"
    "sub sp,sp,#160\nstp x19,x20,[sp]\nstp x21,x22,[sp,#16]\nstp x23,x24,[sp,#32]\n"
    "stp x25,x26,[sp,#48]\nstp x27,x28,[sp,#64]\nstp x29,x30,[sp,#80]\nstp d8,d9,[sp,#96]\n"
    "stp d10,d11,[sp,#112]\nstp d12,d13,[sp,#128]\nstp d14,d15,[sp,#144]\n"
    "mov x9,sp\nstr x9,[x0]\nmov sp,x1\n"
    "ldp x19,x20,[sp]\nldp x21,x22,[sp,#16]\nldp x23,x24,[sp,#32]\n"
    "ldp x25,x26,[sp,#48]\nldp x27,x28,[sp,#64]\nldp x29,x30,[sp,#80]\nldp d8,d9,[sp,#96]\n"
    "ldp d10,d11,[sp,#112]\nldp d12,d13,[sp,#128]\nldp d14,d15,[sp,#144]\n"
    "add sp,sp,#160\nret\n");
static void* fresh_stack(u8* top, void (*start)()) {
  void** sp = reinterpret_cast<void**>(top) - 20;
  for (int i = 0; i < 20; i++) sp[i] = nullptr;
  sp[11] = reinterpret_cast<void*>(start);
  return sp;
}
#else
#error "the executor switches stacks on x86-64 and aarch64 only"
#endif

static Lane& running() { return lanes[simt_state.index]; }

static void yield() { simt_switch(&running().sp, main_sp); }

void abort_launch() {
  launch->aborted = kFaulted;
  yield();
  __builtin_unreachable();
}

static void thread_main() {
  launch->entry(launch->buffers, &simt_state);
  running().state = kDone;
  yield();
  __builtin_unreachable();
}

constexpr u64 kCanary = 0x5ca1ab1e0ddba11;
static u64& canary(Lane& lane) { return *reinterpret_cast<u64*>(lane.stack); }

static void resume(u32 thread) {
  Lane& lane = lanes[thread];
  State& s = simt_state;
  s.index = thread;
  s.lane = thread % kLanes;
  if (lane.state == kFresh) {
    Triple g = s.threads_per_threadgroup, p = s.threadgroup_position_in_grid;
    Triple& t = s.thread_position_in_threadgroup;
    t = {thread % g.x, thread / g.x % g.y, thread / g.x / g.y};
    Triple full = s.dispatch_threads_per_threadgroup;
    s.thread_position_in_grid = {p.x * full.x + t.x, p.y * full.y + t.y, p.z * full.z + t.z};
    lane.stack = free_stacks[--n_free];
    canary(lane) = kCanary;
    lane.sp = fresh_stack(lane.stack + launch->stack_size, thread_main);
  }
  lane.state = kReady;
  simt_switch(&main_sp, lane.sp);
  if (canary(lane) != kCanary) launch->aborted = kStackOverflow;
  if (lane.state == kDone) free_stacks[n_free++] = lane.stack;
}

static bool same_place(const Lane& a, const Lane& b) {
  return a.file == b.file && a.line == b.line && a.what == b.what;
}

static void report_missing(u32 first, u32 n, u32 mask, const Lane& at) {
  u32 missing = 0;
  while (missing < n && (mask >> missing & 1)) missing++;
  Fault* f = add_fault(kMissingLane, kNoSite, at.file, at.line, first + missing);
  if (f && f->count == 1) {
    const Lane& lane = lanes[first + missing];
    f->what = at.what;
    f->other = lane.state == kDone ? kNoSite : u32(lane.line);
    f->size = n - __builtin_popcount(mask);
  }
}

// Releases the lanes of a simdgroup that wait at one place. False if none waits.
static bool release(u32 sg, u32 first, u32 n) {
  u32 leader = kNoSite;
  for (u32 i = 0; i < n; i++) {
    const Lane& lane = lanes[first + i];
    if (lane.state != kBlocked || lane.wait == kBarrier) continue;
    if (leader == kNoSite || lane.line < lanes[first + leader].line) leader = i;
  }
  if (leader == kNoSite) return false;
  const Lane& at = lanes[first + leader];
  u32 mask = 0;
  for (u32 i = 0; i < n; i++) {
    Lane& lane = lanes[first + i];
    if (lane.state == kBlocked && lane.wait == at.wait && same_place(lane, at)) mask |= 1u << i;
  }
  if (launch->check) {
    check_segment_end(n);
    u32 all = n == 32 ? ~0u : (1u << n) - 1;
    u32 need = all;
    if (at.wait == kQuad) {
      need = 0;
      for (u32 q = 0; q < n; q += 4) need |= (mask >> q & 15) ? (15u << q) & all : 0;
    }
    if (mask != need) report_missing(first, n, mask | (all & ~need), at);
    for (int space = 0; space < 2; space++) {
      bool orders = at.wait == kSimdBarrier ? at.flags >> space & 1 : launch->simd_orders;
      sync_count[space][sg] += orders;
    }
    launch->simd_operations += at.wait != kSimdBarrier;
  }
  for (u32 i = 0; i < n; i++) {
    if (mask >> i & 1) lanes[first + i].state = kReady;
  }
  simdgroups[sg].mask = mask;
  simdgroups[sg].fresh = 1;
  return true;
}

static u32 next_random() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 17;
  return random_state ^= random_state << 5;
}

// Runs a simdgroup until each lane has ended or waits at a threadgroup barrier.
static void run_simdgroup(u32 sg) {
  u32 first = sg * kLanes;
  u32 n = n_threads - first < kLanes ? n_threads - first : kLanes;
  simt_state.simdgroup = &simdgroups[sg];
  simt_state.simdgroup_index = sg;
  do {
    u8 order[kLanes];
    for (u32 i = 0; i < n; i++) order[i] = launch->order == 1 ? n - 1 - i : i;
    if (launch->order == 2) {
      for (u32 i = n; i > 1; i--) {
        u32 j = next_random() % i;
        u8 t = order[i - 1];
        order[i - 1] = order[j];
        order[j] = t;
      }
    }
    for (u32 i = 0; i < n; i++) {
      LaneState s = lanes[first + order[i]].state;
      if (s == kFresh || s == kReady) resume(first + order[i]);
      if (launch->aborted) return;
    }
  } while (release(sg, first, n));
  if (launch->check) check_segment_end(n);
}

static void run_group() {
  n_free = n_threads;
  for (u32 i = 0; i < n_threads; i++) {
    free_stacks[i] = launch->stacks + (n_threads - 1 - i) * launch->stack_size;
    lanes[i].state = kFresh;
    lanes[i].wrap_file = nullptr;
    lanes[i].nan_site = kNoSite;
  }
  u32 n = (n_threads + kLanes - 1) / kLanes;
  simt_state.simdgroups = n;
  for (u32 i = 0; i < n; i++) sync_count[0][i] = sync_count[1][i] = 0;
  if (launch->check) check_group();
  while (true) {
    u32 start = launch->order == 2 ? next_random() % n : 0;
    for (u32 i = 0; i < n; i++) {
      u32 sg = launch->order == 1 ? n - 1 - i : (start + i) % n;
      run_simdgroup(sg);
      if (launch->aborted) return;
    }
    const Lane* at = nullptr;
    u32 waiting = 0, missing = kNoSite;
    int flags = 0;
    for (u32 i = 0; i < n_threads; i++) {
      if (lanes[i].state != kBlocked) continue;
      if (!at) at = &lanes[i];
      waiting += same_place(*at, lanes[i]);
      flags |= lanes[i].flags;
    }
    if (!at) return;
    if (launch->check) {
      if (waiting != n_threads) {
        for (u32 i = n_threads; i-- > 0;) {
          if (lanes[i].state != kBlocked || !same_place(*at, lanes[i])) missing = i;
        }
        Fault* f = add_fault(kMissingLane, kNoSite, at->file, at->line, missing);
        if (f && f->count == 1) {
          f->what = at->what;
          f->other = lanes[missing].state == kDone ? kNoSite : u32(lanes[missing].line);
          f->size = n_threads - waiting;
        }
      }
      check_barrier(flags);
      launch->barriers++;
    }
    for (u32 i = 0; i < n_threads; i++) {
      if (lanes[i].state == kBlocked) lanes[i].state = kReady;
    }
  }
}

static u32 least(u32 a, u32 b) { return a < b ? a : b; }

extern "C" void simt_run(Launch* l) {
  launch = l;
  random_state = l->seed * 2654435761u | 1;
  State& s = simt_state;
  Triple grid = l->grid, full = l->group;
  s.threads_per_grid = grid;
  s.dispatch_threads_per_threadgroup = full;
  s.threadgroups_per_grid = {(grid.x + full.x - 1) / full.x, (grid.y + full.y - 1) / full.y,
                             (grid.z + full.z - 1) / full.z};
  if (l->check) check_start();
  Triple g = s.threadgroups_per_grid;
  for (u32 z = 0; z < g.z; z++) {
    for (u32 y = 0; y < g.y; y++) {
      for (u32 x = 0; x < g.x; x++) {
        s.threadgroup_position_in_grid = {x, y, z};
        s.threads_per_threadgroup = {least(full.x, grid.x - x * full.x),
                                     least(full.y, grid.y - y * full.y),
                                     least(full.z, grid.z - z * full.z)};
        Triple t = s.threads_per_threadgroup;
        n_threads = t.x * t.y * t.z;
        run_group();
        if (l->aborted) return;
      }
    }
  }
}

}  // namespace simt

extern "C" void simt_wait(int kind, int flags, const char* what, const char* file, int line) {
  simt::Lane& lane = simt::running();
  lane.state = simt::kBlocked;
  lane.wait = kind;
  lane.flags = flags;
  lane.what = what;
  lane.file = file;
  lane.line = line;
  simt::yield();
}

extern "C" void simt_inactive(const char* what, unsigned from, const char* file, int line) {
  if (!simt::launch->check) return;
  simt::Fault* f =
      simt::add_fault(simt::kMissingLane, simt::kNoSite, file, line, simt_state.index);
  if (f && f->count == 1) {
    f->what = what;
    f->size = 0;
    f->other = from;
  }
}
