#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "backward_passes.h"
#include "c10d_guarded.h"

namespace overdrive {

// A hook implemented in Rust. Its future is completed at once; the result is requested when the reducer needs it, in
// the buckets' order, which is the same on all ranks.
class LentHook final : public c10d::CommHookInterface {
 public:
  // Where a bucket is among the reducer's, and its parameters. libtorch numbers all buckets of a static graph's first
  // pass 0, and keeps the parameters of an earlier division into buckets.
  struct Place {
    size_t index;
    bool is_last;
    std::vector<at::Tensor> parameters;
    // Gradients of earlier passes, of these parameters, which are not in the bucket; or none.
    std::vector<at::Tensor> earlier;
  };
  using Places = std::function<std::optional<Place>(const at::Tensor& buffer)>;

  LentHook(void* owner, int32_t (*start)(void*, const od_bucket*), at::Tensor* (*finish)(void*, size_t),
           void (*drop)(void*), Places places)
      : owner_(owner), start_(start), finish_(finish), drop_(drop), places_(std::move(places)) {}
  LentHook(const LentHook&) = delete;
  LentHook& operator=(const LentHook&) = delete;
  ~LentHook() override { drop_(owner_); }

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    std::unique_ptr<od_tensor_list> gradients(overdrive::to_list(bucket.getGradients()));
    // The zeros of a rank that has finished are in no bucket of the reducer.
    auto found = places_(bucket.getBuffer());
    auto place = found ? std::move(*found) : Place{bucket.getIndex(), bucket.isLast(), bucket.getParameters(), {}};
    std::unique_ptr<od_tensor_list> parameters(overdrive::to_list(place.parameters));
    std::unique_ptr<od_tensor_list> earlier(overdrive::to_list(place.earlier));
    auto buffer = std::make_unique<at::Tensor>(bucket.getBuffer());
    Running running(under_way_);
    od_bucket lent{place.index,         place.is_last,        buffer.release(),
                   gradients.release(), parameters.release(), earlier.release()};
    if (start_(owner_, &lent) != 0) C10_THROW_ERROR(DistError, "the communication hook failed");
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
    future->markCompleted(c10::IValue(static_cast<int64_t>(place.index)));
    return future;
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    Running running(under_way_);
    std::unique_ptr<at::Tensor> tensor(finish_(owner_, static_cast<size_t>(result.toInt())));
    if (tensor == nullptr) C10_THROW_ERROR(DistError, "the communication hook failed");
    return *tensor;
  }

  bool is_under_way() const { return under_way_.load() > 0; }

 private:
  struct Running {
    explicit Running(std::atomic<int>& count) : count(count) { ++count; }
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;
    ~Running() { --count; }
    std::atomic<int>& count;
    NoPass no_pass;
  };

  std::atomic<int> under_way_{0};
  void* owner_;
  int32_t (*start_)(void*, const od_bucket*);
  at::Tensor* (*finish_)(void*, size_t);
  void (*drop_)(void*);
  Places places_;
};

}  // namespace overdrive
