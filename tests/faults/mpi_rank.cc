// A training over MPI that faults disturb:
//
//   mpi_rank FOLDER RANK STEPS TIMEOUT RAISE_AT SAVE_EVERY RESUME_FROM
//
// Every rank minimizes the distance of its parameters to points of its own, by gradients that
// all-reduce averages with 3LC and error feedback. RAISE_AT: in this step the rank fails (-1:
// never); RESUME_FROM: the step of the checkpoint to begin with (0: none). In FOLDER it leaves
// progress-RANK and result-RANK.json, as the ways of PyTorch do (training_ways.py), and the
// checkpoints. MPI's operations have no state that can be saved: what the residuals hold is lost in
// a restart.

#include <mpi.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gradwire/mpi.h"

namespace {

constexpr size_t kParameters = 100000;

struct Settings {
  std::string folder;
  int rank = 0;
  int steps = 0;
  double timeout = 0;
  int raise_at = -1;
  int save_every = 0;
  int resume_from = 0;
};

std::string checkpoint_path(const Settings& settings, int step) {
  return settings.folder + "/checkpoints/" + std::to_string(settings.rank) + "/" +
         std::to_string(step);
}

void save(const Settings& settings, const std::vector<float>& parameters, int step) {
  const std::string path = checkpoint_path(settings, step);
  std::ofstream file(path + ".new", std::ios::binary);
  const size_t bytes = parameters.size() * sizeof(float);
  file.write(reinterpret_cast<const char*>(parameters.data()), static_cast<std::streamsize>(bytes));
  file.close();
  if (!file) throw std::runtime_error(path + ".new cannot be written: " + std::strerror(errno));
  if (std::rename((path + ".new").c_str(), path.c_str()) != 0) {
    throw std::runtime_error(path + ": " + std::strerror(errno));
  }
}

void load(const Settings& settings, std::vector<float>& parameters) {
  std::ifstream file(checkpoint_path(settings, settings.resume_from), std::ios::binary);
  file.read(reinterpret_cast<char*>(parameters.data()),
            static_cast<std::streamsize>(parameters.size() * sizeof(float)));
  if (!file)
    throw std::runtime_error("no checkpoint of step " + std::to_string(settings.resume_from));
}

void require(const gradwire::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

// FNV-1a of the bits.
std::string digest(const std::vector<float>& parameters) {
  uint64_t hash = 0xcbf29ce484222325;
  const auto* bytes = reinterpret_cast<const unsigned char*>(parameters.data());
  for (size_t i = 0; i < parameters.size() * sizeof(float); ++i) {
    hash = (hash ^ bytes[i]) * 0x100000001b3;
  }
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

void train(const Settings& settings) {
  std::vector<float> parameters(kParameters);
  std::vector<float> gradient(kParameters);
  if (settings.resume_from > 0) load(settings, parameters);
  auto made = gradwire::mpi::all_reduce_init(MPI_IN_PLACE, gradient.data(), gradient.size(),
                                             gradwire::Dtype::kFloat32,
                                             gradwire::Reduction::kAverage, MPI_COMM_WORLD,
                                             {.codec = "3lc", .timeout_seconds = settings.timeout});
  require(made.status());
  gradwire::mpi::Operation average = std::move(made).value();
  std::FILE* progress =
      std::fopen((settings.folder + "/progress-" + std::to_string(settings.rank)).c_str(), "w");
  if (progress == nullptr) throw std::runtime_error("no file for the progress");
  for (int step = settings.resume_from + 1; step <= settings.steps; ++step) {
    std::mt19937 random(static_cast<uint32_t>(1000 * step + settings.rank));
    std::uniform_real_distribution<float> point(-1.0f, 1.0f);
    for (size_t i = 0; i < kParameters; ++i) gradient[i] = parameters[i] - point(random);
    require(average.start());
    require(average.wait());
    for (size_t i = 0; i < kParameters; ++i) parameters[i] -= 0.1f * gradient[i];
    std::rewind(progress);
    std::fprintf(progress, "%8d", step);
    std::fflush(progress);
    if (step == settings.raise_at) throw std::runtime_error("the data of this rank cannot be read");
    if (step % settings.save_every == 0) save(settings, parameters, step);
    usleep(20000);  // what a step computes
  }
  std::fclose(progress);
  std::ofstream result(settings.folder + "/result-" + std::to_string(settings.rank) + ".json");
  result << "{\"digest\": \"" << digest(parameters) << "\", \"step\": " << settings.steps << "}\n";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8) return 2;
  MPI_Init(&argc, &argv);
  try {
    train({.folder = argv[1],
           .rank = std::atoi(argv[2]),
           .steps = std::atoi(argv[3]),
           .timeout = std::atof(argv[4]),
           .raise_at = std::atoi(argv[5]),
           .save_every = std::atoi(argv[6]),
           .resume_from = std::atoi(argv[7])});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "Error: %s\n", error.what());
    std::fflush(nullptr);
    _exit(1);  // MPI_Finalize would wait for ever for a rank that is gone
  }
  MPI_Finalize();
  return 0;
}
