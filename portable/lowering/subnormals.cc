// Subnormal numbers in programs for the host: XLA's CPU client makes every thread that it runs on flush them to zero.
//
// `portable_keep_subnormals` turns that off for the thread that calls a program; XLA turns it on again at the next call.
// `portable_keep_subnormals_in_pool` does so once and for all on each thread of the client's pool: it gives out as many
// tasks as there are threads, each of which waits for the others, so that no thread takes two of them. Both give a zero,
// on which the rest of a program can be made to wait. `portable_nothing` does nothing, see subnormals.py.
//
// Against XLA's C API alone, so that it is built in a moment.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "xla/ffi/api/c_api.h"

namespace {

void keep() {
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() & ~0x8040u);  // FTZ and DAZ
#elif defined(__aarch64__)
  uint64_t control;
  __asm__ volatile("mrs %0, fpcr" : "=r"(control));
  __asm__ volatile("msr fpcr, %0" ::"r"(control & ~(uint64_t{1} << 24)));  // FZ
#endif
}

// Whether XLA only asks which version of its interface this is built against.
bool introduced(XLA_FFI_CallFrame* frame) {
  for (XLA_FFI_Extension_Base* e = frame->extension_start; e != nullptr; e = e->next) {
    if (e->type != XLA_FFI_Extension_Metadata) continue;
    XLA_FFI_Metadata* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(e)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    metadata->traits = 0;
    return true;
  }
  return frame->stage != XLA_FFI_ExecutionStage_EXECUTE;
}

XLA_FFI_Error* done(XLA_FFI_CallFrame* frame, uint32_t value) {
  *static_cast<uint32_t*>(static_cast<XLA_FFI_Buffer*>(frame->rets.rets[0])->data) = value;
  return nullptr;
}

constexpr auto kPatience = std::chrono::seconds(5);  // a thread that does not come is one that has died

struct Meeting {
  std::atomic<int64_t> expected, arrived{0};

  explicit Meeting(int64_t count) : expected(count) {}

  bool complete() const {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (arrived.load() < expected.load()) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::yield();
    }
    return true;
  }
};

void attend(void* data) {
  std::unique_ptr<std::shared_ptr<Meeting>> meeting(static_cast<std::shared_ptr<Meeting>*>(data));
  keep();
  ++(*meeting)->arrived;
  (*meeting)->complete();
}

}  // namespace

extern "C" XLA_FFI_Error* portable_keep_subnormals(XLA_FFI_CallFrame* frame) {
  if (introduced(frame)) return nullptr;
  keep();
  return done(frame, 0);
}

extern "C" XLA_FFI_Error* portable_keep_subnormals_in_pool(XLA_FFI_CallFrame* frame) {
  if (introduced(frame)) return nullptr;
  int64_t threads = 0;
  XLA_FFI_ThreadPool_NumThreads_Args count = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, nullptr, frame->ctx,
                                              &threads};
  if (frame->api->XLA_FFI_ThreadPool_NumThreads(&count) != nullptr) return done(frame, 1);
  auto meeting = std::make_shared<Meeting>(threads);
  for (int64_t i = 0; i < threads; ++i) {
    XLA_FFI_ThreadPool_Schedule_Args task = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, nullptr, frame->ctx, attend,
                                             new std::shared_ptr<Meeting>(meeting)};
    if (frame->api->XLA_FFI_ThreadPool_Schedule(&task) != nullptr) return done(frame, 1);
  }
  return done(frame, meeting->complete() ? 0 : 1);
}

extern "C" XLA_FFI_Error* portable_nothing(XLA_FFI_CallFrame* frame) {
  return introduced(frame) ? nullptr : done(frame, 0);
}
