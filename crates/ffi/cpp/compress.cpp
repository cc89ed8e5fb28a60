// Compresses gradients on a CPU, with error feedback: to the sign of each element, or to the k elements that are
// largest in magnitude (top k). `error` is the feedback buffer. It has what earlier steps did not send; a step adds its
// gradient, and leaves there what it does not send either.
//
// A compression passes over memory twice; tensor operators would need about a dozen passes.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "c10d.h"
#include "guarded.h"

namespace {

// How many elements a thread takes at a time. A multiple of 8, because loops over bytes of signs take an eighth of it.
constexpr int64_t kGrain = 1 << 16;

float* floats(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK(tensor.is_cpu() && tensor.scalar_type() == at::kFloat && tensor.is_contiguous(), what,
              " should be contiguous float32 on the CPU");
  return tensor.data_ptr<float>();
}

// Computes error += grad, and returns the sum of the squares.
double add(const float* grad, float* error, int64_t count) {
  // How many elements are added up in float, to keep the rounding error small; these sums are added in double.
  constexpr int64_t kShort = 1024;
  std::vector<double> sums((count + kGrain - 1) / kGrain);
  // The chunks have a fixed size, so that the sum does not depend on the number of threads.
  at::parallel_for(0, static_cast<int64_t>(sums.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      int64_t last = std::min((chunk + 1) * kGrain, count);
      for (int64_t from = chunk * kGrain; from < last; from += kShort) {
        int64_t to = std::min(from + kShort, last), i = from;
        std::array<float, 8> lanes{};
        for (; i + 8 <= to; i += 8) {
          for (int64_t lane = 0; lane < 8; ++lane) {
            float value = error[i + lane] += grad[i + lane];
            lanes[lane] += value * value;
          }
        }
        for (; i < to; ++i) {
          float value = error[i] += grad[i];
          lanes[0] += value * value;
        }
        sums[chunk] += std::accumulate(lanes.begin(), lanes.end(), 0.0);
      }
    }
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

// For each byte of eight signs, the masks that give a value these signs by XOR. Bit i of the byte is the sign of
// element i: 1 leaves the value as it is, 0 negates it.
struct Flips {
  alignas(32) uint32_t of[256][8];

  Flips() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      for (uint32_t i = 0; i < 8; ++i) of[byte][i] = (byte >> i & 1) != 0 ? 0 : 0x80000000u;
    }
  }
};

const Flips& flips() {
  static const Flips table;
  return table;
}

uint8_t signs_of(const float* eight) {
#if defined(__SSE2__)
  auto zero = _mm_setzero_ps();
  int low = _mm_movemask_ps(_mm_cmpge_ps(_mm_loadu_ps(eight), zero));
  int high = _mm_movemask_ps(_mm_cmpge_ps(_mm_loadu_ps(eight + 4), zero));
  return static_cast<uint8_t>(low | high << 4);
#else
  unsigned signs = 0;
  for (unsigned i = 0; i < 8; ++i) signs |= static_cast<unsigned>(eight[i] >= 0) << i;
  return static_cast<uint8_t>(signs);
#endif
}

float flipped(float value, uint32_t flip) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits ^= flip;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The bin of a value is its exponent and the first four bits of its mantissa, without the sign. So bins are in the
// order of magnitude; infinity and NaN have the last 16.
constexpr size_t kBins = 1 << 12;

size_t bin(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return (bits & 0x7fffffffu) >> 19;
}

}  // namespace

od_status od_sign_compress(const at::Tensor* grad, const at::Tensor* error, at::Tensor** packed_out,
                           at::Tensor** scale_out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    const float* from = floats(*grad, "the gradient");
    float* value = floats(*error, "the error feedback");
    int64_t count = grad->numel(), padded = error->numel();
    TORCH_CHECK(count <= padded && padded % 8 == 0, "the error feedback has ", padded,
                " elements, but should have a multiple of 8, and at least as many as the gradient (", count, ")");
    double squares = add(from, value, count);
    auto scale = static_cast<float>(std::sqrt(squares / static_cast<double>(std::max<int64_t>(count, 1))));
    auto packed = at::empty({padded / 8}, at::kByte);
    auto* bytes = packed.data_ptr<uint8_t>();
    at::parallel_for(0, padded / 8, kGrain / 8, [&](int64_t begin, int64_t end) {
      for (int64_t byte = begin; byte < end; ++byte) {
        float* eight = value + byte * 8;
        bytes[byte] = signs_of(eight);
        const auto* flip = flips().of[bytes[byte]];
        if (byte < count / 8) {
          for (int64_t i = 0; i < 8; ++i) eight[i] -= flipped(scale, flip[i]);
        } else {
          for (int64_t i = byte * 8; i < count; ++i) value[i] -= flipped(scale, flip[i % 8]);
        }
      }
    });
    // An infinite or NaN gradient reaches all ranks by this step's scale. It must not stay in the error feedback, or
    // every later step would be infinite or NaN too.
    if (!std::isfinite(scale)) std::fill_n(value, count, 0.0f);
    auto scales = at::full({1}, scale, at::kFloat);
    // Freed if the second allocation fails.
    auto first_out = std::make_unique<at::Tensor>(std::move(packed));
    *scale_out = new at::Tensor(std::move(scales));
    *packed_out = first_out.release();
  });
}

od_status od_sign_expand(const at::Tensor* packed, float value, const at::Tensor* out, int32_t add_to,
                         od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    float* to = floats(*out, "the output");
    int64_t count = out->numel();
    TORCH_CHECK(packed->is_cpu() && packed->scalar_type() == at::kByte && packed->is_contiguous() &&
                    packed->numel() * 8 >= count,
                "the signs should be contiguous uint8 on the CPU, with a bit for each of ", count, " elements");
    const auto* bytes = packed->data_ptr<uint8_t>();
    auto expand = [&](auto put) {
      at::parallel_for(0, (count + 7) / 8, kGrain / 8, [&](int64_t begin, int64_t end) {
        for (int64_t byte = begin; byte < end; ++byte) {
          const auto* flip = flips().of[bytes[byte]];
          float* eight = to + byte * 8;
          if (byte < count / 8) {
            for (int64_t i = 0; i < 8; ++i) put(eight[i], flipped(value, flip[i]));
          } else {
            for (int64_t i = byte * 8; i < count; ++i) put(to[i], flipped(value, flip[i % 8]));
          }
        }
      });
    };
    if (add_to != 0) {
      expand([](float& out, float value) { out += value; });
    } else {
      expand([](float& out, float value) { out = value; });
    }
  });
}

od_status od_take_largest(const at::Tensor* grad, const at::Tensor* error, int64_t kept, at::Tensor** places_out,
                          at::Tensor** values_out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    const float* from = floats(*grad, "the gradient");
    float* value = floats(*error, "the error feedback");
    int64_t count = grad->numel();
    TORCH_CHECK(error->numel() == count, "the error feedback has ", error->numel(), " elements, but should have the ",
                count, " of the gradient");
    TORCH_CHECK(kept >= 0 && kept <= count, "should take from 0 to ", count, " elements of the gradient, not ", kept);
    TORCH_CHECK(count <= INT32_MAX, "the gradient has ", count, " elements, but should have fewer than 2^31");
    std::array<int64_t, kBins> bins{};
    for (int64_t i = 0; i < count; ++i) ++bins[bin(value[i] += from[i])];
    // All elements in the bins above `last` are taken, and from `last` the largest, until there are `kept`.
    size_t last = kBins;
    int64_t above = 0;
    while (last > 0 && above < kept) above += bins[--last];

    auto places = at::empty({kept}, at::kInt), values = at::empty({kept}, at::kFloat);
    auto *place = places.data_ptr<int32_t>(), *first = place;
    std::vector<int32_t> candidates;
    for (int64_t i = 0; i < count && kept > 0; ++i) {
      size_t of = bin(value[i]);
      if (of > last) {
        *place++ = static_cast<int32_t>(i);
      } else if (of == last) {
        candidates.push_back(static_cast<int32_t>(i));
      }
    }
    auto missing = kept - (place - first);
    auto larger = [&](int32_t a, int32_t b) {
      float x = std::fabs(value[a]), y = std::fabs(value[b]);
      // nth_element needs a strict weak order, so NaN counts as larger than every number.
      if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && (!std::isnan(y) || a < b);
      return x > y || (x == y && a < b);
    };
    std::nth_element(candidates.begin(), candidates.begin() + missing, candidates.end(), larger);
    std::sort(candidates.begin(), candidates.begin() + missing);
    std::copy_n(candidates.begin(), missing, place);
    auto* taken = values.data_ptr<float>();
    for (int64_t i = 0; i < kept; ++i) taken[i] = std::exchange(value[first[i]], 0.0f);
    // If infinite and NaN values that were not taken stayed in the error feedback, later steps would send them.
    if (std::any_of(bins.begin() + bin(INFINITY), bins.end(), [](int64_t found) { return found > 0; })) {
      std::replace_if(value, value + count, [](float left) { return !std::isfinite(left); }, 0.0f);
    }
    // Freed if the second allocation fails.
    auto first_out = std::make_unique<at::Tensor>(std::move(places));
    *values_out = new at::Tensor(std::move(values));
    *places_out = first_out.release();
  });
}
