// One XLA FFI handler that calls any ATen overload on a program's own buffers.
//
// The operator is named by attributes: `op` ("aten::convolution"), `overload` ("" or e.g. "dim_IntList") and `arguments`,
// one token for each schema argument: `t` the next operand, `l<n>` a list of the next n operands, `o<bits>` a list of
// optional tensors (1 the next operand, 0 none), `n` none, `b0`/`b1` a bool, `i<value>` an int, `f<value>` a float
// (hexadecimal), `s<value>` a string of letters, `d<code>` a dtype, `I<n>:<v>,...` a list of ints, `F<n>:...` of floats,
// `B<n>:...` of bools. `w` and `W<n>` are as `t` and `l<n>`, of what the operator writes to: it is given copies, which are
// the results after those that it returns.
//
// The last operand and the last result are no arguments of the operator: they put the calls of a program in order.
//
// An out= overload (`out` is true) writes into the program's buffers. The result of any other is copied there, unless the
// operator makes it by at::empty: within a call that gives the program's own memory (`Place`). `rows` is for an op that
// treats the rows of its first operand apart: so many at a time (0: all at once), and what is copied is still in the
// cache.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <cfenv>
#include <cstdlib>
#include <sstream>
#include <string>
#include <type_traits>
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

using Tensors = std::vector<at::Tensor>;

// The memory that the next at::empty of these sizes gives, on this thread.
struct Place {
  at::Tensor result;
  bool taken = false, kept = false;
};

thread_local Place* place = nullptr;
constexpr auto kPlacing = c10::DispatchKey::TESTING_ONLY_GenericMode;  // torch itself uses it in its tests alone

at::Tensor empty_in_place(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                          std::optional<at::Device> device, std::optional<bool> pinned,
                          std::optional<at::MemoryFormat> format) {
  c10::impl::ExcludeDispatchKeyGuard once(kPlacing);
  const bool plain = layout.value_or(at::kStrided) == at::kStrided && !pinned.value_or(false) &&
                     device.value_or(at::kCPU).is_cpu() &&
                     format.value_or(at::MemoryFormat::Contiguous) == at::MemoryFormat::Contiguous;
  if (!place || place->taken || !plain || sizes != place->result.sizes() || dtype != place->result.scalar_type())
    return at::empty(sizes, dtype, layout, device, pinned, format);
  place->taken = place->kept = true;
  Place* own = place;  // `run` waits for the release, or says that there was none
  return at::from_blob(place->result.data_ptr(), sizes, [own](void*) { own->kept = false; }, place->result.options());
}

class Placing {
 public:
  explicit Placing(Place* own) : guard_(kPlacing) { place = own; }
  ~Placing() { place = nullptr; }

 private:
  c10::impl::IncludeDispatchKeyGuard guard_;
};

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, library) {
  library.impl("empty.memory_format", TORCH_FN(empty_in_place));
}

template <typename Buffers>
Tensors views_of(Buffers& buffers) {
  Tensors views;
  for (size_t i = 0; i < buffers.size(); ++i) {
    ffi::AnyBuffer buffer = [&] {
      if constexpr (std::is_same_v<Buffers, ffi::RemainingRets>) return **buffers.template get<ffi::AnyBuffer>(i);
      else return *buffers.template get<ffi::AnyBuffer>(i);
    }();
    views.push_back(view_of(buffer.untyped_data(), buffer.dimensions(), buffer.element_type()));
  }
  return views;
}

c10::IValue argument(const std::string& token, const Tensors& operands, size_t& next, Tensors& written) {
  auto tensor = [&]() { return operands.at(next++); };
  auto copy = [&]() {
    written.push_back(tensor().clone());
    return written.back();
  };
  auto integer = [](const std::string& text) { return static_cast<int64_t>(std::stoll(text)); };
  const std::string body = token.substr(1);
  switch (token[0]) {
    case 't': return tensor();
    case 'w': return copy();
    case 'l':
    case 'W': {
      std::vector<at::Tensor> tensors;
      for (int64_t i = integer(body); i > 0; --i) tensors.push_back(token[0] == 'W' ? copy() : tensor());
      return tensors;
    }
    case 'o': {
      c10::List<std::optional<at::Tensor>> tensors;
      for (char given : body) tensors.push_back(given == '1' ? std::optional<at::Tensor>(tensor()) : std::nullopt);
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

void copy_out(const c10::IValue& value, const Tensors& results, size_t& next, bool placed = false) {
  if (value.isTensor()) {
    const at::Tensor& out = results.at(next++);
    const at::Tensor& result = value.toTensor();
    if (!result.defined()) return;
    TORCH_CHECK(out.sizes() == result.sizes() && out.dtype() == result.dtype(), "the kernel gave ", result.dtype(),
                result.sizes(), ", the program wants ", out.dtype(), out.sizes());
    if (!result.is_contiguous() || result.is_conj() || result.is_neg() || result.data_ptr() != out.data_ptr())
      out.copy_(placed ? result.clone() : result);  // what was placed may be what the result is made of
  } else if (value.isTensorList()) {
    for (const at::Tensor& item : value.toTensorVector()) copy_out(item, results, next, placed);
  } else {
    TORCH_CHECK(false, "the operator returns something other than tensors");
  }
}

void check_in_place(const torch::jit::Stack& stack, const Tensors& results) {
  size_t next = 0;
  for (const c10::IValue& value : stack) {
    const at::Tensor& result = value.toTensor();
    TORCH_CHECK(result.data_ptr() == results.at(next).data_ptr() || result.numel() == 0, "result ", next, " was not written in place");
    ++next;
  }
}

void run(const c10::OperatorHandle& op, const std::string& arguments, const Tensors& operands, const Tensors& results,
         bool out) {
  torch::jit::Stack stack;
  size_t operand = 0, result = 0;
  Tensors written;
  std::stringstream tokens{arguments};
  for (std::string token; tokens >> token;) stack.push_back(argument(token, operands, operand, written));
  if (out) stack.insert(stack.end(), results.begin(), results.end());
  if (out) {
    op.callBoxed(&stack);
    return check_in_place(stack, results);
  }
  if (results.size() != 1 || !written.empty() || op.schema().name().rfind("aten::", 0) != 0) {  // somebody else's may keep its result
    op.callBoxed(&stack);
    for (const c10::IValue& value : stack) copy_out(value, results, result);
    for (const at::Tensor& copy : written) copy_out(copy, results, result);
    return;
  }
  auto* own = new Place{results.front()};  // left where it may still be written to
  {
    Placing placing(own);
    op.callBoxed(&stack);
  }
  copy_out(stack.at(0), results, result, own->taken);
  stack.clear();
  TORCH_CHECK(!own->kept, "it keeps its result, whose memory is the program's");
  delete own;
}

// XLA's threads flush subnormal numbers to zero; torch's kernels keep them.
class DefaultArithmetic {
 public:
  DefaultArithmetic() {
    std::fegetenv(&own_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultArithmetic() { std::fesetenv(&own_); }

 private:
  std::fenv_t own_;
};

Tensors narrowed(Tensors tensors, size_t count, int64_t start, int64_t length) {
  for (size_t i = 0; i < count; ++i) tensors[i] = tensors[i].narrow(0, start, length);
  return tensors;
}

ffi::Error call(ffi::RemainingArgs operand_buffers, ffi::RemainingRets result_buffers, std::string_view op,
                std::string_view overload, std::string_view arguments, bool out, int64_t rows) {
  auto failed = [&](const char* why) {
    return ffi::Error(ffi::ErrorCode::kInternal, std::string(op) + (overload.empty() ? "" : ".") + std::string(overload) + ": " + why);
  };
  try {
    c10::InferenceMode no_autograd;
    DefaultArithmetic arithmetic;
    // a mode of the thread that runs the program (a first call is under AOTAutograd's) must not see the kernel
    c10::impl::ExcludeDispatchKeyGuard no_modes(
        c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PreDispatch}));
    auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(std::string(op).c_str(), std::string(overload).c_str());
    const std::string tokens(arguments);
    const Tensors operands = views_of(operand_buffers);
    Tensors results = views_of(result_buffers);
    results.back().zero_();
    results.pop_back();
    const int64_t all = rows > 0 ? operands.at(0).size(0) : 0;
    if (rows <= 0 || rows >= all) {
      run(handle, tokens, operands, results, out);
    } else {
      for (int64_t start = 0; start < all; start += rows) {
        const int64_t length = std::min(rows, all - start);
        run(handle, tokens, narrowed(operands, 1, start, length), narrowed(results, results.size(), start, length), out);
      }
    }
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
                                  .Attr<std::string_view>("arguments")
                                  .Attr<bool>("out")
                                  .Attr<int64_t>("rows"));
