#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace gradwire {

// Philox4x32-10, a counter-based random number generator (Salmon, Moraes, Dror, Shaw: Parallel
// random numbers: as easy as 1, 2, 3; SC 2011). 128 bits of counter and 64 bits of key give 128
// random bits; there is no state.
struct PhiloxBlock {
  uint32_t word[4];
};

inline constexpr uint32_t kPhiloxMultiplier0 = 0xd2511f53u;
inline constexpr uint32_t kPhiloxMultiplier1 = 0xcd9e8d57u;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9e3779b9u;
inline constexpr uint32_t kPhiloxWeyl1 = 0xbb67ae85u;
inline constexpr int kPhiloxRounds = 10;

GW_HOST_DEVICE constexpr PhiloxBlock philox(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = uint64_t{kPhiloxMultiplier0} * counter.word[0];
    const uint64_t product1 = uint64_t{kPhiloxMultiplier1} * counter.word[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0,
                static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1,
                static_cast<uint32_t>(product0)}};
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return counter;
}

// A draw stream gives the random words of one tensor of one rank in a step: word(i) for element i.
struct DrawStream {
  uint32_t key0;
  uint32_t key1;
  uint64_t step;

  // The key of 64 bits is half of a Philox block, made from the seed and the draw stream's number.
  GW_HOST_DEVICE static constexpr DrawStream create(uint64_t seed, uint64_t number, uint64_t step) {
    const PhiloxBlock key =
        philox({{static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32), 0, 0}},
               static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    return {key.word[0], key.word[1], step};
  }

  // The words of elements 4 * block to 4 * block + 3.
  GW_HOST_DEVICE constexpr PhiloxBlock words(uint64_t block) const {
    return philox({{static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                    static_cast<uint32_t>(step), static_cast<uint32_t>(step >> 32)}},
                  key0, key1);
  }

  GW_HOST_DEVICE constexpr uint32_t word(uint64_t element) const {
    return words(element / 4).word[element % 4];
  }
};

}  // namespace gradwire
