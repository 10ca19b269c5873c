#include "gradwire/codec_choice.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "tests/codecs/inputs.h"

namespace gradwire {
namespace {

AutoGoal parse(const char* text) { return AutoGoal::parse(text).value(); }

// A tensor of 100 values whose candidates take these bytes and leave a residual of so much of the
// input's energy.
TensorTrials tensor(const std::vector<std::pair<double, double>>& candidates, double input = 1.0) {
  TensorTrials made = {.values = 100, .input = input, .trials = {}};
  for (const auto& [bytes, settled] : candidates) {
    made.trials.push_back({.bytes = bytes, .error = input * settled});
  }
  return made;
}

std::vector<uint32_t> indices(const CodecChoice& choice) {
  std::vector<uint32_t> chosen;
  for (const auto& one : choice.tensors) chosen.push_back(one.candidate);
  return chosen;
}

std::vector<TensorTrials> random_tensors(size_t count, size_t candidates, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform(0.01, 1);
  std::vector<TensorTrials> tensors;
  for (size_t t = 0; t < count; ++t) {
    std::vector<std::pair<double, double>> drawn;
    for (size_t c = 0; c < candidates; ++c)
      drawn.emplace_back(100 * uniform(random), uniform(random));
    tensors.push_back(tensor(drawn, uniform(random)));
  }
  return tensors;
}

// The least error of all choices that keep the budget, by trying all of them.
double best_error(const std::vector<TensorTrials>& tensors, double bytes, size_t from = 0) {
  if (bytes < 0) return std::numeric_limits<double>::infinity();
  if (from == tensors.size()) return 0;
  double best = std::numeric_limits<double>::infinity();
  for (const Trial& trial : tensors[from].trials) {
    best = std::min(best, trial.error + best_error(tensors, bytes - trial.bytes, from + 1));
  }
  return best;
}

TEST(CodecChoice, TextsAreParsedAndWritten) {
  for (const char* text : {"auto:bits=0.5", "auto:error=0.3,every=100", "auto:bits=2,residual=bf16",
                           "auto:bits=0.1,s=1.5", "auto:bits=0.01", "auto:bits=16",
                           "auto:error=0.000244", "auto:error=1000"}) {
    EXPECT_TRUE(AutoGoal::is_goal(text));
    EXPECT_EQ(parse(text).text(), text);
  }
  EXPECT_EQ(parse("auto:every=50,s=1,bits=0.50").text(), "auto:bits=0.5");
  EXPECT_TRUE(AutoGoal::is_goal("auto"));
  EXPECT_FALSE(AutoGoal::is_goal("automatic:bits=1"));
  EXPECT_FALSE(AutoGoal::is_goal("3lc"));
}

TEST(CodecChoice, DecisionsComeSoonerAtTheStart) {
  const AutoGoal goal = parse("auto:bits=1,every=10");
  std::vector<uint64_t> due;
  for (uint64_t steps = 0; steps <= 30; ++steps) {
    if (goal.is_due(steps)) due.push_back(steps);
  }
  EXPECT_EQ(due, std::vector<uint64_t>({1, 2, 4, 8, 10, 20, 30}));
}

TEST(CodecChoice, EveryCandidateKeepsTheResidualAsked) {
  for (const auto& codec : parse("auto:bits=1").candidates()) {
    EXPECT_EQ(codec->residual_type(), ResidualType::kFloat32) << codec->text();
  }
  for (const auto& codec : parse("auto:bits=1,residual=bf16").candidates()) {
    EXPECT_EQ(codec->residual_type(), ResidualType::kBfloat16) << codec->text();
  }
}

TEST(CodecChoice, ALargerSIsTriedOnlyOnRequest) {
  const auto usual = parse("auto:bits=1").candidates();
  const auto more = parse("auto:bits=1,s=1.5").candidates();
  ASSERT_EQ(more.size(), usual.size() + 2);
  const float growth = usual.front()->scale_growth();
  for (const auto& codec : usual) EXPECT_LE(codec->scale_growth(), growth) << codec->text();
  EXPECT_EQ(more[usual.size()]->text(), "3lc:s=1.25,coder=rice");
  EXPECT_EQ(more.back()->text(), "3lc:s=1.5,coder=rice");
}

// The hull's choice keeps the budget, and is at most one candidate of one tensor from the best.
TEST(CodecChoice, IsCloseToTheBestOfAllChoices) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const std::vector<TensorTrials> tensors = random_tensors(5, 6, seed);
    const CodecChoice choice = choose_codecs(parse("auto:bits=3"), tensors);
    ASSERT_TRUE(choice.within) << seed;
    EXPECT_LE(choice.predicted.bits, 3) << seed;
    double input = 0;
    for (const TensorTrials& one : tensors) input += one.input;
    const double error = choice.predicted.error * choice.predicted.error * input;
    EXPECT_GE(error, best_error(tensors, 500 * 3 / 8.0) * 0.999999) << seed;
    EXPECT_LE(error, best_error(tensors, 500 * 2.5 / 8.0) * 1.1) << seed;
  }
}

TEST(CodecChoice, AnErrorIsKeptWithFewBits) {
  const std::vector<TensorTrials> tensors = random_tensors(5, 6, 3);
  const CodecChoice loose = choose_codecs(parse("auto:error=0.8"), tensors);
  const CodecChoice tight = choose_codecs(parse("auto:error=0.65"), tensors);
  EXPECT_TRUE(loose.within && tight.within);
  EXPECT_LE(loose.predicted.error, 0.8);
  EXPECT_LE(tight.predicted.error, 0.65);
  EXPECT_LT(loose.predicted.bits, tight.predicted.bits);
}

TEST(CodecChoice, BitsGoWhereTheEnergyIs) {
  const std::vector<std::pair<double, double>> candidates = {{1, 4}, {10, 0.1}};
  const std::vector<TensorTrials> tensors = {tensor(candidates, 1), tensor(candidates, 100)};
  EXPECT_EQ(indices(choose_codecs(parse("auto:bits=0.5"), tensors)), (std::vector<uint32_t>{0, 1}));
}

TEST(CodecChoice, TiesGoToTheFirstTensor) {
  const std::vector<std::pair<double, double>> candidates = {{1, 4}, {10, 0.1}};
  const std::vector<TensorTrials> tensors(3, tensor(candidates));
  EXPECT_EQ(indices(choose_codecs(parse("auto:bits=0.35"), tensors)),
            (std::vector<uint32_t>{1, 0, 0}));
}

TEST(CodecChoice, WhereNothingKeepsTheLimitTheNearestIsTaken) {
  const std::vector<TensorTrials> tensors = {tensor({{10, 0.5}, {50, 0.01}})};
  const CodecChoice bits = choose_codecs(parse("auto:bits=0.5"), tensors);
  EXPECT_FALSE(bits.within);
  EXPECT_DOUBLE_EQ(bits.possible, 0.8);
  EXPECT_EQ(indices(bits).front(), 0u);
  const CodecChoice error = choose_codecs(parse("auto:error=0.05"), tensors);
  EXPECT_FALSE(error.within);
  EXPECT_NEAR(error.possible, 0.1, 1e-9);
  EXPECT_EQ(indices(error).front(), 1u);
}

TEST(CodecChoice, ARefusedCandidateIsNeverChosen) {
  TensorTrials one = tensor({{10, 0.5}, {1, 0.1}});
  one.trials[1].error = std::numeric_limits<double>::infinity();
  EXPECT_EQ(indices(choose_codecs(parse("auto:bits=9"), {{one}})).front(), 0u);
  one.trials[0].error = one.trials[1].error;
  EXPECT_EQ(indices(choose_codecs(parse("auto:bits=9"), {{one}})).front(), 0u);
}

double energy(std::span<const float> values) {
  double sum = 0;
  for (const float value : values) sum += double{value} * double{value};
  return sum;
}

// Without a residual, trials are what the codecs do.
TEST(CodecChoice, TrialsAreWhatTheCodecsDo) {
  const auto candidates = parse("auto:bits=1").candidates();
  const std::vector<float> x = heavy_tailed(30000, 5);
  Execution execution = Execution::create().value();
  const TensorTrials tried = try_codecs(candidates, x, {}, 3, execution);
  ASSERT_EQ(tried.trials.size(), candidates.size());
  EXPECT_DOUBLE_EQ(tried.input, energy(x));
  EXPECT_EQ(tried.flowing, tried.trials[3].bytes);
  for (size_t c = 0; c < candidates.size(); ++c) {
    const Sent sent(*candidates[c], x);
    EXPECT_EQ(tried.trials[c].bytes, static_cast<double>(sent.payload.size()));
    const double share = std::min(energy(sent.residual) / energy(x), 0.999);
    EXPECT_NEAR(tried.trials[c].error / (energy(x) * share / (1 - share)), 1, 1e-9)
        << candidates[c]->text();
  }
}

// Inputs of a training, and a residual that settles.
class Settling {
 public:
  explicit Settling(size_t n) : x(n), residual(n) {}

  // Returns the bytes of the last step.
  double settle(const Codec& codec, Execution& execution) {
    std::vector<std::byte> payload(codec.max_payload_size(x.size()));
    uint64_t bytes = 0;
    for (int step = 0; step < 200; ++step) {
      draw();
      bytes = codec.encode(x, ResidualView(residual), {}, payload, execution).value();
    }
    return static_cast<double>(bytes);
  }

  void draw() {
    for (float& value : x) value = normal_(random_);
  }

  std::vector<float> x;
  std::vector<float> residual;

 private:
  std::mt19937 random_{4};
  std::normal_distribution<float> normal_;
};

// The prediction for codecs that are not in use, from the residual of another.
TEST(CodecChoice, TrialsPredictWhatSettles) {
  const auto candidates = parse("auto:bits=1").candidates();
  Execution execution = Execution::create().value();
  Settling now(20000);
  now.settle(*Codec::parse("3lc:s=1,bucket=80,coder=rice").value(), execution);
  now.draw();
  const TensorTrials tried = try_codecs(candidates, now.x, now.residual, 0, execution);
  for (size_t c = 0; c < candidates.size(); ++c) {
    if (candidates[c]->scale_growth() > 6.0f) continue;  // they settle in thousands of steps
    Settling later(20000);
    const double bytes = later.settle(*candidates[c], execution);
    const double left = energy(later.residual);
    EXPECT_NEAR(tried.trials[c].bytes, bytes, 0.2 * bytes) << candidates[c]->text();
    EXPECT_NEAR(tried.trials[c].error, left, 0.3 * left) << candidates[c]->text();
  }
}

TEST(CodecChoice, ASampleStandsForTheWhole) {
  const auto candidates = parse("auto:bits=1").candidates();
  Settling tensor(400000);
  tensor.draw();
  tensor.residual = tensor.x;
  tensor.draw();
  tensor.x[123457] = 7;  // in no run of the sample
  Execution execution = Execution::create().value();
  const TensorTrials whole =
      try_codecs(candidates, tensor.x, tensor.residual, 0, execution, tensor.x.size());
  const TensorTrials part = try_codecs(candidates, tensor.x, tensor.residual, 0, execution);
  EXPECT_EQ(part.input, whole.input);
  for (size_t c = 0; c < candidates.size(); ++c) {
    EXPECT_NEAR(part.trials[c].bytes, whole.trials[c].bytes, 0.2 * whole.trials[c].bytes + 100)
        << candidates[c]->text();
  }
}

TEST(CodecChoice, SpecialValues) {
  const auto candidates = parse("auto:bits=1").candidates();
  Execution execution = Execution::create().value();
  for (const std::vector<float>& x : {std::vector<float>{}, {1, std::nanf(""), 2}, {1, INFINITY}}) {
    EXPECT_EQ(try_codecs(candidates, x, {}, 0, execution).values, 0);
  }
  const TensorTrials zeros = try_codecs(candidates, std::vector<float>(50), {}, 0, execution);
  EXPECT_EQ(zeros.values, 50);
  EXPECT_EQ(indices(choose_codecs(parse("auto:bits=1"), {{zeros}})).front(), 0u);
  const std::vector<float> large(50, 1e30f);
  EXPECT_TRUE(std::isinf(try_codecs(candidates, large, {}, 0, execution).trials.back().error));
}

}  // namespace
}  // namespace gradwire
