#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gradwire/codec.h"
#include "gradwire/execution.h"
#include "gradwire/export.h"
#include "gradwire/status.h"

namespace gradwire {

// What a text such as "auto:bits=0.5" or "auto:error=0.3,every=50" asks for: codecs that are chosen
// at run time, tensor by tensor (docs/reference/auto.md). It is no codec itself.
struct GRADWIRE_EXPORT AutoGoal {
  // kBits: the least error within `limit` bits a value. kError: the fewest bits with which a step
  // leaves out at most `limit` times the norm of its input.
  enum class Kind : uint8_t { kBits, kError };

  Kind kind = Kind::kBits;
  float limit = 0;
  uint32_t every = 50;  // steps from one decision to the next
  // Candidates of 3lc with s above 1 are tried up to this one. They send less than any other, and
  // what a step owes is sent many steps later (docs/reference/auto.md).
  float largest_s = 1.0f;
  ResidualType residual = ResidualType::kFloat32;

  // Whether a codec's text is such a goal: "auto", or "auto:...".
  [[nodiscard]] static bool is_goal(std::string_view text) noexcept;
  // kBadParameter: the message lists what is valid.
  static Result<AutoGoal> parse(std::string_view text);
  // Canonical text, without defaults.
  [[nodiscard]] std::string text() const;

  // Whether the goal mostly takes codecs that are coarse (Codec::is_coarse).
  [[nodiscard]] bool is_coarse() const noexcept;

  // Whether the codecs are decided anew after so many steps: after 1, 2, 4, ... steps until
  // `every`, while residuals grow, and after every multiple of `every`.
  [[nodiscard]] bool is_due(uint64_t steps) const noexcept;

  // Whether residuals have grown to their usual size after so many steps.
  [[nodiscard]] static bool is_settled(uint64_t steps) noexcept;

  // The codecs to choose from, always in the same order. All keep a residual of the same type, so
  // that it outlasts a change of the codec.
  [[nodiscard]] std::vector<std::shared_ptr<const Codec>> candidates() const;
};

// What a candidate makes of a tensor, once its residual has settled.
struct Trial {
  double bytes = 0;
  double error = 0;  // sum of squares of the residual; infinite: the codec refuses a value
};

// A tensor's values and the trials of all candidates, summed over the ranks that measured it.
struct TensorTrials {
  double values = 0;
  double input = 0;    // sum of squares of the step's input
  double flowing = 0;  // bytes of this step with the codec in use; 0: none is
  std::vector<Trial> trials;
};

// Tries each candidate on a step's input x and the residual before the step (empty: none yet).
//
// With error feedback a codec that leaves out the share e of the energy of what it encodes (input +
// residual) leaves e / (1 - e) of the input's energy in the residual, once that has settled. But
// the residual here is that of the codec in use. So each candidate is tried twice: on input +
// residual, and again after the residual has been scaled to the energy that the first trial
// predicts.
//
// in_use: the candidate that encodes this step; candidates.size(): none. If there are more than
// `sample` values, only a sample is tried: runs of consecutive values, spread evenly, and the value
// of the largest magnitude, which decides about scales. The results are scaled to the whole. If a
// value is not finite, all numbers are 0.
[[nodiscard]] GRADWIRE_EXPORT TensorTrials try_codecs(
    std::span<const std::shared_ptr<const Codec>> candidates, std::span<const float> x,
    std::span<const float> residual, size_t in_use, Execution& execution, uint64_t sample = 65536);

// The bits a value that trials predict, and the norm of what a step leaves out relative to the norm
// of its input.
struct PredictedCost {
  double bits = 0;
  double error = 0;
};

struct CodecChoice {
  struct Tensor {
    uint32_t candidate = 0;
    PredictedCost predicted = {};
  };
  std::vector<Tensor> tensors;
  PredictedCost predicted = {};  // over all tensors
  bool within = true;            // whether the limit is kept
  // If it is not, the nearest that the candidates can do: the least bits or the least error.
  double possible = 0;
};

// Chooses a candidate for each tensor: L-GreCo's layer-wise problem (arXiv:2210.17357), solved on
// the convex hull of each tensor's candidates. Each rank gets the same choice from the same trials:
// doubles are added in a fixed order, and ties go to the tensor that comes first. If no choice
// keeps the limit, the nearest is returned.
[[nodiscard]] GRADWIRE_EXPORT CodecChoice choose_codecs(const AutoGoal& goal,
                                                        std::span<const TensorTrials> tensors);

}  // namespace gradwire
