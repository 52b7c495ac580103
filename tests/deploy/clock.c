/* SPDX-License-Identifier: Apache-2.0
 * A date that a file moves: preloaded, it adds the file's number of seconds to the time of day, and to nothing else
 * (the monotonic clock and sleeping are left alone). FEDSIM would be left out of a child's environment, so: CLOCK_FILE.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

typedef int (*gettime)(clockid_t, struct timespec *);

static int real(clockid_t clock, struct timespec *when) {
    static gettime next = NULL;
    if (!next) next = (gettime)dlsym(RTLD_NEXT, "clock_gettime");
    return next(clock, when);
}

static long offset(void) {
    long seconds = 0;
    const char *name = getenv("CLOCK_FILE");
    FILE *file = name ? fopen(name, "r") : NULL;
    if (file) {
        if (fscanf(file, "%ld", &seconds) != 1) seconds = 0;
        fclose(file);
    }
    return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *when) {
    int result = real(clock, when);
    if (!result && clock == CLOCK_REALTIME) when->tv_sec += offset();
    return result;
}

int gettimeofday(struct timeval *restrict when, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    when->tv_sec = now.tv_sec;
    when->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *when) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (when) *when = now.tv_sec;
    return now.tv_sec;
}
