// L-GreCo's layer-wise problem, on the convex hulls of the tensors' candidates.

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/standard_arithmetic.h"
#include "gradwire/codec_choice.h"

namespace gradwire {
namespace {

// A candidate of one tensor: it costs `used` of what is limited, and leaves `lost` of what is to be
// small.
struct Point {
  double used;
  double lost;
  uint32_t candidate;
};

// From a point of a tensor's hull to the next.
struct Move {
  double gain;  // lost less for each unit used more
  size_t tensor;
  size_t to;
};

// The points that no other point and no mixture of two others beats, with `used` growing and `lost`
// falling.
std::vector<Point> lower_hull(std::vector<Point> points) {
  std::erase_if(points, [](const Point& p) { return !std::isfinite(p.used + p.lost); });
  std::ranges::stable_sort(points, [](const Point& a, const Point& b) {
    return a.used != b.used ? a.used < b.used : a.lost < b.lost;
  });
  const auto is_above = [](const Point& a, const Point& middle, const Point& b) {
    return (a.lost - middle.lost) * (b.used - middle.used) <=
           (middle.lost - b.lost) * (middle.used - a.used);
  };
  std::vector<Point> hull;
  for (const Point& point : points) {
    if (!hull.empty() && point.lost >= hull.back().lost) continue;
    while (hull.size() > 1 && is_above(hull[hull.size() - 2], hull.back(), point)) hull.pop_back();
    hull.push_back(point);
  }
  return hull;
}

// The moves of all hulls, the most rewarding first.
std::vector<Move> sort_moves(const std::vector<std::vector<Point>>& hulls) {
  std::vector<Move> moves;
  for (size_t t = 0; t < hulls.size(); ++t) {
    for (size_t to = 1; to < hulls[t].size(); ++to) {
      const Point& from = hulls[t][to - 1];
      const Point& next = hulls[t][to];
      moves.push_back({(from.lost - next.lost) / (next.used - from.used), t, to});
    }
  }
  std::ranges::stable_sort(moves, [](const Move& a, const Move& b) { return a.gain > b.gain; });
  return moves;
}

}  // namespace

CodecChoice choose_codecs(const AutoGoal& goal, std::span<const TensorTrials> tensors) {
  const StandardArithmetic arithmetic;
  const bool limits_bits = goal.kind == AutoGoal::Kind::kBits;
  double values = 0;
  double input = 0;
  std::vector<std::vector<Point>> hulls;
  for (const TensorTrials& tensor : tensors) {
    values += tensor.values;
    input += tensor.input;
    std::vector<Point> points;
    for (uint32_t c = 0; c < tensor.trials.size(); ++c) {
      const double bits = 8 * tensor.trials[c].bytes;
      const double error = tensor.trials[c].error;
      points.push_back(limits_bits ? Point{bits, error, c} : Point{error, bits, c});
    }
    hulls.push_back(lower_hull(std::move(points)));
  }

  // The hull's first point uses least. A tensor that every candidate refused has none.
  double used = 0;
  for (const auto& hull : hulls) used += hull.empty() ? 0 : hull.front().used;
  const double limit = limits_bits ? goal.limit * values : double{goal.limit} * goal.limit * input;
  CodecChoice choice;
  choice.within = used <= limit;
  const auto relative = [](double part, double whole) { return whole > 0 ? part / whole : 0.0; };
  choice.possible = limits_bits ? relative(used, values) : std::sqrt(relative(used, input));

  std::vector<size_t> place(hulls.size(), 0);
  std::vector<bool> is_full(hulls.size(), false);
  for (const Move& move : sort_moves(hulls)) {
    if (is_full[move.tensor]) continue;
    const std::vector<Point>& hull = hulls[move.tensor];
    const double more = hull[move.to].used - hull[move.to - 1].used;
    if (used + more > limit) {
      is_full[move.tensor] = true;  // but a smaller tensor may still fit
      continue;
    }
    used += more;
    place[move.tensor] = move.to;
  }

  double lost = 0;
  const auto predict = [&](double used_part, double lost_part, double of_values, double of_input) {
    if (!limits_bits) std::swap(used_part, lost_part);
    return PredictedCost{relative(used_part, of_values), std::sqrt(relative(lost_part, of_input))};
  };
  for (size_t t = 0; t < hulls.size(); ++t) {
    CodecChoice::Tensor& tensor = choice.tensors.emplace_back();
    if (hulls[t].empty()) continue;
    const Point& point = hulls[t][place[t]];
    tensor.candidate = point.candidate;
    tensor.predicted = predict(point.used, point.lost, tensors[t].values, tensors[t].input);
    lost += point.lost;
  }
  choice.predicted = predict(used, lost, values, input);
  return choice;
}

}  // namespace gradwire
