// AdamW whose two averages are kept as one byte per parameter, in blocks with one scale each, on a CPU.
//
// Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022. crates/optim has the same arithmetic in tensor
// operators; here the state is read, stepped and written while its block is in the L1 cache.
#include <algorithm>
#include <cmath>
#include <cstring>

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>

#include "guarded.h"

namespace {

constexpr int64_t kBlock = 256;
constexpr size_t kCodes = 256;

// The nearest code to a float32, by a table over its upper 16 bits: sign, exponent and 7 bits of mantissa leave at most
// two codes, and the midpoint between them decides.
class Nearest {
 public:
  Nearest(const float* codes) {
    for (size_t i = 0; i + 1 < kCodes; ++i) middle_[i] = (codes[i] + codes[i + 1]) / 2;
    middle_[kCodes - 1] = std::numeric_limits<float>::infinity();
    for (uint32_t key = 0; key < (1u << 16); ++key) {
      // The smallest number with these upper bits: for a negative number the lower bits are set.
      uint32_t bits = key << 16 | ((key & 0x8000u) != 0 ? 0xffffu : 0u);
      float low;
      std::memcpy(&low, &bits, sizeof low);
      if (std::isnan(low)) low = 0;
      first_[key] = static_cast<uint8_t>(std::lower_bound(middle_, middle_ + kCodes - 1, low) - middle_);
    }
  }

  uint8_t operator()(float value) const {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    uint8_t code = first_[bits >> 16];
    return static_cast<uint8_t>(code + (value > middle_[code] ? 1 : 0));
  }

 private:
  uint8_t first_[1 << 16];
  float middle_[kCodes];
};

// bitsandbytes' dynamic map: decades from 1e-6 to 1, finer in the higher decades; the codes in rising order.
struct Map {
  explicit Map(bool is_signed) : codes(), nearest(fill(codes, is_signed)) {}

  static const float* fill(float* codes, bool is_signed) {
    size_t count = 0;
    for (int decade = 0; decade < 7; ++decade) {
      int steps = is_signed ? 1 << decade : 2 << decade;
      for (int i = 0; i < steps; ++i) {
        // The middle of one of `steps` equal parts of [0.1, 1].
        double middle = 0.1 + 0.9 * (i + 0.5) / steps;
        double value = middle * std::pow(10.0, decade - 6);
        codes[count++] = static_cast<float>(value);
        if (is_signed) codes[count++] = static_cast<float>(-value);
      }
    }
    codes[count++] = 0;
    codes[count++] = 1;
    std::sort(codes, codes + count);
    return codes;
  }

  float codes[kCodes];
  Nearest nearest;
};

const Map& signed_map() {
  static const Map map(true);
  return map;
}

const Map& unsigned_map() {
  static const Map map(false);
  return map;
}

// Loops without branches or calls, so that the compiler vectorises all but the look-ups.
void quantise(const float* values, int64_t n, const Map& map, uint8_t* codes, float* scale) {
  // Without the sign, float32 values are ordered like their bits; infinity and NaN come last.
  int32_t largest_bits = 0;
  for (int64_t i = 0; i < n; ++i) {
    int32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    largest_bits = std::max(largest_bits, bits & 0x7fffffff);
  }
  if (largest_bits >= 0x7f800000) {
    // A value that is not finite has no code: a scale of NaN makes the whole block NaN from now on.
    *scale = std::numeric_limits<float>::quiet_NaN();
    std::memset(codes, map.nearest(0), static_cast<size_t>(n));
    return;
  }
  float largest;
  std::memcpy(&largest, &largest_bits, sizeof largest);
  *scale = largest;
  const float divisor = std::max(largest, std::numeric_limits<float>::min());
  float relative[kBlock];
  for (int64_t i = 0; i < n; ++i) relative[i] = values[i] / divisor;
  for (int64_t i = 0; i < n; ++i) codes[i] = map.nearest(relative[i]);
}

template <typename T>
void step(T* param, const T* grad, int64_t n, uint8_t* codes1, float* scales1, uint8_t* codes2, float* scales2,
          const od_adamw& o) {
  const Map& map1 = signed_map();
  const Map& map2 = unsigned_map();
  const auto beta1 = static_cast<float>(o.beta1), beta2 = static_cast<float>(o.beta2);
  const auto rest1 = static_cast<float>(1 - o.beta1), rest2 = static_cast<float>(1 - o.beta2);
  const auto keep = static_cast<float>(1 - o.lr * o.weight_decay);
  const auto size = static_cast<float>(-o.lr / (1 - std::pow(o.beta1, o.step)));
  const auto root = static_cast<float>(std::sqrt(1 - std::pow(o.beta2, o.step)));
  const auto eps = static_cast<float>(o.eps);
  const float sign = o.maximize != 0 ? -1.0f : 1.0f;
  float average1[kBlock], average2[kBlock], values[kBlock], gradient[kBlock];
  for (int64_t block = 0; block * kBlock < n; ++block) {
    const int64_t start = block * kBlock, len = std::min(kBlock, n - start);
    for (int64_t i = 0; i < len; ++i) average1[i] = map1.codes[codes1[start + i]];
    for (int64_t i = 0; i < len; ++i) average2[i] = map2.codes[codes2[start + i]];
    for (int64_t i = 0; i < len; ++i) values[i] = static_cast<float>(param[start + i]);
    for (int64_t i = 0; i < len; ++i) gradient[i] = sign * static_cast<float>(grad[start + i]);
    const float scale1 = scales1[block], scale2 = scales2[block];
    for (int64_t i = 0; i < len; ++i) {
      const float g = gradient[i];
      average1[i] = beta1 * (average1[i] * scale1) + rest1 * g;
      average2[i] = beta2 * (average2[i] * scale2) + rest2 * g * g;
      values[i] = values[i] * keep + size * (average1[i] / (std::sqrt(average2[i]) / root + eps));
    }
    for (int64_t i = 0; i < len; ++i) param[start + i] = static_cast<T>(values[i]);
    quantise(average1, len, map1, codes1 + start, scales1 + block);
    quantise(average2, len, map2, codes2 + start, scales2 + block);
  }
}

}  // namespace

void od_dynamic_map(int32_t is_signed, float* codes) noexcept {
  std::copy_n((is_signed != 0 ? signed_map() : unsigned_map()).codes, kCodes, codes);
}

od_status od_adamw8bit(const at::Tensor* param, const at::Tensor* grad, const at::Tensor* codes1,
                       const at::Tensor* scales1, const at::Tensor* codes2, const at::Tensor* scales2,
                       const od_adamw* options, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    const int64_t n = param->numel(), blocks = (n + kBlock - 1) / kBlock;
    for (const auto* tensor : {param, grad, codes1, scales1, codes2, scales2})
      TORCH_CHECK(tensor->device().is_cpu() && tensor->is_non_overlapping_and_dense(),
                  "the 8-bit kernel needs dense tensors on the CPU");
    TORCH_CHECK(grad->scalar_type() == param->scalar_type() && grad->sizes() == param->sizes() &&
                    grad->strides() == param->strides(),
                "the gradient should have the dtype, shape and strides of its parameter");
    for (const auto* codes : {codes1, codes2})
      TORCH_CHECK(codes->scalar_type() == at::kByte && codes->numel() == n, "a byte is needed for each of ", n,
                  " numbers");
    for (const auto* scales : {scales1, scales2})
      TORCH_CHECK(scales->scalar_type() == at::kFloat && scales->numel() == blocks, "a float32 is needed for each of ",
                  blocks, " blocks");
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, param->scalar_type(), "adamw8bit", [&] {
      step(static_cast<scalar_t*>(param->data_ptr()), static_cast<const scalar_t*>(grad->const_data_ptr()), n,
           codes1->data_ptr<uint8_t>(), scales1->data_ptr<float>(), codes2->data_ptr<uint8_t>(),
           scales2->data_ptr<float>(), *options);
    });
  });
}
