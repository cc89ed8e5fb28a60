// The definition of od_trace, which profiler.cpp and profiler_events.cpp share.
#pragma once

#include <memory>

#include <torch/csrc/autograd/profiler_kineto.h>

#include "profiler.h"

struct od_trace {
  std::unique_ptr<torch::autograd::profiler::ProfilerResult> result;
  bool cuda;
};
