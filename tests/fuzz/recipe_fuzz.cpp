// A recipe. What is accepted must survive being written.
#include <cstdint>
#include <cstdlib>

#include "gatefold/recipe.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto recipe =
      gatefold::parse_recipe(std::string_view(reinterpret_cast<const char*>(data), size), "fuzz");
  if (!recipe) return 0;
  const std::string text = gatefold::recipe_text(*recipe);
  const auto again = gatefold::parse_recipe(text, "fuzz");
  if (!again || gatefold::recipe_text(*again) != text) std::abort();
  return 0;
}
