/* 32 threads at once, each with handles of its own but for codecs that all share: the bytes are
   those of one thread, and errors are those of the thread. The tensor is so large that executions
   of two and three threads start these. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "capi/check.h"
#include "capi/inputs.h"

enum { kThreads = 32, kN = 33 * 40960 + 3, kRounds = 2 };

static const char* const kCodecs[] = {"3lc:s=1.5,coder=rice", "qsgd:coder=elias",
                                      "topk:ratio=0.02,index=rice", "int8:bucket=500"};
enum { kCodecCount = sizeof kCodecs / sizeof kCodecs[0] };

static float x[kN];
static gw_codec* shared[kCodecCount];
static unsigned char* expected[kCodecCount];
static uint64_t expected_size[kCodecCount];

/* Returns the number of failures: CHECK counts without a lock. */
static intptr_t try_codec(int codec, uint64_t mine, float* out, gw_execution* execution) {
  uint64_t room = 0;
  uint64_t size = 0;
  gw_codec* own = NULL;
  intptr_t failures = gw_max_encoded_size(shared[codec], kN, &room) != GW_OK;
  unsigned char* frame = malloc(room);
  failures += gw_codec_parse(kCodecs[codec], &own) != GW_OK;
  failures += gw_encode(own, x, kN, GW_F32, NULL, frame, room, &size, execution) != GW_OK;
  failures += size != expected_size[codec] || memcmp(frame, expected[codec], size) != 0;
  failures += gw_encode(shared[codec], x, kN, GW_F32, NULL, frame, room, &size, NULL) != GW_OK;
  failures += size != expected_size[codec] || memcmp(frame, expected[codec], size) != 0;
  failures += gw_decode(frame, size, out, kN, GW_STORE, execution) != GW_OK;
  failures += gw_decode(frame, size, out, kN - 1 - mine, GW_STORE, execution) != GW_LENGTH_MISMATCH;
  char length[32];
  snprintf(length, sizeof length, "%d", (int)(kN - 1 - mine));
  failures += strstr(gw_last_error_message(), length) == NULL;
  gw_codec_free(own);
  free(frame);
  return failures;
}

static void* work(void* number) {
  const uint64_t mine = *(const uint64_t*)number;
  float* out = malloc(kN * sizeof(float));
  gw_execution* execution = NULL;
  intptr_t failures = gw_execution_create(NULL, 1 + (int)(mine % 3), &execution) != GW_OK;
  for (int i = 0; i < kRounds * kCodecCount; ++i) {
    failures += try_codec((int)(mine + (uint64_t)i) % kCodecCount, mine, out, execution);
  }
  gw_execution_free(execution);
  free(out);
  return (void*)failures;
}

int main(void) {
  pthread_t threads[kThreads];
  uint64_t numbers[kThreads];
  fill_gradient(x, kN, 3);
  for (int i = 0; i < kCodecCount; ++i) {
    uint64_t room = 0;
    CHECK_OK(gw_codec_parse(kCodecs[i], &shared[i]));
    CHECK_OK(gw_max_encoded_size(shared[i], kN, &room));
    expected[i] = malloc(room);
    CHECK_OK(gw_encode(shared[i], x, kN, GW_F32, NULL, expected[i], room, &expected_size[i], NULL));
  }
  for (uint64_t i = 0; i < kThreads; ++i) {
    numbers[i] = i;
    CHECK(pthread_create(&threads[i], NULL, work, &numbers[i]) == 0);
  }
  for (int i = 0; i < kThreads; ++i) {
    void* failures = NULL;
    CHECK(pthread_join(threads[i], &failures) == 0);
    CHECK((intptr_t)failures == 0);
  }
  for (int i = 0; i < kCodecCount; ++i) {
    free(expected[i]);
    gw_codec_free(shared[i]);
  }
  return check_result();
}
