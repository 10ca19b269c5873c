/* An engine in C that keeps all ranks in one process. */
#include <math.h>
#include <stdlib.h>

#include "capi/check.h"
#include "capi/cpp_reference.h"
#include "capi/inputs.h"

enum { kMaxWorld = 5, kN = 30000 };

static float buckets[kMaxWorld * kN];
static float expected[kMaxWorld * kN];

static gw_layout* make_layout(const char* codec, uint32_t world) {
  const uint64_t dims[] = {kN / 4, 4};
  const gw_tensor tensor = {.name = "weight", .dims = dims, .dim_count = 2};
  gw_layout_options options;
  gw_layout_options_init(&options);
  options.codec = codec;
  gw_layout* layout = NULL;
  CHECK_OK(gw_layout_create(&tensor, 1, world, &options, &layout));
  return layout;
}

/* Makes the ranks and frees the layout, which they keep. */
static void make_ranks(gw_exchange** ranks, gw_layout* layout, uint32_t world,
                       const gw_exchange_options* options) {
  for (uint32_t rank = 0; rank < world; ++rank) {
    ranks[rank] = NULL;
    CHECK_OK(gw_exchange_create(layout, rank, options, &ranks[rank]));
  }
  gw_layout_free(layout);
}

static void free_ranks(gw_exchange** ranks, uint32_t world) {
  for (uint32_t rank = 0; rank < world; ++rank) gw_exchange_free(ranks[rank]);
}

/* Delivers the messages of `rank`, one at a time. */
static gw_status deliver(gw_exchange** ranks, uint32_t rank, int* moved) {
  for (;;) {
    gw_message message;
    size_t count = 0;
    gw_status status = gw_exchange_take_outgoing(ranks[rank], &message, 1, &count);
    if (status != GW_OK || count == 0) return status;
    *moved = 1;
    status = gw_exchange_receive(ranks[message.peer], rank, message.bytes, message.size);
    if (status != GW_OK) return status;
  }
}

static gw_status run_step(gw_exchange** ranks, uint32_t world, uint64_t step) {
  for (uint32_t rank = 0; rank < world; ++rank) {
    const gw_status status = gw_exchange_start(ranks[rank], buckets + rank * kN, kN, step);
    if (status != GW_OK) return status;
  }
  int moved = 1;
  while (moved) {
    moved = 0;
    for (uint32_t rank = 0; rank < world; ++rank) {
      const gw_status status = deliver(ranks, rank, &moved);
      if (status != GW_OK) return status;
    }
  }
  for (uint32_t rank = 0; rank < world; ++rank) {
    uint32_t peers[kMaxWorld];
    size_t count = 0;
    CHECK_OK(gw_exchange_awaiting(ranks[rank], peers, kMaxWorld, &count));
    CHECK(count == 0 && gw_exchange_done(ranks[rank]));
  }
  return GW_OK;
}

static void check_average(const char* kind, const char* codec, uint32_t world) {
  gw_exchange* ranks[kMaxWorld];
  gw_exchange_options options;
  gw_exchange_options_init(&options);
  options.kind = kind;
  make_ranks(ranks, make_layout(codec, world), world, &options);
  for (uint32_t rank = 0; rank < world; ++rank) {
    fill_gradient(buckets + rank * kN, kN, rank);
    CHECK_OK(gw_exchange_check_peer(ranks[0], rank, gw_exchange_description(ranks[rank])));
  }
  memcpy(expected, buckets, world * kN * sizeof(float));
  CHECK_OK(run_step(ranks, world, 3));
  CHECK(cpp_average(kind, codec, world, expected, kN, 3));
  CHECK(memcmp(buckets, expected, world * kN * sizeof(float)) == 0);
  for (uint32_t rank = 1; rank < world; ++rank) {
    CHECK(memcmp(buckets, buckets + rank * kN, kN * sizeof(float)) == 0);
  }
  gw_exchange_stats stats;
  CHECK_OK(gw_exchange_get_stats(ranks[0], &stats));
  CHECK(stats.steps == 1 && stats.non_finite_steps == 0);
  CHECK((stats.push_bytes_sent > 0) == (world > 1));
  free_ranks(ranks, world);
}

static void check_start_and_receive(void) {
  gw_exchange* ranks[2];
  uint32_t peer = 9;
  size_t count = 9;
  gw_message messages[2];
  make_ranks(ranks, make_layout("3lc", 2), 2, NULL);
  fill_gradient(buckets, 2 * kN, 1);
  CHECK_FAILS(gw_exchange_retract(ranks[0]), GW_UNEXPECTED_MESSAGE, "no step");
  CHECK_FAILS(gw_exchange_start(ranks[0], buckets, kN - 1, 0), GW_LENGTH_MISMATCH, "29999");
  CHECK_OK(gw_exchange_start(ranks[0], buckets, kN, 0));
  CHECK_FAILS(gw_exchange_start(ranks[0], buckets, kN, 0), GW_UNEXPECTED_MESSAGE, "not ended");
  CHECK_FAILS(gw_exchange_awaiting(ranks[0], NULL, 0, &count), GW_BUFFER_TOO_SMALL, "1 ranks");
  CHECK(count == 1);
  CHECK_OK(gw_exchange_awaiting(ranks[0], &peer, 1, &count));
  CHECK(count == 1 && peer == 1);
  CHECK_OK(gw_exchange_start(ranks[1], buckets + kN, kN, 0));
  CHECK_OK(gw_exchange_take_outgoing(ranks[1], messages, 2, &count));
  CHECK(count == 1 && messages[0].peer == 0);
  CHECK(gw_exchange_max_message_size(ranks[0]) >= messages[0].size);
  CHECK_STATUS(gw_exchange_receive(ranks[0], 1, messages[0].bytes, messages[0].size - 1),
               GW_CHECKSUM_MISMATCH);
  free_ranks(ranks, 2);

  make_ranks(ranks, make_layout("3lc", 2), 2, NULL);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    CHECK_OK(gw_exchange_start(ranks[rank], buckets + rank * kN, kN, 0));
  }
  CHECK_OK(gw_exchange_take_outgoing(ranks[1], messages, 2, &count));
  CHECK_OK(gw_exchange_receive(ranks[0], 1, messages[0].bytes, messages[0].size));
  CHECK_STATUS(gw_exchange_receive(ranks[0], 1, messages[0].bytes, messages[0].size),
               GW_UNEXPECTED_MESSAGE);
  free_ranks(ranks, 2);
}

static void check_peers(void) {
  gw_exchange* ranks[1];
  gw_exchange* others[1];
  make_ranks(ranks, make_layout("3lc", 2), 1, NULL);
  make_ranks(others, make_layout("int8", 2), 1, NULL);
  CHECK_FAILS(gw_exchange_check_peer(ranks[0], 1, gw_exchange_description(others[0])),
              GW_PEER_MISMATCH, "int8");
  free_ranks(ranks, 1);
  free_ranks(others, 1);

  gw_layout* layout = make_layout("3lc", 2);
  gw_exchange* exchange = NULL;
  gw_exchange_options options;
  gw_exchange_options_init(&options);
  CHECK_FAILS(gw_exchange_create(layout, 2, &options, &exchange), GW_INVALID_ARGUMENT, "rank 2");
  options.kind = "star";
  CHECK_FAILS(gw_exchange_create(layout, 0, &options, &exchange), GW_INVALID_ARGUMENT,
              "sharded, ring");
  gw_layout_free(layout);
}

static gw_status subtract_one(float* bucket, uint64_t n, void* data) {
  *(int*)data += 1;
  for (uint64_t i = 0; i < n; ++i) bucket[i] -= 1;
  return GW_OK;
}

static gw_status refuse(float* bucket, uint64_t n, void* data) {
  (void)bucket;
  (void)n;
  (void)data;
  return GW_OUT_OF_MEMORY;
}

static void check_update(void) {
  gw_exchange* ranks[2];
  int calls = 0;
  gw_exchange_options options;
  gw_exchange_options_init(&options);
  options.update = subtract_one;
  options.update_data = &calls;
  make_ranks(ranks, make_layout("raw", 2), 2, &options);
  for (int i = 0; i < 2 * kN; ++i) buckets[i] = 2;
  CHECK_OK(run_step(ranks, 2, 0));
  CHECK(calls == 2);
  for (int i = 0; i < 2 * kN; ++i) {
    if (buckets[i] != 1) {
      CHECK(buckets[i] == 1);
      break;
    }
  }
  free_ranks(ranks, 2);

  options.update = refuse;
  make_ranks(ranks, make_layout("raw", 2), 2, &options);
  CHECK_FAILS(run_step(ranks, 2, 0), GW_OUT_OF_MEMORY, "the update failed");
  free_ranks(ranks, 2);

  gw_layout* layout = make_layout("raw", 2);
  options.kind = "ring";
  CHECK_FAILS(gw_exchange_create(layout, 0, &options, &ranks[0]), GW_INVALID_ARGUMENT, "update");
  gw_layout_free(layout);
}

static void check_non_finite(void) {
  gw_exchange* ranks[2];
  gw_non_finite where = {.rank = 9, .tensor = "", .element = 0};
  make_ranks(ranks, make_layout("3lc", 2), 2, NULL);
  fill_gradient(buckets, 2 * kN, 1);
  CHECK(!gw_exchange_non_finite(ranks[0], &where) && where.rank == 9);
  buckets[kN + 77] = INFINITY;
  CHECK_OK(run_step(ranks, 2, 0));
  for (uint32_t rank = 0; rank < 2; ++rank) {
    CHECK(gw_exchange_non_finite(ranks[rank], &where));
    CHECK(where.rank == 1 && where.element == 77 && strcmp(where.tensor, "weight") == 0);
    CHECK(isnan(buckets[rank * kN]));
  }
  free_ranks(ranks, 2);
}

/* Moves the residuals of one set of ranks to another set. */
static void check_residuals(void) {
  gw_exchange* from[2];
  gw_exchange* to[2];
  make_ranks(from, make_layout("3lc", 2), 2, NULL);
  make_ranks(to, make_layout("3lc", 2), 2, NULL);
  fill_gradient(buckets, 2 * kN, 1);
  CHECK_OK(run_step(from, 2, 0));
  for (uint32_t rank = 0; rank < 2; ++rank) {
    gw_residuals* residuals = NULL;
    gw_residuals* copied = NULL;
    gw_residual_piece piece;
    gw_residual_piece copy;
    CHECK_OK(gw_exchange_export_residuals(from[rank], &residuals));
    CHECK(gw_residuals_count(residuals) == 2);
    CHECK_FAILS(gw_residuals_at(residuals, 2, &piece), GW_INVALID_ARGUMENT, "index 2");
    for (size_t i = 0; i < 2; ++i) {
      CHECK_OK(gw_residuals_at(residuals, i, &piece));
      CHECK(strcmp(piece.tensor, "weight") == 0 && (piece.offset == 0) == (i == 0));
      CHECK(piece.direction == (i == rank ? GW_PULL : GW_PUSH));
      CHECK_OK(gw_exchange_import_residual(to[rank], &piece));
    }
    CHECK_OK(gw_exchange_scale_residuals(to[rank], 2));
    CHECK_FAILS(gw_exchange_scale_residuals(to[rank], NAN), GW_INVALID_ARGUMENT, "finite");
    CHECK_OK(gw_exchange_export_residuals(to[rank], &copied));
    CHECK_OK(gw_residuals_at(copied, 1, &copy));
    CHECK_OK(gw_residuals_at(residuals, 1, &piece));
    CHECK(piece.values[5] != 0 && copy.values[5] == 2 * piece.values[5]);
    piece.direction = GW_PUSH_AND_PULL;
    CHECK_FAILS(gw_exchange_import_residual(to[rank], &piece), GW_INVALID_ARGUMENT, "of a push");
    piece.direction = GW_PUSH;
    piece.tensor = "bias";
    CHECK_FAILS(gw_exchange_import_residual(to[rank], &piece), GW_INVALID_ARGUMENT, "bias");
    gw_residuals_free(residuals);
    gw_residuals_free(copied);
    CHECK_OK(gw_exchange_retract(from[rank]));
    CHECK_FAILS(gw_exchange_retract(from[rank]), GW_UNEXPECTED_MESSAGE, "already");
    CHECK_STATUS(gw_exchange_start(from[rank], buckets, 1, 1), GW_LENGTH_MISMATCH);
    CHECK_FAILS(gw_exchange_retract(from[rank]), GW_UNEXPECTED_MESSAGE, "already");
  }
  free_ranks(from, 2);
  free_ranks(to, 2);
}

static void check_layout(void) {
  const uint64_t matrix[] = {100, 40};
  const uint64_t vector[] = {100};
  const gw_tensor tensors[] = {{"a.weight", matrix, 2}, {"a.bias", vector, 1}, {"b", matrix, 2}};
  const gw_rule rules[] = {{"a.*", "int8", GW_PULL}, {"zzz*", "raw", GW_PUSH_AND_PULL}};
  const char* const exclude[] = {"b"};
  gw_layout_options options;
  gw_layout* layout = NULL;
  gw_segment segment;
  gw_layout_options_init(&options);
  options.rules = rules;
  options.rule_count = 2;
  options.exclude = exclude;
  options.exclude_count = 1;
  CHECK_OK(gw_layout_create(tensors, 3, 1, &options, &layout));
  CHECK(gw_layout_numel(layout) == 8100);
  CHECK(gw_layout_segment_count(layout) == 3);
  CHECK_OK(gw_layout_segment(layout, 0, &segment));
  CHECK(strcmp(segment.push_codec, "3lc:s=1") == 0);
  CHECK(strcmp(segment.pull_codec, "int8") == 0);
  CHECK(strcmp(segment.raw_reason, "") == 0);
  CHECK_OK(gw_layout_segment(layout, 2, &segment));
  CHECK(strcmp(segment.tensor, "b") == 0 && segment.bucket_offset == 4100 && segment.n == 4000);
  CHECK(strcmp(segment.push_codec, "raw") == 0);
  CHECK(strstr(segment.raw_reason, "excluded") != NULL);
  CHECK_FAILS(gw_layout_segment(layout, 3, &segment), GW_INVALID_ARGUMENT, "index 3");
  CHECK(strcmp(gw_layout_unmatched(layout, 0), "zzz*") == 0);
  CHECK(gw_layout_unmatched(layout, 1) == NULL);
  gw_layout_free(layout);

  layout = NULL;
  CHECK_STATUS(gw_layout_create(tensors, 3, 0, NULL, &layout), GW_INVALID_ARGUMENT);
  options.codec = "3lz";
  CHECK_STATUS(gw_layout_create(tensors, 3, 1, &options, &layout), GW_UNKNOWN_CODEC);
  options.codec = "3lc";
  const gw_rule bad_direction = {"a.*", "int8", 3};
  options.rules = &bad_direction;
  options.rule_count = 1;
  CHECK_FAILS(gw_layout_create(tensors, 3, 1, &options, &layout), GW_INVALID_ARGUMENT,
              "direction 3");
  CHECK(layout == NULL);
}

int main(void) {
  const char* const kinds[] = {"sharded", "ring", "broadcast"};
  const char* const codecs[] = {"raw", "3lc:s=1.75", "terngrad", "qsgd:bits=4"};
  check_layout();
  for (size_t i = 0; i < 3; ++i) {
    for (size_t k = 0; k < 4; ++k) {
      for (uint32_t world = 1; world <= kMaxWorld; ++world) {
        check_average(kinds[i], codecs[k], world);
      }
    }
  }
  check_start_and_receive();
  check_peers();
  check_update();
  check_non_finite();
  check_residuals();
  return check_result();
}
