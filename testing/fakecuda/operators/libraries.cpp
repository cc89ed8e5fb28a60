#include "libraries.h"

#include <algorithm>
#include <unordered_map>

namespace fakecuda {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

template <const char* NAME>
std::vector<std::string> one(const Stack&) {
  return {NAME};
}

struct Shape {
  std::vector<int64_t> stride, padding, dilation, output_padding;
  bool transposed;
  int64_t groups;
};

Tensor empty_convolution(const Tensor& input, const Tensor& weight, const Shape& shape) {
  std::vector<int64_t> sizes{input.size(0), shape.transposed ? weight.size(1) * shape.groups : weight.size(0)};
  for (int64_t dim = 2; dim < input.dim(); ++dim) {
    auto i = static_cast<size_t>(dim - 2);
    int64_t reach = shape.dilation[i] * (weight.size(dim) - 1), around = 2 * shape.padding[i];
    sizes.push_back(shape.transposed
                        ? (input.size(dim) - 1) * shape.stride[i] - around + reach + shape.output_padding[i] + 1
                        : (input.size(dim) + around - reach - 1) / shape.stride[i] + 1);
  }
  // As cuDNN's: channels last if one of both is.
  auto format = input.suggest_memory_format();
  if (weight.suggest_memory_format() != at::MemoryFormat::Contiguous) format = weight.suggest_memory_format();
  return at::empty(sizes, input.options(), format);
}

std::vector<IValue> convolution(const Stack& a) {
  Shape shape{a[3].toIntVector(), a[2].toIntVector(), a[4].toIntVector(), {}, false, a[5].toInt()};
  return {empty_convolution(a[0].toTensor(), a[1].toTensor(), shape)};
}

std::vector<IValue> convolution_transpose(const Stack& a) {
  Shape shape{a[4].toIntVector(), a[2].toIntVector(), a[5].toIntVector(), a[3].toIntVector(), true, a[6].toInt()};
  return {empty_convolution(a[0].toTensor(), a[1].toTensor(), shape)};
}

std::vector<IValue> batch_norm(const Stack& a) {
  auto input = a[0].toTensor(), weight = a[1].toTensor();
  auto empty = [&] { return at::empty({input.size(1)}, weight.options()); };
  return {at::empty_like(input), empty(), empty(), at::empty({0}, input.options().dtype(at::kByte))};
}

std::vector<IValue> batch_norm_backward(const Stack& a) {
  return {at::empty_like(a[0].toTensor()), at::empty_like(a[2].toTensor()), at::empty_like(a[2].toTensor())};
}

// (A, mode): a matrix is factored, and then Q is made of its reflections.
std::vector<std::string> qr_kernels(const Stack& a) {
  std::vector<std::string> kernels{"cusolver geqrf"};
  if (a[1].toStringRef() != "r") kernels.emplace_back("cusolver orgqr");
  return kernels;
}

// A matrix, or a batch of them, stored by columns.
Tensor empty_by_columns(const Tensor& like, int64_t rows, int64_t columns) {
  auto sizes = like.sizes().vec();
  sizes[sizes.size() - 2] = columns;
  sizes.back() = rows;
  return at::empty(sizes, like.options()).mT();
}

std::vector<IValue> qr(const Stack& a) {
  auto matrix = a[0].toTensor();
  auto mode = a[1].toStringRef();
  auto rows = matrix.size(-2), columns = matrix.size(-1);
  auto least = mode == "complete" ? rows : std::min(rows, columns);
  auto q = mode == "r" ? at::empty({0}, matrix.options()) : empty_by_columns(matrix, rows, least);
  return {q, empty_by_columns(matrix, least, columns)};
}

constexpr char CONVOLUTION[] = "cudnn convolution";
constexpr char TRANSPOSED[] = "cudnn convolution, transposed";
constexpr char BATCH_NORM[] = "cudnn batch normalisation";
constexpr char BATCH_NORM_BACKWARD[] = "cudnn batch normalisation, gradients";

}  // namespace

const Library* library_of(const std::string& name) {
  static const std::unordered_map<std::string, Library> all = {
      {"aten::cudnn_convolution", {true, one<CONVOLUTION>, convolution}},
      {"aten::cudnn_convolution_transpose", {true, one<TRANSPOSED>, convolution_transpose}},
      {"aten::cudnn_batch_norm", {true, one<BATCH_NORM>, batch_norm}},
      {"aten::cudnn_batch_norm_backward", {true, one<BATCH_NORM_BACKWARD>, batch_norm_backward}},
      {"aten::linalg_qr", {false, qr_kernels, qr}},
  };
  auto found = all.find(name);
  return found == all.end() ? nullptr : &found->second;
}

}  // namespace fakecuda
