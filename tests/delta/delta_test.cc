// Deltas of arrays of every width, with every kind of change, on every SIMD target.

#include "gradwire/delta.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gradwire/execution.h"

namespace gradwire {
namespace {

using Bytes = std::vector<std::byte>;

constexpr DeltaElement kElements[] = {DeltaElement::kInteger8,  DeltaElement::kInteger16,
                                      DeltaElement::kInteger32, DeltaElement::kFloat8,
                                      DeltaElement::kFloat16,   DeltaElement::kFloat32};
constexpr uint64_t kSizes[] = {0, 1, 2, 7, 63, 64, 65, 1000, 65535, 65536, 65537, 200001};

// How an array changes.
struct Change {
  const char* name;
  double share;      // of the elements that change
  int largest_step;  // in places; 0: to any bits
};
constexpr Change kChanges[] = {
    {"nothing", 0, 1},     {"one", 0.00002, 1},   {"few by one", 0.003, 1}, {"hundredth", 0.01, 2},
    {"some", 0.1, 1000},   {"third", 0.33, 3},    {"all by little", 1, 5},  {"all far", 1, 100},
    {"any bits", 0.05, 0}, {"all any bits", 1, 0}};

Execution make_execution(std::string_view target = "auto", int threads = 1) {
  return std::move(Execution::create(target, threads, Threading::kAlways).value());
}

Bytes random_bytes(uint64_t n, std::mt19937_64& random) {
  Bytes bytes(n);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

template <typename Bits>
void change_elements(Bytes& bytes, const Change& change, std::mt19937_64& random) {
  std::uniform_real_distribution<double> draw(0, 1);
  for (size_t at = 0; at + sizeof(Bits) <= bytes.size(); at += sizeof(Bits)) {
    if (draw(random) >= change.share) continue;
    Bits bits;
    std::memcpy(&bits, bytes.data() + at, sizeof bits);
    if (change.largest_step == 0) {
      bits = static_cast<Bits>(random());
    } else {
      const auto step =
          static_cast<Bits>(1 + random() % static_cast<uint64_t>(change.largest_step));
      bits = static_cast<Bits>(random() % 2 == 0 ? bits + step : bits - step);
    }
    std::memcpy(bytes.data() + at, &bits, sizeof bits);
  }
}

Bytes changed(Bytes bytes, DeltaElement element, const Change& change, std::mt19937_64& random) {
  switch (width_of(element)) {
    case 1:
      change_elements<uint8_t>(bytes, change, random);
      break;
    case 2:
      change_elements<uint16_t>(bytes, change, random);
      break;
    default:
      change_elements<uint32_t>(bytes, change, random);
  }
  return bytes;
}

Bytes encoded(DeltaElement element, Bytes& base, const Bytes& result, DeltaBase follow,
              Execution& execution) {
  Bytes delta(max_delta_size(element, base.size() / width_of(element)));
  const auto written = encode_delta(element, base, result, follow, delta, execution);
  EXPECT_TRUE(written.ok()) << written.status().message();
  delta.resize(written.value().size);
  return delta;
}

Bytes encoded(DeltaElement element, Bytes base, const Bytes& result) {
  Execution execution = make_execution();
  return encoded(element, base, result, DeltaBase::kKeep, execution);
}

Status apply(const Bytes& delta, std::span<std::byte> values, Execution& execution) {
  const auto parsed = parse_delta(delta);
  return parsed.ok() ? apply_delta(parsed.value(), values, execution) : parsed.status();
}

Status apply_decoded(const Bytes& bytes, std::span<std::byte> values, Execution& execution) {
  Delta delta = parse_delta(bytes).value();
  const Status decoded = decode_delta(delta, execution);
  return decoded.ok() ? apply_delta(delta, values, execution) : decoded;
}

struct Case {
  DeltaElement element;
  Change change;
};

class DeltaTest : public ::testing::TestWithParam<Case> {
 protected:
  DeltaElement element() const { return GetParam().element; }

  Bytes base(uint64_t n) { return random_bytes(n * width_of(element()), random_); }
  Bytes result(const Bytes& base) { return changed(base, element(), GetParam().change, random_); }

  std::mt19937_64 random_{7};
};

TEST_P(DeltaTest, LeadsToTheResultOnEveryTarget) {
  for (const uint64_t n : kSizes) {
    const Bytes before = base(n);
    const Bytes after = result(before);
    Bytes wanted;
    for (const std::string_view target : simd_targets()) {
      SCOPED_TRACE(std::string(target) + ", n = " + std::to_string(n));
      Execution execution = make_execution(target);
      Bytes follower = before;
      const Bytes delta = encoded(element(), follower, after, DeltaBase::kFollow, execution);
      EXPECT_EQ(follower, after);
      if (wanted.empty()) wanted = delta;
      ASSERT_EQ(delta, wanted);
      Bytes values = before;
      const Status applied = apply(delta, values, execution);
      ASSERT_TRUE(applied.ok()) << applied.message();
      ASSERT_EQ(values, after);
      values = before;
      ASSERT_TRUE(apply_decoded(delta, values, execution).ok());
      ASSERT_EQ(values, after);
    }
  }
}

TEST_P(DeltaTest, ThreadsGiveTheSameBytes) {
  const Bytes before = base(400000);
  const Bytes after = result(before);
  Execution execution = make_execution("auto", 3);
  Bytes copy = before;
  const Bytes delta = encoded(element(), copy, after, DeltaBase::kKeep, execution);
  EXPECT_EQ(delta, encoded(element(), before, after));
  EXPECT_EQ(copy, before);
  Bytes other = copy;
  ASSERT_TRUE(apply(delta, copy, execution).ok());
  EXPECT_EQ(copy, after);
  ASSERT_TRUE(apply_decoded(delta, other, execution).ok());
  EXPECT_EQ(other, after);
}

TEST_P(DeltaTest, IsNoLongerThanTheValuesAndAHeader) {
  for (const uint64_t n : kSizes) {
    const Bytes before = base(n);
    const uint64_t chunks = (n + 65535) / 65536;
    EXPECT_LE(encoded(element(), before, result(before)).size(),
              kDeltaHeaderSize + before.size() + (chunks + 3) / 4);
  }
}

TEST_P(DeltaTest, ArraysMayLieAnywhere) {
  const Bytes before = base(70001);
  const Bytes after = result(before);
  const Bytes delta = encoded(element(), before, after);
  Bytes shifted(before.size() + 1);
  std::ranges::copy(before, shifted.begin() + 1);
  const std::span<std::byte> values = std::span(shifted).subspan(1);
  Execution execution = make_execution();
  Bytes again(max_delta_size(element(), 70001));
  const auto written =
      encode_delta(element(), values, after, DeltaBase::kKeep, again, execution).value();
  again.resize(written.size);
  EXPECT_EQ(again, delta);
  ASSERT_TRUE(apply(delta, values, execution).ok());
  EXPECT_EQ(Bytes(values.begin(), values.end()), after);
}

// Another thread may write to the result meanwhile. Here the delta does, which lies there, too:
// each chunk is written when its steps are found, and before its digest is made.
TEST_P(DeltaTest, AResultThatChangesMeanwhileIsReadOnce) {
  constexpr size_t kResultAt = 56;  // aligned, and after the first bytes of the first chunk
  for (const uint64_t n : {1000, 65536}) {
    const Bytes before = base(n);
    const Bytes after = result(before);
    for (const std::string_view target : simd_targets()) {
      for (const DeltaBase follow : {DeltaBase::kKeep, DeltaBase::kFollow}) {
        SCOPED_TRACE(std::string(target) + ", n = " + std::to_string(n));
        Execution execution = make_execution(target);
        Bytes memory(max_delta_size(element(), n));
        std::ranges::copy(after, memory.begin() + kResultAt);
        const auto live = std::span<const std::byte>(memory).subspan(kResultAt, after.size());
        Bytes follower = before;
        const auto written = encode_delta(element(), follower, live, follow, memory, execution);
        memory.resize(written.value().size);
        EXPECT_EQ(follower, follow == DeltaBase::kFollow ? after : before);
        Bytes values = before;
        const Status applied = apply(memory, values, execution);
        ASSERT_TRUE(applied.ok()) << applied.message();
        ASSERT_EQ(values, after);
      }
    }
  }
}

TEST_P(DeltaTest, FoldsWithWhatFollows) {
  Execution execution = make_execution();
  for (const Change& next : kChanges) {
    const Bytes first = base(150000);
    const Bytes second = result(first);
    const Bytes third = changed(second, element(), next, random_);
    const Bytes one = encoded(element(), first, second);
    const Bytes two = encoded(element(), second, third);
    Bytes folded(max_delta_size(element(), 150000));
    const auto written =
        fold_deltas(parse_delta(one).value(), parse_delta(two).value(), folded, execution);
    ASSERT_TRUE(written.ok()) << written.status().message();
    folded.resize(written.value().size);
    Bytes values = first;
    const Status applied = apply(folded, values, execution);
    ASSERT_TRUE(applied.ok()) << next.name << ": " << applied.message();
    EXPECT_EQ(values, third);
  }
}

TEST_P(DeltaTest, AnotherBaseIsNoticed) {
  const Bytes before = base(1000);
  Bytes other = before;
  other[500] ^= std::byte{1};
  const Bytes after = result(before);
  Execution execution = make_execution();
  const Status applied = apply(encoded(element(), before, after), other, execution);
  // Where all values were sent as they are, the base does not matter.
  if (other == after) return;
  EXPECT_EQ(applied.code(), StatusCode::kChecksumMismatch);
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const DeltaElement element : kElements) {
    for (const Change& change : kChanges) cases.push_back({element, change});
  }
  return cases;
}

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  std::string name =
      std::to_string(static_cast<int>(info.param.element)) + "_" + info.param.change.name;
  std::ranges::replace(name, ' ', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(All, DeltaTest, ::testing::ValuesIn(all_cases()), name_of);

// Bits whose order is special: both zeros, the smallest magnitudes, infinities, NaNs.
TEST(DeltaOrderTest, AFloatMovesByUnitsInTheLastPlace) {
  const std::vector<uint16_t> from = {0x0000, 0x8000, 0x3f80, 0xbf80, 0x7f80, 0x7fff, 0x8001};
  const std::vector<uint16_t> to = {0x8000, 0x0000, 0x3f7f, 0xbf81, 0x7f81, 0xffff, 0x0001};
  Bytes base(from.size() * 2);
  Bytes result(base.size());
  std::memcpy(base.data(), from.data(), base.size());
  std::memcpy(result.data(), to.data(), result.size());
  Bytes values = base;
  Execution execution = make_execution();
  const Bytes delta = encoded(DeltaElement::kFloat16, base, result);
  ASSERT_TRUE(apply(delta, values, execution).ok());
  EXPECT_EQ(values, result);
}

// Parts of a run in which many elements change, few, and none: no parameter suits all gaps, some of
// which are escapes.
TEST(DeltaPlacesTest, DensitiesMayDifferInARun) {
  constexpr double kShares[] = {0.5, 0, 0.3, 0.001, 0, 0, 0.02, 0, 0, 0.4, 0};
  constexpr size_t kPart = 2999;
  std::mt19937_64 random(11);
  const Bytes before = random_bytes(2 * 70000, random);
  Bytes after = before;
  for (size_t i = 0; i < 70000; ++i) {
    const double share = kShares[i / kPart % std::size(kShares)];
    if (std::uniform_real_distribution<double>(0, 1)(random) < share) after[2 * i] ^= std::byte{1};
  }
  Bytes wanted;
  for (const std::string_view target : simd_targets()) {
    SCOPED_TRACE(std::string(target));
    Execution execution = make_execution(target);
    Bytes values = before;
    const Bytes delta =
        encoded(DeltaElement::kInteger16, values, after, DeltaBase::kKeep, execution);
    if (wanted.empty()) wanted = delta;
    ASSERT_EQ(delta, wanted);
    ASSERT_TRUE(apply(delta, values, execution).ok());
    ASSERT_EQ(values, after);
  }
}

// 520 changes, 513 of them far: these have four runs of 192 bits, of which the last is empty.
TEST(DeltaPlacesTest, RunsMayBeEmpty) {
  constexpr size_t kChanged = 520;
  const Bytes before(2 * 5 * kChanged);
  Bytes after = before;
  for (size_t i = 0; i < kChanged; ++i) after[10 * i] = static_cast<std::byte>(i < 7 ? 1 : 9);
  for (const std::string_view target : simd_targets()) {
    SCOPED_TRACE(std::string(target));
    Execution execution = make_execution(target);
    Bytes values = before;
    const Bytes delta =
        encoded(DeltaElement::kInteger16, values, after, DeltaBase::kKeep, execution);
    EXPECT_LT(delta.size(), 720u);
    ASSERT_TRUE(apply(delta, values, execution).ok());
    ASSERT_EQ(values, after);
  }
}

TEST(DeltaDamageTest, NoByteIsTrusted) {
  std::mt19937_64 random(3);
  Execution execution = make_execution();
  for (const Change& change : kChanges) {
    const Bytes before = random_bytes(2 * 66000, random);
    const Bytes after = changed(before, DeltaElement::kFloat16, change, random);
    const Bytes delta = encoded(DeltaElement::kFloat16, before, after);
    const Delta parsed = parse_delta(delta).value();
    for (int i = 0; i < 300; ++i) {
      Bytes damaged = delta;
      damaged[random() % damaged.size()] ^= static_cast<std::byte>(1 + random() % 255);
      EXPECT_FALSE(parse_delta(damaged).ok());
      // As if the checksum were right.
      Delta trusted = parsed;
      trusted.payload = std::span<const std::byte>(damaged).subspan(kDeltaHeaderSize);
      if (random() % 4 == 0 && !trusted.payload.empty()) {
        trusted.payload = trusted.payload.first(random() % trusted.payload.size());
      }
      Bytes values = before;
      const StatusCode applied = apply_delta(trusted, values, execution).code();
      EXPECT_TRUE(applied != StatusCode::kOk || values == after);
      Bytes others = before;
      const Status decoded = decode_delta(trusted, execution);
      EXPECT_EQ(decoded.ok() ? apply_delta(trusted, others, execution).code() : decoded.code(),
                applied);
    }
    // As if the modes of the two chunks were changed after they were decoded.
    Delta decoded = parsed;
    ASSERT_TRUE(decode_delta(decoded, execution).ok());
    for (int modes = 0; modes < 16; ++modes) {
      Bytes damaged = delta;
      damaged[kDeltaHeaderSize] = static_cast<std::byte>(modes);
      decoded.payload = std::span<const std::byte>(damaged).subspan(kDeltaHeaderSize);
      Bytes values = before;
      const StatusCode applied = apply_delta(decoded, values, execution).code();
      EXPECT_TRUE(applied != StatusCode::kOk || values == after);
    }
  }
}

TEST(DeltaErrorTest, LengthsAndHeadersAreChecked) {
  Execution execution = make_execution();
  Bytes base(8);
  const Bytes result(8);
  Bytes delta(max_delta_size(DeltaElement::kFloat16, 4));
  const auto code = [&](DeltaElement element, size_t bytes, size_t room) {
    return encode_delta(element, base, std::span(result).first(bytes), DeltaBase::kKeep,
                        std::span(delta).first(room), execution)
        .status()
        .code();
  };
  EXPECT_EQ(code(DeltaElement::kFloat16, 6, delta.size()), StatusCode::kLengthMismatch);
  EXPECT_EQ(code(DeltaElement::kFloat16, 8, delta.size() - 1), StatusCode::kBufferTooSmall);
  const Bytes whole = encoded(DeltaElement::kFloat16, base, result);
  const auto parsed = [&](size_t at, uint8_t value) {
    Bytes bytes = whole;
    bytes[at] = static_cast<std::byte>(value);
    return parse_delta(bytes).status().code();
  };
  EXPECT_EQ(parsed(0, 'X'), StatusCode::kBadMagic);
  EXPECT_EQ(parsed(2, 2), StatusCode::kUnsupportedVersion);
  EXPECT_EQ(parsed(3, 3), StatusCode::kReservedBits);
  EXPECT_EQ(parsed(3, 33), StatusCode::kReservedBits);
  EXPECT_EQ(parsed(40, 255), StatusCode::kTruncated);
  EXPECT_EQ(parsed(40, 0), StatusCode::kTrailingBytes);
  EXPECT_EQ(parsed(15, 1), StatusCode::kLimitExceeded);
  EXPECT_EQ(parsed(8, 5), StatusCode::kChecksumMismatch);
  EXPECT_EQ(parse_delta(std::span(whole).first(47)).status().code(), StatusCode::kTruncated);
}

}  // namespace
}  // namespace gradwire
