// Coalescing: the 32 lanes' accesses of one instruction, gathered over the lanes' turns, touch
// some number of 128-byte lines; their distinct bytes would fit in some fewest number.
//
// Lanes run one after another between two blocking calls. The n-th time that a lane executes an
// instruction since the last such call belongs with the other lanes' n-th time.
#pragma once

namespace simt {

struct Gather {
  u32 site, turn, n, next;
  Region* region;
  u64 at[kLanes];
  u8 size[kLanes];
};

constexpr u32 kGathers = 1 << 15, kBuckets = 1 << 16;

struct CoalesceTables {
  u32 bucket[kBuckets];  // 1 + the first gather of a chain
  Gather gathers[kGathers];
  u32 n_gathers;
  u32 turns[];  // [site][lane]
};

// For run.py and check.py, which mirror these.
extern "C" const u64 simt_sizes[] = {sizeof(Launch), sizeof(Region), sizeof(Fault), sizeof(Cell),
                                     sizeof(CoalesceTables)};

static CoalesceTables* tables() { return static_cast<CoalesceTables*>(launch->coalesce); }

static u32 bucket_of(u32 site, u32 turn) {
  return (site * 2654435761u ^ turn * 40503u) % kBuckets;
}

static void finish(Gather& g) {
  for (u32 i = 1; i < g.n; i++) {  // lanes mostly come in address order
    u64 at = g.at[i];
    u8 size = g.size[i];
    u32 j = i;
    for (; j > 0 && g.at[j - 1] > at; j--) {
      g.at[j] = g.at[j - 1];
      g.size[j] = g.size[j - 1];
    }
    g.at[j] = at;
    g.size[j] = size;
  }
  u64 lines = 0, bytes = 0, next_line = 0, next_byte = 0;
  for (u32 i = 0; i < g.n; i++) {
    u64 from = g.at[i], to = from + g.size[i];
    u64 byte = from > next_byte ? from : next_byte;
    if (to > byte) bytes += to - byte, next_byte = to;
    u64 line = from / 128 > next_line ? from / 128 : next_line;
    u64 end = (to + 127) / 128;
    if (end > line) lines += end - line, next_line = end;
  }
  g.region->accesses++;
  g.region->lines += lines;
  g.region->fewest_lines += (bytes + 127) / 128;
}

void check_segment_end(u32) {
  CoalesceTables* t = tables();
  for (u32 i = 0; i < t->n_gathers; i++) {
    Gather& g = t->gathers[i];
    finish(g);
    t->bucket[bucket_of(g.site, g.turn)] = 0;
    for (u32 l = 0; l < kLanes; l++) t->turns[g.site * kLanes + l] = 0;
  }
  t->n_gathers = 0;
}

static void count_access(Region* r, u64 at, u32 size, u32 site) {
  if (r->kind == kShared || size > 255) return;
  CoalesceTables* t = tables();
  u32 turn = t->turns[site * kLanes + simt_state.lane]++;
  u32& head = t->bucket[bucket_of(site, turn)];
  for (u32 i = head; i; i = t->gathers[i - 1].next) {
    Gather& g = t->gathers[i - 1];
    if (g.site != site || g.turn != turn || g.region != r) continue;
    if (g.n == kLanes) break;
    g.at[g.n] = at;
    g.size[g.n++] = u8(size);
    return;
  }
  if (t->n_gathers == kGathers) {
    // Too many turns between two blocking calls: this lane's later ones are not counted.
    launch->tables_full++;
    return;
  }
  Gather& g = t->gathers[t->n_gathers++];
  g.site = site;
  g.turn = turn;
  g.region = r;
  g.next = head;
  g.at[0] = at;
  g.size[0] = u8(size);
  g.n = 1;
  head = t->n_gathers;
}

}  // namespace simt
