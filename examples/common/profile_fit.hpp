// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdio>
#include <span>
#include <string>

#include <kvexact/codec/profile_data.hpp>
#include <kvexact/codec/stream_format.hpp>
#include <kvexact/residual/residual_model.hpp>
#include <kvexact/tensor/cache_shape.hpp>

namespace kvexact::examples {

/// Why a profile does not fit a cache that was encoded with it, in words, or nothing if it does. It fits if the chunks take no more bits
/// than the profile had for the caches it was made from, or up to 1.25 times as many with its predictor in all of them. Left out of
/// account: chunks of less than a row of tokens, and what any chunk costs, so that short streams are not blamed for being short.
/// `suspect`: what may be wrong as well where most chunks do without the predictor, or nothing.
[[nodiscard]] inline std::string misfit(const cache_shape& shape, std::span<const chunk_record> chunks, const model_parameters& model,
                                        const std::string& suspect = {}) {
  constexpr double fixed_bytes = 200;
  constexpr double tolerance = 1.25;
  std::uint64_t judged = 0, deserted = 0, values = 0, bytes = 0;
  for (const chunk_record& record : chunks) {
    if (record.token_count < static_cast<std::uint32_t>(row_lanes)) continue;
    ++judged;
    deserted += record.mode != model.predictor ? 1U : 0U;
    bytes += record.bytes;
    for (std::uint64_t l = record.layers().begin; l < record.layers().end; ++l)
      values += std::uint64_t{shape.layer(static_cast<std::uint32_t>(l)).channels()} * record.token_count;
  }
  if (values == 0) return {};
  const auto bits = [&](double of) { return 8 * of / static_cast<double>(values); };
  const double taken = bits(static_cast<double>(bytes) - fixed_bytes * static_cast<double>(judged));
  const double expected = model.bits_per_value_q8 / 256.0;
  if (taken <= (deserted == 0 ? tolerance : 1.0) * expected) return {};
  char figures[80];
  std::snprintf(figures, sizeof figures, "%.3f bits per scalar, %.3f on the data it was calibrated on", bits(static_cast<double>(bytes)),
                expected);
  std::string text = "the profile does not fit this cache: ";
  if (deserted > 0) text += std::to_string(deserted) + " of " + std::to_string(judged) + " chunks are coded without its predictor; ";
  text += figures;
  text += "; calibrate on more caches, and of this kind";
  if (2 * deserted > judged && !suspect.empty()) text += ", or " + suspect;
  return text;
}

}  // namespace kvexact::examples
