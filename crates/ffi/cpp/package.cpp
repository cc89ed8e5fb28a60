// Packages made by AOTInductor, run without Python.
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include "guarded.h"
#include "record.h"

struct od_package {
  explicit od_package(const char* path, c10::DeviceIndex device)
      : loader(path, "model", /*run_single_threaded=*/false, /*num_runners=*/1, device) {}
  torch::inductor::AOTIModelPackageLoader loader;
};

od_status od_package_load(const char* path, int32_t device_index, od_package** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { *out = new od_package(path, static_cast<c10::DeviceIndex>(device_index)); });
}

od_status od_package_run(od_package* package, const od_tensor_list* inputs, od_tensor_list** out,
                         od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    at::AutoDispatchBelowADInplaceOrView no_history;
    std::vector<at::Tensor> given;
    given.reserve(inputs->list.size());
    for (const at::Tensor& tensor : inputs->list) given.push_back(tensor);
    auto list = std::make_unique<od_tensor_list>();
    for (auto& tensor : package->loader.boxed_run(std::move(given))) list->list.push_back(std::move(tensor));
    *out = list.release();
  });
}

void od_package_free(od_package* package) noexcept { delete package; }
