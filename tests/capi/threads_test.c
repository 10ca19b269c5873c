/* 32 threads at once, each with handles of its own but for one codec that all share: the bytes are
   those of one thread, and errors are those of the thread. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "capi/check.h"
#include "capi/inputs.h"

enum { kThreads = 32, kN = 9001, kRounds = 20 };

static float x[kN];
static gw_codec* shared;
static unsigned char* expected;
static uint64_t expected_size;

/* Returns the number of failures: CHECK counts without a lock. */
static void* work(void* number) {
  const uint64_t mine = *(const uint64_t*)number;
  uint64_t room = 0;
  uint64_t size = 0;
  intptr_t failures = gw_max_encoded_size(shared, kN, &room) != GW_OK;
  unsigned char* frame = malloc(room);
  float* out = malloc(kN * sizeof(float));
  gw_execution* execution = NULL;
  failures += gw_execution_create(NULL, 1 + (int)(mine % 3), &execution) != GW_OK;
  for (int round = 0; round < kRounds; ++round) {
    gw_codec* own = NULL;
    failures += gw_codec_parse("3lc:s=1.5,coder=rice", &own) != GW_OK;
    failures += gw_encode(own, x, kN, GW_F32, NULL, frame, room, &size, execution) != GW_OK;
    failures += size != expected_size || memcmp(frame, expected, size) != 0;
    failures += gw_encode(shared, x, kN, GW_F32, NULL, frame, room, &size, NULL) != GW_OK;
    failures += size != expected_size || memcmp(frame, expected, size) != 0;
    failures += gw_decode(frame, size, out, kN, GW_STORE, execution) != GW_OK;
    failures +=
        gw_decode(frame, size, out, kN - 1 - mine, GW_STORE, execution) != GW_LENGTH_MISMATCH;
    char length[32];
    snprintf(length, sizeof length, "%d", (int)(kN - 1 - mine));
    failures += strstr(gw_last_error_message(), length) == NULL;
    gw_codec_free(own);
  }
  gw_execution_free(execution);
  free(out);
  free(frame);
  return (void*)failures;
}

int main(void) {
  pthread_t threads[kThreads];
  uint64_t numbers[kThreads];
  uint64_t room = 0;
  fill_gradient(x, kN, 3);
  CHECK_OK(gw_codec_parse("3lc:s=1.5,coder=rice", &shared));
  CHECK_OK(gw_max_encoded_size(shared, kN, &room));
  expected = malloc(room);
  CHECK_OK(gw_encode(shared, x, kN, GW_F32, NULL, expected, room, &expected_size, NULL));
  for (uint64_t i = 0; i < kThreads; ++i) {
    numbers[i] = i;
    CHECK(pthread_create(&threads[i], NULL, work, &numbers[i]) == 0);
  }
  for (int i = 0; i < kThreads; ++i) {
    void* failures = NULL;
    CHECK(pthread_join(threads[i], &failures) == 0);
    CHECK((intptr_t)failures == 0);
  }
  free(expected);
  gw_codec_free(shared);
  return check_result();
}
