// Kineto's session through libtorch, and user scopes.
#include <mutex>
#include <set>
#include <string>
#include <unordered_set>

#include <ATen/Context.h>
#include <ATen/record_function.h>
#include <ThreadUtil.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/csrc/profiler/kineto_shim.h>

#include "guarded.h"
#include "profiler_trace.h"

namespace {

using torch::autograd::profiler::ProfilerResult;
using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;

ProfilerConfig config(const od_profiler_options& options) {
  torch::profiler::impl::ExperimentalConfig experimental;
  experimental.capture_overload_names = options.overload_names != 0;
  // FLOPs are computed from shapes.
  bool shapes = options.record_shapes != 0 || options.with_flops != 0;
  return ProfilerConfig(torch::profiler::impl::ProfilerState::KINETO, shapes, options.profile_memory != 0,
                        /*with_stack=*/false, options.with_flops != 0, /*with_modules=*/false, experimental, options.trace_id);
}

std::set<ActivityType> activities(const od_profiler_options& options) {
  std::set<ActivityType> chosen;
  if (options.cpu != 0) chosen.insert(ActivityType::CPU);
  if (options.cuda != 0) chosen.insert(ActivityType::CUDA);
  return chosen;
}

// All record scopes, as in Python.
std::unordered_set<at::RecordScope> scopes() {
  std::unordered_set<at::RecordScope> all;
  for (int scope = 0; scope < static_cast<int>(at::RecordScope::NUM_SCOPES); ++scope) {
    all.insert(static_cast<at::RecordScope>(scope));
  }
  return all;
}

// Saving a trace converts GPU times to clock times by a function that the end of the next session replaces: the two
// must not run at the same time.
std::mutex& gpu_clock() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

struct od_scope {
  at::RecordFunction function{at::RecordScope::USER_SCOPE};
};

od_status od_profiler_prepare(const od_profiler_options* options, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    torch::autograd::profiler::prepareProfiler(config(*options), activities(*options));
  });
}

od_status od_profiler_enable(const od_profiler_options* options, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    torch::autograd::profiler::enableProfiler(config(*options), activities(*options), scopes());
  });
}

od_status od_profiler_disable(od_trace** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    // Checks this thread's profiler, so that only a session that was enabled here is ended.
    TORCH_CHECK(torch::profiler::impl::profilerEnabled(), "no profiler is on in this thread");
    bool cuda = at::hasCUDA();
    std::unique_lock<std::mutex> lock(gpu_clock(), std::defer_lock);
    if (cuda) lock.lock();
    auto result = torch::autograd::profiler::disableProfiler();
    TORCH_CHECK(result != nullptr, "the profiler returned no result");
    *out = new od_trace{std::move(result), cuda};
  });
}

od_status od_profiler_add_metadata(const char* key, const char* json, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { torch::autograd::profiler::addMetadataJson(key, json); });
}

void od_trace_free(od_trace* trace) noexcept { delete trace; }

od_status od_trace_start_ns(const od_trace* trace, int64_t* out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { *out = static_cast<int64_t>(trace->result->trace_start_ns()); });
}

od_status od_trace_save(od_trace* trace, const char* path, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    std::unique_lock<std::mutex> lock(gpu_clock(), std::defer_lock);
    if (trace->cuda) lock.lock();
    trace->result->save(path);
  });
}

od_status od_scope_enter(const char* name, size_t length, od_scope** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto scope = std::make_unique<od_scope>();
    // `before` copies the text.
    if (scope->function.isActive()) scope->function.before(std::string_view(name, length));
    *out = scope.release();
  });
}

od_status od_scope_exit(od_scope* scope, od_error* err) noexcept {
  std::unique_ptr<od_scope> owned(scope);
  return overdrive::guarded(err, [&] { owned->function.end(); });
}

void od_current_thread(uint64_t* number, int64_t* system) noexcept {
  *number = at::RecordFunction::currentThreadId();
  *system = libkineto::systemThreadId();
}
