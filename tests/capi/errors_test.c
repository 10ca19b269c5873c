/* Errors through the C API, and their messages. */
#define _POSIX_C_SOURCE 200112L /* setrlimit */

#include <math.h>
#include <pthread.h>
#include <stdlib.h>

#include <sys/resource.h>

#include "capi/check.h"
#include "capi/inputs.h"

enum { kN = 300 };

static float x[kN];
static unsigned char frame[4096];

static void check_messages(void) {
  gw_codec* codec = NULL;
  CHECK(strcmp(gw_last_error_message(), "") == 0);
  CHECK_FAILS(gw_codec_parse("3lz", &codec), GW_UNKNOWN_CODEC, "valid names are: ");
  CHECK_FAILS(gw_codec_parse("3lc:s=2", &codec), GW_BAD_PARAMETER, "[1, 2)");
  CHECK(codec == NULL);
  CHECK_OK(gw_codec_parse("3lc:coder=zre,s=1.5", &codec));
  CHECK(strstr(gw_last_error_message(), "[1, 2)") != NULL); /* a success leaves it alone */
  CHECK(strcmp(gw_codec_text(codec), "3lc:s=1.5") == 0);
  gw_codec_free(codec);

  CHECK(strcmp(gw_strerror(GW_OK), "ok") == 0);
  CHECK(strcmp(gw_strerror(GW_LENGTH_MISMATCH), "length_mismatch") == 0);
  CHECK(strcmp(gw_strerror(GW_OUT_OF_MEMORY), "out_of_memory") == 0);
  CHECK(strcmp(gw_strerror((gw_status)150), "unknown_status") == 0);
  char version[16];
  snprintf(version, sizeof(version), "%d.%d.%d", GW_VERSION_MAJOR, GW_VERSION_MINOR,
           GW_VERSION_PATCH);
  CHECK(strcmp(gw_version(), version) == 0);
}

static void* fail_elsewhere(void* message) {
  gw_codec* codec = NULL;
  const int empty = strcmp(gw_last_error_message(), "") == 0;
  const gw_status status = gw_codec_parse("elsewhere", &codec);
  snprintf(message, 200, "%d %s %s", empty, gw_strerror(status), gw_last_error_message());
  return NULL;
}

/* Each thread has its own message. */
static void check_threads(void) {
  gw_codec* codec = NULL;
  pthread_t thread;
  char message[200] = "";
  CHECK_STATUS(gw_codec_parse("here", &codec), GW_UNKNOWN_CODEC);
  CHECK(pthread_create(&thread, NULL, fail_elsewhere, message) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(strstr(message, "1 unknown_codec unknown codec 'elsewhere'") == message);
  CHECK(strstr(gw_last_error_message(), "'here'") != NULL);
}

static void check_null(void) {
  gw_codec* codec = NULL;
  gw_compressor* compressor = NULL;
  gw_layout* layout = NULL;
  gw_exchange* exchange = NULL;
  gw_frame_info info;
  uint64_t size = 0;
  CHECK_OK(gw_codec_parse("raw", &codec));
  CHECK_FAILS(gw_codec_parse(NULL, &codec), GW_INVALID_ARGUMENT, "text is NULL");
  CHECK_FAILS(gw_codec_parse("raw", NULL), GW_INVALID_ARGUMENT, "codec is NULL");
  CHECK_FAILS(gw_execution_create(NULL, 1, NULL), GW_INVALID_ARGUMENT, "execution is NULL");
  CHECK_FAILS(gw_max_encoded_size(NULL, 1, &size), GW_INVALID_ARGUMENT, "codec is NULL");
  CHECK_FAILS(gw_max_encoded_size(codec, 1, NULL), GW_INVALID_ARGUMENT, "size is NULL");
  CHECK_FAILS(gw_encode(codec, NULL, kN, GW_F32, NULL, frame, sizeof(frame), &size, NULL),
              GW_INVALID_ARGUMENT, "x is NULL");
  CHECK_FAILS(gw_encode(codec, x, kN, GW_F32, NULL, NULL, 0, &size, NULL), GW_INVALID_ARGUMENT,
              "frame is NULL");
  CHECK_FAILS(gw_decode(NULL, 10, x, kN, GW_STORE, NULL), GW_INVALID_ARGUMENT, "frame is NULL");
  CHECK_FAILS(gw_decode(frame, 10, NULL, kN, GW_STORE, NULL), GW_INVALID_ARGUMENT, "out is NULL");
  CHECK_FAILS(gw_frame_inspect(frame, 10, NULL, NULL), GW_INVALID_ARGUMENT, "info is NULL");
  CHECK_FAILS(gw_frame_inspect(NULL, 0, &info, NULL), GW_TRUNCATED, "0 bytes");
  CHECK_FAILS(gw_compressor_create(NULL, 1, 0, 0, &compressor), GW_INVALID_ARGUMENT, "codec");
  CHECK_FAILS(gw_compressor_encode(NULL, x, kN, GW_F32, 0, frame, sizeof(frame), &size, NULL),
              GW_INVALID_ARGUMENT, "compressor is NULL");
  CHECK_FAILS(gw_layout_create(NULL, 1, 1, NULL, &layout), GW_INVALID_ARGUMENT, "tensors is NULL");
  {
    const uint64_t dims[2] = {4, 5};
    const gw_tensor twice[2] = {{"w", dims, 2}, {"w", dims, 1}};
    CHECK_FAILS(gw_layout_create(twice, 2, 1, NULL, &layout), GW_INVALID_ARGUMENT,
                "two tensors have the name 'w'");
  }
  CHECK_FAILS(gw_exchange_create(NULL, 0, NULL, &exchange), GW_INVALID_ARGUMENT, "layout is NULL");
  CHECK_FAILS(gw_exchange_start(NULL, x, kN, 0), GW_INVALID_ARGUMENT, "exchange is NULL");
  gw_codec_free(codec);
  gw_codec_free(NULL);
  gw_execution_free(NULL);
  gw_compressor_free(NULL);
  gw_layout_free(NULL);
  gw_exchange_free(NULL);
  gw_residuals_free(NULL);
}

static void check_arguments(void) {
  gw_codec* codec = NULL;
  gw_execution* execution = NULL;
  gw_compressor* compressor = NULL;
  uint64_t size = 123;
  CHECK_FAILS(gw_execution_create("sse1", 1, &execution), GW_INVALID_ARGUMENT, "scalar");
  CHECK_FAILS(gw_execution_create(NULL, 0, &execution), GW_INVALID_ARGUMENT, "threads");
  CHECK_OK(gw_codec_parse("int8", &codec));
  CHECK_FAILS(gw_encode(codec, x, kN, 3, NULL, frame, sizeof(frame), &size, NULL),
              GW_UNSUPPORTED_DTYPE, "dtype 3");
  CHECK_FAILS(gw_encode(codec, x, kN, -1, NULL, frame, sizeof(frame), &size, NULL),
              GW_UNSUPPORTED_DTYPE, "dtype -1");
  CHECK_FAILS(
      gw_encode(codec, (const char*)x + 2, kN - 1, GW_F32, NULL, frame, sizeof(frame), &size, NULL),
      GW_INVALID_ARGUMENT, "not aligned");
  CHECK_FAILS(
      gw_encode(codec, x, GW_MAX_NUMEL + 1, GW_F32, NULL, frame, sizeof(frame), &size, NULL),
      GW_LIMIT_EXCEEDED, "2^40");
  CHECK_FAILS(gw_max_encoded_size(codec, GW_MAX_NUMEL + 1, &size), GW_LIMIT_EXCEEDED, "2^40");
  CHECK_STATUS(gw_encode(codec, x, kN, GW_F32, NULL, frame, 100, &size, NULL), GW_BUFFER_TOO_SMALL);
  CHECK_STATUS(gw_encode(codec, x, kN, GW_F32, NULL, frame, 10, &size, NULL), GW_BUFFER_TOO_SMALL);
  CHECK(size == 123);
  CHECK_FAILS(gw_compressor_create(codec, GW_MAX_NUMEL + 1, 0, 0, &compressor), GW_LIMIT_EXCEEDED,
              "2^40");
  CHECK(compressor == NULL);
  gw_codec_free(codec);
}

/* A residual of 4 TiB does not fit. Sanitizers would end a program that asks for so much. */
static void check_memory(void) {
#ifndef TEST_SANITIZED
  gw_codec* codec = NULL;
  gw_compressor* compressor = NULL;
  struct rlimit limit;
  CHECK(getrlimit(RLIMIT_AS, &limit) == 0);
  if (limit.rlim_cur > (rlim_t)1 << 40) limit.rlim_cur = (rlim_t)1 << 40;
  CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
  CHECK_OK(gw_codec_parse("int8", &codec));
  CHECK_STATUS(gw_compressor_create(codec, GW_MAX_NUMEL, 0, 0, &compressor), GW_OUT_OF_MEMORY);
  CHECK(strcmp(gw_last_error_message(), "out of memory") == 0);
  CHECK(compressor == NULL);
  gw_codec_free(codec);
#endif
}

static void check_damage(void) {
  gw_codec* codec = NULL;
  uint64_t size = 0;
  float out[kN];
  CHECK_OK(gw_codec_parse("3lc", &codec));
  CHECK_OK(gw_encode(codec, x, kN, GW_F32, NULL, frame, sizeof(frame), &size, NULL));
  CHECK_OK(gw_decode(frame, size, out, kN, GW_STORE, NULL));
  CHECK_FAILS(gw_decode(frame, size, out, kN - 1, GW_STORE, NULL), GW_LENGTH_MISMATCH, "300");
  CHECK_FAILS(gw_decode(frame, size, out, kN, 2, NULL), GW_INVALID_ARGUMENT, "mode 2");
  CHECK_STATUS(gw_decode(frame, size - 1, out, kN, GW_STORE, NULL), GW_TRUNCATED);
  CHECK_STATUS(gw_decode(frame, size + 1, out, kN, GW_STORE, NULL), GW_TRAILING_BYTES);
  frame[size - 1] ^= 1;
  CHECK_STATUS(gw_decode(frame, size, out, kN, GW_STORE, NULL), GW_CHECKSUM_MISMATCH);
  frame[0] = 'X';
  CHECK_STATUS(gw_decode(frame, size, out, kN, GW_STORE, NULL), GW_BAD_MAGIC);
  gw_codec_free(codec);
}

static void check_non_finite(void) {
  gw_codec* codec = NULL;
  gw_compressor* compressor = NULL;
  gw_frame_info info;
  uint64_t size = 0;
  float out[kN];
  float owed[kN];
  float owed_after[kN];
  CHECK_OK(gw_codec_parse("3lc", &codec));
  CHECK_OK(gw_compressor_create(codec, kN, 0, 0, &compressor));
  CHECK(gw_compressor_residual_numel(compressor) == kN);
  CHECK_OK(gw_compressor_encode(compressor, x, kN, GW_F32, 0, frame, sizeof(frame), &size, NULL));
  CHECK_OK(gw_compressor_get_residual(compressor, owed, kN));
  const float kept = x[77];
  x[77] = NAN;
  CHECK_FAILS(gw_compressor_encode(compressor, x, kN, GW_F32, 1, frame, sizeof(frame), &size, NULL),
              GW_NON_FINITE, "77");
  CHECK(size == 32);
  CHECK_OK(gw_frame_inspect(frame, size, &info, NULL));
  CHECK(info.non_finite == 1 && info.n == kN);
  CHECK_OK(gw_decode(frame, size, out, kN, GW_STORE, NULL));
  CHECK(isnan(out[0]) && isnan(out[kN - 1]));
  CHECK_OK(gw_compressor_get_residual(compressor, owed_after, kN));
  CHECK(memcmp(owed, owed_after, sizeof(owed)) == 0);
  CHECK_FAILS(gw_compressor_set_residual(compressor, x, kN), GW_NON_FINITE, "value 77");
  x[77] = kept;
  CHECK_OK(gw_compressor_set_residual(compressor, x, kN));
  CHECK_OK(gw_compressor_get_residual(compressor, owed, kN));
  CHECK(memcmp(owed, x, sizeof(x)) == 0);
  CHECK_FAILS(gw_compressor_set_residual(compressor, x, kN - 1), GW_LENGTH_MISMATCH, "299");
  CHECK_FAILS(
      gw_compressor_encode(compressor, x, kN - 1, GW_F32, 1, frame, sizeof(frame), &size, NULL),
      GW_LENGTH_MISMATCH, "299");
  gw_compressor_free(compressor);
  gw_codec_free(codec);

  CHECK_OK(gw_codec_parse("3lc:ef=off", &codec));
  CHECK_OK(gw_compressor_create(codec, kN, 0, 0, &compressor));
  CHECK(gw_compressor_residual_numel(compressor) == 0);
  CHECK_OK(gw_compressor_get_residual(compressor, NULL, 0));
  gw_compressor_free(compressor);
  gw_codec_free(codec);
}

int main(void) {
  fill_gradient(x, kN, 2);
  check_messages();
  check_threads();
  check_null();
  check_arguments();
  check_memory();
  check_damage();
  check_non_finite();
  return check_result();
}
