/* Stands before libc (LD_PRELOAD): records what a process changes below $FAULT_ROOT, and lets one change fail.
 *
 * Every call that changes a file or a directory there, or flushes it, counts. With $FAULT_LOG each that succeeds is
 * appended to that file: "C path" created, "T path size" cut, "W path offset length" and the bytes, "R old new" renamed,
 * "U path" unlinked, "M path" and "D path" a directory made and removed, "S path" flushed; tabs between, a newline after.
 * With $FAULT_AT the call of that number, from 1, fails as $FAULT_KIND says: "io" and "interrupted" once, "full" it and
 * all that write after it, "short" writes half, "kill" ends the process, in the middle of a write.
 *
 * Left out: mmap, sendfile, writev, and files that safetensors itself writes, by system calls of its own.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static pid_t owner;
static long count;
static int log_file = -1;

/* Whether a path is below the root. After a fork counting begins anew. */
static int ours(const char *path) {
    const char *root = getenv("FAULT_ROOT");
    if (!root || strncmp(path, root, strlen(root)) != 0) return 0;
    if (owner != getpid()) {
        const char *log = getenv("FAULT_LOG");
        owner = getpid();
        count = 0;
        log_file = log ? (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0644) : -1;
    }
    return 1;
}

static void absolute(int directory, const char *path, char *out) {
    char link[64];
    ssize_t length = 0;
    if (path[0] != '/') {
        if (directory == AT_FDCWD) {
            if (syscall(SYS_getcwd, out, PATH_MAX) > 0) length = (ssize_t)strlen(out);
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
            length = readlink(link, out, PATH_MAX - 1);
        }
        if (length < 0) length = 0;
        out[length++] = '/';
    }
    snprintf(out + length, (size_t)(PATH_MAX - length), "%s", path);
}

static void of_file(int file, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, out, PATH_MAX - 1);
    out[length < 0 ? 0 : length] = 0;
}

static void say(const char *format, ...) {
    char line[2 * PATH_MAX + 64];
    va_list arguments;
    int saved = errno;
    if (log_file < 0) return;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    if (syscall(SYS_write, log_file, line, (size_t)length) < 0) abort();
    errno = saved;
}

/* What a call takes of the disk: nothing new, bytes, or room for a name. */
enum { NOTHING, BYTES, ROOM };

/* 0: go on; 1: half of it, for bytes; -1: fail, errno is set. */
static int fault(int takes) {
    const char *at = getenv("FAULT_AT"), *kind = getenv("FAULT_KIND");
    count++;
    if (!at || !kind || count < atol(at)) return 0;
    int here = count == atol(at);
    if (!strcmp(kind, "full") && takes) { errno = ENOSPC; return -1; }
    if (!here) return 0;
    if (!strcmp(kind, "io")) { errno = EIO; return -1; }
    if (!strcmp(kind, "interrupted") && takes == BYTES) { errno = EINTR; return -1; }
    if (!strcmp(kind, "short") && takes == BYTES) return 1;
    if (!strcmp(kind, "kill")) { if (takes == BYTES) return 1; raise(SIGKILL); }
    return 0;
}

static int opened(int directory, const char *path, int flags, mode_t mode) {
    char whole[PATH_MAX];
    struct stat found;
    absolute(directory, path, whole);
    if (!(flags & (O_CREAT | O_TRUNC)) || !ours(whole))
        return (int)syscall(SYS_openat, directory, path, flags, mode);
    int there = stat(whole, &found) == 0;
    if (there && !(flags & O_TRUNC)) return (int)syscall(SYS_openat, directory, path, flags, mode);
    if (fault(ROOM) < 0) return -1;
    int file = (int)syscall(SYS_openat, directory, path, flags, mode);
    if (file >= 0) there ? say("T\t%s\t0\n", whole) : say("C\t%s\n", whole);
    return file;
}

#define MODE(flags) mode_t mode = 0; if ((flags) & (O_CREAT | O_TMPFILE)) { \
    va_list a; va_start(a, flags); mode = (mode_t)va_arg(a, int); va_end(a); }
int open(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags | O_LARGEFILE, mode); }
int openat(int d, const char *path, int flags, ...) { MODE(flags) return opened(d, path, flags, mode); }
int openat64(int d, const char *path, int flags, ...) { MODE(flags) return opened(d, path, flags | O_LARGEFILE, mode); }

/* `how` comes from `fault`; `done` bytes were written from `place` on. */
static ssize_t wrote(const char *path, int how, ssize_t done, off_t place, const void *data) {
    if (done > 0) {
        say("W\t%s\t%lld\t%lld\n", path, (long long)place, (long long)done);
        if (log_file >= 0 && syscall(SYS_write, log_file, data, (size_t)done) != done) abort();
    }
    if (how && !strcmp(getenv("FAULT_KIND"), "kill")) raise(SIGKILL);
    return done;
}

ssize_t write(int file, const void *data, size_t length) {
    REAL(write);
    char path[PATH_MAX];
    of_file(file, path);
    if (!length || !ours(path)) return real(file, data, length);
    int how = fault(BYTES);
    if (how < 0) return -1;
    ssize_t done = real(file, data, how ? (length + 1) / 2 : length);
    return wrote(path, how, done, done > 0 ? lseek(file, 0, SEEK_CUR) - done : 0, data);
}

#define WRITE_AT(name, type) ssize_t name(int file, const void *data, size_t length, type place) { REAL(name); \
    char path[PATH_MAX]; of_file(file, path); \
    if (!length || !ours(path)) return real(file, data, length, place); \
    int how = fault(BYTES); if (how < 0) return -1; \
    return wrote(path, how, real(file, data, how ? (length + 1) / 2 : length, place), (off_t)place, data); }
WRITE_AT(pwrite, off_t)
WRITE_AT(pwrite64, off64_t)

#define CUT(name, type) int name(int file, type size) { REAL(name); char path[PATH_MAX]; of_file(file, path); \
    if (!ours(path)) return real(file, size); \
    if (fault(ROOM) < 0) return -1; \
    int result = real(file, size); if (!result) say("T\t%s\t%lld\n", path, (long long)size); return result; }
CUT(ftruncate, off_t)
CUT(ftruncate64, off64_t)

#define FLUSH(name) int name(int file) { REAL(name); char path[PATH_MAX]; of_file(file, path); \
    if (!ours(path)) return real(file); \
    if (fault(NOTHING) < 0) return -1; \
    int result = real(file); if (!result) say("S\t%s\n", path); return result; }
FLUSH(fsync)
FLUSH(fdatasync)

static int renamed(int from, const char *old, int to, const char *new) {
    char before[PATH_MAX], after[PATH_MAX];
    absolute(from, old, before);
    absolute(to, new, after);
    int watched = ours(before) || ours(after);
    if (watched && fault(NOTHING) < 0) return -1;
    int result = (int)syscall(SYS_renameat2, from, old, to, new, 0);
    if (!result && watched) say("R\t%s\t%s\n", before, after);
    return result;
}
int rename(const char *old, const char *new) { return renamed(AT_FDCWD, old, AT_FDCWD, new); }
int renameat(int from, const char *old, int to, const char *new) { return renamed(from, old, to, new); }

static int gone(int directory, const char *path, int flags) {
    char whole[PATH_MAX];
    absolute(directory, path, whole);
    int watched = ours(whole);
    if (watched && fault(NOTHING) < 0) return -1;
    int result = (int)syscall(SYS_unlinkat, directory, path, flags);
    if (!result && watched) say("%s\t%s\n", flags & AT_REMOVEDIR ? "D" : "U", whole);
    return result;
}
int unlink(const char *path) { return gone(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return gone(AT_FDCWD, path, AT_REMOVEDIR); }
int unlinkat(int directory, const char *path, int flags) { return gone(directory, path, flags); }

static int made(int directory, const char *path, mode_t mode) {
    char whole[PATH_MAX];
    absolute(directory, path, whole);
    int watched = ours(whole);
    if (watched && fault(ROOM) < 0) return -1;
    int result = (int)syscall(SYS_mkdirat, directory, path, mode);
    if (!result && watched) say("M\t%s\n", whole);
    return result;
}
int mkdir(const char *path, mode_t mode) { return made(AT_FDCWD, path, mode); }
int mkdirat(int directory, const char *path, mode_t mode) { return made(directory, path, mode); }
