#include "codecs/chunks.h"

#include <string>

#include "codecs/checks.h"

namespace gradwire {

Result<std::vector<uint64_t>> find_chunks(const ChunkShape& shape,
                                          std::span<const std::byte> payload,
                                          std::string_view name) {
  const uint64_t coded = payload.size() - shape.chunks_offset();
  std::vector<uint64_t> starts;
  starts.reserve(shape.chunks + 1);
  starts.push_back(0);
  for (uint64_t chunk = 0; chunk < shape.chunks; ++chunk) {
    const std::byte* size = payload.data() + shape.head_size + chunk * shape.size_width;
    starts.push_back(starts.back() + (shape.size_width == 2   ? load_le<uint16_t>(size)
                                      : shape.size_width == 4 ? load_le<uint32_t>(size)
                                      : shape.varying         ? coded
                                                              : shape.room(chunk)));
  }
  if (starts.back() == coded) return starts;
  return corrupt_payload(name, "the chunks' sizes add up to " + std::to_string(starts.back()) +
                                   " bytes, there are " + std::to_string(coded));
}

Status corrupt_chunk(std::string_view name, uint64_t chunk) {
  return corrupt_payload(name, "chunk " + std::to_string(chunk) +
                                   " holds bytes that stand for no values of its length");
}

}  // namespace gradwire
