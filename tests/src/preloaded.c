/* Loaded before the C library, this lets syncs fail while the file named by FAILING_SYNCS exists, and adds the seconds in
 * the file named by CLOCK_SHIFT to the calendar time. Other clocks stay. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static int sync_with(const char *name, int file)
{
	const char *mark = getenv("FAILING_SYNCS");
	if (mark && access(mark, F_OK) == 0) {
		errno = EIO;
		return -1;
	}
	int (*original)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
	return original(file);
}

int fsync(int file)
{
	return sync_with("fsync", file);
}

int fdatasync(int file)
{
	return sync_with("fdatasync", file);
}

static long shift(void)
{
	const char *path = getenv("CLOCK_SHIFT");
	int before = errno, file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	char text[32] = "";
	if (0 <= file) {
		ssize_t ignored = read(file, text, sizeof text - 1);
		(void)ignored;
		close(file);
	}
	errno = before;
	return atol(text);
}

int clock_gettime(clockid_t clock, struct timespec *time)
{
	static int (*original)(clockid_t, struct timespec *);
	if (!original)
		original = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
	int result = original(clock, time);
	if (result == 0 && clock == CLOCK_REALTIME)
		time->tv_sec += shift();
	return result;
}
