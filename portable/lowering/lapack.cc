// Eigenvalues of Hermitian matrices and singular values by the LAPACK that torch itself calls: the signs of vectors, and
// the bases of spaces of several, are eager's. Matrices are column-major, with their batch axes before them.

#include <dlfcn.h>

#include <algorithm>
#include <complex>
#include <cstring>
#include <type_traits>
#include <vector>

#include "native.h"

namespace {

using portable::ffi::AnyBuffer;
using portable::ffi::Error;
using Result = portable::ffi::Result<AnyBuffer>;

template <typename T>
struct Real {
  using type = T;
};
template <typename T>
struct Real<std::complex<T>> {
  using type = T;
};
template <typename T>
constexpr bool is_complex = !std::is_same_v<T, typename Real<T>::type>;

void* routine(const char* name) {
  static void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  return torch ? dlsym(torch, name) : nullptr;
}

template <typename T>
int64_t workspace(T wanted) {
  return std::max<int64_t>(1, static_cast<int64_t>(std::real(wanted)));
}

template <typename T>
Error eigh(const char* name, const AnyBuffer& x, Result& vectors, Result& values, Result& failures, bool lower,
           bool wanted) {
  using R = typename Real<T>::type;
  void* found = routine(name);
  if (!found) return Error::Internal(std::string("torch has no LAPACK routine ") + name);
  char job = wanted ? 'V' : 'N', uplo = lower ? 'L' : 'U';
  int n = static_cast<int>(x.dimensions().back()), query = -1, info = 0;
  T* a = static_cast<T*>(vectors->untyped_data());
  R* w = static_cast<R*>(values->untyped_data());
  std::memcpy(a, x.untyped_data(), x.size_bytes());
  auto call = [&](T* to, R* of, T* work, int* lwork, R* rwork, int* lrwork, int* iwork, int* liwork) {
    if constexpr (is_complex<T>) {
      using F = void (*)(char*, char*, int*, T*, int*, R*, T*, int*, R*, int*, int*, int*, int*);
      reinterpret_cast<F>(found)(&job, &uplo, &n, to, &n, of, work, lwork, rwork, lrwork, iwork, liwork, &info);
    } else {
      using F = void (*)(char*, char*, int*, T*, int*, R*, T*, int*, int*, int*, int*);
      reinterpret_cast<F>(found)(&job, &uplo, &n, to, &n, of, work, lwork, iwork, liwork, &info);
    }
  };
  T best{};
  R real_best{};
  int whole_best = 0;
  call(a, w, &best, &query, &real_best, &query, &whole_best, &query);
  int lwork = static_cast<int>(workspace(best)), lrwork = static_cast<int>(workspace(real_best));
  int liwork = std::max(1, whole_best);
  std::vector<T> work(lwork);
  std::vector<R> rwork(lrwork);
  std::vector<int> iwork(liwork);
  int* told = static_cast<int*>(failures->untyped_data());
  for (size_t i = 0; i < failures->element_count(); ++i) {
    call(a + i * n * n, w + i * n, work.data(), &lwork, rwork.data(), &lrwork, iwork.data(), &liwork);
    told[i] = info;
  }
  return Error::Success();
}

template <typename T>
Error svd(const char* name, const AnyBuffer& x, Result& u, Result& s, Result& vh, Result& failures, bool full) {
  using R = typename Real<T>::type;
  void* found = routine(name);
  if (!found) return Error::Internal(std::string("torch has no LAPACK routine ") + name);
  char job = full ? 'A' : 'S';
  auto shape = x.dimensions();
  int m = static_cast<int>(shape[shape.size() - 2]), n = static_cast<int>(shape.back());
  int k = std::min(m, n), columns = full ? m : k, rows = full ? n : k, query = -1, info = 0;
  const int64_t least = k, most = std::max(m, n);
  std::vector<T> a(static_cast<size_t>(m) * n);
  std::vector<int> iwork(8 * k);
  std::vector<R> rwork(is_complex<T> ? std::max(5 * least * least + 5 * least, 2 * most * least + 2 * least * least + least) : 0);
  auto call = [&](R* of, T* left, T* right, T* work, int* lwork) {
    if constexpr (is_complex<T>) {
      using F = void (*)(char*, int*, int*, T*, int*, R*, T*, int*, T*, int*, T*, int*, R*, int*, int*);
      reinterpret_cast<F>(found)(&job, &m, &n, a.data(), &m, of, left, &m, right, &rows, work, lwork, rwork.data(),
                                 iwork.data(), &info);
    } else {
      using F = void (*)(char*, int*, int*, T*, int*, R*, T*, int*, T*, int*, T*, int*, int*, int*);
      reinterpret_cast<F>(found)(&job, &m, &n, a.data(), &m, of, left, &m, right, &rows, work, lwork, iwork.data(),
                                 &info);
    }
  };
  const T* in = static_cast<const T*>(x.untyped_data());
  T *left = static_cast<T*>(u->untyped_data()), *right = static_cast<T*>(vh->untyped_data());
  R* values = static_cast<R*>(s->untyped_data());
  T best{};
  call(values, left, right, &best, &query);
  int lwork = static_cast<int>(workspace(best));
  std::vector<T> work(lwork);
  int* told = static_cast<int*>(failures->untyped_data());
  for (size_t i = 0; i < failures->element_count(); ++i) {
    std::copy_n(in + i * a.size(), a.size(), a.data());
    call(values + i * k, left + i * m * columns, right + i * rows * n, work.data(), &lwork);
    told[i] = info;
  }
  return Error::Success();
}

Error eigh_of(AnyBuffer x, Result vectors, Result values, Result failures, bool lower, bool wanted) {
  switch (x.element_type()) {
    case portable::ffi::F32: return eigh<float>("ssyevd_", x, vectors, values, failures, lower, wanted);
    case portable::ffi::F64: return eigh<double>("dsyevd_", x, vectors, values, failures, lower, wanted);
    case portable::ffi::C64: return eigh<std::complex<float>>("cheevd_", x, vectors, values, failures, lower, wanted);
    case portable::ffi::C128: return eigh<std::complex<double>>("zheevd_", x, vectors, values, failures, lower, wanted);
    default: return Error::InvalidArgument("a dtype that LAPACK does not know");
  }
}

Error svd_of(AnyBuffer x, Result u, Result s, Result vh, Result failures, bool full) {
  switch (x.element_type()) {
    case portable::ffi::F32: return svd<float>("sgesdd_", x, u, s, vh, failures, full);
    case portable::ffi::F64: return svd<double>("dgesdd_", x, u, s, vh, failures, full);
    case portable::ffi::C64: return svd<std::complex<float>>("cgesdd_", x, u, s, vh, failures, full);
    case portable::ffi::C128: return svd<std::complex<double>>("zgesdd_", x, u, s, vh, failures, full);
    default: return Error::InvalidArgument("a dtype that LAPACK does not know");
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(portable_eigh, eigh_of,
                              portable::ffi::Ffi::Bind()
                                  .Arg<AnyBuffer>()
                                  .Ret<AnyBuffer>()
                                  .Ret<AnyBuffer>()
                                  .Ret<AnyBuffer>()
                                  .Attr<bool>("lower")
                                  .Attr<bool>("wanted"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(portable_svd, svd_of,
                              portable::ffi::Ffi::Bind()
                                  .Arg<AnyBuffer>()
                                  .Ret<AnyBuffer>()
                                  .Ret<AnyBuffer>()
                                  .Ret<AnyBuffer>()
                                  .Ret<AnyBuffer>()
                                  .Attr<bool>("full"));
