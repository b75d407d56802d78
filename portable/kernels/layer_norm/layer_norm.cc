// native_layer_norm of float32 over rows: each is read from memory once; its mean and variance leave it in cache.

#include <cmath>
#include <limits>

#include "native.h"

namespace {

using portable::ffi::Error;
using In = portable::ffi::Buffer<portable::ffi::F32>;
using Out = portable::ffi::ResultBuffer<portable::ffi::F32>;

void row(const float* x, const float* weight, const float* bias, int64_t size, float eps, float* out, float& mean,
         float& rstd) {
  const float centre = static_cast<float>(portable::sum(size, [x](int64_t i) { return x[i]; }) / size);
  const double squares = portable::sum(size, [x, centre](int64_t i) { return (x[i] - centre) * (x[i] - centre); });
  // torch's running mean is NaN once a value is not finite (but for one in a row's very last place)
  mean = std::isfinite(centre) ? centre : std::numeric_limits<float>::quiet_NaN();
  rstd = 1.0f / std::sqrt(static_cast<float>(squares / size) + eps);
  const float scale = rstd;
  if (weight && bias) {
    for (int64_t i = 0; i < size; ++i) out[i] = (x[i] - centre) * scale * weight[i] + bias[i];
  } else if (weight) {
    for (int64_t i = 0; i < size; ++i) out[i] = (x[i] - centre) * scale * weight[i];
  } else if (bias) {
    for (int64_t i = 0; i < size; ++i) out[i] = (x[i] - centre) * scale + bias[i];
  } else {
    for (int64_t i = 0; i < size; ++i) out[i] = (x[i] - centre) * scale;
  }
}

// Operands: x, then the weight and the bias, those that there are.
Error layer_norm(portable::ffi::ThreadPool pool, In x, portable::ffi::RemainingArgs given, Out out, Out mean, Out rstd,
                 int64_t size, bool has_weight, bool has_bias, float eps) {
  const float* weight = has_weight ? given.get<In>(0).value().typed_data() : nullptr;
  const float* bias = has_bias ? given.get<In>(has_weight ? 1 : 0).value().typed_data() : nullptr;
  const float* in = x.typed_data();
  float *to = out->typed_data(), *means = mean->typed_data(), *rstds = rstd->typed_data();
  const int64_t count = static_cast<int64_t>(mean->element_count());
  portable::parallel(pool, count, size, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      row(in + r * size, weight, bias, size, eps, to + r * size, means[r], rstds[r]);
  });
  return Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(portable_layer_norm, layer_norm,
                              portable::ffi::Ffi::Bind()
                                  .Ctx<portable::ffi::ThreadPool>()
                                  .Arg<In>()
                                  .RemainingArgs()
                                  .Ret<In>()
                                  .Ret<In>()
                                  .Ret<In>()
                                  .Attr<int64_t>("size")
                                  .Attr<bool>("has_weight")
                                  .Attr<bool>("has_bias")
                                  .Attr<float>("eps"));
