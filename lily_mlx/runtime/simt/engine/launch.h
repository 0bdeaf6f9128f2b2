// The launch that Python hands over (run.py and report.py mirror these structs with ctypes) and
// what the scheduler and the checker tell each other. Built freestanding: no C headers.
#pragma once
#include "simt/runtime.h"

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long;

namespace simt {

enum FaultKind : u32 {
  kOutOfBounds,
  kIndexOverflow,
  kUninitialized,
  kMissingLane,
  kRace,
  kDoubleWrite,
  kNan,
  kDivideByZero,
};

struct Fault {
  u32 kind;
  u32 site;  // an instruction of the kernel, or kNoSite: then file and line say where
  const char* file;
  u32 line;
  u32 count;
  Triple group;
  u32 thread;
  const char* what;   // the function, or the buffer
  long offset;        // bytes into the buffer
  u32 size;
  u32 other;          // the other thread, lane or site
  u32 write;
};

// One byte's history: the last write and the last reads, each with when (an epoch of its space)
// and by whom.
struct Cell {
  u32 write_epoch, read_epoch;
  u16 writer, reader;
  u16 write_sync, read_sync;  // the simdgroup's barrier count then
};

enum RegionKind : u32 { kInput, kOutput, kShared };
enum ElementKind : u32 { kOther, kFloat32, kFloat16, kBfloat16 };

struct Region {
  u64 base, size;
  u32 kind, element;
  Cell* cells;  // not for inputs
  const char* name;
  u64 loaded, stored, accesses, lines, fewest_lines, redundant;
  u32 group_stamp, written_before;
};

struct Launch {
  Triple grid, group;
  void** buffers;
  void (*entry)(void**, const State*);
  u8* stacks;
  u64 stack_size;
  u32 order, seed;
  u32 check, simd_orders;
  Region* regions;
  u32 n_regions, max_regions;
  Fault* faults;
  u32 n_faults, max_faults;
  Cell* shared_cells;
  u64 n_shared_cells;
  u8* module_begin;
  u8* module_end;
  void* coalesce;  // room for the coalescing tables
  u64 coalesce_size;
  const u32* site_lines;  // a number for each distinct source line, by site; kInternal
  u32 n_sites;
  u32 aborted;
  u64 simd_operations, barriers, float_operations, threadgroup_bytes, tables_full;
};

enum Abort : u32 { kFinished, kFaulted, kStackOverflow };

constexpr u32 kNoSite = 0xffffffffu;
constexpr u32 kInternal = 0xffffffffu;  // the executor's own code
constexpr u32 kMaxThreads = 1024;
constexpr u32 kSpareStacks = 8;  // below the lowest stack, for its overflow

enum LaneState : u8 { kFresh, kReady, kBlocked, kDone };

struct Lane {
  void* sp;
  LaneState state;
  u8* stack;
  int wait, flags;
  const char* what;
  const char* file;
  int line;
  const char* wrap_file;  // the last unsigned wrap, for the report of a wild index
  u32 wrap_line;
  u32 nan_site;           // the last place where a NaN was born, or kNoSite
  const char* nan_file;   // set if that was inside a simd function: where it was called
  u32 nan_line;
};

extern Launch* launch;
extern Lane lanes[kMaxThreads];
extern u32 n_threads;
extern u32 sync_count[2][kMaxThreads / kLanes];  // of device memory, of threadgroup memory

[[noreturn]] void abort_launch();

// The checker, called by the scheduler when launch->check is set.
void check_start();
void check_group();
void check_barrier(int flags);
void check_segment_end(u32 n_lanes);
Fault* add_fault(FaultKind kind, u32 site, const char* file, u32 line, u32 thread);

}  // namespace simt
