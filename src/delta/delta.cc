#include "gradwire/delta.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "base/checksum.h"
#include "base/endian.h"
#include "base/return_if_error.h"
#include "base/varint.h"
#include "delta/chunk_codec.h"
#include "gradwire/codec.h"

namespace gradwire {

// By chunk; empty for those that are not sparse.
struct DecodedChunks {
  explicit DecodedChunks(uint64_t chunks) : sparse(chunks) {}

  std::vector<SparseSteps> sparse;
};

namespace {

constexpr std::byte kMagic[2] = {std::byte{'G'}, std::byte{'D'}};
constexpr uint8_t kVersion = 1;
constexpr size_t kVersionAt = 2;
constexpr size_t kElementAt = 3;
constexpr size_t kChecksumAt = 4;
constexpr size_t kBodyAt = 8;
constexpr size_t kCountAt = 8;
constexpr size_t kChangedAt = 16;
constexpr size_t kBaseAt = 24;
constexpr size_t kResultAt = 32;
constexpr size_t kPayloadSizeAt = 40;

constexpr uint64_t kDigestBlock = 65536;
constexpr uint64_t kModesPerByte = 4;

constexpr uint64_t divide_up(uint64_t n, uint64_t by) { return n / by + (n % by != 0 ? 1 : 0); }

ElementOrder order_of(DeltaElement element) {
  return static_cast<uint8_t>(element) < 16 ? ElementOrder::kInteger : ElementOrder::kFloat;
}

uint64_t chunks_of(uint64_t n) { return divide_up(n, kDeltaChunk); }
uint64_t chunk_values(uint64_t n, uint64_t chunk) {
  return std::min(kDeltaChunk, n - chunk * kDeltaChunk);
}
uint64_t modes_size(uint64_t n) { return divide_up(chunks_of(n), kModesPerByte); }

uint32_t checksum_of(std::span<const std::byte> bytes) {
  return checksum32(bytes.first(kChecksumAt), bytes.subspan(kBodyAt));
}

// Digests of the blocks of an array, which become its digest. Chunks fill them in any order.
class Digests {
 public:
  explicit Digests(uint64_t bytes) : blocks_(divide_up(bytes, kDigestBlock) * sizeof(uint64_t)) {}

  // `part` begins `at` bytes after the array's beginning, at a block.
  void add(uint64_t at, std::span<const std::byte> part) {
    for (uint64_t done = 0; done < part.size(); done += kDigestBlock) {
      const auto block = part.subspan(done, std::min(kDigestBlock, part.size() - done));
      store_le(blocks_.data() + (at + done) / kDigestBlock * sizeof(uint64_t), digest64(block, {}));
    }
  }
  [[nodiscard]] uint64_t total() const { return digest64(blocks_, {}); }

 private:
  std::vector<std::byte> blocks_;
};

// Calls with(Bits{}) for the unsigned integer of the element's width.
template <typename With>
auto with_bits(DeltaElement element, const With& with) {
  switch (width_of(element)) {
    case 1:
      return with(uint8_t{});
    case 2:
      return with(uint16_t{});
    default:
      return with(uint32_t{});
  }
}

// A chunk's elements, which may lie at any address, as the compiler needs them. Values: unsigned
// integers of their width, const or not.
template <typename Values>
class Aligned {
 public:
  using Byte = std::conditional_t<std::is_const_v<Values>, const std::byte, std::byte>;

  Aligned(Byte* at, uint64_t n) : at_(at) {
    if (reinterpret_cast<uintptr_t>(at) % alignof(Values) == 0) {
      values_ = reinterpret_cast<Values*>(at);
      return;
    }
    copy_.resize(n);
    std::memcpy(copy_.data(), at, n * sizeof(Values));
    values_ = copy_.data();
  }
  [[nodiscard]] Values* values() const { return values_; }
  // Takes what was written to values() to where the elements lie.
  void write_back() const {
    if (!copy_.empty()) std::memcpy(at_, copy_.data(), copy_.size() * sizeof(Values));
  }

 private:
  Byte* at_;
  Values* values_;
  std::vector<std::remove_const_t<Values>> copy_;
};

// Memory of this thread for the elements of a chunk, which stays in its cache.
template <typename Bits>
Bits* chunk_of_thread() {
  thread_local const auto kChunk = std::make_unique_for_overwrite<Bits[]>(kDeltaChunk);
  return kChunk.get();
}

// Places and modes of the chunks of a payload.
struct ChunkIndex {
  std::vector<ChunkMode> modes;
  std::vector<uint64_t> begins;  // in the payload, and its end
};

Status corrupt(const std::string& what) {
  return {StatusCode::kCorruptPayload, "the delta is corrupt: " + what};
}

Status corrupt_chunk(uint64_t chunk) {
  return corrupt("chunk " + std::to_string(chunk) +
                 " holds bytes that stand for no steps of its elements");
}

Result<ChunkIndex> find_chunks(const Delta& delta) {
  const uint64_t chunks = chunks_of(delta.n);
  const uint64_t modes = modes_size(delta.n);
  if (delta.payload.size() < modes) return corrupt("its modes are cut off");
  const auto* at = reinterpret_cast<const uint8_t*>(delta.payload.data());
  const uint8_t* end = at + delta.payload.size();
  ChunkIndex index;
  index.modes.reserve(chunks);
  for (uint64_t chunk = 0; chunk < modes * kModesPerByte; ++chunk) {
    const int mode = at[chunk / kModesPerByte] >> chunk % kModesPerByte * 2 & 3;
    if (chunk < chunks) {
      index.modes.push_back(static_cast<ChunkMode>(mode));
    } else if (mode != 0) {
      return corrupt("the padding of its modes is not 0");
    }
  }
  at += modes;
  index.begins.reserve(chunks + 1);
  uint64_t size = 0;
  for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
    index.begins.push_back(size);
    const uint64_t whole = chunk_values(delta.n, chunk) * width_of(delta.element);
    const ChunkMode mode = index.modes[chunk];
    if (mode == ChunkMode::kUnchanged) continue;
    if (mode == ChunkMode::kVerbatim) {
      size += whole;
      continue;
    }
    const auto coded = read_varint(at, end);
    if (!coded || *coded > chunk_room(chunk_values(delta.n, chunk), width_of(delta.element))) {
      return corrupt("the size of chunk " + std::to_string(chunk) + " is not valid");
    }
    size += *coded;
  }
  index.begins.push_back(size);
  if (size != static_cast<uint64_t>(end - at)) {
    return corrupt("its chunks' sizes add up to " + std::to_string(size) + " bytes, there are " +
                   std::to_string(end - at));
  }
  const auto head = static_cast<uint64_t>(delta.payload.size() - size);
  for (uint64_t& begin : index.begins) begin += head;
  return index;
}

std::span<const uint8_t> bytes_of(const Delta& delta, const ChunkIndex& index, uint64_t chunk) {
  const auto* payload = reinterpret_cast<const uint8_t*>(delta.payload.data());
  return {payload + index.begins[chunk], index.begins[chunk + 1] - index.begins[chunk]};
}

// Writes the chunks that one(chunk, out) codes, and the header. One thread writes each chunk
// directly after the one before; several write them apart and move them later.
template <typename One>
EncodedDelta write_delta(DeltaElement element, uint64_t n, std::span<std::byte> delta,
                         Execution& execution, const One& one) {
  const uint64_t chunks = chunks_of(n);
  const uint64_t stride = chunk_room(kDeltaChunk, width_of(element));
  uint64_t end = kDeltaHeaderSize + modes_size(n);
  auto* out = reinterpret_cast<uint8_t*>(delta.data());
  uint8_t* slots = out + end + chunks * kLongestVarint;
  const bool in_order = execution.goes_in_order(chunks);
  std::vector<CodedChunk> coded(chunks);
  uint64_t used = 0;
  execution.for_each(chunks, [&](size_t chunk) {
    coded[chunk] = one(chunk, slots + (in_order ? used : chunk * stride));
    if (in_order) used += coded[chunk].size;
  });

  EncodedDelta written;
  std::memset(out, 0, end);
  uint8_t* at = out + end;
  for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
    const auto [mode, size, changed] = coded[chunk];
    written.changed += changed;
    uint8_t& modes = out[kDeltaHeaderSize + chunk / kModesPerByte];
    modes = static_cast<uint8_t>(modes | static_cast<int>(mode) << chunk % kModesPerByte * 2);
    if (mode == ChunkMode::kSparse || mode == ChunkMode::kDense) at = write_varint(size, at);
  }
  if (in_order) {
    std::memmove(at, slots, used);
    at += used;
  } else {
    for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
      std::memmove(at, slots + chunk * stride, coded[chunk].size);
      at += coded[chunk].size;
    }
  }
  written.size = static_cast<uint64_t>(at - out);
  return written;
}

void write_header(DeltaElement element, uint64_t n, const EncodedDelta& written,
                  std::span<std::byte> delta) {
  std::ranges::copy(kMagic, delta.begin());
  delta[kVersionAt] = std::byte{kVersion};
  delta[kElementAt] = static_cast<std::byte>(element);
  store_le(delta.data() + kCountAt, n);
  store_le(delta.data() + kChangedAt, written.changed);
  store_le(delta.data() + kBaseAt, written.base_digest);
  store_le(delta.data() + kResultAt, written.result_digest);
  store_le(delta.data() + kPayloadSizeAt, written.size - kDeltaHeaderSize);
  store_le(delta.data() + kChecksumAt, checksum_of(delta.first(written.size)));
}

Status check_room(DeltaElement element, uint64_t n, std::span<std::byte> delta) {
  const uint64_t needed = max_delta_size(element, n);
  if (delta.size() >= needed) return {};
  return {StatusCode::kBufferTooSmall, "the delta has room for " + std::to_string(delta.size()) +
                                           " bytes, " + std::to_string(n) + " elements need " +
                                           std::to_string(needed)};
}

bool is_element(uint8_t code) { return (code & ~uint8_t{16}) <= 2; }

// Marks the first chunk of which `one` returns false.
class FirstBad {
 public:
  void add(uint64_t chunk) {
    uint64_t seen = first_.load();
    while (chunk < seen && !first_.compare_exchange_weak(seen, chunk)) {
    }
  }
  [[nodiscard]] Status status() const {
    const uint64_t first = first_.load();
    return first == UINT64_MAX ? Status() : corrupt_chunk(first);
  }

 private:
  std::atomic<uint64_t> first_{UINT64_MAX};
};

}  // namespace

uint64_t width_of(DeltaElement element) noexcept {
  return uint64_t{1} << (static_cast<uint8_t>(element) & 15);
}

uint64_t digest_array(std::span<const std::byte> array, Execution& execution) {
  Digests digests(array.size());
  execution.for_each(divide_up(array.size(), kDigestBlock), [&](size_t block) {
    const uint64_t at = block * kDigestBlock;
    digests.add(at, array.subspan(at, std::min(kDigestBlock, array.size() - at)));
  });
  return digests.total();
}

uint64_t max_delta_size(DeltaElement element, uint64_t n) noexcept {
  return kDeltaHeaderSize + modes_size(n) + chunks_of(n) * (kLongestVarint + chunk_room(0, 0)) +
         chunk_room(n, width_of(element));
}

Result<EncodedDelta> encode_delta(DeltaElement element, std::span<std::byte> base,
                                  std::span<const std::byte> result, DeltaBase follow,
                                  std::span<std::byte> delta, Execution& execution,
                                  std::optional<uint64_t> base_digest) {
  const uint64_t width = width_of(element);
  if (base.size() != result.size() || base.size() % width != 0) {
    return Status(StatusCode::kLengthMismatch,
                  "the base has " + std::to_string(base.size()) + " bytes and the result " +
                      std::to_string(result.size()) + "; both must be the same multiple of " +
                      std::to_string(width));
  }
  const uint64_t n = base.size() / width;
  GW_RETURN_IF_ERROR(check_room(element, n, delta));
  Digests before(base_digest ? 0 : base.size());
  Digests after(result.size());
  EncodedDelta written = with_bits(element, [&]<typename Bits>(Bits) {
    return write_delta(element, n, delta, execution, [&](size_t chunk, uint8_t* out) {
      const uint64_t at = chunk * kDeltaChunk * sizeof(Bits);
      const uint64_t values = chunk_values(n, chunk);
      const Aligned<Bits> from(base.data() + at, values);
      const Aligned<const Bits> to(result.data() + at, values);
      const auto part = [&](const Bits* first) { return std::as_bytes(std::span(first, values)); };
      if (!base_digest) before.add(at, part(from.values()));
      // From here on `after` stands for `to`, which another thread may write to.
      const bool follows = follow == DeltaBase::kFollow;
      Bits* copy = chunk_of_thread<Bits>();
      const StepArrays<Bits> arrays{from.values(), to.values(), follows ? copy : nullptr,
                                    follows ? from.values() : copy};
      const CodedChunk coded =
          encode_chunk(execution.kernels(), arrays, values, order_of(element), out);
      after.add(at, part(arrays.after));
      if (follows) from.write_back();
      return coded;
    });
  });
  written.base_digest = base_digest ? *base_digest : before.total();
  written.result_digest = after.total();
  write_header(element, n, written, delta);
  return written;
}

Result<Delta> parse_delta(std::span<const std::byte> bytes) {
  if (bytes.size() < kDeltaHeaderSize) {
    return Status(StatusCode::kTruncated,
                  "a delta has a header of 48 bytes, there are " + std::to_string(bytes.size()));
  }
  if (!std::equal(std::begin(kMagic), std::end(kMagic), bytes.begin())) {
    return Status(StatusCode::kBadMagic, "a delta begins with 'GD'");
  }
  const auto byte_at = [&](size_t at) { return static_cast<uint8_t>(bytes[at]); };
  if (byte_at(kVersionAt) != kVersion) {
    return Status(StatusCode::kUnsupportedVersion, "the delta has version " +
                                                       std::to_string(byte_at(kVersionAt)) +
                                                       ", this library reads version 1");
  }
  if (!is_element(byte_at(kElementAt))) {
    return Status(StatusCode::kReservedBits,
                  "there is no element " + std::to_string(byte_at(kElementAt)));
  }
  const auto field = [&](size_t at) { return load_le<uint64_t>(bytes.data() + at); };
  const uint64_t size = field(kPayloadSizeAt);
  const uint64_t there = bytes.size() - kDeltaHeaderSize;
  if (size != there) {
    return Status(size > there ? StatusCode::kTruncated : StatusCode::kTrailingBytes,
                  "the delta has a payload of " + std::to_string(size) + " bytes, there are " +
                      std::to_string(there));
  }
  if (field(kCountAt) > kMaxNumel) {
    return Status(StatusCode::kLimitExceeded, "the delta has " + std::to_string(field(kCountAt)) +
                                                  " elements, at most " +
                                                  std::to_string(kMaxNumel) + " are supported");
  }
  if (load_le<uint32_t>(bytes.data() + kChecksumAt) != checksum_of(bytes)) {
    return Status(StatusCode::kChecksumMismatch,
                  "the delta's checksum is wrong: its bytes were "
                  "changed after they were written");
  }
  return Delta{static_cast<DeltaElement>(byte_at(kElementAt)),
               field(kCountAt),
               field(kChangedAt),
               field(kBaseAt),
               field(kResultAt),
               bytes.subspan(kDeltaHeaderSize),
               nullptr};
}

Status decode_delta(Delta& delta, Execution& execution) {
  GW_ASSIGN_OR_RETURN(const ChunkIndex index, find_chunks(delta));
  auto decoded = std::make_shared<DecodedChunks>(index.modes.size());
  FirstBad bad;
  with_bits(delta.element, [&]<typename Bits>(Bits) {
    execution.for_each(index.modes.size(), [&](size_t chunk) {
      if (index.modes[chunk] != ChunkMode::kSparse) return;
      auto steps = decode_sparse<Bits>(execution.kernels(), bytes_of(delta, index, chunk),
                                       chunk_values(delta.n, chunk));
      if (steps) {
        decoded->sparse[chunk] = *std::move(steps);
      } else {
        bad.add(chunk);
      }
    });
  });
  GW_RETURN_IF_ERROR(bad.status());
  delta.decoded = std::move(decoded);
  return {};
}

Status apply_delta(const Delta& delta, std::span<std::byte> values, Execution& execution) {
  const uint64_t width = width_of(delta.element);
  if (values.size() != delta.n * width) {
    return {StatusCode::kLengthMismatch, "the delta is of " + std::to_string(delta.n * width) +
                                             " bytes, the values have " +
                                             std::to_string(values.size())};
  }
  GW_ASSIGN_OR_RETURN(const ChunkIndex index, find_chunks(delta));
  Digests digests(values.size());
  FirstBad bad;
  with_bits(delta.element, [&]<typename Bits>(Bits) {
    execution.for_each(index.modes.size(), [&](size_t chunk) {
      const uint64_t at = chunk * kDeltaChunk * sizeof(Bits);
      const uint64_t n = chunk_values(delta.n, chunk);
      const auto part = values.subspan(at, n * sizeof(Bits));
      const auto apply = [&](Bits* first) {
        const Kernels& kernels = execution.kernels();
        const ElementOrder order = order_of(delta.element);
        if (delta.decoded && index.modes[chunk] == ChunkMode::kSparse) {
          apply_steps(kernels, delta.decoded->sparse[chunk], first, n, order);
          return true;
        }
        return apply_chunk(kernels, index.modes[chunk], bytes_of(delta, index, chunk), first, n,
                           order);
      };
      bool valid = true;
      if (reinterpret_cast<uintptr_t>(part.data()) % alignof(Bits) == 0) {
        valid = apply(reinterpret_cast<Bits*>(part.data()));
      } else if (index.modes[chunk] != ChunkMode::kUnchanged) {
        std::vector<Bits> copy(n);
        std::memcpy(copy.data(), part.data(), part.size());
        valid = apply(copy.data());
        std::memcpy(part.data(), copy.data(), part.size());
      }
      if (!valid) bad.add(chunk);
      digests.add(at, part);
    });
  });
  GW_RETURN_IF_ERROR(bad.status());
  if (digests.total() == delta.result_digest) return {};
  return {StatusCode::kChecksumMismatch,
          "the result is not what the delta leads to: the values were not its base"};
}

Result<EncodedDelta> fold_deltas(const Delta& first, const Delta& second,
                                 std::span<std::byte> folded, Execution& execution) {
  if (first.element != second.element || first.n != second.n ||
      first.result_digest != second.base_digest) {
    return Status(StatusCode::kInvalidArgument,
                  "the second delta does not begin where the first one ends");
  }
  const uint64_t n = first.n;
  GW_RETURN_IF_ERROR(check_room(first.element, n, folded));
  GW_ASSIGN_OR_RETURN(const ChunkIndex before, find_chunks(first));
  GW_ASSIGN_OR_RETURN(const ChunkIndex after, find_chunks(second));
  FirstBad bad;
  EncodedDelta written = with_bits(first.element, [&]<typename Bits>(Bits) {
    return write_delta(first.element, n, folded, execution, [&](size_t chunk, uint8_t* out) {
      const uint64_t values = chunk_values(n, chunk);
      const Kernels& kernels = execution.kernels();
      // Steps add up modulo 2^width, as integers do. Elements that were sent verbatim take them.
      std::vector<Bits> sum(values);
      const bool starts_anew = after.modes[chunk] == ChunkMode::kVerbatim;
      const bool absolute = starts_anew || before.modes[chunk] == ChunkMode::kVerbatim;
      const auto add = [&](const Delta& delta, const ChunkIndex& index) {
        return apply_chunk(kernels, index.modes[chunk], bytes_of(delta, index, chunk), sum.data(),
                           values, absolute ? order_of(delta.element) : ElementOrder::kInteger);
      };
      if ((!starts_anew && !add(first, before)) || !add(second, after)) bad.add(chunk);
      if (absolute) {
        const auto size = static_cast<uint32_t>(values * sizeof(Bits));
        std::memcpy(out, sum.data(), size);
        return CodedChunk{ChunkMode::kVerbatim, size, static_cast<uint32_t>(values)};
      }
      return encode_steps<Bits>(kernels, sum.data(), values, out);
    });
  });
  GW_RETURN_IF_ERROR(bad.status());
  written.base_digest = first.base_digest;
  written.result_digest = second.result_digest;
  write_header(first.element, n, written, folded);
  return written;
}

}  // namespace gradwire
