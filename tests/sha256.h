#pragma once
/// \file
/// SHA-256 (FIPS 180-4), to compare with hashes that other software made.

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace gatefold {

/// Lower-case hexadecimal.
inline std::string sha256(std::span<const std::byte> data) {
  // The first 32 bits of the fractions of the roots of the first primes: cube roots for the rounds, square
  // roots for the start.
  std::array<std::uint32_t, 64> constants{};
  std::array<std::uint32_t, 8> state{};
  const auto fraction = [](long double x) {
    return static_cast<std::uint32_t>((x - std::floor(x)) * 4294967296.0L);
  };
  std::size_t found = 0;
  for (int n = 2; found < 64; ++n) {
    bool prime = true;
    for (int d = 2; d * d <= n; ++d) prime = prime && n % d != 0;
    if (!prime) continue;
    if (found < 8) state[found] = fraction(std::sqrt(static_cast<long double>(n)));
    constants[found++] = fraction(std::cbrt(static_cast<long double>(n)));
  }

  std::vector<std::byte> message(data.begin(), data.end());
  message.push_back(std::byte{0x80});
  while (message.size() % 64 != 56) message.push_back({});
  for (int shift = 56; shift >= 0; shift -= 8)
    message.push_back(static_cast<std::byte>(static_cast<std::uint64_t>(data.size()) * 8 >> shift));

  for (std::size_t block = 0; block < message.size(); block += 64) {
    std::array<std::uint32_t, 64> w{};
    for (std::size_t i = 0; i < 64; ++i)
      w[i / 4] |= std::to_integer<std::uint32_t>(message[block + i]) << (24 - i % 4 * 8);
    for (std::size_t i = 16; i < 64; ++i) {
      const std::uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + w[i - 7] +
             (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (std::size_t i = 0; i < 64; ++i) {
      const std::uint32_t t1 = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                               ((e & f) ^ (~e & g)) + constants[i] + w[i];
      const std::uint32_t t2 =
          (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const std::uint32_t add[] = {a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < 8; ++i) state[i] += add[i];
  }

  std::string hex;
  for (const std::uint32_t word : state)
    for (int shift = 28; shift >= 0; shift -= 4) hex += "0123456789abcdef"[word >> shift & 15];
  return hex;
}

}  // namespace gatefold
