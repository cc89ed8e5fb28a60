// Memory that is registered at a group's communicator.
#pragma once

#include <memory>

namespace overdrive {

// The pools of one group. Those that are not taken back are kept for the rest of the process.
struct Registrations {
  virtual ~Registrations() = default;
  // Takes all memory back from the communicator, which has no work under way, and frees what nobody else uses.
  virtual void take_back_all() = 0;
};

// Of a group over NCCL.
std::shared_ptr<Registrations> new_registrations();

}  // namespace overdrive
