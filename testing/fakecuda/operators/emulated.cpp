#include "emulated.h"

#include <cmath>
#include <limits>
#include <unordered_map>

#include <ATen/ATen.h>

namespace fakecuda {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// The arguments of an operator, taken off the stack.
std::vector<IValue> take(Stack& stack, size_t count) {
  std::vector<IValue> arguments(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
  stack.resize(stack.size() - count);
  return arguments;
}

Tensor optional_tensor(const IValue& value) { return value.isNone() ? Tensor() : value.toTensor(); }

// (self, weight, padding, stride, dilation, groups, benchmark, deterministic, allow_tf32)
void cudnn_convolution(Stack& stack) {
  auto a = take(stack, 9);
  stack.emplace_back(at::convolution(a[0].toTensor(), a[1].toTensor(), {}, a[3].toIntVector(), a[2].toIntVector(),
                                     a[4].toIntVector(), false, std::vector<int64_t>(a[2].toIntVector().size(), 0),
                                     a[5].toInt()));
}

// (self, weight, padding, output_padding, stride, dilation, groups, benchmark, deterministic, allow_tf32)
void cudnn_convolution_transpose(Stack& stack) {
  auto a = take(stack, 10);
  stack.emplace_back(at::convolution(a[0].toTensor(), a[1].toTensor(), {}, a[4].toIntVector(), a[2].toIntVector(),
                                     a[5].toIntVector(), true, a[3].toIntVector(), a[6].toInt()));
}

// (input, weight, bias, running_mean, running_var, training, exponential_average_factor, epsilon)
void cudnn_batch_norm(Stack& stack) {
  auto a = take(stack, 8);
  auto input = a[0].toTensor();
  auto [output, mean, deviation] =
      at::native_batch_norm(input, a[1].toTensor(), optional_tensor(a[2]), optional_tensor(a[3]), optional_tensor(a[4]),
                            a[5].toBool(), a[6].toDouble(), a[7].toDouble());
  stack.emplace_back(output);
  stack.emplace_back(mean);
  stack.emplace_back(deviation);
  stack.emplace_back(at::empty({0}, input.options().dtype(at::kByte)));
}

// (input, grad_output, weight, running_mean, running_var, save_mean, save_var, epsilon, reserve)
void cudnn_batch_norm_backward(Stack& stack) {
  auto a = take(stack, 9);
  auto [input, weight, bias] =
      at::native_batch_norm_backward(a[1].toTensor(), a[0].toTensor(), a[2].toTensor(), optional_tensor(a[3]),
                                     optional_tensor(a[4]), optional_tensor(a[5]), optional_tensor(a[6]), true,
                                     a[7].toDouble(), {true, true, true});
  stack.emplace_back(input);
  stack.emplace_back(weight);
  stack.emplace_back(bias);
}

// (self, dim, half_to_float): the host has no softmax from one type to another.
template <Tensor (*OF)(const Tensor&, int64_t, bool)>
void softmax(Stack& stack) {
  auto a = take(stack, 3);
  auto input = a[0].toTensor();
  stack.emplace_back(OF(a[2].toBool() ? input.to(at::kFloat) : input, a[1].toInt(), false));
}

// (grad_output, output, dim, input_dtype)
template <Tensor (*OF)(const Tensor&, const Tensor&, int64_t, at::ScalarType)>
void softmax_backward(Stack& stack) {
  auto a = take(stack, 4);
  auto grad = a[0].toTensor();
  stack.emplace_back(OF(grad, a[1].toTensor(), a[2].toInt(), grad.scalar_type()).to(a[3].toScalarType()));
}

double scale_of(const Tensor& query, const IValue& scale) {
  return scale.isNone() ? 1.0 / std::sqrt(static_cast<double>(query.size(-1))) : scale.toDouble();
}

// What the softmax of attention is taken of, in float32 (float64 for such): [.., queries, keys].
Tensor scores(const Tensor& query, const Tensor& key, const Tensor& bias, bool is_causal, double scale) {
  auto type = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  auto all = at::matmul(query.to(type), key.to(type).transpose(-2, -1)) * scale;
  if (bias.defined()) all = all + bias.to(type);
  if (is_causal) {
    auto mask = at::ones({query.size(-2), key.size(-2)}, at::kBool).triu(1);
    all = all.masked_fill(mask, -std::numeric_limits<double>::infinity());
  }
  return all;
}

// Output and the logarithm of the softmax's denominator.
std::pair<Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias,
                                    bool is_causal, double scale) {
  auto all = scores(query, key, bias, is_causal, scale);
  auto output = at::matmul(at::softmax(all, -1), value.to(all.scalar_type()));
  return {output.to(query.scalar_type()), at::logsumexp(all, {-1}).to(at::kFloat)};
}

std::array<Tensor, 4> attention_backward(const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
                                         const Tensor& bias, bool is_causal, double scale) {
  auto all = scores(query, key, bias, is_causal, scale);
  auto type = all.scalar_type();
  auto share = at::softmax(all, -1), out = grad.to(type);
  auto grad_value = at::matmul(share.transpose(-2, -1), out);
  auto grad_share = at::matmul(out, value.to(type).transpose(-2, -1));
  auto grad_scores = share * (grad_share - (grad_share * share).sum(-1, true));
  auto grad_query = at::matmul(grad_scores, key.to(type)) * scale;
  auto grad_key = at::matmul(grad_scores.transpose(-2, -1), query.to(type)) * scale;
  auto kind = query.scalar_type();
  return {grad_query.to(kind), grad_key.to(kind), grad_value.to(kind), bias.defined() ? grad_scores.to(kind) : Tensor()};
}

void check_no_dropout(double probability) {
  TORCH_CHECK(probability == 0.0, "attention with dropout draws a device's random numbers");
}

// (query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, scale)
void efficient_attention(Stack& stack) {
  auto a = take(stack, 8);
  check_no_dropout(a[5].toDouble());
  auto query = a[0].toTensor();
  auto [output, sums] = attention(query, a[1].toTensor(), a[2].toTensor(), optional_tensor(a[3]), a[6].toBool(),
                                  scale_of(query, a[7]));
  // Laid out as [batch, queries, heads, size].
  stack.emplace_back(output);
  stack.emplace_back(a[4].toBool() ? sums : sums.narrow(-1, 0, 0));
  stack.emplace_back(at::zeros({}, at::kLong));
  stack.emplace_back(at::zeros({}, at::kLong));
}

// (grad_out, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p, mask, is_causal, scale)
void efficient_attention_backward(Stack& stack) {
  auto a = take(stack, 13);
  check_no_dropout(a[9].toDouble());
  auto query = a[1].toTensor();
  auto grads = attention_backward(a[0].toTensor(), query, a[2].toTensor(), a[3].toTensor(), optional_tensor(a[4]),
                                  a[11].toBool(), scale_of(query, a[12]));
  auto mask = a[10].toBoolList();
  for (size_t i = 0; i < 4; ++i) stack.emplace_back(mask[i] ? grads[i] : Tensor());
}

// (query, key, value, dropout_p, is_causal, return_debug_mask, scale)
void flash_attention(Stack& stack) {
  auto a = take(stack, 7);
  check_no_dropout(a[3].toDouble());
  auto query = a[0].toTensor(), key = a[1].toTensor();
  auto [output, sums] = attention(query, key, a[2].toTensor(), {}, a[4].toBool(), scale_of(query, a[6]));
  stack.emplace_back(output);
  stack.emplace_back(sums);
  stack.emplace_back(Tensor());
  stack.emplace_back(Tensor());
  stack.emplace_back(query.size(2));
  stack.emplace_back(key.size(2));
  stack.emplace_back(at::zeros({2}, at::kUInt64));
  stack.emplace_back(at::zeros({}, at::kUInt64));
  stack.emplace_back(at::empty({0}, query.options()));
}

// (grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, .., scale)
void flash_attention_backward(Stack& stack) {
  auto a = take(stack, 15);
  check_no_dropout(a[10].toDouble());
  auto query = a[1].toTensor();
  auto grads = attention_backward(a[0].toTensor(), query, a[2].toTensor(), a[3].toTensor(), {}, a[11].toBool(),
                                  scale_of(query, a[14]));
  for (size_t i = 0; i < 3; ++i) stack.emplace_back(grads[i]);
}

const std::unordered_map<std::string, Formula>& formulas() {
  static const std::unordered_map<std::string, Formula> all = {
      {"aten::cudnn_convolution", cudnn_convolution},
      {"aten::cudnn_convolution_transpose", cudnn_convolution_transpose},
      {"aten::cudnn_batch_norm", cudnn_batch_norm},
      {"aten::cudnn_batch_norm_backward", cudnn_batch_norm_backward},
      {"aten::_softmax", softmax<at::_softmax>},
      {"aten::_log_softmax", softmax<at::_log_softmax>},
      {"aten::_softmax_backward_data", softmax_backward<at::_softmax_backward_data>},
      {"aten::_log_softmax_backward_data", softmax_backward<at::_log_softmax_backward_data>},
      {"aten::_scaled_dot_product_efficient_attention", efficient_attention},
      {"aten::_scaled_dot_product_efficient_attention_backward", efficient_attention_backward},
      {"aten::_scaled_dot_product_flash_attention", flash_attention},
      {"aten::_scaled_dot_product_flash_attention_backward", flash_attention_backward},
  };
  return all;
}

}  // namespace

Formula formula_of(const std::string& name) {
  auto found = formulas().find(name);
  return found == formulas().end() ? nullptr : found->second;
}

}  // namespace fakecuda
