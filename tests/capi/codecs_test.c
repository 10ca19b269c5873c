/* Every codec through C: the same bytes and values as through C++. */
#include <stdlib.h>

#include "capi/check.h"
#include "capi/cpp_reference.h"
#include "capi/inputs.h"

enum { kN = 50021 }; /* two chunks, a ragged tail */

static float x[kN];
static uint16_t bits[kN];

static void check_frame(const char* name, const void* input, uint64_t n, gw_dtype dtype) {
  const gw_draw draw = {.seed = 7, .stream = 11, .step = 13};
  gw_codec* codec = NULL;
  CHECK_OK(gw_codec_parse(name, &codec));
  uint64_t room = 0;
  CHECK_OK(gw_max_encoded_size(codec, n, &room));
  unsigned char* frame = malloc(room);
  unsigned char* expected = malloc(room);
  uint64_t size = 0;
  CHECK_OK(gw_encode(codec, input, n, dtype, &draw, frame, room, &size, NULL));
  CHECK(size >= 32 && size <= room);
  CHECK(cpp_encode(name, input, n, dtype, draw, expected, room) == size);
  CHECK(memcmp(frame, expected, size) == 0);

  gw_frame_info info;
  gw_codec* found = NULL;
  CHECK_OK(gw_frame_inspect(frame, size, &info, &found));
  CHECK(info.n == n && info.dtype == dtype && info.payload_size == size - 32);
  CHECK(info.non_finite == 0);
  CHECK(strcmp(gw_codec_get_info(found)->name, gw_codec_get_info(codec)->name) == 0);
  gw_codec_free(found);

  for (int mode = GW_STORE; mode <= GW_ADD; ++mode) {
    float* out = malloc((n + 1) * sizeof(float));
    float* out_expected = malloc((n + 1) * sizeof(float));
    for (uint64_t i = 0; i <= n; ++i) out[i] = out_expected[i] = (float)i;
    CHECK_OK(gw_decode(frame, size, out, n, mode, NULL));
    CHECK(cpp_decode(frame, size, out_expected, n, mode));
    CHECK(memcmp(out, out_expected, (n + 1) * sizeof(float)) == 0);
    free(out);
    free(out_expected);
  }
  free(frame);
  free(expected);
  gw_codec_free(codec);
}

static void check_compressor(const char* name) {
  enum { kSteps = 3 };
  gw_codec* codec = NULL;
  gw_compressor* compressor = NULL;
  CHECK_OK(gw_codec_parse(name, &codec));
  CHECK_OK(gw_compressor_create(codec, kN, 5, 6, &compressor));
  gw_codec_free(codec);
  const uint64_t room = gw_compressor_max_encoded_size(compressor);
  unsigned char* frame = malloc(room);
  unsigned char* expected = malloc(room);
  uint64_t size = 0;
  for (uint64_t step = 0; step < kSteps; ++step) {
    CHECK_OK(gw_compressor_encode(compressor, x, kN, GW_F32, step, frame, room, &size, NULL));
  }
  CHECK(cpp_compress(name, x, kN, GW_F32, 5, 6, kSteps, expected, room) == size);
  CHECK(memcmp(frame, expected, size) == 0);
  gw_compressor_free(compressor);
  free(frame);
  free(expected);
}

static void check_list(void) {
  CHECK(gw_codec_count() >= 12);
  CHECK(gw_codec_info_at(gw_codec_count()) == NULL);
  int found_s = 0;
  for (size_t i = 0; i < gw_codec_count(); ++i) {
    const gw_codec_info* info = gw_codec_info_at(i);
    CHECK(strlen(info->name) > 0 && strlen(info->summary) > 0 && strlen(info->source) > 0);
    for (size_t k = 0; k < info->parameter_count; ++k) {
      const gw_parameter_info* parameter = &info->parameters[k];
      CHECK(strlen(parameter->name) > 0 && strlen(parameter->values) > 0);
      CHECK(strlen(parameter->help) > 0);
      if (strcmp(info->name, "3lc") == 0 && strcmp(parameter->name, "s") == 0) {
        found_s = strcmp(parameter->values, "[1, 2)") == 0;
      }
    }
  }
  CHECK(found_s);
}

/* Targets and threads do not change the bytes. */
static void check_executions(void) {
  gw_codec* codec = NULL;
  CHECK_OK(gw_codec_parse("qsgd:bits=4", &codec));
  uint64_t room = 0;
  CHECK_OK(gw_max_encoded_size(codec, kN, &room));
  unsigned char* frame = malloc(room);
  unsigned char* expected = malloc(room);
  uint64_t expected_size = 0;
  CHECK_OK(gw_encode(codec, x, kN, GW_F32, NULL, expected, room, &expected_size, NULL));
  for (size_t i = 0; gw_simd_target(i) != NULL; ++i) {
    gw_execution* execution = NULL;
    CHECK_OK(gw_execution_create(gw_simd_target(i), 2, &execution));
    CHECK(strcmp(gw_execution_target(execution), gw_simd_target(i)) == 0);
    CHECK(gw_execution_threads(execution) == 2);
    uint64_t size = 0;
    CHECK_OK(gw_encode(codec, x, kN, GW_F32, NULL, frame, room, &size, execution));
    CHECK(size == expected_size && memcmp(frame, expected, size) == 0);
    gw_execution_free(execution);
  }
  free(frame);
  free(expected);
  gw_codec_free(codec);
}

int main(void) {
  fill_gradient(x, kN, 1);
  check_list();
  check_executions();
  for (size_t i = 0; i < gw_codec_count(); ++i) {
    const char* name = gw_codec_info_at(i)->name;
    printf("%s\n", name);
    check_frame(name, x, kN, GW_F32);
    check_frame(name, NULL, 0, GW_F32);
    for (uint64_t k = 0; k < kN; ++k) bits[k] = to_bf16(x[k]);
    check_frame(name, bits, kN, GW_BF16);
    for (uint64_t k = 0; k < kN; ++k) bits[k] = to_f16(x[k]);
    check_frame(name, bits, kN, GW_F16);
    check_compressor(name);
  }
  check_compressor("3lc:s=1.75,residual=bf16");
  return check_result();
}
