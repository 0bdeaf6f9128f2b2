// The hooks that a checked kernel calls before each load and store: bounds, initialisation,
// races, double writes, and the byte counts.
//
// Two accesses by different threads are ordered when a threadgroup barrier with the right memory
// flag lies between them, or a simdgroup barrier and they are of one simdgroup. Threadgroups are
// never ordered. An epoch counts those barriers, and threadgroups, per address space; 0 means
// never.
#include "launch.h"

namespace simt {

static u32 epoch[2];        // of device memory, of threadgroup memory
static u32 group_epoch[2];  // its value when this threadgroup began
static u64 n_cells;
static u32 group_number;
static Region* last_region;
static Lane* first_nan;

constexpr u16 kMany = 0xffff;         // readers of several simdgroups
constexpr u16 kManyOfOne = 0x8000;    // several readers of one simdgroup: its number is or-ed in
constexpr u16 kAtomic = 0x7fff;       // an atomic operation of any thread

Fault* add_fault(FaultKind kind, u32 site, const char* file, u32 line, u32 thread) {
  for (u32 i = 0; i < launch->n_faults; i++) {
    Fault& f = launch->faults[i];
    bool same_site = f.site == site || (f.site != kNoSite && site != kNoSite &&
                                        launch->site_lines[f.site] == launch->site_lines[site]);
    if (f.kind == kind && same_site && f.line == line && f.file == file) {
      f.count++;
      return &f;
    }
  }
  if (launch->n_faults == launch->max_faults) return nullptr;
  Fault& f = launch->faults[launch->n_faults++];
  f = Fault{kind, site, file, line, 1, simt_state.threadgroup_position_in_grid, thread};
  f.other = kNoSite;
  return &f;
}

void check_start() {
  epoch[0] = epoch[1] = group_number = 0;
  n_cells = 0;
  last_region = nullptr;
  for (u32 i = 0; i < launch->n_regions; i++) {
    Region& r = launch->regions[i];
    if (r.kind != kShared) continue;
    r.cells = launch->shared_cells + n_cells;
    n_cells += r.size;
  }
}

static void poison(Region& r) {
  for (u64 i = 0; i < r.size; i++) reinterpret_cast<u8*>(r.base)[i] = 0xff;
  r.group_stamp = group_number;
}

void check_group() {
  group_number++;
  first_nan = nullptr;
  for (int space = 0; space < 2; space++) group_epoch[space] = ++epoch[space];
  for (u32 i = 0; i < launch->n_regions; i++) {
    Region& r = launch->regions[i];
    if (r.kind == kShared) poison(r);
  }
}

void check_barrier(int flags) {
  if (flags & 1) epoch[0]++;
  if (flags & 2) epoch[1]++;
}

static Region* find(u64 at) {
  if (last_region && at - last_region->base < last_region->size) return last_region;
  for (u32 i = 0; i < launch->n_regions; i++) {
    Region& r = launch->regions[i];
    if (at - r.base < r.size) return last_region = &r;
  }
  return nullptr;
}

static bool is_private(u64 at) {
  u64 stacks = reinterpret_cast<u64>(launch->stacks) - kSpareStacks * launch->stack_size;
  if (at - stacks < launch->stack_size * (kMaxThreads + kSpareStacks)) return true;
  u64 exchange = reinterpret_cast<u64>(simt_state.simdgroup);
  if (at - exchange < sizeof(Simdgroup)) return true;
  return at - reinterpret_cast<u64>(&simt_state) < sizeof(State);
}

[[noreturn]] static void out_of_bounds(u64 at, u32 size, u32 site, bool write) {
  const Region* near = nullptr;
  u64 nearest = ~0ul;
  for (u32 i = 0; i < launch->n_regions; i++) {
    const Region& r = launch->regions[i];
    u64 gap = at < r.base ? r.base - at : at - r.base < r.size ? 0 : at - r.base - r.size;
    if (gap < nearest) nearest = gap, near = &r;
  }
  // A 32-bit index that wrapped lands gigabytes away.
  const Lane& lane = lanes[simt_state.index];
  FaultKind kind = lane.wrap_file && nearest >= 1u << 30 ? kIndexOverflow : kOutOfBounds;
  Fault* f = add_fault(kind, site, lane.wrap_file, lane.wrap_line, simt_state.index);
  if (f && f->count == 1) {
    f->what = near ? near->name : nullptr;
    f->offset = near ? long(at - near->base) : 0;
    f->size = size;
    f->write = write;
  }
  abort_launch();
}

static Region* locate(u64 at, u32 size, u32 site, bool write) {
  Region* r = find(at);
  if (r && at + size <= r->base + r->size && !(write && r->kind == kInput)) return r;
  u64 module = reinterpret_cast<u64>(launch->module_begin);
  if (!r && !write && at - module < u64(launch->module_end - launch->module_begin)) return nullptr;
  out_of_bounds(at, size, site, write);
}

static void note(FaultKind kind, u32 site, Region* r, u64 at, u32 size, u32 other, bool write) {
  Fault* f = add_fault(kind, site, nullptr, 0, simt_state.index);
  if (!f || f->count != 1) return;
  f->what = r->name;
  f->offset = long(at - r->base);
  f->size = size;
  f->other = other;
  f->write = write;
}

// Whether an earlier access by another thread is ordered before the running thread's.
static bool ordered(u32 space, u32 when, u32 sg, u16 sync) {
  if (when < group_epoch[space]) return false;
  if (when < epoch[space]) return true;
  return sg == simt_state.simdgroup_index && sync < sync_count[space][sg];
}

static bool write_conflicts(const Cell& c, u32 space) {
  u32 me = simt_state.index;
  if (!c.write_epoch || (space == 1 && c.write_epoch < group_epoch[1])) return false;
  if (c.writer == me && c.write_epoch >= group_epoch[space]) return false;
  u32 sg = c.writer == kAtomic ? ~0u : c.writer / kLanes;
  return !ordered(space, c.write_epoch, sg, c.write_sync);
}

static bool read_conflicts(const Cell& c, u32 space) {
  u32 me = simt_state.index;
  if (!c.read_epoch || (space == 1 && c.read_epoch < group_epoch[1])) return false;
  if (c.reader == me && c.read_epoch >= group_epoch[space]) return false;
  u32 sg = c.reader == kMany ? ~0u : c.reader & kManyOfOne ? c.reader & 31 : c.reader / kLanes;
  return !ordered(space, c.read_epoch, sg, c.read_sync);
}

static void remember_read(Cell& c, u32 space) {
  u16 me = simt_state.index, sg = simt_state.simdgroup_index;
  if (c.read_epoch == epoch[space] && c.reader != me) {
    u32 old = c.reader == kMany ? ~0u : c.reader & kManyOfOne ? c.reader & 31 : c.reader / kLanes;
    // Reads that a simdgroup barrier already ordered need not be remembered.
    bool stale = old == sg && c.read_sync < sync_count[space][sg];
    c.reader = stale ? me : old == sg ? u16(kManyOfOne | sg) : kMany;
  } else {
    c.reader = me;
  }
  c.read_epoch = epoch[space];
  c.read_sync = sync_count[space][sg];
}

static void count_access(Region* r, u64 at, u32 size, u32 site);

extern "C" void simt_load(void* p, u64 size, u32 site) {
  u64 at = reinterpret_cast<u64>(p);
  if (is_private(at)) return;
  Region* r = locate(at, size, site, false);
  if (!r) return;
  r->loaded += size;
  count_access(r, at, size, site);
  if (r->kind == kInput) return;
  u32 space = r->kind == kShared;
  Cell* c = r->cells + (at - r->base);
  for (u32 i = 0; i < size; i++, c++) {
    bool written = space ? c->write_epoch >= group_epoch[1] : c->write_epoch || r->written_before;
    if (!written) {
      note(kUninitialized, site, r, at, size, kNoSite, false);
    } else if (c->write_epoch && write_conflicts(*c, space)) {
      note(kRace, site, r, at, size, c->writer, false);
    }
    remember_read(*c, space);
  }
}

// Between the two store hooks the bytes change: a conflicting store of equal bytes is harmless,
// and is only counted.
static u8 old_bytes[64];
static u32 n_old;

extern "C" void simt_store(void* p, u64 size, u32 site) {
  u64 at = reinterpret_cast<u64>(p);
  n_old = 0;
  if (is_private(at)) return;
  Region* r = locate(at, size, site, true);
  n_old = size < 64 ? size : 64;
  for (u32 i = 0; i < n_old; i++) old_bytes[i] = reinterpret_cast<u8*>(at)[i];
  r->stored += size;
  count_access(r, at, size, site);
}

static bool is_nan(const Region& r, u64 at) {
  u32 bits = 0;
  if (r.element == kFloat32) return (*reinterpret_cast<u32*>(at) & 0x7fffffff) > 0x7f800000;
  bits = *reinterpret_cast<u16*>(at) & 0x7fff;
  return r.element == kFloat16 ? bits > 0x7c00 : bits > 0x7f80;
}

extern "C" void simt_stored(void* p, u64 size, u32 site) {
  if (!n_old) return;
  u64 at = reinterpret_cast<u64>(p);
  Region* r = find(at);
  u32 space = r->kind == kShared;
  Cell* c = r->cells + (at - r->base);
  bool changed = false;
  for (u32 i = 0; i < n_old; i++) changed |= old_bytes[i] != reinterpret_cast<u8*>(at)[i];
  for (u32 i = 0; i < size; i++, c++) {
    if (write_conflicts(*c, space)) {
      if (changed) note(space ? kRace : kDoubleWrite, site, r, at, size, c->writer, true);
      else r->redundant++;
    } else if (changed && read_conflicts(*c, space)) {
      note(kRace, site, r, at, size, c->reader < kAtomic ? c->reader : kNoSite, true);
    }
    c->writer = simt_state.index;
    c->write_epoch = epoch[space];
    c->write_sync = sync_count[space][simt_state.simdgroup_index];
  }
  u32 width = r->element == kFloat32 ? 4 : 2;
  if (r->kind != kOutput || r->element == kOther || (at - r->base) % width) return;
  for (u64 a = at; a + width <= at + size; a += width) {
    if (!is_nan(*r, a)) continue;
    const Lane* born = &lanes[simt_state.index];
    if (born->nan_site == kNoSite) born = first_nan;
    if (!born) continue;
    Fault* f = add_fault(kNan, born->nan_site, born->nan_file, born->nan_line, simt_state.index);
    if (!f || f->count != 1) continue;
    f->what = r->name;
    f->other = site;
  }
}

extern "C" void simt_atomic(void* p, u64 size, u32 site) {
  u64 at = reinterpret_cast<u64>(p);
  if (is_private(at)) return;
  Region* r = locate(at, size, site, true);
  r->loaded += size;
  r->stored += size;
  u32 space = r->kind == kShared;
  Cell* c = r->cells + (at - r->base);
  for (u32 i = 0; i < size; i++, c++) {
    bool atomic = c->writer == kAtomic && c->write_epoch;
    bool written = space ? c->write_epoch >= group_epoch[1] : c->write_epoch || r->written_before;
    if (!written) note(kUninitialized, site, r, at, size, kNoSite, true);
    else if (!atomic && write_conflicts(*c, space))
      note(kRace, site, r, at, size, c->writer, true);
    c->writer = kAtomic;
    c->write_epoch = epoch[space];
  }
}

extern "C" void simt_atomic_store(void* p, u64 size, u32 site) {
  u64 at = reinterpret_cast<u64>(p);
  if (is_private(at)) return;
  Region* r = locate(at, size, site, true);
  u32 space = r->kind == kShared;
  Cell* c = r->cells + (at - r->base);
  for (u32 i = 0; i < size; i++, c++) {
    if (c->writer != kAtomic && write_conflicts(*c, space))
      note(kRace, site, r, at, size, c->writer, true);
    c->writer = kAtomic;
    c->write_epoch = epoch[space];
  }
}

// An arithmetic result with its operands: a NaN out of none is born here.
extern "C" void simt_float(float result, float a, float b, float c, u32 site, u32 operations) {
  launch->float_operations += operations;
  if (result == result || a != a || b != b || c != c) return;
  Lane& lane = lanes[simt_state.index];
  bool inside = launch->site_lines[site] == kInternal;
  lane.nan_site = site;
  lane.nan_file = inside ? lane.file : nullptr;
  lane.nan_line = inside ? lane.line : 0;
  if (!first_nan) first_nan = &lane;
}

extern "C" void simt_count(u32 operations) { launch->float_operations += operations; }

}  // namespace simt

extern "C" void simt_threadgroup_array(void* base, unsigned long size, const char* name) {
  using namespace simt;
  u64 at = reinterpret_cast<u64>(base);
  for (u32 i = 0; i < launch->n_regions; i++) {
    if (launch->regions[i].base == at) return;
  }
  if (launch->n_regions == launch->max_regions) abort_launch();
  Region& r = launch->regions[launch->n_regions++];
  r = Region{at, size, kShared, kOther, launch->shared_cells + n_cells, name};
  n_cells += size;
  launch->threadgroup_bytes += size;
  if (n_cells > launch->n_shared_cells) abort_launch();
  poison(r);
}

#include "coalesce.h"
#include "sanitizer.h"
