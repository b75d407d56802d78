// Cumulative sum of float32 over the middle axis of (outer, length, inner), carried in float64 as torch's kernel does.

#include "native.h"

namespace {

using portable::ffi::Error;

constexpr int64_t kColumns = 256;

// One row. The sums within a step of four do not wait for what came before: one addition a step is serial, not four.
void row(const float* x, float* out, int64_t n) {
  double carry = 0;
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const double a = x[i], b = x[i + 1], c = x[i + 2], d = x[i + 3];
    const double ab = a + b, abc = ab + c, abcd = ab + (c + d);
    out[i] = static_cast<float>(carry + a);
    out[i + 1] = static_cast<float>(carry + ab);
    out[i + 2] = static_cast<float>(carry + abc);
    carry += abcd;
    out[i + 3] = static_cast<float>(carry);
  }
  for (; i < n; ++i) out[i] = static_cast<float>(carry += x[i]);
}

// `columns` neighbouring columns of one (length, inner) matrix, all at once.
void columns(const float* x, float* out, int64_t n, int64_t inner, int64_t count) {
  double carry[kColumns] = {};
  for (int64_t i = 0; i < n; ++i, x += inner, out += inner)
    for (int64_t j = 0; j < count; ++j) out[j] = static_cast<float>(carry[j] += x[j]);
}

Error cumsum(portable::ffi::ThreadPool pool, portable::ffi::Buffer<portable::ffi::F32> x,
             portable::ffi::ResultBuffer<portable::ffi::F32> result, int64_t outer, int64_t length, int64_t inner) {
  const float* in = x.typed_data();
  float* out = result->typed_data();
  if (inner == 1) {
    portable::parallel(pool, outer, length, [=](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) row(in + r * length, out + r * length, length);
    });
    return Error::Success();
  }
  const int64_t blocks = (inner + kColumns - 1) / kColumns;
  portable::parallel(pool, outer * blocks, length * std::min(inner, kColumns), [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b % blocks * kColumns, at = b / blocks * length * inner + first;
      columns(in + at, out + at, length, inner, std::min(kColumns, inner - first));
    }
  });
  return Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(portable_cumsum, cumsum,
                              portable::ffi::Ffi::Bind()
                                  .Ctx<portable::ffi::ThreadPool>()
                                  .Arg<portable::ffi::Buffer<portable::ffi::F32>>()
                                  .Ret<portable::ffi::Buffer<portable::ffi::F32>>()
                                  .Attr<int64_t>("outer")
                                  .Attr<int64_t>("length")
                                  .Attr<int64_t>("inner"));
