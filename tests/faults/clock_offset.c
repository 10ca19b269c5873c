/* Shifts the wall clock of a process that has this library in LD_PRELOAD.
 *
 * The offset, in seconds, is the first int64 of the file that FAULTS_CLOCK names. It may change at
 * any time, like the clock of a machine that is set. Shifted: CLOCK_REALTIME, gettimeofday and
 * time, and waits until a time of this clock (pthread_cond_timedwait, sem_timedwait), which the
 * kernel would end early or late after a jump. CLOCK_MONOTONIC never jumps and stays as it is.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>

enum { kLookNanoseconds = 100 * 1000 * 1000, kSecond = 1000 * 1000 * 1000 };

static const volatile int64_t* offset_of_file;
static int (*real_cond_timedwait)(pthread_cond_t*, pthread_mutex_t*, const struct timespec*);
static int (*real_sem_timedwait)(sem_t*, const struct timespec*);

__attribute__((constructor)) static void begin(void) {
  /* Without its version, dlsym may give the symbol of an older ABI. */
  *(void**)&real_cond_timedwait = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  if (real_cond_timedwait == NULL)
    *(void**)&real_cond_timedwait = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  *(void**)&real_sem_timedwait = dlsym(RTLD_NEXT, "sem_timedwait");
  const char* path = getenv("FAULTS_CLOCK");
  if (path == NULL) return;
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) abort();
  void* mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED) abort();
  close(file);
  offset_of_file = mapped;
}

static int64_t offset(void) { return offset_of_file == NULL ? 0 : *offset_of_file; }

int clock_gettime(clockid_t clock, struct timespec* now) {
  const int result = (int)syscall(SYS_clock_gettime, clock, now);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    now->tv_sec += offset();
  return result;
}

int gettimeofday(struct timeval* now, void* zone) {
  (void)zone;
  struct timespec precise;
  clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* result) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result != NULL) *result = now.tv_sec;
  return now.tv_sec;
}

/* A wait of a monotonic clock counts from the start of the machine. */
static int is_wall_clock(const struct timespec* until) { return until->tv_sec > 1000000000; }

static int is_over(const struct timespec* until) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec > until->tv_sec ||
         (now.tv_sec == until->tv_sec && now.tv_nsec >= until->tv_nsec);
}

/* The kernel's time of the next look at the offset. */
static struct timespec next_look(void) {
  struct timespec look;
  syscall(SYS_clock_gettime, CLOCK_REALTIME, &look);
  look.tv_nsec += kLookNanoseconds;
  if (look.tv_nsec >= kSecond) {
    look.tv_nsec -= kSecond;
    ++look.tv_sec;
  }
  return look;
}

/* Wakes up without a reason, as it may, to look at the offset again. */
int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                           const struct timespec* until) {
  if (!is_wall_clock(until)) return real_cond_timedwait(condition, mutex, until);
  if (is_over(until)) return ETIMEDOUT;
  const struct timespec look = next_look();
  const int result = real_cond_timedwait(condition, mutex, &look);
  return result == ETIMEDOUT && !is_over(until) ? 0 : result;
}

int sem_timedwait(sem_t* semaphore, const struct timespec* until) {
  for (;;) {
    if (sem_trywait(semaphore) == 0) return 0;
    if (is_over(until)) {
      errno = ETIMEDOUT;
      return -1;
    }
    const struct timespec look = next_look();
    if (real_sem_timedwait(semaphore, &look) == 0) return 0;
    if (errno != ETIMEDOUT) return -1;
  }
}
