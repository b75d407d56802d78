// rms_norm over rows: each is read from memory once; the sum of squares leaves it in the nearest cache.

#include <cmath>

#include "native.h"

namespace {

using portable::BFloat16;
using portable::widened;
using portable::ffi::AnyBuffer;
using portable::ffi::DataType;
using portable::ffi::Error;

template <typename X, typename W>
void rows(portable::ffi::ThreadPool& pool, const X* x, const W* weight, X* out, int64_t count, int64_t size,
          float eps) {
  portable::parallel(pool, count, size, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const X* in = x + r * size;
      X* to = out + r * size;
      const double squares = portable::sum(size, [in](int64_t i) {
        const float value = widened(in[i]);
        return value * value;
      });
      const float scale = 1.0f / std::sqrt(static_cast<float>(squares / static_cast<double>(size)) + eps);
      if (weight) {
        for (int64_t i = 0; i < size; ++i) portable::store(widened(in[i]) * scale * widened(weight[i]), to[i]);
      } else {
        for (int64_t i = 0; i < size; ++i) portable::store(widened(in[i]) * scale, to[i]);
      }
    }
  });
}

template <typename X>
Error typed(portable::ffi::ThreadPool& pool, AnyBuffer x, const void* weight, DataType kind, AnyBuffer out, float eps) {
  const int64_t size = x.dimensions().back();
  const int64_t count = size ? static_cast<int64_t>(x.element_count()) / size : 0;
  const X* in = static_cast<const X*>(x.untyped_data());
  X* to = static_cast<X*>(out.untyped_data());
  if (kind == DataType::BF16) {
    rows(pool, in, static_cast<const BFloat16*>(weight), to, count, size, eps);
  } else {
    rows(pool, in, static_cast<const float*>(weight), to, count, size, eps);
  }
  return Error::Success();
}

// Operands: x, and the weight if there is one.
Error rms_norm(portable::ffi::ThreadPool pool, portable::ffi::RemainingArgs operands,
               portable::ffi::Result<AnyBuffer> out, float eps) {
  const AnyBuffer x = operands.get<AnyBuffer>(0).value();
  const void* weight = nullptr;
  DataType kind = DataType::F32;
  if (operands.size() > 1) {
    const AnyBuffer given = operands.get<AnyBuffer>(1).value();
    weight = given.untyped_data();
    kind = given.element_type();
  }
  if (x.element_type() == DataType::BF16) return typed<BFloat16>(pool, x, weight, kind, *out, eps);
  return typed<float>(pool, x, weight, kind, *out, eps);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(portable_rms_norm, rms_norm,
                              portable::ffi::Ffi::Bind()
                                  .Ctx<portable::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .Ret<AnyBuffer>()
                                  .Attr<float>("eps"));
