// Trains a small network on Fashion-MNIST on several ranks, with compressed gradients:
//
//   mpirun -n 4 mpi_training --codec 3lc:s=1,coder=rice --steps 500
//
// 784 pixels, 128 hidden units (ReLU), 10 classes; SGD with momentum. The example shows how to use
// gradwire. The tensors are named, so that each has its own scale and the biases go raw. The
// gradient buffer is bound to one persistent operation, which keeps the residuals; each step starts
// it and waits for it. With --buffers 2 a second buffer takes the next gradient while the first one
// is exchanged (double buffering, as in QSGD's experiments): a gradient is then taken one update
// late. The program needs the files of Debian's dataset-fashion-mnist.

#include <mpi.h>
#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gradwire/mpi.h"

namespace {

constexpr int kPixels = 784;
constexpr int kHidden = 128;
constexpr int kClasses = 10;

struct Settings {
  gradwire::mpi::Options collective = {.codec = "3lc:s=1,coder=rice"};
  std::string data = "/usr/share/datasets/fashion-mnist";
  int steps = 500;
  int batch = 32;   // images of each rank
  int buffers = 1;  // of gradients
  float learning_rate = 0.01f;
};

[[noreturn]] void stop(const std::string& why) {
  std::fprintf(stderr, "mpi_training: %s\n", why.c_str());
  MPI_Abort(MPI_COMM_WORLD, 1);
  std::abort();
}

struct Images {
  std::vector<float> pixels;    // image i has kPixels from i * kPixels on
  std::vector<uint8_t> labels;  // 0 to 9
};

// The content of a gzip file after the IDX header of `header` bytes.
std::vector<uint8_t> read_idx(const std::string& path, size_t header) {
  gzFile file = gzopen(path.c_str(), "rb");
  if (file == nullptr) stop(path + " is not there (Debian: dataset-fashion-mnist)");
  std::vector<uint8_t> bytes;
  std::vector<uint8_t> piece(1 << 20);
  int got = 0;
  while ((got = gzread(file, piece.data(), static_cast<unsigned>(piece.size()))) > 0) {
    bytes.insert(bytes.end(), piece.begin(), piece.begin() + got);
  }
  gzclose(file);
  if (got < 0 || bytes.size() <= header) stop(path + " is damaged");
  bytes.erase(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(header));
  return bytes;
}

Images load(const std::string& folder, const std::string& set) {
  Images images;
  const std::vector<uint8_t> bytes = read_idx(folder + "/" + set + "-images-idx3-ubyte.gz", 16);
  images.pixels.reserve(bytes.size());
  for (uint8_t pixel : bytes) {
    images.pixels.push_back((static_cast<float>(pixel) / 255.0f - 0.286f) / 0.353f);
  }
  images.labels = read_idx(folder + "/" + set + "-labels-idx1-ubyte.gz", 8);
  if (images.pixels.size() != images.labels.size() * kPixels) stop(folder + " is damaged");
  return images;
}

// The parameters' tensors, one after the other; the gradients lie in the same order.
const std::vector<gradwire::TensorInfo> kTensors = {{"hidden.weight", {kHidden, kPixels}},
                                                    {"hidden.bias", {kHidden}},
                                                    {"output.weight", {kClasses, kHidden}},
                                                    {"output.bias", {kClasses}}};
constexpr size_t kHiddenBias = size_t{kHidden} * kPixels;
constexpr size_t kOutputWeight = kHiddenBias + kHidden;
constexpr size_t kOutputBias = kOutputWeight + size_t{kClasses} * kHidden;
constexpr size_t kParameters = kOutputBias + kClasses;

std::vector<float> make_parameters() {
  std::mt19937 random(1);  // the same on every rank
  std::normal_distribution<float> normal;
  std::vector<float> parameters(kParameters);
  for (size_t i = 0; i < kHiddenBias; ++i) {
    parameters[i] = normal(random) * std::sqrt(2.0f / kPixels);
  }
  for (size_t i = kOutputWeight; i < kOutputBias; ++i) {
    parameters[i] = normal(random) * std::sqrt(1.0f / kHidden);
  }
  return parameters;
}

struct Activations {
  float hidden[kHidden];
  float probability[kClasses];
};

void forward(const std::vector<float>& p, const float* pixels, Activations& a) {
  for (int h = 0; h < kHidden; ++h) {
    const float* weights = p.data() + size_t{kPixels} * h;
    float sum = p[kHiddenBias + h];
    for (int i = 0; i < kPixels; ++i) sum += weights[i] * pixels[i];
    a.hidden[h] = std::max(sum, 0.0f);
  }
  float largest = -INFINITY;
  for (int c = 0; c < kClasses; ++c) {
    const float* weights = p.data() + kOutputWeight + size_t{kHidden} * c;
    float sum = p[kOutputBias + c];
    for (int h = 0; h < kHidden; ++h) sum += weights[h] * a.hidden[h];
    a.probability[c] = sum;
    largest = std::max(largest, sum);
  }
  float total = 0;
  for (float& value : a.probability) total += value = std::exp(value - largest);
  for (float& value : a.probability) value /= total;
}

// Adds the gradient of one image's loss, times `factor`; returns the loss.
float backward(const std::vector<float>& p, const float* pixels, uint8_t label, float factor,
               const Activations& a, std::vector<float>& gradient) {
  float back[kHidden] = {};
  for (int c = 0; c < kClasses; ++c) {
    const float delta = factor * (a.probability[c] - (c == label ? 1.0f : 0.0f));
    const size_t row = kOutputWeight + size_t{kHidden} * c;
    gradient[kOutputBias + c] += delta;
    for (int h = 0; h < kHidden; ++h) {
      gradient[row + h] += delta * a.hidden[h];
      back[h] += delta * p[row + h];
    }
  }
  for (int h = 0; h < kHidden; ++h) {
    if (a.hidden[h] <= 0) continue;
    gradient[kHiddenBias + h] += back[h];
    float* row = gradient.data() + size_t{kPixels} * h;
    for (int i = 0; i < kPixels; ++i) row[i] += back[h] * pixels[i];
  }
  return -std::log(std::max(a.probability[label], 1e-12f));
}

double accuracy(const std::vector<float>& parameters, const Images& images) {
  Activations a;
  size_t right = 0;
  for (size_t i = 0; i < images.labels.size(); ++i) {
    forward(parameters, images.pixels.data() + i * kPixels, a);
    const auto* best = std::max_element(a.probability, a.probability + kClasses);
    right += best - a.probability == images.labels[i] ? 1 : 0;
  }
  return static_cast<double>(right) / static_cast<double>(images.labels.size());
}

bool replicas_equal(const std::vector<float>& parameters) {
  std::vector<float> first = parameters;
  MPI_Bcast(first.data(), static_cast<int>(first.size()), MPI_FLOAT, 0, MPI_COMM_WORLD);
  int equal = std::memcmp(first.data(), parameters.data(), first.size() * sizeof(float)) == 0;
  MPI_Allreduce(MPI_IN_PLACE, &equal, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  return equal != 0;
}

// A gradient and the operation that averages it over all ranks.
class Gradient {
 public:
  explicit Gradient(const gradwire::mpi::Options& options) : values_(kParameters) {
    gradwire::Result<gradwire::mpi::Operation> made = gradwire::mpi::all_reduce_init(
        MPI_IN_PLACE, values_.data(), values_.size(), gradwire::Dtype::kFloat32,
        gradwire::Reduction::kAverage, MPI_COMM_WORLD, options);
    if (!made.ok()) stop(made.status().message());
    all_reduce_.emplace(std::move(made).value());
  }

  std::vector<float>& values() { return values_; }
  uint64_t bytes_sent() const { return all_reduce_->traffic().bytes_sent; }

  void start() {
    status_ = all_reduce_->start();
    under_way_ = status_.ok();
  }
  // Moves the operation on, if it is under way, while the caller computes.
  void proceed() {
    if (!under_way_) return;
    const gradwire::Result<bool> done = all_reduce_->test();
    if (done.ok() && !done.value()) return;
    status_ = done.status();
    under_way_ = false;
  }
  // false: some rank's gradient was NaN or Inf, and every rank skips this step.
  bool finish() {
    if (under_way_) status_ = all_reduce_->wait();
    under_way_ = false;
    if (status_.code() == gradwire::StatusCode::kNonFinite) return false;
    if (!status_.ok()) stop(status_.message());
    return true;
  }

 private:
  std::vector<float> values_;
  std::optional<gradwire::mpi::Operation> all_reduce_;
  gradwire::Status status_;
  bool under_way_ = false;
};

void train(const Settings& settings) {
  int rank = 0;
  int size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const Images images = load(settings.data, "train");
  std::vector<float> parameters = make_parameters();
  std::vector<float> velocity(kParameters);
  gradwire::mpi::Options options = settings.collective;
  options.tensors = kTensors;
  std::vector<std::unique_ptr<Gradient>> gradients;
  for (int i = 0; i < settings.buffers; ++i) {
    gradients.push_back(std::make_unique<Gradient>(options));
    ++options.seed;  // so that they draw other random numbers
  }
  const auto update = [&](Gradient& gradient) {
    if (!gradient.finish()) return;
    for (size_t i = 0; i < kParameters; ++i) {
      velocity[i] = 0.9f * velocity[i] + gradient.values()[i];
      parameters[i] -= settings.learning_rate * velocity[i];
    }
  };

  std::mt19937 random(static_cast<uint32_t>(1000 + rank));
  Activations activations;
  float loss = 0;  // smoothed
  const double begin = MPI_Wtime();
  for (int step = 1; step <= settings.steps; ++step) {
    const auto place = static_cast<size_t>(step);
    Gradient& next = *gradients[place % gradients.size()];
    Gradient& before = *gradients[(place + 1) % gradients.size()];  // `next` itself if it is alone
    std::ranges::fill(next.values(), 0.0f);
    float sum = 0;
    for (int i = 0; i < settings.batch; ++i) {
      const size_t image = random() % images.labels.size();
      const float* pixels = images.pixels.data() + image * kPixels;
      forward(parameters, pixels, activations);
      sum += backward(parameters, pixels, images.labels[image],
                      1.0f / static_cast<float>(settings.batch), activations, next.values());
      before.proceed();
    }
    if (&before != &next && step > 1) update(before);
    next.start();
    if (&before == &next || step == settings.steps) update(next);
    const float mean = sum / static_cast<float>(settings.batch);
    loss = step == 1 ? mean : 0.95f * loss + 0.05f * mean;
    if (rank == 0 && (step % 100 == 0 || step == 1))
      std::printf("step %4d  loss %.3f\n", step, loss);
  }

  const double step_seconds = (MPI_Wtime() - begin) / settings.steps;
  const bool equal = replicas_equal(parameters);
  if (rank != 0) return;
  double sent = 0;
  for (const auto& gradient : gradients) {
    sent += static_cast<double>(gradient->bytes_sent()) / settings.steps;
  }
  const double raw = 2.0 * (size - 1) / size * kParameters * sizeof(float);
  std::printf("%d ranks, codec %s: %.0f bytes sent a step by rank 0, %.0f uncompressed\n", size,
              options.codec.c_str(), sent, raw);
  std::printf("%.3f ms a step\n", 1000 * step_seconds);
  std::printf("after %d steps: test accuracy %.3f, replicas %s\n", settings.steps,
              accuracy(parameters, load(settings.data, "t10k")), equal ? "equal" : "DIFFER");
}

Settings parse(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (i + 1 == argc) stop(name + " needs a value");
    const std::string value = argv[i + 1];
    if (name == "--codec") {
      settings.collective.codec = value;
    } else if (name == "--exchange") {
      const auto exchange = gradwire::ExchangeChoice::parse(value);
      if (!exchange.ok()) stop(exchange.status().message());
      settings.collective.exchange = value;
    } else if (name == "--data") {
      settings.data = value;
    } else if (name == "--steps" && std::atoi(value.c_str()) > 0) {
      settings.steps = std::atoi(value.c_str());
    } else if (name == "--batch" && std::atoi(value.c_str()) > 0) {
      settings.batch = std::atoi(value.c_str());
    } else if (name == "--buffers" && (value == "1" || value == "2")) {
      settings.buffers = std::atoi(value.c_str());
    } else if (name == "--learning-rate" && std::atof(value.c_str()) > 0) {
      settings.learning_rate = static_cast<float>(std::atof(value.c_str()));
    } else {
      stop(name + " " + value +
           ": options are --codec, --exchange, --data, --steps, "
           "--batch, --buffers (1 or 2), --learning-rate");
    }
  }
  return settings;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  train(parse(argc, argv));
  MPI_Finalize();
  return 0;
}
