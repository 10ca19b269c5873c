// The host program's settings of arithmetic change no result of an exchange.

#include "tests/arithmetic_modes.h"

#include <algorithm>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "gradwire/exchange_choice.h"
#include "tests/exchange/cluster.h"

namespace gradwire {
namespace {

constexpr uint32_t kRanks = 4;

// The ranks' buckets after each step on one of `inputs`, and then their residuals.
Buckets results(const ExchangeInfo& exchange, const std::string& codec,
                const std::vector<Buckets>& inputs) {
  const MakeExchange make = [&](const std::shared_ptr<const Layout>& layout, uint32_t rank) {
    return make_exchange(exchange.name, layout, rank,
                         Execution::create("auto", 2, Threading::kAlways).value(), {})
        .value();
  };
  Cluster cluster(make, kRanks, codec);
  Buckets all;
  for (uint64_t step = 0; step < inputs.size(); ++step) {
    Buckets buckets = inputs[step];
    EXPECT_TRUE(cluster.step(buckets, step).ok());
    all.insert(all.end(), buckets.begin(), buckets.end());
    for (uint32_t r = 0; r < kRanks; ++r) {
      if (step == 1) cluster.rank(r).scale_residuals(1.0f / 3);
      if (step == 2) cluster.rank(r).retract();
    }
  }
  for (uint32_t r = 0; r < kRanks; ++r) {
    for (const ResidualPiece& piece : cluster.rank(r).export_residuals()) {
      all.push_back(piece.values);
    }
  }
  return all;
}

// Gradients of three steps, of about this size.
std::vector<Buckets> gradients(float size) {
  const uint64_t n = Layout::create(small_tensors(), kRanks, {.codec = "raw"}).value().numel();
  std::vector<Buckets> steps;
  for (uint64_t step = 0; step < 3; ++step) {
    steps.push_back(random_buckets(kRanks, n, step));
    for (auto& bucket : steps.back()) {
      for (float& value : bucket) value *= size;
    }
  }
  return steps;
}

bool are_same(const Buckets& a, const Buckets& b) {
  return std::ranges::equal(a, b, [](const auto& x, const auto& y) { return same_bits(x, y); });
}

class ArithmeticModes : public testing::TestWithParam<const ExchangeInfo*> {};

std::vector<const ExchangeInfo*> within_one_world() {
  std::vector<const ExchangeInfo*> chosen;
  for (const ExchangeInfo* exchange : among_equals()) {
    if (!exchange->between_machines) chosen.push_back(exchange);
  }
  return chosen;
}

INSTANTIATE_TEST_SUITE_P(All, ArithmeticModes, testing::ValuesIn(within_one_world()),
                         [](const auto& exchange) { return std::string(exchange.param->name); });

TEST_P(ArithmeticModes, ChangeNoResult) {
  std::vector<std::string> codecs = {"raw", "qsgd:bits=4", "bf16"};
  if (GetParam()->adds_trits) {
    codecs.insert(codecs.end(), {"terngrad", "terngrad:clip=0,bucket=640"});
  } else {
    codecs.insert(codecs.end(), {"3lc:s=1.75", "onebit", "int8:residual=bf16", "topk"});
  }
  for (const std::string& codec : codecs) {
    for (const float size : {1e-40f, 1e-37f, 1.0f}) {
      const std::vector<Buckets> inputs = gradients(size);
      const Buckets expected = results(*GetParam(), codec, inputs);
      for (const ArithmeticMode::Mode mode : ArithmeticMode::all()) {
        const ArithmeticMode set(mode);
        EXPECT_TRUE(are_same(results(*GetParam(), codec, inputs), expected))
            << codec << ", gradients of " << size << ", " << ArithmeticMode::name(mode);
      }
    }
  }
}

}  // namespace
}  // namespace gradwire
