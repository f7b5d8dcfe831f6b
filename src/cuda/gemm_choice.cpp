#include "cuda/gemm_choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "cuda/device.h"

namespace gatefold::cuda {
namespace {

constexpr double kStart = 29000;     ///< clocks of a multiply
constexpr double kRounding = 12500;  ///< of a kernel that rounds rows between two multiplies

/// Clocks of a multiprocessor for 128 columns, fitted to measurements (docs/ladder.md): of a group of
/// units in one item, or of a tile of groups; for each token that is multiplied; and for each at its end.
/// `several`: times that where an expert has several items, whose multiplies are the limit, not reading: two
/// warpgroups hide less than three. `second_start`: of a second multiply, which may be in the same launch.
struct Costs {
  double decode, token, end, several = 1, second_start = kStart;
};
Costs costs_of(const GemmWork& work, const PackedFormat& format, const GemmChoice& choice) {
  const GemmKernel& kernel = choice.full;
  const int bits = format.value.bits;
  if (choice.tuning.body == CudaTuning::Body::warps) {
    if (format.for_bytes) return {46, 12.4, 0};
    if (bits == 4) return {26, 11.2, 0};
    if (bits == 8) return {62, 18, 0};
    if (format.value == formats::f16 && work.input == InputKind::bf16)  // as two bf16 each
      return {1250, 15, 0};
    return kernel.tokens <= kTileTokens ? Costs{157, 22.2, 0} : Costs{220, 27.5, 0};
  }
  const bool of_bytes = kernel.byte_order != 0,
             few = kernel.tokens <= (of_bytes && !format.for_bytes ? kFewTokensOfBytes : kFewTokensOfTile);
  if (of_bytes && format.for_bytes)
    return few                                 ? Costs{572, 7.8, 28, 1.15}
           : kernel.tokens < kMostTokensOfTile ? Costs{428, 10.5, 40, 1.05}
                                               : Costs{366, 4.3, 23, 1.1};
  if (of_bytes && format.banded)
    return few                        ? Costs{80, 11.7, 1, 1.9}
           : kernel.threads > 3 * 128 ? Costs{440, 5.0, 16}
                                      : Costs{723, 7.6, 45};
  if (of_bytes && bits == 8)
    return few                                  ? Costs{80, 18.7, 1}
           : kernel.threads > 3 * 128           ? Costs{242, 10.2, 18}
           : kernel.tokens == kMostTokensOfTile ? Costs{161, 6.8, 32, 1.02}
                                                : Costs{161, 6.8, 21, 1.2};
  if (of_bytes)
    return few                                  ? Costs{690, 10.3, 28}
           : kernel.tokens == kTokensOfTwoUnits ? Costs{700, 10.5, 28}
           : kernel.tokens < kMostTokensOfTile  ? Costs{400, 4.5, 21}
                                                : Costs{490, 4.0, 21};
  if (bits == 16) return few ? Costs{1383, 15.2, 110} : Costs{745, 21.7, 111};
  if (bits == 8) return few ? Costs{1100, 16.2, 34, 1, 14000} : Costs{903, 18.6, 75};
  return few ? Costs{800, 16.6, 45, 1, 11000} : Costs{800, 16.5, 57};
}
constexpr double kReadBytes = 2630;   ///< that the device reads in a clock, from memory
constexpr double kCacheBytes = 3056;  ///< and from its L2 cache
constexpr double kOverlap = 5.5;      ///< reading and multiplying overlap: a norm of this power
constexpr double kRoom = 0.0006;      ///< that much longer reading takes for each token of an item (up to
                                      ///< 64), whose columns leave less room for weights ahead
constexpr double kFewStages = 0.015;  ///< and beside two stages of activations, of more than 64 tokens;
                                      ///< three times that by more than 4 bits
constexpr double kBusyTiles = 160;    ///< fewer tiles of layers do not keep memory busy
constexpr double kItems = 17900;      ///< of sorting slots and cutting tokens into items

/// A number of tokens that an expert may have, and how many experts have it.
struct Load {
  double experts;
  int tokens;
};

/// Of so many experts that a token chooses alike: the numbers follow a binomial distribution, of which some
/// points are taken.
void add_loads(double experts, double chance, int tokens, double points, std::vector<Load>& all) {
  const double mean = tokens * chance, width = 4 * std::sqrt(mean * (1 - chance)) + 1;
  const double first = std::max(0.0, std::floor(mean - width)), last = std::min<double>(tokens, mean + width);
  const double step = std::max(1.0, std::ceil((last - first) / points));
  const std::size_t begin = all.size();
  double sum = 0;
  for (double count = first; count <= last; count += step) {
    const double likely =
        std::exp(std::lgamma(tokens + 1.0) - std::lgamma(count + 1) - std::lgamma(tokens - count + 1) +
                 count * std::log(chance) + (tokens - count) * std::log1p(-chance));
    all.push_back({likely, static_cast<int>(count)});
    sum += likely;
  }
  for (std::size_t i = begin; i < all.size(); ++i) all[i].experts *= experts / sum;
}

/// What experts have by one kind of routing, which so large a part of all calls has.
struct Loads {
  double part;
  std::vector<Load> all;
};

/// Experts are mostly equally likely. Else the one of rank r is drawn as 1 / (r + 1), as in gatefold bench
/// --routing skew.
std::vector<Loads> loads(const GemmWork& work, int tokens) {
  constexpr double skewed_part = 0.1;
  if (work.top_k >= work.experts * work.ep_size) return {{1, {{static_cast<double>(work.experts), tokens}}}};
  // Of all parts: this one has as many of each likelihood as the others.
  const double here = 1.0 / work.ep_size;
  const int experts = (work.experts - work.shared) * work.ep_size, top_k = work.top_k - work.shared;
  Loads equal{1 - skewed_part, {}}, skewed{skewed_part, {}};
  add_loads(here * experts, static_cast<double>(top_k) / experts, tokens, 48, equal.all);
  // A token draws those of clocks at rates 1 / (r + 1) that run down first: about those that have run down at
  // the time when top_k have, in the mean. A half of an octave of ranks is taken for alike.
  struct Alike {
    double experts, rate;
  };
  std::vector<Alike> ranks;
  for (double first = 1, next = 0; first <= experts; first = next) {
    next = std::min(std::max(first + 1, std::floor(first * 1.42)), experts + 1.0);
    ranks.push_back({next - first, 1 / std::sqrt(first * (next - 1))});
  }
  const auto chance = [](double rate, double time) { return -std::expm1(-rate * time); };
  const auto chosen = [&](double time) {
    double sum = 0;
    for (const Alike& some : ranks) sum += some.experts * chance(some.rate, time);
    return sum;
  };
  double low = 0, high = 1;
  while (chosen(high) < top_k) high *= 2;
  for (int i = 0; i < 30; ++i) {
    const double middle = (low + high) / 2;
    (chosen(middle) < top_k ? low : high) = middle;
  }
  for (const Alike& some : ranks)
    add_loads(here * some.experts, std::min(chance(some.rate, low), 1 - 1e-9), tokens, 12, skewed.all);
  if (work.shared > 0)
    for (Loads* loads : {&equal, &skewed}) loads->all.push_back({static_cast<double>(work.shared), tokens});
  return {equal, skewed};
}

/// By how many tokens those of an expert are multiplied, in so many items: kernels have a faster way for
/// fewer.
double multiplied_tokens(const CudaTuning& tuning, const GemmKernel& kernel, int tokens, int items) {
  if (tuning.body == CudaTuning::Body::warps)
    return items *
           (tokens <= items * kernel.tokens / 2 ? std::max(kTileTokens, kernel.tokens / 2) : kernel.tokens);
  // As items are cut (items.cuh): of the larger ones, and of the last one.
  const int steps = (tokens + kernel.token_step - 1) / kernel.token_step;
  const int large = (steps + items - 1) / items, small = steps / items, larger = steps - items * small;
  const int last = tokens - (steps - small) * kernel.token_step;
  return items == 1
             ? kernel.loops.of(tokens)
             : larger * kernel.loops.of(large * kernel.token_step) +
                   (items - larger - 1) * kernel.loops.of(small * kernel.token_step) + kernel.loops.of(last);
}

/// Of an item.
int tiles_of(const PackedShape& shape, const GemmKernel& kernel) {
  return tiles_of_item(static_cast<int>(shape.units / kGroupUnits), kernel.tile_groups, 1);
}

/// Of one matrix, so that its groups of units, by so many rows, are work for the whole device. All warps can
/// share a group by fewer rows than some.
int parts_of_matrix(const PackedShape& shape, const GemmKernel& kernel, int rows, int multiprocessors) {
  constexpr int least_rows = 9, least_steps = 4;
  if (rows < least_rows || rows > kMostRowsOfParts) return 1;
  const std::int64_t items = (rows + kernel.tokens - 1) / kernel.tokens,
                     pieces = items * tiles_of(shape, kernel);
  const std::int64_t wanted = std::int64_t{multiprocessors} * kernel.teams * kernel.team_groups;
  int parts = 1;
  while (parts < kMostParts && 2 * parts * pieces <= wanted && shape.records % (2 * parts) == 0 &&
         shape.records / (2 * parts) >= least_steps)
    parts *= 2;
  return parts;
}

/// Of down, by few tokens an expert: long tiles, of which a multiprocessor has hardly more than two, in
/// halves. Else many multiprocessors wait for some that have one more, or for those that began later.
int parts_of_down(const GemmWork& work, const PackedShape& shape, const GemmKernel& kernel, int tokens,
                  int multiprocessors) {
  constexpr int least_steps = 32;
  if (!kernel.tiled || kernel.tokens > kFewTokensOfTile || shape.records % 2 != 0 ||
      shape.records / 2 < least_steps)
    return 1;
  const std::int64_t slots = (std::int64_t{tokens} * work.top_k + work.ep_size - 1) / work.ep_size,
                     experts = std::min<std::int64_t>(work.experts, slots),
                     mean = (slots + experts - 1) / experts,
                     items = (mean + kernel.tokens - 1) / kernel.tokens * experts;
  return 2 * items * tiles_of(shape, kernel) <= 5 * std::int64_t{multiprocessors} ? 2 : 1;
}

/// In how many the columns of the last matrix are best cut.
int parts_of(const GemmWork& work, const GemmChoice& choice, int tokens, int multiprocessors) {
  if (!work.in_parts) return 1;
  const GemmMatrices& m = work.multiplies.back();
  const PackedShape shape(work.format(), m.rows, m.k, m.count);
  const GemmKernel kernel = choice.kernel();
  return work.multiplies.size() == 1 ? parts_of_matrix(shape, kernel, tokens, multiprocessors)
                                     : parts_of_down(work, shape, kernel, tokens, multiprocessors);
}

/// Of a kernel that adds up parts of one matrix; and for each number of a part, which is written and read.
constexpr double kSum = 1000, kSumOfNumber = 0.0035;
constexpr double kInputs = 4000;  ///< of one that brings rows of 16 bits of one matrix into tiles

/// Clocks of multiply i.
double predict(const GemmWork& work, std::size_t i, const GemmChoice& choice, int tokens,
               const std::vector<Load>& loads, int multiprocessors) {
  const GemmMatrices& m = work.multiplies[i];
  const PackedFormat format = work.format();
  const PackedShape shape(format, m.rows, m.k, m.count);
  const Costs costs = costs_of(work, format, choice);
  const bool warps = choice.tuning.body == CudaTuning::Body::warps;
  const int tile = choice.tuning.tile_tokens;
  const double bytes = static_cast<double>(shape.bytes()), steps = static_cast<double>(shape.records),
               tiles_of_item = tiles_of(shape, choice.full);
  double read = 0, cached = 0, clocks = 0, tiles = 0;
  for (const Load& load : loads) {
    if (load.tokens == 0) continue;
    const int items = (load.tokens + tile - 1) / tile;
    const double of_items = items * load.experts * tiles_of_item;
    tiles += of_items;
    const double multiplied = multiplied_tokens(choice.tuning, choice.full, load.tokens, items);
    clocks += (items > 1 ? costs.several : 1) *
              (of_items * steps * costs.decode +
               load.experts * tiles_of_item * multiplied * (steps * costs.token + costs.end));
    cached += items * load.experts * bytes;
    read += load.experts * bytes;
  }
  const GemmKernel& kernel = choice.full;
  const bool alone = work.multiplies.size() == 1;
  const int parts = i + 1 == work.multiplies.size() ? parts_of(work, choice, tokens, multiprocessors) : 1;
  // Warps share out groups equally, unless they are in parts; tiles are whole.
  const int at_once = multiprocessors * (warps ? kernel.teams * kernel.team_groups : 1);
  const double pieces = tiles * parts, waves = pieces / at_once,
               uneven = warps && parts == 1 ? 1 : std::ceil(waves - 1e-9) / waves;
  const double busy = warps || alone ? 1 : std::min(1.0, pieces / kBusyTiles);
  // Rings of bytes do not depend on the items.
  const bool leaves_room = !warps && kernel.tokens <= kFewTokensOfTile && kernel.byte_order == 0;
  const double few_stages = tile > kFewTokensOfBytes ? kFewStages * (format.value.bits > 4 ? 3 : 1) : 0;
  const double read_bytes = kReadBytes / (leaves_room ? 1 + kRoom * std::min(tile, 64) + few_stages : 1);
  const auto term = [](double time) { return std::pow(time, kOverlap); };
  double start = i == 0 ? kStart : costs.second_start;
  if (i > 0 && work.rounds && kernel.chain == nullptr) start += kRounding;
  if (alone && kernel.tiled && !work.rounds) start += kInputs;
  if (alone && parts > 1) start += kSum + kSumOfNumber * parts * tokens * static_cast<double>(m.rows);
  return start + std::pow(term(read / (read_bytes * busy)) + term(cached / kCacheBytes) +
                              term(clocks / multiprocessors * uneven),
                          1 / kOverlap);
}

double predict(const GemmWork& work, const GemmChoice& choice, int tokens, const std::vector<Loads>& routings,
               int multiprocessors) {
  const bool few = static_cast<std::int64_t>(tokens) * work.top_k <= kFewSlots && work.experts <= kFewExperts;
  const bool finds_items = few && choice.whole && choice.tuning.body == CudaTuning::Body::warps;
  double clocks = work.experts > 1 && !finds_items ? kItems : 0;
  for (const Loads& routing : routings)
    for (std::size_t i = 0; i < work.multiplies.size(); ++i)
      clocks += routing.part * predict(work, i, choice, tokens, routing.all, multiprocessors);
  return clocks;
}

/// Kernels with items of at most so many tokens each, without those that there are not.
std::vector<GemmChoice> find_choices(const GemmWork& work) {
  using Body = CudaTuning::Body;
  std::vector<GemmChoice> choices;
  const bool overflows =
      work.bytes == InputKind::int8 &&
      std::ranges::any_of(work.multiplies, [](const GemmMatrices& m) { return m.k > kMostInt8Columns; });
  const InputKind bytes = overflows ? work.input : work.bytes;
  const auto add = [&](Body body, int tokens) {
    GemmKernel kernel;
    if (body == Body::warps) {
      kernel = find_gemm(work.scheme, work.input, tokens);
    } else {
      if (work.fast_accumulation && bytes == InputKind::e4m3)
        kernel = find_warpgroup_gemm(work.scheme, InputKind::e4m3_fast, tokens);
      for (const InputKind kind : {bytes, work.input})
        if (kernel.function == nullptr) kernel = find_warpgroup_gemm(work.scheme, kind, tokens);
    }
    if (kernel.function == nullptr) return;
    if ((tokens == kFewTokensWithParts || tokens == kFewTokensOfTile) && kernel.tokens != tokens)
      return;  // a larger one, for less
    if (body == Body::warpgroups && tokens % kernel.token_step != 0) return;
    const int most = std::min(tokens, kernel.tokens);
    const GemmChoice choice{.tuning = {body, most}, .full = kernel, .whole = most == kernel.tokens};
    if (choices.empty() || !(choices.back().tuning == choice.tuning)) choices.push_back(choice);
  };
  for (const int tokens : {kTileTokens, 4 * kTileTokens}) add(Body::warps, tokens);
  static_assert(kTokensOfTwoUnits == kFewTokensOfTile);
  for (const int tokens : {32, kFewTokensWithParts, kFewTokensOfBytes, kFewTokensOfTile, 128,
                           kManyTokensOfTile, 192, kMostTokensOfTile})
    add(Body::warpgroups, tokens);
  return choices;
}

std::string names(const std::vector<GemmChoice>& choices) {
  std::string text;
  for (const GemmChoice& choice : choices) text += (text.empty() ? "" : ", ") + describe(choice.tuning);
  return text;
}

/// Numbers of tokens for which choices are made: up to each of them from the one before on. Powers of two, of
/// which calls often are, and three between two.
std::vector<int> table_tokens(int max_tokens) {
  std::vector<int> all;
  for (unsigned tokens = 1; tokens < static_cast<unsigned>(max_tokens);
       tokens += std::max(1u, std::bit_floor(tokens) / 4))
    all.push_back(static_cast<int>(tokens));
  all.push_back(max_tokens);
  return all;
}

}  // namespace

int GemmTable::parts(int tokens) const {
  return parts_of(work_, at(tokens), tokens, multiprocessors_);
}

std::vector<CudaCandidate> GemmTable::candidates(int tokens) const {
  const std::vector<Loads> routings = loads(work_, tokens);
  std::vector<CudaCandidate> all;
  for (const GemmChoice& choice : choices_)
    all.push_back({.tuning = choice.tuning,
                   .clocks = predict(work_, choice, tokens, routings, multiprocessors_),
                   .chosen = &choice == &at(tokens)});
  return all;
}

std::size_t GemmTable::choose(int tokens, const GemmTableOptions& options) const {
  const auto find = [&](const CudaTuning& tuning) {
    return static_cast<std::size_t>(
        std::find_if(choices_.begin(), choices_.end(), [&](const auto& c) { return c.tuning == tuning; }) -
        choices_.begin());
  };
  if (const auto token_class = static_cast<std::size_t>(cuda_token_class(tokens));
      token_class < options.tuned.size() && options.tuned[token_class])
    if (const std::size_t tuned = find(*options.tuned[token_class]); tuned < choices_.size()) return tuned;
  const std::vector<Loads> routings = loads(work_, tokens);
  std::vector<double> clocks;
  for (const GemmChoice& choice : choices_)
    clocks.push_back(predict(work_, choice, tokens, routings, multiprocessors_));
  return static_cast<std::size_t>(std::ranges::min_element(clocks) - clocks.begin());
}

Result<GemmTable> GemmTable::create(const GemmWork& work, const DeviceInfo& device,
                                    const GemmTableOptions& options) {
  GemmTable table;
  table.work_ = work;
  // Not where only items of many tokens can be added up so.
  if (options.batch_invariant &&
      find_warpgroup_gemm(work.scheme, InputKind::e4m3_fast, kTileTokens).function == nullptr)
    table.work_.fast_accumulation = false;
  table.multiprocessors_ = device.multiprocessors;
  const std::vector<GemmChoice> all = find_choices(table.work_);
  for (const GemmChoice& choice : all)
    if ((!options.batch_invariant || choice.tuning.body == CudaTuning::Body::warpgroups) &&
        (!options.forced || choice.tuning == *options.forced))
      table.choices_.push_back(choice);
  if (table.choices_.empty())
    return Status(
        options.forced ? Code::invalid_argument : Code::unsupported,
        fmt::format("{}{} cannot be multiplied {}: there are {}",
                    options.batch_invariant ? "independently of the batch, " : "",
                    gatefold::scheme(work.scheme).name,
                    options.forced ? "by " + describe(*options.forced) : "in one order", names(all)));
  for (const int most : table_tokens(options.max_tokens)) {
    const std::size_t choice = table.choose(most, options);
    if (!table.ranges_.empty() && table.ranges_.back().choice == choice)
      table.ranges_.back().most = most;
    else
      table.ranges_.push_back({most, choice});
  }
  for (const Range& range : table.ranges_)
    if (Status status = check(prepare_gemm(table.choices_[range.choice].full), "prepare a multiply");
        !status.ok())
      return status;
  return table;
}

}  // namespace gatefold::cuda
