// Puts a trace's events into plain arrays, so that Rust reads them with one call.
#include <string>
#include <unordered_map>
#include <vector>

#include "guarded.h"
#include "profiler_trace.h"

namespace {

using torch::autograd::profiler::KinetoEvent;

// Stores each distinct text once.
class Strings {
 public:
  uint32_t number(const std::string& text) {
    auto [place, is_new] = numbers_.try_emplace(text, static_cast<uint32_t>(ends.size()));
    if (is_new) {
      this->text += text;
      ends.push_back(this->text.size());
    }
    return place->second;
  }

  std::string text;
  std::vector<uint64_t> ends;

 private:
  std::unordered_map<std::string, uint32_t> numbers_;
};

}  // namespace

struct od_events {
  explicit od_events(const std::vector<KinetoEvent>& recorded) {
    events.reserve(recorded.size());
    for (const auto& event : recorded) add(event);
  }

  void add(const KinetoEvent& event) {
    od_event out{};
    out.start_ns = static_cast<int64_t>(event.startNs());
    out.end_ns = static_cast<int64_t>(event.endNs());
    out.correlation_id = event.correlationId();
    out.linked_correlation_id = event.linkedCorrelationId();
    out.start_thread = event.startThreadId();
    out.end_thread = event.endThreadId();
    out.forward_thread = event.fwdThreadId();
    out.sequence_number = event.sequenceNr();
    out.flops = event.flops();
    out.bytes = event.nBytes();
    out.resource = event.deviceResourceId();
    out.name = strings.number(event.name());
    out.overload = strings.number(event.overload_name());
    out.device_type = static_cast<int32_t>(event.deviceType());
    out.device_index = event.deviceIndex();
    out.activity = event.activityType();
    out.scope = event.scope();
    out.is_async = event.isAsync() ? 1 : 0;
    out.is_hidden = event.isHiddenEvent() ? 1 : 0;
    out.inputs = inputs.size();
    if (event.hasShapes()) add_inputs(event, out);
    events.push_back(out);
  }

  void add_inputs(const KinetoEvent& event, od_event& out) {
    auto shapes = event.shapes();
    auto types = event.dtypes();
    out.n_inputs = static_cast<uint32_t>(shapes.size());
    for (size_t input = 0; input < shapes.size(); ++input) {
      inputs.push_back(strings.number(input < types.size() ? types[input] : std::string()));
      inputs.push_back(static_cast<int64_t>(shapes[input].size()));
      inputs.insert(inputs.end(), shapes[input].begin(), shapes[input].end());
    }
  }

  std::vector<od_event> events;
  std::vector<int64_t> inputs;
  Strings strings;
};

od_status od_trace_events(const od_trace* trace, od_events** out, od_events_view* view, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto all = std::make_unique<od_events>(trace->result->events());
    *view = {all->events.data(), all->events.size(),        all->inputs.data(),        all->inputs.size(),
             all->strings.text.data(), all->strings.ends.data(), all->strings.ends.size()};
    *out = all.release();
  });
}

void od_events_free(od_events* events) noexcept { delete events; }
