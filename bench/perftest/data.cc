#include "perftest/data.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <regex>

namespace gradwire::perftest {
namespace {

Status unusable(const std::string& path, const char* why) {
  return {StatusCode::kInvalidArgument, path + ": " + why};
}

// Divides by the largest magnitude, unless that is 0.
void append_scaled(const char* bytes, uint64_t size, std::vector<float>& values) {
  std::vector<float> tensor(size / sizeof(float));
  std::memcpy(tensor.data(), bytes, tensor.size() * sizeof(float));
  float largest = 0;
  for (float value : tensor) largest = std::max(largest, std::abs(value));
  for (float value : tensor) values.push_back(largest > 0 ? value / largest : value);
}

Result<std::vector<float>> read_safetensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string all((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  uint64_t header_size = 0;
  if (!file || all.size() < sizeof header_size) return unusable(path, "can't be read");
  std::memcpy(&header_size, all.data(), sizeof header_size);
  if (header_size > all.size() - sizeof header_size) return unusable(path, "no safetensors file");
  const std::string header = all.substr(sizeof header_size, header_size);
  const uint64_t data_begin = sizeof header_size + header_size;
  std::vector<float> values;
  const std::regex tensor(R"re(\{[^{}]*"dtype" *: *"F32"[^{}]*\})re");
  const std::regex offsets(R"re("data_offsets" *: *\[ *(\d+) *, *(\d+) *\])re");
  for (std::sregex_iterator i(header.begin(), header.end(), tensor), end; i != end; ++i) {
    const std::string entry = i->str();
    std::smatch match;
    if (!std::regex_search(entry, match, offsets)) continue;
    const uint64_t first = std::stoull(match[1]);
    const uint64_t last = std::stoull(match[2]);
    if (first > last || last > all.size() - data_begin) return unusable(path, "ends too early");
    append_scaled(all.data() + data_begin + first, last - first, values);
  }
  if (values.empty()) return unusable(path, "no float32 values in it");
  if (!std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); })) {
    return unusable(path, "it holds NaN or Inf");
  }
  return values;
}

std::vector<float> make_synthetic() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(1 << 20);
  for (float& value : values) value = 0.01f * normal(random) * std::exp(0.5f * normal(random));
  return values;
}

// A repetition begins at one of kPlaces places in the period, which are near each other, as in
// `gradwire bench`. So a residual meets values of its own tensor, as in training.
constexpr uint64_t kPlaces = 64;
constexpr uint64_t kMargin = 1 << 15;
constexpr uint64_t kAlignment = 16;

// One step of splitmix64.
uint64_t next_random(uint64_t& state) {
  uint64_t z = state += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

}  // namespace

Result<Data> Data::load(const std::string& choice) {
  Data data;
  if (choice == "synthetic") {
    data.period_ = make_synthetic();
    return data;
  }
  Result<std::vector<float>> values = read_safetensors(choice);
  if (!values.ok()) return values.status();
  data.period_ = std::move(values).value();
  return data;
}

void Data::fill(uint32_t rank, uint64_t repetition, std::vector<float>& values) const {
  uint64_t place = repetition % kPlaces;
  uint64_t start = next_random(place) % (kMargin / kAlignment) * kAlignment % period_.size();
  uint64_t noise = (repetition << 20) + rank;
  for (size_t i = 0; i < values.size(); ++i) {
    const float factor = 0.9f + 0.2f * (static_cast<float>(next_random(noise) >> 40) * 0x1p-24f);
    values[i] = period_[start] * factor;
    if (++start == period_.size()) start = 0;
  }
}

}  // namespace gradwire::perftest
