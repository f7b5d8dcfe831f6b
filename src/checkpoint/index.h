#pragma once
/// \file
/// model.safetensors.index.json: which shard holds which tensor.

#include <map>
#include <string>
#include <string_view>

#include "gatefold/status.h"

namespace gatefold {

/// Tensor name to shard: a plain file name ending in ".safetensors". Other members of the index (metadata
/// with the total size, which writers get wrong) are ignored.
using ShardIndex = std::map<std::string, std::string, std::less<>>;

/// `file` begins every message.
Result<ShardIndex> parse_index(std::string_view text, const std::string& file);

}  // namespace gatefold
