// The texts of goals, and the codecs among which they choose.

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>

#include "base/return_if_error.h"
#include "codecs/parameters.h"
#include "gradwire/codec_choice.h"

namespace gradwire {
namespace {

constexpr std::string_view kName = "auto";

// Below the first, the entries of a packet's header alone can take more. At the second, the most
// exact candidate is always within the budget.
constexpr float kLeastBits = 0.01f;
constexpr float kMostBits = 16.0f;
// float16 leaves out about 2^-12 of each value.
constexpr float kLeastError = 0.000244f;
constexpr float kMostError = 1000.0f;

constexpr float next_above(float value) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) + 1);
}

constexpr std::array<CodecParameter, 4> kParameters = {{
    {"bits", "", "from 0.01 to 16", "least error within so many bits a value"},
    {"error", "", "from 0.000244 (that of float16) to 1000",
     "fewest bits with which a step leaves out so much of the norm of its input"},
    {"every", "50", "1 to 1000000", "steps from one decision to the next"},
    {"s", "1", "[1, 2)", "largest s of 3lc that is tried"},
}};
constexpr CodecInfo kInfo = {.id = 0,
                             .name = kName,
                             .summary = "chooses codecs at run time",
                             .source = "L-GreCo, arXiv:2210.17357",
                             .error_feedback = true,
                             .parameters = kParameters};
constexpr uint32_t kMostSteps = 1000000;
constexpr uint32_t kUsualSteps = 50;
constexpr std::string_view kResidualTypes[] = {"f32", "bf16"};

// 3lc with a smaller group sends more. Values of these codecs run ahead as often as they lag. Those
// of stc and topk always lag, and trained worse with less energy left out (docs/results/auto.md).
// The first candidate stands for tensors of zeros.
constexpr std::string_view kCandidates[] = {
    "3lc:s=1.00,coder=rice",
    "3lc:s=1.00,coder=rice,bucket=20480",
    "3lc:s=1.00,coder=rice,bucket=5120",
    "3lc:s=1.00,coder=rice,bucket=2560",
    "3lc:s=1.00,coder=rice,bucket=1280",
    "3lc:s=1.00,coder=rice,bucket=640",
    "3lc:s=1.00,coder=rice,bucket=320",
    "3lc:s=1.00,coder=rice,bucket=160",
    "3lc:s=1.00,coder=rice,bucket=80",
    "3lc:s=1.00,coder=rice,bucket=40",
    "qsgd:bits=3,bucket=128,ef=on",
    "qsgd:bits=4,ef=on",
    "qsgd:bits=5,ef=on",
    "qsgd:bits=6,ef=on",
    "int8:bucket=512",
    "bf16:ef=on",
    "fp16:ef=on",
};

// Further candidates, up to the goal's largest s. With groups each of them was beaten by another
// one: more bits and a larger residual.
constexpr float kLargerS[] = {1.25f, 1.5f, 1.75f, 1.9f};

}  // namespace

bool AutoGoal::is_goal(std::string_view text) noexcept {
  return text.substr(0, text.find(':')) == kName;
}

Result<AutoGoal> AutoGoal::parse(std::string_view text) {
  assert(is_goal(text));
  GW_ASSIGN_OR_RETURN(Parameters given,
                      Parameters::parse(kInfo, text.substr(std::min(text.size(), kName.size()))));
  AutoGoal goal;
  if (given.has("bits") == given.has("error")) {
    given.fail("give either bits, a budget in bits a value, or error, a bound; valid: bits=" +
               std::string(kParameters[0].values) +
               ", error=" + std::string(kParameters[1].values));
  }
  if (given.has("ef")) given.fail("codecs that change need error feedback: leave ef out");
  goal.kind = given.has("error") ? Kind::kError : Kind::kBits;
  if (goal.kind == Kind::kBits) {
    goal.limit =
        given.number("bits", kLeastBits, next_above(kMostBits), 1.0f, kParameters[0].values);
  } else {
    goal.limit =
        given.number("error", kLeastError, next_above(kMostError), 1.0f, kParameters[1].values);
  }
  goal.every = given.count("every", 1, kMostSteps, kUsualSteps);
  goal.largest_s = given.number("s", 1.0f, 2.0f, 1.0f);
  goal.residual = given.choice("residual", kResidualTypes, size_t{0}) == 0
                      ? ResidualType::kFloat32
                      : ResidualType::kBfloat16;
  GW_RETURN_IF_ERROR(given.status());
  return goal;
}

std::string AutoGoal::text() const {
  std::string keys;
  append_parameter(keys, kind == Kind::kBits ? "bits" : "error", format_number(limit));
  if (largest_s != 1.0f) append_parameter(keys, "s", format_number(largest_s));
  if (every != kUsualSteps) append_parameter(keys, "every", std::to_string(every));
  if (residual == ResidualType::kBfloat16) append_parameter(keys, "residual", "bf16");
  return std::string(kName) + ":" + keys;
}

bool AutoGoal::is_due(uint64_t steps) const noexcept {
  return steps > 0 && (steps % every == 0 || (steps < every && std::has_single_bit(steps)));
}

bool AutoGoal::is_coarse() const noexcept {
  return kind == Kind::kBits ? limit < 4.0f : limit > 0.2f;
}

bool AutoGoal::is_settled(uint64_t steps) noexcept { return steps >= 50; }

std::vector<std::shared_ptr<const Codec>> AutoGoal::candidates() const {
  std::vector<std::shared_ptr<const Codec>> codecs;
  const auto add = [&](std::string text) {
    if (residual == ResidualType::kBfloat16) text += ",residual=bf16";
    auto codec = Codec::parse(text);
    assert(codec.ok());
    codecs.push_back(std::move(codec).value());
  };
  for (const std::string_view text : kCandidates) add(std::string(text));
  for (const float s : kLargerS) {
    if (s <= largest_s) add("3lc:coder=rice,s=" + format_number(s));
  }
  return codecs;
}

}  // namespace gradwire
