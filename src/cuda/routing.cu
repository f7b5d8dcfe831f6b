#include "cuda/routing.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/items.cuh"
#include "cuda/launch.h"
#include "cuda/ptx.cuh"
#include "cuda/topk.cuh"

namespace gatefold::cuda {
namespace {

/// Experts are chosen by a launch of its own, unless ids are given. A cluster of blocks sorts up to
/// kClusterSlots slots; of more, blocks count those of kBlockTokens, a second launch adds up the counts, and
/// a third one gives the slots their positions.
///
/// Loops are not unrolled: in a layer, these kernels' code is read from memory, and that takes longer than it
/// runs.
constexpr int kClusterSlots = 32768;
constexpr int kClusterBlocks = 8;
constexpr int kBlockTokens = 64;
constexpr int kThreads = 512;

/// Of the counts of two warps: lanes that read one expert's of all warps find them in different banks.
__host__ __device__ constexpr int count_stride(int experts) {
  return experts | 1;
}

/// What sorting takes of shared memory; ranks of slots come behind it.
__host__ __device__ constexpr int sort_words(int warps, int experts) {
  return 3 * experts + warps * count_stride(experts);
}

__device__ __forceinline__ int tokens_of(const RouteArgs& args) {
  return args.token_count != nullptr ? min(*args.token_count, args.tokens) : args.tokens;
}

/// [warps, route_warp_words(E)]; or of each expert the first position, this block's slots and those of blocks
/// before it, and [warps, count_stride(E)] counts.
extern __shared__ __align__(16) std::int32_t shared_words[];

/// Of all slots.
__device__ __forceinline__ const std::int32_t* ids_of(const RouteArgs& args) {
  return args.given_ids != nullptr ? args.given_ids : args.out.topk_ids;
}

/// The lanes of `among`, this one's too, that have the same number of at most so many bits. (Votes:
/// `match.any` takes hundreds of clocks of the whole multiprocessor.)
__device__ __forceinline__ unsigned lanes_alike(int number, int bits, unsigned among) {
  constexpr int at_once = 4;
#pragma unroll 1
  for (int first = 0; first < bits; first += at_once, number >>= at_once)
#pragma unroll
    for (int bit = 0; bit < at_once; ++bit) {
      const bool own = (number >> bit & 1) != 0;
      const unsigned set = __ballot_sync(kAllLanes, own);
      among &= own ? set : ~set;
    }
  return among;
}

/// Part of a stable counting sort of slots by expert, by one block: slots [begin, end). Each warp has a run
/// of them; within 32 slots, lanes of one expert find each other by votes.
class SlotSort {
 public:
  /// `ranks` [end - begin], shared memory.
  __device__ SlotSort(const RouteArgs& args, int begin, int end, std::int32_t* ranks)
      : args_(args), ids_(ids_of(args)), ranks_(ranks - begin) {
    const int groups = (end - begin + 31) / 32;  // of 32 slots
    const int each = groups <= warps() ? 1 : (groups + warps() - 1) / warps();
    used_ = each == 1 ? groups : (groups + each - 1) / each;
    begin_ = begin + warp() * 32 * each;
    end_ = min(end, begin_ + 32 * each);
  }

  /// Counts become the number of slots by warp and expert, and each slot learns how many of its expert come
  /// before it in its warp. Ends with a barrier.
  __device__ void count() {
    const auto load = [&](int slot) { return slot < end_ ? ids_[slot] : -1; };
    int id = load(begin_ + lane());
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < used_ * count_stride(args_.experts);
         i += static_cast<int>(blockDim.x))
      counts()[i] = 0;
    __syncthreads();
    const int bits = 32 - __clz(args_.experts - 1);
    std::int32_t* const mine = counts() + warp() * count_stride(args_.experts);
#pragma unroll 1
    for (int slot = begin_ + lane(); slot - lane() < end_; slot += 32) {
      const int next = load(slot + 32);
      const bool there = id >= args_.first_expert && id < args_.end_expert;
      const unsigned alike = lanes_alike(id, bits, __ballot_sync(kAllLanes, there));
      const int before = __popc(alike & ((1u << lane()) - 1)), rank = there ? mine[id] + before : 0;
      __syncwarp();
      if (there && before == 0) mine[id] += __popc(alike);
      if (slot < end_) ranks_[slot] = there ? rank * kMostExperts + id : -1;
      __syncwarp();
      id = next;
    }
    __syncthreads();
  }

  /// Counts become the slots in earlier warps. Ends with a barrier.
  __device__ void add_up() {
    constexpr int lanes = 4, each = kThreads / 32 / lanes;  // an expert's, and warps of each
    const int stride = count_stride(args_.experts);
#pragma unroll 1
    for (int first = warp() * 32; first < lanes * args_.experts; first += static_cast<int>(blockDim.x)) {
      const int e = (first + lane()) / lanes, before_mine = lane() % lanes * each;
      std::int32_t* const own = counts() + before_mine * stride + e;
      const auto there = [&](int w) { return e < args_.experts && before_mine + w < used_; };
      int count[each], sum = 0;
#pragma unroll
      for (int w = 0; w < each; ++w) count[w] = there(w) ? own[w * stride] : 0;
#pragma unroll
      for (int w = 0; w < each; ++w) sum += count[w];
      int before = sum_of_lanes_to(sum, lanes) - sum;
#pragma unroll
      for (int w = 0; w < each; ++w) {
        if (there(w)) own[w * stride] = before;
        before += count[w];
      }
      if (e < args_.experts && lane() % lanes == lanes - 1) totals()[e] = before;
    }
    __syncthreads();
  }

  /// Of each expert, slots of this block.
  __device__ std::int32_t* totals() const {
    return shared_words + args_.experts;
  }
  /// And of those before it: for place().
  __device__ std::int32_t* before() const {
    return totals() + args_.experts;
  }

  /// The positions of all slots; after a barrier, with offsets [E] as offset_experts leaves them.
  __device__ void place() {
    const std::int32_t* const offsets = shared_words;
    const std::int32_t* const before_warp = counts() + warp() * count_stride(args_.experts);
#pragma unroll 1
    for (int slot = begin_ + lane(); slot < end_; slot += 32) {
      const int rank = ranks_[slot], e = rank % kMostExperts;
      const int position = rank >= 0 ? offsets[e] + before()[e] + before_warp[e] + rank / kMostExperts : -1;
      args_.out.slot_position[slot] = position;
      if (position >= 0) args_.out.sorted_slots[position] = slot;
    }
  }

 private:
  __device__ std::int32_t* counts() const {
    return before() + args_.experts;
  }

  const RouteArgs& args_;
  const std::int32_t* ids_;
  std::int32_t*
      ranks_;  // of slot 0: a slot's place in its warp's run times kMostExperts, and its expert; or -1
  int begin_, end_, used_;  // of this warp's run; warps that have one
};

/// Where each expert begins, in shared memory and, by the first block, in memory: from slots_of(e). Returns
/// the end of all. Ends with a barrier. Warps take chunks of 32 experts; a chunk begins after the sum of
/// those before it.
template <class SlotsOf>
__device__ int offset_experts(const RouteArgs& args, SlotsOf&& slots_of) {
  __shared__ int chunk_slots[kMostExperts / 32];
  std::int32_t* offsets = shared_words;
  const int experts = args.experts, chunks = (experts + 31) / 32;
#pragma unroll 1
  for (int chunk = warp(); chunk < chunks; chunk += warps()) {
    const int e = chunk * 32 + lane();
    const int count = e < experts ? slots_of(e) : 0;
    if (e < experts) offsets[e] = count;
    const int sum = __reduce_add_sync(kAllLanes, count);
    if (lane() == 0) chunk_slots[chunk] = sum;
  }
  __syncthreads();
  const auto sum_chunks = [&](int end) {
    return __reduce_add_sync(kAllLanes, lane() < end ? chunk_slots[lane()] : 0);
  };
#pragma unroll 1
  for (int chunk = warp(); chunk < chunks; chunk += warps()) {
    const int e = chunk * 32 + lane();
    const int count = e < experts ? offsets[e] : 0;
    const int offset = sum_chunks(chunk) + sum_of_lanes_to(count) - count;
    if (e < experts) offsets[e] = offset;
    if (e < experts && blockIdx.x == 0) args.out.expert_offsets[e] = offset;
  }
  const int end = sum_chunks(chunks);
  if (threadIdx.x == 0 && blockIdx.x == 0) args.out.expert_offsets[experts] = end;
  __syncthreads();
  return end;
}

/// After that.
__device__ void cut_items_at(const ItemArgs& items, int experts, int end) {
  if (items.items == nullptr) return;
  const auto offset = [&](int e) { return e < experts ? shared_words[e] : end; };
  cut_items(items, offset, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
}

/// A warp for each token. (In a loop over tokens the compiler would have its code twice.)
constexpr int kChooseThreads = 64;

__global__ void __launch_bounds__(kChooseThreads, 1) choose_experts(const RouteArgs args) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int token = static_cast<int>(blockIdx.x) * warps() + warp();
  if (token >= tokens_of(args)) return;
  TokenExperts<1> experts(args.routing, args.experts,
                          args.logits + static_cast<std::int64_t>(token) * args.experts, args.correction_bias,
                          shared_words + warp() * route_warp_words(args.experts));
  const int id = experts.choose(args.top_k);
  const float weight = experts.weight(args.top_k, id);
  if (lane() >= args.top_k) return;
  args.out.topk_ids[token * args.top_k + lane()] = id;
  args.out.topk_weights[token * args.top_k + lane()] = weight;
}

/// One cluster. Each block has a run of tokens, and reads of the others how many slots an expert has there.
__global__ void __launch_bounds__(kThreads) sort_slots(const RouteArgs args, const ItemArgs items) {
  wait_for_previous_kernel();
  let_next_kernel_start();  // which may read what was there before this kernel (InputArgs::x_is_old)
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int tokens = tokens_of(args), each = (tokens + blocks - 1) / blocks;
  const int first = min(tokens, block * each), last = min(tokens, first + each);
  const int begin = first * args.top_k, end = last * args.top_k;
  SlotSort sort(args, begin, end, shared_words + sort_words(warps(), args.experts));
  sort.count();
  sort.add_up();
  sync_cluster();
  const int positions = offset_experts(args, [&](int e) {
    int sum = 0, before = 0;
#pragma unroll
    for (int other = 0; other < kClusterBlocks; ++other) {
      const int count = other < blocks ? *in_block_of_cluster(sort.totals() + e, other) : 0;
      sum += count;
      if (other < block) before += count;
    }
    sort.before()[e] = before;
    return sum;
  });
  arrive_after_reads_in_cluster();
  sort.place();
  cut_items_at(items, args.experts, positions);
  wait_for_reads_in_cluster();
}

/// Slots of block b: those of its tokens.
__device__ __forceinline__ SlotSort sort_of_block(const RouteArgs& args, int block) {
  const int tokens = tokens_of(args);
  return {args, min(tokens, block * kBlockTokens) * args.top_k,
          min(tokens, (block + 1) * kBlockTokens) * args.top_k,
          shared_words + sort_words(warps(), args.experts)};
}

/// The next kernel of these three does not start early: its blocks would take room from others.
__global__ void __launch_bounds__(kThreads) count_slots(const RouteArgs args) {
  wait_for_previous_kernel();
  const int block = static_cast<int>(blockIdx.x);
  SlotSort sort = sort_of_block(args, block);
  sort.count();
  sort.add_up();
  for (int e = static_cast<int>(threadIdx.x); e < args.experts; e += static_cast<int>(blockDim.x))
    args.block_counts[block * args.experts + e] = sort.totals()[e];
}

/// block_counts [blocks, E] become the position of the first slot of a block and expert, less the expert's
/// own.
__global__ void __launch_bounds__(kThreads)
    add_up_blocks(const RouteArgs args, const ItemArgs items, int blocks) {
  wait_for_previous_kernel();
  const int positions = offset_experts(args, [&](int e) {
    int sum = 0;
#pragma unroll 8
    for (int block = 0; block < blocks; ++block) {
      const int count = args.block_counts[block * args.experts + e];
      args.block_counts[block * args.experts + e] = sum;
      sum += count;
    }
    return sum;
  });
  cut_items_at(items, args.experts, positions);
}

__global__ void __launch_bounds__(kThreads) place_slots(const RouteArgs args) {
  wait_for_previous_kernel();
  const int block = static_cast<int>(blockIdx.x);
  SlotSort sort = sort_of_block(args, block);
  sort.count();
  sort.add_up();
  for (int e = static_cast<int>(threadIdx.x); e < args.experts; e += static_cast<int>(blockDim.x)) {
    shared_words[e] = args.out.expert_offsets[e];
    sort.before()[e] = args.block_counts[block * args.experts + e];
  }
  __syncthreads();
  sort.place();
}

struct Grid {
  int blocks, threads, cluster = 1;
};

/// What any of the kernels takes of shared memory at most. All calls allow a kernel as much: what one of them
/// allows, another thread may be about to use.
constexpr int kMostWords = sort_words(kThreads / 32, kMostExperts) +
                           std::max(kClusterSlots / kClusterBlocks + kMostTopK, kMostTopK* kBlockTokens);

/// A kernel with so many words of shared memory.
template <class... Params>
cudaError_t launch(void (*kernel)(Params...), Grid grid, int words, cudaStream_t stream,
                   std::type_identity_t<Params>... params) {
  const std::size_t bytes = static_cast<std::size_t>(words) * sizeof(std::int32_t);
  if (bytes > (48 - 16) * 1024) {  // with what kernels have of their own
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 4 * kMostWords);
    if (error != cudaSuccess) return error;
  }
  return launch_dependent(kernel,
                          {.blocks = static_cast<unsigned>(grid.blocks),
                           .threads = static_cast<unsigned>(grid.threads),
                           .stream = stream,
                           .shared_bytes = bytes,
                           .cluster = static_cast<unsigned>(grid.cluster)},
                          params...);
}

}  // namespace

std::size_t route_scratch_words(int tokens, int experts) {
  return tokens <= kClusterSlots / kMostTopK
             ? 0
             : static_cast<std::size_t>((tokens + kBlockTokens - 1) / kBlockTokens) * experts;
}

cudaError_t launch_route(const RouteArgs& args, const ItemArgs& items, cudaStream_t stream) {
  const int slots = args.tokens * args.top_k;
  if (args.logits != nullptr)
    if (const cudaError_t error = launch_choose(args, stream); error != cudaSuccess) return error;
  if (slots <= kClusterSlots) {
    const int blocks = args.tokens > 8 ? kClusterBlocks : 1;
    const int each = (args.tokens + blocks - 1) / blocks;
    const int warps = std::clamp((each * args.top_k + 31) / 32, 8, kThreads / 32);
    const int words = sort_words(warps, args.experts) + each * args.top_k;
    return launch(sort_slots, {blocks, 32 * warps, blocks}, words, stream, args, items);
  }
  const int blocks = (args.tokens + kBlockTokens - 1) / kBlockTokens;
  const int words = sort_words(kThreads / 32, args.experts) + kBlockTokens * args.top_k;
  cudaError_t error = launch(count_slots, {blocks, kThreads}, words, stream, args);
  if (error == cudaSuccess)
    error = launch(add_up_blocks, {1, kThreads}, args.experts, stream, args, items, blocks);
  if (error == cudaSuccess) error = launch(place_slots, {blocks, kThreads}, words, stream, args);
  return error;
}

cudaError_t launch_choose(const RouteArgs& args, cudaStream_t stream) {
  constexpr int warps = kChooseThreads / 32;
  const auto words = static_cast<std::size_t>(warps) * route_warp_words(args.experts);
  return launch_dependent(choose_experts,
                          {.blocks = static_cast<unsigned>((args.tokens + warps - 1) / warps),
                           .threads = kChooseThreads,
                           .stream = stream,
                           .shared_bytes = words * sizeof(std::int32_t)},
                          args);
}

}  // namespace gatefold::cuda
