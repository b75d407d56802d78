// One XLA FFI handler that calls any ATen overload on a program's own buffers.
//
// The operator is named by attributes: `op` ("aten::convolution"), `overload` ("" or e.g. "dim_IntList") and `arguments`, one
// token for each schema argument: `t` the next operand, `l<n>` a list of the next n operands, `n` none, `b0`/`b1` a bool,
// `i<value>` an int, `f<value>` a float (hexadecimal), `s<value>` a string of letters, `d<code>` a dtype, `I<n>:<v>,...` a list of ints, `B<n>:...` of
// bools, `o<token>` where the schema says optional (the token itself). Results are copied into the program's buffers.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

at::ScalarType scalar_type(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::PRED: return at::kBool;
    case ffi::DataType::S8: return at::kChar;
    case ffi::DataType::S16: return at::kShort;
    case ffi::DataType::S32: return at::kInt;
    case ffi::DataType::S64: return at::kLong;
    case ffi::DataType::U8: return at::kByte;
    case ffi::DataType::F16: return at::kHalf;
    case ffi::DataType::BF16: return at::kBFloat16;
    case ffi::DataType::F32: return at::kFloat;
    case ffi::DataType::F64: return at::kDouble;
    case ffi::DataType::C64: return at::kComplexFloat;
    case ffi::DataType::C128: return at::kComplexDouble;
    default: TORCH_CHECK(false, "no torch dtype for XLA type ", static_cast<int>(type));
  }
}

at::Tensor view_of(void* data, ffi::Span<const int64_t> dims, ffi::DataType type) {
  std::vector<int64_t> sizes(dims.begin(), dims.end());
  static char nothing = 0;
  return at::from_blob(data ? data : &nothing, sizes, at::TensorOptions().dtype(scalar_type(type)));
}

template <typename Parse>
auto listed(const std::string& token, Parse parse) {
  using Value = decltype(parse(std::string()));
  std::vector<Value> values;
  std::stringstream rest(token.substr(token.find(':') + 1));
  for (std::string item; std::getline(rest, item, ',');) values.push_back(parse(item));
  return values;
}

c10::IValue argument(const std::string& token, ffi::RemainingArgs& operands, size_t& next) {
  auto tensor = [&]() {
    auto buffer = operands.get<ffi::AnyBuffer>(next++);
    return view_of(buffer->untyped_data(), buffer->dimensions(), buffer->element_type());
  };
  auto integer = [](const std::string& text) { return static_cast<int64_t>(std::stoll(text)); };
  const std::string body = token.substr(1);
  switch (token[0]) {
    case 't': return tensor();
    case 'l': {
      std::vector<at::Tensor> tensors;
      for (int64_t i = integer(body); i > 0; --i) tensors.push_back(tensor());
      return tensors;
    }
    case 'n': return c10::IValue();
    case 'b': return body == "1";
    case 'i': return integer(body);
    case 'f': return std::strtod(body.c_str(), nullptr);
    case 's': return body;
    case 'd': return integer(body);
    case 'I': return listed(body, integer);
    case 'F': return listed(body, [](const std::string& text) { return std::strtod(text.c_str(), nullptr); });
    case 'B': {
      c10::List<bool> flags;
      for (int64_t flag : listed(body, integer)) flags.push_back(flag != 0);
      return flags;
    }
    default: TORCH_CHECK(false, "bad argument token ", token);
  }
}

void copy_out(const c10::IValue& value, ffi::RemainingRets& results, size_t& next) {
  if (value.isTensor()) {
    auto buffer = results.get<ffi::AnyBuffer>(next++);
    at::Tensor out = view_of((*buffer)->untyped_data(), (*buffer)->dimensions(), (*buffer)->element_type());
    const at::Tensor& result = value.toTensor();
    if (!result.defined()) return;
    TORCH_CHECK(out.sizes() == result.sizes() && out.dtype() == result.dtype(), "the kernel gave ", result.dtype(),
                result.sizes(), ", the program wants ", out.dtype(), out.sizes());
    out.copy_(result);
  } else if (value.isTensorList()) {
    for (const at::Tensor& item : value.toTensorVector()) copy_out(item, results, next);
  } else {
    TORCH_CHECK(false, "the operator returns something other than tensors");
  }
}

ffi::Error call(ffi::RemainingArgs operands, ffi::RemainingRets results, std::string_view op, std::string_view overload,
                std::string_view arguments) {
  auto failed = [&](const char* why) {
    return ffi::Error(ffi::ErrorCode::kInternal, std::string(op) + (overload.empty() ? "" : ".") + std::string(overload) + ": " + why);
  };
  try {
    c10::InferenceMode no_autograd;
    // a mode of the thread that runs the program (a first call is under AOTAutograd's) must not see the kernel
    c10::impl::ExcludeDispatchKeyGuard no_modes(
        c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PreDispatch}));
    auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(std::string(op).c_str(), std::string(overload).c_str());
    torch::jit::Stack stack;
    size_t operand = 0;
    std::stringstream tokens{std::string(arguments)};
    for (std::string token; tokens >> token;) stack.push_back(argument(token, operands, operand));
    handle.callBoxed(&stack);
    size_t result = 0;
    for (const c10::IValue& value : stack) copy_out(value, results, result);
    return ffi::Error::Success();
  } catch (const c10::Error& failure) {
    return failed(failure.what_without_backtrace());
  } catch (const std::exception& failure) {
    return failed(failure.what());
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(portable_aten, call,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("op")
                                  .Attr<std::string_view>("overload")
                                  .Attr<std::string_view>("arguments"));
