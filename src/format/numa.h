#pragma once
/// \file
/// Memory nodes of the machine: which ones have CPUs, where a thread runs, where memory is to lie.

#include <cstddef>

namespace gatefold {

inline constexpr int kMostNodes = 16;  ///< more count as fewer

/// How many nodes have CPUs; 1 if the system does not say.
int numa_nodes();

/// The node that the calling thread runs on, counted from 0 among those with CPUs.
int current_node();

/// Wishes that pages of [data, data + bytes) that nobody has touched yet will lie on a node.
void prefer_node(void* data, std::size_t bytes, int node);

}  // namespace gatefold
