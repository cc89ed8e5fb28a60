// The gradients of convolutions. libtorch reaches cuDNN's through a pointer to a function, which is another one here, so
// that they are answered whoever asks: operators, and compiled code, whose calls the dispatcher does not see.
#include <ATen/core/grad_mode.h>
#include <ATen/native/ConvUtils.h>
#include <c10/cuda/CUDAStream.h>

#include "libraries.h"
#include "runtime.h"
#include "within.h"

namespace fakecuda {
namespace {

using at::IntArrayRef;
using at::Tensor;
using Gradients = std::tuple<Tensor, Tensor>;

void launch(const char* kernel) {
  auto* stream = c10::cuda::getCurrentCUDAStream().stream();
  TORCH_CHECK(fakecuda_launch(kernel, stream) == 0, kernel, " could not be launched");
}

Gradients gradients(const Tensor& input, const Tensor& grad, const Tensor& weight, IntArrayRef padding,
                    IntArrayRef output_padding, IntArrayRef stride, IntArrayRef dilation, bool transposed, int64_t groups,
                    std::array<bool, 2> mask) {
  if (!is_within_operator()) {
    // The operator has numbers, and comes here again.
    at::AutoDispatchBelowAutograd no_autograd;
    auto all = at::convolution_backward(grad, input, weight, c10::nullopt, stride, padding, dilation, transposed,
                                        output_padding, groups, {mask[0], mask[1], false});
    return {std::get<0>(all), std::get<1>(all)};
  }
  auto format = at::native::cudnn_conv_suggest_memory_format(input, weight);
  Gradients found;
  if (mask[0]) {
    std::get<0>(found) = at::empty(input.sizes(), grad.options(), format);
    launch("cudnn convolution, gradient of the input");
  }
  if (mask[1]) {
    std::get<1>(found) = at::empty(weight.sizes(), grad.options(), format);
    launch("cudnn convolution, gradient of the weight");
  }
  return found;
}

Gradients plain(const Tensor& input, const Tensor& grad, const Tensor& weight, IntArrayRef padding, IntArrayRef stride,
                IntArrayRef dilation, int64_t groups, bool, bool, bool, std::array<bool, 2> mask) {
  std::vector<int64_t> none(padding.size());
  return gradients(input, grad, weight, padding, none, stride, dilation, false, groups, mask);
}

Gradients transposed(const Tensor& input, const Tensor& grad, const Tensor& weight, IntArrayRef padding,
                     IntArrayRef output_padding, IntArrayRef stride, IntArrayRef dilation, int64_t groups, bool, bool,
                     bool, std::array<bool, 2> mask) {
  return gradients(input, grad, weight, padding, output_padding, stride, dilation, true, groups, mask);
}

[[maybe_unused]] const bool answered =
    (at::native::cudnn_convolution_backward_stub.set_cuda_dispatch_ptr(plain),
     at::native::cudnn_convolution_transpose_backward_stub.set_cuda_dispatch_ptr(transposed), true);

}  // namespace
}  // namespace fakecuda
