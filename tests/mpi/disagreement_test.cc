// The last rank calls something else than the others, and every rank's error names the difference.

#include "gtest/gtest.h"

#include "tests/mpi/ranks.h"

namespace gradwire::mpi {
namespace {

bool is_odd_one() { return my_rank() == world_size() - 1; }

void expect_difference(const Status& status, const std::string& usual, const std::string& odd) {
  if (world_size() == 1) return;
  EXPECT_EQ(status.code(), StatusCode::kPeerMismatch) << status.message();
  for (const std::string& part : {usual, odd, std::to_string(world_size() - 1)}) {
    EXPECT_TRUE(contains(status.message(), part)) << status.message();
  }
}

Status reduce(const Options& options, uint64_t n = 1000, Dtype dtype = Dtype::kFloat32,
              Reduction reduction = Reduction::kSum) {
  std::vector<float> values(n, 1.0f);
  return all_reduce(MPI_IN_PLACE, values.data(), n, dtype, reduction, MPI_COMM_WORLD, options);
}

TEST(Disagreement, OfCodecs) {
  expect_difference(reduce({.codec = is_odd_one() ? "3lc:s=1.5" : "3lc:s=1.75"}), "3lc:s=1.75",
                    "3lc:s=1.5");
}

TEST(Disagreement, OfPullCodecs) {
  expect_difference(reduce({.codec = "3lc", .pull_codec = is_odd_one() ? "bf16" : ""}), "pull 3lc",
                    "pull bf16");
}

TEST(Disagreement, OfCounts) {
  expect_difference(reduce({.codec = "raw"}, is_odd_one() ? 999 : 1000), "values 1000",
                    "values 999");
}

TEST(Disagreement, OfDtypes) {
  expect_difference(
      reduce({.codec = "raw"}, 1000, is_odd_one() ? Dtype::kFloat16 : Dtype::kFloat32), "float32",
      "float16");
}

TEST(Disagreement, OfReductions) {
  expect_difference(reduce({.codec = "raw"}, 1000, Dtype::kFloat32,
                           is_odd_one() ? Reduction::kAverage : Reduction::kSum),
                    "exchange sharded, sum", "'exchange sharded'");
}

TEST(Disagreement, OfAlgorithms) {
  expect_difference(reduce({.codec = "raw", .exchange = is_odd_one() ? "ring" : "sharded"}),
                    "exchange sharded", "exchange ring");
}

TEST(Disagreement, OfOperations) {
  std::vector<float> values(1000 * world_size());
  const Options raw{.codec = "raw"};
  expect_difference(is_odd_one() ? allgather(MPI_IN_PLACE, values.data(), 1000, Dtype::kFloat32,
                                             MPI_COMM_WORLD, raw)
                                 : reduce(raw),
                    "exchange sharded", "allgather");
}

TEST(Disagreement, OfLayouts) {
  Options options{.codec = "3lc", .tensors = {{"a", {10, 100}}}};
  if (is_odd_one()) options.tensors = {{"a", {100, 10}}};
  expect_difference(reduce(options), "[10x100]", "[100x10]");
}

TEST(Disagreement, OfWhatIsPossible) {
  const Status status = reduce({.codec = is_odd_one() ? "4lc" : "3lc"});
  if (is_odd_one()) {
    EXPECT_EQ(status.code(), StatusCode::kUnknownCodec) << status.message();
  } else {
    EXPECT_EQ(status.code(), StatusCode::kPeerMismatch) << status.message();
    EXPECT_TRUE(contains(status.message(),
                         "rank " + std::to_string(world_size() - 1) + " can't take part: "))
        << status.message();
    EXPECT_TRUE(contains(status.message(), "4lc")) << status.message();
  }
}

TEST(Disagreement, OfWhatIsPossibleIsToldAtOnceHoweverManyTensorsThereAre) {
  Options options{.codec = is_odd_one() ? "4lc" : "int8", .timeout_seconds = 3};
  for (int i = 0; i < 1000; ++i) options.tensors.push_back({"tensor " + std::to_string(i), {1}});
  const Status status = reduce(options);
  EXPECT_EQ(status.code(), is_odd_one() ? StatusCode::kUnknownCodec : StatusCode::kPeerMismatch)
      << status.message();
  EXPECT_TRUE(reduce({.codec = "raw"}).ok());
}

TEST(Disagreement, MemoryOfSendsThatArriveLateIsFreed) {
  const uint32_t world = world_size();
  auto owned = std::make_shared<int>();  // by an exchange, which is freed with the sends
  const std::weak_ptr<int> seen = owned;
  const auto make_engine = [&](int tensors, ExchangeOptions options) {
    std::vector<TensorInfo> infos;
    for (int i = 0; i < tensors; ++i) infos.push_back({"tensor " + std::to_string(i), {1}});
    auto layout = std::make_shared<const Layout>(
        Layout::create(infos, world, LayoutOptions{.codec = "raw"}).value());
    return Engine::create(MPI_COMM_WORLD,
                          make_exchange("sharded", std::move(layout), my_rank(),
                                        Execution::create().value(), std::move(options))
                              .value())
        .value();
  };
  std::vector<float> values(1000);
  ASSERT_TRUE(reduce({.codec = "raw"}).ok());  // all ranks know the communicator now
  if (is_odd_one()) {
    // Too long for MPI to send it before another rank receives it.
    Engine engine =
        make_engine(1000, {.update = [owned = std::move(owned)](auto) { return Status(); }});
    ASSERT_TRUE(engine.start(values, 0).ok());
  }
  MPI_Barrier(MPI_COMM_WORLD);
  if (!is_odd_one()) {
    Engine engine = make_engine(1, {});
    ASSERT_TRUE(engine.start(std::span(values).first(1), 0).ok());
    EXPECT_EQ(engine.wait().code(), StatusCode::kPeerMismatch);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  EXPECT_TRUE(reduce({.codec = "raw"}).ok());
  EXPECT_TRUE(seen.expired() == is_odd_one());
}

TEST(Disagreement, IsFoundByPersistentOperationsAtTheFirstStep) {
  std::vector<float> values(1000, 1.0f);
  Result<Operation> operation =
      all_reduce_init(MPI_IN_PLACE, values.data(), 1000, Dtype::kFloat32, Reduction::kSum,
                      MPI_COMM_WORLD, {.codec = is_odd_one() ? "bf16" : "fp16"});
  ASSERT_TRUE(operation.ok());
  ASSERT_TRUE(operation.value().start().ok());
  const Status status = operation.value().wait();
  expect_difference(status, "fp16", "bf16");
  if (world_size() == 1) return;
  // No later call says that the values are there, and the operation cannot be started again.
  EXPECT_EQ(operation.value().wait().code(), StatusCode::kPeerMismatch);
  EXPECT_EQ(operation.value().test().status().code(), StatusCode::kPeerMismatch);
  EXPECT_EQ(operation.value().start().code(), StatusCode::kPeerMismatch);
}

TEST(BadArguments, AreToldToTheCaller) {
  std::vector<float> values(100);
  const Options raw{.codec = "raw"};
  EXPECT_EQ(all_reduce(values.data(), values.data() + 1, 99, Dtype::kFloat32, Reduction::kSum,
                       MPI_COMM_WORLD, raw)
                .code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(
      all_reduce(nullptr, values.data(), 99, Dtype::kFloat32, Reduction::kSum, MPI_COMM_WORLD, raw)
          .code(),
      StatusCode::kInvalidArgument);
  EXPECT_EQ(all_reduce(MPI_IN_PLACE, values.data(), 99, Dtype::kFloat32, Reduction::kSum,
                       MPI_COMM_NULL, raw)
                .code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(reduce({.codec = "raw", .timeout_seconds = 0}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(reduce({.codec = "raw", .threads = 0}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(reduce({.codec = "raw", .tensors = {{"a", {7}}}}).code(), StatusCode::kLengthMismatch);
  // The next call works.
  EXPECT_TRUE(reduce(raw).ok());
}

}  // namespace
}  // namespace gradwire::mpi
