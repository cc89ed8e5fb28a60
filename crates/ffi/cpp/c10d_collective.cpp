// One entry point for all collectives, and handles of collectives under way.
#include <thread>

#include "c10d_guarded.h"

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

c10d::ReduceOp reduce_op(const od_collective& c) {
  TORCH_CHECK(c.reduce_op >= 0 && c.reduce_op < c10d::ReduceOp::UNUSED, "there is no reduce operation ", c.reduce_op);
  auto op = static_cast<c10d::ReduceOp::RedOpType>(c.reduce_op);
  return op == c10d::ReduceOp::PREMUL_SUM ? c10d::makeNCCLPreMulSum(c.factor) : c10d::ReduceOp(op);
}

template <typename Options>
Options with_timeout(const od_collective& c) {
  Options options;
  if (c.timeout_ms > 0) options.timeout = std::chrono::milliseconds(c.timeout_ms);
  return options;
}

template <typename Options>
Options with_root(const od_collective& c) {
  auto options = with_timeout<Options>(c);
  options.rootRank = c.peer;
  return options;
}

template <typename Options>
Options with_op(const od_collective& c) {
  auto options = with_timeout<Options>(c);
  options.reduceOp = reduce_op(c);
  return options;
}

std::vector<Tensors> nested(const Tensors& tensors) {
  return tensors.empty() ? std::vector<Tensors>() : std::vector<Tensors>{tensors};
}

at::Tensor& only(Tensors& tensors) {
  TORCH_CHECK(tensors.size() == 1, "this collective takes one tensor, not ", tensors.size());
  return tensors[0];
}

// Checked here, because Gloo does not.
std::vector<int64_t> splits(const int64_t* sizes, int ranks, const at::Tensor& tensor) {
  if (sizes == nullptr) return {};
  TORCH_CHECK(tensor.dim() > 0, "a tensor without dimensions has no rows to split");
  int64_t rest = tensor.size(0);
  for (int rank = 0; rank < ranks; ++rank) {
    TORCH_CHECK(sizes[rank] >= 0 && sizes[rank] <= rest, "the splits should add up to the ", tensor.size(0),
                " rows of their tensor, none below 0");
    rest -= sizes[rank];
  }
  TORCH_CHECK(rest == 0, "the splits should add up to the ", tensor.size(0), " rows of their tensor");
  return {sizes, sizes + ranks};
}

WorkPtr start(c10d::ProcessGroup& group, const od_collective& c, Tensors& in, Tensors& out) {
  switch (c.kind) {
    case OD_ALL_REDUCE: return group.allreduce(out, with_op<c10d::AllreduceOptions>(c));
    case OD_ALL_REDUCE_COALESCED: return group.allreduce_coalesced(out, with_op<c10d::AllreduceCoalescedOptions>(c));
    case OD_REDUCE: {
      auto options = with_op<c10d::ReduceOptions>(c);
      options.rootRank = c.peer;
      return group.reduce(out, options);
    }
    case OD_BROADCAST: return group.broadcast(out, with_root<c10d::BroadcastOptions>(c));
    case OD_ALL_GATHER: {
      auto outputs = nested(out);
      return group.allgather(outputs, in, with_timeout<c10d::AllgatherOptions>(c));
    }
    case OD_ALL_GATHER_INTO: return group._allgather_base(only(out), only(in), with_timeout<c10d::AllgatherOptions>(c));
    case OD_REDUCE_SCATTER: {
      auto inputs = nested(in);
      return group.reduce_scatter(out, inputs, with_op<c10d::ReduceScatterOptions>(c));
    }
    case OD_REDUCE_SCATTER_INTO:
      return group._reduce_scatter_base(only(out), only(in), with_op<c10d::ReduceScatterOptions>(c));
    case OD_GATHER: {
      auto outputs = nested(out);
      return group.gather(outputs, in, with_root<c10d::GatherOptions>(c));
    }
    case OD_SCATTER: {
      auto inputs = nested(in);
      return group.scatter(out, inputs, with_root<c10d::ScatterOptions>(c));
    }
    case OD_ALL_TO_ALL: return group.alltoall(out, in, with_timeout<c10d::AllToAllOptions>(c));
    case OD_ALL_TO_ALL_SINGLE: {
      auto output_splits = splits(c.output_splits, group.getSize(), only(out));
      auto input_splits = splits(c.input_splits, group.getSize(), only(in));
      return group.alltoall_base(only(out), only(in), output_splits, input_splits,
                                 with_timeout<c10d::AllToAllOptions>(c));
    }
    case OD_SEND: return group.send(in, c.peer, c.tag);
    case OD_RECV: return group.recv(out, c.peer, c.tag);
    case OD_RECV_ANY: return group.recvAnysource(out, c.tag);
    case OD_BARRIER: {
      auto options = with_timeout<c10d::BarrierOptions>(c);
      if (group.getBoundDeviceId()) options.device = group.getBoundDeviceId();
      return group.barrier(options);
    }
    default: TORCH_CHECK(false, "there is no collective ", c.kind);
  }
}

// Backends access a tensor's memory by its number of elements, without strides.
void check_dense(const Tensors& tensors) {
  for (const auto& tensor : tensors)
    TORCH_CHECK(tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense(),
                "a collective takes dense tensors without gaps");
}

// Backends write without telling autograd, nor whoever looks whether a parameter was changed.
void was_written(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

od_status od_collective_start(const od_group* group, const od_collective* collective, od_work** out,
                              od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] {
    auto inputs = overdrive::to_defined(collective->inputs);
    auto outputs = overdrive::to_defined(collective->outputs);
    check_dense(inputs);
    check_dense(outputs);
    auto work = start(*group->group, *collective, inputs, outputs);
    TORCH_CHECK(work, "the backend returned no work");
    bool is_root = collective->kind == OD_BROADCAST && group->group->getRank() == collective->peer;
    if (group->group->getSize() > 1 && !is_root)
      for (const auto& tensor : outputs) was_written(tensor);
    auto kept = outputs;
    kept.insert(kept.end(), inputs.begin(), inputs.end());
    bool between_two = collective->kind == OD_SEND || collective->kind == OD_RECV || collective->kind == OD_RECV_ANY;
    bool has_nccl = group->group->getBackendType() == c10d::ProcessGroup::BackendType::NCCL;
    bool on_stream = has_nccl && (kept.empty() || kept[0].is_cuda());
    *out = new od_work{std::move(work), std::move(kept), between_two, on_stream, group->group->failures()};
  });
}

od_status od_batch_start(const od_group* group, const od_tensor_list* tensors, const int32_t* peers,
                         const int32_t* receives, od_work** out, od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] {
    auto list = overdrive::to_defined(tensors);
    check_dense(list);
    // Of the backends themselves: the wrapper of a group that verifies cannot compare what only some ranks do.
    auto nccl = std::find_if(group->backends.begin(), group->backends.end(),
                             [](const auto& backend) { return backend->getBackendName() == "nccl"; });
    TORCH_CHECK(nccl != group->backends.end(), "only NCCL sends and receives in one batch");
    auto& backend = **nccl;
    auto work = group->group->locked([&] {
      backend.startCoalescing();
      try {
        for (size_t i = 0; i < list.size(); ++i) {
          Tensors one{list[i]};
          receives[i] != 0 ? backend.recv(one, peers[i], 0) : backend.send(one, peers[i], 0);
        }
      } catch (...) {
        backend.endCoalescing();
        throw;
      }
      return backend.endCoalescing();
    });
    TORCH_CHECK(work, "the backend returned no work");
    for (size_t i = 0; i < list.size(); ++i)
      if (receives[i] != 0) was_written(list[i]);
    *out = new od_work{std::move(work), std::move(list), false, true, group->group->failures()};
  });
}

void od_work_free(od_work* work) noexcept {
  std::unique_ptr<od_work> owned(work);
  if (work->is_given_up && od_work_is_completed(work) != 0) work->take_back();
  if (!work->between_two || work->was_waited_for) return;
  try {
    // Without the wait, the connection would be stuck at this send or receive, and transfer nothing after it.
    std::thread([owned = std::move(owned)] {
      try {
        owned->work->wait();
      } catch (...) {
      }
    }).detach();
  } catch (...) {
    // No thread could be started: the work is destroyed without a wait.
  }
}

int32_t od_work_is_completed(const od_work* work) noexcept {
  try {
    return work->work->isCompleted();
  } catch (...) {
    // It has failed; `od_work_wait` reports the error.
    return 1;
  }
}

od_status od_work_wait(const od_work* work, int64_t timeout_ms, od_error* err) noexcept {
  auto status = overdrive::between_ranks(err, [&] {
    work->was_waited_for = true;
    bool done = work->work->wait(std::chrono::milliseconds(timeout_ms));
    if (!done) C10_THROW_ERROR(DistError, "the collective was aborted");
    // Without a timeout, only the stream waits for NCCL. With one, libtorch looks first for an error, and then whether
    // the work has ended, as it does also with an error that comes in between.
    if (timeout_ms > 0 && work->work->isCompleted() && work->work->exception())
      std::rethrow_exception(work->work->exception());
  });
  if (status == OD_OK) work->take_back();
  if (status != OD_OK && work->on_stream) work->failures->failed = true;
  return status;
}

od_status od_work_wait_for(const od_work* work, int64_t timeout_ms, od_error* err) noexcept {
  if (work->on_stream) {
    // libtorch aborts the communicator when its own wait ends without a result.
    auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    while (od_work_is_completed(work) == 0) {
      if (std::chrono::steady_clock::now() >= deadline) {
        work->give_up();
        return overdrive::between_ranks(
            err, [&] { C10_THROW_ERROR(DistError, c10::str("timed out: not done after ", timeout_ms, " ms")); });
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  return od_work_wait(work, timeout_ms, err);
}

od_status od_work_source_rank(const od_work* work, int32_t* out, od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] { *out = work->work->sourceRank(); });
}

od_status od_reducer_backward(const at::Tensor* loss, od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] { loss->backward(); });
}
