// The calls that clang's integer and bounds sanitizers make. Unsigned arithmetic may wrap, so a
// wrap only explains a wild index later on.
#pragma once

namespace simt {

struct SourceLocation {
  const char* file;
  u32 line, column;
};
struct TypeDescriptor {
  u16 kind, info;
  bool is_signed() const { return info & 1; }
  u32 bits() const { return 1u << (info >> 1); }
};
struct CheckData {
  SourceLocation at;
  const TypeDescriptor* type;
};

static void overflow(CheckData* data, const char* what) {
  Lane& lane = lanes[simt_state.index];
  if (!data->type->is_signed()) {
    if (data->type->bits() < 32) return;
    lane.wrap_file = data->at.file;
    lane.wrap_line = data->at.line;
    return;
  }
  Fault* f = add_fault(kIndexOverflow, kNoSite, data->at.file, data->at.line, simt_state.index);
  if (f && f->count == 1) f->what = what;
}

extern "C" {
void __ubsan_handle_add_overflow(CheckData* d, u64, u64) { overflow(d, "+"); }
void __ubsan_handle_sub_overflow(CheckData* d, u64, u64) { overflow(d, "-"); }
void __ubsan_handle_mul_overflow(CheckData* d, u64, u64) { overflow(d, "*"); }
void __ubsan_handle_negate_overflow(CheckData* d, u64) { overflow(d, "-"); }
void __ubsan_handle_divrem_overflow(CheckData* d, u64, u64) {
  Fault* f = add_fault(kDivideByZero, kNoSite, d->at.file, d->at.line, simt_state.index);
  if (f) f->what = "/";
  abort_launch();
}
void __ubsan_handle_out_of_bounds(CheckData* d, u64 index) {
  Fault* f = add_fault(kOutOfBounds, kNoSite, d->at.file, d->at.line, simt_state.index);
  if (f) f->what = "an array of fixed size", f->offset = long(index);
  abort_launch();
}
}

}  // namespace simt
