// The results of the collectives, on any number of ranks.

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <thread>

#include "gtest/gtest.h"

#include "engines/loopback/loopback.h"
#include "tests/mpi/ranks.h"

namespace gradwire::mpi {
namespace {

constexpr const char* kKinds[] = {"sharded", "ring", "broadcast"};

// Runs the same steps for all ranks in one process.
class Reference {
 public:
  Reference(uint64_t n, const LayoutOptions& options, const char* kind, Reduction reduction) {
    const uint32_t world = world_size();
    const auto layout = std::make_shared<const Layout>(
        Layout::create({{"buffer", {n, 1}}}, world, options).value());
    for (uint32_t rank = 0; rank < world; ++rank) {
      exchanges_.push_back(
          make_exchange(kind, layout, rank, Execution::create().value(), {.reduction = reduction})
              .value());
      pointers_.push_back(exchanges_.back().get());
    }
  }

  std::vector<float> step(std::vector<std::vector<float>> inputs, uint64_t step) {
    std::vector<std::span<float>> buckets(inputs.begin(), inputs.end());
    EXPECT_TRUE(run_loopback_step(pointers_, buckets, step).ok());
    return inputs[0];
  }

 private:
  std::vector<std::unique_ptr<Exchange>> exchanges_;
  std::vector<Exchange*> pointers_;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

std::vector<float> sums(uint64_t n) {
  std::vector<float> sum(n);
  for (uint32_t rank = 0; rank < world_size(); ++rank) {
    const std::vector<float> values = whole_numbers(rank, n);
    for (uint64_t i = 0; i < n; ++i) sum[i] += values[i];
  }
  return sum;
}

TEST(AllReduce, RawSumsAreExactForEveryLengthInPlaceAndOut) {
  // The longest messages are sent in several pieces.
  for (uint64_t n : {0, 1, 4, 100, 50001, 1500000}) {
    for (const char* kind : kKinds) {
      const Options options{.codec = "raw", .exchange = kind};
      const std::vector<float> input = whole_numbers(my_rank(), n);
      std::vector<float> output(n);
      Status status = all_reduce(input.data(), output.data(), n, Dtype::kFloat32, Reduction::kSum,
                                 MPI_COMM_WORLD, options);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(output, sums(n));
      std::vector<float> both = input;
      status = all_reduce(MPI_IN_PLACE, both.data(), n, Dtype::kFloat32, Reduction::kAverage,
                          MPI_COMM_WORLD, options);
      ASSERT_TRUE(status.ok()) << status.message();
      for (uint64_t i = 0; i < n; ++i) {
        ASSERT_EQ(both[i], output[i] / static_cast<float>(world_size()));
      }
    }
  }
}

TEST(AllReduce, EveryCodecGivesTheBitsOfTheExchangeOnEveryRank) {
  constexpr uint64_t kN = 20000;
  for (const CodecInfo* info : codecs()) {
    const std::string name(info->name);
    for (const char* kind : kKinds) {
      const std::string codec = info->lossless ? name : name + ":ef=off";
      Reference reference(kN, {.codec = codec, .min_numel = 0}, kind, Reduction::kSum);
      const std::vector<float> expected = reference.step(inputs_of_all(kN, 1), 0);
      std::vector<float> values = input_of(my_rank(), kN, 1);
      const FreshWorld fresh;  // so this is step 0
      const Status status =
          all_reduce(MPI_IN_PLACE, values.data(), kN, Dtype::kFloat32, Reduction::kSum,
                     fresh.comm(), {.codec = name, .exchange = kind, .seed = fresh.seed()});
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_TRUE(same_bits(values, expected)) << codec;
      EXPECT_TRUE(same_on_all_ranks(values)) << codec;
    }
  }
}

// reduce(values): averages them over all ranks with codec qsgd:bits=2.
template <typename Reduce>
void expect_that_errors_average_out(const Reduce& reduce) {
  if (world_size() == 1) GTEST_SKIP() << "nothing is sent";
  constexpr uint64_t kN = 4096;
  constexpr int kCalls = 64;
  std::vector<float> mean(kN);
  double first = 0;  // the squared error of one call
  double last = 0;   // of the mean of all
  for (int call = 0; call < kCalls; ++call) {
    std::vector<float> values(kN, 0.3f);
    values[0] = 1.0f;
    const Status status = reduce(values);
    ASSERT_TRUE(status.ok()) << status.message();
    for (uint64_t i = 1; i < kN; ++i) {
      mean[i] += values[i] / kCalls;
      if (call == 0) first += (values[i] - 0.3) * (values[i] - 0.3);
    }
  }
  for (uint64_t i = 1; i < kN; ++i) last += (mean[i] - 0.3) * (mean[i] - 0.3);
  EXPECT_GT(first, 0);
  EXPECT_LT(last, first / 16);
}

Status average_drawn(std::vector<float>& values, MPI_Comm comm) {
  return all_reduce(MPI_IN_PLACE, values.data(), values.size(), Dtype::kFloat32,
                    Reduction::kAverage, comm, {.codec = "qsgd:bits=2"});
}

TEST(AllReduce, ErrorsOfDrawsAverageOutOverCalls) {
  expect_that_errors_average_out(
      [](std::vector<float>& values) { return average_drawn(values, MPI_COMM_WORLD); });
}

TEST(AllReduce, ErrorsOfDrawsAverageOutOverCommunicators) {
  expect_that_errors_average_out([](std::vector<float>& values) {
    const FreshWorld fresh;
    return average_drawn(values, fresh.comm());
  });
}

TEST(AllReduce, ErrorsOfDrawsAverageOutOverPersistentOperations) {
  expect_that_errors_average_out([](std::vector<float>& values) {
    Result<Operation> operation =
        all_reduce_init(MPI_IN_PLACE, values.data(), values.size(), Dtype::kFloat32,
                        Reduction::kAverage, MPI_COMM_WORLD, {.codec = "qsgd:bits=2"});
    const Status started = operation.ok() ? operation.value().start() : operation.status();
    return started.ok() ? operation.value().wait() : started;
  });
}

TEST(Communicators, OfOtherRanksDrawOtherNumbers) {
  if (world_size() < 4) GTEST_SKIP() << "two communicators need two ranks each";
  constexpr uint64_t kN = 4096;
  const bool second = my_rank() >= 2;
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, second ? 1 : 0, static_cast<int>(my_rank()), &half);
  std::vector<float> values(kN, 0.3f);
  values[0] = 1.0f;
  const Status status = all_reduce(MPI_IN_PLACE, values.data(), kN, Dtype::kFloat32,
                                   Reduction::kAverage, half, {.codec = "qsgd:bits=2"});
  ASSERT_TRUE(status.ok()) << status.message();
  std::vector<float> of_first = values;
  MPI_Bcast(of_first.data(), kN, MPI_FLOAT, 0, MPI_COMM_WORLD);
  EXPECT_EQ(of_first != values, second);
  MPI_Comm_free(&half);
}

TEST(AllReduce, SixteenBitTypesAreSummedInFloat32AndRoundedOnce) {
  constexpr uint64_t kN = 1000;
  const auto bfloat16 = [](float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  };
  std::vector<uint16_t> values(kN);
  std::vector<uint16_t> expected(kN);
  for (uint64_t i = 0; i < kN; ++i) {
    float sum = 0;
    for (uint32_t rank = 0; rank < world_size(); ++rank) {
      const uint16_t bits = bfloat16(whole_numbers(rank, kN)[i] / 64);
      if (rank == my_rank()) values[i] = bits;
      sum += std::bit_cast<float>(uint32_t{bits} << 16);
    }
    expected[i] = bfloat16(sum);
  }
  std::vector<uint16_t> output(kN);
  Status status = all_reduce(values.data(), output.data(), kN, Dtype::kBfloat16, Reduction::kSum,
                             MPI_COMM_WORLD, {.codec = "raw"});
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(output, expected);

  // float16: 0x3c00 is 1.
  std::vector<uint16_t> ones(kN, 0x3c00);
  status = all_reduce(MPI_IN_PLACE, ones.data(), kN, Dtype::kFloat16, Reduction::kAverage,
                      MPI_COMM_WORLD, {.codec = "raw"});
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(ones, std::vector<uint16_t>(kN, 0x3c00));
}

TEST(AllReduce, NonBlockingOnesMayBeUnderWayTogetherAndEndInAnyOrder) {
  constexpr uint64_t kN = 30000;
  std::vector<float> first = whole_numbers(my_rank(), kN);
  std::vector<float> second = first;
  const Options options{.codec = "raw"};
  Result<Operation> a = iall_reduce(MPI_IN_PLACE, first.data(), kN, Dtype::kFloat32,
                                    Reduction::kSum, MPI_COMM_WORLD, options);
  Result<Operation> b = iall_reduce(MPI_IN_PLACE, second.data(), kN, Dtype::kFloat32,
                                    Reduction::kAverage, MPI_COMM_WORLD, options);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(a.value().start().code(), StatusCode::kUnexpectedMessage);
  for (bool a_done = false, b_done = false; !a_done || !b_done;) {
    for (auto [operation, done] : {std::pair(&a, &a_done), std::pair(&b, &b_done)}) {
      Result<bool> tested = operation->value().test();
      ASSERT_TRUE(tested.ok()) << tested.status().message();
      *done = tested.value();
    }
  }
  EXPECT_EQ(first, sums(kN));
  for (uint64_t i = 0; i < kN; ++i) {
    ASSERT_EQ(second[i], first[i] / static_cast<float>(world_size()));
  }
}

TEST(AllReduce, APersistentOneKeepsItsResiduals) {
  constexpr uint64_t kN = 20000;
  for (const char* kind : kKinds) {
    const char* pull = kind == std::string("broadcast") ? "" : "bf16";  // it has no pulls
    const LayoutOptions layout{.codec = "3lc:s=1.75", .pull_codec = pull, .min_numel = 0};
    Reference reference(kN, layout, kind, Reduction::kAverage);
    std::vector<float> input(kN);
    std::vector<float> output(kN);
    Result<Operation> operation = all_reduce_init(
        input.data(), output.data(), kN, Dtype::kFloat32, Reduction::kAverage, MPI_COMM_WORLD,
        {.codec = "3lc:s=1.75", .pull_codec = pull, .exchange = kind});
    ASSERT_TRUE(operation.ok()) << operation.status().message();
    for (uint64_t step = 0; step < 4; ++step) {
      std::ranges::copy(input_of(my_rank(), kN, step), input.begin());
      ASSERT_TRUE(operation.value().start().ok());
      const Status status = operation.value().wait();
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_TRUE(same_bits(output, reference.step(inputs_of_all(kN, step), step))) << step;
    }
    const ExchangeStats& stats = operation.value().stats();
    EXPECT_EQ(stats.steps, 4u);
    EXPECT_GE(operation.value().traffic().bytes_sent,
              stats.push_bytes_sent + stats.pull_bytes_sent);
  }
}

TEST(AllReduce, ABlockingOneHasNoErrorFeedback) {
  std::vector<float> values(10);
  const Status status = all_reduce(MPI_IN_PLACE, values.data(), 10, Dtype::kFloat32,
                                   Reduction::kSum, MPI_COMM_WORLD, {.codec = "3lc:ef=on"});
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(contains(status.message(), "persistent")) << status.message();
}

TEST(AllReduce, TensorsHaveScalesOfTheirOwnAndSmallOnesGoRaw) {
  std::vector<float> values(20500, 0.0f);
  for (size_t i = 0; i < values.size(); ++i) values[i] = i < 20000 ? 1.0f : 1e-3f;
  Options options{.codec = "3lc", .tensors = {{"weight", {200, 100}}, {"bias", {500}}}};
  Result<Operation> operation =
      all_reduce_init(MPI_IN_PLACE, values.data(), values.size(), Dtype::kFloat32,
                      Reduction::kAverage, MPI_COMM_WORLD, options);
  ASSERT_TRUE(operation.ok()) << operation.status().message();
  ASSERT_TRUE(operation.value().start().ok());
  ASSERT_TRUE(operation.value().wait().ok());
  EXPECT_NEAR(values[0], 1.0f, 1e-6);
  EXPECT_NEAR(values[20499], 1e-3f, 1e-9);
  EXPECT_EQ(operation.value().layout().segments().back().raw_reason, "fewer than two dimensions");
}

TEST(AllReduce, AStepThatIsNotFiniteIsToldOnEveryRankAndTheNextGoesOn) {
  constexpr uint64_t kN = 1000;
  std::vector<float> values(kN, 1.0f);
  Result<Operation> operation =
      all_reduce_init(MPI_IN_PLACE, values.data(), kN, Dtype::kFloat32, Reduction::kAverage,
                      MPI_COMM_WORLD, {.codec = "3lc"});
  ASSERT_TRUE(operation.ok());
  const uint32_t bad = world_size() - 1;
  if (my_rank() == bad) values[123] = std::numeric_limits<float>::quiet_NaN();
  ASSERT_TRUE(operation.value().start().ok());
  const Status status = operation.value().wait();
  if (world_size() > 1) {  // a lone rank encodes nothing
    EXPECT_EQ(status.code(), StatusCode::kNonFinite);
    EXPECT_TRUE(contains(status.message(),
                         "rank " + std::to_string(bad) + " is not finite at element 123 of"))
        << status.message();
    EXPECT_TRUE(std::isnan(values[123]));
  }
  std::ranges::fill(values, 1.0f);
  ASSERT_TRUE(operation.value().start().ok());
  ASSERT_TRUE(operation.value().wait().ok());
  EXPECT_TRUE(std::isfinite(values[123]));
  EXPECT_TRUE(same_on_all_ranks(values));
}

TEST(ReduceScatterAndAllgather, BlocksGoWhereTheyBelong) {
  for (uint64_t n : {0, 1, 1000}) {
    const uint64_t all = n * world_size();
    const std::vector<float> input = whole_numbers(my_rank(), all);
    const std::vector<float> sum = sums(all);
    const std::vector<float> own(sum.begin() + my_rank() * n, sum.begin() + (my_rank() + 1) * n);
    const Options raw{.codec = "raw"};
    std::vector<float> block(n);
    ASSERT_TRUE(reduce_scatter(input.data(), block.data(), n, Dtype::kFloat32, Reduction::kSum,
                               MPI_COMM_WORLD, raw)
                    .ok());
    EXPECT_EQ(block, own);
    std::vector<float> both = input;
    ASSERT_TRUE(reduce_scatter(MPI_IN_PLACE, both.data(), n, Dtype::kFloat32, Reduction::kSum,
                               MPI_COMM_WORLD, raw)
                    .ok());
    both.resize(n);
    EXPECT_EQ(both, own);

    std::vector<float> gathered(all);
    ASSERT_TRUE(
        allgather(own.data(), gathered.data(), n, Dtype::kFloat32, MPI_COMM_WORLD, raw).ok());
    EXPECT_EQ(gathered, sum);
    std::vector<float> in_place(all);
    std::copy(own.begin(), own.end(), in_place.begin() + my_rank() * n);
    ASSERT_TRUE(
        allgather(MPI_IN_PLACE, in_place.data(), n, Dtype::kFloat32, MPI_COMM_WORLD, raw).ok());
    EXPECT_EQ(in_place, sum);

    // bfloat16 holds the inputs but not all of the sums, so the test compares only this rank's
    // block.
    std::vector<uint16_t> bits(n);
    for (uint64_t i = 0; i < n; ++i) {
      bits[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(input[i]) >> 16);
    }
    std::vector<uint16_t> all_bits(all);
    ASSERT_TRUE(
        allgather(bits.data(), all_bits.data(), n, Dtype::kBfloat16, MPI_COMM_WORLD, raw).ok());
    EXPECT_TRUE(same_on_all_ranks(all_bits));
    for (uint64_t i = 0; i < n; ++i) ASSERT_EQ(all_bits[my_rank() * n + i], bits[i]);
  }
}

TEST(ReduceScatterAndAllgather, EverybodyDecodesTheSame) {
  constexpr uint64_t kN = 5000;
  std::vector<float> gathered(kN * world_size());
  const std::vector<float> own = input_of(my_rank(), kN, 3);
  const Status status = allgather(own.data(), gathered.data(), kN, Dtype::kFloat32, MPI_COMM_WORLD,
                                  {.codec = "int8"});
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(same_on_all_ranks(gathered));
  for (uint64_t i = 0; i < kN; ++i) ASSERT_NEAR(gathered[my_rank() * kN + i], own[i], 0.05);
}

TEST(Communicators, TheUsersMessagesStayTheUsers) {
  int box = 0;
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Irecv(&box, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &request);
  std::vector<float> values = whole_numbers(my_rank(), 1000);
  ASSERT_TRUE(all_reduce(MPI_IN_PLACE, values.data(), 1000, Dtype::kFloat32, Reduction::kSum,
                         MPI_COMM_WORLD, {.codec = "raw"})
                  .ok());
  EXPECT_EQ(values, sums(1000));
  int came = 1;
  MPI_Test(&request, &came, MPI_STATUS_IGNORE);
  EXPECT_EQ(came, 0);
  MPI_Cancel(&request);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
}

TEST(Communicators, AnOperationOutlivesTheCommunicatorItWasMadeFor) {
  std::vector<float> values = whole_numbers(my_rank(), 1000);
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  Result<Operation> operation = all_reduce_init(MPI_IN_PLACE, values.data(), 1000, Dtype::kFloat32,
                                                Reduction::kSum, comm, {.codec = "raw"});
  ASSERT_TRUE(operation.ok());
  MPI_Comm_free(&comm);
  ASSERT_TRUE(operation.value().start().ok());
  ASSERT_TRUE(operation.value().wait().ok());
  EXPECT_EQ(values, sums(1000));
}

TEST(Communicators, TwoThreadsWorkOnTwoAtATime) {
  int level = 0;
  MPI_Query_thread(&level);
  if (level < MPI_THREAD_MULTIPLE) GTEST_SKIP() << "this MPI has no MPI_THREAD_MULTIPLE";
  MPI_Comm comms[2];
  for (MPI_Comm& comm : comms) MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  const auto work = [](MPI_Comm comm, uint64_t n) {
    for (int i = 0; i < 5; ++i) {
      std::vector<float> values = whole_numbers(my_rank(), n);
      const Status status = all_reduce(MPI_IN_PLACE, values.data(), n, Dtype::kFloat32,
                                       Reduction::kSum, comm, {.codec = "raw"});
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(values, sums(n));
    }
  };
  std::thread other(work, comms[0], 20000);
  work(comms[1], 30001);
  other.join();
  for (MPI_Comm& comm : comms) MPI_Comm_free(&comm);
}

TEST(Engines, DriveAnyExchange) {
  constexpr uint64_t kN = 50000;
  // Two ranks a machine.
  std::vector<uint32_t> machines;
  for (uint32_t rank = 0; rank < world_size(); ++rank) machines.push_back(rank / 2);
  const auto layout = std::make_shared<const Layout>(
      Layout::create({{"buffer", {kN, 1}}}, machines.back() + 1, {.codec = "3lc"}).value());
  const auto make = [&](uint32_t rank) {
    return make_exchange("hierarchical:between=ring", layout, rank, Execution::create().value(),
                         {.machine_of_rank = machines})
        .value();
  };
  std::vector<std::unique_ptr<Exchange>> exchanges;
  std::vector<Exchange*> pointers;
  for (uint32_t rank = 0; rank < world_size(); ++rank) {
    exchanges.push_back(make(rank));
    pointers.push_back(exchanges.back().get());
  }
  Result<Engine> engine = Engine::create(MPI_COMM_WORLD, make(my_rank()));
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  for (uint64_t step = 0; step < 3; ++step) {
    std::vector<std::vector<float>> inputs = inputs_of_all(kN, step);
    std::vector<float> bucket = inputs[my_rank()];
    std::vector<std::span<float>> buckets(inputs.begin(), inputs.end());
    ASSERT_TRUE(run_loopback_step(pointers, buckets, step).ok());
    ASSERT_TRUE(engine.value().start(bucket, step).ok());
    const Status status = engine.value().wait();
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(same_bits(bucket, inputs[my_rank()]));
  }
}

TEST(Engines, RefuseAnExchangeOfMoreRanks) {
  const auto layout = std::make_shared<const Layout>(
      Layout::create({{"buffer", {100, 1}}}, world_size() + 1, {.codec = "raw"}).value());
  Result<Engine> engine = Engine::create(
      MPI_COMM_WORLD,
      make_exchange("sharded", layout, my_rank(), Execution::create().value()).value());
  ASSERT_TRUE(engine.ok());
  std::vector<float> bucket(100);
  ASSERT_TRUE(engine.value().start(bucket, 0).ok());
  const Status status = engine.value().wait();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(contains(status.message(), "rank " + std::to_string(world_size())))
      << status.message();
}

}  // namespace
}  // namespace gradwire::mpi
