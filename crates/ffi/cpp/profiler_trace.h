// A trace's inside, which the two files about it share.
#pragma once

#include <memory>

#include <torch/csrc/autograd/profiler_kineto.h>

#include "profiler.h"

struct od_trace {
  std::unique_ptr<torch::autograd::profiler::ProfilerResult> result;
  bool cuda;
};
