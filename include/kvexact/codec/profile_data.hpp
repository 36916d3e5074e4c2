// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvexact/bitstream/byte_io.hpp>
#include <kvexact/bitstream/checksum.hpp>
#include <kvexact/bitstream/container.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/entropy/frequency_table.hpp>
#include <kvexact/numeric/number_format.hpp>
#include <kvexact/prediction/layer_maps.hpp>
#include <kvexact/residual/table_clusters.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/rotary.hpp>

namespace kvexact {

/// Calibrated parameters of one predictor together with the residual model. "Tiles" are (layer, part) in coding order: layer by layer,
/// K before V, absent V skipped; channels count through the tiles.
struct model_parameters {
  std::uint32_t predictor = 0;                ///< id of the predictor
  std::uint32_t bits_per_value_q8 = 0;        ///< code length on the calibration data in 1/256 bit
  std::vector<std::uint32_t> means;           ///< per channel, bits of binary32, real units, keys before rotation; may be empty
  std::vector<std::int16_t> sigmas;           ///< per channel, log2 of the residuals' spread in 1/256 octave, real units
  std::vector<std::uint16_t> shared_tables;   ///< table of each shared context
  std::vector<std::uint16_t> tile_tables;     ///< table of each further context, tile by tile
  std::vector<frequency_table> tables;
  layer_maps maps;                            ///< of predictors that have them
};

/// Content of a profile, independent of any codec type; what is stored in the file. See docs/format.md.
struct profile_data {
  number_format format = number_format::bfloat16;
  std::uint32_t residual = 0;         ///< id of the residual model
  std::uint32_t shared_contexts = 0;  ///< context counts of the residual model
  std::uint32_t tile_contexts = 0;
  std::uint32_t alphabet = 0;
  std::uint32_t precision = 0;        ///< bits of the frequency tables
  cache_shape shape;
  rotary rotation;                    ///< of all layers' keys
  std::vector<model_parameters> models;
  std::string note;                   ///< for the caller, e.g. how to set up the engine; at most `most_note` bytes, any content

  static constexpr std::size_t most_note = 65536;

  /// Index of the model of a predictor, or the number of models.
  [[nodiscard]] std::size_t find_model(std::uint32_t predictor) const noexcept {
    std::size_t i = 0;
    while (i < models.size() && models[i].predictor != predictor) ++i;
    return i;
  }
};

/// Number of tiles of a shape: a layer has one or two.
[[nodiscard]] inline std::size_t count_tiles(const cache_shape& shape) noexcept {
  std::size_t tiles = 0;
  for (const layer_shape& layer : shape.all()) tiles += layer.value_dim > 0 ? 2U : 1U;
  return tiles;
}

/// Errors: shape_mismatch (a layer whose keys have fewer dimensions than are rotated).
[[nodiscard]] inline result<void> expect_rotary_fits(const rotary& rotation, const cache_shape& shape) noexcept {
  for (std::uint32_t l = 0; l < shape.layers(); ++l) {
    if (shape.layer(l).key_dim < rotation.dim()) return error{error_code::shape_mismatch, "keys have fewer dimensions than are rotated", l};
  }
  return {};
}

namespace detail {

inline constexpr std::uint32_t profile_section = 16;
/// Tables of one model; bounds what a profile can make its readers allocate, some 20 KB a table.
inline constexpr std::uint32_t most_tables = most_clustered_tables;

/// Layers as runs of equal ones: u32 runs, then per run u32 count, kv heads, key dim, value dim.
inline void put_shape(byte_writer& out, const cache_shape& shape) {
  std::vector<std::pair<std::uint32_t, layer_shape>> runs;
  for (const layer_shape& layer : shape.all()) {
    if (runs.empty() || runs.back().second != layer) runs.emplace_back(0U, layer);
    ++runs.back().first;
  }
  out.put(static_cast<std::uint32_t>(runs.size()));
  for (const auto& [count, layer] : runs) {
    out.put(count);
    out.put(layer.kv_heads);
    out.put(layer.key_dim);
    out.put(layer.value_dim);
  }
}

/// What a type refuses to be made of is damage where it was read from a file.
[[nodiscard]] constexpr error as_damage(error why) noexcept {
  if (why.code != error_code::out_of_memory) why.code = error_code::corrupt;
  return why;
}

[[nodiscard]] inline result<cache_shape> get_shape(byte_reader& in) {
  const auto runs = in.get<std::uint32_t>();
  std::vector<layer_shape> layers;
  for (std::uint32_t r = 0; r < runs; ++r) {
    const auto count = in.get<std::uint32_t>();
    const layer_shape layer{in.get<std::uint32_t>(), in.get<std::uint32_t>(), in.get<std::uint32_t>()};
    if (!in.ok()) return error{error_code::truncated, "cache shape"};
    if (count == 0 || count > cache_shape::max_layers - layers.size()) return error{error_code::corrupt, "layer count in the cache shape"};
    layers.insert(layers.end(), count, layer);
  }
  if (!in.ok()) return error{error_code::truncated, "cache shape"};
  auto shape = cache_shape::make(layers);
  if (!shape) return as_damage(shape.error());
  return shape;
}

/// u32 pairing, u32 pairs, u64 frequency each.
inline void put_rotary(byte_writer& out, const rotary& rotation) {
  out.put(static_cast<std::uint32_t>(rotation.pairing()));
  out.put(static_cast<std::uint32_t>(rotation.turns().size()));
  for (const std::uint64_t turns : rotation.turns()) out.put(turns);
}

[[nodiscard]] inline result<rotary> get_rotary(byte_reader& in, const cache_shape& shape) {
  const auto pairing = in.get<std::uint32_t>();
  const auto pairs = in.get<std::uint32_t>();
  if (pairs > rotary::max_dim / 2) return error{error_code::corrupt, "number of rotary frequencies"};
  std::vector<std::uint64_t> turns(pairs);
  for (std::uint64_t& each : turns) each = in.get<std::uint64_t>();
  if (!in.ok()) return error{error_code::truncated, "rotary frequencies"};
  auto rotation = rotary::make(static_cast<rotary_pairing>(pairing), turns);
  if (!rotation) return as_damage(rotation.error());
  if (const auto fits = expect_rotary_fits(*rotation, shape); !fits) return as_damage(fits.error());
  return rotation;
}

/// Frequencies as u8 first used symbol, u8 last used symbol before the top one, u16 each in between, u16 the top symbol (the escape).
inline void put_table(byte_writer& out, const frequency_table& table) {
  const int top = table.symbol_count() - 1;
  int first = 0;
  while (first < top && table.frequency(first) == 0) ++first;
  int last = top - 1;
  while (last > first && table.frequency(last) == 0) --last;
  if (first == top) first = last = 0;  // the top symbol alone
  out.put(static_cast<std::uint8_t>(first));
  out.put(static_cast<std::uint8_t>(last));
  for (int s = first; s <= last; ++s) out.put(static_cast<std::uint16_t>(table.frequency(s) & 0xffffU));
  out.put(static_cast<std::uint16_t>(table.frequency(top) & 0xffffU));
}

[[nodiscard]] inline result<frequency_table> get_table(byte_reader& in, std::uint32_t alphabet, std::uint32_t precision) noexcept {
  std::array<std::uint32_t, frequency_table::max_symbols> frequency{};
  const std::uint32_t first = in.get<std::uint8_t>();
  const std::uint32_t last = in.get<std::uint8_t>();
  if (first > last || last + 1 >= alphabet) return error{error_code::corrupt, "symbols of a frequency table"};
  for (std::uint32_t s = first; s <= last; ++s) frequency[s] = in.get<std::uint16_t>();
  frequency[alphabet - 1] = in.get<std::uint16_t>();
  if (!in.ok()) return error{error_code::truncated, "frequency table"};
  return frequency_table::from_frequencies(std::span(frequency).first(alphabet), static_cast<int>(precision));
}

/// u32 scale of each row, then the rows of i8 weights; sizes follow from the shape.
inline void put_matrix(byte_writer& out, const quantised_matrix& matrix) {
  for (const std::uint32_t scale : matrix.scales) out.put(scale);
  for (const std::int8_t weight : matrix.weights) out.put(static_cast<std::uint8_t>(weight));
}

[[nodiscard]] inline result<quantised_matrix> get_matrix(byte_reader& in, std::size_t rows, std::size_t depth) {
  if (std::uint64_t{rows} * (depth + 4) > in.remaining()) return error{error_code::truncated, "weights of a map"};
  quantised_matrix matrix;
  matrix.rows = rows;
  matrix.depth = depth;
  matrix.scales.resize(rows);
  for (std::uint32_t& scale : matrix.scales) scale = in.get<std::uint32_t>();
  matrix.weights.resize(rows * depth);
  for (std::int8_t& weight : matrix.weights) weight = static_cast<std::int8_t>(in.get<std::uint8_t>());
  return matrix;
}

inline constexpr std::uint32_t maps_present = 1;
inline constexpr std::uint32_t maps_per_head = 2;
inline constexpr std::uint32_t maps_clamped = 4;

/// u32 flags, and with maps: u32 layers back, u32 rank, u32 block size, u32 hidden width, then each tile and each gain.
inline void put_maps(byte_writer& out, const layer_maps& maps) {
  if (maps.empty()) return out.put(std::uint32_t{0});
  out.put(maps_present | (maps.per_head ? maps_per_head : 0U) | (maps.clamped_feedback ? maps_clamped : 0U));
  out.put(maps.layers_back);
  out.put(maps.rank);
  out.put(maps.block_size);
  out.put(maps.hidden_width);
  for (const tile_map& tile : maps.tiles) {
    out.put(static_cast<std::uint32_t>(tile.unit));
    for (const std::uint32_t scale : tile.feature_scales) out.put(scale);
    for (const std::uint32_t scale : tile.missed_scales) out.put(scale);
    put_matrix(out, tile.inner);
    for (const quantised_matrix& block : tile.blocks) put_matrix(out, block);
  }
  for (const quantised_matrix& gain : maps.gains) put_matrix(out, gain);
}

[[nodiscard]] inline result<layer_maps> get_maps(byte_reader& in, const cache_shape& shape, const rotary& rotation) {
  layer_maps maps;
  const auto flags = in.get<std::uint32_t>();
  if (!in.ok()) return error{error_code::truncated, "maps"};
  if (flags == 0) return maps;
  if ((flags & maps_present) == 0 || flags > (maps_present | maps_per_head | maps_clamped)) return error{error_code::corrupt, "kind of the maps"};
  maps.per_head = (flags & maps_per_head) != 0;
  maps.clamped_feedback = (flags & maps_clamped) != 0;
  maps.layers_back = in.get<std::uint32_t>();
  maps.rank = in.get<std::uint32_t>();
  maps.block_size = in.get<std::uint32_t>();
  maps.hidden_width = in.get<std::uint32_t>();
  if (!in.ok()) return error{error_code::truncated, "maps"};
  if (maps.layers_back > layer_maps::most_layers_back || maps.rank > cache_shape::max_channels || maps.hidden_width > layer_maps::most_hidden_width)
    return error{error_code::corrupt, "kind of the maps"};
  for (std::uint32_t l = 0; l < shape.layers(); ++l) {
    for (const cache_part part : cache_parts) {
      const std::uint32_t channels = shape.layer(l).channels(part);
      if (channels == 0) continue;
      tile_map tile;
      tile.unit = static_cast<std::int32_t>(in.get<std::uint32_t>());
      if (std::uint64_t{channels} * 8 > in.remaining()) return error{error_code::truncated, "scales of a map", l};
      tile.feature_scales.resize(channels);
      tile.missed_scales.resize(channels);
      for (std::uint32_t& scale : tile.feature_scales) scale = in.get<std::uint32_t>();
      for (std::uint32_t& scale : tile.missed_scales) scale = in.get<std::uint32_t>();
      const auto blocks = blocks_of(shape, rotation, maps, l, part);
      result<void> status;
      for_each_matrix(maps, count_features(shape, maps, l, part), channels, shape.layer(l).dim(part), blocks,
                      [&](std::size_t m, std::size_t rows, std::size_t depth) {
                        auto matrix = status ? get_matrix(in, rows, depth) : result<quantised_matrix>(status.error());
                        if (!matrix) {
                          status = matrix.error().at_layer(l);
                        } else if (m == 0) {
                          tile.inner = *std::move(matrix);
                        } else {
                          tile.blocks.push_back(*std::move(matrix));
                        }
                      });
      if (!status) return status.error();
      maps.tiles.push_back(std::move(tile));
    }
  }
  for (std::uint32_t l = 0; maps.hidden_width > 0 && l < shape.layers(); ++l) {
    auto gain = get_matrix(in, maps.hidden_width, shape.layer(l).channels());
    if (!gain) return gain.error().at_layer(l);
    maps.gains.push_back(*std::move(gain));
  }
  if (const auto fits = expect_maps_fit(maps, shape, rotation); !fits) return fits.error();
  return maps;
}

inline void put_model(byte_writer& out, const model_parameters& model) {
  out.put(model.predictor);
  out.put(model.bits_per_value_q8);
  out.put(static_cast<std::uint32_t>(model.means.empty() ? 0 : 1));
  out.put(static_cast<std::uint32_t>(model.tables.size()));
  for (const std::uint32_t mean : model.means) out.put(mean);
  for (const std::int16_t sigma : model.sigmas) out.put(static_cast<std::uint16_t>(sigma));
  for (const std::uint16_t table : model.shared_tables) out.put(table);
  for (const std::uint16_t table : model.tile_tables) out.put(table);
  for (const frequency_table& table : model.tables) put_table(out, table);
  put_maps(out, model.maps);
}

[[nodiscard]] inline result<model_parameters> get_model(byte_reader& in, const profile_data& data) {
  model_parameters model;
  model.predictor = in.get<std::uint32_t>();
  model.bits_per_value_q8 = in.get<std::uint32_t>();
  const auto has_means = in.get<std::uint32_t>();
  const auto tables = in.get<std::uint32_t>();
  const std::uint64_t channels = data.shape.channels();
  const std::uint64_t tile_contexts = std::uint64_t{count_tiles(data.shape)} * data.tile_contexts;
  if (!in.ok()) return error{error_code::truncated, "model header"};
  if (has_means > 1 || tables == 0 || tables > most_tables) return error{error_code::corrupt, "model header"};
  const std::uint64_t needed = channels * (has_means ? 6U : 2U) + 2 * (data.shared_contexts + tile_contexts) + 6 * std::uint64_t{tables};
  if (needed > in.remaining()) return error{error_code::truncated, "model parameters"};
  if (has_means) {
    model.means.resize(static_cast<std::size_t>(channels));
    for (std::uint32_t& mean : model.means) mean = in.get<std::uint32_t>();
  }
  model.sigmas.resize(static_cast<std::size_t>(channels));
  for (std::int16_t& sigma : model.sigmas) sigma = static_cast<std::int16_t>(in.get<std::uint16_t>());
  model.shared_tables.resize(data.shared_contexts);
  model.tile_tables.resize(static_cast<std::size_t>(tile_contexts));
  for (std::vector<std::uint16_t>* const map : {&model.shared_tables, &model.tile_tables}) {
    for (std::uint16_t& table : *map) {
      table = in.get<std::uint16_t>();
      if (table >= tables) return error{error_code::corrupt, "a context names a table that is not there"};
    }
  }
  model.tables.reserve(tables);
  for (std::uint32_t t = 0; t < tables; ++t) {
    const auto table = get_table(in, data.alphabet, data.precision);
    if (!table) return table.error();
    model.tables.push_back(*table);
  }
  auto maps = get_maps(in, data.shape, data.rotation);
  if (!maps) return maps.error();
  model.maps = *std::move(maps);
  return model;
}

}  // namespace detail

/// Writes a profile file. Errors: invalid_argument (a note longer than `profile_data::most_note`), out_of_memory.
[[nodiscard]] inline result<std::vector<std::byte>> serialize_profile(const profile_data& data) noexcept {
  if (data.note.size() > profile_data::most_note) return error{error_code::invalid_argument, "a profile's note has at most 65536 bytes"};
  try {
    std::vector<std::byte> body;
    byte_writer out(body);
    out.put(static_cast<std::uint32_t>(data.format));
    out.put(data.residual);
    out.put(data.shared_contexts);
    out.put(data.tile_contexts);
    out.put(data.alphabet);
    out.put(data.precision);
    detail::put_shape(out, data.shape);
    detail::put_rotary(out, data.rotation);
    out.put(static_cast<std::uint32_t>(data.models.size()));
    for (const model_parameters& model : data.models) detail::put_model(out, model);
    out.put(static_cast<std::uint32_t>(data.note.size()));
    for (const char each : data.note) out.put(static_cast<std::uint8_t>(each));

    std::vector<std::byte> file;
    vector_sink sink(file);
    container_writer writer(sink, container_kind::profile);
    // All that a vector can fail for is memory.
    if (!writer.add_section(detail::profile_section, body) || !writer.finish()) return error{error_code::out_of_memory, "profile"};
    return file;
  } catch (...) {
    return error{error_code::out_of_memory, "profile"};
  }
}

/// A profile and the hash by which streams name it: the checksum of the profile's section.
struct parsed_profile {
  profile_data data;
  std::uint64_t hash = 0;
};

/// Reads a profile file; everything is validated, and memory is bounded by the size of `file`.
/// Errors: truncated, corrupt, checksum_mismatch, unsupported, out_of_memory. Whatever a file says that cannot be is `corrupt`.
[[nodiscard]] inline result<parsed_profile> parse_profile(std::span<const std::byte> file) noexcept {
  try {
    const auto container = container_reader::open(file, container_kind::profile);
    if (!container) return container.error();
    const auto body = container->section(detail::profile_section);
    if (!body) return body.error();
    byte_reader in(*body);
    const auto format = in.get<std::uint32_t>();
    const auto residual = in.get<std::uint32_t>();
    const auto shared_contexts = in.get<std::uint32_t>();
    const auto tile_contexts = in.get<std::uint32_t>();
    const auto alphabet = in.get<std::uint32_t>();
    const auto precision = in.get<std::uint32_t>();
    if (!in.ok()) return error{error_code::truncated, "profile header"};
    if (format < 1 || format > 4) return error{error_code::unsupported, "number format of the profile"};
    if (alphabet < 2 || alphabet > 256 || precision < 1 || precision > 15 || shared_contexts > 65536 || tile_contexts > 65536)
      return error{error_code::corrupt, "profile header"};
    auto shape = detail::get_shape(in);
    if (!shape) return shape.error();
    auto rotation = detail::get_rotary(in, *shape);
    if (!rotation) return rotation.error();
    parsed_profile parsed;
    parsed.hash = checksum(*body);
    parsed.data.format = static_cast<number_format>(format);
    parsed.data.residual = residual;
    parsed.data.shared_contexts = shared_contexts;
    parsed.data.tile_contexts = tile_contexts;
    parsed.data.alphabet = alphabet;
    parsed.data.precision = precision;
    parsed.data.shape = *std::move(shape);
    parsed.data.rotation = *std::move(rotation);
    const auto models = in.get<std::uint32_t>();
    if (models == 0 || models > 16) return error{error_code::corrupt, "number of models in the profile"};
    for (std::uint32_t m = 0; m < models; ++m) {
      auto model = detail::get_model(in, parsed.data);
      if (!model) return model.error();
      if (parsed.data.find_model(model->predictor) != parsed.data.models.size())
        return error{error_code::corrupt, "two models for one predictor"};
      parsed.data.models.push_back(*std::move(model));
    }
    const auto note = in.get<std::uint32_t>();
    if (!in.ok() || note > profile_data::most_note || note != in.remaining()) return error{error_code::corrupt, "size of the profile's note"};
    for (std::uint32_t i = 0; i < note; ++i) parsed.data.note.push_back(static_cast<char>(in.get<std::uint8_t>()));
    return parsed;
  } catch (...) {
    return error{error_code::out_of_memory, "profile"};
  }
}

}  // namespace kvexact
