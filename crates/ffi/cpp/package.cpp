// Packages made by AOTInductor, run without Python.
#include <algorithm>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/MemoryOverlap.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include "arrivals.h"
#include "guarded.h"
#include "record.h"
#include "storage.h"

struct od_package {
  explicit od_package(const char* path, c10::DeviceIndex device)
      : loader(path, "model", /*run_single_threaded=*/false, /*num_runners=*/1, device) {}
  torch::inductor::AOTIModelPackageLoader loader;
};

namespace {

// Gives a result memory of its own where it has that of an input or of another result: the compiler leaves operators out
// that change nothing, such as a product with 1, and what the caller writes to one would change the other.
void separate(std::vector<at::Tensor>& results, const std::vector<at::Tensor>& inputs) {
  std::unordered_map<at::StorageImpl*, std::vector<at::Tensor>> parts;
  for (const auto& input : inputs)
    if (overdrive::has_storage(input)) parts[&overdrive::storage_of(input)].push_back(input);
  for (auto& result : results) {
    if (!overdrive::has_storage(result)) continue;
    auto& others = parts[&overdrive::storage_of(result)];
    auto overlaps = [&](const at::Tensor& other) {
      return at::get_overlap_status(result, other) != at::MemOverlapStatus::No;
    };
    if (std::any_of(others.begin(), others.end(), overlaps)) {
      result = result.clone();
    } else {
      others.push_back(result);
    }
  }
}

}  // namespace

od_status od_package_load(const char* path, int32_t device_index, od_package** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { *out = new od_package(path, static_cast<c10::DeviceIndex>(device_index)); });
}

od_status od_package_run(od_package* package, const od_tensor_list* inputs, od_tensor_list** out,
                         od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    at::AutoDispatchBelowADInplaceOrView no_history;
    std::vector<at::Tensor> kept;
    kept.reserve(inputs->list.size());
    for (const at::Tensor& tensor : inputs->list) {
      // Compiled code reads memory without an operator.
      overdrive::arrive(tensor);
      kept.push_back(tensor);
    }
    auto results = package->loader.boxed_run(std::vector<at::Tensor>(kept));
    separate(results, kept);
    auto list = std::make_unique<od_tensor_list>();
    for (auto& tensor : results) list->list.push_back(std::move(tensor));
    *out = list.release();
  });
}

od_status od_package_least_size(od_package* package, int64_t* out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    const auto about = package->loader.get_metadata();
    auto found = about.find("least_size");
    *out = found == about.end() ? 0 : std::stoll(found->second);
  });
}

void od_package_free(od_package* package) noexcept { delete package; }

int32_t od_tensor_values(const at::Tensor* tensor) noexcept {
  if (!tensor->defined()) return OD_UNDEFINED;
  if (!overdrive::has_storage(*tensor)) return OD_WITHOUT_STRIDES;
  return tensor->is_neg() || tensor->is_conj() ? OD_LAZY : OD_IN_MEMORY;
}

int32_t od_tensors_share_memory(const at::Tensor* one, const at::Tensor* other) noexcept {
  return overdrive::share_memory(*one, *other);
}

const void* od_tensor_memory(const at::Tensor* tensor) noexcept {
  return overdrive::has_storage(*tensor) ? overdrive::storage_of(*tensor)._mutable_data_ptr_no_checks().get()
                                         : nullptr;
}

const void* od_tensor_address(const at::Tensor* tensor) noexcept {
  auto memory = static_cast<const char*>(od_tensor_memory(tensor));
  return memory == nullptr ? nullptr : memory + tensor->storage_offset() * static_cast<int64_t>(tensor->itemsize());
}

void od_tensor_bump_version(const at::Tensor* tensor) noexcept {
  if (tensor->defined() && !tensor->is_inference()) tensor->unsafeGetTensorImpl()->bump_version();
}
