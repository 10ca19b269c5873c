/* Checks for the tests in C: a failed one is printed and counted; main returns check_result(). */
#ifndef TESTS_CAPI_CHECK_H_
#define TESTS_CAPI_CHECK_H_

#include <stdio.h>
#include <string.h>

#include "gradwire/gradwire.h"

static int check_failures = 0;

static inline void check_at(int holds, const char* what, const char* file, int line) {
  if (holds) return;
  ++check_failures;
  printf("%s:%d: failed: %s (last error: %s)\n", file, line, what, gw_last_error_message());
}

static inline void check_status_at(gw_status got, gw_status wanted, const char* what,
                                   const char* file, int line) {
  if (got == wanted) return;
  ++check_failures;
  printf("%s:%d: %s gave %s, expected %s (last error: %s)\n", file, line, what, gw_strerror(got),
         gw_strerror(wanted), gw_last_error_message());
}

static inline int check_result(void) {
  if (check_failures != 0) printf("%d checks failed\n", check_failures);
  return check_failures != 0;
}

#define CHECK(condition) check_at(!!(condition), #condition, __FILE__, __LINE__)
#define CHECK_STATUS(call, wanted) check_status_at((call), (wanted), #call, __FILE__, __LINE__)
#define CHECK_OK(call) CHECK_STATUS(call, GW_OK)
/* Checks that the call fails with this status and that the message contains `part`. */
#define CHECK_FAILS(call, wanted, part) \
  (CHECK_STATUS(call, wanted), CHECK(strstr(gw_last_error_message(), part) != NULL))

#endif /* TESTS_CAPI_CHECK_H_ */
