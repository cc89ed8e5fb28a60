// A stream for copies, and the copies that it was given.
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include "cuda_device.h"
#include "event_pool.h"
#include "side_stream.h"

namespace overdrive {

struct Side {
  explicit Side(c10::Stream stream) : stream(stream), events(stream.device()) {}
  const c10::Stream stream;
  EventPool events;
};

}  // namespace overdrive

struct od_side_stream {
  std::shared_ptr<overdrive::Side> side;
};

struct od_transfer {
  od_transfer(std::shared_ptr<overdrive::Side> given, at::Tensor on_device, c10::Stream user)
      : side(std::move(given)), tensor(std::move(on_device)), user(user), copied(side->events.take()) {}

  // Gives the memory back to `user`'s stream. With `record_stream` instead, it would be free only once the host sees
  // that the copy has ended.
  ~od_transfer() {
    try {
      overdrive::on_device(user.device(), [&] {
        if (!user_waits) copied.block(user);
      });
      side->events.give(std::move(copied));
    } catch (...) {
      // The device is lost.
    }
  }

  // The calling thread's current stream, which waits for the copy from now on.
  c10::Stream block_current() {
    auto current = overdrive::current_stream(user.device());
    overdrive::on_device(user.device(), [&] { copied.block(current); });
    if (current == user) user_waits = true;
    return current;
  }

  std::shared_ptr<overdrive::Side> side;
  at::Tensor tensor;
  c10::Stream user;
  c10::Event copied;
  bool user_waits = false;
};
