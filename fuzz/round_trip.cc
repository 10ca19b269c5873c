// Encodes a tensor with every SIMD target, with one thread and two, and with each type of residual:
// all must give the same bytes and the same residual. Then decodes, and checks that decoded values
// and residual add up to the input, a residual in bf16 after its rounding.
//
// Input: 8 bytes of choices, then float32. The first half of these, repeated, gives the n values,
// the second half the residual.

#include <cmath>
#include <cstring>
#include <iterator>
#include <string>

#include "base/endian.h"
#include "fuzzing.h"
#include "gradwire/frame.h"
#include "stages/element/bfloat16.h"
#include "stages/element/float_bits.h"

namespace {

using namespace gradwire;
using namespace gradwire::fuzzing;

constexpr size_t kChoicesSize = 8;

// These are tested beside every codec with its defaults.
constexpr const char* kVariants[] = {
    "int8:bucket=7",
    "onebit:bucket=800",
    "topk:ratio=0.3",
    "topk:values=bf16",
    "topk:ratio=0.02,index=rice",
    "topk:ratio=0.9,index=rice,values=bf16",
    "inceptionn:bound=6,mode=strict",
    "inceptionn:bound=8",
    "truncate:bits=22",
    "truncate:bits=24,ef=on",
    "3lc:coder=rice",
    "3lc:s=1.9,coder=rice,bucket=35",
    "terngrad:clip=1,pack=trits5,coder=zre",
    "terngrad:pack=trits5,coder=rice,bucket=640",
    "terngrad:clip=0,bucket=320",
    "stoch3:coder=rice",
    "stoch3:coder=zre,bucket=320",
    "stc:density=0.2",
    "topk2bit:density=0.2",
    "stc:density=0.05,coder=zre",
    "qsgd:bits=2,coder=elias",
    "qsgd:bits=8",
    "qsgd:levels=1000,coder=elias-dense",
    "qsgd:levels=200,norm=l2,bucket=50000",
    "qsgd:levels=127,norm=l2,coder=elias,bucket=50000",
    "qsgd:coder=elias-dense,norm=l2,bucket=64",
};

std::string codec_text(size_t choice) {
  choice %= codecs().size() + std::size(kVariants);
  if (choice < codecs().size()) return std::string(codecs()[choice]->name);
  return kVariants[choice - codecs().size()];
}

struct Choices {
  std::string codec;
  uint64_t n;
  ResidualType residual;
};

Choices read_choices(const std::byte* bytes) {
  const auto flags = load_le<uint8_t>(bytes);
  const auto bucket = load_le<uint16_t>(bytes + 2);
  const auto sparsity = load_le<uint8_t>(bytes + 1);
  Choices choices;
  if (flags % 8 < 5) {
    choices.codec = codec_text(sparsity);
  } else {
    choices.codec = "3lc:s=" + std::to_string(1.0 + sparsity / 256.0);
    if ((flags & 8) != 0) choices.codec += ",coder=none";
    if ((flags & 16) != 0) choices.codec += ",bucket=" + std::to_string(5 * (bucket + 1));
  }
  // A quarter of the inputs are long: several chunks cost time.
  const auto n = load_le<uint32_t>(bytes + 4);
  choices.n = n % (n >> 30 == 3 ? kMaxFuzzedNumel : 4096);
  choices.residual = choices.codec == "raw" || (flags >> 5) % 4 == 0 ? ResidualType::kNone
                     : (flags >> 5) % 4 == 1                         ? ResidualType::kBfloat16
                                                                     : ResidualType::kFloat32;
  return choices;
}

std::vector<float> repeat(std::span<const std::byte> bytes, uint64_t n) {
  std::vector<float> values(n);
  const size_t period = bytes.size() / sizeof(float);
  for (uint64_t i = 0; period > 0 && i < n; ++i) {
    values[i] = load_le_f32(bytes.data() + i % period * sizeof(float));
  }
  return values;
}

struct Encoded {
  std::vector<std::byte> frame;
  bool finite = true;
  std::vector<float> residual;

  friend bool operator==(const Encoded& a, const Encoded& b) {
    return a.frame == b.frame && a.finite == b.finite && a.residual.size() == b.residual.size() &&
           (a.residual.empty() || std::memcmp(a.residual.data(), b.residual.data(),
                                              a.residual.size() * sizeof(float)) == 0);
  }
};

// If the type is bf16, the lower halves of `residual` must be 0.
Encoded encode(const Codec& codec, std::span<const float> x, std::vector<float> residual,
               ResidualType type, Execution& execution) {
  std::vector<uint16_t> halves;
  ResidualView view;
  if (type == ResidualType::kBfloat16) {
    for (float r : residual)
      halves.push_back(load_le<uint16_t>(reinterpret_cast<std::byte*>(&r) + 2));
    view = ResidualView(std::span<uint16_t>(halves));
  } else if (type == ResidualType::kFloat32) {
    view = ResidualView(std::span<float>(residual));
  }
  Encoded encoded;
  encoded.frame.resize(max_frame_size(codec, x.size()));
  const Result<EncodedFrame> result =
      encode_frame(codec, x, view, DrawContext{}, encoded.frame, execution);
  require(result.ok(), "a tensor can't be encoded");
  require(result.value().size <= encoded.frame.size(), "max_frame_size is exceeded");
  encoded.frame.resize(result.value().size);
  encoded.finite = result.value().non_finite.ok();
  for (size_t i = 0; i < halves.size(); ++i) {
    const uint32_t bits = static_cast<uint32_t>(halves[i]) << 16;
    std::memcpy(&residual[i], &bits, sizeof bits);
  }
  if (type != ResidualType::kNone) encoded.residual = std::move(residual);
  return encoded;
}

float as_kept(float residual, ResidualType type) {
  return type == ResidualType::kBfloat16 ? widen_bf16(narrow_bf16_finite(residual)) : residual;
}

// The new residual must be x + r where nothing was sent, else the difference to the sent value; as
// bf16, if that is the type, rounded to the nearest finite one.
void check_residual(std::span<const float> x, std::span<const float> before,
                    std::span<const float> sent, std::span<const float> after, ResidualType type) {
  for (size_t i = 0; i < x.size(); ++i) {
    const float both = x[i] + before[i];
    const float kept = as_kept(sent[i] == 0.0f ? both : both - sent[i], type);
    require(std::isfinite(after[i]), "a residual is not finite");
    require(kept == after[i], "the residual differs from the part that was not sent");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < kChoicesSize) return 0;
  const std::vector<std::byte> bytes = exact_copy({data, size});
  const Choices choices = read_choices(bytes.data());
  const std::span<const std::byte> rest = std::span(bytes).subspan(kChoicesSize);
  const size_t half = rest.size() / 2 / sizeof(float) * sizeof(float);
  const std::vector<float> x = repeat(rest.first(half), choices.n);
  std::vector<float> residual = repeat(rest.subspan(half), choices.n);
  if (choices.residual == ResidualType::kBfloat16) {
    for (float& r : residual) std::memset(&r, 0, sizeof(uint16_t));
  }
  const Result<std::shared_ptr<const Codec>> codec = Codec::parse(choices.codec);
  require(codec.ok(), "a valid codec string is refused");

  const Encoded scalar = encode(*codec.value(), x, residual, choices.residual, executions().back());
  for (Execution& execution : executions()) {
    require(encode(*codec.value(), x, residual, choices.residual, execution) == scalar,
            "two targets encode to other bytes or residuals");
  }

  const Result<Frame> frame = parse_frame(scalar.frame);
  require(frame.ok() && frame.value().n == choices.n, "a frame that was just made is refused");
  require((frame.value().content == FrameContent::kNonFinite) == !scalar.finite,
          "the marker and the encoder's status differ");
  if (!scalar.finite) return 0;
  check_decoders(*frame.value().codec, frame.value().payload, choices.n);
  std::vector<float> sent(choices.n);
  require(decode_frame(frame.value(), sent, DecodeMode::kStore, executions().back()).ok(),
          "a payload that was just made is refused");
  if (choices.residual != ResidualType::kNone) {
    check_residual(x, residual, sent, scalar.residual, choices.residual);
  }
  return 0;
}
