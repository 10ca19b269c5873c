// What each candidate makes of a tensor's values.

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/standard_arithmetic.h"
#include "gradwire/codec_choice.h"

namespace gradwire {
namespace {

// Values of a run of the sample: a multiple of the candidates' groups, or large beside them.
constexpr uint64_t kRun = 5120;
// Without a bound, a codec that leaves out nearly everything would seem to leave an endless
// residual.
constexpr double kLargestShare = 0.999;
// A residual is scaled at most so much, up or down: its shape would fit no longer.
constexpr double kLargestFactor = 16;

double sum_squares(std::span<const float> values) {
  double sum = 0;
  for (const float value : values) sum += double{value} * double{value};
  return sum;
}

// The indexes of runs of consecutive values, as many as fit into `size`, spread evenly, and of the
// value of the largest magnitude.
std::vector<uint64_t> take_sample(std::span<const float> values, uint64_t size) {
  const uint64_t runs = std::max<uint64_t>(size / kRun, 1);
  const uint64_t room = values.size() - kRun;
  std::vector<uint64_t> sample;
  sample.reserve(runs * kRun + 1);
  for (uint64_t i = 0; i < runs; ++i) {
    const uint64_t begin = runs == 1 ? 0 : room / (runs - 1) * i;
    for (uint64_t k = 0; k < kRun; ++k) sample.push_back(begin + k);
  }
  const auto largest =
      std::ranges::max_element(values, {}, [](float value) { return std::fabs(value); });
  sample.push_back(static_cast<uint64_t>(largest - values.begin()));
  return sample;
}

std::vector<float> pick(std::span<const float> values, const std::vector<uint64_t>& indexes) {
  std::vector<float> picked;
  if (values.empty()) return picked;
  picked.reserve(indexes.size());
  for (const uint64_t i : indexes) picked.push_back(values[i]);
  return picked;
}

// Energy of the residual that a codec keeps of inputs of energy 1.
double settled_energy(double share) {
  const double bounded = std::min(share, kLargestShare);
  return bounded / (1 - bounded);
}

// Tries codecs on the same values, with a residual of any scale.
class Trials {
 public:
  Trials(std::span<const float> x, std::span<const float> residual, Execution& execution)
      : x_(x),
        residual_(residual),
        energy_(sum_squares(x)),
        owed_(sum_squares(residual)),
        execution_(execution) {}

  struct Outcome {
    double bytes = 0;
    double share = 0;  // of the energy that is left out; infinite: the codec refuses a value
  };

  // factor: of the residual.
  Outcome run(const Codec& codec, float factor) {
    left_.assign(x_.size(), 0.0f);
    for (size_t i = 0; i < residual_.size(); ++i) left_[i] = factor * residual_[i];
    double encoded = 0;
    for (size_t i = 0; i < left_.size(); ++i) {
      const double sum = double{x_[i]} + double{left_[i]};
      encoded += sum * sum;
    }
    payload_.resize(std::max<size_t>(payload_.size(), codec.max_payload_size(x_.size())));
    // The draws need not be those of the step: any draws show how large the error is.
    const Result<uint64_t> size =
        codec.encode(x_, ResidualView(left_), DrawContext(), payload_, execution_);
    if (!size.ok()) return {.bytes = 0, .share = std::numeric_limits<double>::infinity()};
    return {.bytes = static_cast<double>(size.value()),
            .share = encoded > 0 ? sum_squares(left_) / encoded : 0};
  }

  // The factor that gives the residual its settled energy, for a codec that leaves out `share`.
  [[nodiscard]] float find_factor(double share) const {
    if (!(owed_ > 0 && energy_ > 0 && std::isfinite(share))) return 1.0f;
    const double factor = std::sqrt(settled_energy(share) * energy_ / owed_);
    return static_cast<float>(std::clamp(factor, 1 / kLargestFactor, kLargestFactor));
  }

 private:
  std::span<const float> x_;
  std::span<const float> residual_;
  double energy_;
  double owed_;
  Execution& execution_;
  std::vector<float> left_;  // of the codec that was tried last
  std::vector<std::byte> payload_;
};

}  // namespace

TensorTrials try_codecs(std::span<const std::shared_ptr<const Codec>> candidates,
                        std::span<const float> x, std::span<const float> residual, size_t in_use,
                        Execution& execution, uint64_t sample) {
  const StandardArithmetic arithmetic;
  TensorTrials tried;
  tried.trials.resize(candidates.size());
  const double input = sum_squares(x);
  if (x.empty() || !std::isfinite(input + sum_squares(residual))) return tried;
  std::vector<float> some;
  std::vector<float> some_residual;
  double scale = 1;
  if (x.size() > std::max(sample, kRun)) {
    std::vector<float> encoded(x.begin(), x.end());
    for (size_t i = 0; i < residual.size(); ++i) encoded[i] += residual[i];
    const std::vector<uint64_t> indexes = take_sample(encoded, sample);
    some = pick(x, indexes);
    some_residual = pick(residual, indexes);
    scale = static_cast<double>(x.size()) / static_cast<double>(some.size());
  }
  Trials trials(some.empty() ? x : some, some.empty() ? residual : some_residual, execution);
  tried.values = static_cast<double>(x.size());
  tried.input = input;
  for (size_t c = 0; c < candidates.size(); ++c) {
    Trials::Outcome outcome = trials.run(*candidates[c], 1.0f);
    if (c == in_use) tried.flowing = outcome.bytes * scale;
    const float factor = trials.find_factor(outcome.share);
    if (factor != 1.0f) outcome = trials.run(*candidates[c], factor);
    tried.trials[c].bytes = outcome.bytes * scale;
    tried.trials[c].error = std::isfinite(outcome.share) ? input * settled_energy(outcome.share)
                                                         : std::numeric_limits<double>::infinity();
  }
  return tried;
}

}  // namespace gradwire
