// Cumulative sum of float32 over the middle axis of (outer, length, inner), carried in float64 as torch's kernel does.

#include "native.h"

namespace {

using portable::ffi::Error;

constexpr int64_t kStep = 8, kColumns = 256;

// One row. Within a step of eight the partial sums do not wait for what came before: one addition a step is serial.
void row(const float* x, float* out, int64_t n) {
  double carry = 0;
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    double v[kStep], w[kStep];
    for (int64_t j = 0; j < kStep; ++j) v[j] = x[i + j];
    for (int64_t j = 0; j < kStep; ++j) w[j] = v[j] + (j >= 1 ? v[j - 1] : 0.0);
    for (int64_t j = 0; j < kStep; ++j) v[j] = w[j] + (j >= 2 ? w[j - 2] : 0.0);
    for (int64_t j = 0; j < kStep; ++j) w[j] = v[j] + (j >= 4 ? v[j - 4] : 0.0);
    for (int64_t j = 0; j < kStep; ++j) out[i + j] = static_cast<float>(carry + w[j]);
    carry += w[kStep - 1];
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
